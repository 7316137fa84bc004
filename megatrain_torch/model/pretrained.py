"""mt.from_pretrained: a saved transformers model into the store, with one model in host memory at the most."""
from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..plans.planner import Plan
from .stream import stream


def from_pretrained(cls: Any, path: str | Path, *, device: str | torch.device | None = None,
                    tokens: int | None = None, seq: int | None = None, vram: int | str | None = None,
                    host: int | str | None = None, nvme: str | dict[str, Any] | None = None,
                    states: str | None = None, dtype: torch.dtype | None = None,
                    units: list[str | nn.Module] | None = None, compute: str = "auto",
                    products: str | None = None, plan: Plan | dict[str, Any] | None = None, group: Any = None,
                    reduce: str = "mean",
                    **kwargs: Any) -> Any:
    """`cls.from_pretrained(path)` and `mt.stream` of it.

    transformers does its part as ever: names, ties, experts put together, what is missing or unexpected reported. It
    builds the model on the meta device and maps the files; their bytes are then read straight into the store
    (mapped.py). What it has to convert is in memory for that long.

    Args:
        cls: AutoModelForCausalLM, or any class with from_pretrained. path: a folder, or what it takes.
        dtype: of the streamed weights; None: the files'. From fp32 files to torch.bfloat16, mt.AdamW has exact fp32
            masters.
        device, tokens, seq, vram, host, nvme, states, units, compute, products, plan, group, reduce: as for mt.stream.
        kwargs: for cls.from_pretrained. With output_loading_info=True its report is returned too.

    Returns:
        The streamed model; (model, report) with output_loading_info=True.

    Raises:
        MegatrainError: as mt.stream.
    """
    found = cls.from_pretrained(path, dtype="auto", **kwargs)
    model, *report = found if isinstance(found, tuple) else (found,)
    stream(model, device, tokens=tokens, seq=seq, vram=vram, host=host, nvme=nvme, states=states, dtype=dtype,
           units=units, compute=compute, products=products, plan=plan, masters=True, group=group, reduce=reduce)
    return (model, *report) if report else model
