"""Proofs that a module's own code computes what a template stands for (docs/design.md, section 8).

case       what a proof holds for: structures and calls
watch      is a module still the one that was proved?
prove      a module against its template. What follows is imported when the first is tried:
values     expressions and their numbers; session: fake tensors of symbolic sizes
python     is the Python that ran a function of its tensors?
forms      what templates stand for, in plain torch; layer: put together; experts: loops, by their text
"""
