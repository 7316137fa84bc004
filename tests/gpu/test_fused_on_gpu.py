"""Fused layers on CUDA: every family of test_fused.py and test_moe.py in fp32, then in bf16 at sizes that cuDNN's
attention and grouped products take. Skipped where torch sees no CUDA device.

In fp32 (no TF32) template and own code round the same products in other orders: fusing.TOLERANCE. In bf16 a trial
at each layer's first call has compared them; a dense model's gradients are compared once more as a whole, within
fusing.ROUNDED.
"""
from __future__ import annotations

from typing import Any

import doors
import fusing
import parity
import pytest
import test_fused
import test_moe
import torch
import zoo
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatrain_torch.base.packed import Packed
from megatrain_torch.fused.templates.attention import Attention

FAMILIES = test_fused.FAMILIES | test_fused.ALIKE | test_moe.FAMILIES | test_moe.NEWER
SIZES = dict(hidden_size=256, intermediate_size=512, head_dim=64, moe_intermediate_size=128, sliding_window=48,
             shared_expert_intermediate_size=128, shared_intermediate_size=128, query_pre_attn_scalar=64,
             qk_nope_head_dim=128, qk_rope_head_dim=64, qk_head_dim=192, v_head_dim=128, q_lora_rank=96, kv_lora_rank=64)
KERNELS = (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH, SDPBackend.CUDNN_ATTENTION)
BF16 = ("llama", "qwen2", "qwen3", "gemma2", "gemma3", "olmo2", "granite", "glm4", "mixtral", "qwen2_moe", "qwen3_moe",
        "olmoe", "gpt_oss", "dots1", "youtu", "deepseek_v3", "deepseek_v3_otherwise")


def gradients(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor | None]]:
    loss = model(**parity.to_device(batch, "cuda")).loss
    loss.backward()
    return parity.frozen(loss), {n: parity.frozen(p.grad) for n, p in model.named_parameters()}


def streamed(model: nn.Module, keep: str) -> nn.Module:
    return doors.stream(model, "cuda", compute="fused", plan={"activations": keep, "slots": 2, "debug": {"poison": True}})


def all_fused(model: nn.Module) -> None:
    codes = fusing.codes(model)
    if any("its router" in why for why in codes.values()):
        pytest.skip(f"this transformers has another router: {next(iter(codes.values()))}")
    fusing.all_fused(codes)


@pytest.mark.parametrize("family, keep", [(f, fusing.KEEPS[i % 3]) for i, f in enumerate(FAMILIES)])
def test_in_fp32_a_fused_family_has_the_gradients_of_plain_torch(family: str, keep: str) -> None:
    build = FAMILIES[family]
    with parity.exact("cuda"):
        parity.seed()
        loss, grads = gradients(build().cuda(), fusing.padded(0))
        parity.seed()
        model = streamed(build(), keep)
        found, others = gradients(model, fusing.padded(0))
    all_fused(model)
    assert fusing.error(loss, found) < fusing.TOLERANCE
    fusing.grads_agree(grads, others)


def larger(family: str) -> nn.Module:
    import transformers
    config = FAMILIES[family]().config
    for name, value in SIZES.items():
        if getattr(config, name, None) is not None:
            setattr(config, name, value)
    torch.manual_seed(7)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()


def long_text(pad: bool) -> dict[str, Tensor]:
    ids = zoo.tokens(zoo.generator(0), rows=4, length=192)
    mask = torch.ones_like(ids)
    mask[0, :20] = 0 if pad else 1
    return {"input_ids": ids, "labels": ids.masked_fill(mask == 0, -100)} | ({"attention_mask": mask} if pad else {})


@pytest.mark.parametrize("pad", [False, True])
@pytest.mark.parametrize("family", BF16)
def test_in_bf16_a_fused_family_passes_its_trials(family: str, pad: bool) -> None:
    # cuDNN's backward is NaN for rows of padding that see nothing (torch 2.11), and so would be the truth.
    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH] if pad else list(KERNELS)):
        loss, grads = gradients(larger(family).cuda(), long_text(pad))
    model = streamed(larger(family), "selective")
    found, others = gradients(model, long_text(pad))
    all_fused(model)
    assert fusing.error(loss, found) < fusing.ROUNDED_LOSS
    assert all(g is None or g.isfinite().all() for g in others.values())
    if family in test_fused.FAMILIES:        # in the others rounding decides some choices of experts
        fusing.grads_agree(grads, others, fusing.ROUNDED)


@pytest.mark.parametrize("family, rank", [("qwen3_moe", 16), ("gpt_oss", 8), ("mixtral", 3)])
def test_in_bf16_experts_with_lora_on_their_matrices_pass_their_trials(family: str, rank: int) -> None:
    peft = pytest.importorskip("peft", reason="PEFT is not installed")
    config = peft.LoraConfig(r=rank, init_lora_weights=False, target_modules=["q_proj"], task_type="CAUSAL_LM",
                             target_parameters=["experts.gate_up_proj", "experts.down_proj"])
    loss, grads = gradients(peft.get_peft_model(larger(family), config).cuda(), long_text(False))
    model = streamed(peft.get_peft_model(larger(family), config), "selective")
    found, others = gradients(model, long_text(False))
    all_fused(model)
    assert fusing.error(loss, found) < fusing.ROUNDED_LOSS
    assert all((g is None) == (others[n] is None) for n, g in grads.items())
    assert all(g is None or g.isfinite().all() for g in others.values())


# Of queries and keys, and of values: cuDNN's on Hopper and Blackwell; and what is filled up, or left to torch.
@pytest.mark.parametrize("sizes", [(192, 128), (96, 64), (160, 64)])
@pytest.mark.parametrize("sight", ["causal", "mask", "packed", "window", "repeating"])
def test_attention_with_heads_of_two_sizes_is_that_of_fp64(sizes: tuple[int, int], sight: str) -> None:
    g = torch.Generator().manual_seed(0)
    rows, tokens = (1 if sight == "packed" else 2), 256
    q, k, v, dout = (torch.randn(rows, tokens, 8, n, generator=g).bfloat16().cuda() for n in (*sizes[:1] * 2, *sizes[1:] * 2))
    at = torch.arange(tokens)
    seen = at[None] <= at[:, None]
    said: dict[str, Any] = {}
    if sight == "window":
        seen, said = seen & (at[None] > at[:, None] - 100), {"window": 100}
    elif sight == "packed":
        seen, said = seen & ((at[None] >= 90) == (at[:, None] >= 90)), {"packed": Packed.of((90, 166), q.device)}
    mask = torch.zeros(tokens, tokens, dtype=torch.float64).masked_fill(~seen, -1e30).cuda()[None, None]
    given = {"mask": mask.bfloat16().clamp(min=-1e38)} if sight == "mask" else {}
    kernel = Attention(0.1, causal=sight != "mask", values=sizes[1], **said, **given)
    torch.use_deterministic_algorithms(sight == "repeating")
    try:
        out, kept = kernel.forward(q, k, v)
        found = [out, *kernel.backward(dout, q, k, v, out, kept)[:3]]
    finally:
        torch.use_deterministic_algorithms(False)
    leaves = [t.double().requires_grad_() for t in (q, k, v)]
    wanted = Attention(0.1, False, mask)._torch(*(t.transpose(1, 2) for t in leaves)).transpose(1, 2)
    grads = torch.autograd.grad(wanted, leaves, dout.double())
    for name, a, b in zip(("out", "dq", "dk", "dv"), (wanted.detach(), *grads), found):
        assert a.shape == b.shape and fusing.error(a, b) < 1e-2, name        # P and out are rounded to 8 bits


@pytest.mark.parametrize("masked", [False, True])
def test_cudnns_attention_with_sinks_is_that_of_fp64(masked: bool) -> None:
    g = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g).bfloat16().cuda()

    q, k, v, dout, sinks = draw(2, 256, 8, 64), draw(2, 256, 2, 64), draw(2, 256, 2, 64), draw(2, 256, 8, 64), draw(8)
    mask = None
    if masked:                               # a sliding window, and rows that see nothing but the sink
        at = torch.arange(256)
        seen = (at[None] <= at[:, None]) & (at[None] > at[:, None] - 100)
        mask = torch.zeros(2, 1, 256, 256).masked_fill(~seen, torch.finfo(torch.bfloat16).min)
        mask[0, :, :30] = torch.finfo(torch.bfloat16).min
        mask = mask.bfloat16().cuda()
    kernel = Attention(0.125, causal=False, mask=mask)
    out, kept = kernel.forward(q, k, v, sinks)
    assert kept is not None, "cuDNN did not take it"
    found: list[Any] = [out, *kernel.backward(dout, q, k, v, out, kept, sinks)]
    leaves = [t.double().requires_grad_() for t in (q, k, v, sinks)]
    exact = Attention(0.125, causal=False, mask=None if mask is None else mask.double().clamp_min(-1e30))
    wanted = exact._torch(*(t.transpose(1, 2) for t in leaves[:3]), leaves[3]).transpose(1, 2)
    grads = torch.autograd.grad(wanted, leaves, dout.double())
    for name, a, b in zip(("out", "dq", "dk", "dv", "dsinks"), (wanted.detach(), *grads), found):
        assert fusing.error(a, b) < 1e-2, name           # P and out are rounded to 8 bits
