"""Plain torch against streamed, bit for bit.

A *script* is a function that trains a model and notes what it sees:

    def script(t):
        model = t.stream(tiny_llama())
        opt = t.optimizer(torch.optim.AdamW, model.parameters(), lr=1e-2)
        for step in range(3):
            loss = model(**t.batch(step)).loss
            loss.backward()
            t.note_grads(f"step {step}", model)
            opt.step(); opt.zero_grad()
            t.note(f"step {step} loss", loss)

`run(script, options)` runs it twice with the same seeds: once with `t.stream` leaving the model as
it is, once with `t.stream` streaming it. Every note is compared with torch.equal; the report names
the first that differs. Nothing here knows how streaming is done: `stream_for_test` is the only
function that calls it.

MEGATRAIN_IDENTITY=1 makes `t.stream` leave the model alone in both runs: plain against plain, the
proof that a script can be compared at all. MEGATRAIN_FULL=1 asks the tests for every combination.
"""
from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import itertools
import os
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import doors
import numpy as np
import pytest
import torch
from torch import Tensor, nn

IDENTITY = os.environ.get("MEGATRAIN_IDENTITY") == "1"
FULL = os.environ.get("MEGATRAIN_FULL") == "1"
LONG = pytest.mark.skipif(not FULL, reason="takes long: MEGATRAIN_FULL=1 runs it")


def turns(*axes: Sequence[Any]) -> list[Any]:
    """For parametrize: each value of two axes in its turn, the first value of one axis; all with MEGATRAIN_FULL=1."""
    return [pytest.param(*(axis[i] for axis, i in zip(axes, at)), marks=LONG if sum(at) % min(map(len, axes)) else ())
            for at in itertools.product(*map(range, map(len, axes)))]


MANY_SLOTS = 64
EDGES = {"ready": 1, "freed": 2, "grad": 4, "landed": 8, "updated": 16}      # MT_EDGE_* of csrc/core/context.h


@dataclasses.dataclass(frozen=True)
class Options:
    """One way to run a script.

    Attributes:
        activations: "saved" or "replay".
        slots: device slots; 2 is the tightest ring, MANY_SLOTS keeps every unit where it is.
        delay_us: longest random sleep put into every queue (0: none).
        accumulate: micro-batches per optimizer step.
        clip: global-norm limit, or None.
        optimizer: "adamw", "sgd" (torch's own).
        device: "cpu" or "cuda".
        steps: optimizer steps.
        skip: mask of EDGES whose wait is left out; not 0 only to see that a comparison can fail.
    """
    activations: str = "replay"
    slots: int = 2
    delay_us: int = 0
    accumulate: int = 1
    clip: float | None = None
    optimizer: str = "adamw"
    device: str = "cpu"
    steps: int = 3
    skip: int = 0

    def name(self) -> str:
        ring = "many" if self.slots == MANY_SLOTS else str(self.slots)
        parts = [self.activations, f"slots_{ring}", f"accum_{self.accumulate}", self.optimizer]
        parts += ["clip"] * (self.clip is not None) + ["delays"] * (self.delay_us > 0)
        parts += [f"without_{e}" for e, bit in EDGES.items() if self.skip & bit]
        return "-".join(parts)

    def training(self) -> tuple[Any, ...]:
        """The options that change what plain torch computes."""
        return (self.accumulate, self.clip, self.optimizer, self.device, self.steps)


def stream_for_test(model: nn.Module, activations: str = "replay", slots: int = 2, delay_us: int = 0,
                    poison: bool = True, device: str = "cpu", debug: dict[str, Any] | None = None,
                    **kwargs: Any) -> nn.Module:
    """mt.stream with the switches that tests need; the only place that names them.

    poison fills each slot with NaN when it is freed, so that a weight used after its window shows.
    debug: further switches of the engine ("sync": nothing overlaps; "skip": a wait to leave out).
    """
    if IDENTITY:
        return model.to(device)
    plan = {"activations": activations, "slots": slots,
            "debug": {"delay_us": delay_us, "poison": poison, **(debug or {})}}
    return doors.stream(model, device=device, plan=plan, **kwargs)


def error() -> type[BaseException]:
    import megatrain_torch as mt
    return mt.MegatrainError


def seed(n: int = 0) -> None:
    """All generators that a model may draw from (wav2vec2 and whisper mask with NumPy's)."""
    random.seed(n)
    np.random.seed(n)
    torch.manual_seed(n)


def to_device(x: Any, device: str) -> Any:
    if isinstance(x, Tensor):
        return x.to(device)
    if isinstance(x, dict):
        return {k: to_device(v, device) for k, v in x.items()}
    if isinstance(x, (list, tuple)):
        return type(x)(to_device(v, device) for v in x)
    return x


class Trial:
    """One run of a script: what it may ask for, and what it noted."""

    def __init__(self, options: Options, streamed: bool) -> None:
        self.options, self.streamed = options, streamed
        self.device = options.device
        self.notes: list[tuple[str, Any]] = []
        self.faults: list[str] = []

    # ---- the two things that differ between plain and streamed

    def stream(self, model: nn.Module, **kwargs: Any) -> nn.Module:
        o = self.options
        if not self.streamed:
            return model.to(self.device)
        before = torch.get_rng_state()
        debug = {"skip": o.skip} if o.skip else None
        out = stream_for_test(model, o.activations, o.slots, o.delay_us, device=self.device, debug=debug, **kwargs)
        self.expect(out is model, "mt.stream returned another object")
        self.expect(torch.equal(before, torch.get_rng_state()), "mt.stream drew random numbers")
        return out

    def refuses(self, action: Callable[[], Any], words: str = "") -> None:
        """Streamed: the action must raise MegatrainError (naming `words`). Plain: not run."""
        if not self.streamed or IDENTITY:
            return
        try:
            action()
        except error() as e:
            self.expect(words.lower() in str(e).lower(), f"refusal does not say {words!r}: {e}")
        else:
            self.faults.append(f"not refused: {getattr(action, '__doc__', None) or action}")

    # ---- what is the same for both

    def batch(self, x: Any) -> Any:
        return to_device(x, self.device)

    def optimizer(self, cls: type, params: Iterable[Any], **kw: Any) -> torch.optim.Optimizer:
        """A stock optimizer. Its arithmetic runs on the host in both runs: see `mirrored`."""
        params = list(params)
        if self.device == "cpu" or (self.streamed and not IDENTITY):
            return cls(params, **kw)
        return mirrored(cls, params, **kw)

    def clip(self, params: Iterable[Tensor], max_norm: float) -> Tensor:
        """torch's clip_grad_norm_ with its sums taken on the host in both runs."""
        params = [p for p in params if p.grad is not None]
        if all(p.grad.device.type == "cpu" for p in params):
            return nn.utils.clip_grad_norm_(params, max_norm)
        hosts = [torch.empty(p.shape, dtype=p.dtype) for p in params]
        for h, p in zip(hosts, params):
            h.grad = p.grad.cpu()
        norm = nn.utils.clip_grad_norm_(hosts, max_norm)
        for h, p in zip(hosts, params):
            p.grad.copy_(h.grad)
        return norm

    def note(self, label: str, value: Any) -> None:
        self.notes.append((label, frozen(value)))

    def expect(self, ok: bool, message: str) -> None:
        """A condition of its own, true in both runs."""
        if not ok:
            self.faults.append(message)

    def note_grads(self, label: str, model: nn.Module) -> None:
        for name, p in model.named_parameters():
            self.note(f"{label}, gradient of {name}", p.grad)

    def note_state(self, label: str, model: nn.Module) -> None:
        for name, v in model.state_dict(keep_vars=True).items():
            self.note(f"{label}, {name}", v if isinstance(v, Tensor) else None)
        for name, b in model.named_buffers():
            self.note(f"{label}, buffer {name}", b)

    def train(self, model: nn.Module, batch: Callable[[int], Any], loss: Callable[[nn.Module, Any], Tensor],
              steps: int | None = None, opt: torch.optim.Optimizer | None = None, first: int = 0,
              between: Callable[[int], None] | None = None) -> torch.optim.Optimizer:
        """The ordinary loop, everything noted. `between(step)` runs after each optimizer step."""
        o = self.options
        opt = opt or self.default_optimizer(model)
        for step in range(first, first + (o.steps if steps is None else steps)):
            for micro in range(o.accumulate):
                where = f"step {step}, micro-batch {micro}"
                value = loss(model, self.batch(batch(step * o.accumulate + micro)))
                (value / o.accumulate).backward()
                self.note(f"{where}, loss", value)
                self.note_grads(where, model)
            if o.clip is not None:
                self.note(f"step {step}, norm", self.clip(model.parameters(), o.clip))
            opt.step()
            opt.zero_grad()
            if between is not None:
                between(step)
        self.note_state("at the end", model)
        self.note_random()
        return opt

    def steps(self, model: nn.Module, steps: int = 3) -> Iterator[int]:
        """Step by step what `train` does, for loops whose passes are their own."""
        opt = self.default_optimizer(model)
        for step in range(steps):
            yield step
            opt.step()
            opt.zero_grad()
        self.note_state("at the end", model)

    def default_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        params = [p for p in model.parameters() if p.requires_grad]
        if self.options.optimizer == "sgd":
            return self.optimizer(torch.optim.SGD, params, lr=0.05, momentum=0.9)
        # eps of 1e-4 keeps gradients of mere rounding noise from moving weights by a whole lr.
        return self.optimizer(torch.optim.AdamW, params, lr=1e-2, weight_decay=0.1, eps=1e-4)

    def note_random(self) -> None:
        """Streaming must draw nothing from the user's generators."""
        self.note("next random number", torch.rand(1))
        if self.device == "cuda":
            self.note("next random number of the GPU", torch.rand(1, device="cuda"))


def frozen(value: Any) -> Any:
    """A copy that later work cannot change; on the host, of plain tensors."""
    if isinstance(value, Tensor):
        return torch.Tensor.detach(value).cpu().clone().as_subclass(Tensor)
    if isinstance(value, dict):
        return {k: frozen(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [frozen(v) for v in value]
    return copy.copy(value)


def mirrored(cls: type, params: list[Any], **kw: Any) -> torch.optim.Optimizer:
    """A real optimizer over host copies of device parameters, for the plain run on a GPU.

    Streamed parameters are updated on the host, where fp32 arithmetic rounds as the CPU does (fused
    kernels on the GPU contract multiply-adds). So that updates can be compared bit for bit, the plain
    run updates host copies too: gradients and weights are pulled before the step, weights pushed after.
    """
    pairs: list[tuple[Tensor, Tensor]] = []

    def host(p: Tensor) -> Tensor:
        h = nn.Parameter(p.detach().cpu().clone(), requires_grad=p.requires_grad)
        pairs.append((p, h))
        return h

    groups = []
    for g in params:
        if isinstance(g, dict):
            groups.append({**g, "params": [host(p) for p in g["params"]]})
        else:
            groups.append((g[0], host(g[1])) if isinstance(g, tuple) else host(g))
    opt = cls(groups, **kw)

    def pull(*_: Any) -> None:
        for p, h in pairs:
            h.data.copy_(p.detach())
            h.grad = None if p.grad is None else p.grad.detach().cpu().clone()

    def push(*_: Any) -> None:
        for p, h in pairs:
            with torch.no_grad():
                p.copy_(h)

    def zero_grad(set_to_none: bool = True) -> None:
        for p, _ in pairs:
            if set_to_none or p.grad is None:
                p.grad = None
            else:
                p.grad.detach_().zero_()

    opt.register_step_pre_hook(pull)
    opt.register_step_post_hook(push)
    opt.zero_grad = zero_grad
    return opt


Script = Callable[[Trial], None]
Difference = str


def same_bits(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        if a.dtype != b.dtype or a.shape != b.shape:
            return False
        if not a.dtype.is_floating_point:
            return torch.equal(a, b)
        return torch.equal(a, b) or (torch.equal(torch.isnan(a), torch.isnan(b)) and torch.equal(
            torch.nan_to_num(a), torch.nan_to_num(b)))
    if isinstance(a, dict) and isinstance(b, dict):
        return list(a) == list(b) and all(same_bits(a[k], b[k]) for k in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(same_bits, a, b))
    return type(a) is type(b) and a == b


def assert_same(plain: Any, streamed: Any) -> None:
    """Tensors, by name or in turn: the first that differs is named."""
    a, b = (x if isinstance(x, dict) else dict(enumerate(x)) for x in (plain, streamed))
    assert list(a) == list(b)
    for k in a:
        assert same_bits(*map(torch.as_tensor, (a[k], b[k]))), f"{k}: {describe(a[k], b[k])}"


def describe(a: Any, b: Any) -> str:
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)):
        return f"plain has {brief(a)}, streamed has {brief(b)}"
    if a.shape != b.shape or a.dtype != b.dtype:
        return f"plain is {list(a.shape)} {a.dtype}, streamed is {list(b.shape)} {b.dtype}"
    d = (a.double() - b.double()).abs()
    where = int(d.nan_to_num(nan=float("inf")).argmax()) if d.numel() else 0
    scale = float(a.double().abs().max()) if a.numel() else 0.0
    return (f"{int((a != b).sum())} of {a.numel()} elements differ, most at flat index {where}: plain "
            f"{a.flatten()[where].item():.9g}, streamed {b.flatten()[where].item():.9g} (largest |plain| {scale:.3g})")


def brief(a: Any) -> str:
    return f"a tensor {list(a.shape)}" if isinstance(a, Tensor) else repr(a)[:200]


def first_difference(plain: Trial, streamed: Trial, same: Callable[[Any, Any], bool] = same_bits) -> Difference | None:
    """Notes are in order of time, so the first that differs is the closest to the cause."""
    for (la, a), (lb, b) in zip(plain.notes, streamed.notes):
        if la != lb:
            return f"the runs parted: plain noted {la!r}, streamed {lb!r}"
        if not same(a, b):
            count = sum(not same(x, y) for (_, x), (_, y) in zip(plain.notes, streamed.notes))
            return f"{la}: {describe(a, b)}; {count} of {len(plain.notes)} notes differ"
    if len(plain.notes) != len(streamed.notes):
        return f"plain noted {len(plain.notes)} values, streamed {len(streamed.notes)}"
    return None


@contextlib.contextmanager
def exact(device: str) -> Iterator[None]:
    """On CUDA: fp32 as fp32, and kernels whose sums have one order."""
    if device == "cpu":
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    tf32 = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = tf32


def run_one(script: Script, options: Options, streamed: bool) -> Trial:
    trial = Trial(options, streamed)
    with exact(options.device):
        seed()
        script(trial)
    return trial


@functools.lru_cache(maxsize=32)
def _plain(script: Script, training: tuple[Any, ...]) -> Trial:
    accumulate, clip, optimizer, device, steps = training
    return run_one(script, Options(accumulate=accumulate, clip=clip, optimizer=optimizer, device=device,
                                   steps=steps), streamed=False)


def run(script: Script, options: Options) -> Difference | None:
    """Both runs; None when all notes agree bit for bit and no expectation failed."""
    plain = _plain(script, options.training())
    streamed = run_one(script, options, streamed=True)
    faults = [f"plain: {f}" for f in plain.faults] + streamed.faults
    return "; ".join(faults) or first_difference(plain, streamed)


def check(script: Script, options: Options) -> None:
    """run() as an assertion."""
    difference = run(script, options)
    assert difference is None, f"[{options.name()}] {difference}"


def losses_and_grads(model: nn.Module, batches: Iterable[dict[str, Tensor]], optimizer: Any = torch.optim.AdamW,
                     lr: float = 1e-2) -> list[Tensor]:
    """Every loss and every gradient of a training, a step for each batch."""
    own = [p for p in model.parameters() if p.requires_grad]
    opt, seen = optimizer(own, lr=lr), []
    for given in batches:
        loss = model(**given).loss
        loss.backward()
        seen += [loss.detach().clone(), *(p.grad.clone() for p in own)]
        opt.step()
        opt.zero_grad()
    return seen


# ---------------------------------------------------------------- which options for which script

# Each row differs from the others in several options at once; walking through the rows while walking
# through the cases meets every pair of values many times over, at two runs per case. More micro-batches: test_adamw.py.
ROTATION = [
    dict(slots=2, accumulate=1, clip=None, optimizer="adamw", delay_us=0),
    dict(slots=MANY_SLOTS, accumulate=2, clip=0.5, optimizer="sgd", delay_us=0),
    dict(slots=3, accumulate=1, clip=0.5, optimizer="adamw", delay_us=200),
    dict(slots=2, accumulate=2, clip=None, optimizer="sgd", delay_us=0),
    dict(slots=MANY_SLOTS, accumulate=1, clip=None, optimizer="sgd", delay_us=200),
    dict(slots=2, accumulate=2, clip=0.5, optimizer="adamw", delay_us=200),
]


def options_for(index: int, device: str = "cpu", steps: int = 3) -> list[Options]:
    """For the index-th case: saved or replay by turns, the rest rotated; with MEGATRAIN_FULL=1 every product."""
    if FULL:
        return [Options(a, s, d, k, c, o, device) for a in ("saved", "replay") for s in (2, 3, MANY_SLOTS)
                for d in (0, 200) for k in (1, 4) for c in (None, 0.5) for o in ("adamw", "sgd")]
    row = ROTATION[index % len(ROTATION)]
    other = {**row, "slots": 2 if row["slots"] != 2 else 3, "delay_us": 200 - row["delay_us"]}
    return [Options(activations="replay", device=device, steps=steps, **other) if index % 2 else
            Options(activations="saved", device=device, steps=steps, **row)]
