"""Training on disk: what is saved, in which files, and how it is found again. Looks at model and before."""
