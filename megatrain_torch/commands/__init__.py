"""The verbs of the `megatrain` command. They use megatrain_torch by its public names alone.

    settings.py    what is asked for: flags, YAML, defaults         folder.py    a run's folder, and what it made there
    records.py     records of files, chats among them               models.py    models by name, adapters, exports
    data.py        records as tokens, and tokens as rows            launch.py    a process for each GPU
    train.py       train and resume                                 loop.py      trainers of TRL, ours in front
    verbs.py       eval, generate, export, plan, doctor
"""
