"""The process that started this one, and others beside it: where it is killed, nobody is left to end them."""
from __future__ import annotations

import os
import signal
import sys
import threading
import time

_EVERY_S = 1.0
_watching = threading.Lock()             # taken for good by the first


def watch_torchrun() -> None:
    """Where torchrun started this process, it ends with it."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        watch(os.getppid())


def watch(launcher: int) -> None:
    """This process is told to end, by SIGTERM, when that one, which started it, is gone."""
    if _watching.acquire(blocking=False):
        threading.Thread(target=_look, args=(launcher,), name="mt-launcher", daemon=True).start()


def _look(launcher: int) -> None:
    while os.getppid() == launcher:
        time.sleep(_EVERY_S)
    print(f"megatrain_torch: the launcher (process {launcher}) ended, and so does rank {os.environ.get('RANK', '?')}",
          file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGTERM)
