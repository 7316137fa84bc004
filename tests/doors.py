"""mt.stream with doors of the engine: "debug" in a plan by hand is what megatrain_torch.base.testing takes."""
from __future__ import annotations

from typing import Any

from torch import nn


def stream(model: nn.Module, device: Any = None, *, plan: Any = None, **asked: Any) -> nn.Module:
    import megatrain_torch as mt
    from megatrain_torch.base.testing import engine_doors
    debug = plan.get("debug", {}) if isinstance(plan, dict) else {}
    own = {k: v for k, v in plan.items() if k != "debug"} if isinstance(plan, dict) else plan
    with engine_doors(**debug):
        return mt.stream(model, device, plan=own, **asked)
