"""The process that torchrun runs in: where it is killed, nobody is left to end its workers, or to start them again."""
from __future__ import annotations

import os
import signal
import sys
import threading
import time

_EVERY_S = 1.0
_watching = threading.Lock()             # taken for good by the first


def watch() -> None:
    """Where torchrun started this process, it ends with it, by SIGTERM, as torchrun would end it."""
    if "TORCHELASTIC_RUN_ID" in os.environ and _watching.acquire(blocking=False):
        threading.Thread(target=_look, args=(os.getppid(),), name="mt-launcher", daemon=True).start()


def _look(launcher: int) -> None:
    while os.getppid() == launcher:
        time.sleep(_EVERY_S)
    print(f"megatrain_torch: the launcher (process {launcher}) ended, and so does rank {os.environ.get('RANK', '?')}",
          file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGTERM)
