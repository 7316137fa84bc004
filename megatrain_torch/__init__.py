"""megatrain_torch: train models far larger than the GPU, on one GPU, in full precision.

    import megatrain_torch as mt
    model = mt.stream(model, device="cuda")
    opt = mt.AdamW(model.parameters(), lr=1e-5, max_grad_norm=1.0)
"""
from ._core import __version__
from .api import StepReport, explain, gather, last_step, masters
from .errors import MegatrainError
from .machine import Machine
from .optim import AdamW
from .planner import Plan, plan
from .wrap import stream, unstream

__all__ = ["AdamW", "Machine", "MegatrainError", "Plan", "StepReport", "__version__", "explain", "gather", "last_step",
           "masters", "plan", "stream", "unstream"]
