"""What a streamed model says of itself: explain, traces, storage, the last step. Looks at model and before."""
