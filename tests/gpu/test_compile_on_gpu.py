"""compute="compile" on CUDA, with inductor: against plain torch, kept against run again, and what stays in slots.

Skipped where torch sees no CUDA device. Inductor's kernels round in another order than torch's own: in fp32 (no
TF32) within fusing.TOLERANCE times ten (its sums of a norm and a softmax are made in one pass), in bf16 within
fusing.ROUNDED: it rounds less often than torch, which rounds after each operation.
Kept and run again are the same kernels, so they have the same bits, dropout's masks among them.
"""
from __future__ import annotations

import doors
import fusing
import parity
import pytest
import test_compile
import torch
import zoo
from test_compile import Counts, codes, counts, gradients  # noqa: F401  (counts is a fixture)
from test_fused_on_gpu import larger, long_text
from torch import Tensor, nn

from megatrain_torch.model import ring

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(autouse=True)
def anew() -> None:
    torch._dynamo.reset()


def stream(model: nn.Module, keep: str) -> nn.Module:
    return doors.stream(model, "cuda", compute="compile",
                        plan={"activations": keep, "slots": 2, "debug": {"poison": True}})


def train(model: nn.Module, batch: dict[str, Tensor], steps: int = 3) -> tuple[list[Tensor], dict[str, Tensor | None]]:
    """Losses of some passes without a step between them, and the sums of their gradients."""
    losses = []
    for step in range(steps):
        parity.seed(step)
        loss = model(**parity.to_device(batch, "cuda")).loss
        loss.backward()
        losses.append(parity.frozen(loss))
    return losses, gradients(model)


@pytest.mark.parametrize("family", test_compile.FAMILIES)
def test_run_again_has_the_bits_of_kept(family: str, counts: Counts) -> None:  # noqa: F811
    build = test_compile.FAMILIES[family]
    with parity.exact("cuda"):
        kept = train(stream(build(), "saved"), zoo.text_unpadded(0))
        torch._dynamo.reset()
        model = stream(build(), "replay")
        again = train(model, zoo.text_unpadded(0))
    assert all(c.startswith("compiled") for c in codes(model)), codes(model)
    assert counts.replays
    assert parity.same_bits(list(kept), list(again))


@pytest.mark.parametrize("family", [f for f in test_compile.FAMILIES if f != "dropout"])
def test_in_fp32_it_is_near_plain_torch(family: str) -> None:
    build = test_compile.FAMILIES[family]
    with parity.exact("cuda"):
        losses, grads = train(build().cuda(), zoo.text_unpadded(0), 1)
        found, others = train(stream(build(), "replay"), zoo.text_unpadded(0), 1)
    assert fusing.error(losses[0], found[0]) < 10 * fusing.TOLERANCE
    fusing.grads_agree(grads, others, 10 * fusing.TOLERANCE)


def test_in_bf16_slots_go_on_and_gradients_are_near(counts: Counts,  # noqa: F811
                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    renewed: list[int] = []
    own = ring.SlotHooks.renew
    monkeypatch.setattr(ring.SlotHooks, "renew", lambda self, slot: (renewed.append(slot), own(self, slot))[1])
    losses, grads = train(larger("llama").cuda(), long_text(False), 2)
    model = stream(larger("llama"), "replay")
    found, others = train(model, long_text(False), 2)
    assert counts.graphs == 2 and counts.replays and not renewed
    assert fusing.error(losses[1], found[1]) < fusing.ROUNDED_LOSS
    fusing.grads_agree(grads, others, fusing.ROUNDED)
