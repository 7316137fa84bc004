"""Linear layer and cross entropy in one go, loss and gradients, in chunks of tokens: logits never exist whole.

Letters: `T` tokens, `H` hidden, `V` vocabulary.
"""
from __future__ import annotations

import torch
from torch import Tensor

from .. import ops

CHUNK_BYTES = 512 * 2**20   # of logits alive at once
LEAST_TOKENS = 1024         # in a chunk: fewer leave the matrix units idle
FIRST_ROUNDED = 1 << 16     # elements that are rounded by way of a copy
STEP_TOKENS = 256           # chunks are multiples: whole tiles of the matrix products
ROW_ALIGN = 8               # numbers; rows of logits begin at 16 bytes for any V


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None = None, *, reduction: str = "mean",
    ignore_index: int = -100, softcap: float = 0.0, label_smoothing: float = 0.0, logit_scale: float = 1.0,
    chunk: int | None = None, wanted: tuple[bool, bool, bool] = (True, True, True), each: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Cross entropy of `logit_scale * (hidden @ weight.T + bias)` and its gradients. No autograd.

    Each chunk's logits are made, become their own gradient in place (`ops.cross_entropy_` states soft cap and
    smoothing), are multiplied out and written over by the next. `dweight` is summed over chunks in fp32 and rounded
    once. Nothing waits for the device.

    Args:
        hidden: [T, H], strided rows. weight: [V, H] and bias: [V], of its type. labels: [T] int64, on its device.
        reduction: "sum", or "mean": over labels that are not ignored; without any the loss is NaN, as torch's,
            and the gradients are zero. "none": the loss is [T]; gradients are of sum(each * loss), each [T] fp32.
        chunk: Tokens at a time. Default: logits of about 512 MiB, at least 1024 tokens.
        wanted: Gradients of hidden, weight (not of a frozen head) and bias; none of them: the loss alone.

    Returns:
        loss, an fp32 scalar; dhidden [T, H], dweight [V, H], dbias [V], each in its argument's type, or None where
        it is not wanted (or there is no bias). In fp16 those of a mean over many tokens underflow: take the sum.

    Raises:
        RuntimeError: On the CPU: a label outside [0, V) that is not ignore_index. (On CUDA: a NaN loss.)
    """
    count = (labels != ignore_index).sum().float() if reduction == "mean" else None
    scale = hidden.new_full((), logit_scale, dtype=torch.float32) / (1 if count is None else count)
    tokens, losses, step = hidden.shape[0], [], chunk or chunk_tokens(weight.shape[0], weight.element_size())
    dhidden = hidden.new_empty(hidden.shape) if wanted[0] else None
    dweight, dbias = (None if tokens or p is None or not want else torch.zeros_like(p)
                      for p, want in ((weight, wanted[1]), (bias, wanted[2])))
    padded = -(-weight.shape[0] // ROW_ALIGN) * ROW_ALIGN
    memory = hidden.new_empty(min(step, tokens), padded)[:, :weight.shape[0]]
    for first in range(0, tokens, step):
        rows, logits = hidden[first:first + step], memory[:min(step, tokens - first)]
        if bias is None and logit_scale == 1.0:
            torch.mm(rows, weight.t(), out=logits)
        else:                                # scaled in the product: rounded once
            torch.addmm(logits if bias is None else bias, rows, weight.t(), beta=0 if bias is None else logit_scale,
                        alpha=logit_scale, out=logits)
        loss, _ = ops.cross_entropy_(logits, labels[first:first + step], scale if any(wanted) else None,
                                     ignore_index=ignore_index, softcap=softcap, label_smoothing=label_smoothing)
        losses.append(loss)                  # logits: their own gradient now, unless none is wanted
        if each is not None:
            logits.mul_(each[first:first + step, None])
        if dhidden is not None:
            torch.mm(logits, weight, out=dhidden[first:first + rows.shape[0]])
        if wanted[1] and rows.shape[0] == tokens:        # the only chunk: rounded by the product itself
            dweight = torch.mm(logits.t(), rows)
        elif wanted[1]:
            dweight = torch.empty(weight.shape, dtype=torch.float32, device=rows.device) if dweight is None else dweight
            ops.gemm_(dweight, logits.t(), rows, beta=float(first > 0))
        if wanted[2] and bias is not None:
            part = ops.column_sum(logits, torch.float32)
            dbias = part if dbias is None else dbias.add_(part)
    total = torch.cat(losses) if losses else hidden.new_zeros(0, dtype=torch.float32)
    total = total if reduction == "none" else total.sum() if count is None else total.sum() / count
    return (total, dhidden, None if dweight is None else rounded_in_place(dweight, weight.dtype),
            None if dbias is None else dbias.to(bias.dtype))


def rounded_in_place(sums: Tensor, dtype: torch.dtype) -> Tensor:
    """Dense fp32 sums in a 16-bit type, in the first half of their own memory: no second matrix of [V, H].

    An element moves from byte 4i to 2i, so a piece [i, 2i) reads nothing that was written and ends where it began.
    """
    if sums.dtype == dtype:
        return sums
    flat, begin = sums.view(-1), FIRST_ROUNDED
    out = flat.view(dtype)[:len(flat)]
    out[:begin] = flat[:begin].clone()
    while begin < len(flat):
        out[begin:2 * begin] = flat[begin:2 * begin]
        begin *= 2
    return out.view(sums.shape)


def chunk_tokens(vocabulary: int, item: int) -> int:
    """Tokens whose logits, of item bytes each, exist at a time."""
    tokens = CHUNK_BYTES // (max(vocabulary, 1) * item)
    return max(LEAST_TOKENS, tokens // STEP_TOKENS * STEP_TOKENS)
