"""Fused layers against plain torch: what test_fused.py and test_moe.py share.

A *run* trains one tiny model for a few steps and keeps what it saw: losses, gradients of the first step, weights at
the end. Fused results differ from the module's own code in the last bits, so runs are compared by norms.
"""
from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import doors
import fp64_ops
import parity
import pytest
import torch
import zoo
from torch import Tensor, nn

import megatrain_torch as mt
from megatrain_torch import _core
from megatrain_torch.fused.templates import Weights
from megatrain_torch.fused.templates.decoder import Decoder
from megatrain_torch.model.stream import runtime_of

KEEPS = ("saved", "selective", "replay")
Build = Callable[[], nn.Module]
Batch = Callable[[int], dict[str, Tensor]]

# Relative 2-norm of a gradient's error. fp32 rounds by 6e-8; the longest way of a gradient here is some 60 roundings
# (three layers, each a sum over 12 to 128 products in another order than torch's), and cancellation in softmax and
# norms makes a few of them count tenfold: up to 1.3e-6 was seen. A wrong formula is off by 1e-2 and more.
TOLERANCE = 5e-6
# What may be nothing but rounding (the gradient of a bias that attention does not see) is measured against the largest
# gradient of the model.
FLOOR = 2e-2
# In bf16, where every product is rounded by up to 2^-8. Relative to the same model in fp32, plain torch's own gradients
# are off by up to 1.0e-2 (Llama), 1.8e-2 (Qwen 3) and 2.3e-2 (Gemma 3), by 0.7e-2 to 1.1e-2 in the median, and its
# losses by 3e-5 (test_fused_on_gpu.larger on torch's CPU kernels). Two computations that round in different places are
# thus up to twice the worst of these apart. A wrong formula is off by more: a term left out is of the gradient's size.
ROUNDED = 5e-2
# One computation whose parts round alike, but for attention's kernel or the order of a sum: no further apart than one of
# them is from fp32.
ROUNDED_ONCE = 2e-2
# A mean over hundreds of tokens; three roundings of every logit, all to one side.
ROUNDED_LOSS = 1e-2
# Losses and weights after the steps. AdamW divides by the root of v, so what is small in a gradient moves its weight
# as far as what is large, its error with it; then the steps amplify each other: a tenfold of 5e-6 was seen (Gemma 3).
# A gradient that is left out in one step moves its weights by 1e-2 of themselves.
TRAINED = 2e-4


def lm(model_type: str, **config: Any) -> Build:
    """A tiny causal language model; a test that builds one that the installed transformers has not is skipped."""
    build = zoo.from_config("CausalLM", model_type, **{**zoo.DECODER, **config})

    def known() -> nn.Module:
        from transformers import AutoConfig
        try:
            AutoConfig.for_model(model_type)
        except ValueError:
            pytest.skip(f"this transformers has no {model_type}")
        return build()

    return known


def padded(step: int) -> dict[str, Tensor]:
    """One row padded on the left, one on the right."""
    batch = zoo.text_unpadded(step)
    mask = torch.ones_like(batch["input_ids"])
    mask[0, :3] = 0
    mask[1, -2:] = 0
    return {**batch, "attention_mask": mask, "labels": batch["labels"].masked_fill(mask == 0, -100)}


@dataclasses.dataclass
class Run:
    losses: list[Tensor] = dataclasses.field(default_factory=list)
    grads: dict[str, Tensor | None] = dataclasses.field(default_factory=dict)
    weights: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    codes: dict[str, str] = dataclasses.field(default_factory=dict)


def combinations(families: Any, batches: Any) -> list[tuple[str, str, str]]:
    """(family, keep, batch): each family has one of the keeps, and one of the two batches, in turn; all of them with
    MEGATRAIN_FULL."""
    return [(f, k, b) for i, f in enumerate(families) for j, k in enumerate(KEEPS) for n, b in enumerate(batches)
            if parity.FULL or (i % len(KEEPS) == j and (i // len(KEEPS) + j + n) % 2 == 0)]


def stream(model: nn.Module, keep: str = "saved", compute: str = "fused", slots: int = 2, nvme: Any = None,
           **debug: Any) -> nn.Module:
    return doors.stream(model, "cpu", compute=compute, nvme=nvme,
                        plan={"activations": keep, "slots": slots, "debug": {"poison": True, **debug}})


def codes(model: nn.Module) -> dict[str, str]:
    """Whose code runs each decoder layer."""
    return {w.name: w.code for w in runtime_of(model).windows if "layers." in w.name}


def all_fused(found: dict[str, str]) -> None:
    assert found and set(found.values()) == {"template"}, f"not all layers are fused: {found}"


def none_fused(found: dict[str, str], why: str) -> None:
    assert found, "there are no layers"
    for name, code in found.items():
        assert code.startswith("its own (") and why in code, f"{name}: {code!r} does not say {why!r}"


def train(model: nn.Module, batch: Batch, optimizer: Any, steps: int = 2, accumulate: int = 1,
          loss: Callable[..., Tensor] = zoo.model_loss) -> Run:
    run = Run()
    opt = optimizer([p for p in model.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.1, eps=1e-4)
    for step in range(steps):
        for micro in range(accumulate):
            value = loss(model, batch(step * accumulate + micro)) / accumulate
            value.backward()
            run.losses.append(value.detach())
        run.grads = run.grads or {n: parity.frozen(p.grad) for n, p in model.named_parameters()}
        opt.step()
        opt.zero_grad()
    run.weights = {n: parity.frozen(p) for n, p in model.named_parameters()}
    return run


def plain(build: Build, batch: Batch, **options: Any) -> Run:
    parity.seed()
    return train(build(), batch, torch.optim.AdamW, **options)


def fused(build: Build, batch: Batch, keep: str = "saved", engine: dict[str, Any] | None = None, **options: Any) -> Run:
    parity.seed()
    model = stream(build(), keep, **(engine or {}))
    run = train(model, batch, mt.AdamW, **options)
    run.codes = codes(model)
    mt.unstream(model)
    return run


def error(a: Tensor, b: Tensor, floor: float = 0.0) -> float:
    """|b - a| / |a|, 2-norms in fp64; |a| counts for floor at least."""
    a, b = a.double(), b.double()
    return float((b - a).norm() / max(float(a.norm()), floor, 1e-30))


def grads_agree(truth: dict[str, Tensor | None], found: dict[str, Tensor | None], limit: float = TOLERANCE,
                floor: float = FLOOR) -> None:
    assert set(truth) == set(found)
    largest = max([float(t.double().norm()) for t in truth.values() if t is not None], default=0.0)
    for name, t in truth.items():
        f = found[name]
        assert (t is None) == (f is None), f"{name}: plain {'has no' if t is None else 'has a'} gradient"
        if t is not None:
            off = error(t, f, floor * largest)
            assert off <= limit, f"gradient of {name} is off by {off:.1e}, more than {limit:.0e}"


def agree(truth: Run, found: Run, limit: float = TOLERANCE) -> None:
    """The first step's losses and gradients within `limit`, what comes after within TRAINED."""
    for i, (a, b) in enumerate(zip(truth.losses, found.losses, strict=True)):
        assert error(a, b) <= (TRAINED if i else limit), f"loss {i}: plain {a.item():.9g}, fused {b.item():.9g}"
    grads_agree(truth.grads, found.grads, limit)
    for name, t in truth.weights.items():
        off = error(t, found.weights[name])
        assert off <= TRAINED, f"{name} is off by {off:.1e} after training, more than {TRAINED:.0e}"


def same_as_plain(build: Build, batch: Batch, keep: str = "saved", engine: dict[str, Any] | None = None,
                  **options: Any) -> Run:
    """All layers run by templates, and train as plain torch does."""
    run = fused(build, batch, keep, engine, **options)
    all_fused(run.codes)
    agree(plain(build, batch, **options) if options else truth(build, batch), run)
    return run


def own_as_plain(build: Build, batch: Batch, why: str) -> None:
    """No layer runs by a template, for this reason, and all train as plain torch does."""
    run = fused(build, batch)
    none_fused(run.codes, why)
    agree(truth(build, batch), run)


def grads_of(model: nn.Module, batch: dict[str, Any]) -> dict[str, Tensor | None]:
    model(**batch).loss.backward()
    return {n: p.grad for n, p in model.named_parameters()}


def second_backward(build: Build, keep: str = "saved") -> None:
    """Gives the first one's gradients again."""
    model = stream(build(), keep)
    loss = model(**padded(0)).loss
    loss.backward(retain_graph=True)
    once = {n: parity.frozen(p.grad) for n, p in model.named_parameters()}
    loss.backward()
    all_fused(codes(model))
    grads_agree({n: 2 * t for n, t in once.items()}, {n: p.grad for n, p in model.named_parameters()})
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def with_a_hook(build: Build, part: str, batch: Batch) -> tuple[list[Tensor], list[Tensor]]:
    """Losses of two steps, plain and streamed, of a model whose first layer has a hook inside: it runs its own code."""
    found = []
    for wrap in (lambda model: model, lambda model: stream(model, "saved")):
        parity.seed()
        model = wrap(build())
        model.model.layers[0].get_submodule(part).register_forward_hook(lambda *_: None)
        losses = [model(**batch(step)).loss for step in range(2)]
        sum(losses).backward()
        found.append([loss.detach() for loss in losses])
    return found[0], found[1]


def generates_as_plain(model: nn.Module) -> None:
    ids = zoo.text(3)["input_ids"][:, :4]
    options = dict(max_new_tokens=6, do_sample=False, attention_mask=torch.ones_like(ids))
    assert torch.equal(model.generate(ids, **options), copy.deepcopy(model).generate(ids, **options))


@functools.cache
def truth(build: Build, batch: Batch) -> Run:
    """Two steps of plain torch, of which the second goes on from moments that are not zero; once for each."""
    return plain(build, batch)


def flipped(module: Any, name: str, index: int) -> tuple[Any, str, Any]:
    """module.name with the sign of one of its results turned."""
    right = getattr(module, name)

    def wrong(*args: Any, **kwargs: Any) -> Any:
        out = right(*args, **kwargs)
        return tuple(-t if i == index else t for i, t in enumerate(out)) if isinstance(out, tuple) else -out

    return module, name, wrong


# ---------------------------------------------------------------- templates by themselves

def rotation(model: nn.Module) -> dict[str, Any]:
    """A layer's arguments besides hidden states."""
    positions = torch.arange(zoo.T).unsqueeze(0)
    return {"position_embeddings": model.model.rotary_emb(torch.zeros(1, zoo.T, zoo.H), positions)}


class Node(torch.autograd.Function):
    """A template as a function of x and its weights, which gradcheck can try."""

    @staticmethod
    def forward(ctx: Any, template: Decoder, take: Callable[[], Any], keep: str, names: tuple[str, ...], x: Tensor,
                *weights: Tensor) -> Tensor:
        ctx.template, ctx.take, ctx.names = template, take, names
        y, ctx.kept = template.forward(x, Weights(dict(zip(names, weights))), take(), keep)
        ctx.save_for_backward(x, *weights)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, *weights = ctx.saved_tensors
        kept, ctx.kept = ctx.kept, None
        dx, grads = ctx.template.backward(dy, x, kept, Weights(dict(zip(ctx.names, weights))), ctx.take(), ctx.names)
        return None, None, None, None, dx, *(grads[n] for n in ctx.names)


def settings_of(build: Build) -> Any:
    """What a proof finds of the middle layer."""
    model = stream(build())
    zoo.model_loss(model, zoo.text(0))
    (window,) = [w for w in runtime_of(model).windows if w.name == "model.layers.1"]
    return window.fused._reader.last.found[0]


def gradcheck(build: Build, monkeypatch: pytest.MonkeyPatch, keep: str = "saved", style: int = 0) -> None:
    """Finite differences in fp64 of the middle layer's template: by x and by every weight."""
    model, settings = build().double(), settings_of(build)
    fp64_ops.install(monkeypatch)
    model.config._experts_implementation = "eager"       # the one that knows fp64
    layer, seen = model.model.layers[1], {}
    layer.register_forward_pre_hook(lambda m, args, kwargs: seen.update(args=args, kwargs=kwargs), with_kwargs=True)
    model(input_ids=zoo.text(0)["input_ids"][:1, :5], use_cache=False)
    template = Decoder(layer).set_as(settings)
    for norm in template.norms:
        norm.style = style
    rng = torch.Generator().manual_seed(0)

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, generator=rng, dtype=torch.float64)

    names, weights = zip(*[(n, (p.detach() + 0.1 * noise(*p.shape)).requires_grad_())
                           for n, p in layer.named_parameters()])
    x = noise(1, 5, model.config.hidden_size).requires_grad_()

    def take() -> Any:
        return template.take(layer, x, seen["kwargs"])[1]

    def layer_of(x: Tensor, *weights: Tensor) -> Tensor:
        return Node.apply(template, take, keep, names, x, *weights)

    assert torch.autograd.gradcheck(layer_of, (x, *weights), eps=1e-6, atol=1e-7, rtol=1e-5, fast_mode=True)
    own = torch.func.functional_call(layer, dict(zip(names, weights)), (x,), seen["kwargs"])
    assert error(own, layer_of(x, *weights)) < 1e-6, "the template computes something else"     # own: fp32 norms


def tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    parts = vars(value).values() if dataclasses.is_dataclass(value) else value.values() if isinstance(value, dict) \
        else value if isinstance(value, tuple) else ()
    return [t for part in parts for t in tensors(part)]


def bytes_are_as_reckoned(model: nn.Module) -> None:
    """What a forward keeps, for every way of keeping, is what the template says beforehand."""
    layer, x = model.model.layers[0], torch.randn(zoo.B, zoo.T, zoo.H)
    template = Decoder(layer)
    w, sizes = Weights(dict(layer.named_parameters())), []
    for keep in ("saved", "selective", "attention", "replay"):
        call = template.take(layer, x, rotation(model))[1]
        with torch.no_grad():
            kept = template.forward(x, w, call, keep)[1]
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors(kept)}
        assert x.data_ptr() not in storages
        reckoned = dict(template.sizes(4).kept)[keep] * zoo.B * zoo.T
        lse = 0 if template.attention.sinks else 4 * zoo.B * zoo.T * template.attention.hq      # kept on CUDA only
        assert sum(storages.values()) == max(reckoned - lse, 0), keep
        sizes.append(reckoned)
    assert sizes[0] > sizes[1] > sizes[2] > sizes[3] == 0


def stays_on_the_device(build: Build, keep: str) -> None:
    """Host copies of layers at home there are read by nobody: one would take its layer's bytes again."""
    model = build()
    homes = {name: "vram" for name, _ in model.named_modules() if name.rpartition(".")[0].endswith("layers")}
    model = mt.stream(model, "cpu", compute="fused", plan={"activations": keep, "homes": homes})
    rt, opt = runtime_of(model), mt.AdamW(model.parameters())

    def warm() -> list[str]:
        return [rt.unit_names[u] for u in rt.homes.settled if not rt.core.reserved_bytes(u, _core.PLANES["HI"])]

    assert len(rt.homes.settled) == len(homes) > 1
    for step in range(2):
        assert not warm(), f"before step {step}"
        loss = zoo.model_loss(model, padded(step))
        assert not warm(), f"after forward {step}"
        zoo.update(loss, opt)
    assert not warm()
    all_fused(codes(model))
    assert model.get_parameter(f"{min(homes)}.input_layernorm.weight").sum() and warm() == [min(homes)]
