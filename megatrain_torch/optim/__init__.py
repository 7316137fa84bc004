"""mt.AdamW: what it asks the store to update, clipping, states that are loaded and saved. Looks at store and base."""
