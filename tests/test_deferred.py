"""Logits that are not made: losses and gradients against plain torch, and everything else people do with logits.

Fused results are not plain torch's bits. Tolerances (fp32): a loss is a mean over rows of sums over V = 128 numbers,
rounded by 2^-24 a few times each: 4e-6. A gradient is off by what its sums of some hundred products round,
relative to the whole: 2e-6 of its 2-norm, or, for gradients that are zero but for rounding (a key's bias), of the
thousandth part of the largest in the model. Logits that are made are made by the head's own code: equal bits.
"""
from __future__ import annotations

import copy
import functools
import pickle
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import doors
import fusing
import parity
import pytest
import torch
import torch.nn.functional as F
import zoo
from hypothesis import example, given, settings
from hypothesis import strategies as st
from situations import Tiny, batch, llama, lm_loss, made, text
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from zoo import H, T, V

import megatrain_torch as mt
from megatrain_torch.fused import head
from megatrain_torch.fused import loss as loss_module
from megatrain_torch.model.stream import runtime_of

DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
LOSS, GRADIENT = 4e-6, 2e-6
LR = 1e-2                            # fusing.train's

pytestmark = pytest.mark.filterwarnings("ignore")
everywhere = pytest.mark.parametrize("device", DEVICES)


def streamed(model: nn.Module, device: str = "cpu", activations: str = "auto", compute: str = "fused", **kw: Any
             ) -> nn.Module:
    """The head alone is fused: layers keep their own code."""
    model = doors.stream(model, device=device, compute=compute, plan={"activations": activations, "slots": 2,
                                                                     "debug": {"poison": True}}, **kw)
    for w in runtime_of(model).windows:
        w.fused = None
    return model


def head_code(model: nn.Module) -> str:
    """What mt.explain says of the head's window."""
    codes = [w.code for w in runtime_of(model).windows if w.head is not None or "the head" in w.unfit]
    assert len(codes) == 1, codes
    assert codes[0] in mt.explain(model)
    return codes[0]


FUSED = "fused with the loss"


grads_agree = functools.partial(fusing.grads_agree, limit=GRADIENT, floor=1e-3)       # only the head is ours here


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {k: parity.frozen(p.grad) for k, p in model.named_parameters()}


def train(model: nn.Module, loss: Callable[[nn.Module, Any], Tensor], data: Callable[[int], Any], device: str = "cpu",
          **how: int) -> fusing.Run:
    parity.seed()
    return fusing.train(model, lambda number: parity.to_device(data(number), device), torch.optim.AdamW, loss=loss, **how)


def assert_runs(plain: fusing.Run, other: fusing.Run) -> None:
    """The first step's gradients; later ones start from other weights. AdamW divides a gradient's error by its
    size, at least eps = 1e-4: a weight moves by at most lr each step, and 1e-3 of that for errors of 1e-7."""
    for i, (a, b) in enumerate(zip(plain.losses, other.losses, strict=True)):
        assert (a.dtype, a.shape) == (b.dtype, b.shape) and fusing.error(a, b) <= (4 * LOSS if i else LOSS), f"{i}: {a:.9g} and {b:.9g}"
    grads_agree(plain.grads, other.grads)
    for name, w in plain.weights.items():
        off, room = (other.weights[name] - w).double().norm(), 1e-4 * w.double().norm() + 1e-3 * LR * w.numel() ** 0.5
        assert off <= room, f"{name}: {parity.describe(w, other.weights[name])}"


def compare(build: Callable[[], nn.Module], loss: Callable[[nn.Module, Any], Tensor], data: Callable[[int], Any] = text,
            device: str = "cpu", **kw: Any) -> nn.Module:
    """Trains plain and streamed; the streamed model, for further questions."""
    with parity.exact(device):
        plain = train(build().to(device), loss, data, device, **kw)
        model = streamed(build(), device)
        assert_runs(plain, train(model, loss, data, device, **kw))
    return model


# ---------------------------------------------------------------- architectures

NO_HEAD = {"distilbert", "vit", "dinov2", "beit", "swin", "convnext", "resnet", "clip", "siglip", "wav2vec2", "hubert",
           "perceiver", "patchtst", "segformer", "videomae"}


# With their own heads all of them are in test_parity.py.
@everywhere
@pytest.mark.parametrize("name", [n if i % 2 == 0 else pytest.param(n, marks=parity.LONG) for i, n in enumerate(zoo.CASES)])
def test_architectures_train_as_plain_torch(name: str, device: str) -> None:
    """All that make logits over a vocabulary fuse; classifiers and towers have no such head, and CTC none that
    is named."""
    case = zoo.CASES[name]
    model = compare(case.build, case.loss, case.batch, device)
    if name in NO_HEAD:
        assert all(w.head is None for w in runtime_of(model).windows)
    else:
        assert head_code(model) == FUSED


@pytest.mark.parametrize("name", ["llama_tied", "gemma2", "bert", "bart", "qwen3_moe"])
def test_replayed_layers_before_a_fused_head(name: str) -> None:
    case = zoo.CASES[name]
    plain = train(case.build(), case.loss, case.batch)
    assert_runs(plain, train(streamed(case.build(), activations="replay"), case.loss, case.batch))


@pytest.mark.parametrize("name", ["llama", "llama_tied", "bert"])
def test_micro_batches_add_up(name: str) -> None:
    case = zoo.CASES[name]
    model = compare(case.build, case.loss, case.batch, accumulate=3, steps=2)
    assert head_code(model) == FUSED


def test_bf16_is_as_near_to_the_truth_as_plain_torch() -> None:
    """The truth: the same bf16 weights in fp32. Plain torch rounds logits' gradients to bf16 as the fused loss
    does; the factor two is for luck."""
    def run(model: nn.Module) -> dict[str, Tensor | None]:
        model(**text(0)).loss.backward()
        return {k: None if g is None else g.float() for k, g in gradients(model).items()}

    def error(g: dict[str, Tensor | None], name: str) -> float:
        return fusing.error(truth[name], g[name])

    truth = run(llama().bfloat16().float())
    plain, other = run(llama().bfloat16()), run(streamed(llama().bfloat16()))
    for name in truth:
        assert error(other, name) <= 2 * error(plain, name) + 2**-8, name


# ---------------------------------------------------------------- losses that fuse

def shifted(x: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    return x[:, :-1, :], ids[:, 1:]


def by_slices(x: Tensor, ids: Tensor) -> Tensor:
    a, b = shifted(x, ids)
    return F.cross_entropy(a.contiguous().view(-1, V), b.reshape(-1))


def soft_capped(x: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy((torch.tanh(x / 0.4) * 0.4).flatten(0, 1), ids.flatten())


def changed_bias(x: Tensor, ids: Tensor) -> Tensor:
    bias = torch.linspace(-1, 1, V, device=x.device)
    x = x + bias
    bias.zero_()
    return F.cross_entropy(x.flatten(0, 1), ids.flatten())


def odds(x: Tensor, ids: Tensor) -> Tensor:
    """ORPO's: a loss of half of the rows beside log p of all, two uses of the head's weights."""
    p = x[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1).mean(-1)
    return by_slices(x[:1], ids[:1]) - F.logsigmoid((p[0] - p[1]) - (torch.log1p(-p[0].exp()) - torch.log1p(-p[1].exp())))


FUSING: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "shifted by slices": by_slices,
    "shifted and reshaped": lambda x, ids: F.cross_entropy(x[..., :-1, :].float().reshape(-1, V), ids[:, 1:].reshape(-1)),
    "classes first": lambda x, ids: F.cross_entropy(x.transpose(1, 2), ids),
    "classes first, shifted": lambda x, ids: F.cross_entropy(x[:, 1:].permute(0, 2, 1), ids[:, :-1]),
    "classes first, scaled": lambda x, ids: F.cross_entropy(2 * x.transpose(1, 2), ids),
    "batch and time swapped": lambda x, ids: F.cross_entropy(x.transpose(0, 1).reshape(-1, V), ids.t().reshape(-1)),
    "the last tokens": lambda x, ids: F.cross_entropy(x[:, -3:].flatten(0, 1), ids[:, -3:].flatten()),
    "every second token": lambda x, ids: F.cross_entropy(x[:, ::2].flatten(0, 1), ids[:, ::2].flatten()),
    "one token": lambda x, ids: F.cross_entropy(x[:, 5], ids[:, 5]),
    "one row": lambda x, ids: F.cross_entropy(x[1, 3], ids[1, 3]),
    "second row of the batch": lambda x, ids: F.cross_entropy(x[1:].float().view(-1, V), ids[1]),
    "halves apart": lambda x, ids: sum(F.cross_entropy(a.flatten(0, 1), b.flatten())
                                       for a, b in zip(x.chunk(2, 1), ids.chunk(2, 1))),
    "rows apart": lambda x, ids: sum(F.cross_entropy(a, b) * w for a, b, w in zip(x.unbind(0), ids, (0.3, 2.0))),
    "module": lambda x, ids: nn.CrossEntropyLoss(ignore_index=7)(x.view(-1, V), ids.view(-1)),
    "sum over items": lambda x, ids: F.cross_entropy(x.view(-1, V), ids.view(-1), reduction="sum") / torch.tensor(17),
    "label smoothing": lambda x, ids: F.cross_entropy(x.view(-1, V), ids.view(-1), label_smoothing=0.2),
    "ignored labels": lambda x, ids: F.cross_entropy(x.view(-1, V), ids.masked_fill(ids % 3 == 0, -100).view(-1)),
    "another ignored label": lambda x, ids: F.cross_entropy(x.view(-1, V), ids.view(-1) % 4, ignore_index=2),
    "soft cap": soft_capped,
    "soft cap of other numbers": lambda x, ids: F.cross_entropy(
        (-0.7 * torch.tanh(x * 3.0 / 7)).flatten(0, 1) * 5, ids.flatten()),
    "scaled": lambda x, ids: F.cross_entropy(((2 * x) * 3 / 7.5).flatten(0, 1), ids.flatten()),
    "negated": lambda x, ids: F.cross_entropy((x * -1.5).flatten(0, 1), ids.flatten()),
    "a fixed bias": lambda x, ids: F.cross_entropy((x + torch.linspace(-1, 1, V, device=x.device)).flatten(0, 1) * 1.5,
                                                   ids.flatten()),
    "a bias that changes later": changed_bias,
    "with named arguments": lambda x, ids: F.cross_entropy(input=x.view(-1, V), target=ids.view(-1)),
    "times a number": lambda x, ids: 3.7 * F.cross_entropy(x.view(-1, V), ids.view(-1)),
    "squared": lambda x, ids: F.cross_entropy(x.view(-1, V), ids.view(-1)) ** 2,
    "sliced, capped, sliced": lambda x, ids: F.cross_entropy(
        torch.tanh(x[:, 1:] / 0.5)[:, ::2].mul(0.5).flatten(0, 1), ids[:, 1::2].flatten()),
    "loss of each token": lambda x, ids: F.cross_entropy(x.view(-1, V), ids.view(-1), reduction="none").square().mean(),
    "loss of some tokens": lambda x, ids: F.cross_entropy(
        x[:, :-1].transpose(1, 2), ids[:, 1:].masked_fill(ids[:, 1:] > 60, -100), reduction="none",
        label_smoothing=0.1)[0].square().mean(),
    "by hand": lambda x, ids: -x.log_softmax(-1).gather(-1, ids.unsqueeze(-1)).mean(),
    "by hand, of capped logits": lambda x, ids: torch.gather(F.log_softmax(
        torch.tanh(x[:, 1:] / 0.4) * 0.4, dim=2, dtype=torch.float32), 2, ids[:, :-1, None]).square().mean(),
    "classes first, by hand": lambda x, ids: x.transpose(1, 2).log_softmax(1).gather(1, ids.unsqueeze(1)).exp().sum(),
    "odds": odds,
    "labels on the host": lambda x, ids: F.cross_entropy(x.view(-1, V), ids.view(-1).cpu() if is_deferred(x)
                                                         else ids.view(-1)),
}


def is_deferred(x: Any) -> bool:
    return isinstance(x, head.DeferredLogits)


def with_loss(of: Callable[[Tensor, Tensor], Tensor]) -> Callable[[nn.Module, Tensor], Tensor]:
    return lambda model, ids: of(model(ids), ids)


class Biased(Tiny):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(H, V)


@everywhere
@pytest.mark.parametrize("name", FUSING)
def test_losses_that_fuse(name: str, device: str) -> None:
    model = compare(lambda: made(Biased), with_loss(FUSING[name]), batch, device, steps=1)
    assert head_code(model) == FUSED


def test_a_loss_of_16_bit_logits_has_their_type() -> None:
    model = streamed(made().bfloat16())
    out = model(batch(0))
    assert F.cross_entropy(out.view(-1, V), batch(0).view(-1)).dtype == torch.bfloat16
    assert F.cross_entropy(out.float().view(-1, V), batch(0).view(-1)).dtype == torch.float32
    for autocast in (False, True):                       # the CPU's leaves log_softmax in 16 bits
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            types = [model(batch(0)).log_softmax(-1).gather(-1, batch(0).unsqueeze(-1)).dtype for model in (model, made().bfloat16())]
        assert types[0] == types[1], autocast
    assert head_code(model) == FUSED


def test_no_labels_at_all_is_nan_as_torchs() -> None:
    model = streamed(made())
    assert torch.isnan(F.cross_entropy(model(batch(0)).view(-1, V), torch.full((2, T), -100).view(-1)))


# Of rows: when it can be made of labels of n dimensions and this shape, and the same move of logits and of labels.
MOVES: dict[str, tuple[Callable[..., bool], Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "slice0": (lambda n, s: n and s[0] > 1, lambda x: x[1:], lambda i: i[1:]),
    "slice1": (lambda n, s: n > 1 and s[1] > 2, lambda x: x[:, :-2], lambda i: i[:, :-2]),
    "step": (lambda n, s: n and s[-1] > 3, lambda x: x[..., ::2, :], lambda i: i[..., ::2]),
    "flip_dims": (lambda n, s: n > 1, lambda x: x.transpose(0, 1), lambda i: i.transpose(0, 1)),
    "flatten": (lambda n, s: n > 1, lambda x: x.reshape(-1, V), lambda i: i.reshape(-1)),
    "unsqueeze": (lambda n, s: n < 4, lambda x: x.unsqueeze(0), lambda i: i.unsqueeze(0)),
    "select": (lambda n, s: n > 1, lambda x: x[-1], lambda i: i[-1]),
    "float": (lambda n, s: True, lambda x: x.float() * 2, lambda i: i),
    "contiguous": (lambda n, s: True, lambda x: x.contiguous(), lambda i: i.contiguous()),
    "narrow": (lambda n, s: n and s[-1] > 4, lambda x: x.narrow(x.dim() - 2, 2, 2), lambda i: i.narrow(i.dim() - 1, 2, 2)),
    "chunk": (lambda n, s: n and s[0] > 1, lambda x: x.chunk(2)[1], lambda i: i.chunk(2)[1]),
    "unfold": (lambda n, s: n == 1 and s[0] % 4 == 0, lambda x: x.view(4, -1, V), lambda i: i.reshape(4, -1)),
}


def chained(x: Tensor, ids: Tensor, moves: list[str]) -> tuple[Tensor, Tensor]:
    """x [..., V] and labels [...] after the same moves of rows."""
    for move in moves:
        possible, of_logits, of_labels = MOVES[move]
        if possible(ids.dim(), ids.shape):
            x, ids = of_logits(x), of_labels(ids)
    return x, ids


@settings(max_examples=200, deadline=None)
@example(["flip_dims", "float"])            # a copy that keeps the order of its rows in memory
@example(["slice0", "float", "slice0"])     # rows of rows
@given(st.lists(st.sampled_from([*MOVES]), max_size=7))
def test_any_chain_of_views_picks_the_right_rows(moves: list[str]) -> None:
    """Shape, strides and loss of the chain equal those of real logits; so do values, when they are made."""
    model = Head()
    ids = torch.randint(0, V, (4, 8), generator=torch.Generator().manual_seed(1))
    real, labels = chained(model.logits(), ids, moves)
    other, _ = chained(model.deferred(), ids, moves)
    assert is_deferred(other) and steps_of(other) == steps_of(real)
    losses = []
    for x in (real, other):
        model.hidden.grad = None
        value = F.cross_entropy(x.movedim(-1, 1) if x.dim() > 2 else x, labels)
        value.backward()
        losses.append((value.detach(), model.hidden.grad))
    assert fusing.error(losses[0][0], losses[1][0]) <= LOSS
    grads_agree({"hidden": losses[0][1]}, {"hidden": losses[1][1]})
    assert other._logits.fused and torch.equal(real.detach(), other.detach())


def steps_of(x: Tensor) -> list[tuple[int, int]]:
    """(size, stride); a dimension of one number has no stride to speak of."""
    return [(n, x.stride(d) if n > 1 else 0) for d, n in enumerate(x.shape)]


class Head:
    """A streamed head by itself, and the same in plain torch."""

    _streamed: nn.Module | None = None

    def __init__(self) -> None:
        if Head._streamed is None:
            Head._streamed = streamed(made())
        self.model = Head._streamed
        self.hidden = torch.randn(4, 8, H, generator=torch.Generator().manual_seed(2)).requires_grad_()

    def logits(self) -> Tensor:
        return F.linear(self.hidden, self.model.head.weight.detach().clone().as_subclass(Tensor))

    def deferred(self) -> Tensor:
        return self.model.head(self.hidden)


# ---------------------------------------------------------------- losses that need logits

class Power(torch.autograd.Function):
    """A loss of the user's as one node: it gets what Python gives it, and answers with a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return (x * x).mean()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        x, = ctx.saved_tensors
        return grad * 2 * x / x.numel()


def in_place(x: Tensor, ids: Tensor) -> Tensor:
    x[..., 3] = -2.0
    x.mul_(1.5)
    return F.cross_entropy(x.view(-1, V), ids.view(-1))


def in_place_at_once(x: Tensor, ids: Tensor) -> Tensor:
    x = x.flatten(0, 1)
    x[:, 3] = -2.0
    return F.cross_entropy(x, ids.flatten())


def in_place_on_a_view(x: Tensor, ids: Tensor) -> Tensor:
    """The view was deferred when it was taken; a copy taken before keeps its values."""
    view, before = x[:, :-1], 2 * x
    view.mul_(3.0)
    return F.cross_entropy(x.view(-1, V), ids.view(-1)) + before.exp().mean()


def soft_labels(x: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(x.view(-1, V), F.one_hot(ids, V).view(-1, V).float() * 0.9)


def metric_first(x: Tensor, ids: Tensor) -> Tensor:
    with torch.no_grad():
        assert (x.argmax(-1) == ids).float().mean() < 1
    value = F.cross_entropy(x.view(-1, V), ids.view(-1))
    assert not is_deferred(x) or not x._logits.fused, "logits that are there are used"
    return value


NEEDING: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "class weights": lambda x, ids: F.cross_entropy(x.view(-1, V), ids.view(-1),
                                                    weight=torch.linspace(0.5, 2, V, device=x.device)),
    "soft labels": soft_labels,
    "old arguments": lambda x, ids: F.cross_entropy(x.view(-1, V), ids.view(-1), size_average=False),
    "two log p of each token": lambda x, ids: x.log_softmax(-1).gather(-1, torch.stack((ids, 5 - ids % 3), -1)).mean(),
    "log p of all": lambda x, ids: x.log_softmax(-1)[..., ::2].mean(),
    "entropy": lambda x, ids: -(x.log_softmax(-1) * x.softmax(-1)).sum(-1).mean(),
    "log p that were scaled": lambda x, ids: F.cross_entropy((2 * x.log_softmax(-1)).view(-1, V), ids.view(-1)),
    "log p along time": lambda x, ids: x.log_softmax(1).gather(2, ids.unsqueeze(-1)).mean(),
    "a loss of log p": lambda x, ids: F.cross_entropy(x.log_softmax(-1).view(-1, V), ids.view(-1)),
    "logits of labels": lambda x, ids: x.gather(-1, ids.unsqueeze(-1)).mean(),
    "mean square": lambda x, ids: x.square().mean(),
    "masked rows": lambda x, ids: F.cross_entropy(x[ids > 60], ids[ids > 60]),
    "some classes": lambda x, ids: F.cross_entropy(x[..., :64].reshape(-1, 64), ids.view(-1) % 64),
    "repeated rows": lambda x, ids: F.cross_entropy(x[:1].expand(3, -1, -1).reshape(-1, V), ids[:1].repeat(3, 1).view(-1)),
    "masked classes": lambda x, ids: F.cross_entropy(
        x.masked_fill(torch.arange(V, device=x.device) > 100, -1e4).view(-1, V), ids.view(-1) % 100),
    "two soft caps": lambda x, ids: F.cross_entropy(torch.tanh(torch.tanh(x)).view(-1, V), ids.view(-1)),
    "a factor that is a tensor": lambda x, ids: F.cross_entropy((x * torch.tensor(2.0, device=x.device)).view(-1, V),
                                                                ids.view(-1)),
    "rounded to 16 bits": lambda x, ids: F.cross_entropy(x.bfloat16().float().view(-1, V), ids.view(-1)),
    "a bias after scaling": lambda x, ids: F.cross_entropy(
        (2 * x + torch.linspace(-1, 1, V, device=x.device)).view(-1, V), ids.view(-1)),
    "in place": in_place,
    "in place, then the loss": in_place_at_once,
    "in place on a view": in_place_on_a_view,
    "custom function": lambda x, ids: Power.apply(x * 2),
    "custom function of a slice": lambda x, ids: Power.apply(x[:, 1:].float()),
    "metric first": metric_first,
    "joined": lambda x, ids: F.cross_entropy(torch.cat([x, 2 * x]).view(-1, V), ids.repeat(2, 1).view(-1)),
    "product with a matrix": lambda x, ids: (x @ torch.eye(V, device=x.device)[:, :3]).exp().mean(),
}


@everywhere
@pytest.mark.parametrize("name", NEEDING)
def test_losses_that_need_logits(name: str, device: str) -> None:
    """The head's own code makes them: the loss has plain torch's bits where the reading is plain."""
    model = compare(lambda: made(Biased), with_loss(NEEDING[name]), batch, device, steps=1)
    assert "its own (its logits are read by aten." in head_code(model)


def test_what_is_wrong_raises_as_torch_does() -> None:
    model = streamed(made())
    out = model(batch(0))
    for action in (lambda: F.cross_entropy(out.view(-1, V), batch(0)), lambda: out.view(-1, V + 1),
                   lambda: F.cross_entropy(out.view(-1, V), batch(0).view(-1), label_smoothing=2.0),
                   lambda: F.cross_entropy(out.view(-1, V), batch(0).view(-1) + V), lambda: out + torch.ones(V + 1),
                   lambda: model(batch(0)).log_softmax(-1).gather(5, batch(0).unsqueeze(-1))):
        with pytest.raises((RuntimeError, ValueError, IndexError)):
            action()
    F.cross_entropy(out.view(-1, V), batch(0).view(-1)).backward()


@everywhere
def test_a_fused_loss_and_a_read_of_its_logits_add_up(device: str) -> None:
    """z-loss beside the loss: one gradient by way of each."""
    def loss(model: nn.Module, ids: Tensor) -> Tensor:
        x = model(ids)
        return F.cross_entropy(x.view(-1, V), ids.view(-1)) + 0.1 * x.logsumexp(-1).square().mean()

    model = compare(lambda: made(Biased), loss, batch, device, accumulate=2, steps=2)
    assert head_code(model) == FUSED


def test_tied_weights_and_logits_that_were_read() -> None:
    def loss(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
        out = model(**inputs)
        return out.loss + 0.1 * out.logits.logsumexp(-1).square().mean()

    compare(lambda: llama(tie_word_embeddings=True), loss, accumulate=2, steps=2)


@pytest.mark.parametrize("read", [False, True])
def test_gradients_of_tied_weights_leave_once(read: bool) -> None:
    """The loss, and logits that were made, are uses of the head's weights: the embedding's gradient is added to
    theirs on the device."""
    def run(compute: str) -> int:
        model = streamed(llama(tie_word_embeddings=True), compute=compute)
        x, ids = model(input_ids=text(0)["input_ids"]).logits, text(0)["labels"]
        value = x.logsumexp(-1).mean() if read else F.cross_entropy(x.view(-1, V), ids.view(-1))
        value.backward()
        runtime_of(model).drain()
        return runtime_of(model).core.stats()["d2h_bytes"]

    assert run("fused") == run("eager")


class Scaled(Tiny):
    """Logits are multiplied by a parameter that is streamed, in forward or by whoever called the model."""

    inside = True

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.7))

    def forward(self, ids: Tensor) -> Tensor:
        x = super().forward(ids)
        return x * self.scale if self.inside else x


@pytest.mark.parametrize("inside", [True, False])
def test_logits_meet_streamed_parameters(inside: bool) -> None:
    def loss(model: nn.Module, ids: Tensor) -> Tensor:
        model.inside = inside
        x = model(ids) if inside else model(ids) * model.scale
        return F.cross_entropy(x.view(-1, V), ids.view(-1))

    model = compare(lambda: made(Scaled), loss, batch, steps=2)
    assert "aten.mul" in head_code(model)


# ---------------------------------------------------------------- logits that somebody asks for later

def outputs(model: nn.Module, device: str = "cpu") -> Any:
    return model(**parity.to_device(text(0), device))


@everywhere
@pytest.mark.parametrize("when", ["before backward", "after backward"])
def test_logits_read_after_the_loss_are_plain_torchs(when: str, device: str) -> None:
    plain, model = llama().to(device), streamed(llama(), device)
    right, out = outputs(plain, device).logits.detach(), outputs(model, device)
    if when == "after backward":
        out.loss.backward()
    assert is_deferred(out.logits) and head_code(model) == FUSED
    assert torch.equal(out.logits.argmax(-1), right.argmax(-1))
    assert type(out.logits.detach()) is Tensor and torch.equal(out.logits.detach(), right)
    assert torch.equal(out.logits.cpu(), right.cpu()) and torch.equal(out.logits[0, -1], right[0, -1])
    if when == "before backward":
        out.loss.backward()
    assert head_code(model) == FUSED


READS: dict[str, Callable[[Tensor], Any]] = {
    "numpy": lambda x: torch.from_numpy(x.numpy()), "detached numpy": lambda x: torch.from_numpy(x.detach().numpy()),
    "list": lambda x: torch.tensor(x.tolist()), "data": lambda x: x.data, "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "deepcopy": copy.deepcopy, "copy": lambda x: copy.copy(x), "clone": lambda x: x.clone().detach(),
    "dlpack": lambda x: torch.from_dlpack(x.detach()), "item": lambda x: torch.stack([torch.tensor(x[0, 0, 0].item())]),
    "rows": lambda x: torch.stack([r.detach() for r in x]), "fp64": lambda x: x.double().detach().float(),
    "out": lambda x: torch.add(x.detach(), 0, out=torch.empty(x.shape)),
}


@pytest.mark.parametrize("how", READS)
def test_every_way_to_read_values(how: str) -> None:
    right = outputs(llama()).logits.detach()
    model = streamed(llama())
    got = READS[how](outputs(model).logits)
    assert type(got) is Tensor
    assert torch.equal(got, right[0, 0, :1] if how == "item" else right)


def test_repr_shows_values() -> None:
    right = outputs(llama()).logits.detach()
    out = outputs(streamed(llama()))
    assert repr(out.logits) == repr(right) and f"{out.logits}" == f"{right}"


def test_form_is_free() -> None:
    """Shape, type and the like are known without a look at the weights."""
    model = streamed(llama())
    x = outputs(model).logits
    assert x.shape == (2, T, V) and x.size(-1) == V and x.dim() == 3 and x.numel() == 2 * T * V and len(x) == 2
    assert x.dtype == torch.float32 and x.device.type == "cpu" and x.requires_grad and not x.is_leaf
    assert x.is_contiguous() and x.stride() == (T * V, V, 1) and x.element_size() == 4 and x.is_floating_point()
    assert x.grad_fn is not None and isinstance(x, Tensor) and hash(x) == hash(x)
    assert x._logits.value is None, "logits were made"


def test_logits_after_the_step_are_refused() -> None:
    """The weights moved: values made from them would be others. The message names the way out."""
    model = streamed(llama())
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    out, kept = outputs(model), outputs(model)
    seen = kept.logits.detach()
    out.loss.backward()
    opt.step()
    for read in (lambda: out.logits.argmax(-1), lambda: out.logits.detach(), lambda: out.logits.tolist(),
                 lambda: F.cross_entropy(out.logits.view(-1, V), text(0)["labels"].view(-1))):
        with pytest.raises(mt.MegatrainError, match=r"lm_head: .*weights have changed since.*compute='eager'"):
            read()
    assert repr(out.logits) == "DeferredLogits([2, 12, 128], torch.float32, never made)"
    assert torch.equal(kept.logits.detach(), seen), "logits made before the step keep their values"


def test_what_logits_are_made_of_is_given_back_when_the_weights_have_moved_on() -> None:
    """A loop's variable names the last step's output until the next forward is over, its loss included."""
    model = streamed(llama())
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    out = outputs(model)
    hidden = weakref.ref(out.logits._logits.hidden)
    out.loss.backward()
    held = outputs(model)
    assert hidden() is not None, "the same weights: it can still be read"
    opt.step()
    later = outputs(model)
    assert hidden() is None and held.logits._logits.hidden is None and later.logits._logits.hidden is not None


def test_logits_whose_input_was_changed_are_refused() -> None:
    model = Head()
    hidden = model.hidden.detach().clone().requires_grad_() * 1
    out = model.model.head(hidden)
    hidden.detach().mul_(2)
    with pytest.raises(mt.MegatrainError, match="changed in place"):
        out.argmax(-1)


def test_gradients_of_logits() -> None:
    """Asked for before the loss they are given, by the ordinary way; afterwards there are none."""
    plain, model = made(), streamed(made())
    seen: list[Tensor] = []
    for m in (plain, model):
        x = m(batch(0))
        x.retain_grad()
        x.register_hook(lambda g: seen.append(g.clone()))
        F.cross_entropy(x.view(-1, V), batch(0).view(-1)).backward()
        seen.append(x.grad)
    assert all(torch.equal(seen[0], g) for g in seen[1:])
    x = model(batch(0))
    value = F.cross_entropy(x.view(-1, V), batch(0).view(-1))
    for ask in (x.retain_grad, lambda: x.register_hook(print), lambda: torch.autograd.grad(value, x)):
        with pytest.raises(mt.MegatrainError, match=r"the loss was computed without .*compute='eager'"):
            ask()
    x = model(batch(0))
    value = x.view(-1, V).logsumexp(-1).mean()
    right = plain(batch(0))
    assert torch.equal(torch.autograd.grad(value, x)[0],
                       torch.autograd.grad(right.view(-1, V).logsumexp(-1).mean(), right)[0])


def test_a_gradient_of_deferred_logits_reaches_the_model() -> None:
    """torch.autograd.backward with a gradient of logits that nobody has made."""
    plain, model = made(), streamed(made())
    g = torch.randn(2, T, V, generator=torch.Generator().manual_seed(3))
    for m in (plain, model):
        torch.autograd.backward([m(batch(0)).float()], [g])
    grads_agree(gradients(plain), gradients(model))


# ---------------------------------------------------------------- backward

def test_backward_twice() -> None:
    """retain_graph keeps gradients; without it torch says so. Twice the same: .grad is the double, exactly."""
    model = streamed(made())
    value = lm_loss(model, batch(0))
    value.backward(retain_graph=True)
    once = gradients(model)
    value.backward()
    for name, g in gradients(model).items():
        assert torch.equal(g, 2 * once[name]), name
    with pytest.raises(RuntimeError, match="second time"):
        value.backward()


def test_create_graph_is_refused() -> None:
    model = streamed(made())
    with pytest.raises(mt.MegatrainError, match="create_graph"):
        lm_loss(model, batch(0)).backward(create_graph=True)


def test_autograd_grad_gives_tensors() -> None:
    plain, model = made(), streamed(made())
    found = [torch.autograd.grad(lm_loss(m, batch(0)), [m.head.weight, m.norm.weight]) for m in (plain, model)]
    grads_agree(dict(enumerate(found[0])), dict(enumerate(found[1])))


def test_hooks_on_the_heads_weight_run() -> None:
    plain, model = made(), streamed(made())
    seen: list[Tensor] = []
    for m in (plain, model):
        m.head.weight.register_hook(lambda g: seen.append(g.clone()))
        lm_loss(m, batch(0)).backward()
    grads_agree({"hook": seen[0]}, {"hook": seen[1]})
    grads_agree(gradients(plain), gradients(model))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_around_the_model(reentrant: bool) -> None:
    from torch.utils.checkpoint import checkpoint

    def loss(model: nn.Module, ids: Tensor) -> Tensor:
        x = model.embed(ids)
        return checkpoint(lambda h: F.cross_entropy(model.head(model.norm(model.body(h))).view(-1, V), ids.view(-1)), x,
                          use_reentrant=reentrant)

    compare(made, loss, batch, steps=2)


def test_backward_outside_of_the_forwards_autocast_and_inside_another() -> None:
    """The fused loss and the gradient of made logits ignore an autocast that was not there for the head."""
    def loss(model: nn.Module, ids: Tensor) -> Tensor:
        x = model(ids)
        with torch.autocast("cpu", torch.bfloat16):
            return F.cross_entropy(x.view(-1, V), ids.view(-1)) + x.float().logsumexp(-1).mean()

    compare(made, loss, batch, steps=1)


# ---------------------------------------------------------------- what is trained

@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("frozen", ["head", "body"])
def test_frozen_parts(frozen: str, tied: bool) -> None:
    def build() -> nn.Module:
        model = llama(tie_word_embeddings=tied)
        for p in model.parameters():
            p.requires_grad_((p is model.lm_head.weight) == (frozen == "body"))
        return model

    model = compare(build, lambda m, inputs: m(**inputs).loss)
    assert head_code(model) == FUSED


def test_a_frozen_head_makes_no_gradient_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    inner = head.linear_cross_entropy
    monkeypatch.setattr(head, "linear_cross_entropy",
                        lambda *a, wanted, **kw: asked.append(wanted) or inner(*a, wanted=wanted, **kw))
    model = streamed(made())
    model.head.weight.requires_grad_(False)
    lm_loss(model, batch(0)).backward()
    model.head.weight.requires_grad_(True)
    lm_loss(model, batch(0)).backward()
    assert asked == [(True, False, False), (True, True, False)]


@pytest.mark.parametrize("targets", [["q_proj", "v_proj"], ["q_proj", "lm_head"]])
def test_lora(targets: list[str]) -> None:
    peft = pytest.importorskip("peft")

    def build() -> nn.Module:
        torch.manual_seed(3)
        return peft.get_peft_model(llama(), peft.LoraConfig(r=4, target_modules=targets, init_lora_weights="gaussian"))

    model = compare(build, lambda m, inputs: m(**inputs).loss)
    if "lm_head" in targets:
        assert head_code(model) == "its own (the head is a Linear, no plain nn.Linear)"
    else:
        assert head_code(model) == FUSED


# ---------------------------------------------------------------- calls that are not deferred

def test_evaluation_and_no_grad_give_ordinary_logits() -> None:
    model = streamed(llama())
    outputs(model)
    with torch.no_grad():
        assert type(outputs(model).logits) is Tensor
    assert head_code(model) == FUSED, "a call without gradients tells nothing"
    model.eval()
    assert type(outputs(model).logits) is head.DeferredLogits, "gradients are wanted, whatever the flag"
    assert head_code(model) == FUSED


def test_autocast_gives_ordinary_logits() -> None:
    model = streamed(llama())
    with torch.autocast("cpu", torch.bfloat16):
        assert type(outputs(model).logits) is Tensor
    assert head_code(model) == "its own (autocast is on)"


@pytest.mark.parametrize("kind", ["forward", "forward_pre", "full_backward", "global"])
def test_hooks_on_the_head_give_ordinary_logits(kind: str) -> None:
    model = streamed(llama())
    if kind == "global":
        handle = nn.modules.module.register_module_forward_hook(lambda *a: None)
    else:
        handle = getattr(model.lm_head, f"register_{kind}_hook")(lambda *a: None)
    try:
        out = outputs(model)
        assert type(out.logits) is Tensor and head_code(model) == "its own (there are hooks on it)"
        out.loss.backward()
    finally:
        handle.remove()
    assert is_deferred(outputs(model).logits)


def test_inputs_of_other_kinds_give_ordinary_logits() -> None:
    head = Head()
    lone = head.model.head(torch.randn(H, requires_grad=True))
    assert type(lone) is Tensor and "no [..., H] tensor" in head_code(head.model)
    assert head.model.head(torch.randn(0, H, requires_grad=True)).shape == (0, V)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_weights_of_other_types_give_ordinary_logits(dtype: torch.dtype) -> None:
    model = streamed(made().to(dtype))
    assert type(model.head(torch.randn(2, H, dtype=dtype, requires_grad=True))) is Tensor
    assert head_code(model) == f"its own (the head's weights are {dtype}; bf16 and fp32 are fused)"


@pytest.mark.parametrize("compute", ["eager", "auto"])
def test_nothing_is_deferred_unless_asked(compute: str) -> None:
    """"auto" means fused on CUDA for 16-bit weights alone."""
    model = streamed(llama(), compute=compute)
    assert type(outputs(model).logits) is Tensor
    assert all(w.head is None for w in runtime_of(model).windows)


# ---------------------------------------------------------------- which module is the head

def test_a_model_without_names_has_its_widest_linear_as_head() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.places, self.embed = nn.Embedding(H, H), nn.Embedding(V, H)
            self.mix = nn.Sequential(nn.Linear(H, H), nn.Linear(H, H))
            self.classify, self.other = nn.Linear(H, V), nn.Linear(H, 3)

        def forward(self, ids: Tensor) -> Tensor:
            return self.classify(self.mix(self.embed(ids)))

    model = streamed(made(Net))
    assert [w.name for w in runtime_of(model).windows if w.head is not None] == ["classify"]
    assert is_deferred(model(batch(0)))


def test_a_head_inside_a_larger_module_gets_a_window_of_its_own() -> None:
    model = streamed(zoo.CASES["bert"].build())
    assert {"cls.predictions.decoder", "cls.predictions.transform"} <= {w.name for w in runtime_of(model).windows}


def test_a_head_inside_a_chosen_unit_stays_there() -> None:
    model = streamed(zoo.CASES["bert"].build(), units=["bert.embeddings", "bert.encoder", "cls"])
    assert "cls" in {w.name for w in runtime_of(model).windows}
    assert all(w.head is None for w in runtime_of(model).windows)
    assert type(model(**text(0)).logits) is Tensor


# ---------------------------------------------------------------- memory

class Largest(TorchDispatchMode):
    """The bytes of the largest tensor that any operation gives."""

    nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and not is_deferred(out) and out.device.type != "meta":
            self.nbytes = max(self.nbytes, out.nbytes)
        return out


def test_logits_never_exist_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """With chunks of 16 of 384 tokens nothing is as large as the logits."""
    for name, value in (("CHUNK_BYTES", 1), ("LEAST_TOKENS", 16)):
        monkeypatch.setattr(loss_module, name, value)
    model = streamed(made())
    ids = torch.randint(0, V, (16, 24))
    with Largest() as seen:
        lm_loss(model, ids).backward()
    assert seen.nbytes < 4 * ids.numel() * V
    with Largest() as seen:
        model(ids).exp().sum().backward()
    assert seen.nbytes >= 4 * ids.numel() * V, "the look itself is blind"


@pytest.mark.parametrize("cap", [None, 0.4])
def test_a_mean_of_logits_needs_no_more_memory_than_their_loss(cap: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """In 16 bits: no copies in fp32."""
    seen = Largest()
    monkeypatch.setattr(head, "chunk_tokens", lambda *_: 128)
    monkeypatch.setattr(head, "_exactly", lambda _: seen)            # around what is made of hidden states
    ids, means = torch.randint(0, V, (16, 24)), []
    for model in (made().bfloat16().float(), streamed(made().bfloat16())):
        x = model(ids)
        if deferred := is_deferred(x):
            x._logits.brief = True
        x = x[:, :-1].float() * 2 if cap is None else torch.tanh(x[:, :-1] / cap) * cap
        means.append(float(x.detach().mean()))
    assert deferred and seen.nbytes == 128 * V * 2
    assert means[0] == pytest.approx(means[1], abs=1e-3)


def test_the_head_is_fetched_for_the_loss_alone() -> None:
    """Its gradients are made with the loss: backward needs no weights of it."""
    model = streamed(made())
    head = model.head
    rt = runtime_of(model)
    unit = rt.windows[-1].units[0]
    assert rt.windows[-1].inner.__self__ is head
    acquired = []
    inner = rt.ring.parameters
    rt.ring.parameters = lambda u: acquired.append(u) or inner(u)
    out = model(batch(0))
    assert unit not in acquired
    value = F.cross_entropy(out.view(-1, V), batch(0).view(-1))
    assert acquired.count(unit) == 1
    value.backward()
    assert acquired.count(unit) == 1


# ---------------------------------------------------------------- the ecosystem

def test_trainer_with_micro_batches(tmp_path: Any) -> None:
    """Stock HF Trainer: num_items_in_batch, clipping, a scheduler."""
    from run_dropin import logged, trainer
    seen = []
    for build in (llama, lambda: streamed(llama())):
        model = build()
        t = trainer(model, tmp_path, max_steps=4)
        t.train()
        seen.append(logged(t))
    assert head_code(model) == FUSED
    for a, b in zip(*seen, strict=True):
        assert a == pytest.approx(b, rel=1e-3)      # logged with four digits


def test_a_compiled_loss() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda x, ids: F.cross_entropy(x.float().view(-1, V), ids.view(-1)) * 2, backend="eager")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        model = compare(made, lambda m, ids: compiled(m(ids), ids), batch, steps=2)
    assert head_code(model) == FUSED
    assert not [w for w in said if "deferred" in str(w.message) or "wrapper_subclass" in str(w.message)]
    torch._dynamo.reset()


def test_a_compiled_model() -> None:
    torch._dynamo.reset()
    plain = train(made(), lm_loss, batch)
    model = streamed(made())
    compiled = torch.compile(model, backend="eager")
    assert_runs(plain, train(model, lambda _, ids: lm_loss(compiled, ids), batch))
    assert head_code(model) == FUSED
    torch._dynamo.reset()
