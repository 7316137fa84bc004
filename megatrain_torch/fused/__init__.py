"""What runs a window in place of its module's own code, and the proof that it may: templates with an explicit
backward, the head whose logits are not made. Looks at graph and before.
"""
