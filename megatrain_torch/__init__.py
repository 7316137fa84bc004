"""megatrain_torch: train models far larger than the GPU, on one GPU, in full precision.

    import megatrain_torch as mt
    model = mt.stream(model, device="cuda")
    opt = mt.AdamW(model.parameters(), lr=1e-5, max_grad_norm=1.0)
"""
import os
import signal
import sys

if (sys.argv[:1] == ["-m"] and __name__ in sys.orig_argv) or os.path.basename(sys.argv[0]) == "megatrain":
    # The command line: Ctrl-C while torch is imported ends it with a word, not with where the import was.
    def interrupted(*_: object) -> None:
        if "MEGATRAIN_LAUNCHER" not in os.environ:       # else one of several, and who started them says it
            os.write(2, b"megatrain: interrupted\n")
        os._exit(130)

    signal.signal(signal.SIGINT, interrupted)

# In CUDA's default of 8 hardware queues, more than a dozen streams wait for each other. CUDA reads this when it starts.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")

from ._core import __version__
from .base.errors import MegatrainError
from .base.limits import parse_bytes, show_bytes
from .checkpoint.restore import CheckpointInfo, checkpoint_bytes, inspect_checkpoint, load
from .checkpoint.save import Saving, save
from .figures.report import StepReport
from .model.stream import from_config, from_pretrained, read_pretrained, stream, stream_trainer, unstream
from .optim.adamw import AdamW
from .plans.machine import Machine
from .plans.planner import Plan, plan
from .reports.api import Storage, Trace, choices, explain, gather, last_step, masters, measure_machine, storage, trace

__all__ = ["AdamW", "CheckpointInfo", "Machine", "MegatrainError", "Plan", "Saving", "StepReport", "Storage", "Trace",
           "__version__", "checkpoint_bytes", "choices", "explain", "from_config", "from_pretrained", "gather",
           "inspect_checkpoint", "last_step", "load", "masters", "measure_machine", "parse_bytes", "plan",
           "read_pretrained", "save", "show_bytes", "storage", "stream", "stream_trainer", "trace", "unstream"]
