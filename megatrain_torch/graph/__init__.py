"""What autograd sees of a streamed model: windows that bind weights for a forward, frames that keep or make again
what backward needs, gradients on their way to the store, masks. Looks at base and store.
"""
