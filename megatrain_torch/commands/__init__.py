"""The verbs of the `megatrain` command. They use megatrain_torch by its public names alone.

    settings.py    what is asked for: flags, YAML, defaults         folder.py    a run's folder, and what it made there
    records.py     records of files, and what they ask              models.py    models by name, adapters, exports
    chats.py       conversations by a chat template                 launch.py    a process for each GPU
    data.py        records as tokens, of several sources            loop.py      trainers of TRL, ours in front
    rows.py        tokens as rows, and who may share one            train.py     train and resume
    plan.py        plan                                             verbs.py     eval, generate, export, report, doctor
"""
