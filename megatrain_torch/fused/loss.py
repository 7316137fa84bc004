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
    ignore_index: int = -100, softcap: float = 0.0, label_smoothing: float = 0.0, z_loss: float = 0.0,
    logit_scale: float = 1.0, chunk: int | None = None, wanted: tuple[bool, bool, bool] = (True, True, True),
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Cross entropy of `logit_scale * (hidden @ weight.T + bias)` and its gradients. No autograd.

    Each chunk's logits are made, become their own gradient in place (`ops.cross_entropy_`, where soft cap,
    smoothing and z-loss are stated), are multiplied out and written over by the next. `dweight` is summed over
    chunks in fp32 and rounded once. Nothing waits for the device.

    Args:
        hidden: [T, H], strided rows. weight: [V, H] and bias: [V], of hidden's type.
        labels: [T] int64 on the same device.
        reduction: "sum", or "mean": over labels that are not ignored; without any the loss is NaN, as torch's,
            and the gradients are zero.
        chunk: Tokens at a time. Default: logits of about 512 MiB, at least 1024 tokens.
        wanted: Which gradients: of hidden, weight (not of a frozen head), bias. None of them: the loss alone,
            for evaluation.

    Returns:
        loss, an fp32 scalar; dhidden [T, H], dweight [V, H], dbias [V], each in its argument's type, or None where
        it is not wanted (or there is no bias). In fp16 the gradients of a mean over many tokens fall below the
        smallest number: take the sum and divide where there is room.

    Raises:
        ValueError: Shapes or types that do not fit, an unknown reduction, chunk < 1.
        RuntimeError: On the CPU: a label outside [0, V) that is not ignore_index. (On CUDA: a NaN loss.)
    """
    _check(hidden, weight, labels, bias, reduction, chunk)
    count = (labels != ignore_index).sum().float() if reduction == "mean" else None
    scale = None
    if any(wanted):
        one = torch.full((), logit_scale, dtype=torch.float32, device=hidden.device)
        scale = one if count is None else one / count
    sums = _Gradients(hidden, weight, bias, wanted)
    step = chunk or chunk_tokens(weight.shape[0], weight.element_size())
    memory = _rows(hidden, min(step, hidden.shape[0]), weight.shape[0])
    losses = []
    for first in range(0, hidden.shape[0], step):
        rows = hidden[first:first + step]
        logits = memory[:rows.shape[0]]
        _logits(logits, rows, weight, bias, logit_scale)
        loss, _ = ops.cross_entropy_(logits, labels[first:first + step], scale, ignore_index=ignore_index,
                                     softcap=softcap, label_smoothing=label_smoothing, z_loss=z_loss)
        losses.append(loss)
        sums.add(first, logits, rows)      # logits: their own gradient now, unless none is wanted
    total = torch.cat(losses).sum() if losses else hidden.new_zeros((), dtype=torch.float32)
    return total if count is None else total / count, *sums.rounded()


class _Gradients:
    """What the chunks' gradients of the logits add up to."""

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, wanted: tuple[bool, bool, bool]) -> None:
        self.weight, self.bias = weight, bias
        self.dhidden = torch.empty(hidden.shape, dtype=hidden.dtype, device=hidden.device) if wanted[0] else None
        self.want_weight, self.want_bias = wanted[1], wanted[2] and bias is not None
        self.tokens = hidden.shape[0]
        self.dweight: Tensor | None = None
        self.dbias: Tensor | None = None

    def add(self, first: int, dlogits: Tensor, rows: Tensor) -> None:
        if self.dhidden is not None:
            torch.mm(dlogits, self.weight, out=self.dhidden[first:first + rows.shape[0]])
        if self.want_weight:
            self._add_weight(dlogits, rows)
        if self.want_bias:
            part = ops.column_sum(dlogits, torch.float32)
            self.dbias = part if self.dbias is None else self.dbias.add_(part)

    def _add_weight(self, dlogits: Tensor, rows: Tensor) -> None:
        if rows.shape[0] == self.tokens:    # the only chunk: rounded by the product itself
            self.dweight = torch.mm(dlogits.t(), rows)
            return
        begun = self.dweight is not None
        if not begun:
            self.dweight = torch.empty(self.weight.shape, dtype=torch.float32, device=rows.device)
        ops.gemm_(self.dweight, dlogits.t(), rows, beta=1.0 if begun else 0.0)

    def rounded(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The three in their arguments' types; zeros where there were no tokens."""
        if self.want_weight and self.dweight is None:
            self.dweight = torch.zeros_like(self.weight)
        if self.want_bias and self.dbias is None:
            self.dbias = torch.zeros_like(self.bias)
        dweight = None if self.dweight is None else rounded_in_place(self.dweight, self.weight.dtype)
        return self.dhidden, dweight, None if self.dbias is None else self.dbias.to(self.bias.dtype)


def rounded_in_place(sums: Tensor, dtype: torch.dtype) -> Tensor:
    """Dense fp32 sums in a 16-bit type, in the first half of their own memory: no second matrix of [V, H].

    An element moves from byte 4i to 2i, so a piece [i, 2i) reads nothing that was written and ends where it began.
    """
    if sums.dtype == dtype:
        return sums
    flat, n = sums.view(-1), sums.numel()
    out = flat.view(dtype)
    begin = min(n, FIRST_ROUNDED)
    out[:begin] = flat[:begin].clone()
    while begin < n:
        end = min(n, 2 * begin)
        out[begin:end] = flat[begin:end]
        begin = end
    return out[:n].view(sums.shape)


def _check(hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None, reduction: str,
           chunk: int | None) -> None:
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(f"hidden {list(hidden.shape)} and weight {list(weight.shape)} must be [T, H] and [V, H]")
    if labels.shape != hidden.shape[:1]:
        raise ValueError(f"labels {list(labels.shape)} must be [T], T = {hidden.shape[0]}")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias {list(bias.shape)} must be [V], V = {weight.shape[0]}")
    if any(t is not None and t.dtype != hidden.dtype for t in (weight, bias)):
        raise ValueError(f"weight and bias must be {hidden.dtype}, as hidden is")
    if reduction not in ("mean", "sum"):
        raise ValueError(f'reduction="{reduction}" is neither "mean" nor "sum"')
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk={chunk}; at least one token")


def chunk_tokens(vocabulary: int, item: int) -> int:
    """Tokens whose logits, of item bytes each, exist at a time."""
    tokens = CHUNK_BYTES // (max(vocabulary, 1) * item)
    return max(LEAST_TOKENS, tokens // STEP_TOKENS * STEP_TOKENS)


def _rows(like: Tensor, rows: int, n: int) -> Tensor:
    """[rows, n] uninitialised, whose rows begin at 16 bytes."""
    padded = -(-n // ROW_ALIGN) * ROW_ALIGN
    return torch.empty(rows, padded, dtype=like.dtype, device=like.device)[:, :n]


def _logits(out: Tensor, rows: Tensor, weight: Tensor, bias: Tensor | None, logit_scale: float) -> None:
    """out = logit_scale * (rows @ weight.T + bias), scaled in the product: rounded once."""
    if bias is not None:
        torch.addmm(bias, rows, weight.t(), beta=logit_scale, alpha=logit_scale, out=out)
    elif logit_scale != 1.0:
        torch.addmm(out, rows, weight.t(), beta=0, alpha=logit_scale, out=out)
    else:
        torch.mm(rows, weight.t(), out=out)
