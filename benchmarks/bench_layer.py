#!/usr/bin/env python3
"""One decoder layer, forward and backward, by its template and by its own code: dense ones and mixtures of experts.

    python benchmarks/bench_layer.py                          # real widths on CUDA, toys without
    python benchmarks/bench_layer.py --only mixtral gpt_oss   # names that contain one

One JSON line per layer and way of keeping activations on stdout, a table on stderr. Weights lie on the device as in
a slot, random; nothing is streamed. `own_ms` is the module's own code under autograd, which keeps all activations.
The limit is the layer's products (attention's not among them; with `selective` g|u is made once more) at the rate
of one large torch.mm in the same run.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from common import add_device_argument, emit, repeat, say, spread, table
from torch import Tensor, nn

import megatrain_torch as mt
from megatrain_torch.fused.templates import Weights, template
from megatrain_torch.model.stream import runtime_of

QWEN = {"attention_dropout": 0.0, "rms_norm_eps": 1e-6}
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
# Widths of one layer: of Qwen2.5-7B, Llama-3.1-8B, Mixtral-8x7B, Qwen3-30B-A3B, OLMoE-1B-7B and gpt-oss-20b.
LAYERS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2_7b": ("qwen2", dict(hidden_size=3584, intermediate_size=18944, num_attention_heads=28,
                               num_key_value_heads=4, **QWEN)),
    "llama_8b": ("llama", dict(hidden_size=4096, intermediate_size=14336, num_attention_heads=32,
                               num_key_value_heads=8)),
    "mixtral_8x7b": ("mixtral", dict(hidden_size=4096, intermediate_size=14336, num_attention_heads=32,
                                     num_key_value_heads=8, num_local_experts=8, num_experts_per_tok=2)),
    "qwen3_30b_a3b": ("qwen3_moe", dict(hidden_size=2048, moe_intermediate_size=768, num_attention_heads=32,
                                        num_key_value_heads=4, head_dim=128, num_experts=128, num_experts_per_tok=8,
                                        norm_topk_prob=True, decoder_sparse_step=1, **QWEN)),
    "olmoe_1b_7b": ("olmoe", dict(hidden_size=2048, intermediate_size=1024, num_attention_heads=16,
                                  num_key_value_heads=16, num_experts=64, num_experts_per_tok=8)),
    "gpt_oss_20b": ("gpt_oss", dict(hidden_size=2880, intermediate_size=2880, num_attention_heads=64,
                                    num_key_value_heads=8, head_dim=64, num_local_experts=32, num_experts_per_tok=4,
                                    **ROPE)),
}  # fmt: skip
TOY = dict(hidden_size=64, intermediate_size=64, moe_intermediate_size=32, num_attention_heads=4, head_dim=16,
           num_key_value_heads=2, num_experts=4, num_local_experts=4, num_experts_per_tok=2)  # fmt: skip


class Layer(NamedTuple):
    """A layer with what it is called with.

    settings: what a proof finds of it. product_flops: of its matrix products, forward, for all tokens; gu_flops: of
    those that make g|u.
    """

    module: nn.Module
    x: Tensor
    kwargs: dict[str, Any]
    settings: Any
    product_flops: float
    gu_flops: float


def slotted(module: nn.Module) -> None:
    """Its parameters side by side, matrices first, each at a multiple of 512 bytes: as in a slot."""
    params = sorted(module.parameters(), key=lambda p: p.dim() < 2)
    places, end = [], 0
    for p in params:
        places.append(end)
        end += -(-p.nbytes // 512) * 512
    memory = torch.empty(end, dtype=torch.uint8, device=params[0].device)
    for p, at in zip(params, places, strict=True):
        new = memory[at : at + p.nbytes].view(p.dtype).view(p.shape)
        new.copy_(p.detach())
        p.data = new


def settings_of(name: str) -> Any:
    """What a proof finds of a layer of this kind, by a small one."""
    import transformers

    kind, sizes = LAYERS[name]
    small = {**sizes, **{k: v for k, v in TOY.items() if k in sizes}, "vocab_size": 128, "num_hidden_layers": 1}
    config = transformers.AutoConfig.for_model(kind, **small, use_cache=False, pad_token_id=0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()
    model = mt.stream(model, "cpu", compute="fused")
    model(input_ids=torch.zeros(1, 16, dtype=torch.int64))
    (window,) = (w for w in runtime_of(model).windows if w.name == "model.layers.0")
    return window.fused._reader.last.found[0]


def make(name: str, args: argparse.Namespace, device: torch.device) -> Layer:
    import transformers

    kind, sizes = LAYERS[name]
    toy = {k: v for k, v in TOY.items() if k in sizes} if device.type == "cpu" else {}
    config = transformers.AutoConfig.for_model(
        kind, **{**sizes, **toy}, vocab_size=128, num_hidden_layers=1, use_cache=False,
        max_position_embeddings=args.seq, pad_token_id=0,
    )  # fmt: skip
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()
    layer, seen = model.model.layers[0], {}
    slotted(layer)
    hook = layer.register_forward_pre_hook(lambda m, a, k: seen.update(k), with_kwargs=True)
    ids = torch.zeros(args.tokens // args.seq, args.seq, dtype=torch.int64, device=device)
    with torch.no_grad():
        model.model(ids)
    hook.remove()
    x = torch.randn(*ids.shape, config.hidden_size, device=device).bfloat16()
    share = getattr(config, "num_experts_per_tok", 1) / getattr(config, "num_local_experts", getattr(
        config, "num_experts", 1))  # fmt: skip
    counts = {
        n: p.numel() * (share if "experts." in n else 1)
        for n, p in layer.named_parameters()
        if p.dim() > 1
    }
    gu = sum(c for n, c in counts.items() if "gate_up" in n or "gate_proj" in n or "up_proj" in n)
    return Layer(
        layer, x, dict(seen), settings_of(name), 2.0 * sum(counts.values()) * args.tokens,
        2.0 * gu * args.tokens,
    )


def by_template(layer: Layer, keep: str) -> Callable[[], None]:
    found = template(layer.module).set_as(layer.settings)
    params = dict(layer.module.named_parameters())
    weights, dy = Weights({n: p.detach() for n, p in params.items()}), torch.randn_like(layer.x)

    def run() -> None:
        with torch.no_grad():
            _, call = found.take(layer.module, layer.x, layer.kwargs)
            _, kept = found.forward(layer.x, weights, call, keep)
            found.backward(dy, layer.x, kept, weights, call, tuple(params))

    return run


def by_its_own_code(layer: Layer) -> Callable[[], None]:
    x, dy = layer.x.clone().requires_grad_(), torch.randn_like(layer.x)
    leaves = [x, *layer.module.parameters()]

    def run() -> None:
        torch.autograd.grad(layer.module(x, **layer.kwargs), leaves, dy)

    return run


def own_ms(layer: Layer, device: torch.device, reps: int) -> float | None:
    """None where its activations do not fit (attention one product after the other)."""
    try:
        return spread(repeat(by_its_own_code(layer), device, reps))["median"] * 1e3
    except torch.OutOfMemoryError:
        return None


def mm_rate(device: torch.device, reps: int) -> float:
    """FLOP/s of one product that is large enough to be bound by arithmetic."""
    n = 8192 if device.type == "cuda" else 256
    a, b = (torch.randn(n, n, device=device).bfloat16() for _ in range(2))
    return 2.0 * n**3 / spread(repeat(lambda: a @ b, device, reps))["median"]


def parse_args() -> tuple[argparse.Namespace, torch.device]:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    device = add_device_argument(parser)
    tiny = device.type == "cpu"
    parser.add_argument("--only", nargs="*", default=[], help="names that contain one of these")
    parser.add_argument("--tokens", type=int, default=64 if tiny else 16384)
    parser.add_argument("--seq", type=int, default=32 if tiny else 4096)
    parser.add_argument("--reps", type=int, default=2 if tiny else 10)
    return parser.parse_args(), device


def main() -> None:
    args, device = parse_args()
    rate = mm_rate(device, args.reps)
    rows = [("torch.mm", f"{rate / 1e12:8.1f} TFLOP/s")]
    for name in LAYERS:
        if args.only and not any(word in name for word in args.only):
            continue
        layer = make(name, args, device)
        own = own_ms(layer, device, args.reps)
        for keep in ("saved", "selective"):
            flops = 3 * layer.product_flops + (layer.gu_flops if keep == "selective" else 0)
            ms = spread([s * 1e3 for s in repeat(by_template(layer, keep), device, args.reps)])
            emit("layer", device, case=f"{name} {keep}", unit="ms", **ms, flops=flops, limit=flops / rate * 1e3,
                 limit_from="torch.mm", own_ms=own, tokens=args.tokens, seq=args.seq)  # fmt: skip
            rows.append((f"{name} {keep}", f"{ms['median']:8.2f} ms, products {flops / rate * 1e3:8.2f} ms, "
                                           f"own code {own or 0:8.2f} ms"))  # fmt: skip
        del layer
    say(f"{args.tokens} tokens, sequences of {args.seq}")
    table(rows)


if __name__ == "__main__":
    main()
