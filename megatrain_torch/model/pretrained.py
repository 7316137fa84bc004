"""mt.from_pretrained: a saved transformers model into the store, with one model in host memory at the most."""
from __future__ import annotations

import contextlib
import importlib
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..base.codes import coded
from ..group.ranks import as_one, ranks_of
from ..group.waits import calling
from ..plans.planner import Plan
from ..plans.shapes import shaped
from ..store.bases import expands, with_base
from .stream import stream_of


@calling("mt.from_pretrained")
def from_pretrained(cls: Any, path: str | Path, *, device: str | torch.device | None = None,
                    tokens: int | None = None, seq: int | None = None, vram: int | str | None = None,
                    host: int | str | None = None, nvme: str | dict[str, Any] | None = None,
                    states: str | None = None, dtype: torch.dtype | None = None,
                    units: list[str | nn.Module] | None = None, compute: str = "auto",
                    products: str | None = None, plan: Plan | dict[str, Any] | None = None, group: Any = None,
                    reduce: str = "mean", base: str | None = None, adapter: Any = None, **kwargs: Any) -> Any:
    """`cls.from_pretrained(path)` and `mt.stream` of it.

    transformers does its part as ever: names, ties, experts put together, what is missing or unexpected reported. It
    builds the model on the meta device and maps the files; their bytes are then read straight into the store
    (store/tensorfiles.py). What it has to convert is in memory for that long, of several processes of a machine in the
    first.

    Args:
        cls: AutoModelForCausalLM, or any class with from_pretrained. path: a folder, or what it takes.
        dtype: of the streamed weights; None: the files'. From fp32 files to torch.bfloat16, mt.AdamW has exact fp32
            masters.
        device, tokens, seq, vram, host, nvme, states, units, compute, products, plan, group, reduce: as for mt.stream.
        base: frozen weights of linear layers as codes, quantised a tensor at a time while they are read: "nf4" and
            "int8" by bitsandbytes, the former of experts in one tensor too, "fp8" in blocks of 128 by 128; "fp8" and
            "mxfp4" keep what a checkpoint has so.
        adapter: a config of PEFT's: the model gets that adapter before it is streamed.
        kwargs: for cls.from_pretrained. With output_loading_info=True its report is returned too.

    Returns:
        The streamed model; (model, report) with output_loading_info=True.

    Raises:
        MegatrainError: as mt.stream.
    """
    ranks = ranks_of(group)
    with as_one(ranks):
        if base is None:
            found = loaded(cls, path, ranks is None or ranks.rank == ranks.mates[0], dtype="auto", **kwargs)
        else:
            found, dtype = with_base(cls, path, base, dtype, **kwargs), None
    model, *report = found if isinstance(found, tuple) else (found,)
    if adapter is not None:
        model = importlib.import_module("peft").get_peft_model(model, adapter)
    stream_of(ranks, model, device, vram=vram, host=host, nvme=nvme, units=units, masters=True, reduce=reduce,
              tokens=tokens, seq=seq, states=states, dtype=dtype, compute=compute, products=products, plan=plan)
    return (model, *report) if report else model


def from_config(config: Any, *, base: str | None = None, layers: int | None = None) -> nn.Module:
    """A language model of a transformers config on the meta device: to plan for, or to find places for adapters.

    Args:
        base: linear weights have the form of codes, as for mt.from_pretrained. layers: instead of the config's number.

    Raises:
        MegatrainError: as mt.from_pretrained of `base`.
    """
    return shaped(config, base, layers)


def read_pretrained(cls: Any, path: str | Path, *, base: str | None = None, dtype: Any = "auto", values: bool = True,
                    **kwargs: Any) -> Any:
    """`cls.from_pretrained(path)` on the CPU, not streamed: for mt.stream_trainer, or to be changed before mt.stream.

    Args:
        base: frozen weights of linear layers as codes, as for mt.from_pretrained; "whole": weights of 16 bits, where
            the files have codes of them.
        dtype: of the weights; "auto": the files'.
        values: False: the model may be left on the meta device: another process has its values.
        kwargs: for cls.from_pretrained.

    Raises:
        MegatrainError: as mt.from_pretrained of `base`.
    """
    if base not in (None, "whole"):
        return with_base(cls, path, base, None if dtype == "auto" else dtype, **kwargs)
    if base == "whole":
        kwargs |= expands(importlib.import_module("transformers").AutoConfig.from_pretrained(path))
    return loaded(cls, path, values, dtype=dtype, **kwargs)


def loaded(cls: Any, path: str | Path, has_values: bool, **kwargs: Any) -> Any:
    """cls.from_pretrained. has_values: else the model may be left on the meta device, and is where transformers knows
    how."""
    if not has_values and _knows_meta(cls, kwargs):
        with contextlib.suppress(Exception):             # what it raises is said by the way that all know
            found = cls.from_pretrained(path, **kwargs, device_map="meta")
            if not any(True for _ in coded(found[0] if isinstance(found, tuple) else found)):     # no codes are there
                return found
    return cls.from_pretrained(path, **kwargs)


def _knows_meta(cls: Any, asked: dict[str, Any]) -> bool:
    tf = sys.modules.get("transformers")
    stock = tf is not None and isinstance(cls, type) and (
        issubclass(cls, tf.PreTrainedModel) or cls.__module__.startswith("transformers.models.auto."))
    return stock and not asked.keys() & {"device_map", "quantization_config", "gguf_file", "state_dict", "tp_plan"}
