"""The verbs of the `megatrain` command, a file each: `add` tells the parser, `run` does it.

settings.py is what a training run was asked for. folder.py knows a run's folder, owned.py what in it the run made and
who writes there. reading.py has records of files, forms.py what they ask, chats.py conversations by a chat
template, tokens.py texts in passages, data.py makes rows of them, mixture.py of several sources. methods.py says what
TRL trains, loop.py what a run puts in front of TRL's trainers.
"""
