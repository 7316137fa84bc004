"""What a proof found holds for its case alone, and what forward ran by is what backward runs by."""
from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from typing import Any

import fusing
import parity
import pytest
import torch
import zoo
from fusing import codes, lm, stream
from test_proof import Norm, grads, wrapped
from torch import Tensor, nn
from torch.nn import functional as F

import megatrain_torch as mt
from megatrain_torch.model.stream import runtime_of

LLAMA = lm("llama", num_hidden_layers=2)


class OnePlusInEvaluation(Norm):
    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        hat = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        if self.training:
            return self.weight * hat.to(x.dtype)
        return (hat * (1.0 + self.weight.float())).to(x.dtype)


class Model(nn.Module):
    def __init__(self, kind: type) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(16, 16), kind(), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x)))


def of(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    model(x).square().mean().backward()
    return {n: p.grad.clone() for n, p in model.named_parameters()}


def streamed(kind: type) -> tuple[nn.Module, nn.Module]:
    parity.seed()
    plain = Model(kind)
    return plain, mt.stream(copy.deepcopy(plain), "cpu", compute="fused", units=["first", "norm", "last"])


def code_of(model: nn.Module, name: str) -> str:
    return next(w.code for w in runtime_of(model).windows if w.name == name)


@pytest.mark.parametrize("first", [True, False])
def test_a_norm_whose_style_is_another_in_evaluation(first: bool) -> None:
    plain, model = streamed(OnePlusInEvaluation)
    x = torch.randn(2, 12, 16)
    for training in (first, not first, first, not first):
        plain.train(training), model.train(training)
        fusing.grads_agree(of(plain, x), of(model, x))
        assert code_of(model, "norm") == "template"


# ---------------------------------------------------------------- changes between forward and backward

def activation(layer: nn.Module) -> None:
    layer.mlp.act_fn = nn.GELU()


def swapped(layer: nn.Module) -> None:
    """Two parts change names; the head count stays."""
    layer.mlp.gate_proj, layer.mlp.up_proj = layer.mlp.up_proj, layer.mlp.gate_proj


BETWEEN: dict[str, Callable[[nn.Module], Any]] = {
    "a norm's eps": lambda layer: setattr(layer.input_layernorm, "variance_epsilon", 0.1),
    "the scale": lambda layer: setattr(layer.self_attn, "scaling", 0.5),
    "the activation": activation,
    "the training flag": lambda layer: layer.eval(),
    "parts' names": swapped,
    "a wrapper": wrapped,                # no template covers it, nor knows its names
    "no norm": lambda layer: setattr(layer, "input_layernorm", nn.Identity()),
}


@pytest.mark.parametrize("keep", ["replay", pytest.param("saved", marks=parity.LONG)])
@pytest.mark.parametrize("what", BETWEEN)
def test_backward_is_that_of_its_forward(what: str, keep: str) -> None:
    """The next pass has begun when the first one's backward runs: the module is another by then."""
    parity.seed()
    plain = LLAMA()
    model = stream(copy.deepcopy(plain), keep)
    batch, found = zoo.text_unpadded(0), []
    for m in (plain, model):
        params = dict(m.named_parameters())
        m(**batch).loss.backward()                       # proofs are made
        m.zero_grad()
        first = m(**batch).loss
        BETWEEN[what](m.model.layers[1])
        second = m(**batch).loss
        first.backward()
        found.append({n: p.grad.clone() for n, p in params.items()})
        m.zero_grad()
        second.backward()
        found.append({n: None if p.grad is None else p.grad.clone() for n, p in params.items()})
    fusing.grads_agree(found[0], found[2])
    fusing.grads_agree(found[1], found[3])


@pytest.mark.parametrize("read", [False, True])
def test_logits_are_those_of_the_head_that_was_called(read: bool) -> None:
    """By cross_entropy, or read; the head has another forward by then."""
    parity.seed()
    plain = LLAMA()
    model = stream(copy.deepcopy(plain))
    batch, found = zoo.text_unpadded(0), []
    ids, labels = batch["input_ids"], batch["labels"]
    for m in (plain, model):
        logits = m(input_ids=ids).logits
        m.lm_head.__class__ = type("Doubled", (nn.Linear,), {"forward": lambda self, x: 2 * nn.Linear.forward(self, x)})
        other = m(input_ids=ids).logits
        loss = logits.square().mean() if read else F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        (loss + 0 * other.sum()).backward()
        found.append({n: p.grad.clone() for n, p in m.named_parameters()})
    fusing.grads_agree(*found)


# ---------------------------------------------------------------- a decoder's

def unturned_without_mask(layer: nn.Module) -> None:
    """An attention that turns its heads where a mask came, and does not where none did."""
    attn = layer.self_attn
    module = sys.modules[type(attn).__module__]
    base = type(attn)

    def forward(self: Any, hidden_states: Tensor, position_embeddings: Any, attention_mask: Tensor | None, **kw: Any
                ) -> Any:
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        q = self.q_proj(hidden_states).view(shape).transpose(1, 2)
        k = self.k_proj(hidden_states).view(shape).transpose(1, 2)
        v = self.v_proj(hidden_states).view(shape).transpose(1, 2)
        if attention_mask is not None:
            q, k = apply_rotary_pos_emb(q, k, *position_embeddings)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=attention_mask, scale=self.scaling,
                                             is_causal=attention_mask is None, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).reshape(*hidden_states.shape[:-1], -1).contiguous()), None

    global apply_rotary_pos_emb
    apply_rotary_pos_emb = module.apply_rotary_pos_emb
    attn.__class__ = type("Half", (base,), {"forward": forward})


apply_rotary_pos_emb: Any = None


@pytest.mark.parametrize("order", [(True, False, True, False), pytest.param((False, True, False, True), marks=parity.LONG)])
def test_rotary_embedding_where_there_is_a_mask_alone(order: tuple[bool, ...]) -> None:
    parity.seed()
    model = LLAMA()
    for layer in model.model.layers:
        unturned_without_mask(layer)
    plain = copy.deepcopy(model)
    model = stream(model)
    for masked in order:
        batch = {**(fusing.padded(0) if masked else zoo.text_unpadded(0)), "use_cache": False}
        fusing.grads_agree(grads(plain, batch), grads(model, batch))
        fusing.all_fused(codes(model))


@pytest.mark.parametrize("first", [True, pytest.param(False, marks=parity.LONG)])
def test_a_layer_that_does_otherwise_with_a_cache(first: bool) -> None:
    parity.seed()
    plain = LLAMA()

    class Own(type(plain.model.layers[0])):
        def forward(self, hidden_states: Tensor, past_key_values: Any = None, **kw: Any) -> Tensor:
            out = super().forward(hidden_states, past_key_values=past_key_values, **kw)
            return out if past_key_values is None else 1.5 * out

    for layer in plain.model.layers:
        layer.__class__ = Own
    model = stream(copy.deepcopy(plain))
    for cached in (first, not first, first):
        batch = {**zoo.text_unpadded(0), "use_cache": cached}
        fusing.grads_agree(grads(plain, batch), grads(model, batch))
        assert all((code == "template") is not cached for code in codes(model).values()), codes(model)


@pytest.mark.parametrize("placed", [False, True])
@pytest.mark.parametrize("batch", [zoo.text_unpadded, fusing.padded])
def test_no_name_of_an_argument_decides_anything(batch: Any, placed: bool) -> None:
    """transformers 5.24 calls `past_key_values` `cache`; the next may rename the others, or give them no names."""
    parity.seed()
    plain = LLAMA()
    kind = type(plain.model.layers[0])
    words = "position_embeddings", "attention_mask", "past_key_values", "position_ids"

    class Renamed(kind):
        def __call__(self, hidden: Tensor, cache: Any = None, **kw: Any) -> Tensor:
            kw["past_key_values"] = kw.get("past_key_values") or cache
            given = [kw.pop(word) for word in words]
            if placed:
                return super().__call__(hidden, *given, **kw)
            return super().__call__(**dict(zip(("rope", "seen", "kv", "at"), given)), x=hidden, flags=True, **kw)

        def forward(self, x: Tensor, rope: Any, seen: Any, kv: Any, at: Any, flags: bool = False, **kw: Any) -> Tensor:
            return super().forward(x, seen, at, kv, position_embeddings=rope, **kw)

    for layer in plain.model.layers:
        layer.__class__ = Renamed
    model = stream(copy.deepcopy(plain))
    for cached in (True, False):
        inputs = {**batch(0), "use_cache": cached}
        fusing.grads_agree(grads(plain, inputs), grads(model, inputs))
        fusing.all_fused(codes(model))


class LearntAngles(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.scale = inner, nn.Parameter(torch.ones(()))

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        return tuple(t * self.scale for t in self.inner(*args, **kwargs))


def test_an_argument_that_needs_a_gradient_has_it() -> None:
    parity.seed()
    plain = LLAMA()
    plain.model.rotary_emb = LearntAngles(plain.model.rotary_emb)
    model = stream(copy.deepcopy(plain))
    found = [fusing.grads_of(m, zoo.text_unpadded(0)) for m in (plain, model)]
    fusing.none_fused(codes(model), "needs a gradient")
    fusing.grads_agree(*found)


def test_an_argument_that_the_template_does_not_know_and_the_layer_uses() -> None:
    parity.seed()
    plain = LLAMA()

    class Moved(type(plain.model.layers[0])):
        def forward(self, hidden_states: Tensor, position_ids: Any = None, **kw: Any) -> Tensor:
            out = super().forward(hidden_states, position_ids=position_ids, **kw)
            return out + 0.01 * position_ids[..., None].to(out.dtype)

    for layer in plain.model.layers:
        layer.__class__ = Moved
    model = stream(copy.deepcopy(plain))
    fusing.grads_agree(grads(plain, zoo.text_unpadded(0)), grads(model, zoo.text_unpadded(0)))
    fusing.none_fused(codes(model), "")
