"""mt.stream: a module becomes a streamed one, in place, and back; the runtime ties all rooms before together. Looks
at plans, optim and before.
"""
