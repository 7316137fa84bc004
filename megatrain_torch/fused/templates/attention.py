"""Attention without a graph: forward and backward through torch's kernels.

q, k, v and the output are [B, S, h, D] here, as the projections make them; torch's kernels take them transposed, as
views. On CUDA, cuDNN's kernels with grouped heads (616 TFLOP/s forward and 500 backward at S=4096 on an H200 without a
mask, where flash gives 330 and 262); elsewhere whatever torch picks, run again in backward under a graph of its own.

A row that sees nothing (left padding) gives zero, and has no gradient, as torch defines it. cuDNN gives such rows other
values, and a gradient of NaN (torch 2.11, S a multiple of 64); so there they see everything, and are zeroed by hand.

A sink is a logit of its head that takes part in the softmax and has no value (GPT-OSS). The kernels know none, but
with lse = log(sum(exp(logits))) of the visible keys and lse' = log(exp(lse) + exp(sink)),

    out' = out * exp(lse - lse')        d(logits) = P' (dP - <dout, out'>) with P' = exp(logits - lse')
    d(sink) = - the sum over tokens of exp(sink - lse') <dout, out'>

so a kernel's backward that is given lse' and out' for lse and out gives the right gradients: it makes P from lse,
and <dout, out> from out.

torch's kernel by cuDNN adds up gradients of queries in the order in which its blocks come, so that their bits differ
from one time to the next; forward repeats itself. Of short rows backward is cuDNN's in another form (repeating_grads),
and of long ones where torch.use_deterministic_algorithms(True) asks for the same bits; of what that does not take it is
then flash's from cuDNN's output and log-sum-exp, and with a mask what torch picks.

Heads of values may be of another size than those of queries and keys (DeepSeek's: 128 and 192). cuDNN takes these on
Hopper and Blackwell, but not in the form that repeats itself; for flash's kernels the smaller ones are filled up with
zeros, at the cost of the larger ones' time.
"""
from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ... import ops
from ...base.modes import repeating
from ...base.packed import Packed
from ...graph.hf_calls import Sight
from ...store.records import span_of

_forward = torch.ops.aten._scaled_dot_product_cudnn_attention
_backward = torch.ops.aten._scaled_dot_product_cudnn_attention_backward
_flash_forward = torch.ops.aten._flash_attention_forward
_flash_backward = torch.ops.aten._flash_attention_backward
_cpu_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_cpu_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

# Elements of q, and from the first of q, k or v to the last, that cuDNN's kernels are given at once: so many have been
# compared with sums in fp32 to within their rounding (tests/gpu/test_acts_on_gpu.py). A count that wraps is no error.
CUDNN_MOST = 1 << 31
CUDNN_SPAN = 9 << 28
LEAST = -1e30            # of a bias: cuDNN's logits are multiplied by log2(e), which must not overflow
ROWS, LONG = 1 << 15, 1 << 17        # queries at a time; tokens of a row from which they go so (by_rows)
NEVER = 1 << 62                      # in place of LONG, where it is not


@dataclass(frozen=True)
class Attention:
    """scale: of the logits. causal: where there is no mask. mask: None or what torch's sdpa takes.

    spelled: products and softmax one by one, as transformers' "eager" attention: what models with capped logits
    (cap * tanh(logits / cap), Gemma 2) are trained with, and what has a gradient in rows that see nothing. The mask is
    added then, and is all there is of causality.

    packed: sequences behind one another in the one row, each of which sees itself. window: how many tokens one sees,
    itself the last; 0: all before it. Both causal, without a mask.

    values: size of a value's head, where it is not a query's; v and the output are [B, S, h, values] then.
    """

    scale: float
    causal: bool
    mask: Tensor | None = None
    spelled: bool = False
    cap: float = 0.0
    packed: Packed | None = None
    window: int = 0
    values: int = 0

    def forward(self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> tuple[Tensor, Any]:
        """Output [B, S, hq, D], and what backward wants besides: opaque, small. sinks: [hq]."""
        if self._flash(q):
            return self._by_flash(q, k, v, sinks)
        cudnn = self._cudnn(q, sinks)
        if (masked := self._masked(q, sinks, cudnn)) is not None:
            return masked.forward(q, k, v, sinks)
        if self.packed is None and cudnn and self._long(q, k, sinks):
            return self._forward_by_rows(q, k, v, sinks)
        if self.packed is not None or (cudnn and _share(q) > 1):
            return self._forward_in_parts(q, k, v, sinks)
        q, k, v = _turned(q, k, v)
        if cudnn:
            bias, blind = self._seen(q)
            out, lse, *rest = self._kernel(q, k, _near(v), bias)
            out, lse = _sunk(out, lse, sinks)
            if blind is not None:
                out.masked_fill_(blind, 0)
            return out.transpose(1, 2), (lse, *rest)
        if self._cpu(q, sinks):
            out, lse = _cpu_forward(q, *_each(q, k, v), 0.0, self.causal, attn_mask=self._bias(q), scale=self.scale)
            out, lse = _sunk(out, lse, sinks)
            return out.transpose(1, 2), (lse,)
        return self._torch(q, k, v, sinks).transpose(1, 2), None

    def backward(self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, kept: Any,
                 sinks: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """dq, dk, dv: [B, S, h, D], strided; dsinks [hq]."""
        if self._flash(q):
            return self._flash_grads(dout, q, k, v, out, kept, sinks)
        cudnn = self._cudnn(q, sinks)
        if (masked := self._masked(q, sinks, cudnn)) is not None:
            return masked.backward(dout, q, k, v, out, kept, sinks)
        if self.packed is not None or (cudnn and _share(q) > 1):
            return self._backward_in_parts(dout, q, k, v, out, kept, sinks)
        dout, q, k, v, out = _turned(dout, q, k, v, out)
        dsinks = None if kept is None or sinks is None else sinks_grad(dout, out, kept[0], sinks)
        if kept is not None and len(kept) == 1:
            dq, *each = _cpu_backward(dout, q, *_each(q, k, v), out, *kept, 0.0, self.causal, attn_mask=self._bias(q),
                                      scale=self.scale)
            found = dq, *(t.unflatten(1, (k.shape[1], -1)).sum(2) for t in each)
        elif kept is None or (found := self._cudnn_grads(dout, q, k, v, out, *kept)) is None:
            *found, dsinks = self._grads_by_torch(dout, q, k, v, sinks, kept is None)
        return *_turned(*found), dsinks

    # ---- a long row: some queries at a time ----

    def _long(self, q: Tensor, k: Tensor, sinks: Tensor | None) -> bool:
        """Of what cuDNN takes: also where backward goes in parts; not where it is flash's, which keeps its own."""
        return (self.causal and self.mask is None and q.shape[1] >= LONG
                and (_share(q) <= 1 or self._cut(q, k, sinks) is not None))

    def _forward_by_rows(self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> tuple[Tensor, Any]:
        """As forward; what is kept is that of one call over the row."""
        rest: list[Any] = []
        k, v = _near(k), _near(v)

        def kernel(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
            out, lse, *rest[:] = dataclasses.replace(self, causal=causal)._kernel(*_turned(_near(q), k, v), None)
            return out, lse

        out, lse = by_rows(kernel, q, k, v, ROWS)
        seed, offset, *_ = rest                          # of a dropout that there is none of
        out, lse = _sunk(out.transpose(1, 2), lse, sinks)
        return out.transpose(1, 2), (lse, seed, offset, None, None, q.shape[1], k.shape[1])

    def single_long_row(self, q: Tensor, k: Tensor, sinks: Tensor | None) -> bool:
        """Can gradients be had some rows at a time (walk_back)?"""
        return (q.shape[0] == 1 and q.shape[1] >= LONG and self.packed is None and not self.window
                and self._cudnn(q, sinks) and self._long(q, k, sinks))

    def walk_back(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, kept: Any
                  ) -> tuple[list[slice], Callable[[slice, Tensor], tuple[Tensor, Tensor, Tensor]]]:
        """Gradients of a single long row, for who goes on with some rows of them: blocks of rows from its end, and what
        gives dq [1, n, hq, D], dk and dv [1, n, hk, D] of each in this order, from dout [1, n, hq, D]. Those of keys
        and values are added up in fp32 at least: [S, 2, hk, D]."""
        (lse, *rest), k, v, size = kept, _near(k), _near(v), q.shape[1]
        sums = torch.zeros(size, 2, *k.shape[2:], dtype=torch.promote_types(k.dtype, torch.float32), device=k.device)

        def seen(block: slice, keys: slice, dout: Tensor, causal: bool) -> Tensor:
            """The part of dq that is of these keys, whose own gradients are added."""
            own = _turned(dout, _near(q[:, block]), k[:, keys], v[:, keys], out[:, block])
            dq, *dkv = dataclasses.replace(self, causal=causal)._cudnn_grads(
                *own, lse[:, :, block].contiguous(), *rest[:4], own[1].shape[2], own[2].shape[2])
            for i, d in enumerate(dkv):
                sums[keys, i].add_(d[0].transpose(0, 1))
            return dq.transpose(1, 2)

        def grads(block: slice, dout: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            dq = seen(block, block, dout, True)
            if block.start:
                dq = dq + seen(block, slice(0, block.start), dout, False)
            dk, dv = sums[block].to(k.dtype).unbind(1)
            return dq, dk[None], dv[None]

        return [slice(begin, min(begin + ROWS, size)) for begin in reversed(range(0, size, ROWS))], grads

    # ---- packed sequences one by one; of more than cuDNN's kernels are given some rows or some heads at a time ----

    def _forward_in_parts(self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> tuple[Tensor, Any]:
        if (cut := self._cut(q, k, sinks)) is None:
            return self._by_flash(q, k, v, None)
        out, kept = torch.empty(*q.shape[:3], v.shape[3], dtype=q.dtype, device=q.device), []
        for one, sink, to, *part in self._parts(cut, sinks, out, q, k, v):
            found, extra = one.forward(*map(_near, part), sink)
            to.copy_(found)
            kept.append(extra)
        return out, tuple(kept)

    def _backward_in_parts(self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, kept: Any,
                           sinks: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        if (cut := self._cut(q, k, sinks)) is None:
            return self._flash_grads(dout, q, k, v, out, kept, None)
        dq, dk, dv = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v))
        dsinks, each = [], kept
        if isinstance(kept[0], Tensor):                  # of one call: what it kept, for each part
            lse, *rest = kept
            each = [(part.contiguous(), *rest) for part in lse.chunk(cut[1], cut[0] // 2)]
        for extra, (one, sink, *parts) in zip(each, self._parts(cut, sinks, dq, dk, dv, dout, q, k, v, out)):
            *found, dsink = one.backward(*map(_near, parts[3:]), extra, sink)
            for to, d in zip(parts, found):
                to.copy_(d)
            dsinks.append(dsink)
        if sinks is None:
            return dq, dk, dv, None
        return dq, dk, dv, torch.cat(dsinks) if cut[0] == 2 else torch.stack(dsinks).sum(0)

    def _cut(self, q: Tensor, k: Tensor, sinks: Tensor | None) -> tuple[int, Any] | None:
        """(dimension, parts): rows of the batch, which may have to be cut again; of a single row its sequences, by
        their lengths, or the fewest equal parts of the heads, queries with their keys, none of them too long. None: one
        key's queries are, and flash takes them, or this raises RuntimeError."""
        if self.packed is not None:
            return 1, self.packed.lengths
        if q.shape[0] > 1:
            return 0, min(q.shape[0], math.ceil(_share(q)))
        heads = k.shape[2]
        parts = next((n for n in range(1, heads + 1) if heads % n == 0 and q.numel() // n <= CUDNN_MOST), None)
        if parts is None and (sinks is not None or self.mask is not None):
            raise RuntimeError(f"attention with a mask or sinks: {q.numel() // heads} elements of queries have the same"
                               f" key head, at most {CUDNN_MOST} can: shorter rows")
        return None if parts is None else (2, parts)

    def _parts(self, cut: tuple[int, Any], sinks: Tensor | None, *tensors: Tensor) -> Iterator[tuple[Any, ...]]:
        """Of each part: this with its mask, its sinks, and views of its [B, S, h, D]."""
        dim, n = cut
        views = [t.split(n, 1) if dim == 1 else t.chunk(n, dim) for t in tensors]
        each, at = len(views[0]), dim // 2               # rows or heads of [B, S, h, D] in [B, h, S, .]
        masks = [self.mask] * each if self.mask is None or self.mask.shape[at] == 1 else self.mask.chunk(n, at)
        own = sinks.chunk(n) if sinks is not None and dim == 2 else [sinks] * each
        return ((dataclasses.replace(self, mask=mask, packed=None), *rest) for mask, *rest in zip(masks, own, *views))

    # ---- packed sequences, windows: flash takes all; else a mask, which is the definition ----

    def _masked(self, q: Tensor, sinks: Tensor | None, cudnn: bool) -> Attention | None:
        """The same by a mask: a window that flash does not take; or causality, where products are spelled out, which
        it is added to. Else None."""
        spelled = not cudnn and sinks is not None and not self._cpu(q, sinks)
        if not self.window and not (spelled and self.causal and self.mask is None and self.packed is None):
            return None
        sight = Sight(1, q.shape[1], q.device, self.window, self.packed, None if sinks is None else q.dtype)
        return dataclasses.replace(self, causal=False, mask=sight.real, packed=None, window=0)

    def _flash(self, q: Tensor) -> bool:
        """Is this of packed sequences or a window, and for flash's kernels?"""
        most = max(q.shape[-1], self.values)
        return ((self.packed is not None or self.window > 0) and q.is_cuda and q.dtype != torch.float32
                and most % 8 == 0 and most <= 256 and torch.cuda.get_device_capability(q.device) >= (8, 0))

    def _by_flash(self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> tuple[Tensor, Any]:
        flat = _filled(*(t.flatten(0, 1) for t in (q, k, v)))
        lengths, more = self._flash_options(q, k)
        out, lse, rng, unused, _ = _flash_forward(*flat, *lengths, False, **more)
        if sinks is not None:                # out in place
            lse = _sunk(out.transpose(0, 1)[None], lse[None], sinks)[1][0]
        return out[..., :v.shape[3]].contiguous().view(*q.shape[:3], v.shape[3]), (lse, rng, unused)

    def _flash_grads(self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, kept: Any,
                     sinks: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        lse, rng, unused = kept
        flat = _filled(*(t.flatten(0, 1) for t in (dout, q, k, v, out)))
        lengths, more = self._flash_options(q, k)
        grads = _flash_backward(*flat, lse, *lengths, rng, unused, **more)
        dq, dk, dv = (d[..., :t.shape[3]].unflatten(0, t.shape[:2]) for d, t in zip(grads, (q, k, v)))
        each = (t.transpose(0, 1)[None] for t in (flat[0], flat[4]))
        return dq, dk, dv, None if sinks is None else sinks_grad(*each, lse[None], sinks)

    def _flash_options(self, q: Tensor, k: Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Rows of a batch are sequences behind one another: flash's offsets have 64 bits."""
        a, b = (self.packed or Packed.of((t.shape[1],) * t.shape[0], t.device) for t in (q, k))
        sides = {"window_size_left": self.window - 1, "window_size_right": 0} if self.window else {}
        return (a.cu, b.cu, a.longest, b.longest, 0.0, self.causal), {"scale": self.scale, **sides}

    # ---- kernels that give log-sum-exp ----

    def _cudnn(self, q: Tensor, sinks: Tensor | None) -> bool:
        plain = not self.spelled if sinks is None else not self.cap
        if not (plain and q.is_cuda and q.dtype != torch.float32 and q.shape[1] > 1
                and torch.backends.cuda.cudnn_sdp_enabled()):
            return False
        sizes = q.shape[-1], self.values or q.shape[-1]
        if sizes == (192, 128):
            return (torch.backends.cudnn.version() or 0) >= 91100 and \
                torch.cuda.get_device_capability(q.device) in ((9, 0), (10, 0), (10, 3))
        return max(sizes) <= 128 and not any(size % 8 for size in sizes)

    def _cpu(self, q: Tensor, sinks: Tensor | None) -> bool:
        return sinks is not None and q.device.type == "cpu" and not self.cap

    def _bias(self, q: Tensor) -> Tensor | None:
        """The mask as a number to add: [B, 1 or hq, S, S] of q's type."""
        if self.mask is None:
            return None
        least = max(LEAST, torch.finfo(q.dtype).min)
        if self.mask.dtype == torch.bool:
            return torch.zeros_like(self.mask, dtype=q.dtype).masked_fill_(~self.mask, least)
        return self.mask.to(q.dtype).clamp(min=least)

    def _seen(self, q: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """The mask for cuDNN, and [B, 1 or hq, S, 1]: rows that see nothing by it, which here see all."""
        bias = self._bias(q)
        if bias is None:
            return None, None
        blind = bias.amax(-1, keepdim=True) <= max(LEAST, torch.finfo(q.dtype).min) / 2
        return bias.masked_fill_(blind, 0), blind

    def _kernel(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> tuple[Any, ...]:
        """Output [B, hq, S, D], log-sum-exp, and the rest of what the kernel's backward wants."""
        out, lse, *lengths, seed, offset, _ = _forward(q, k, v, bias, True, 0.0, self.causal, False, scale=self.scale)
        return out, lse, seed, offset, *lengths

    def _cudnn_grads(self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *rest: Any) -> Any:
        """dq, dk, dv. None: with the same bits each time, which are asked for, there are none by a kernel."""
        bias, blind = self._seen(q)
        unseen, v = dout if blind is None else dout.masked_fill(blind, 0), _near(v)
        found = None if self.values else repeating_grads(unseen, q, k, v, out, lse, bias, self.causal, self.scale,
                                                       repeating())
        if found is not None or (repeating() and self.mask is not None):
            return found
        if repeating():                      # flash's, of each row as a sequence of its own
            lse = lse.reshape(q.shape[:3]).transpose(0, 1).flatten(1).contiguous()
            unread = torch.zeros(2, dtype=torch.int64, device=q.device)      # the state of no dropout
            return _turned(*self._flash_grads(*_turned(dout, q, k, v, out), (lse, unread, unread), None)[:3])
        # Where these reach beyond 2^31 elements cuDNN's dq of the last rows is wrong, and nothing says so: by 6 to 22 %
        # where it was looked at (torch 2.11).
        dout, out = (t if span_of(t) <= CUDNN_MOST else t.contiguous() for t in (unseen, out))
        return _backward(dout, q, k, v, out, lse, *rest[:2], bias, *rest[2:], 0.0, self.causal, scale=self.scale)

    def _grads_by_torch(self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, own: bool
                        ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """dq, dk, dv and dsinks by a forward under a graph. own: forward was this one; else cuDNN's, with a mask."""
        one = self
        if not own:
            bias, blind = self._seen(q)
            one, dout = dataclasses.replace(self, mask=bias), dout.masked_fill(blind, 0)
        with torch.enable_grad():
            leaves = [t.detach().requires_grad_() for t in (q, k, v, sinks) if t is not None]
            dq, dk, dv, *rest = torch.autograd.grad(one._torch(*leaves), leaves, dout)
        return dq, dk, dv, rest[0] if rest else None

    def _torch(self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
        spelled, grouped = self.spelled or sinks is not None, q.shape[1] > k.shape[1]
        if spelled or self.mask is not None:             # kernels that take a mask take no groups
            (k, v), grouped = _each(q, k, v), False
        if not spelled:
            return F.scaled_dot_product_attention(q, k, v, self.mask, is_causal=self.causal, scale=self.scale,
                                                  enable_gqa=grouped)
        logits = torch.matmul(q, k.transpose(2, 3)) * self.scale
        if self.cap:
            logits = torch.tanh(logits / self.cap) * self.cap
        if self.mask is not None:
            logits = logits + self.mask
        if sinks is not None:
            logits = torch.cat((logits, sinks.view(1, -1, 1, 1).expand(*logits.shape[:3], 1)), -1)
        p = F.softmax(logits, -1, dtype=torch.promote_types(q.dtype, torch.float32)).to(q.dtype)
        return torch.matmul(p[..., :k.shape[2]], v)


def _turned(*heads: Tensor) -> list[Tensor]:
    """[B, h, S, .] of [B, S, h, .], or the reverse."""
    return [t.transpose(1, 2) for t in heads]


def _filled(*heads: Tensor) -> list[Tensor]:
    """[T, h, .], with zeros to the largest size of them."""
    size = max(t.shape[-1] for t in heads)
    return [t if t.shape[-1] == size else F.pad(t, (0, size - t.shape[-1])) for t in heads]


def _share(q: Tensor) -> float:
    """How many times what cuDNN's kernels are given at once."""
    return max(q.numel() / CUDNN_MOST, span_of(q) / CUDNN_SPAN)


def long_tokens(q_columns: int, qkv_columns: int) -> int:
    """The most tokens in one row, q being a part of so wide a matrix, of which attention copies nothing."""
    return min(CUDNN_MOST // q_columns, CUDNN_SPAN // qkv_columns)


def _near(t: Tensor) -> Tensor:
    """The same values, within a span that cuDNN's kernels are given."""
    return t if span_of(t) <= CUDNN_SPAN else t.contiguous()


def _each(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values once for each query head."""
    groups = q.shape[1] // k.shape[1]
    return (k, v) if groups == 1 else (k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1))


def _sunk(out: Tensor, lse: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """out' [B, hq, S, D] and lse' as lse, [B, hq, S] or [B, hq, S, 1]."""
    if sinks is None:
        return out, lse
    with_sink = torch.logaddexp(lse, _like(sinks, lse))
    return out.mul_(torch.exp(lse - with_sink).view(*out.shape[:3], 1)), with_sink


def sinks_grad(dout: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    share = torch.exp(_like(sinks, lse) - lse).reshape(out.shape[:3])
    dots = (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
    return -(share * dots).sum((0, 2)).to(sinks.dtype)


def _like(sinks: Tensor, lse: Tensor) -> Tensor:
    """[hq] to be added to lse, in its type."""
    return sinks.to(lse.dtype).view(1, -1, *(1,) * (lse.dim() - 2))


# ---- a long row, some queries at a time ----------------------------------------------------------------

def by_rows(kernel: Callable[[Tensor, Tensor, Tensor, bool], tuple[Tensor, Tensor]], q: Tensor, k: Tensor, v: Tensor,
            rows: int) -> tuple[Tensor, Tensor]:
    """Output [B, S, hq, V] of q [B, S, hq, D], k [B, S, hk, D] and v [B, S, hk, V], and log-sum-exp as the kernel gives
    it: causal attention over a long row, some of its queries at a time. kernel: of q, k, v, causal gives an output [B,
    hq, n, D] and log-sum-exp [B, hq, n], or with a last dimension of 1.

    A kernel that is given the whole row works on queries from all over it, whose keys lie far apart: little of what one
    has read is still in the cache for the next, and a card at its power limit pays for the traffic with its clock
    (docs/performance.md).

    Queries see the keys before their own block in one call and the keys of their block in another, causal. Two parts of
    a softmax are put together by their log-sum-exps (Milakov and Gimelshein, "Online normalizer calculation for
    softmax", 2018, equation 4). What forward keeps is what one call over the row keeps.

    Backward (Attention.walk_back) goes from the row's end. A key's gradients come from the queries behind it, so that
    those of a block's own keys are complete when its queries are done: whoever needs them can go on with these rows,
    and no gradient of the whole row need exist.
    """
    out, sums = torch.empty(*q.shape[:3], v.shape[3], dtype=q.dtype, device=q.device), []
    for begin in range(0, q.shape[1], rows):
        block = slice(begin, begin + rows)
        own, lse = kernel(q[:, block], k[:, block], v[:, block], True)
        if begin:
            own, lse = _joined(own, lse, *kernel(q[:, block], k[:, :begin], v[:, :begin], False))
        out[:, block].copy_(own.transpose(1, 2))
        sums.append(lse)
    return out, torch.cat(sums, 2)


def _joined(a: Tensor, lse_a: Tensor, b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over the keys of both, [B, hq, n, D], and its log-sum-exp. In fp32 at least."""
    share = torch.sigmoid(lse_b - lse_a).view(*a.shape[:3], 1)
    wide = torch.promote_types(a.dtype, share.dtype)
    return torch.lerp(a.to(wide), b.to(wide), share.to(wide)), torch.logaddexp(lse_a, lse_b)


# ---- cuDNN's gradients with the same bits each time ------------------------------------------------------

WORK = 1 << 30           # bytes of dS at a time, at least
SHORT = 1 << 11          # tokens of rows that are taken unasked
ORDERLESS = 128          # keys: two blocks of them at most, and a sum of two has no order
_refused: set[tuple[object, ...]] = set()


def repeating_grads(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, bias: Tensor | None,
                    causal: bool, scale: float, asked: bool) -> tuple[Tensor, Tensor, Tensor] | None:
    """dq, dk, dv [B, h, S, D] of q [B, hq, S, D], k and v [B, hk, S, D]; bias: [1 or B, 1 or hq, S, S]. None: there is
    no such kernel, or too much of dS; that follows from shapes, device, library and what was asked for.

    The kernel has dS in memory, 2 bytes a pair of query and key, and takes as many rows or heads at a time as that has
    room for. Of short rows it is as fast as torch's, of long ones up to a fifth slower (docs/numerics.md): so it is
    taken for the former, and where torch.use_deterministic_algorithms asks for it.
    """
    shape = (q.dtype, q.device, q.shape, k.shape, None if bias is None else bias.shape, causal)
    step = _at_once(q, k, asked) if _known(q) and shape not in _refused else None
    if step is None:
        return None
    made = [torch.empty(t.transpose(1, 2).shape, dtype=t.dtype, device=t.device).transpose(1, 2) for t in (q, k, v)]
    near = [t if t.stride(-1) == 1 else t.contiguous() for t in (dout, q, k, v, out)]
    sums = lse.reshape(*q.shape[:3], 1)
    try:
        for row in range(0, q.shape[0], step[0]):
            for head in range(0, k.shape[1], step[1]):
                part = functools.partial(_part, row, head, step, k.shape[1])
                ops.attention_backward(*map(part, near), part(sums), part(bias), causal, scale, *map(part, made))
    except RuntimeError as error:
        if "attention: cuDNN" not in str(error):
            raise
        _refused.add(shape)
        return None
    return made[0], made[1], made[2]


def _part(row: int, head: int, step: tuple[int, int], keys: int, t: Tensor | None) -> Tensor | None:
    """Some rows, and some of so many key heads with their queries; one row, or head, stands for all."""
    if t is not None and t.shape[0] > 1:
        t = t[row:row + step[0]]
    if t is not None and t.shape[1] > 1:
        each = t.shape[1] // keys
        t = t[:, head * each:(head + step[1]) * each]
    return t


def _known(q: Tensor) -> bool:
    """Have device and library such a kernel, as far as was looked? (Ampere's and Blackwell's want other graphs.)"""
    return (q.is_cuda and torch.cuda.get_device_capability(q.device)[0] == 9
            and (torch.backends.cudnn.version() or 0) >= 91900)


def _at_once(q: Tensor, k: Tensor, asked: bool) -> tuple[int, int] | None:
    """Rows and key heads at a time. None: torch's kernel is faster and nobody asked, or a key head is too much.

    dS takes no more than torch's kernel would, for sums of dq in fp32 and gradients of keys by query head, or WORK.
    """
    (rows, hq, queries, _), (_, hk, keys, _) = q.shape, k.shape
    if keys <= ORDERLESS and not asked:
        return None
    heads = max(WORK, 8 * q.numel()) // (2 * _padded(queries) * _padded(keys))
    if heads >= hq and (asked or max(queries, keys) <= SHORT):
        return _even(rows, heads // hq), hk
    each = heads // (hq // hk) if asked else 0
    return (1, _even(hk, min(each, hk))) if each else None


def _even(n: int, most: int) -> int:
    """How many of n at a time, in as few and as equal parts as can be."""
    return math.ceil(n / math.ceil(n / most))


def _padded(n: int) -> int:
    return -(-n // 64) * 64
