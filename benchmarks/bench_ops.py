#!/usr/bin/env python3
"""The layer ops: time and rate of each, beside the machine's limit and torch's own way.

    python benchmarks/bench_ops.py                      # 7B widths on CUDA, toy sizes without
    python benchmarks/bench_ops.py --only rms rope      # names that contain one

One JSON line per measurement on stdout, a table on stderr. `bytes` is what must be read and written once;
`torch_ms` is what eager torch takes for the same result. The limit of an op bound by memory is a copy on the
device in the same run, read and written bytes counted; that of a product of matrices is torch.mm of its shape.
"""

from __future__ import annotations

import argparse
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from common import add_device_argument, add_shape_arguments, emit, repeat, say, spread, table
from torch import Tensor

from megatrain_torch import ops
from megatrain_torch.fused.loss import linear_cross_entropy

Call = Callable[[], Any]
COPY_BYTES = 2**30
HEAD_TOKENS = 4096  # of the head's products: logits are made in chunks


class Case(NamedTuple):
    """One op at one shape. Bound by memory (nbytes), or by arithmetic (flops, and mm: the same as torch.mm)."""

    name: str
    shape: str
    call: Call
    torch: Call | None
    nbytes: int = 0
    flops: float = 0
    mm: Call | None = None


class Maker:
    """Random tensors of the run's device and type."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype

    def __call__(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.randn(*shape, device=self.device).to(dtype or self.dtype)


def nbytes(*tensors: Tensor | None) -> int:
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)


# ---- the ops: each room yields its cases, with memory that lives until the next one ----


def sumsq(args: argparse.Namespace, new: Maker) -> Iterator[Case]:
    g = new(args.inter, args.hidden)
    shape = f"[{args.inter}, {args.hidden}]"
    yield Case(
        "sumsq",
        shape,
        lambda: torch.ops.megatrain.sumsq(g),
        lambda: torch.linalg.vector_norm(g, dtype=torch.float32),
        nbytes(g),
    )


def adamw(args: argparse.Namespace, new: Maker) -> Iterator[Case]:
    """One step of a projection's weights; torch's has fp32 weights, so no low halves, and fp32 gradients."""
    n = args.inter * args.hidden
    for dtype in (torch.bfloat16, torch.float32):
        hi, grad = new(n, dtype=dtype), new(n, dtype=dtype)
        lo = torch.zeros(n, dtype=torch.int16, device=new.device) if dtype == torch.bfloat16 else None
        m, v = torch.zeros(n, device=new.device), torch.zeros(n, device=new.device)
        mine = torch.nn.Parameter(new(n, dtype=torch.float32))
        mine.grad = torch.randn_like(mine)
        yield Case(
            "adamw",
            f"[{n}] {str(dtype).removeprefix('torch.')}",
            functools.partial(torch.ops.megatrain.adamw_, hi, lo, m, v, grad, 1e-3, 0.9, 0.999, 1e-8, 0.1, 1, 1.0),
            torch.optim.AdamW([mine], fused=True).step,
            2 * nbytes(hi, lo, m, v) + nbytes(grad),
        )


def product(name: str, c: Tensor, a: Tensor, b: Tensor, beta: float) -> Case:
    """gemm_ beside torch's way to the same result; the limit is torch.mm with the same operands."""

    def eager() -> None:
        c.add_(torch.mm(a, b)) if beta else torch.mm(a, b, out=c)

    shape = f"[{a.shape[0]}, {a.shape[1]}] @ [{b.shape[0]}, {b.shape[1]}] -> {str(c.dtype).removeprefix('torch.')}"
    flops = 2.0 * a.shape[0] * a.shape[1] * b.shape[1]
    mine = functools.partial(ops.gemm_, c, a, b, beta=beta)
    return Case(name, shape, mine, eager, flops=flops, mm=lambda: torch.mm(a, b))


def gemm(args: argparse.Namespace, new: Maker) -> Iterator[Case]:
    """Each projection forward, its input's gradient, and its weight's, added up in fp32."""
    wide_q, wide_kv = args.hidden, args.hidden // args.heads * args.kv
    projections = {
        "qkv": (args.hidden, wide_q + 2 * wide_kv),
        "o": (wide_q, args.hidden),
        "gate_up": (args.hidden, 2 * args.inter),
        "down": (args.inter, args.hidden),
    }
    for name, (fan_in, fan_out) in projections.items():
        x, dy, w = new(args.tokens, fan_in), new(args.tokens, fan_out), new(fan_out, fan_in)
        yield product(f"gemm {name} forward", torch.empty_like(dy), x, w.t(), 0.0)
        yield product(f"gemm {name} dgrad", torch.empty_like(x), dy, w, 0.0)
        dw = new(fan_out, fan_in, dtype=torch.float32)
        yield product(f"gemm {name} wgrad", dw, dy.t(), x, 1.0)
    rows = min(args.tokens, HEAD_TOKENS)
    x, dy, w = new(rows, args.hidden), new(rows, args.vocab), new(args.vocab, args.hidden)
    yield product("gemm head forward", torch.empty_like(dy), x, w.t(), 0.0)
    yield product("gemm head dgrad", torch.empty_like(x), dy, w, 0.0)
    yield product("gemm head wgrad", torch.zeros_like(w, dtype=torch.float32), dy.t(), x, 1.0)


def grouped(args: argparse.Namespace, new: Maker) -> Iterator[Case]:
    """Gate and up of Qwen3-30B-A3B's experts: 128 of them, 8 for each token, 2048 -> 2 x 768."""
    experts, fan_in, fan_out = (128, 2048, 1536) if new.device.type == "cuda" else (4, 64, 48)
    rows = args.tokens * 8
    x, dy, w = new(rows, fan_in), new(rows, fan_out), new(experts, fan_in, fan_out)
    share = torch.rand(experts, generator=torch.Generator().manual_seed(0)) + 0.5  # uneven, as routers are
    ends = (share.cumsum(0) / share.sum() * rows).round().int()
    offsets, spans = ends.to(new.device), list(itertools.pairwise([0, *ends.tolist()]))
    shape, flops = f"{experts} x [{fan_in}, {fan_out}], {rows} rows", 2.0 * rows * fan_in * fan_out
    one = w[0]
    yield Case(
        "grouped forward",
        shape,
        lambda: ops.grouped_gemm(x, w, offsets),
        lambda: [x[i:j] @ w[e] for e, (i, j) in enumerate(spans)],
        flops=flops,
        mm=lambda: x @ one,
    )
    yield Case(
        "grouped dgrad",
        shape,
        lambda: ops.grouped_gemm_dgrad(dy, w, offsets),
        lambda: [dy[i:j] @ w[e].t() for e, (i, j) in enumerate(spans)],
        flops=flops,
        mm=lambda: dy @ one.t(),
    )
    yield Case(
        "grouped wgrad",
        shape,
        lambda: ops.grouped_gemm_wgrad(x, dy, offsets),
        lambda: [x[i:j].t() @ dy[i:j] for i, j in spans],
        flops=flops,
        mm=lambda: x.t() @ dy,
    )


def experts(args: argparse.Namespace, new: Maker) -> Iterator[Case]:
    """What lies between the products of Qwen3-30B-A3B's experts: rows there and back, and their gates."""
    hidden, inter, k = (2048, 768, 8) if new.device.type == "cuda" else (64, 24, 8)
    tokens, rows = args.tokens // 4, args.tokens // 4 * k
    x, base, y = new(tokens, hidden), new(tokens, hidden), new(rows, hidden)
    place = torch.randperm(rows, generator=torch.Generator().manual_seed(0)).to(new.device)
    token, weights = place // k, torch.rand(rows, device=new.device)
    gu, dact = new(rows, 2 * inter), new(rows, inter)
    shape = f"[{tokens}, {hidden}], {k} each"
    yield Case("sum_rows gather", shape, lambda: ops.sum_rows(x, token, rows), lambda: x.index_select(0, token),
               2 * nbytes(y))

    def eager() -> Tensor:
        return base + (y[place] * weights.to(y.dtype).unsqueeze(1)).view(tokens, k, hidden).sum(1)

    yield Case("sum_rows combine", shape, lambda: ops.sum_rows(y, place, tokens, weights, base), eager,
               nbytes(y, base, x))
    shape = f"[{rows}, {inter}]"
    yield Case("expert_glu", shape, lambda: ops.expert_glu(gu), None, nbytes(gu, dact))
    yield Case("expert_glu pairs", shape, lambda: ops.expert_glu(gu, ops.CLAMPED, True), None, nbytes(gu, dact))
    yield Case("expert_glu_backward", shape, lambda: ops.expert_glu_backward(dact, gu, weights=weights, order=place),
               None, 2 * nbytes(gu, dact))


def expand(args: argparse.Namespace, new: Maker) -> Iterator[Case]:
    """A layer's gate and up, of each format of codes."""
    n, k = 2 * args.inter, args.hidden
    out, u8 = new(n, k), functools.partial(torch.randint, 256, device=new.device, dtype=torch.uint8)
    groups = torch.rand(n * k // 64, device=new.device)
    double = torch.rand(-(-n * k // 64 // 256), device=new.device), torch.rand(256, device=new.device), groups[:1]
    blocks = torch.rand(-(-n // 128) if n % 128 == 0 else 1, -(-k // 128) if k % 128 == 0 else 1, device=new.device)
    finite = torch.randn(n, k, device=new.device).to(torch.float8_e4m3fn)
    strands = {
        "nf4": (u8((n * k // 2, 1)), groups),
        "nf4 double": (u8((n * k // 2, 1)), u8((n * k // 64,)), *double),
        "fp4": (u8((n * k // 2, 1)), groups),
        "int8": (u8((n, k)).view(torch.int8), torch.rand(n, device=new.device)),
        "fp8": (finite, blocks),
        "mxfp4": (u8((1, n, k // 32, 16)), u8((1, n, k // 32)) % 250 + 1),
    }
    for name, own in strands.items():
        to = out.view(1, k, n) if name == "mxfp4" else out
        call = functools.partial(ops.expand_codes_, to, name.split()[0], *own, group=64)
        yield Case(f"expand_codes {name}", f"[{n}, {k}]", call, None, nbytes(out, *own))


def eager_rms(x: Tensor, w: Tensor) -> Tensor:
    """transformers' LlamaRMSNorm."""
    wide = x.float()
    return w * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def eager_gradient(forward: Callable[..., Tensor], dy: Tensor, *inputs: Tensor) -> Call:
    """Autograd's backward alone: the graph is recorded here, and kept."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    y = forward(*leaves)
    return lambda: torch.autograd.grad(y, leaves, dy, retain_graph=True)


def norm(args: argparse.Namespace, new: Maker) -> Iterator[Case]:
    """Of the residual stream."""
    x, add, dy, w, b = (new(*n) for n in (*[(args.tokens, args.hidden)] * 3, *[(args.hidden,)] * 2))
    shape, each = f"[{args.tokens}, {args.hidden}]", nbytes(x)
    _, _, rstd = ops.rms_norm(x, w, 1e-6)
    back = eager_gradient(eager_rms, dy, x, w)
    yield Case("rms_norm", shape, lambda: ops.rms_norm(x, w, 1e-6), lambda: eager_rms(x, w), 2 * each)
    yield Case(
        "rms_norm add",
        shape,
        lambda: ops.rms_norm(x, w, 1e-6, add=add),
        lambda: eager_rms(x + add, w),
        4 * each,
    )
    yield Case("rms_norm_backward", shape, lambda: ops.rms_norm_backward(dy, x, w, rstd), back, 3 * each)
    yield Case(
        "rms_norm_backward add rebuild",
        shape,
        lambda: ops.rms_norm_backward(dy, x, w, rstd, add=add, rebuild=True),
        lambda: (back()[0] + add, eager_rms(x, w)),
        5 * each,
    )
    _, _, mean, rstd = ops.layer_norm(x, w, b, 1e-5)

    def eager_layer(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return torch.nn.functional.layer_norm(x, (args.hidden,), w, b, 1e-5)

    yield Case("layer_norm", shape, lambda: ops.layer_norm(x, w, b, 1e-5), lambda: eager_layer(x, w, b), 2 * each)
    yield Case(
        "layer_norm_backward",
        shape,
        lambda: ops.layer_norm_backward(dy, x, w, mean, rstd, bias=b),
        eager_gradient(eager_layer, dy, x, w, b),
        3 * each,
    )


def head_norm(args: argparse.Namespace, new: Maker) -> Iterator[Case]:
    """Of q's heads inside qkv, as Qwen3 has them; the gradient in place."""
    qkv = new(args.tokens, args.heads + 2 * args.kv, args.head)
    q, w = qkv[:, : args.heads], new(args.head)
    dq = new(*q.shape)
    shape, each = f"[{args.tokens}, {args.heads}, {args.head}] in qkv", nbytes(q)
    _, _, rstd = ops.rms_norm(q, w, 1e-6)
    yield Case("rms_norm heads", shape, lambda: ops.rms_norm(q, w, 1e-6), lambda: eager_rms(q, w), 2 * each)
    yield Case(
        "rms_norm_backward heads",
        shape,
        lambda: ops.rms_norm_backward(dq, q, w, rstd, dx=dq),
        eager_gradient(eager_rms, dq, q, w),
        3 * each,
    )


def eager_glu_backward(dh: Tensor, gate: Tensor, up: Tensor, act: int, outs: list[Tensor]) -> None:
    """What eager torch runs for glu_backward with h: dgate, dup and h, in five passes."""
    how = "tanh" if act == ops.GELU_TANH else "none"
    dgate, dup, h = outs
    if act == ops.SILU:
        a = torch.nn.functional.silu(gate)
        torch.ops.aten.silu_backward.grad_input(dh * up, gate, grad_input=dgate)
    else:
        a = torch.nn.functional.gelu(gate, approximate=how)
        torch.ops.aten.gelu_backward.grad_input(dh * up, gate, approximate=how, grad_input=dgate)
    torch.mul(dh, a, out=dup)
    torch.mul(a, up, out=h)


def glu(args: argparse.Namespace, new: Maker) -> Iterator[Case]:
    """SwiGLU and its like on the halves of a fused projection's output, and the gradient of the qkv biases."""
    both, dboth = new(args.tokens, 2 * args.inter), new(args.tokens, 2 * args.inter)
    (gate, up), dh = both.split(args.inter, 1), new(args.tokens, args.inter)
    outs = [*dboth.split(args.inter, 1), torch.empty_like(dh)]
    shape = f"[{args.tokens}, {args.inter}]"
    eager: Call = lambda: torch.nn.functional.silu(gate) * up  # noqa: E731
    yield Case("glu silu", shape, lambda: ops.glu(gate, up), eager, nbytes(both, dh))
    for name, act in {"silu": ops.SILU, "gelu_tanh": ops.GELU_TANH, "gelu": ops.GELU}.items():
        call = functools.partial(ops.glu_backward, dh, gate, up, act, **dict(zip(("dgate", "dup", "h"), outs)))
        eager = functools.partial(eager_glu_backward, dh, gate, up, act, outs)
        yield Case(f"glu_backward {name}", shape, call, eager, nbytes(both, dh, *outs))
    width = args.hidden + 2 * (args.hidden // args.heads * args.kv)
    dy = new(args.tokens, width)
    yield Case("column_sum", f"[{args.tokens}, {width}]", lambda: ops.column_sum(dy), lambda: dy.sum(0), nbytes(dy))


def rope(args: argparse.Namespace, new: Maker) -> Iterator[Case]:
    """Forward in place in qkv; backward from attention's gradients into the gradient of qkv, v's copied along."""
    heads = (args.heads, args.kv, args.kv)
    q, k, _ = new(1, args.tokens, sum(heads), args.head).split(heads, 2)
    dq, dk, dv = (new(1, args.tokens, h, args.head) for h in heads)
    to_q, to_k, to_v = new(1, args.tokens, sum(heads), args.head).split(heads, 2)
    angle = new(1, args.tokens, args.head // 2, dtype=torch.float32).repeat(1, 1, 2)
    cos, sin = angle.cos().to(q.dtype), angle.sin().to(q.dtype)

    def eager(x: Tensor, sign: float = 1.0) -> Tensor:
        """transformers' apply_rotary_pos_emb; -1: turned back."""
        half = args.head // 2
        across = torch.cat((-x[..., half:], x[..., :half]), -1)
        return x * cos.unsqueeze(2) + across * (sign * sin).unsqueeze(2)

    def eager_back() -> None:
        for to, d in ((to_q, eager(dq, -1)), (to_k, eager(dk, -1)), (to_v, dv)):
            to.copy_(d)

    shape = f"[{args.tokens}, {args.heads} + {args.kv}, {args.head}]"
    yield Case(
        "rope in place",
        f"{shape} in qkv",
        lambda: ops.rope(q, k, cos, sin, q, k),
        lambda: (eager(q), eager(k)),
        2 * nbytes(q, k) + nbytes(cos, sin),
    )
    yield Case(
        "rope backward",
        f"{shape} and v into qkv",
        lambda: ops.rope(dq, dk, cos, sin, to_q, to_k, v=dv, out_v=to_v, inverse=True),
        eager_back,
        2 * nbytes(dq, dk, dv) + nbytes(cos, sin),
    )


def embedding(args: argparse.Namespace, new: Maker) -> Iterator[Case]:
    """The table's gradient, sorting included: ids at random, and with every second token the same one."""
    dy = new(args.tokens, args.hidden)
    out_bytes = args.vocab * args.hidden * dy.element_size()
    for name in ("random", "half alike"):
        ids = torch.randint(0, args.vocab, (args.tokens,), device=new.device)
        if name == "half alike":
            ids[::2] = 7
        call = functools.partial(ops.embedding_backward, dy, ids, args.vocab)
        eager = functools.partial(torch.ops.aten.embedding_dense_backward, dy, ids, args.vocab, -1, False)
        shape = f"[{args.tokens}, {args.hidden}] -> [{args.vocab}, {args.hidden}]"
        yield Case(f"embedding_backward {name}", shape, call, eager, nbytes(dy) + out_bytes)


def cross_entropy(args: argparse.Namespace, new: Maker) -> Iterator[Case]:
    """Rows of logits, which become their gradient, as often as asked; a soft cap is bound by arithmetic."""
    rows = min(args.tokens, HEAD_TOKENS // 2)
    logits, labels = new(rows, args.vocab), torch.randint(0, args.vocab, (rows,), device=new.device)
    scale = torch.ones((), device=new.device)
    leaf = logits.clone().requires_grad_()

    def eager(cap: float = 0.0) -> None:
        x = leaf.float()
        x = cap * torch.tanh(x / cap) if cap else x
        torch.autograd.grad(torch.nn.functional.cross_entropy(x, labels), leaf)

    shape = f"[{rows}, {args.vocab}]"
    loss = functools.partial(ops.cross_entropy_, logits, labels, None)
    alone = functools.partial(torch.nn.functional.cross_entropy, logits, labels)
    yield Case("cross_entropy_ loss alone", shape, loss, alone, nbytes(logits))
    both = functools.partial(ops.cross_entropy_, logits, labels, scale)
    yield Case("cross_entropy_", shape, both, eager, 2 * nbytes(logits))
    capped = functools.partial(both, softcap=30.0)
    yield Case("cross_entropy_ soft cap", shape, capped, functools.partial(eager, 30.0), 2 * nbytes(logits))


def head_and_loss(args: argparse.Namespace, new: Maker) -> Iterator[Case]:
    """linear_cross_entropy beside its three products alone, and beside transformers' way in torch."""
    tokens = min(args.tokens, 2 * HEAD_TOKENS)
    hidden, weight = new(tokens, args.hidden), new(args.vocab, args.hidden).mul_(0.02)
    labels = torch.randint(0, args.vocab, (tokens,), device=new.device)
    leaves = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]

    def eager() -> None:
        loss = torch.nn.functional.cross_entropy(torch.nn.functional.linear(*leaves).float(), labels)
        torch.autograd.grad(loss, leaves)

    def products(chunk: int) -> None:
        for rows in hidden.split(chunk):
            logits = rows @ weight.t()
            torch.mm(logits, weight)
            torch.mm(logits.t(), rows)

    flops = 3 * 2.0 * tokens * args.hidden * args.vocab
    for chunk in (None, HEAD_TOKENS // 2, HEAD_TOKENS, tokens):
        call = functools.partial(linear_cross_entropy, hidden, weight, labels, chunk=chunk)
        mm = functools.partial(products, chunk or tokens)
        shape = f"[{tokens}, {args.hidden}] @ [{args.hidden}, {args.vocab}], chunk {chunk or 'default'}"
        yield Case("linear_cross_entropy", shape, call, None if chunk else eager, flops=flops, mm=mm)


ROOMS = (sumsq, adamw, gemm, grouped, experts, expand, norm, head_norm, rope, glu, embedding, cross_entropy,
         head_and_loss)


# ---- measuring ----


def copy_gbps(device: torch.device, reps: int, size: int) -> float:
    """GB/s of a copy on the device, read and written bytes counted."""
    a = torch.empty(size, dtype=torch.uint8, device=device).random_()
    b = torch.empty_like(a)
    return 2 * size / spread(repeat(lambda: b.copy_(a), device, reps))["median"] / 1e9


def measure(case: Case, device: torch.device, reps: int, copy: float) -> tuple[str, str]:
    """Emit the case's line; its row of the table."""
    seconds = repeat(case.call, device, reps)
    beside = spread(repeat(case.torch, device, reps))["median"] if case.torch else None
    amount, unit, scale = (case.flops, "TFLOP/s", 1e12) if case.flops else (case.nbytes, "GB/s", 1e9)
    limit, limit_from = copy, "device copy"
    if case.mm is not None:
        limit = case.flops / spread(repeat(case.mm, device, reps))["median"] / 1e12
        limit_from = "torch.mm"
    rate = spread([amount / s / scale for s in seconds])
    ms = spread(seconds)["median"] * 1e3
    emit(
        "op",
        device,
        op=case.name,
        case=case.shape,
        unit=unit,
        **rate,
        ms=ms,
        bytes=case.nbytes or None,
        flops=case.flops or None,
        limit=limit,
        limit_from=limit_from,
        torch_ms=beside * 1e3 if beside else None,
    )
    share = f"{rate['median']:8.1f} {unit} ({rate['median'] / limit:4.0%})"
    torch_says = f"   torch {beside * 1e3:8.3f} ms" if beside else ""
    return f"{case.name} {case.shape}", f"{ms:8.3f} ms {share}{torch_says}"


def parse_args() -> tuple[argparse.Namespace, torch.device]:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    device = add_device_argument(parser)
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    parser.add_argument("--only", nargs="*", default=[], help="names that contain one of these")
    parser.add_argument("--reps", type=int, default=20)
    tiny = device.type == "cpu"
    parser.add_argument("--tokens", type=int, default=256 if tiny else 32768)
    parser.add_argument("--head", type=int, default=16 if tiny else 128, help="numbers in a head")
    add_shape_arguments(parser, tiny)
    return parser.parse_args(), device


def main() -> None:
    args, device = parse_args()
    new = Maker(device, getattr(torch, args.dtype))
    copy = copy_gbps(device, args.reps, COPY_BYTES if device.type == "cuda" else 2**22)
    rows = [("device copy", f"{copy:8.1f} GB/s")]
    for room in ROOMS:
        rows += [
            measure(case, device, args.reps, copy)
            for case in room(args, new)
            if not args.only or any(word in case.name for word in args.only)
        ]
    say(f"{args.dtype}, {args.tokens} tokens")
    table(rows)


if __name__ == "__main__":
    main()
