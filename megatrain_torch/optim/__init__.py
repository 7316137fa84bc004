"""mt.AdamW: what it asks the store to update, clipping, and states that are loaded and saved. Looks at store and
base.
"""
