"""Proofs that a module's own code computes what a template stands for (docs/design.md, section 8).

prove      a module's graph, as torch._dynamo reads it (graph/reader.py), against its template, put together from forms
values     expressions and their numbers
experts    loops over experts, known by their text
"""
