#!/usr/bin/env python3
"""LoRA beside a frozen mixture of codes, random ones: steps over the same batch, and the plan's time and bytes beside.

    python benchmarks/bench_codes.py --model gpt-oss-120b --tokens 32768 --vram 24GiB --host 80GiB
    python benchmarks/bench_codes.py --model gpt-oss-120b --layers 6 --tokens 32768 --vram 100GiB --experts 16
    python benchmarks/bench_codes.py --model deepseek-v3 --layers 3 --tokens 16384 --vram 60GiB --experts 8
    python benchmarks/bench_codes.py --model deepseek-v3 --tiny --device cpu
    python benchmarks/bench_codes.py --model qwen3-30b --tokens 32768 --adapt-experts   # both rates and their ratio
    torchrun --nproc-per-node 2 benchmarks/bench_codes.py --model llama-70b --tokens 16384 --vram 24GiB   # a GPU each

MXFP4 for gpt-oss, NF4 for llama, 16 bits for qwen3-30b, block-fp8 for the others; adapters of rank 16 on attention, of
llama on all products. --adapt-experts: then a second run, with adapters on all experts' matrices too, and "ratio", its
tokens/s by the first run's.
Tokens are those of each process, and a plan's and the median are of all. One JSON line on stdout, plan and
progress on stderr. "seconds": the median of all steps but the first two. Host memory holds
all codes while they are made.
"""

from __future__ import annotations

import argparse
import gc
import statistics
from typing import Any

import bench_loop as loop
import torch
from common import GIB, Clock, add_device_argument, emit, fill_cheaply, say
from peft import LoraConfig, get_peft_model
from transformers import DeepseekV3Config, GptOssConfig, LlamaConfig, PreTrainedConfig, Qwen3MoeConfig

import megatrain_torch as mt
from megatrain_torch.base.codes import Coded
from megatrain_torch.plans.shapes import shaped

# transformers' defaults are gpt-oss-120b's and DeepSeek-V3's own.
QWEN3_235B = dict(hidden_size=4096, moe_intermediate_size=1536, num_attention_heads=64, num_key_value_heads=4)
QWEN3_235B |= dict(head_dim=128, num_experts=128, num_experts_per_tok=8, num_hidden_layers=94, vocab_size=151936)
QWEN3_30B = QWEN3_235B | dict(hidden_size=2048, moe_intermediate_size=768, num_attention_heads=32, num_hidden_layers=48)
LLAMA_70B = dict(hidden_size=8192, intermediate_size=28672, num_attention_heads=64, num_key_value_heads=8)
LLAMA_70B |= dict(num_hidden_layers=80, vocab_size=128256)
QKV, LATENT = ["q_proj", "k_proj", "v_proj"], ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"]
MODELS: dict[str, tuple[type[PreTrainedConfig], dict[str, Any], str, list[str]]] = {
    "llama-70b": (LlamaConfig, LLAMA_70B, "nf4", [*QKV, "gate_proj", "up_proj", "down_proj"]),
    "gpt-oss-120b": (GptOssConfig, {"num_local_experts": 128, "num_hidden_layers": 36}, "mxfp4", QKV),
    "qwen3-235b": (Qwen3MoeConfig, QWEN3_235B, "fp8", QKV),
    "qwen3-30b": (Qwen3MoeConfig, QWEN3_30B, "", QKV),
    "deepseek-v3": (DeepseekV3Config, {"first_k_dense_replace": 3}, "fp8", LATENT),
}
TINY: dict[str, Any] = dict(hidden_size=256, intermediate_size=256, moe_intermediate_size=128, num_hidden_layers=2)
TINY |= dict(num_attention_heads=4, num_key_value_heads=4, head_dim=32, vocab_size=512, num_experts_per_tok=2)
TINY |= dict(q_lora_rank=128, kv_lora_rank=128, qk_nope_head_dim=32, qk_rope_head_dim=32, v_head_dim=32)
TINY |= dict(n_routed_experts=8, num_local_experts=8, num_experts=8, n_group=2, topk_group=1)


def parse_args() -> tuple[argparse.Namespace, torch.device]:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    device = add_device_argument(parser)
    add = parser.add_argument
    add("--model", choices=list(MODELS), default="gpt-oss-120b")
    add("--layers", type=int, help="fewer than it has; of DeepSeek-V3's the first is dense then")
    add("--tiny", action="store_true", help="with toy sizes")
    add("--seq", type=int, default=1024)
    add("--tokens", type=int, default=32768, help="in a step")
    add("--steps", type=int, default=12)
    add("--experts", type=int, help="of a layer, fetched at a time; 0: all; default: the plan's choice")
    add("--adapt-experts", action="store_true", help="a second run, with adapters on experts' matrices too")
    add("--compute", default="auto", choices=["auto", "eager", "fused"])
    add("--machine", help="for the plan; default: this one")
    add("--vram", help='the most of the device that may be used, as "24GiB"')
    add("--host", help='the most of host memory that may be used, as "80GiB"')
    args = parser.parse_args()
    if args.adapt_experts and MODELS[args.model][0] is LlamaConfig:  # of which PEFT says no more than a warning
        parser.error(f"--adapt-experts: {args.model} has no experts")
    if args.tiny:
        args.seq, args.tokens, args.machine = 64, 128, args.machine or "h200"
    return args, device


def config_of(args: argparse.Namespace) -> Any:
    kind, sizes, base, _ = MODELS[args.model]
    sizes = sizes | (TINY if args.tiny else {})
    if args.layers:
        sizes |= {"num_hidden_layers": args.layers}
    if "first_k_dense_replace" in sizes and sizes.get("num_hidden_layers", 61) < 10:
        sizes["first_k_dense_replace"] = 1
    attention = "eager" if kind is GptOssConfig else "sdpa"
    config = kind(**sizes, use_cache=False, attn_implementation=attention, dtype=torch.bfloat16)
    if base:
        config.quantization_config = {"quant_method": base, "weight_block_size": [128, 128]}
    return config


def some_bytes(shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """Pseudo-random, and no NaN among numbers of fp8."""
    out = torch.empty(shape, dtype=torch.uint8)
    block = torch.randint(256, (1 << 22,), dtype=torch.uint8) & 0xBF
    for part in out.view(-1).split(len(block)):
        part.copy_(block[: len(part)])
    return out.view(dtype)


def filled(p: torch.Tensor, seed: int) -> torch.nn.Parameter:
    if isinstance(p, Coded):
        scales = torch.full(p.scales.shape, 120 if p.form == "mxfp4" else 0.01, dtype=p.scales.dtype)
        made: torch.Tensor = Coded(some_bytes(p.codes.shape, p.codes.dtype), scales, p.form, p.dtype)
    else:
        made = torch.ones(p.shape, dtype=p.dtype) if p.dim() == 1 else fill_cheaply(p.shape, p.dtype, 0.02, seed)
    return torch.nn.Parameter(made, requires_grad=False)


def four_bits(old: torch.nn.Linear, filled_here: bool) -> torch.nn.Module:
    """bitsandbytes' layer in place of one on the meta device, as its quantizer leaves it with double quantisation."""
    from bitsandbytes.functional import QuantState, create_dynamic_map, get_4bit_type
    from bitsandbytes.nn import Linear4bit, Params4bit

    rows, columns = old.weight.shape
    blocks, where = rows * columns // 64, "cpu" if filled_here else "meta"
    codes = torch.empty(rows * columns // 2, 1, dtype=torch.uint8, device="meta")
    absmax = torch.full((blocks,), 128, dtype=torch.uint8, device=where)
    scales = torch.full((-(-blocks // 256),), 0.05, device=where)
    nested = QuantState(absmax=scales, code=create_dynamic_map().to(where), blocksize=256, dtype=torch.float32)
    state = QuantState(absmax=absmax, shape=torch.Size((rows, columns)), code=get_4bit_type("nf4", device=where),
                       blocksize=64, quant_type="nf4", dtype=torch.bfloat16, offset=torch.tensor(0.05, device=where),
                       state2=nested)
    with torch.device("meta"):
        made = Linear4bit(columns, rows, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4")
    made.weight = Params4bit(some_bytes(codes.shape, codes.dtype) if filled_here else codes, requires_grad=False,
                             quant_state=state, quant_type="nf4", bnb_quantized=True, module=made)
    made.quant_state = state
    return made


def build(args: argparse.Namespace, experts: bool) -> Any:
    """The first process of several has the weights. experts: have adapters too."""
    torch.manual_seed(0)
    config, (*_, base, targets) = config_of(args), MODELS[args.model]
    model: Any = shaped(config, None if base in ("", "nf4") else base)
    for name, m in list(model.named_modules()) if base == "nf4" else ():
        if type(m) is torch.nn.Linear and name != "lm_head":
            model.set_submodule(name, four_bits(m, loop.rank() == 0))
    for seed, module in enumerate(model.modules() if loop.rank() == 0 else ()):
        for name, p in list(module._parameters.items()):
            if p is not None and p.is_meta:
                module._parameters[name] = filled(p, seed)
        for name, b in list(module._buffers.items()):
            if b is not None and b.is_meta:
                module._buffers[name] = torch.zeros(b.shape, dtype=b.dtype)
    model.model.rotary_emb = type(model.model.rotary_emb)(config)  # its buffers are values
    if base:
        del config.quantization_config
    parameters = ["experts.gate_up_proj", "experts.down_proj"] if experts else None
    return get_peft_model(
        model, LoraConfig(r=16, target_modules=[*targets, "o_proj"], target_parameters=parameters)
    ).train()


def main() -> None:
    args, device = parse_args()
    if loop.several() > 1:
        loop.joined(device.type == "cuda")
    rate = run(args, device, False)
    if args.adapt_experts:
        gc.collect()  # the first model: both would not fit the host
        run(args, device, True, rate)


def run(args: argparse.Namespace, device: torch.device, experts: bool, other: float = 0.0) -> float:
    """tokens/s, with adapters on experts or not. other: those of the run before."""
    many = loop.several()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    model = build(args, experts)
    asked = {"tokens": args.tokens, "seq": args.seq, "experts": args.experts, "compute": args.compute}
    limits = {name: getattr(args, name) for name in ("machine", "vram", "host") if getattr(args, name)}
    plan = loop.of_first(None if loop.rank() else mt.plan(model, gpus=many, **asked, **limits))
    if loop.rank() == 0:
        say(str(plan))
    model = mt.stream(model, device, plan=plan, compute=args.compute)
    opt = mt.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4, max_grad_norm=1.0)
    draw = torch.Generator().manual_seed(loop.rank())
    ids = torch.randint(config_of(args).vocab_size, (args.tokens // args.seq, args.seq), generator=draw).to(device)
    clock, losses = Clock(device), []
    for _ in range(args.steps):
        clock.mark()
        for part in ids.chunk(plan.micro):
            loss = model(input_ids=part, labels=part).loss / plan.micro
            loss.backward()
        opt.step()
        opt.zero_grad()
        losses.append(loss.detach() * plan.micro)
    clock.mark()
    seconds = [max(step) for step in zip(*loop.of_each(clock.intervals()))]
    host = sum(loop.of_each(loop.pss()))
    median = statistics.median(seconds[2:] or seconds)
    rate = many * args.tokens / median
    if loop.rank():
        return rate
    peak = torch.cuda.max_memory_reserved() / GIB if device.type == "cuda" else None
    emit(
        "codes",
        device,
        model=args.model,
        layers=args.layers,
        tokens=args.tokens,
        seq=args.seq,
        experts=plan.experts,
        unit="tokens/s",
        ranks=many,
        median=rate,
        adapted_experts=experts,
        ratio=rate / other if other else None,
        planned=plan.tokens_per_second,
        seconds=median,
        planned_s=plan.seconds,
        first_s=seconds[0],
        reserved_gib=peak,
        planned_gib=plan.vram_bytes / GIB,
        pss_gib=host / GIB,
        losses=[float(x) for x in losses],
    )
    say(str(mt.explain(model)))
    if other:
        say(f"adapters on attention alone {other:,.0f} tokens/s, on experts too {rate:,.0f}: {rate / other:.3f}")
    return rate


if __name__ == "__main__":
    main()
