"""megatrain_torch: train models far larger than the GPU, on one GPU, in full precision.

    import megatrain_torch as mt
    model = mt.stream(model, device="cuda")
    opt = mt.AdamW(model.parameters(), lr=1e-5, max_grad_norm=1.0)
"""
from ._core import __version__
from .api import explain, gather, last_step, masters
from .checkpoint import SavePlan, Saving, save
from .errors import MegatrainError
from .machine import Machine
from .optim import AdamW
from .planner import Plan, plan
from .pretrained import from_pretrained
from .report import StepReport
from .restore import load
from .storage import Storage, storage
from .tracing import Trace, trace
from .wrap import stream, unstream

__all__ = ["AdamW", "Machine", "MegatrainError", "Plan", "SavePlan", "Saving", "StepReport", "Storage", "Trace",
           "__version__", "explain", "from_pretrained", "gather", "last_step", "load", "masters", "plan", "save",
           "storage", "stream", "trace", "unstream"]
