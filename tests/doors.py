"""mt.stream with doors of the engine: "debug" in a plan by hand is what megatrain_torch.base.testing takes. And a way to
its scratch files."""
from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

from torch import nn


def stream(model: nn.Module, device: Any = None, *, plan: Any = None, **asked: Any) -> nn.Module:
    import megatrain_torch as mt
    from megatrain_torch.base.testing import engine_doors
    debug = plan.get("debug", {}) if isinstance(plan, dict) else {}
    own = {k: v for k, v in plan.items() if k != "debug"} if isinstance(plan, dict) else plan
    with engine_doors(**debug):
        return mt.stream(model, device, plan=own, **asked)


def scratch_file(path: str) -> Path | None:
    """Where a scratch file of this process can be opened: it has no name. None: there is none of that path."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):     # the listing's own
            if os.readlink(f"/proc/self/fd/{name}") == f"{path} (deleted)":
                return Path("/proc/self/fd", name)
    return None
