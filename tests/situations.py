"""What people do with a model besides calling it once: scripts for parity.py.

Every script runs twice, on a plain model and on a streamed one, and everything it notes must agree
bit for bit. Its own claims go through `t.expect`, refusals through `t.refuses`.
"""
from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import io
import pickle
import random
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from parity import IDENTITY, Trial
from torch import Tensor, nn
from zoo import DECODER, Chain, H, V, generator, tokens

SITUATIONS: dict[str, Callable[[Trial], None]] = {}
CPU_ONLY: set[str] = set()


def situation(script: Callable[[Trial], None]) -> Callable[[Trial], None]:
    assert script.__name__ not in SITUATIONS, script.__name__
    SITUATIONS[script.__name__] = script
    return script


def built(**options: Any) -> Callable[[Callable[[], nn.Module]], Callable[[], nn.Module]]:
    """A situation that is all in the model, which the function builds: it is trained as usual."""
    data, loss = (rows, square) if options.pop("of_rows", False) else (batch, lm_loss)

    def put(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
        SITUATIONS[build.__name__] = lambda t: t.train(t.stream(made(build)), data, loss, **options)
        return build

    return put


def passes(build: Callable[[], nn.Module] | None = None, **config: Any) -> Callable[[Callable[..., Tensor]], Any]:
    """A situation that is all in the loss, which the function gives for a model: a llama where none is said."""
    def put(loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
        SITUATIONS[loss.__name__] = lambda t: t.train(
            t.stream(made(build) if build else llama(**config)), batch if build else text, functools.partial(loss, t))
        return loss

    return put


def between(build: Callable[[], nn.Module] | None = None, **options: Any) -> Callable[[Callable[..., None]], Any]:
    """A situation that is all in what the function does after each step."""
    def put(change: Callable[..., None]) -> Callable[..., None]:
        def script(t: Trial) -> None:
            model = t.stream(made(build) if build else llama())
            t.train(model, *((batch, lm_loss) if build else (text, hf_loss)), **options,
                    between=functools.partial(change, t, model))

        SITUATIONS[change.__name__] = script
        return change

    return put


def cpu_only(script: Callable[[Trial], None]) -> Callable[[Trial], None]:
    """The script mixes devices in ways that only make sense where there is one."""
    CPU_ONLY.add(script.__name__)
    return script


# ---------------------------------------------------------------- the model most scripts use

class Block(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(H), nn.LayerNorm(H)
        self.qkv, self.out = nn.Linear(H, 3 * H), nn.Linear(H, H)
        self.up, self.down = nn.Linear(H, 2 * H), nn.Linear(2 * H, H)
        self.drop = nn.Dropout(dropout)

    def attend(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, 4, H // 4).permute(2, 0, 3, 1, 4)
        scores = (q @ k.transpose(-1, -2)) * (H // 4) ** -0.5
        mask = torch.ones(t, t, dtype=torch.bool, device=x.device).tril()
        return self.out((scores.masked_fill(~mask, -1e9).softmax(-1) @ v).transpose(1, 2).reshape(b, t, H))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.attend(self.norm1(x)))
        return x + self.drop(self.down(F.gelu(self.up(self.norm2(x)))))


class Tiny(nn.Module):
    """Embedding, layers, norm, head; `order` says how forward walks through the layers."""

    def __init__(self, layers: list[nn.Module] | None = None, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(V, H)
        self.layers = nn.ModuleList(layers if layers is not None else [Block(dropout) for _ in range(4)])
        self.norm = nn.LayerNorm(H)
        self.head = nn.Linear(H, V, bias=False)

    def order(self) -> list[int]:
        return list(range(len(self.layers)))

    def body(self, x: Tensor) -> Tensor:
        for i in self.order():
            x = self.layers[i](x)
        return x

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.norm(self.body(self.embed(ids))))


def made(make: Callable[[], nn.Module] = Tiny) -> nn.Module:
    torch.manual_seed(7)
    return make().train()


def batch(step: int) -> Tensor:
    return tokens(generator(step))


def lm_loss(model: nn.Module, ids: Tensor) -> Tensor:
    return F.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def rows(step: int) -> Tensor:
    return torch.randn(6, H, generator=generator(step))


def square(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def llama(**config: Any) -> nn.Module:
    import transformers as tf
    return made(lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**{**DECODER, **config})))


def text(step: int) -> dict[str, Tensor]:
    ids = batch(step)
    return {"input_ids": ids, "labels": ids}


def hf_loss(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    return model(**inputs).loss


def gathered(t: Trial, module: nn.Module) -> contextlib.AbstractContextManager[Any]:
    """The module's weights on the compute device, outside any forward."""
    if not t.streamed or IDENTITY:
        return contextlib.nullcontext()
    import megatrain_torch as mt
    return mt.gather(module)


def ordinary(t: Trial, step: int, model: nn.Module, opt: torch.optim.Optimizer,
             loss: Callable[[nn.Module, Any], Tensor] = lm_loss, data: Callable[[int], Any] = batch) -> None:
    """One step of the loop, for scripts that do something else between steps."""
    value = loss(model, t.batch(data(step)))
    value.backward()
    t.note(f"step {step}, loss", value)
    t.note_grads(f"step {step}", model)
    opt.step()
    opt.zero_grad()


@contextlib.contextmanager
def amid_steps(t: Trial, model: nn.Module) -> Iterator[torch.optim.Optimizer]:
    """A step before what is done here, and two behind it."""
    opt = t.default_optimizer(model)
    ordinary(t, 0, model, opt)
    yield opt
    opt.zero_grad()
    for step in (2, 3):
        ordinary(t, step, model, opt)
    t.note_state("at the end", model)


# ---------------------------------------------------------------- the loop itself

@situation
def plain_transformer(t: Trial) -> None:
    t.train(t.stream(made()), batch, lm_loss)


@built(of_rows=True)
def sequential() -> nn.Module:
    return nn.Sequential(nn.Linear(H, H), nn.Tanh(), nn.Linear(H, H), nn.ReLU(), nn.Linear(H, 4))


@built(of_rows=True)
def single_linear() -> nn.Module:
    return nn.Linear(H, 4)


@built(of_rows=True)
def module_dict_and_parameter_lists() -> nn.Module:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleDict({"a": nn.Linear(H, H), "b": nn.Linear(H, H)})
            self.mixers = nn.ParameterList([nn.Parameter(torch.randn(H, H) / 6) for _ in range(3)])
            self.scales = nn.ParameterDict({"in": nn.Parameter(torch.ones(H)), "out": nn.Parameter(torch.ones(()))})

        def forward(self, x: Tensor) -> Tensor:
            x = self.parts["a"](x * self.scales["in"])
            for m in self.mixers:
                x = torch.tanh(x @ m)
            return self.parts["b"](x) * self.scales["out"]

    return Net()


@built()
def dropout() -> nn.Module:
    return Tiny(dropout=0.2)


@passes(Tiny)
def autocast_bf16(t: Trial, model: nn.Module, ids: Tensor) -> Tensor:
    with torch.autocast(t.device, torch.bfloat16):
        return lm_loss(model, ids)


@situation
def autocast_inside_the_model(t: Trial) -> None:
    class Half(Block):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast(t.device, torch.bfloat16):
                x = super().forward(x)
            with torch.autocast(t.device, enabled=False):
                return self.norm1(x.float())

    t.train(t.stream(made(lambda: Tiny([Half() for _ in range(3)]))), batch, lm_loss)


@situation
def bf16_model_with_fp32_router(t: Trial) -> None:
    class Moe(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router = nn.Linear(H, 3)
            self.experts = nn.ModuleList(nn.Linear(H, H, dtype=torch.bfloat16) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            weights = self.router(x.float()).softmax(-1)
            return x + (torch.stack([e(x) for e in self.experts], -1) * weights.unsqueeze(-2).to(x.dtype)).sum(-1)

    def build() -> nn.Module:
        model = Tiny([Moe() for _ in range(3)])
        for part in (model.embed, model.norm, model.head):
            part.to(torch.bfloat16)
        return model

    # One micro-batch a step: of several, 16-bit gradients are summed in fp32, better than torch (test_api.py).
    # Eager: on CUDA the fused head sums a mean loss in another order than torch, which a last bit may show.
    model = t.stream(made(build), compute="eager")
    opt = t.default_optimizer(model)
    for step in range(3):
        ordinary(t, step, model, opt, lambda m, x: lm_loss(lambda i: m(i).float(), x))
    t.note_state("at the end", model)


@situation
def zero_grad_keeps_tensors(t: Trial) -> None:
    model = t.stream(made())
    opt = t.default_optimizer(model)
    for step in range(3):
        lm_loss(model, t.batch(batch(step))).backward()
        t.note_grads(f"step {step}", model)
        opt.step()
        opt.zero_grad(set_to_none=False)
        t.note_grads(f"step {step}, zeroed", model)
    model.zero_grad()
    t.note_grads("after model.zero_grad()", model)
    t.note_state("at the end", model)


@situation
def gradients_left_to_grow(t: Trial) -> None:
    """No zero_grad at all: every backward adds to what is there, also after a step."""
    model = t.stream(made())
    opt = t.default_optimizer(model)
    for step in range(3):
        lm_loss(model, t.batch(batch(step))).backward()
        t.note_grads(f"step {step}", model)
        opt.step()
    t.note_state("at the end", model)


# ---------------------------------------------------------------- ties, frozen weights, weights read elsewhere

@built()
def tie_inside_a_unit() -> nn.Module:
    model = Tiny()
    for layer in model.layers:
        layer.extra = nn.Linear(H, H)
        layer.extra.weight = layer.out.weight
        layer.drop = layer.extra
    return model


@built()
def tie_between_layers() -> nn.Module:
    model = Tiny()
    model.layers[2].up.weight = model.layers[0].up.weight
    model.layers[3].norm1 = model.layers[1].norm1
    return model


@situation
def tie_of_head_and_embedding(t: Trial) -> None:
    def build() -> nn.Module:
        model = Tiny()
        model.head.weight = model.embed.weight
        return model

    model = t.stream(made(build))
    t.expect(model.head.weight is model.embed.weight, "the tie is gone")
    t.train(model, batch, lm_loss)


@built()
def one_layer_object_listed_three_times() -> nn.Module:
    shared = Block()
    return Tiny([shared, Block(), shared, Block(), shared])


@situation
def frozen_parameters(t: Trial) -> None:
    model = made()
    for name, p in model.named_parameters():
        p.requires_grad_("norm" in name or "up" in name)
    t.train(t.stream(model), batch, lm_loss)


@situation
def frozen_units(t: Trial) -> None:
    model = made()
    for part in (model.embed, model.layers[0], model.layers[2], model.head):
        part.requires_grad_(False)
    t.train(t.stream(model), batch, lm_loss)


@situation
def all_but_one_bias_frozen(t: Trial) -> None:
    model = made()
    model.requires_grad_(False)
    model.layers[1].up.bias.requires_grad_(True)
    t.train(t.stream(model), batch, lm_loss)


@situation
def thawing_between_steps(t: Trial) -> None:
    model = t.stream(made())
    opt = t.optimizer(torch.optim.SGD, model.parameters(), lr=0.1)
    model.layers[:3].requires_grad_(False)
    for step in range(4):
        ordinary(t, step, model, opt)
        model.layers[2 - step % 3].requires_grad_(True)
        model.layers[3].requires_grad_(step % 2 == 1)
    t.note_state("at the end", model)


@situation
def frozen_between_forward_and_backward(t: Trial) -> None:
    """Thawed in time, after a pass that records nothing or one that does; or not: then torch gives it no gradient."""
    model = t.stream(made())
    opt = t.optimizer(torch.optim.SGD, model.parameters(), lr=0.1)
    part = model.layers[1]
    for step in range(4):
        value = lm_loss(model, t.batch(batch(step)))
        part.requires_grad_(False)
        with torch.set_grad_enabled(step == 1):
            other = lm_loss(model, t.batch(batch(step + 4)))
        if step == 1:
            other.backward()
        if step < 3:
            part.requires_grad_(True)
        value.backward()
        t.note(f"step {step}, losses", (value, other))
        t.note_grads(f"step {step}", model)
        opt.step()
        opt.zero_grad()
    t.note_state("at the end", model)


@situation
def everything_frozen_but_the_input(t: Trial) -> None:
    model = made(lambda: Block()).requires_grad_(False)
    model = t.stream(model)
    x = t.batch(torch.randn(2, 5, H, generator=generator(0))).requires_grad_(True)
    for step in range(3):
        model(x).square().sum().backward()
        t.note(f"step {step}, input gradient", x.grad)
    t.expect(all(p.grad is None for p in model.parameters()), "a frozen parameter has a gradient")


@situation
def unused_parameters_have_no_gradient(t: Trial) -> None:
    def build() -> nn.Module:
        model = Tiny()
        model.layers[1].unused = nn.Linear(H, H)
        model.spare = nn.Linear(3, 3)
        return model

    model = t.stream(made(build))
    t.train(model, batch, lm_loss)
    lm_loss(model, t.batch(batch(9))).backward()
    t.expect(model.spare.weight.grad is None and model.layers[1].unused.bias.grad is None,
             "an unused parameter has a gradient")


@built()
def embedding_weight_used_as_head() -> nn.Module:
    class Net(Tiny):
        def forward(self, ids: Tensor) -> Tensor:
            x = self.norm(self.body(self.embed(ids)))
            return F.linear(x, self.embed.weight) + 0.1 * self.head(x)

    return Net()


@built()
def bare_scale_of_the_root() -> nn.Module:
    class Net(Tiny):
        def __init__(self) -> None:
            super().__init__()
            self.logit_scale = nn.Parameter(torch.tensor(0.3))
            self.positions = nn.Parameter(torch.randn(64, H) / 10)

        def forward(self, ids: Tensor) -> Tensor:
            x = self.embed(ids) + self.positions[: ids.shape[1]]
            return self.head(self.norm(self.body(x))) * self.logit_scale.exp()

    return Net()


@built()
def penalty_on_weights_inside_forward() -> nn.Module:
    """The root reads weights of layers whose windows are closed."""
    class Net(Tiny):
        def forward(self, ids: Tensor) -> Tensor:
            penalty = sum(layer.up.weight.square().sum() for layer in self.layers)
            return super().forward(ids) * (1 + 1e-3 * penalty) + self.layers[0].down.weight.mean()

    return Net()


@built()
def layer_reads_a_weight_of_another() -> nn.Module:
    class Reader(Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + F.linear(x, self.friend[0].out.weight)

    layers = [Reader() for _ in range(4)]
    for i, layer in enumerate(layers):
        layer.friend = [layers[(i + 1) % 4]]        # in a list: not a child
    return Tiny(layers)


@situation
def penalty_on_weights_outside_forward(t: Trial) -> None:
    """Arithmetic on host parameters: its gradient joins the one that comes from the device."""
    model = t.stream(made())

    def loss(model: nn.Module, ids: Tensor) -> Tensor:
        value = lm_loss(model, ids)
        return value + (1e-3 * model.layers[1].up.weight.square().sum()).to(value.device)

    if t.device == "cpu":
        t.train(model, batch, loss)


@situation
def head_applied_outside_forward_with_gather(t: Trial) -> None:
    class Net(Tiny):
        def forward(self, ids: Tensor) -> Tensor:
            return self.norm(self.body(self.embed(ids)))

    model = t.stream(made(Net))

    def loss(model: nn.Module, ids: Tensor) -> Tensor:
        hidden = model(ids)
        with gathered(t, model.head):
            logits = F.linear(hidden, model.head.weight)
        return F.cross_entropy(logits.flatten(0, 1), ids.flatten())

    t.train(model, batch, loss)


@built()
def weights_read_for_their_metadata_only() -> nn.Module:
    class Asker(Block):
        def forward(self, x: Tensor) -> Tensor:
            w = self.up.weight
            assert w.dtype == torch.float32 and w.shape == (2 * H, H) and w.device == x.device
            return super().forward(x.to(self.down.weight.dtype))

    class Net(Tiny):
        def forward(self, ids: Tensor) -> Tensor:
            assert self.layers[-1].up.weight.dtype == torch.float32 and self.head.weight.shape[0] == V
            return super().forward(ids.to(self.head.weight.device))

    return Net([Asker() for _ in range(3)])


# ---------------------------------------------------------------- order of units

@built()
def each_layer_called_twice() -> nn.Module:
    class Net(Tiny):
        def order(self) -> list[int]:
            return [0, 1, 2, 3, 3, 2, 1, 0]

    return Net()


@built(steps=6)
def layers_skipped_at_random() -> nn.Module:
    class Net(Tiny):
        def order(self) -> list[int]:
            return [i for i in range(4) if random.random() < 0.6]

    return Net()


@built(steps=5)
def another_order_in_every_step() -> nn.Module:
    class Net(Tiny):
        def order(self) -> list[int]:
            return random.sample(range(4), k=4)

    return Net()


@built()
def layer_that_calls_the_next_layer() -> nn.Module:
    class Nest(Block):
        def forward(self, x: Tensor) -> Tensor:
            if self.inner:
                x = x + 0.5 * self.inner[0](x.tanh())
            return super().forward(x)

    layers = [Nest() for _ in range(3)]
    for i, layer in enumerate(layers):
        layer.inner = layers[i + 1: i + 2]
    return Tiny(layers)


@built()
def root_that_calls_itself() -> nn.Module:
    class Net(Tiny):
        def forward(self, ids: Tensor, depth: int = 1) -> Tensor:
            if depth == 0:
                return super().forward(ids)
            return super().forward(ids) + 0.5 * self(ids.flip(1), depth=depth - 1)

    return Net()


@passes(Tiny)
def layer_called_by_the_user(t: Trial, model: nn.Module, ids: Tensor) -> Tensor:
    """A part of the model called on its own, outside the root's forward."""
    return F.cross_entropy(model.head(model.layers[2](model.layers[1](model.embed(ids)))).flatten(0, 1), ids.flatten())


@situation
def two_forwards_before_two_backwards(t: Trial) -> None:
    model = t.stream(made(lambda: Tiny(dropout=0.1)))
    for step in t.steps(model):
        first, second = (lm_loss(model, t.batch(batch(2 * step + i))) for i in range(2))
        for i, value in enumerate((first, second) if step % 2 else (second, first)):
            value.backward()
            t.note(f"step {step}, loss {i}", value)
            t.note_grads(f"step {step}, backward {i}", model)


@situation
def one_loss_of_two_calls(t: Trial) -> None:
    """Siamese: three calls' gradients meet in one backward, twice, before the optimizer's step."""
    model = t.stream(made())
    for step in t.steps(model):
        for micro in range(2):
            x = t.batch(batch(2 * step + micro))
            (lm_loss(model, x) + (model(x) - model(x.flip(0))).square().mean()).backward()
            t.note_grads(f"step {step}, micro-batch {micro}", model)


@situation
def forward_that_nobody_differentiates(t: Trial) -> None:
    model = t.stream(made())
    kept = []

    def loss(model: nn.Module, ids: Tensor) -> Tensor:
        kept.append(model(ids.flip(0)))     # a graph that stays alive and is never used
        model(ids.flip(1))                  # one that dies at once
        return lm_loss(model, ids)

    t.train(model, batch, loss)


@situation
def backward_through_a_part(t: Trial) -> None:
    """Gradient flows into the last two layers only, then into the first two only."""
    class Net(Tiny):
        def forward(self, ids: Tensor) -> Tensor:
            x = self.layers[1](self.layers[0](self.embed(ids)))
            y = self.layers[3](self.layers[2](x.detach()))
            return self.head(self.norm(x if self.early else y))

    def loss(model: nn.Module, ids: Tensor) -> Tensor:
        model.early = not getattr(model, "early", False)
        return lm_loss(model, ids)

    t.train(t.stream(made(Net)), batch, loss, steps=4)


@situation
def teacher_and_student(t: Trial) -> None:
    teacher = t.stream(made().eval())
    torch.manual_seed(8)
    student = t.stream(Tiny())

    def loss(model: nn.Module, ids: Tensor) -> Tensor:
        with torch.no_grad():
            target = teacher(ids).softmax(-1)
        return F.cross_entropy(model(ids).flatten(0, 1), target.flatten(0, 1))

    t.train(student, batch, loss)


@situation
def forward_and_backward_in_another_thread(t: Trial) -> None:
    model = t.stream(made())

    def work() -> None:
        t.train(model, batch, lm_loss)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    t.expect(len(t.notes) > 0, "the thread died")
    t.train(model, batch, lm_loss, steps=1)


# ---------------------------------------------------------------- arguments and results

@dataclasses.dataclass
class Pack:
    hidden: Tensor
    aux: dict[str, Any]


@situation
def nested_arguments_and_results(t: Trial) -> None:
    class Layer(Block):
        def forward(self, pack: Pack, *, bias: tuple[Any, ...] = (), mode: str = "") -> tuple[Pack, Tensor]:
            x = super().forward(pack.hidden) + bias[0]["b"][0]
            assert mode == "train" and bias[1] is None
            seen = {**pack.aux, "norms": pack.aux["norms"] + [x.norm()]}
            return Pack(x, seen), self.norm2(x).mean()

    class Net(Tiny):
        def forward(self, ids: Tensor) -> dict[str, Any]:
            pack, extra = Pack(self.embed(ids), {"norms": []}), []
            bias = ({"b": [pack.hidden.mean()]}, None)
            for layer in self.layers:
                pack, e = layer(pack, bias=bias, mode="train")
                extra.append(e)
            return {"logits": self.head(pack.hidden), "norms": pack.aux["norms"], "extra": extra}

    def loss(model: nn.Module, ids: Tensor) -> Tensor:
        out = model(ids)
        return (F.cross_entropy(out["logits"].flatten(0, 1), ids.flatten())
                + 1e-2 * sum(out["norms"]) + sum(out["extra"]))

    t.train(t.stream(made(lambda: Net([Layer() for _ in range(3)]))), batch, loss)


@situation
def tensor_that_escapes_through_an_attribute(t: Trial) -> None:
    class Router(Block):
        def forward(self, x: Tensor) -> Tensor:
            self.seen = self.up(x).logsumexp(-1)
            return super().forward(x)

    def loss(model: nn.Module, ids: Tensor) -> Tensor:
        return lm_loss(model, ids) + 1e-2 * sum(layer.seen.square().mean() for layer in model.layers)

    t.train(t.stream(made(lambda: Tiny([Router() for _ in range(3)]))), batch, loss)


@situation
def tensor_captured_by_a_hook_inside_a_layer(t: Trial) -> None:
    model = t.stream(made())
    seen: list[Tensor] = []
    for layer in model.layers:
        layer.up.register_forward_hook(lambda m, a, out: seen.append(out))

    def loss(model: nn.Module, ids: Tensor) -> Tensor:
        seen.clear()
        return lm_loss(model, ids) + 1e-2 * sum(s.square().mean() for s in list(seen)[:4])

    t.train(model, batch, loss)


@passes()
def model_output_with_hidden_states(t: Trial, model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    out = model(**inputs, output_hidden_states=True)
    return out.loss + 1e-2 * sum(h.square().mean() for h in out.hidden_states) + out[1].mean()


@passes(attn_implementation="eager")
def attention_maps_in_the_loss(t: Trial, model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    out = model(**inputs, output_attentions=True)
    return out.loss + sum(a.square().sum() for a in out.attentions)


@passes()
def cache_asked_for_in_training(t: Trial, model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    return model(**inputs, use_cache=True).loss


@passes()
def gradient_through_a_cache(t: Trial, model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    """The second half attends to keys and values of the first, and both are trained."""
    ids = inputs["input_ids"]
    first = model(input_ids=ids[:, :6], use_cache=True)
    second = model(input_ids=ids[:, 6:], past_key_values=first.past_key_values, use_cache=True)
    return F.cross_entropy(torch.cat([first.logits, second.logits], 1).flatten(0, 1), ids.flatten())


@built()
def list_that_layers_append_to() -> nn.Module:
    """A container among the arguments is changed in place by every layer."""
    class Collects(Block):
        def forward(self, x: Tensor, past: list[Tensor]) -> Tensor:
            past.append(self.norm1(x).mean(1, keepdim=True))
            return super().forward(x + sum(past))

    class Net(Tiny):
        def body(self, x: Tensor) -> Tensor:
            past: list[Tensor] = []
            for layer in self.layers:
                x = layer(x, past)
            assert len(past) == len(self.layers)
            return x + past[0]

    return Net([Collects() for _ in range(3)])


@passes()
def inputs_with_gradients(t: Trial, model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    x = model.get_input_embeddings()(inputs["input_ids"]).detach().requires_grad_(True)
    out = model(inputs_embeds=x, labels=inputs["labels"]).loss
    grad, = torch.autograd.grad(out, x, retain_graph=True)
    t.note("gradient of the input", grad)
    x.register_hook(lambda g: t.note("gradient seen by a hook on the input", g))
    return out


@situation
def hidden_state_with_retain_grad(t: Trial) -> None:
    class Net(Tiny):
        def body(self, x: Tensor) -> Tensor:
            self.middle = self.layers[1](self.layers[0](x))
            self.middle.retain_grad()
            return self.layers[3](self.layers[2](self.middle))

    model = t.stream(made(Net))
    opt = t.default_optimizer(model)
    for step in range(3):
        ordinary(t, step, model, opt)
        t.note(f"step {step}, gradient of the middle", model.middle.grad)


@built()
def output_that_aliases_a_weight() -> nn.Module:
    class Shows(Block):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            return super().forward(x), self.up.weight, self.down.weight.t()[:3]

    class Net(Tiny):
        def forward(self, ids: Tensor) -> Tensor:
            x, kept = self.embed(ids), []
            for layer in self.layers:
                x, *weights = layer(x)
                kept += weights
            return self.head(self.norm(x)) + 1e-2 * sum(w.square().mean() for w in kept)

    return Net([Shows() for _ in range(4)])


@built()
def unit_that_returns_its_input() -> nn.Module:
    class Passes(Block):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x, super().forward(x)

    class Net(Tiny):
        def body(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                same, y = layer(x)
                assert same.shape == x.shape
                x = y + 0.1 * same
            return x

    return Net([Passes() for _ in range(3)])


@built()
def unit_that_writes_into_its_input() -> nn.Module:
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(H, H), nn.Linear(H, H)

        def forward(self, x: Tensor) -> Tensor:
            x.mul_(0.5).add_(0.1)           # what a replay would be given is already changed
            return x + self.b(torch.sigmoid(self.a(x)))

    class Net(Tiny):
        def body(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x * 1.0)
            return x

    return Net([InPlace() for _ in range(3)])


@built()
def container_that_writes_into_a_units_output() -> nn.Module:
    class Net(Tiny):
        def body(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
                x += 0.1                # += on the output of a unit, input of the next
                x.mul_(1.01)
            return x

    return Net()


@situation
def saved_input_overwritten_is_still_noticed(t: Trial) -> None:
    """torch refuses backward when a saved tensor was changed in place; streaming must, too."""
    class Net(Tiny):
        def body(self, x: Tensor) -> Tensor:
            x = self.layers[0](x)
            y = self.layers[1](x)
            if self.spoil:
                x.mul_(2.0)             # layers[1] saved x
            return y

    Net.spoil = False
    model = t.stream(made(Net))
    with amid_steps(t, model):
        model.spoil = True
        fails(t, lm_loss(model, t.batch(batch(1))).backward, "backward over an overwritten tensor")
        model.spoil = False


def fails(t: Trial, action: Callable[[], Any], what: str, kind: type[BaseException] = RuntimeError) -> None:
    """Both runs must raise."""
    try:
        action()
    except kind:
        return
    t.faults.append(f"not raised: {what}")


# ---------------------------------------------------------------- autograd

@situation
def losses_with_retain_graph(t: Trial) -> None:
    model = t.stream(made(lambda: Tiny(dropout=0.1)))
    for step in t.steps(model):
        ids = t.batch(batch(step))
        out = model(ids)
        losses = [F.cross_entropy(out.flatten(0, 1), ids.flatten()), out.square().mean(), out[0].mean()]
        for i, value in enumerate(losses):
            value.backward(retain_graph=i < 2)
            t.note_grads(f"step {step}, loss {i}", model)


@situation
def autograd_grad_of_parameters(t: Trial) -> None:
    model = t.stream(made())
    for step in range(3):
        value = lm_loss(model, t.batch(batch(step)))
        wanted = [p for i, p in enumerate(model.parameters()) if step != 1 or i % 3 == 0]
        t.note(f"step {step}", list(torch.autograd.grad(value, wanted, retain_graph=step == 2)))
        t.expect(all(p.grad is None for p in model.parameters()), "autograd.grad wrote into .grad")
        if step == 2:
            value.backward()
            t.note_grads("backward after autograd.grad", model)


@situation
def autograd_grad_with_unused(t: Trial) -> None:
    model = t.stream(made())
    x = model.layers[0](model.embed(t.batch(batch(0))))
    grads = torch.autograd.grad(x.sum(), list(model.parameters()), allow_unused=True)
    t.note("gradients", list(grads))
    t.expect(any(g is None for g in grads), "nothing was unused")


@situation
def backward_with_inputs(t: Trial) -> None:
    model = t.stream(made())
    for step in t.steps(model):
        value = lm_loss(model, t.batch(batch(step)))
        value.backward(inputs=[model.layers[step].up.weight, model.layers[0].qkv.bias, model.head.weight])
        t.note_grads(f"step {step}", model)


@situation
def gradient_penalty_is_refused(t: Trial) -> None:
    model = t.stream(made())
    with amid_steps(t, model):
        t.refuses(lambda: lm_loss(model, t.batch(batch(5))).backward(create_graph=True), "create_graph")
        t.refuses(lambda: torch.autograd.grad(lm_loss(model, t.batch(batch(5))), model.head.weight, create_graph=True),
                  "create_graph")


@situation
def module_hooks_on_units(t: Trial) -> None:
    model = t.stream(made())
    calls: list[str] = []

    def pre(m: nn.Module, args: Any) -> Any:
        calls.append("pre")
        return (args[0] * 1.5,)

    def post(m: nn.Module, args: Any, out: Tensor) -> Tensor:
        calls.append("post")
        return out + 0.25

    def back(m: nn.Module, gin: Any, gout: Any) -> None:
        calls.append("backward")
        t.note("gradients seen by the backward hook", [gin[0], gout[0]])

    def back_pre(m: nn.Module, gout: Any) -> Any:
        calls.append("backward pre")
        return (gout[0] * 0.5,)

    for layer in model.layers[1:3]:
        layer.register_forward_pre_hook(pre)
        layer.register_forward_hook(post)
        layer.register_full_backward_hook(back)
        layer.register_full_backward_pre_hook(back_pre)
    t.train(model, batch, lm_loss)
    t.note("calls, in order", calls)


@situation
def module_hooks_inside_units(t: Trial) -> None:
    """Hooks on a part of a unit: same values; replay may run forward hooks again, backward hooks once."""
    model = t.stream(made())
    model.layers[1].up.register_forward_pre_hook(lambda m, a: (a[0] * 1.5,))
    model.layers[1].up.register_forward_hook(lambda m, a, out: out + 0.25)
    model.layers[2].down.register_full_backward_hook(
        lambda m, gin, gout: t.note("gradients inside the unit", [gin[0], gout[0]]))
    t.train(model, batch, lm_loss)


@situation
def hooks_on_parameters(t: Trial) -> None:
    model = t.stream(made())
    p, q, r = model.layers[0].up.weight, model.layers[2].norm1.bias, model.head.weight
    p.register_hook(lambda g: g * 0.5)
    q.register_hook(lambda g: t.note("gradient of one micro-batch", g))
    r.register_post_accumulate_grad_hook(lambda w: t.note("accumulated gradient", w.grad))
    t.train(model, batch, lm_loss)


@situation
def optimizer_inside_backward(t: Trial) -> None:
    """The recipe that steps each parameter in its post-accumulate hook and drops its gradient."""
    if t.device == "cuda":
        return
    model = t.stream(made())
    opts = {p: torch.optim.SGD([p], lr=0.05, momentum=0.9) for p in model.parameters()}

    def step_now(p: Tensor) -> None:
        opts[p].step()
        opts[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step_now)
    for step in range(3):
        value = lm_loss(model, t.batch(batch(step)))
        value.backward()
        t.note(f"step {step}, loss", value)
        t.expect(all(p.grad is None for p in model.parameters()), "a gradient was left behind")
    t.note_state("at the end", model)


@built()
def custom_function_keeps_weight_on_ctx() -> nn.Module:
    class Keeps(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
            ctx.x, ctx.w = x, w             # not save_for_backward: hooks never see it
            return x @ w.t()

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
            return g @ ctx.w, g.flatten(0, -2).t() @ ctx.x.flatten(0, -2)

    class Custom(Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + Keeps.apply(x, self.out.weight)

    return Tiny([Custom() for _ in range(4)])


@built()
def custom_function_with_saved_tensors() -> nn.Module:
    class Saves(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
            y = torch.tanh(x * w)
            ctx.save_for_backward(x, w, y)
            return y

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
            x, w, y = ctx.saved_tensors
            g = g * (1 - y * y)
            return g * w, (g * x).flatten(0, -2).sum(0)

    class Custom(Block):
        def forward(self, x: Tensor) -> Tensor:
            return Saves.apply(super().forward(x), self.norm2.weight)

    return Tiny([Custom() for _ in range(3)])


@situation
def anomaly_detection(t: Trial) -> None:
    with torch.autograd.set_detect_anomaly(True):
        t.train(t.stream(made()), batch, lm_loss)


@passes(Tiny)
def saved_tensor_hooks_of_the_user(t: Trial, model: nn.Module, ids: Tensor) -> Tensor:
    with torch.autograd.graph.save_on_cpu():
        return lm_loss(model, ids)


@built()
def checkpoint_by_the_user() -> nn.Module:
    from torch.utils.checkpoint import checkpoint

    class Net(Tiny):
        def body(self, x: Tensor) -> Tensor:
            for i, layer in enumerate(self.layers):
                x = checkpoint(layer, x, use_reentrant=i % 2 == 1)
            return x

    return Net(dropout=0.1)


@built()
def checkpoint_inside_units() -> nn.Module:
    from torch.utils.checkpoint import checkpoint

    class Inner(Block):
        def forward(self, x: Tensor) -> Tensor:
            x = x + checkpoint(lambda y: self.attend(self.norm1(y)), x, use_reentrant=False)
            return x + self.drop(self.down(F.gelu(self.up(self.norm2(x)))))

    return Tiny([Inner(0.1) for _ in range(3)])


@situation
def gradient_checkpointing_enable(t: Trial) -> None:
    model = t.stream(llama(attention_dropout=0.1))
    model.gradient_checkpointing_enable()
    t.train(model, text, hf_loss)


@situation
def gradient_checkpointing_before_stream(t: Trial) -> None:
    model = llama(attention_dropout=0.1)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.enable_input_require_grads()
    t.train(t.stream(model), text, hf_loss)


@situation
def optimizer_step_between_forward_and_backward(t: Trial) -> None:
    """torch raises: the graph's weights are no more what they were. So must we."""
    model = t.stream(made())
    with amid_steps(t, model) as opt:
        first, second = (lm_loss(model, t.batch(batch(step))) for step in (4, 5))
        second.backward()
        opt.step()
        fails(t, first.backward, "backward after the optimizer changed the weights")
        del first, second


@situation
def backward_twice_is_an_error(t: Trial) -> None:
    model = t.stream(made())
    with amid_steps(t, model):
        value = lm_loss(model, t.batch(batch(0)))
        value.backward()
        t.note_grads("first", model)
        fails(t, value.backward, "second backward through a freed graph")


# ---------------------------------------------------------------- buffers, special modules

@built(of_rows=True)
def batch_norm_and_counters() -> nn.Module:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.norm = nn.Linear(H, H), nn.BatchNorm1d(H)
            self.register_buffer("calls", torch.zeros((), dtype=torch.long))
            self.register_buffer("mean", torch.zeros(H))

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)      # a new tensor
            return torch.relu(self.norm(self.fc(x))) * (1 + 0.1 * self.calls) - self.mean

    return nn.Sequential(*[Counts() for _ in range(3)])


@situation
def residual_conv_net(t: Trial) -> None:
    class Res(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.c1, self.c2 = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))
            self.b1, self.b2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)

        def forward(self, x: Tensor) -> Tensor:
            return F.relu(x + self.b2(self.c2(F.relu(self.b1(self.c1(x)), inplace=True))), inplace=True)

    def build() -> nn.Module:
        return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True),
                             nn.ModuleList([Res(8), Res(8)])[0], Res(8), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))

    def images(step: int) -> Tensor:
        return torch.randn(4, 3, 10, 10, generator=generator(step))

    model = t.stream(made(build))
    opt = t.train(model, images, square)
    model.eval()
    with torch.no_grad():
        t.note("in eval mode", model(t.batch(images(7))))
    model.train()
    t.train(model, images, square, steps=1, opt=opt, first=3)


@situation
def channels_last_convolutions(t: Trial) -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Conv2d(4, 8, 3), nn.GELU(), nn.Conv2d(8, 8, 3)).to(memory_format=torch.channels_last)

    def images(step: int) -> Tensor:
        return torch.randn(2, 4, 9, 9, generator=generator(step)).to(memory_format=torch.channels_last)

    model = t.stream(made(build))
    t.note("strides", [list(p.stride()) for p in model.parameters()])
    t.train(model, images, square)


@built()
def recurrent_networks() -> nn.Module:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(V, H)
            self.lstm = nn.LSTM(H, H, num_layers=2, batch_first=True, dropout=0.1, bidirectional=True)
            self.gru = nn.GRU(2 * H, H, batch_first=True)
            self.rnn = nn.RNN(H, H, batch_first=True)
            self.head = nn.Linear(H, V)

        def forward(self, ids: Tensor) -> Tensor:
            x, _ = self.lstm(self.embed(ids))
            x, h = self.gru(x)
            x, _ = self.rnn(x, h)
            return self.head(x)

    return Net()


@built(of_rows=True)
def recurrent_cells() -> nn.Module:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.out = nn.LSTMCell(H, H), nn.GRUCell(H, H)

        def forward(self, x: Tensor) -> Tensor:
            h = c = y = torch.zeros_like(x)
            for _ in range(4):
                h, c = self.cell(x, (h, c))
                y = self.out(h, y)
            return y

    return Net()


@built()
def lstm_beside_multihead_attention() -> nn.Module:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(H, H, batch_first=True)
            self.attn = nn.MultiheadAttention(H, 4, batch_first=True, dropout=0.1)

        def forward(self, x: Tensor) -> Tensor:
            x = x + self.lstm(x)[0]
            return x + self.attn(x, x, x, need_weights=False)[0]

    return Tiny([Layer() for _ in range(3)])


@situation
def torch_transformer_encoder(t: Trial) -> None:
    class Net(Tiny):
        def __init__(self) -> None:
            super().__init__([])
            self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(H, 4, 64, dropout=0.1, batch_first=True), 3)

        def body(self, x: Tensor) -> Tensor:
            mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device)
            return self.encoder(x, mask=mask, is_causal=True)

    model = t.stream(made(Net))
    opt = t.train(model, batch, lm_loss)
    model.eval()
    with torch.no_grad():                       # the fast path looks at requires_grad of the weights
        t.note("in eval mode", model(t.batch(batch(9))))
    model.train()
    t.train(model, batch, lm_loss, steps=1, opt=opt, first=3)


@built()
def torch_transformer() -> nn.Module:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(V, H)
            self.body = nn.Transformer(H, 4, 2, 2, 64, dropout=0.1, batch_first=True)
            self.head = nn.Linear(H, V)

        def forward(self, ids: Tensor) -> Tensor:
            x = self.embed(ids)
            return self.head(self.body(x, x.flip(1)))

    return Net()


@built(of_rows=True)
def weight_and_spectral_norm() -> nn.Module:
    from torch.nn.utils import parametrizations
    return nn.Sequential(parametrizations.weight_norm(nn.Linear(H, H)), nn.Tanh(),
                         parametrizations.spectral_norm(nn.Linear(H, H)), nn.Tanh(), nn.Linear(H, 4))


@built(of_rows=True)
def empty_and_scalar_parameters() -> nn.Module:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.empty, self.none = nn.Parameter(torch.empty(0, H)), nn.Linear(H, 0)
            self.scalar, self.body = nn.Parameter(torch.tensor(0.5)), nn.Linear(H, H)

        def forward(self, x: Tensor) -> Tensor:
            extra = self.none(x).sum() + (x @ self.empty.t()).sum()
            return self.body(torch.cat([x, self.empty])) * self.scalar + extra

    return Net()


@built(of_rows=True)
def only_an_empty_module() -> nn.Module:
    return Chain(nn.Identity(), nn.Dropout(0.0), nn.Linear(H, H))


@situation
def transposed_parameter(t: Trial) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(16, H).t())
            self.v = nn.Parameter(torch.randn(4, 5, 16).permute(2, 0, 1))

        def forward(self, x: Tensor) -> Tensor:
            return (x @ self.w) @ self.v.flatten(1)

    model = t.stream(made(Net))
    t.note("strides", [list(p.stride()) for p in model.parameters()])
    t.train(model, rows, square)


@built()
def expert_choice_without_tokens() -> nn.Module:
    """Some experts see no token, so they run on empty batches or not at all."""
    class Moe(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router = nn.Linear(H, 4)
            self.experts = nn.ModuleList(nn.Linear(H, H) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            flat = x.flatten(0, 1)
            p, choice = self.router(flat).softmax(-1).max(-1)
            out = torch.zeros_like(flat)
            for i, expert in enumerate(self.experts):
                at = (choice == i).nonzero().squeeze(-1)
                if i % 2 == 0 or len(at):
                    out = out.index_add(0, at, expert(flat[at]) * p[at, None])
            return x + out.view_as(x)

    return Tiny([Moe() for _ in range(3)])


# ---------------------------------------------------------------- between steps

@between(lambda: Tiny(dropout=0.2))
def evaluation_between_steps(t: Trial, model: nn.Module, step: int) -> None:
    model.eval()
    with torch.no_grad():
        t.note(f"step {step}, no_grad", model(t.batch(batch(50))))
    with torch.inference_mode():
        t.note(f"step {step}, inference_mode", model(t.batch(batch(51))).clone())
    model.train()


@passes(Tiny)
def evaluation_between_forward_and_backward(t: Trial, model: nn.Module, ids: Tensor) -> Tensor:
    value = lm_loss(model, ids)
    with torch.no_grad():
        t.note("no_grad", model(ids.flip(0)))
    return value


@between()
def generation_between_steps(t: Trial, model: nn.Module, step: int) -> None:
    ids = t.batch(batch(50)[:, :4])
    model.eval()
    for kind in (dict(do_sample=False), dict(do_sample=True, top_k=20), dict(num_beams=2, do_sample=False),
                 dict(do_sample=False, use_cache=False)):
        t.note(f"step {step}, {kind}", model.generate(ids, max_new_tokens=5, pad_token_id=0, **kind))
    model.train()


@situation
def weights_read_right_after_the_step(t: Trial) -> None:
    """Updates run behind the caller; every way of reading must see all of them."""
    model = t.stream(made())
    opt = t.default_optimizer(model)
    kept, raw = list(model.parameters()), model.layers[0].up.weight.data
    ways: list[Callable[[], Any]] = [
        lambda: [p.detach().clone() for p in kept],
        lambda: model.state_dict(),
        lambda: [p.cpu().sum() for p in model.parameters()],
        lambda: raw.clone(),
        lambda: nn.utils.parameters_to_vector(model.parameters()),
        lambda: torch.from_numpy(model.head.weight.detach().cpu().numpy().copy()),
        lambda: model.layers[3].down.bias.tolist(),
        lambda: pickle.loads(pickle.dumps(kept[5].detach())),
        lambda: torch.stack([p.cpu().norm() for p in kept]),
        lambda: copy.deepcopy(model.layers[1]).up.weight.detach(),
    ]
    for step, way in enumerate(ways):
        lm_loss(model, t.batch(batch(step))).backward()
        opt.step()
        t.note(f"way {step}", way())
        t.note(f"way {step}, gradients", [p.grad for p in kept])
        opt.zero_grad()


@situation
def running_average_of_weights(t: Trial) -> None:
    model = t.stream(made())
    average = [p.detach().cpu().clone() for p in model.parameters()]

    def between(step: int) -> None:
        for a, p in zip(average, model.parameters()):
            a.lerp_(p.detach().cpu(), 0.1)

    t.train(model, batch, lm_loss, between=between)
    t.note("average", average)


@between(Tiny)
def weights_written_between_steps(t: Trial, model: nn.Module, step: int) -> None:
    with torch.no_grad():
        model.layers[0].up.weight.copy_(torch.full((2 * H, H), 0.01))
        model.layers[1].down.weight.mul_(0.5)
        model.head.weight[3, :] = 0.25
        nn.init.constant_(model.norm.bias, 0.1)
    model.layers[2].up.weight.data.add_(0.01)
    model.layers[2].qkv.weight.data[0] = 0.0
    model.layers[3].out.weight.detach().clamp_(-0.1, 0.1)


@between(Tiny)
def data_replaced_between_steps(t: Trial, model: nn.Module, step: int) -> None:
    p = model.layers[1].up.weight
    p.data = p.detach().clone() * 0.5
    model.layers[2].norm1.weight.data = torch.full_like(model.layers[2].norm1.weight, 1.25)


@situation
def state_dict_loaded_between_steps(t: Trial) -> None:
    model = t.stream(made(lambda: Tiny(dropout=0.1)))
    start = {k: v.detach().cpu().clone() for k, v in model.state_dict().items()}

    def between(step: int) -> None:
        if step == 1:
            model.load_state_dict(start)
        if step == 2:
            model.layers[0].load_state_dict({k: v * 1.1 for k, v in model.layers[1].state_dict().items()})

    t.train(model, batch, lm_loss, steps=4, between=between)


@situation
def state_dict_is_a_snapshot_by_reference(t: Trial) -> None:
    """As in torch: entries share the parameters' memory, so they follow later steps."""
    model = t.stream(made())
    state = model.state_dict()
    t.note("names", list(state))
    t.train(model, batch, lm_loss)
    t.note("followed", {k: v for k, v in state.items()})


@situation
def gradients_edited_in_place(t: Trial) -> None:
    model = t.stream(made())
    for step in t.steps(model, 4):
        lm_loss(model, t.batch(batch(step))).backward()
        for i, p in enumerate(model.parameters()):
            if i % 4 == 0:
                p.grad.mul_(0.5)
            elif i % 4 == 1:
                p.grad = p.grad * 2 + 1e-3
            elif i % 4 == 2 and step == 1:
                p.grad = None
            elif i % 4 == 3:
                p.grad[0] = 0.125
        t.note_grads(f"step {step}", model)


@situation
def gradients_edited_between_micro_batches(t: Trial) -> None:
    model = t.stream(made())
    for step in t.steps(model):
        for micro in range(3):
            lm_loss(model, t.batch(batch(3 * step + micro))).backward()
            for i, p in enumerate(model.parameters()):
                if i % 3 == micro:
                    p.grad.mul_(0.5)
                elif i % 7 == 0 and micro == 1:
                    p.grad = None
            t.note_grads(f"step {step}, micro-batch {micro}", model)


@situation
def gradients_stolen_by_the_user(t: Trial) -> None:
    """A gradient that the user keeps must not change with the next backward."""
    model = t.stream(made())
    kept: list[list[Tensor]] = []
    for step in range(3):
        lm_loss(model, t.batch(batch(step))).backward()
        kept.append([p.grad for p in model.parameters()])
        model.zero_grad()
    t.note("kept", kept)


@situation
def clip_by_torch(t: Trial) -> None:
    model = t.stream(made())
    for step in t.steps(model):
        lm_loss(model, t.batch(batch(step))).backward()
        t.note(f"step {step}, norm", t.clip(model.parameters(), 0.05))
        nn.utils.clip_grad_value_(model.parameters(), 1e-3)
        t.note_grads(f"step {step}", model)


# ---------------------------------------------------------------- optimizers

@situation
def parameter_groups(t: Trial) -> None:
    model = t.stream(made())
    decay = [p for p in model.parameters() if p.dim() > 1]
    plain = [p for p in model.parameters() if p.dim() < 2]
    opt = t.optimizer(torch.optim.AdamW, [{"params": decay, "weight_decay": 0.5, "lr": 1e-2},
                                          {"params": plain, "weight_decay": 0.0}], lr=1e-3, eps=1e-4)
    t.train(model, batch, lm_loss, opt=opt)


@situation
def named_parameters_in_the_optimizer(t: Trial) -> None:
    model = t.stream(made())
    opt = t.optimizer(torch.optim.AdamW, model.named_parameters(), lr=1e-2, eps=1e-4)
    t.train(model, batch, lm_loss, opt=opt)
    t.note("names", opt.state_dict()["param_groups"][0].get("param_names"))


@situation
def group_added_later(t: Trial) -> None:
    if t.device == "cuda":
        return
    model = t.stream(made())
    opt = torch.optim.SGD(model.layers.parameters(), lr=0.1, momentum=0.9)
    ordinary(t, 0, model, opt)
    opt.add_param_group({"params": list(model.head.parameters()), "lr": 0.01})
    model.zero_grad()
    t.train(model, batch, lm_loss, opt=opt, first=1)


@situation
def learning_rate_schedule(t: Trial) -> None:
    model = t.stream(made())
    opt = t.optimizer(torch.optim.AdamW, model.parameters(), lr=1e-2, eps=1e-4)
    schedule = torch.optim.lr_scheduler.SequentialLR(opt, [
        torch.optim.lr_scheduler.LinearLR(opt, 0.1, total_iters=2),
        torch.optim.lr_scheduler.CosineAnnealingLR(opt, 4)], milestones=[2])
    t.train(model, batch, lm_loss, steps=5, opt=opt, between=lambda step: schedule.step())


@situation
def optimizer_state_saved_and_loaded(t: Trial) -> None:
    model = t.stream(made())
    opt = t.train(model, batch, lm_loss, steps=2)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "opt": opt.state_dict()}, file)
    t.train(model, batch, lm_loss, steps=2, opt=opt, first=2)           # to be undone
    saved = torch.load(io.BytesIO(file.getvalue()), map_location="cpu")
    model.load_state_dict(saved["model"])
    again = t.default_optimizer(model)
    again.load_state_dict(saved["opt"])
    t.train(model, batch, lm_loss, steps=2, opt=again, first=2)


@situation
def other_optimizers(t: Trial) -> None:
    kinds = [(torch.optim.Adafactor, {}), (torch.optim.RMSprop, {}), (torch.optim.Adagrad, {}),
             (torch.optim.AdamW, {"foreach": True}), (torch.optim.AdamW, {"amsgrad": True}),
             (torch.optim.SGD, {"fused": True}), (torch.optim.AdamW, {"fused": True})]
    for cls, kw in kinds:
        if kw.get("fused") and t.device == "cuda":
            continue
        model = t.stream(made())
        t.train(model, batch, lm_loss, steps=2, opt=t.optimizer(cls, model.parameters(), lr=1e-2, **kw))


@situation
@cpu_only
def closure_of_lbfgs(t: Trial) -> None:
    if t.device == "cuda":
        return
    model = t.stream(made(lambda: nn.Sequential(nn.Linear(H, 8), nn.Tanh(), nn.Linear(8, 1))))
    opt = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4)

    def closure() -> Tensor:
        opt.zero_grad()
        value = square(model, rows(0))
        value.backward()
        t.note("loss", value)
        return value

    for _ in range(2):
        opt.step(closure)
    t.note_state("at the end", model)


@situation
def optimizer_made_before_stream(t: Trial) -> None:
    """Parameters keep their identity, so an optimizer made earlier goes on working."""
    if t.device == "cuda":
        return
    model = made()
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    ordinary(t, 0, model, opt)
    ids = [id(p) for p in model.parameters()]
    model = t.stream(model)
    t.expect(ids == [id(p) for p in model.parameters()], "parameters are other objects after stream")
    t.train(model, batch, lm_loss, opt=opt, first=1)


# ---------------------------------------------------------------- faults

class Boom(Exception):
    pass


class Fuse(Tiny):
    """Raises where it is told to."""

    def __init__(self) -> None:
        super().__init__(dropout=0.1)
        self.blow: tuple[str, type[BaseException]] | None = None

    def body(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            x = layer(x)
            if i == 1 and self.blow and self.blow[0] == "forward":
                raise self.blow[1]()
            if i == 1 and self.blow and self.blow[0] == "backward" and x.requires_grad:
                kind = self.blow[1]
                x.register_hook(lambda g, kind=kind: (_ for _ in ()).throw(kind()))
        return x


def blown(t: Trial, where: str, kind: type[BaseException]) -> None:
    model = t.stream(made(Fuse))
    with amid_steps(t, model):
        model.blow = (where, kind)
        fails(t, lambda: lm_loss(model, t.batch(batch(1))).backward(), "what was thrown", kind)
        model.blow = None
        t.note_random()


for _kind, _name in ((Boom, "exception"), (KeyboardInterrupt, "interrupt")):
    for _where in ("forward", "backward"):
        SITUATIONS[f"{_name}_in_{_where}"] = functools.partial(blown, where=_where, kind=_kind)


@situation
def exception_inside_a_layer(t: Trial) -> None:
    class Fragile(Block):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            if self.broken:
                raise Boom
            return y

    def build() -> nn.Module:
        Fragile.broken = False
        return Tiny([Fragile(0.1) for _ in range(3)])

    model = t.stream(made(build))
    with amid_steps(t, model):
        model.layers[1].broken = True
        fails(t, lambda: lm_loss(model, t.batch(batch(1))), "the layer's exception", Boom)
        model.layers[1].broken = False
    t.note_random()


@situation
def not_finite_gradients(t: Trial) -> None:
    """Infinities pass through streaming as they are; what to do with them is the optimizer's affair."""
    model = t.stream(made())
    (lm_loss(model, t.batch(batch(0))) * float("inf")).backward()
    t.note_grads("infinite", model)
    model.zero_grad()
    t.train(model, batch, lm_loss)


# ---------------------------------------------------------------- refusals

@situation
def change_of_dtype_is_refused(t: Trial) -> None:
    model = t.stream(made())
    with amid_steps(t, model):
        for action in (model.half, model.double, lambda: model.to(torch.bfloat16), lambda: model.layers[1].bfloat16()):
            t.refuses(action, "dtype")
        t.expect(all(p.dtype == torch.float32 for p in model.parameters()), "a dtype changed")


@situation
def change_of_device_is_absorbed(t: Trial) -> None:
    model = t.stream(made(lambda: Tiny([Block(), Block()])))
    t.expect(model.to(t.device) is model, ".to(device) returned something else")
    if t.device == "cuda":
        model.cuda()
    t.train(model.float(), batch, lm_loss)


@situation
def surgery_after_stream_is_refused(t: Trial) -> None:
    model = t.stream(made())
    with amid_steps(t, model):
        if t.streamed:
            old, model.layers[1] = model.layers[1], Block()
            t.refuses(lambda: model(t.batch(batch(0))), "stream")
            model.layers[1] = old


@situation
def peft_after_stream_is_refused(t: Trial) -> None:
    import peft
    model = t.stream(llama())
    ordinary(t, 0, model, t.default_optimizer(model), hf_loss, text)
    if t.streamed and not IDENTITY:
        def wrap_and_run() -> None:
            wrapped = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"]))
            wrapped(**t.batch(text(0)))
        t.refuses(wrap_and_run, "peft")


@situation
def assigning_state_is_refused(t: Trial) -> None:
    model = t.stream(made())
    with amid_steps(t, model):
        state = {k: v.clone() for k, v in model.state_dict().items()}
        t.refuses(lambda: model.load_state_dict(state, assign=True), "assign")
        t.refuses(model.share_memory, "share_memory")


@situation
def resizing_embeddings_is_refused(t: Trial) -> None:
    model = t.stream(llama())
    opt = t.default_optimizer(model)
    t.refuses(lambda: model.resize_token_embeddings(V + 8), "resize_token_embeddings")
    for step in range(2):
        ordinary(t, step, model, opt, hf_loss, text)


@situation
def odd_parameters_are_refused(t: Trial) -> None:
    """Refused by mt.stream itself, and nothing was touched: the model still runs."""
    def complex_() -> nn.Module:
        model = Tiny()
        model.layers[2].phase = nn.Parameter(torch.zeros(3, dtype=torch.complex64))
        return model

    def sparse() -> nn.Module:
        model = Tiny()
        model.layers[2].table = nn.Parameter(torch.eye(4).to_sparse())
        return model

    for build in (complex_, sparse):
        model = made(build)
        t.refuses(lambda model=model: t.stream(model), "layers.2")
        kinds = {type(p) for p in model.parameters()}
        t.expect(kinds == {nn.Parameter}, f"{build.__name__}: parameters became {kinds}")
        t.expect("forward" not in vars(model), f"{build.__name__}: the model is half streamed")
        t.note("logits", model(batch(0)))


# ---------------------------------------------------------------- copies

def trained(t: Trial) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = t.stream(made(lambda: Tiny(dropout=0.1)))
    return model, t.train(model, batch, lm_loss, steps=2)


def is_own(module: nn.Module, forward: Any) -> bool:
    """No instance attribute, or one that is the class's own method bound to this very module."""
    return forward is None or (type(forward) is types.MethodType and forward.__self__ is module
                               and forward.__func__ is type(module).forward)


def ordinary_copy(t: Trial, copied: nn.Module, original: nn.Module) -> None:
    """A copy is a plain model with plain parameters, independent of the original."""
    t.expect(type(copied) is type(original), f"the copy is a {type(copied)}")
    kinds = {type(p) for p in copied.parameters()}
    t.expect(kinds == {nn.Parameter}, f"parameters of the copy are {kinds}")
    t.expect(all(is_own(m, vars(m).get("forward")) for m in copied.modules()), "the copy is still wrapped")
    t.expect(all(type(m._parameters) is dict for m in copied.modules()), "the copy has our dict")
    t.note_state("the copy", copied)
    copied.to(t.device)
    torch.manual_seed(3)
    opt = t.optimizer(torch.optim.SGD, copied.parameters(), lr=0.1)
    lm_loss(copied, t.batch(batch(20))).backward()
    t.note_grads("the copy", copied)
    opt.step()
    t.note_state("the copy, trained", copied)
    t.note_state("the original", original)


def saved_and_loaded(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False)


def copied(t: Trial, way: Callable[[nn.Module], nn.Module]) -> None:
    model, opt = trained(t)
    ordinary_copy(t, way(model), model)
    t.train(model, batch, lm_loss, steps=1, opt=opt, first=2)


SITUATIONS |= {f"{name}_gives_a_plain_model": functools.partial(copied, way=way) for name, way in {
    "deepcopy": copy.deepcopy, "torch_save": saved_and_loaded, "pickle": lambda model: pickle.loads(pickle.dumps(model))}.items()}


@situation
def averaged_model_of_swa(t: Trial) -> None:
    model, opt = trained(t)
    if t.device != "cpu":
        return                  # the plain run would average on the GPU, which rounds in other places
    average = torch.optim.swa_utils.AveragedModel(model)
    for step in range(2, 4):
        t.train(model, batch, lm_loss, steps=1, opt=opt, first=step)
        average.update_parameters(model)
    t.note_state("average", average.module)


@situation
def state_dict_round_trip(t: Trial) -> None:
    model, _ = trained(t)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    state = torch.load(io.BytesIO(file.getvalue()), weights_only=True, map_location="cpu")
    fresh = Tiny(dropout=0.1)
    t.note("keys", str(fresh.load_state_dict(state)))
    t.note_state("fresh", fresh)
    if t.streamed and not IDENTITY:
        kinds = {type(v) for v in state.values()}
        t.expect(kinds == {Tensor}, f"the file holds {kinds}")


@situation
def unstream_gives_the_model_back(t: Trial) -> None:
    model, _ = trained(t)
    if t.streamed and not IDENTITY:
        import megatrain_torch as mt
        t.expect(mt.unstream(model) is model, "unstream returned another object")
        t.expect(all(type(p) is nn.Parameter for p in model.parameters()), "parameters are not plain")
        t.expect(all("forward" not in vars(m) for m in model.modules()), "the model is still wrapped")
    t.note_state("given back", model)
    if t.device != "cpu":
        return                  # from here on a plain optimizer would run on the GPU, which rounds in other places
    t.train(model, batch, lm_loss, steps=2)


@situation
def streamed_again_after_unstream(t: Trial) -> None:
    model, _ = trained(t)
    if t.streamed and not IDENTITY:
        import megatrain_torch as mt
        mt.unstream(model)
    t.train(t.stream(model), batch, lm_loss, steps=2)


@situation
def object_and_class_are_kept(t: Trial) -> None:
    before = made(lambda: Tiny(dropout=0.1))
    names = [n for n, _ in before.named_parameters()], [n for n, _ in before.named_modules()], list(before.state_dict())
    model = t.stream(before)
    t.expect(model is before and type(model) is Tiny, "another object or class")
    now = [n for n, _ in model.named_parameters()], [n for n, _ in model.named_modules()], list(model.state_dict())
    t.expect(names == now, "names changed")
    t.expect(all(isinstance(p, nn.Parameter) for p in model.parameters()), "parameters are no Parameters")
    t.expect(all(p.device.type == "cpu" for p in model.parameters()) or not t.streamed or IDENTITY,
             "streamed parameters are host tensors")
    t.expect(sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in made().parameters()), "sizes changed")


# ---------------------------------------------------------------- PEFT and compile

@situation
def lora(t: Trial) -> None:
    import peft
    model = peft.get_peft_model(llama(), peft.LoraConfig(r=4, lora_alpha=8, lora_dropout=0.1,
                                                         target_modules=["q_proj", "v_proj", "down_proj"]))
    torch.manual_seed(5)
    for name, p in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(p, std=0.05)
    model = t.stream(model)
    opt = t.train(model, text, hf_loss)
    with model.disable_adapter(), torch.no_grad():
        t.note("without adapter", model(**t.batch(text(8))).logits)
    t.note("adapter", dict(sorted(peft.get_peft_model_state_dict(model).items())))
    t.train(model, text, hf_loss, steps=1, opt=opt, first=3)


@situation
def dora_and_saved_modules(t: Trial) -> None:
    import peft
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], use_dora=True, modules_to_save=["lm_head"])
    t.train(t.stream(peft.get_peft_model(llama(), config)), text, hf_loss)


@situation
def compiled_model(t: Trial) -> None:
    """backend="eager": graphs are captured and run as they are, so bits do not change."""
    torch._dynamo.reset()
    model = t.stream(made(lambda: Tiny([Block(), Block()])))
    compiled = torch.compile(model, backend="eager")
    opt = t.default_optimizer(model)
    for step in range(3):
        ordinary(t, step, model, opt, lambda _, ids: lm_loss(compiled, ids))
    torch._dynamo.reset()


@situation
def adapters_switched_for_a_reference(t: Trial) -> None:
    """As TRL's DPOTrainer does: a second adapter's forward between the first one's forward and its backward."""
    import peft
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj", "down_proj"])
    model = peft.get_peft_model(llama(), config)
    model.add_adapter("ref", config)
    model.set_adapter("default")
    model = t.stream(model)
    for step in t.steps(model):
        loss = hf_loss(model, t.batch(text(step)))
        model.set_adapter("ref")
        with torch.no_grad():
            ref = hf_loss(model, t.batch(text(step + 3)))
        model.set_adapter("default")
        (loss - 0.5 * ref).backward()
        t.note(f"step {step}, losses", (loss, ref))
        t.note_grads(f"step {step}", model)
