"""The same run gives the same bits, on CUDA: kernels twice on the same operands, and processes of one configuration.

Skipped where torch sees no CUDA device. What does not repeat itself without torch.use_deterministic_algorithms, cuDNN's
backward of attention, is told by docs/numerics.md, and not tested: it may repeat itself by chance.
"""
from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import fusing
import pytest
import torch
from torch import Tensor

from megatrain_torch import ops
from megatrain_torch.fused.loss import linear_cross_entropy
from megatrain_torch.fused.templates.attention import Attention

TIMES = 6
BF16 = torch.bfloat16


@pytest.fixture
def strict(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def draw(*size: int, seed: int = 0, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(size, generator=torch.Generator("cuda").manual_seed(seed), device="cuda").to(dtype)


def assert_repeats(fn: Any) -> list[Tensor]:
    """Among copies both ways, with memory in other places each time."""
    host, there = torch.empty(1 << 27, dtype=torch.uint8, pin_memory=True), torch.empty(1 << 27, dtype=torch.uint8,
                                                                                       device="cuda")
    side, found, held = torch.cuda.Stream(), None, []
    for i in range(TIMES):
        with torch.cuda.stream(side):
            (there if i % 2 else host).copy_(host if i % 2 else there, non_blocking=True)
        held.append(torch.empty((1 << 20) + 512 * i, dtype=torch.uint8, device="cuda").fill_(i))
        out = [t.clone() for t in fn() if t is not None]
        found = found or out
        for a, b in zip(found, out):
            assert torch.equal(a, b), f"time {i}: off by {fusing.error(a, b):.1e}"
    torch.cuda.synchronize()             # the last copy, before its memory is another's
    return found


@pytest.mark.parametrize("rows, seq, heads, sinks, mask", [
    (8, 1024, (28, 4), False, False), (2, 1500, (8, 8), False, False), (3, 777, (12, 4), True, False),
    (1, 8192, (28, 4), False, False), (2, 640, (8, 2), False, True), (2, 320, (8, 2), True, True)])
def test_attention_repeats_itself_where_that_is_asked_for(rows: int, seq: int, heads: tuple[int, int], sinks: bool,
                                                          mask: bool, strict: None) -> None:
    hq, hk = heads
    q, k, v = draw(rows, seq, hq + 2 * hk, 128).split((hq, hk, hk), 2)
    dout, sink = draw(rows, seq, hq, 128, seed=1), draw(hq) if sinks else None
    seen = torch.ones(seq, seq, dtype=torch.bool, device="cuda").tril()[None, None]
    bias = torch.zeros(rows, 1, seq, seq, device="cuda", dtype=BF16).masked_fill_(~seen, -1e30) if mask else None
    one = Attention(128 ** -0.5, not mask, bias)

    def both() -> list[Tensor]:
        out, kept = one.forward(q, k, v, sink)
        assert kept is not None, "cuDNN did not take it"
        return [out, *one.backward(dout, q, k, v, out, kept, sink)]

    found = assert_repeats(both)
    if seq > 2000:
        return
    leaves = [t.double().requires_grad_() for t in (q, k, v, *([] if sink is None else [sink]))]
    exact = Attention(128 ** -0.5, False, torch.zeros(1, 1, seq, seq, device="cuda",
                                                      dtype=torch.float64).masked_fill_(~seen, -1e30), spelled=True)
    out = exact._torch(*(t.transpose(1, 2) for t in leaves[:3]), *leaves[3:]).transpose(1, 2)
    wanted = [out.detach(), *torch.autograd.grad(out, leaves, dout.double())]
    for name, a, b in zip(("out", "dq", "dk", "dv", "dsinks"), wanted, found):
        assert fusing.error(a, b) < 1e-2, name           # P and out are rounded to 8 bits


def test_products_and_the_head_repeat_themselves() -> None:
    dy, x, sums = draw(16384, 4608), draw(16384, 3584, seed=1), draw(4608, 3584, seed=2, dtype=torch.float32)

    def added() -> list[Tensor]:
        c = sums.clone()
        ops.gemm_(c, dy.t(), x)
        return [c]

    assert_repeats(added)
    head, labels = draw(32000, 1024, seed=3), torch.arange(6000, device="cuda") * 5
    assert_repeats(lambda: linear_cross_entropy(draw(6000, 1024, seed=4), head, labels))


STEPS = """
import sys; sys.path[:0] = {path!r}
import torch, fusing, zoo, test_fused_on_gpu as fused, megatrain_torch as mt
from megatrain_torch.fused.templates.decoder import GatedMLP
GatedMLP.tile = lambda self, item: 256
torch.utils.deterministic.fill_uninitialized_memory = False
torch.use_deterministic_algorithms(True)
model = mt.stream(fused.larger({family!r}), "cuda", compute="fused", plan={plan!r})
opt = mt.AdamW(model.parameters(), lr=1e-3, max_grad_norm=1.0)
for step in range(4):
    ids = zoo.tokens(zoo.generator(step), rows=4, length=192).cuda()
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    opt.step()
    opt.zero_grad()
    print(float(loss.detach()).hex(), opt.grad_norm.hex())
fusing.all_fused(fusing.codes(model))
"""


@pytest.mark.parametrize("family, plans", [
    ("qwen2", ({}, {"homes": "vram"}, {"homes": {"model.layers.1": "vram"}, "slots": 3})),
    ("qwen3_moe", ({}, {"homes": "vram"}))])
def test_processes_and_placements_of_one_configuration_have_the_same_bits(family: str, plans: tuple[dict[str, Any], ...]
                                                                          ) -> None:
    said = set()
    for plan in (*plans, plans[0]):
        code = STEPS.format(path=sys.path, family=family, plan={"activations": "selective", **plan})
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False,
                              env={**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"})
        assert done.returncode == 0, done.stderr[-3000:]
        said.add(done.stdout)
    assert len(said) == 1, said
