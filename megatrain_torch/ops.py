"""The layer ops of csrc/ops as functions: they make the outputs, `torch.ops.megatrain.*` fills them.

No autograd: each forward has its backward beside it, and templates call both by hand. CPU kernels are
the readable definition, CUDA kernels agree with them within stated ulps (docs/numerics.md).

Letters: `B` batch, `S` sequence, `T = B*S` tokens, `H` hidden, `I` intermediate, `V` vocabulary, `D` head size,
`h` heads. Types: fp32, bf16 or fp16 (`x`); arithmetic is fp32 inside, rounded once on the way out, unless
stated. `strided`: any strides but the last dimension's, which is 1. Each raises RuntimeError, which names the argument,
where shapes, types, strides or numbers do not go together.
"""
from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from . import _core

_core.register_ops()
_ops = torch.ops.megatrain

# How a norm's weight is applied, as transformers' families have it.
ROUND_FIRST = 0     # y = round(x_hat) * w: Llama, Mistral, Qwen, Phi-3, Granite
ONE_PLUS = 1        # y = round(x_hat * (1 + w)): Gemma
ROUND_LAST = 2      # y = round(x_hat * w): OLMo 2
NORM_STYLES = (ROUND_FIRST, ROUND_LAST, ONE_PLUS)

SILU, GELU_TANH, GELU, CLAMPED = range(4)    # csrc/ops/glu.h


def rms_norm(x: Tensor, weight: Tensor, eps: float, style: int = ROUND_FIRST,
             add: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """y = norm(s) * weight with s = x + add (rounded to x's type), or s = x.

    Args:
        x: [..., n], strided; add: the same shape, dense.
        weight: [n], x's type.

    Returns:
        y [..., n] dense; s (x itself without add); rstd [...] fp32 = 1/sqrt(mean(s^2) + eps).

    Source: Zhang & Sennrich 2019, eq. 4.
    """
    y, s, rstd = _like(x), None if add is None else _like(x), _of_rows(x)
    _ops.rms_norm(x, weight, add, y, s, rstd, eps, style)
    return y, x if s is None else s, rstd


def rms_norm_backward(dy: Tensor, s: Tensor, weight: Tensor, rstd: Tensor, style: int = ROUND_FIRST,
                      add: Tensor | None = None, rebuild: bool = False, *, dx: Tensor | None = None
                      ) -> tuple[Tensor, Tensor, Tensor | None]:
    """dx = add + rstd * (g - s_hat * mean(g * s_hat)) with g = dy * w (w + 1 for ONE_PLUS).

    Args:
        dy: [..., n], strided; s: as forward gave it, strided; add: [..., n] dense: the residual's own gradient.
        rebuild: also give forward's y again, in the same pass.
        dx: [..., n], strided: written instead of a new tensor; may be dy itself.

    Returns:
        dx [..., n], dense if it is new; dweight [n] in weight's type; y or None. dweight is summed in fp32, in an
        order that does not depend on the device's load.
    """
    dx, dw, y = _like(dy) if dx is None else dx, torch.empty_like(weight), _like(dy) if rebuild else None
    _ops.rms_norm_backward(dy, s, weight, rstd, add, dx, dw, y, style)
    return dx, dw, y


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float,
               add: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """y = (s - mean) * rstd * weight + bias with s = x + add. As rms_norm; also gives mean [...] fp32.

    Returns:
        y, s, mean, rstd.

    Source: Ba et al. 2016, eq. 4.
    """
    y, s, mean, rstd = _like(x), None if add is None else _like(x), _of_rows(x), _of_rows(x)
    _ops.layer_norm(x, weight, bias, add, y, s, mean, rstd, eps)
    return y, x if s is None else s, mean, rstd


def layer_norm_backward(dy: Tensor, s: Tensor, weight: Tensor | None, mean: Tensor, rstd: Tensor,
                        add: Tensor | None = None, bias: Tensor | None = None, rebuild: bool = False
                        ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """dx, dweight, dbias (None where there is no weight or bias), y (None unless rebuild, which needs bias)."""
    dx, y = _like(dy), _like(dy) if rebuild else None
    dw, db = (None if p is None else torch.empty_like(p) for p in (weight, bias))
    _ops.layer_norm_backward(dy, s, weight, bias, mean, rstd, add, dx, dw, db, y)
    return dx, dw, db, y


def _like(x: Tensor) -> Tensor:
    """Dense, whatever x's strides are."""
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _of_rows(x: Tensor) -> Tensor:
    """A number for each row of [..., n]."""
    return torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)


def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, out_q: Tensor, out_k: Tensor, *, v: Tensor | None = None,
         out_v: Tensor | None = None, interleaved: bool = False, inverse: bool = False) -> None:
    """Rotates the first R of D numbers of each head of q and k; v is copied along. One launch.

    Args:
        q: [B, S, hq, D] strided; k, v: [B, S, hk, D] strided.
        cos, sin: [1 or B, S, R], strided, q's type or fp32; R even, <= D.
        out_q, out_k, out_v: as q, k, v, strided; may be the inputs themselves (in place).
        interleaved: pairs are (2i, 2i+1) instead of (i, i + R/2).
        inverse: the transposed rotation: what backward needs.

    Source: Su et al. 2021, eq. 34.
    """
    _ops.rope(q, k, cos, sin, out_q, out_k, v, out_v, interleaved, inverse)


def glu(gate: Tensor, up: Tensor, act: int = SILU) -> Tensor:
    """act(gate) * up: [T, I], from strided [T, I]. act(gate) is rounded to the type first, as transformers does.

    CLAMPED: min(gate, 7) * sigmoid(1.702 * min(gate, 7)) * (clamp(up, -7, 7) + 1), GPT-OSS' own.

    Source: Shazeer 2020, eq. 5 and 6; csrc/ops/glu.h.
    """
    h = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    _ops.glu(gate, up, act, h)
    return h


def glu_backward(dh: Tensor, gate: Tensor, up: Tensor, act: int = SILU, *, dgate: Tensor, dup: Tensor,
                 h: Tensor | None = None) -> None:
    """Gradients of glu in one pass that also rebuilds the product.

    Args:
        dh: [T, I], dense. gate, up: [T, I], strided.
        dgate, dup: [T, I], strided, written; may be gate and up themselves.
        h: [T, I], dense, written with glu(gate, up); may be dh itself. None: not wanted.
    """
    _ops.glu_backward(dh, gate, up, act, dgate, dup, h)


def column_sum(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Sum over tokens: [T, n] strided -> [n], in fp32; the gradient of a bias.

    In one order (csrc/ops/glu.h), so that the CPU and CUDA give the same bits.
    """
    out = torch.empty(x.shape[-1:], dtype=dtype or x.dtype, device=x.device)
    _ops.column_sum(x, out)
    return out


def embedding_backward(dy: Tensor, ids: Tensor, rows: int, padding_idx: int = -1) -> Tensor:
    """Gradient of a table [rows, H]: sums of dy [T, H], strided, by ids [T] int64, in fp32, rounded once.

    In one order, a row's tokens in chunks of 256 (csrc/ops/embedding.h), so that the CPU and CUDA give the same bits.

    Args:
        padding_idx: A row that gets none; -1: no such row.

    Raises:
        RuntimeError: On the CPU: an id outside the table. (On CUDA it adds to nothing.)
    """
    sorted_ids, order = torch.sort(ids, stable=True)
    out = torch.empty(rows, dy.shape[-1], dtype=dy.dtype, device=dy.device)
    _ops.embedding_backward(dy, sorted_ids, order, padding_idx, out)
    return out


def cross_entropy_(logits: Tensor, labels: Tensor, scale: Tensor | None, *, ignore_index: int = -100,
                   softcap: float = 0.0, label_smoothing: float = 0.0, z_loss: float = 0.0) -> tuple[Tensor, Tensor]:
    """Loss of each row; with scale, logits are overwritten by the gradient of scale * sum(loss).

    l = softcap * tanh(logits / softcap) where softcap > 0, else logits; lse = log(sum(exp(l)))
    loss = lse - (1 - a) * l[label] - a * mean(l) + z_loss * lse^2    (a: label_smoothing)

    Args:
        logits: [R, V], strided, overwritten when scale is given. labels: [R] int64.
        scale: fp32 scalar tensor on the same device (1/number of labels, times the gradient from above), or None.

    Returns:
        loss [R] fp32, lse [R] fp32. Both are 0 where the label is ignored, and so is the gradient: such a row of
        logits is not read.

    Raises:
        RuntimeError: On the CPU: a label outside [0, V) that is not ignore_index. (On CUDA the row turns NaN.)
    """
    loss, lse = (torch.empty(logits.shape[:1], dtype=torch.float32, device=logits.device) for _ in range(2))
    _ops.cross_entropy_(logits, labels, scale, loss, lse, ignore_index, softcap, label_smoothing, z_loss)
    return loss, lse


def gemm_(c: Tensor, a: Tensor, b: Tensor, *, alpha: float = 1.0, beta: float = 1.0) -> None:
    """c = alpha * a @ b + beta * c, summed in fp32 and rounded at the end; on CUDA by torch's cublasLt.

    The algorithm follows from shape, layout, device and library by a rule, in every process: the same operands give
    the same bits. fp32 operands are multiplied as TF32 only where torch's own products are
    (`torch.backends.cuda.matmul.allow_tf32`, read at each call).

    Args:
        c: [M, N] fp32 or a's type; rows dense, any row stride. Shares no memory with a or b. Not read if beta is 0.
            16-bit and beta not 0: on CUDA the product is rounded before c is added, so sum up in fp32.
        a: [M, K]; b: [K, N]: both fp32, both bf16 or both fp16. Either is by rows or by columns (`x.t()`), and may be
            some columns of a wider matrix.
    """
    if a.shape[-1] == 0:
        c.mul_(beta) if beta else c.zero_()
        return
    tf32 = a.dtype == torch.float32 and a.is_cuda and torch.backends.cuda.matmul.fp32_precision == "tf32"
    _ops.gemm_(c, a, b, alpha, beta, tf32)


class Codes(NamedTuple):
    """A matrix as codes [M, K] of 8 bits (float8_e4m3fn) and a power of two for each row: scale [M] fp32."""

    values: Tensor
    scale: Tensor


def fp8_cast(x: Tensor) -> Codes:
    """Codes of the rows of x [R, C]: strided, fp32, bf16 or fp16. The CPU and CUDA give the same bits.

    A row with a NaN or an infinity has the scale NaN: whatever is made of it is NaN.

    Source: csrc/ops/fp8.h.
    """
    made = _codes(x, *x.shape)
    _ops.fp8_cast(x, *made, None, None)
    return made


def fp8_cast_t(x: Tensor, rows: Tensor | None = None) -> Codes:
    """Codes of the columns of x [R, C], as rows [C, R rounded up to 16], of which those behind R are zeros.

    rows: [R] fp32 or None; gets the scales of fp8_cast, without its codes.
    """
    made = _codes(x, x.shape[1], _sixteens(x.shape[0]))
    _ops.fp8_cast(x, None, rows, *made)
    return made


def fp8_row_scales(x: Tensor) -> Tensor:
    """[R] fp32: the scales of fp8_cast, without its codes."""
    rows = _of_rows(x)
    _ops.fp8_cast(x, None, rows, None, None)
    return rows


def fp8_shift(x_rows: Tensor, dy_rows: Tensor) -> Tensor:
    """Powers of two by which rows that are far larger than the rest are balanced between the operands of dy' x.

    Args:
        x_rows, dy_rows: [R] fp32, scales of their rows.

    Returns:
        [R + 1] int8, of which the last says whether any other is not 0: fp8_recast_ and fp8_glu_recast_ take it.

    Source: csrc/ops/fp8.h.
    """
    shift = torch.empty(x_rows.shape[0] + 1, dtype=torch.int8, device=x_rows.device)
    _ops.fp8_shift(x_rows, dy_rows, shift)
    return shift


def fp8_recast_(columns: Codes, x: Tensor, shift: Tensor, sign: int) -> None:
    """fp8_cast_t of x whose row r is multiplied by 2^(sign * shift[r]), in the place of x's own where any is not 0.

    sign: -1 of x in dy' x, 1 of dy.
    """
    _ops.fp8_recast_(x, shift, sign, *columns)


def fp8_cast_both(x: Tensor) -> tuple[Codes, Codes]:
    """fp8_cast and fp8_cast_t, reading x twice where they read it three times."""
    rows, columns = _codes(x, *x.shape), _codes(x, x.shape[1], _sixteens(x.shape[0]))
    _ops.fp8_cast(x, *rows, *columns)
    return rows, columns


def fp8_rms_norm(x: Tensor, weight: Tensor, eps: float, style: int = ROUND_FIRST) -> tuple[Codes, Tensor]:
    """fp8_cast of rms_norm's y, of which 16 bits are never written.

    Args:
        x, weight, eps, style: as for rms_norm; bf16, x [T, n] strided, weight [n].

    Returns:
        (codes [T, n] with a scale for each row, rstd [T] fp32).
    """
    made, rstd = _codes(x, *x.shape), _of_rows(x)
    _ops.fp8_rms_norm(x, weight, *made, rstd, eps, style)
    return made, rstd


def fp8_glu(gate: Tensor, up: Tensor, act: int = SILU) -> Codes:
    """fp8_cast(glu(gate, up, act)), of which 16 bits are never written.

    Args:
        gate, up: [T, I] bf16, strided; I in sixteens, each row at a multiple of 16 bytes.

    Returns:
        Codes [T, I] with a scale for each row.

    Source: csrc/ops/fp8_glu.h.
    """
    made = _codes(gate, *gate.shape)
    _ops.fp8_glu(gate, up, act, *made)
    return made


def fp8_glu_backward(dh: Tensor, gate: Tensor, up: Tensor, act: int = SILU) -> tuple[Codes, Codes, Codes, Tensor]:
    """Codes of what glu_backward writes, without writing it.

    Args:
        dh: [T, I] bf16, dense. gate, up: as for fp8_glu.

    Returns:
        fp8_cast and fp8_cast_t of dgate | dup [T, 2 I]; fp8_cast_t and fp8_row_scales of h.
    """
    (rows, n), d = gate.shape, 2 * gate.shape[1]
    made = _codes(gate, rows, d), _codes(gate, d, _sixteens(rows)), _codes(gate, n, _sixteens(rows))
    of_h = _of_rows(gate)
    _ops.fp8_glu_backward(dh, gate, up, act, *made[0], *made[1], *made[2], of_h)
    return (*made, of_h)


def fp8_glu_recast_(columns: Codes, dh: Tensor, gate: Tensor, up: Tensor, act: int, shift: Tensor, sign: int) -> None:
    """fp8_recast_ of dgate | dup or of h, whichever has as many columns as there are."""
    _ops.fp8_glu_recast_(dh, gate, up, act, shift, sign, *columns)


def _codes(x: Tensor, rows: int, n: int) -> Codes:
    return Codes(torch.empty(rows, n, dtype=torch.float8_e4m3fn, device=x.device),
                 torch.empty(rows, dtype=torch.float32, device=x.device))


def _sixteens(n: int) -> int:
    return -(-n // 16) * 16


def fp8_gemm_(c: Tensor, a: Codes, b: Codes, *, bias: Tensor | None = None, base: Tensor | None = None,
              alpha: float = 1.0, fast: bool = False) -> None:
    """c = alpha * a @ b' + bias + base, summed in fp32 and rounded at the end; on CUDA by torch's cublasLt.

    Args:
        c: [M, N] fp32 or bf16; rows dense. a: [M, K]; b: [N, K]. bias: [N], base: [M, N], c's type; base may be c.
            On CUDA K and N are multiples of 16, and rows of c and base of 16 bytes.
        fast: CUDA: the tensor cores' own sums, of some 14 bits; else those of short stretches are added in fp32.
    """
    _ops.fp8_gemm_(c, *a, *b, bias, base, alpha, fast)


CODES = ("nf4", "fp4", "int8", "fp8", "mxfp4")       # csrc/ops/expand.h


def expand_codes_(out: Tensor, form: str, codes: Tensor, scales: Tensor, wide: Tensor | None = None,
                  table: Tensor | None = None, offset: Tensor | None = None, *, group: int = 0) -> None:
    """The weight that codes stand for, as their package makes it; CPU and CUDA give the same bits.

    Args:
        out: the weight's shape, dense; fp32, bf16 or fp16. form: one of CODES. codes, scales: as csrc/ops/expand.h has
            them for each. wide, table, offset: of scales that are codes themselves. group: "nf4" and "fp4": elements
            that share a scale, a power of two.
    """
    _ops.expand_codes(codes, scales, wide, table, offset, CODES.index(form), group, out)


def nf4_codes(w: Tensor, group: int = 64) -> tuple[Tensor, Tensor]:
    """NF4 codes of a weight, to the bits of bitsandbytes' quantize_4bit on the CPU.

    Args:
        w: any shape, dense; fp32, bf16 or fp16, on the CPU. group: neighbours that share a scale, an even number of at
            most 4,096.

    Returns:
        (codes, two in a byte, the first in the high bits; scales [groups] fp32).
    """
    codes = torch.empty((w.numel() + 1) // 2, dtype=torch.uint8, device=w.device)
    scales = torch.empty(-(-w.numel() // max(group, 1)), dtype=torch.float32, device=w.device)
    _ops.nf4_codes(w, group, codes, scales)
    return codes, scales


def attention_backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, bias: Tensor | None,
                       causal: bool, scale: float, dq: Tensor, dk: Tensor, dv: Tensor) -> None:
    """Writes dq, dk and dv of attention, by cuDNN on CUDA, with the same bits each time.

    lse is [rows, heads, tokens, 1] fp32; bias is [1 or rows, 1 or heads, queries, keys], added to the logits. All
    else is [rows, heads, tokens, dim] of one 16-bit type with dense last dimensions. In the workspace dS has
    rows * heads * queries * keys numbers of 16 bits.

    Raises:
        RuntimeError: "attention: cuDNN ...": it has no such kernel.
    """
    _ops.attention_backward(q, k, v, out, dout, dq, dk, dv, lse, bias, scale, causal)


def grouped_gemm(x: Tensor, w: Tensor, offsets: Tensor) -> Tensor:
    """y[rows of group e] = x[rows of group e] @ w[e]: one launch for all experts.

    That holds for bf16 on GPUs of capability 9.0 and 10.0, with addresses and strides in multiples of 16 bytes. All
    else goes group by group, and on CUDA the host then waits for the offsets.

    Args:
        x: [T, K], rows dense. w: [E, K, N], each expert by rows or by columns (`w.mT` of [E, N, K]).
        offsets: [E] int32, the ends of the groups, ascending; the last is T. Groups may be empty.

    Returns:
        y [T, N] dense, x's type.

    Raises:
        RuntimeError: Where it goes group by group: the offsets do not ascend to T. (One launch does not look.)

    Source: torch.nn.functional.grouped_mm, whose rules these are.
    """
    if _grouped_at_once(x, w, offsets) and w.shape[-1] % 8 == 0:
        return torch._grouped_mm(x, w, offs=offsets)
    y = x.new_empty(x.shape[0], w.shape[-1])
    for e, (first, end) in enumerate(_groups(offsets, x.shape[0])):
        torch.mm(x[first:end], w[e], out=y[first:end])
    return y


def grouped_gemm_dgrad(dy: Tensor, w: Tensor, offsets: Tensor) -> Tensor:
    """dx [T, K] of grouped_gemm, from dy [T, N] and the same w [E, K, N] and offsets."""
    return grouped_gemm(dy, w.mT, offsets)


def grouped_gemm_wgrad(x: Tensor, dy: Tensor, offsets: Tensor) -> Tensor:
    """dw[e] = x[rows of group e]' @ dy[rows of group e]; zeros for an empty group. As grouped_gemm.

    Args:
        x: [T, K], dy: [T, N], rows dense. offsets: [E] int32.

    Returns:
        dw [E, K, N] dense, x's type. (With x and dy exchanged: [E, N, K].)
    """
    if _grouped_at_once(x, dy, offsets) and dy.shape[-1] % 8 == 0:
        return torch._grouped_mm(x.t(), dy, offs=offsets)
    dw = x.new_empty(offsets.shape[0], x.shape[-1], dy.shape[-1])
    for e, (first, end) in enumerate(_groups(offsets, x.shape[0])):
        torch.mm(x[first:end].t(), dy[first:end], out=dw[e])
    return dw


def _grouped_at_once(x: Tensor, other: Tensor, offsets: Tensor) -> bool:
    """Whether torch has one kernel for these. It cannot take no rows at all, or more than 1024 groups."""
    return (x.is_cuda and x.dtype == other.dtype == torch.bfloat16
            and torch.cuda.get_device_capability(x.device) in ((9, 0), (10, 0))
            and x.shape[0] > 0 and 0 < offsets.shape[0] <= 1024
            and x.stride(-1) == 1
            # Dense lines, each of which begins at a multiple of 16 bytes: 8 numbers.
            and all(min(t.stride()[-2:]) == 1 and max(t.stride()[-2:]) % 8 == 0
                    and not any(n % 8 for n in t.stride()[:-2]) and t.data_ptr() % 16 == 0 for t in (x, other)))


def _groups(offsets: Tensor, rows: int) -> Iterable[tuple[int, int]]:
    """First row and end of each group.

    Raises:
        RuntimeError: The offsets do not ascend from 0 to `rows`.
    """
    ends = [0, *offsets.tolist()]
    if ends != sorted(ends) or ends[-1] != rows:
        raise RuntimeError(f"grouped_gemm: offsets must ascend to the number of rows, {rows}; found {ends[1:]}")
    return pairwise(ends)


def sum_rows(x: Tensor, place: Tensor, tokens: int, weights: Tensor | None = None, base: Tensor | None = None,
             factor: float = 1.0) -> Tensor:
    """out[t] = base[t] + factor * the sum over j of weights[t, j] * x[place[t k + j]].

    In fp32, j in order, rounded once; the CPU and CUDA give the same bits. With k = 1 and no more it is a gather.

    Args:
        x: [.., n], dense. place: [T k] int64, rows of x. weights: [T k] fp32. base: [T, n], dense.

    Returns:
        [T, n] dense.

    Raises:
        RuntimeError: CPU only: a place outside of x. (On CUDA it is not looked at.)
    """
    out = torch.empty(tokens, x.shape[1], dtype=x.dtype, device=x.device)
    _ops.sum_rows(x, place, weights, base, factor, out)
    return out


def expert_glu(gu: Tensor, act: int = SILU, interleaved: bool = False, bias: Tensor | None = None,
               expert: Tensor | None = None) -> Tensor:
    """glu of rows whose gate and up lie side by side, halves or pairs, with the bias of each row's expert.

    Args:
        gu: [R, 2 I] dense: g then u, or g0 u0 g1 u1 ... bias: [E, 2 I], as gu. expert: [R] int32.

    Returns:
        [R, I] dense.
    """
    h = torch.empty(gu.shape[0], gu.shape[1] // 2, dtype=gu.dtype, device=gu.device)
    _ops.expert_glu(gu, bias, expert, act, interleaved, h)
    return h


def expert_glu_backward(dact: Tensor, gu: Tensor, act: int = SILU, interleaved: bool = False,
                        bias: Tensor | None = None, expert: Tensor | None = None, weights: Tensor | None = None,
                        order: Tensor | None = None) -> Tensor | None:
    """Gradients of the weighted expert_glu in one pass that also rebuilds its product.

    In place: gu becomes its gradient, for dh = weights * dact; dact becomes weights * expert_glu(gu), what the next
    product's weight gradient wants.

    Args:
        dact: [R, I] dense, the gradient for a weight of 1. weights: [R] fp32, that of row r at order[r] (at r without
            order). order: [R] int64, a permutation.

    Returns:
        dweights [R] fp32, as weights: the sums over I of dact * expert_glu(gu); None without weights.
    """
    dweights = None if weights is None else torch.empty_like(weights)
    _ops.expert_glu_backward(dact, gu, bias, expert, act, interleaved, weights, order, gu, dact, dweights)
    return dweights


# ---- fake kernels: shapes for tracing ----

torch.library.register_fake("megatrain::sumsq", lambda x: x.new_empty((), dtype=torch.float64))
for _name in ("adamw_", "gemm_", "rms_norm", "rms_norm_backward", "layer_norm", "layer_norm_backward", "rope",
              "glu", "glu_backward", "column_sum", "embedding_backward", "cross_entropy_", "sum_rows", "expert_glu",
              "expert_glu_backward", "attention_backward", "fp8_cast", "fp8_gemm_", "fp8_glu", "fp8_glu_backward",
              "fp8_rms_norm", "expand_codes", "nf4_codes"):
    torch.library.register_fake(f"megatrain::{_name}", lambda *args: None)      # it only writes into arguments
