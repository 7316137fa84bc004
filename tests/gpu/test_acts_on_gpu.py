"""Activations in host memory, on CUDA: the same bits, each wait needed, and device memory that is really saved.

In fp32 with deterministic kernels (parity.exact), where two runs of plain torch have the same bits; in bf16 within
fusing.ROUNDED_ONCE of what keeps more, and within fusing.ROUNDED of plain torch.
"""
from __future__ import annotations

import functools
import itertools
from typing import Any

import edges
import fusing
import parity
import pytest
import test_fused
import torch
import wide
import zoo
from edges import COMPUTE_SLOW, COPIES_SLOW, Scenario
from test_fused_on_gpu import gradients, larger, streamed
from torch import Tensor, nn

import megatrain_torch as mt
from megatrain_torch import ops
from megatrain_torch.base.modes import HOST, read
from megatrain_torch.base.packed import Packed
from megatrain_torch.fused.templates import attention, decoder
from megatrain_torch.fused.templates.attention import Attention
from megatrain_torch.graph.hf_calls import Sight
from megatrain_torch.model.stream import runtime_of

# MT_EDGE_* of csrc/core/context.h, and the pace at which each is needed.
NEEDED = {"computed": (1 << 16, COMPUTE_SLOW), "left": (1 << 17, COPIES_SLOW), "room": (1 << 18, COMPUTE_SLOW),
          "back": (1 << 20, COPIES_SLOW)}


# ---------------------------------------------------------------- bits

@functools.cache
def on_device(family: str, keep: str) -> tuple[Tensor, dict[str, Tensor | None]]:
    return run(family, keep)


def run(family: str, mode: str) -> tuple[Tensor, dict[str, Tensor | None]]:
    with parity.exact("cuda"):
        parity.seed()
        model = streamed(test_fused.FAMILIES[family](), mode)
        for step in range(2):                # the second takes the bays of the first
            model.zero_grad()
            found = gradients(model, fusing.padded(step))
        fusing.all_fused(fusing.codes(model))
        mt.unstream(model)
    return found


@pytest.mark.parametrize("mode", HOST)
@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_fused_layers_compute_the_same_bits(family: str, mode: str) -> None:
    (loss, grads), (found, others) = on_device(family, read(mode).keep), run(family, mode)
    assert parity.same_bits(loss, found)
    assert all(parity.same_bits(grads[n], others[n]) for n in grads)


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_a_linked_layer_has_the_bits_of_one_that_keeps_its_input(family: str) -> None:
    (loss, grads), (found, others) = on_device(family, "attention"), on_device(family, "linked")
    assert parity.same_bits(loss, found)
    assert all(parity.same_bits(grads[n], others[n]) for n in grads)


@functools.cache
def overlap_off(scenario: Scenario) -> dict[str, Tensor]:
    return edges.train(scenario, "cuda", sync=True)


@pytest.mark.parametrize("wander", [False, True])
@pytest.mark.parametrize("keep", ["saved", "replay"])
def test_own_code_computes_the_same_bits_at_any_pace(keep: str, wander: bool) -> None:
    right = overlap_off(Scenario(keep, wander=wander))
    for seed in range(4):
        for pace in (COMPUTE_SLOW, COPIES_SLOW):
            run = edges.train(Scenario(f"{keep}+host", wander=wander), "cuda", seed=seed, **pace)
            assert edges.difference(right, run) is None, f"seed {seed}, {pace}"


@pytest.mark.parametrize("edge", NEEDED)
def test_a_wait_left_out_is_noticed(edge: str) -> None:
    """In one of twelve runs at least; kept (back behind out) is what left and room say too."""
    bit, pace = NEEDED[edge]
    right = overlap_off(Scenario("saved"))
    assert any(edges.difference(right, edges.train(Scenario("saved+host"), "cuda", seed=seed, skip=bit, **pace))
               for seed in range(12))


# ---------------------------------------------------------------- memory and time

ROWS, LENGTH = 8, 2048


def twelve() -> nn.Module:
    """Twelve layers of which 16k tokens keep some 150 MiB each."""
    import transformers
    config = transformers.Qwen2Config(
        hidden_size=512, intermediate_size=1536, num_hidden_layers=12, num_attention_heads=8, num_key_value_heads=2,
        vocab_size=1024)
    torch.manual_seed(3)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()


def peak(mode: str, compute: str) -> tuple[int, float]:
    """Bytes above what lies there between steps, and the last loss."""
    model = mt.stream(twelve(), "cuda", compute=compute, plan={"activations": mode})
    ids = torch.randint(1024, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1)).cuda()
    for step in range(2):
        model(input_ids=ids, labels=ids).loss.backward()
        model.zero_grad()
        runtime_of(model).drain()
        torch.cuda.synchronize()
        if step == 0:
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
    loss = float(model(input_ids=ids, labels=ids).loss)
    found = torch.cuda.max_memory_allocated() - before
    mt.unstream(model)
    return found, loss


@pytest.mark.parametrize("compute, mode", [("fused", "saved+host"), ("fused", "selective+host"),
                                           ("eager", "saved+host")])
def test_device_memory_is_saved(compute: str, mode: str) -> None:
    """Three windows' of twelve lie there at most (one made, one leaving; one used, one coming), and the work beside."""
    keep = read(mode).keep
    (there, right), (saved, found) = peak(keep, compute), peak(mode, compute)
    limit = 0.75 if keep == "selective" else 0.55
    assert saved < limit * there, f"{mode}: {saved / 2**20:.0f} MiB, {keep}: {there / 2**20:.0f} MiB"
    assert abs(found - right) < fusing.ROUNDED_LOSS * right


def test_in_bf16_with_cudnns_attention_it_is_within_noise() -> None:
    batch = {"input_ids": torch.randint(0, 50, (4, 192), generator=torch.Generator().manual_seed(0))}
    batch["labels"] = batch["input_ids"]
    loss, grads = gradients(streamed(larger("qwen3"), "saved"), batch)
    for mode in ("attention", "attention+host", "selective+host"):
        found, others = gradients(streamed(larger("qwen3"), mode), batch)
        assert fusing.error(loss, found) < fusing.ROUNDED_LOSS
        fusing.grads_agree(grads, others, fusing.ROUNDED_ONCE)


# ---------------------------------------------------------------- long context

@pytest.mark.parametrize("op", wide.OPS)
def test_elements_beyond_two_to_the_31_are_found(op: str) -> None:
    assert wide.OPS[op]("cuda")


def test_whole_kernels_beyond_two_to_the_31_elements() -> None:
    """Dense tensors of 2.3e9 elements: the last rows are those of the same rows alone."""
    rows, n, tail = 600_000, 3840, 64
    x, weight = torch.randn(rows, n, device="cuda", dtype=torch.bfloat16), torch.ones(n, device="cuda").bfloat16()
    y, _, rstd = ops.rms_norm(x, weight, 1e-6)
    near, _, near_rstd = ops.rms_norm(x[-tail:], weight, 1e-6)
    assert torch.equal(y[-tail:], near) and torch.equal(rstd[-tail:], near_rstd)
    h = ops.glu(x, y)
    assert torch.equal(h[-tail:], ops.glu(x[-tail:], near))
    del h
    dx, _, _ = ops.rms_norm_backward(y, x, weight, rstd)
    other, _, _ = ops.rms_norm_backward(near, x[-tail:], weight, near_rstd)
    assert torch.equal(dx[-tail:], other)
    total = ops.column_sum(x, torch.float32)
    assert torch.allclose(total, x.sum(0, dtype=torch.float64).float(), atol=0.5)      # 1e5 roundings of sums near 1e3
    assert ops.column_sum(x.view(-1, 128), torch.float32).isfinite().all()             # 18 M rows: the grid's y is less


@pytest.mark.parametrize("heads, groups, unused, by", [
    (28, 4, 0, "flash"), (40, 8, 0, "flash"), (28, 4, 0, "cudnn"), (28, 4, 24, "cudnn copied"),
    (40, 8, 0, "cudnn by heads"), (28, 4, 0, "cudnn by rows"), (40, 8, 0, "cudnn by rows")])
def test_attention_over_half_a_million_tokens(heads: int, groups: int, unused: int, by: str,
                                              monkeypatch: pytest.MonkeyPatch) -> None:
    """Output, dq of the last rows and dk, dv of the first keys against sums in fp32. 28 heads are 1.9e9 elements, which
    with their keys and values span 2.4e9: attention.CUDNN_SPAN; with unused heads beside them 4.0e9, which is copied.
    40 heads are 2.7e9, more than CUDNN_MOST, and cuDNN takes 20 at a time. By rows: forward, some queries at a time.

    P and dS are rounded to 8 bits, each by up to 2^-8, and so is the result: outputs and dq differ by 0.0018 to 0.0027
    at 64k and 512k tokens, dS alone by 0.0015 to 0.0020. An element of another row or head would be off by 1; row sums
    of the wrong rows, as cuDNN has where dout reaches beyond 2^31 elements, are as little as 0.06.
    """
    if by == "flash":
        monkeypatch.setattr(attention, "CUDNN_MOST", 1)      # not one head at a time
    if by != "cudnn by rows":
        monkeypatch.setattr(attention, "LONG", 1 << 40)
    seq, dim, scale = 1 << 19, 128, 128 ** -0.5
    generator = torch.Generator("cuda").manual_seed(0)
    qkv = torch.randn(1, seq, heads + 2 * groups + unused, dim, device="cuda", dtype=torch.bfloat16, generator=generator)
    q, k, v, _ = qkv.split((heads, groups, groups, unused), 2)
    kernel = Attention(scale, causal=True)
    out, kept = kernel.forward(q, k, v)
    assert len(kept) == {"flash": 3, "cudnn": 7, "cudnn by rows": 7, "cudnn copied": 1, "cudnn by heads": 2}[by]
    lses = [extra[0] for extra in kept] if by in ("cudnn copied", "cudnn by heads") else [kept[0]]
    lses = torch.cat([lse.reshape(1, -1, seq) for lse in lses], 1).float()
    dout = torch.randn(out.shape, device="cuda", dtype=torch.bfloat16, generator=generator)
    dq, dk, dv, _ = kernel.backward(dout, q, k, v, out, kept)
    for head, row in itertools.product((0, heads - 1), (seq - 1, seq // 2 + 77)):
        group = head * groups // heads
        keys, values = k[0, :row + 1, group].float(), v[0, :row + 1, group].float()
        p = torch.softmax(keys @ q[0, row, head].float() * scale, 0)
        wanted = p @ values
        assert fusing.error(wanted.cpu(), out[0, row, head].float().cpu()) < 1e-2
        do = dout[0, row, head].float()
        ds = p * (values @ do - (do * wanted).sum())
        assert fusing.error((ds @ keys * scale).cpu(), dq[0, row, head].float().cpu()) < 1e-2
    head, group = heads - 1, groups - 1
    for key in (0, seq - 3):
        dk_wanted, dv_wanted = torch.zeros(2, dim, device="cuda")
        for h in range(head - heads // groups + 1, head + 1):        # the query heads of this key's group
            rows = slice(key, seq)
            logits = q[0, rows, h].float() @ k[0, key, group].float() * scale
            p, do = torch.exp(logits - lses[0, h, rows]), dout[0, rows, h].float()
            dv_wanted += p @ do
            delta = (do * out[0, rows, h].float()).sum(1)
            dk_wanted += (p * (do @ v[0, key, group].float() - delta)) @ q[0, rows, h].float() * scale
        assert fusing.error(dv_wanted.cpu(), dv[0, key, group].float().cpu()) < 1e-2
        assert fusing.error(dk_wanted.cpu(), dk[0, key, group].float().cpu()) < 1e-2


@pytest.mark.parametrize("with_sinks", [False, True])
def test_attention_by_blocks_of_queries_is_the_whole(with_sinks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """cuDNN's kernels on the whole row and on its parts: of the last bits of 8, as between two kernels."""
    seq = 2500
    qkv, dout = (torch.randn(1, seq, h, 64, device="cuda").bfloat16() for h in (12, 8))
    q, k, v = qkv.split((8, 2, 2), 2)
    sinks = torch.randn(8, device="cuda").bfloat16() if with_sinks else None
    one = Attention(64 ** -0.5, True)
    right, kept = one.forward(q, k, v, sinks)
    *grads, dsinks = one.backward(dout, q, k, v, right, kept, sinks)
    monkeypatch.setattr(attention, "ROWS", 512)
    monkeypatch.setattr(attention, "LONG", seq)
    assert one.single_long_row(q, k, sinks)
    out, kept = one.forward(q, k, v, sinks)
    (blocks, gradients), found = one.walk_back(q, k, v, out, kept), [torch.empty_like(t) for t in (q, k, v)]
    for block in blocks:
        for to, d in zip(found, gradients(block, dout[:, block])):
            to[:, block] = d
    for a, b in zip((right, *grads), (out, *found)):
        assert fusing.error(a.float().cpu(), b.float().cpu()) < 1e-2
    if with_sinks:
        parts = [attention.sinks_grad(*attention._turned(dout[:, b], out[:, b]), kept[0][:, :, b], sinks).float()
                 for b in blocks]
        assert fusing.error(dsinks.float().cpu(), sum(parts).cpu()) < 1e-2


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_long_row_by_blocks_is_within_noise(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward in blocks of 256 queries, where it is one call each otherwise."""
    ids = torch.randint(0, 50, (1, 1000), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "labels": ids}
    loss, grads = gradients(streamed(larger(family), "replay"), batch)
    calls, own = [], Attention.walk_back

    def noted(*args: Any) -> Any:
        blocks, of = own(*args)
        return blocks, lambda block, dout: (calls.append(block), of(block, dout))[1]

    monkeypatch.setattr(attention, "ROWS", 256)
    monkeypatch.setattr(attention, "LONG", 1000)
    monkeypatch.setattr(Attention, "walk_back", noted)
    found, others = gradients(streamed(larger(family), "replay"), batch)
    assert calls[:4] == [slice(768, 1000), slice(512, 768), slice(256, 512), slice(0, 256)]
    assert fusing.error(loss, found) < fusing.ROUNDED_LOSS
    fusing.grads_agree(grads, others, fusing.ROUNDED_ONCE)


def test_a_layer_in_tiles_is_within_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = {"input_ids": torch.randint(0, 50, (4, 192), generator=torch.Generator().manual_seed(0))}
    batch["labels"] = batch["input_ids"]
    loss, grads = gradients(streamed(larger("qwen3"), "selective"), batch)
    monkeypatch.setattr(decoder, "TILE_BYTES", 0)
    found, others = gradients(streamed(larger("qwen3"), "selective"), batch)
    assert fusing.error(loss, found) < fusing.ROUNDED_LOSS
    fusing.grads_agree(grads, others, fusing.ROUNDED_ONCE)


# ---------------------------------------------------------------- windows, packed sequences

@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("rows, lengths, window", [(2, (), 700), (1, (1000, 1, 999), 300), (1, (1000, 1, 999), 0)])
def test_flash_with_windows_and_sinks_is_attention_by_a_mask(rows: int, lengths: tuple[int, ...], window: int,
                                                             with_sinks: bool) -> None:
    """Against cuDNN's kernels with the mask added; as in the test below, 4e-3 lie between two kernels."""
    device = torch.device("cuda")
    packed, seq = Packed.of(lengths, device) if lengths else None, 2000
    q, dout = (torch.randn(rows, seq, 8, 64, device="cuda").bfloat16() for _ in range(2))
    k, v = (torch.randn(rows, seq, 2, 64, device="cuda").bfloat16() for _ in range(2))
    sinks = torch.randn(8, device="cuda").bfloat16() if with_sinks else None
    sight = Sight(rows, seq, device, window, packed, torch.bfloat16)
    one, by_mask = Attention(64 ** -0.5, True, packed=packed, window=window), Attention(64 ** -0.5, False, sight.real)
    out, kept = one.forward(q, k, v, sinks)
    assert len(kept) == 3, "flash did not take it"
    found = (out, *one.backward(dout, q, k, v, out, kept, sinks))
    right, kept = by_mask.forward(q, k, v, sinks)
    for a, b in zip((right, *by_mask.backward(dout, q, k, v, right, kept, sinks)), found):
        assert (a is b is None) or fusing.error(a.float().cpu(), b.float().cpu()) < 1e-2


@pytest.mark.parametrize("family", ["mistral", "gemma3_text", "gpt_oss"])
def test_no_mask_of_all_pairs_of_tokens_is_made(family: str) -> None:
    """48k tokens: such a mask is 2.25 GiB, and 4.5 where it is added."""
    tokens, sizes = 49152, {**zoo.DECODER, "hidden_size": 128, "intermediate_size": 256, "head_dim": 64}
    build = fusing.lm(family, **{**sizes, "sliding_window": 1024, "max_position_embeddings": tokens,
                                 "num_local_experts": 4, "num_experts_per_tok": 2})
    model = streamed(build().bfloat16(), "replay")
    ids = torch.randint(0, 50, (1, tokens), device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    torch.cuda.synchronize()
    fusing.all_fused(fusing.codes(model))
    assert torch.isfinite(loss) and torch.cuda.max_memory_allocated() - before < 1 << 31
    mt.unstream(model)


def test_packed_attention_is_attention_one_by_one() -> None:
    """Flash over all sequences at once against cuDNN's kernels on each. Both round P, dS and the result to 8 bits, by some
    1.6e-3 in the mean (2^-8 at most): 2.8e-3 for the three, 4e-3 between two kernels. A sequence's neighbour is off by 1.
    """
    lengths = (1000, 1, 24, 3000, 71)
    shape = (1, sum(lengths))
    q, dout = (torch.randn(*shape, 8, 128, device="cuda").bfloat16() for _ in range(2))
    k, v = (torch.randn(*shape, 2, 128, device="cuda").bfloat16() for _ in range(2))
    kernel = Attention(128 ** -0.5, True, packed=Packed.of(lengths, torch.device("cuda")))
    out, kept = kernel.forward(q, k, v)
    assert len(kept) == 3, "flash did not take it"
    found = (out, *kernel.backward(dout, q, k, v, out, kept)[:3])
    one = Attention(128 ** -0.5, True)
    at = 0
    for n in lengths:
        part = [t[:, at:at + n].contiguous() for t in (q, k, v, dout)]
        out, kept = one.forward(*part[:3])
        for a, b in zip((out, *one.backward(part[3], *part[:3], out, kept)[:3]), found):
            assert fusing.error(a.float().cpu(), b[:, at:at + n].float().cpu()) < 1e-2
        at += n


def test_a_packed_row_trains_as_with_the_models_mask() -> None:
    lengths = (100, 30, 60)
    ids = torch.randint(0, 50, (1, sum(lengths)), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "labels": ids, "position_ids": torch.cat([torch.arange(n) for n in lengths])[None]}
    loss, grads = gradients(larger("llama").cuda(), batch)
    model = streamed(larger("llama"), "selective")
    found, others = gradients(model, batch)
    fusing.all_fused(fusing.codes(model))
    assert fusing.error(loss, found) < fusing.ROUNDED_LOSS
    fusing.grads_agree(grads, others, fusing.ROUNDED)
