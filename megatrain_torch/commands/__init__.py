"""The verbs of the `megatrain` command, a file each: `add` tells the parser, `run` does it.

settings.py is what a training run was asked for. folder.py knows a run's folder, owned.py what in it the run made and
who writes there. reading.py has records of files, forms.py what they ask, tokens.py texts in passages, data.py makes
rows of them, mixture.py of several sources. inlined.py puts a run's pages into its report.
"""
