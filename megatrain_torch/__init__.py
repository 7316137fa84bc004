"""megatrain_torch: train models far larger than the GPU, on one GPU, in full precision.

    import megatrain_torch as mt
    model = mt.stream(model, device="cuda")
    opt = mt.AdamW(model.parameters(), lr=1e-5, max_grad_norm=1.0)
"""
from ._core import __version__
from .api import StepReport, explain, gather, last_step, masters
from .errors import MegatrainError
from .optim import AdamW
from .wrap import stream, unstream

__all__ = ["AdamW", "MegatrainError", "StepReport", "__version__", "explain", "gather", "last_step", "masters",
           "stream", "unstream"]
