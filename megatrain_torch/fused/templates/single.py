"""Templates of single modules: an embedding, and a norm that stands alone. What they keep never leaves the device."""
from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from ... import ops
from .attention import NEVER
from .parts import Norm, Unfit, dense, hidden_states
from .weights import Grads, Weights


class Single:
    """A template of one module: nothing of what it does is to be chosen, tiled or kept elsewhere."""

    differentiable_input, swaps, links, coded, rounds, routes, cached = True, False, False, False, False, False, 0
    settings: tuple[Any, ...] = ()

    def check(self) -> None:
        """No configuration says how it computes."""

    def set_as(self, settings: tuple[Any, ...]) -> Any:
        """A template of this structure with these settings (Decoder.settings)."""
        return self

    def take(self, module: nn.Module, x: Any, kwargs: Any, dtype: torch.dtype, roles: Any = None
             ) -> tuple[Tensor, None]:
        if kwargs:
            raise Unfit("called with more than its input")
        return self.input(x, dtype), None

    def input(self, x: Any, dtype: torch.dtype) -> Tensor:
        return dense(hidden_states(x, dtype))

    def expanded(self, item: int) -> tuple[int, int]:
        return 0, 0

    def long(self, item: int) -> tuple[int, int, int]:
        return 0, 0, NEVER

    def tiled(self, item: int) -> tuple[int, int, int]:
        return 0, 0, 0

    experts, copied = tiled, expanded


class Embedding(Single):
    """Rows of a table by number: ids [...] int64 -> [..., H]."""

    differentiable_input = False

    def __init__(self, module: nn.Module) -> None:
        if type(module) is not nn.Embedding:
            raise Unfit(f"it is a {type(module).__name__}, no plain nn.Embedding")
        if module.max_norm is not None or module.scale_grad_by_freq or module.sparse:
            raise Unfit("its embedding has max_norm, scale_grad_by_freq or sparse gradients")
        self.rows, self.padding = module.num_embeddings, module.padding_idx
        self.width = module.embedding_dim

    def input(self, ids: Any, dtype: torch.dtype) -> Tensor:
        if not isinstance(ids, Tensor) or ids.dtype != torch.int64:
            raise Unfit("called with something else than int64 numbers")
        return ids

    def small(self, x: Tensor, rng: torch.Generator, n: int, kwargs: Any, last: bool) -> tuple[Tensor, Any]:
        return torch.randint(self.rows, (1, n), generator=rng, device=x.device), {}

    def forward(self, ids: Tensor, w: Weights, call: None, keep: str) -> tuple[Tensor, Tensor]:
        return torch.nn.functional.embedding(ids, w["weight"]), ids

    @staticmethod
    def nothing_kept(ids: Tensor) -> Tensor:
        return ids

    def backward(self, dy: Tensor, ids: Tensor, w: Weights, call: None, wanted: Any, input_grad: bool
                 ) -> tuple[None, Grads]:
        grads = Grads(wanted)
        padding = -1 if self.padding is None else self.padding
        grads["weight"] = ops.embedding_backward(dy.reshape(-1, self.width), ids.reshape(-1), self.rows, padding)
        return None, grads

    def input_bytes(self, tokens: int, item: int) -> int:
        return 8 * tokens

    def kept_bytes(self, keep: str, tokens: int, item: int) -> int:
        return 0

    def work_bytes(self, tokens: int, item: int) -> int:
        return 0


class LoneNorm(Single):
    """The last RMSNorm of a model: x [..., H] -> [..., H]."""

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

    def nothing_kept(self, x: Tensor) -> tuple[Tensor, None]:
        return x, None

    def backward(self, dy: Tensor, kept: Any, w: Weights, call: None, wanted: Any, input_grad: bool
                 ) -> tuple[Tensor, Grads]:
        grads, (x, rstd) = Grads(wanted), kept
        if rstd is None:
            rstd = self.norm.forward(x, w)[1]
        return self.norm.backward(dy, x, rstd, w, grads)[0], grads

    def input_bytes(self, tokens: int, item: int) -> int:
        return tokens * self.norm.size * item

    def kept_bytes(self, keep: str, tokens: int, item: int) -> int:
        return 4 * tokens

    def work_bytes(self, tokens: int, item: int) -> int:
        return 2 * tokens * self.norm.size * item
