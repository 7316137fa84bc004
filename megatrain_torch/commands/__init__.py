"""The verbs of the `megatrain` command. They use megatrain_torch by its public names alone."""
