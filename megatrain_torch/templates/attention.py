"""Attention without a graph: forward and backward through torch's kernels.

q, k, v and the output are [B, S, h, D] here, as the projections make them; torch's kernels take them
transposed, as views. On CUDA, cuDNN's kernels with grouped heads where there is no mask (616 TFLOP/s
forward and 500 backward at S=4096 on an H200, where flash gives 330 and 262); elsewhere whatever
torch picks, run again in backward under a small graph of its own.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

_forward = torch.ops.aten._scaled_dot_product_cudnn_attention
_backward = torch.ops.aten._scaled_dot_product_cudnn_attention_backward


@dataclass(frozen=True)
class Attention:
    """scale: of the logits. causal: where there is no mask. mask: None or what torch's sdpa takes.

    spelled: products and softmax one by one, as transformers' "eager" attention: what models with capped logits
    (cap * tanh(logits / cap), Gemma 2) are trained with. The mask is added then, and is all there is of causality.
    """

    scale: float
    causal: bool
    mask: Tensor | None = None
    spelled: bool = False
    cap: float = 0.0

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Any]:
        """Output [B, S, hq, D], and what backward wants besides: opaque, small."""
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        if not self._cudnn(q):
            return self._torch(q, k, v).transpose(1, 2), None
        out, lse, cum_q, cum_k, max_q, max_k, seed, offset, _ = _forward(
            q, k, v, None, True, 0.0, self.causal, False, scale=self.scale)
        return out.transpose(1, 2), (lse, seed, offset, cum_q, cum_k, max_q, max_k)

    def backward(self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, kept: Any
                 ) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk, dv: [B, S, h, D], strided."""
        dout, q, k, v, out = (t.transpose(1, 2) for t in (dout, q, k, v, out))
        if kept is None:
            with torch.enable_grad():
                leaves = [t.detach().requires_grad_() for t in (q, k, v)]
                found = torch.autograd.grad(self._torch(*leaves), leaves, dout)
        else:
            lse, seed, offset, cum_q, cum_k, max_q, max_k = kept
            found = _backward(dout, q, k, v, out, lse, seed, offset, None, cum_q, cum_k, max_q, max_k, 0.0,
                              self.causal, scale=self.scale)
        dq, dk, dv = (t.transpose(1, 2) for t in found)
        return dq, dk, dv

    def _cudnn(self, q: Tensor) -> bool:
        plain = self.mask is None and not self.spelled
        return (plain and q.is_cuda and q.dtype != torch.float32 and q.shape[-1] % 8 == 0 and q.shape[-1] <= 128
                and q.shape[2] > 1 and torch.backends.cuda.cudnn_sdp_enabled())

    def _torch(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        groups = q.shape[1] // k.shape[1]
        if self.spelled:
            return self._spelled(q, *(t.repeat_interleave(groups, 1) for t in (k, v)))
        if groups > 1 and self.mask is not None:         # kernels that take a mask take no groups
            k, v = (t.repeat_interleave(groups, 1) for t in (k, v))
        return F.scaled_dot_product_attention(q, k, v, self.mask, is_causal=self.causal, scale=self.scale,
                                              enable_gqa=groups > 1 and self.mask is None)

    def _spelled(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        logits = torch.matmul(q, k.transpose(2, 3)) * self.scale
        if self.cap:
            logits = torch.tanh(logits / self.cap) * self.cap
        if self.mask is not None:
            logits = logits + self.mask
        return torch.matmul(F.softmax(logits, -1, dtype=torch.promote_types(q.dtype, torch.float32)).to(q.dtype), v)
