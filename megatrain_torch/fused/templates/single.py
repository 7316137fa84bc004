"""Templates of single modules: an embedding, and a norm that stands alone. What they keep never leaves the device."""
from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from ... import ops
from .attention import NEVER
from .parts import Norm, Unfit, hidden_states
from .weights import Grads, Weights


class Single:
    """A template of one module: nothing of what it does is to be chosen, tiled or kept elsewhere; Decoder says what the
    functions are."""

    differentiable_input, swaps, links, coded, rounds, routes, cached = True, False, False, False, False, False, 0
    settings: tuple[Any, ...] = ()
    input = staticmethod(hidden_states)
    check = staticmethod(lambda: None)
    expanded = copied = staticmethod(lambda item: (0, 0))
    tiled = experts = staticmethod(lambda item: (0, 0, 0))
    long = staticmethod(lambda item: (0, 0, NEVER))
    kept_bytes = staticmethod(lambda keep, tokens, item: 0)
    work_bytes = staticmethod(lambda tokens, item: 0)

    def set_as(self, settings: tuple[Any, ...]) -> Any:
        return self

    def take(self, module: nn.Module, x: Tensor, kwargs: Any, roles: Any = None) -> tuple[Tensor, None]:
        if kwargs:
            raise Unfit("called with more than its input")
        return x.contiguous() if x.is_floating_point() and x.stride(-1) != 1 else x, None


class Embedding(Single):
    """Rows of a table by number: ids [...] int64 -> [..., H]."""

    differentiable_input = False
    nothing_kept = staticmethod(lambda ids: ids)
    input_bytes = staticmethod(lambda tokens, item: 8 * tokens)

    def __init__(self, module: nn.Module) -> None:
        if type(module) is not nn.Embedding:
            raise Unfit(f"it is a {type(module).__name__}, no plain nn.Embedding")
        if module.max_norm is not None or module.scale_grad_by_freq or module.sparse:
            raise Unfit("its embedding has max_norm, scale_grad_by_freq or sparse gradients")
        self.rows, self.padding, self.width = module.num_embeddings, module.padding_idx, module.embedding_dim

    def input(self, ids: Any, dtype: torch.dtype) -> Tensor:
        if not isinstance(ids, Tensor) or ids.dtype != torch.int64:
            raise Unfit("called with something else than int64 numbers")
        return ids

    def small(self, x: Tensor, rng: torch.Generator, n: int, kwargs: Any, last: bool) -> tuple[Tensor, Any]:
        return torch.randint(self.rows, (1, n), generator=rng, device=x.device), {}

    def forward(self, ids: Tensor, w: Weights, call: None, keep: str) -> tuple[Tensor, Tensor]:
        return torch.nn.functional.embedding(ids, w["weight"]), ids

    def backward(self, dy: Tensor, ids: Tensor, w: Weights, call: None, wanted: Any, input_grad: bool
                 ) -> tuple[None, Grads]:
        grads = Grads(wanted)
        padding = -1 if self.padding is None else self.padding
        grads["weight"] = ops.embedding_backward(dy.reshape(-1, self.width), ids.reshape(-1), self.rows, padding)
        return None, grads


class LoneNorm(Single):
    """The last RMSNorm of a model: x [..., H] -> [..., H]."""

    nothing_kept = staticmethod(lambda x: (x, None))
    kept_bytes = staticmethod(lambda keep, tokens, item: 4 * tokens)

    def __init__(self, module: nn.Module) -> None:
        self.norm = Norm(module, "")

    @property
    def settings(self) -> tuple[Any, ...]:
        return (self.norm.style,)

    def set_as(self, settings: tuple[Any, ...]) -> LoneNorm:
        found = copy.deepcopy(self)
        (found.norm.style,) = settings
        return found

    def small(self, x: Tensor, rng: torch.Generator, n: int, kwargs: Any, last: bool) -> tuple[Tensor, Any]:
        return torch.randn(1, n, x.shape[-1], generator=rng, device=x.device).to(x.dtype), {}

    def forward(self, x: Tensor, w: Weights, call: None, keep: str) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        y, rstd = self.norm.forward(x, w)
        return y, (x, rstd)

    def backward(self, dy: Tensor, kept: Any, w: Weights, call: None, wanted: Any, input_grad: bool
                 ) -> tuple[Tensor, Grads]:
        grads, (x, rstd) = Grads(wanted), kept
        if rstd is None:
            rstd = self.norm.forward(x, w)[1]
        return self.norm.backward(dy, x, rstd, w, grads)[0], grads

    def input_bytes(self, tokens: int, item: int) -> int:
        return tokens * self.norm.size * item

    def work_bytes(self, tokens: int, item: int) -> int:
        return 2 * tokens * self.norm.size * item
