"""mt.AdamW: a torch optimizer whose step runs on the host, behind the next forward."""
from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from . import _core
from .errors import MegatrainError
from .guard import StreamedParameter, guard, plain
from .records import DTYPES, Record


class AdamW(torch.optim.Optimizer):
    """AdamW with fp32 states and masters in host memory.

    `step()` returns at once; updates run in forward order, and each unit's next fetch waits for its
    own update only. Reading a parameter or `state_dict()` waits for what it needs.

    bf16 weights get an fp32 master: the weight itself plus 16 bits that continue it (`mt.masters`).
    12 bytes per parameter, 14 with the gradient that waits for the norm. Order of operations, and how
    far from exact: docs/numerics.md. Parameters that are not streamed are updated too, by the same
    arithmetic on the CPU and by torch's on other devices.

    Args:
        params: as in torch: parameters, (name, parameter) pairs, or groups.
        lr, betas, eps, weight_decay, maximize: as in torch.optim.AdamW.
        max_grad_norm: clip the global norm of all gradients to this, exactly, as
            torch.nn.utils.clip_grad_norm_ would; None: no clipping.
        states: "fp32".
        in_backward: update each unit as soon as backward has its gradient, without waiting for
            step(). A promise that every backward() is followed by step() and that nobody reads or
            changes gradients in between; needs max_grad_norm=None.
        nonfinite: a step whose gradients are not finite changes nothing; "skip" counts it
            (`skipped_steps`), "raise" also raises at the next step().

    Raises:
        MegatrainError: an argument outside its range, or an option of torch's AdamW that is not
            supported here (amsgrad, differentiable, capturable).

    Source: Loshchilov & Hutter 2019, Algorithm 2.
    """

    def __init__(self, params: Iterable[Any], lr: float | Tensor = 1e-3, betas: tuple[float, float] = (0.9, 0.999),
                 eps: float = 1e-8, weight_decay: float = 1e-2, *, max_grad_norm: float | None = None,
                 states: str = "fp32", maximize: bool = False, in_backward: bool = False,
                 nonfinite: str = "skip", **torch_only: Any) -> None:
        _check(betas, eps, weight_decay, max_grad_norm, states, in_backward, nonfinite, torch_only)
        self.max_grad_norm = max_grad_norm
        self.skipped_steps = 0
        self._nonfinite, self._in_backward = nonfinite, in_backward
        self._tickets: list[tuple[Any, int]] = []          # (core, ticket) of the last step
        self._settled = True
        self._alive: deque[Any] = deque(maxlen=4)          # host gradients that an update still reads
        self._counts: dict[Tensor, int] = {}
        self._norm: float | None = None
        self._done: set[int] = set()                       # pids updated in the backward under way
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, maximize=maximize))
        for rt in self._runtimes():
            rt.optimizers.add(self)
            if in_backward:
                rt.handover.observer = self._update_now

    # ---- stepping ----

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of every parameter that has a gradient.

        Returns at once, with the closure's result if there is one.

        Raises:
            MegatrainError: a worker failed since the last call; or nonfinite="raise" and the step
                before this one was skipped.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._settle()
        streamed, others = self._collect()
        limit = self.max_grad_norm if self.max_grad_norm else math.inf
        if others and streamed and self.max_grad_norm:
            torch.nn.utils.clip_grad_norm_([p for g in self.param_groups for p in g["params"]], self.max_grad_norm)
            streamed, others = self._collect()
            limit = math.inf
        self._tickets = []
        for rt, units in streamed.items():
            ordered = sorted(units.items())
            self._tickets.append((rt.core, rt.core.adam(ordered, limit)))
            rt.core.kick(rt.stream())
        self._step_others(others)
        self._settled = not self._tickets
        self._done.clear()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in torch; does not wait for gradients that are still on their way."""
        if not set_to_none:
            return super().zero_grad(set_to_none=False)
        with torch._C.DisableTorchFunctionSubclass():
            for group in self.param_groups:
                for p in group["params"]:
                    p.grad = None
        return None

    @property
    def grad_norm(self) -> float | None:
        """Global norm of the last step's gradients before clipping; waits for them. None before the first step."""
        if self._tickets:
            self._norm = math.sqrt(sum(core.norm(t)[0] ** 2 for core, t in self._tickets)) \
                if len(self._tickets) > 1 else self._tickets[0][0].norm(self._tickets[0][1])[0]
        return self._norm

    def _settle(self) -> None:
        """Takes the result of the step before: a skipped one does not count."""
        if self._settled:
            return
        self._settled = True
        skipped = [core.norm(t)[1] for core, t in self._tickets]
        if not any(skipped):
            return
        self.skipped_steps += 1
        for p in self._counts:
            if self._stepped.get(p):
                self._counts[p] -= 1
                self.state[p]["step"] -= 1
        if self._nonfinite == "raise":
            raise MegatrainError(f"step skipped: the global gradient norm was {self.grad_norm}; weights and states are as before")

    _stepped: dict[Tensor, bool] = {}

    # ---- gathering work ----

    def _collect(self) -> tuple[dict[Any, dict[int, list[Any]]], list[tuple[Tensor, dict[str, Any]]]]:
        """({runtime: {unit: [item]}}, [(other parameter, group)]) for parameters with a gradient."""
        streamed: dict[Any, dict[int, list[Any]]] = {}
        others: list[tuple[Tensor, dict[str, Any]]] = []
        steps = []
        self._stepped = {}
        for group in self.param_groups:
            for p in group["params"]:
                if not isinstance(p, StreamedParameter):
                    if p.grad is not None:
                        others.append((p, group))
                    continue
                item = self._item(p, group)
                if item is not None:
                    streamed.setdefault(p._mt.runtime, {}).setdefault(p._mt.unit, []).append(item)
                    steps.append(self.state[p]["step"])
                    self._stepped[p] = True
        if steps:
            torch._foreach_add_(steps, 1)
        return streamed, others

    def _item(self, p: StreamedParameter, group: dict[str, Any]) -> tuple[Any, ...] | None:
        record: Record = p._mt
        with torch._C.DisableTorchFunctionSubclass():
            grad = p.grad
        if grad is None or record.numel == 0 or record.pid in self._done:
            return None
        self._prepare(p, record)
        address, kind, changed = 0, DTYPES[record.dtype], False
        if grad is record.grad_view:
            changed = grad._version != record.grad_version
        else:
            grad = self._own_gradient(record, grad)
            address, kind, changed = grad.data_ptr(), DTYPES[grad.dtype], True
        self._counts[p] = step = self._counts.get(p, 0) + 1
        b1, b2 = group["betas"]
        return (record.index, float(group["lr"]), b1, b2, group["eps"], group["weight_decay"], step,
                int(group["maximize"]), address, kind, int(changed))

    def _own_gradient(self, record: Record, grad: Tensor) -> Tensor:
        """A gradient that the user put there: dense host memory in a type the update reads."""
        grad = plain(grad)
        kind = grad.dtype if grad.dtype in (record.dtype, torch.float32) else torch.float32
        out = torch.empty_strided(record.shape, record.stride, dtype=kind).copy_(grad)
        self._alive.append(out)
        if len(self._alive) == self._alive.maxlen:
            self._alive = deque(self._alive, maxlen=2 * len(self._alive))
        return out

    def _prepare(self, p: StreamedParameter, record: Record) -> None:
        if record.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise MegatrainError(f"{record.name}: AdamW trains fp32, bf16 and fp16 parameters, not {record.dtype}")
        rt = record.runtime
        if record.host._version != record.version:
            rt.after_write(record)
        if p not in self.state:
            self.state[p] = {"step": torch.zeros(()), "exp_avg": guard(record.view("M"), record),
                             "exp_avg_sq": guard(record.view("V"), record)}
            self._counts.setdefault(p, 0)
        if record.dtype == torch.bfloat16 and record.master_writes != record.writes:
            rt.core.wait_updates(record.unit)
            record.view("LO").zero_()            # the weight was set from outside: it is its own master
        record.master_writes = record.writes

    # ---- updating inside backward ----

    @torch.no_grad()
    def _update_now(self, unit: int, records: list[Record]) -> None:
        """A unit's gradients are on their way home: its update follows them. Runs in autograd's thread."""
        groups = {p: g for g in self.param_groups for p in g["params"]}
        items = []
        for r in records:
            if r.param in groups:
                if r.pid in self._done:
                    raise MegatrainError(f"{r.name}: a second backward before step(); in_backward=True updates at every "
                                         "backward, so accumulate with in_backward=False")
                items.append((r.param, self._item(r.param, groups[r.param])))
        wanted = [i for _, i in items if i is not None]
        if wanted:
            records[0].runtime.core.adam([(unit, wanted)], 0.0)
            torch._foreach_add_([self.state[p]["step"] for p, i in items if i is not None], 1)
            self._done.update(p._mt.pid for p, i in items if i is not None)

    # ---- parameters that are not streamed ----

    def _step_others(self, others: list[tuple[Tensor, dict[str, Any]]]) -> None:
        if not others:
            return
        if self.max_grad_norm and not self._tickets:
            self._norm = float(torch.nn.utils.clip_grad_norm_([p for p, _ in others], self.max_grad_norm))
        for p, group in others:
            state = self.state[p]
            if not state:
                state.update(step=torch.zeros(()), exp_avg=torch.zeros_like(p, dtype=torch.float32),
                             exp_avg_sq=torch.zeros_like(p, dtype=torch.float32))
            state["step"] += 1
            _adamw_plain(p, state, group)

    # ---- saving and loading ----

    def state_dict(self) -> dict[str, Any]:
        """As in torch; with `master` (fp32 values) beside the states of 16-bit parameters. Waits for updates."""
        for rt in self._runtimes():
            rt.core.drain()
        self._settle_quietly()
        out = super().state_dict()
        index = {id(p): i for i, p in enumerate(p for g in self.param_groups for p in g["params"])}
        for p, s in self.state.items():
            if isinstance(p, StreamedParameter) and p._mt.dtype != torch.float32 and s:
                out["state"][index[id(p)]] = {**s, "master": master(p)}
        return out

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes a state_dict of mt.AdamW or torch.optim.AdamW into the store.

        Raises:
            ValueError: groups or sizes do not match, as in torch.
        """
        for rt in self._runtimes():
            rt.core.drain()
        saved = {k: v for k, v in state_dict.items() if k != "state"}
        flat = [p for g in self.param_groups for p in g["params"]]
        super().load_state_dict({**saved, "state": {}})
        for index, values in state_dict["state"].items():
            self._load_one(flat[index], values)

    def _load_one(self, p: Tensor, values: dict[str, Any]) -> None:
        if not isinstance(p, StreamedParameter):
            self.state[p] = {k: v.clone() if isinstance(v, Tensor) else v for k, v in values.items()}
            return
        record = p._mt
        with torch.no_grad():
            self.state[p] = {"step": torch.as_tensor(float(values["step"])),
                             "exp_avg": guard(record.view("M"), record), "exp_avg_sq": guard(record.view("V"), record)}
            record.view("M").copy_(plain(values["exp_avg"]))
            record.view("V").copy_(plain(values["exp_avg_sq"]))
            self._counts[p] = int(values["step"])
            if "master" in values:
                set_master(p, values["master"])

    def _settle_quietly(self) -> None:
        raises, self._nonfinite = self._nonfinite, "skip"
        try:
            self._settle()
        finally:
            self._nonfinite = raises

    def _runtimes(self) -> list[Any]:
        found = {id(p._mt.runtime): p._mt.runtime for g in self.param_groups for p in g["params"]
                 if isinstance(p, StreamedParameter)}
        return list(found.values())


def _check(betas: Any, eps: float, weight_decay: float, max_grad_norm: float | None, states: str,
           in_backward: bool, nonfinite: str, torch_only: dict[str, Any]) -> None:
    refused = {"amsgrad", "differentiable", "capturable"}
    for name, value in torch_only.items():
        if name not in refused | {"foreach", "fused"}:
            raise TypeError(f"AdamW() got an unexpected keyword argument {name!r}")
        if value and name in refused:
            raise MegatrainError(f"AdamW({name}=True) is not supported; use torch.optim.AdamW on the host tensors for that")
    if not all(0.0 <= b < 1.0 for b in betas) or eps < 0 or weight_decay < 0:
        raise MegatrainError(f"AdamW: betas={betas}, eps={eps}, weight_decay={weight_decay}: betas in [0, 1), the others >= 0")
    if max_grad_norm is not None and not max_grad_norm > 0:
        raise MegatrainError(f"AdamW: max_grad_norm={max_grad_norm} must be > 0, or None for no clipping")
    if states != "fp32":
        raise MegatrainError(f"AdamW: states={states!r}: this version keeps 'fp32' states")
    if in_backward and max_grad_norm is not None:
        raise MegatrainError("AdamW: in_backward=True cannot clip: the norm is known only when backward ends")
    if nonfinite not in ("skip", "raise"):
        raise MegatrainError(f"AdamW: nonfinite={nonfinite!r}: 'skip' or 'raise'")


def master(p: StreamedParameter) -> Tensor:
    """The fp32 value of a streamed parameter: [shape] fp32, a copy. Waits for its update."""
    record: Record = p._mt
    record.runtime.core.wait_updates(record.unit)
    if record.dtype == torch.bfloat16 and record.master_writes == record.writes and record.master_writes >= 0:
        out = torch.empty_strided(record.shape, record.stride, dtype=torch.float32)
        _core.split_join(record.host.data_ptr(), record.view("LO").data_ptr(), out.data_ptr(), record.numel)
        return out
    if record.dtype == torch.float16 and record.master_writes == record.writes:
        return record.view("MASTER").clone()
    return record.host.to(torch.float32, copy=True)


def set_master(p: StreamedParameter, value: Tensor) -> None:
    """Sets weight and master from fp32 values. value: [shape]."""
    record: Record = p._mt
    value = torch.empty_strided(record.shape, record.stride, dtype=torch.float32).copy_(plain(value))
    record.runtime.before_write(record)
    with torch.no_grad():
        if record.dtype == torch.bfloat16:
            _core.split_set(value.data_ptr(), record.host.data_ptr(), record.view("LO").data_ptr(), record.numel)
        else:
            record.host.copy_(value)
            if record.dtype == torch.float16:
                record.view("MASTER").copy_(value)
    record.runtime.after_write(record)
    record.master_writes = record.writes


def _adamw_plain(p: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
    b1, b2 = group["betas"]
    torch.optim._functional.adamw(
        [p], [p.grad], [state["exp_avg"]], [state["exp_avg_sq"]], [], [state["step"]], foreach=False,
        amsgrad=False, beta1=b1, beta2=b2, lr=float(group["lr"]), weight_decay=group["weight_decay"], eps=group["eps"],
        maximize=group["maximize"])
