"""mt.AdamW's update of parameters that are not streamed, to the bits of a streamed one's where those are 16-bit."""
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..store.guard import values_of
from ..store.records import dense_stride
from .states import CODES, MOMENTS, check_scales, count_of, decoded

HALVES = (torch.bfloat16, torch.float16)


def fp32_like(p: Tensor) -> Tensor:
    """[shape] fp32, or fp64 of an fp64 parameter: of p's order in memory, without gaps."""
    kind = torch.float32 if p.dtype in HALVES else p.dtype
    return torch.empty_strided(p.shape, dense_stride(p), dtype=kind, device=p.device)


def load_other(p: Tensor, values: dict[str, Any]) -> dict[str, Any]:
    """From a state_dict, of any format."""
    check_scales("a parameter that is not streamed", p.numel(), values)
    found = {"step": torch.as_tensor(values["step"]).clone()}
    moments = (decoded(p.shape, dense_stride(p), values) if CODES[0] in values else
               [values_of(values[name]) for name in MOMENTS])
    found.update((name, fp32_like(p).copy_(value)) for name, value in zip(MOMENTS, moments))
    if "master" in values and p.dtype in HALVES:
        found["master"] = fp32_like(p).copy_(values_of(values["master"]))
    return found


def _narrowed(master: Tensor, kind: torch.dtype) -> Tensor:
    """The 16-bit weight of a master: to nearest, bf16 with ties away from zero, as split weights have it."""
    if kind == torch.float16:
        return master.to(kind)
    near = (master.view(torch.int32) + 0x8000 >> 16).to(torch.int16).view(torch.bfloat16)
    most = torch.finfo(torch.bfloat16).max
    return torch.where(master.isfinite(), near.clamp(-most, most), master.to(kind))


def step_other(p: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
    """One update. 16-bit parameters get the bits of a streamed one's; others have torch's own functions."""
    if not state:
        state.update(step=torch.zeros(()), **{name: torch.zeros_like(fp32_like(p)) for name in MOMENTS})
    if not isinstance(state["step"], Tensor):
        state["step"] = torch.tensor(float(count_of(state["step"], "a parameter that is not streamed")))
    if p.dtype not in HALVES:
        b1, b2 = group["betas"]
        torch.optim._functional.adamw(       # counts the step itself
            [p], [p.grad], [state["exp_avg"]], [state["exp_avg_sq"]], [], [state["step"]], foreach=False, amsgrad=False,
            beta1=b1, beta2=b2, lr=float(group["lr"]), weight_decay=group["weight_decay"], eps=group["eps"],
            maximize=group["maximize"])
        return
    if "master" not in state:
        state["master"] = fp32_like(p).copy_(p)
    master, grad = state["master"], fp32_like(p).copy_(p.grad)
    # Where the weight is not its master's, it was set from outside.
    master.copy_(torch.where((_narrowed(master, p.dtype) == p).all(), master, p.float()))
    if group["maximize"]:
        grad.neg_()
    state["step"] += 1
    flat = [t.as_strided((t.numel(),), (1,)) for t in (master, *(state[name] for name in MOMENTS), grad)]
    torch.ops.megatrain.adamw_(flat[0], None, *flat[1:], float(group["lr"]), *group["betas"], group["eps"],
                               group["weight_decay"], int(state["step"]), 1.0)
    p.copy_(_narrowed(master, p.dtype))
