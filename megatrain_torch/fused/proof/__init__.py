"""Proofs that a module's own code computes what a template stands for (docs/design.md, section 8).

prove      a module's graph, as torch._dynamo reads it (graph/reader.py), against its template
values     expressions and their numbers
forms      what templates stand for, in plain torch; layer: put together; experts: loops, by their text
"""
