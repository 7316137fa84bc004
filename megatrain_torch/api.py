"""Small doors: what a streamed model is made of, what it did, and its fp32 values."""
from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, nn

from .limits import show_bytes
from .optim import master
from .state import enter, leave
from .wrap import runtime_of


@dataclass(frozen=True)
class StepReport:
    """What streaming did since the last report (or since mt.stream).

    Attributes:
        seconds: wall time between the two reports.
        h2d_bytes, d2h_bytes: weights streamed in, gradients streamed out.
        fetches, demand_fetches: copies of units; those that were asked for only when needed.
        await_seconds: time the computing thread waited for a copy to be put in its queue.
        host_bytes: host memory the store holds.
    """

    seconds: float
    h2d_bytes: int
    d2h_bytes: int
    fetches: int
    demand_fetches: int
    await_seconds: float
    host_bytes: int


def last_step(model: nn.Module) -> StepReport:
    """Bytes and waits since the call before. Call it once a step.

    Raises:
        MegatrainError: the model is not streamed.
    """
    rt = runtime_of(model)
    now, stats = time.perf_counter(), rt.core.stats()
    before, old = getattr(rt, "reported", (rt.opened, {}))
    rt.reported = (now, stats)
    diff = {k: v - old.get(k, 0) for k, v in stats.items()}
    return StepReport(now - before, diff["h2d_bytes"], diff["d2h_bytes"], diff["fetches"], diff["demand_fetches"],
                      diff["await_ns"] * 1e-9, rt.core.host_bytes())


def explain(model: nn.Module) -> str:
    """A table of windows: their units, bytes, what is done about activations, and whose code runs them.

    "template" is a layer's explicit forward and backward (compute="fused"); else the module's own code, with the
    reason where a template was wanted.

    Raises:
        MegatrainError: the model is not streamed.
    """
    rt = runtime_of(model)
    rows = [("window", "units", "bytes", "activations", "trained", "code")]
    for w in rt.windows:
        nbytes = sum(r.nbytes for r in w.records)
        trained = sum(r.numel for r in w.records if r.was_trainable)
        rows.append((w.name, ", ".join(rt.unit_names[u] for u in w.units), show_bytes(nbytes), w.keeps, f"{trained:,}",
                     w.code))
    widths = [max(len(r[i]) for r in rows) for i in range(len(rows[0]))]
    return "\n".join("  ".join(c.ljust(n) for c, n in zip(r, widths)).rstrip() for r in rows)


def masters(model: nn.Module) -> dict[str, Tensor]:
    """fp32 values of all parameters by name: masters where training made them, else the weights widened.

    Each is a copy: [shape] fp32 on the CPU. Waits for the pending updates.

    Raises:
        MegatrainError: the model is not streamed.
    """
    runtime_of(model)
    return {name: master(p) for name, p in model.named_parameters()}


@contextlib.contextmanager
def gather(module: nn.Module) -> Iterator[nn.Module]:
    """Inside, reading a parameter of a streamed module gives a copy on the compute device.

    For weights used outside of any forward: `with mt.gather(model.lm_head): F.linear(h, model.lm_head.weight)`.
    Gradients flow back to the parameter.

    Args:
        module: a streamed model, or any module inside one.

    Raises:
        MegatrainError: the module is not streamed.
    """
    rt = runtime_of(module)
    enter()
    try:
        yield module
    finally:
        leave()
        rt._lazy.clear()
