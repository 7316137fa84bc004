"""The verbs of the `megatrain` command, a file each: `add` tells the parser, `run` does it.

settings.py is what a training run was asked for, data.py makes rows of tokens, folder.py knows a run's folder.
"""
