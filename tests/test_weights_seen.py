"""What a forward sees as its weights are its parameters, for all that Python can ask; and whatever takes a weight that is
read elsewhere has its gradient. Bits of plain torch."""
from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import graph
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import megatrain_torch as mt

PLANS = [{"activations": "saved", "slots": 2}, {"activations": "replay", "slots": 2},
         {"homes": "vram", "activations": "replay"}]
X = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))


class Layer(nn.Linear):
    """Multiplies by what `ask` makes of it."""

    ask: Callable[[Any], Any] = staticmethod(lambda layer: 1.0)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(F.linear(x, self.weight, self.bias)) * self.ask(self)


class Net(nn.Module):
    """The end is the root's: it reads the head's weight itself."""

    def __init__(self, end: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(8, 8) for _ in range(3))
        self.head, self.end = nn.Linear(8, 5, bias=False), end

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.end(self, x)


def streamed(model: nn.Module, plan: Any) -> nn.Module:
    return mt.stream(model, "cpu", compute="eager", plan=plan, units=["layers.0", "layers.1", "layers.2", "head"])


def check(end: Callable[[Any, Tensor], Tensor] = lambda m, x: m.head(x),
          prepare: Callable[[Any], Any] = lambda m: None, after: Callable[[Any], Any] = lambda m: None,
          plans: Any = PLANS) -> None:
    """Outputs and gradients of two passes, what `prepare` collects and `after` finds, streamed and plain."""
    found = []
    for plan in [None, *plans]:
        torch.manual_seed(0)
        model: Any = Net(end)
        if plan is not None:
            model = streamed(model, plan)
        seen, out = prepare(model), []
        for _ in range(2):
            y = model(X)
            y.square().sum().backward()
            out.append(y.detach())
        found.append((out + [p.grad for p in model.parameters()], seen, after(model)))
    for plan, (tensors, *rest) in zip(plans, found[1:]):
        assert tuple(rest) == found[0][1:], plan
        for a, b in zip(found[0][0], tensors):
            assert (a is None) == (b is None), plan
            assert a is None or torch.equal(a, b), plan


# ---- questions ----

def copied(w: Any, make: Callable[[Any], Any]) -> Any:
    out = make(w)
    return type(out), float(out.sum()), out.is_leaf, out.requires_grad, getattr(out, "gain", None)


QUESTIONS: dict[str, Callable[[Any], Any]] = {
    "class": lambda m: (isinstance(m.weight, nn.Parameter), isinstance(m.bias, nn.Parameter)),
    "leaf": lambda m: (m.weight.is_leaf, m.weight.grad_fn, m.weight.requires_grad),
    "grad": lambda m: None if m.weight.grad is None else float(m.weight.grad.sum()),
    "the same": lambda m: m.weight is m.weight,
    "memory": lambda m: (m.weight.storage_offset(), m.bias.storage_offset(), m.bias.untyped_storage().nbytes(),
                         m.weight._base is None, torch.as_strided(m.bias, (8,), (1,), 0).tolist()),
    "attributes": lambda m: {k: v for k, v in vars(m.weight).items() if not k.startswith("_mt")},
    "deepcopy": lambda m: copied(m.weight, copy.deepcopy),
    "pickle": lambda m: copied(m.weight, lambda w: pickle.loads(pickle.dumps(w))),
    "text": lambda m: repr(m.weight),
    "made of it": lambda m: (type(m.weight.data), type(m.weight.detach()), type(m.weight + 0), type(m.weight.t())),
    "found by hash": lambda m: [n for n, p in m.named_parameters() if hash(p) == hash(m.weight)],
    "put again": lambda m: setattr(m, "weight", m.weight),
}


@pytest.mark.parametrize("where", ["its own window", "the root's forward"])
@pytest.mark.parametrize("name", QUESTIONS)
def test_what_python_asks_of_a_weight(name: str, where: str) -> None:
    def prepare(model: Any) -> Any:
        model.layers[1].weight.gain = 0.4
        seen = []

        def ask(layer: Any) -> float:
            seen.append(QUESTIONS[name](layer))
            return 1.0

        if where == "its own window":
            model.layers[1].ask = ask
        else:
            model.end = lambda m, x: m.head(x) * ask(m.layers[1])
        return seen

    check(prepare=prepare, plans=PLANS[:1])          # a replay asks again


def known(model: Any) -> Any:
    return {p: 0.1 * (i + 1) for i, p in enumerate(model.parameters())}


BRANCHES: dict[str, Callable[[Any], Callable[[Any], Any]]] = {
    "set before": lambda m: [setattr(x.weight, "gain", 0.4) for x in m.layers] and (lambda x: x.weight.gain),
    "deleted": lambda m: (setattr(m.layers[0].weight, "gain", 0.4), delattr(m.layers[0].weight, "gain"))
    and (lambda x: getattr(x.weight, "gain", 1.0)),
    "set in a hook": lambda m: [x.register_forward_pre_hook(lambda x, _: setattr(x.weight, "gain", 0.3))
                                for x in m.layers] and (lambda x: x.weight.gain),
    "set in the forward": lambda m: lambda x: (setattr(x.weight, "n", getattr(x.weight, "n", 0) + 1), x.weight.n)[1],
    "key": lambda m: (lambda found: lambda x: found[x.weight] * (x.bias in found))(known(m)),
    "view kept as a key": lambda m: (lambda found: lambda x: found.setdefault(x.weight, 0.5) * len(found))({}),
    "leaf": lambda m: lambda x: 1.0 if x.weight.is_leaf else 0.1,
    "itself": lambda m: lambda x: 1 + x.weight.square().sum(),
}


@pytest.mark.parametrize("name", BRANCHES)
def test_a_forward_that_goes_by_its_parameter(name: str) -> None:
    def prepare(model: Any) -> None:
        ask = BRANCHES[name](model)
        for layer in model.layers:
            layer.ask = ask

    check(prepare=prepare, after=lambda m: [getattr(x.weight, "n", None) for x in m.layers],
          plans=PLANS[:1] if name == "view kept as a key" else PLANS)


def test_two_views_of_one_parameter_are_equal_as_keys_and_elementwise() -> None:
    model = streamed(Net(lambda m, x: m.head(x)), PLANS[0])
    kept = []
    model.layers[0].ask = lambda layer: kept.append(layer.weight) or 1.0
    for _ in range(2):
        model(X)
    (first, second), p = kept, model.layers[0].weight
    assert first is not second and {first} == {second} == {p}
    assert (first == second).shape == p.shape and bool((first == p).all()) and {first} != {model.layers[1].weight}


def test_what_a_view_cannot_answer_is_refused_by_name() -> None:
    model = streamed(Net(lambda m, x: m.head(x)), PLANS[0])
    for ask, text in ((lambda x: x.weight.requires_grad_(False), r"layers.0.weight: requires_grad is changed"),
                      (lambda x: graph.get_gradient_edge(x.weight), r"layers.0.weight: the gradient edge"),
                      (lambda x: x.weight.expand_as(x.weight).grad_fn.next_functions[0][0].register_hook(print),
                       r"layers.0.weight: a hook on this node"),
                      (lambda x: setattr(x.weight, "data", X), r"layers.0.weight: .data of shape \[4, 8\]")):
        model.layers[0].ask = ask
        with pytest.raises(mt.MegatrainError, match=text):
            model(X)


# ---- gradients of weights that are read elsewhere ----

class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(h, w)
        return h @ w.t()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        h, w = ctx.saved_tensors
        return g @ w, g.t() @ h


class SetUp(torch.autograd.Function):
    """In torch.func's style; ctx keeps the weight itself."""

    @staticmethod
    def forward(h: Tensor, w: Tensor) -> Tensor:
        return h @ w.t()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.h, ctx.w = inputs

    backward = staticmethod(lambda ctx, g: (g @ ctx.w, g.t() @ ctx.h))


class InForward(torch.autograd.Function):
    """As fused losses do: gradients are made in the forward, some rows at a time."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, w: Tensor) -> Tensor:
        dh, dw, loss = torch.empty_like(h), torch.zeros_like(w), h.new_zeros(())
        for rows in (slice(0, 2), slice(2, 4)):
            loss += (h[rows] @ w.t()).square().sum()
            dh[rows] = 2 * h[rows] @ w.t() @ w
            dw += 2 * (h[rows] @ w.t()).t() @ h[rows]
        ctx.save_for_backward(dh, dw)
        return loss

    backward = staticmethod(lambda ctx, g: tuple(g * t for t in ctx.saved_tensors))


@torch.library.custom_op("test_weights_seen::product", mutates_args=())
def product(h: Tensor, w: Tensor) -> Tensor:
    return h @ w.t()


product.register_fake(lambda h, w: h @ w.t())
product.register_autograd(lambda ctx, g: (g @ ctx.w, g.t() @ ctx.h),
                          setup_context=lambda ctx, inputs, output: ctx.__dict__.update(h=inputs[0], w=inputs[1]))


def scaled(m: Any, how: Callable[[Tensor], Any]) -> Tensor:
    """Changes the head's weight in place; its window then has the new one."""
    with torch.no_grad():
        how(m.head.weight)
    return m.head


TAKERS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "Function": lambda m, x: Product.apply(x, m.head.weight),
    "with setup_context": lambda m, x: SetUp.apply(x, m.head.weight),
    "gradients in forward": lambda m, x: InForward.apply(x, m.head.weight),
    "its window too": lambda m, x: m.head(Product.apply(x, m.layers[0].weight)),
    "a part": lambda m, x: Product.apply(x, m.head.weight[1:4]),
    "custom op": lambda m, x: product(x, m.head.weight),
    "compiled": lambda m, x: torch.compile(F.linear, backend="eager")(x, m.head.weight),
    "checkpoint, read": lambda m, x: checkpoint(lambda x: Product.apply(x, m.head.weight), x, use_reentrant=False),
    "checkpoint, given": lambda m, x: checkpoint(Product.apply, x, m.head.weight, use_reentrant=False),
    "reentrant, read": lambda m, x: checkpoint(lambda x: Product.apply(x, m.head.weight), x, use_reentrant=True),
    "reentrant, given": lambda m, x: checkpoint(Product.apply, x, m.head.weight, use_reentrant=True),
    "list of them": lambda m, x: x @ torch.cat([m.head.weight, m.layers[0].weight]).t(),
    "numbers of it": lambda m, x: m.head(x) * m.head.weight.sum().item() * len(m.head.weight.tolist()),
    "a view changed": lambda m, x: scaled(m, lambda w: w.t()[0].mul_(0.5))(x),
    ".data changed": lambda m, x: scaled(m, lambda w: w.data.mul_(0.5))(x),
    "autocast": lambda m, x: torch.autocast("cpu", torch.bfloat16)(F.linear)(x, m.head.weight).float(),
}


@pytest.mark.parametrize("name", TAKERS)
def test_whatever_takes_a_weight_that_is_read_elsewhere(name: str) -> None:
    check(TAKERS[name], after=lambda m: [p.tolist() for p in m.parameters()])


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_forward_that_is_put_on_the_model_reads_on_the_device(when: str) -> None:
    """TRL's trainers put one there, whichever was first."""
    model = Net(lambda m, x: m.head(x))
    kinds = []

    def forward(x: Tensor) -> Tensor:
        kinds.append(type(model.head.weight).__name__)
        return Product.apply(model.layers[0](x), model.head.weight)

    if when == "before":
        model.forward = forward
    streamed(model, PLANS[0])
    model.forward = forward
    model(X).sum().backward()
    assert kinds == ["LazyParameter"] and model.head.weight.grad is not None


class OnlyKeeps(Product):
    """Its forward does not look at the weight."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(h, w)
        return h[:, :5] * 1


def test_a_weight_that_is_first_used_in_backward_is_the_forwards() -> None:
    check(lambda m, x: OnlyKeeps.apply(x, m.head.weight))
    model = streamed(Net(lambda m, x: OnlyKeeps.apply(x, m.head.weight)), PLANS[0])
    loss = model(X).sum()
    with torch.no_grad():
        model.head.weight.mul_(2)
    with pytest.raises(RuntimeError, match="weights of unit 'head' were updated between forward"):
        loss.backward()


def test_vmap_over_a_weight_that_is_read_elsewhere_is_refused_by_name() -> None:
    model = streamed(Net(lambda m, x: torch.vmap(lambda h: m.head.weight @ h)(x)), PLANS[0])
    with pytest.raises(mt.MegatrainError, match=r"head.weight: torch.func's transforms"):
        model(X)


def inner(m: Any, x: Tensor, reentrant: bool) -> Tensor:
    for layer in m.layers[:2]:
        x = checkpoint(layer, x, use_reentrant=reentrant)
    return x


ROUND: dict[str, Callable[[Any, Tensor, bool], Tensor]] = {
    "a layer": lambda m, x, re: m.head(checkpoint(m.layers[2], x, use_reentrant=re)),
    "several layers": lambda m, x, re: m.head(checkpoint(lambda x: m.layers[2](m.layers[0](x)), x, use_reentrant=re)),
    "checkpoints": lambda m, x, re: m.head(checkpoint(lambda x: inner(m, x, re), x, use_reentrant=re)),
    "checkpoints of the other kind": lambda m, x, re: m.head(checkpoint(lambda x: inner(m, x, not re), x,
                                                                        use_reentrant=re)),
    "the head": lambda m, x, re: checkpoint(m.head, x, use_reentrant=re),
}


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("what", ROUND)
def test_torchs_checkpoint_by_hand_around(what: str, reentrant: bool) -> None:
    check(lambda m, x: ROUND[what](m, x, reentrant))


# ---- hooks ----

def node_of(p: Tensor) -> Any:
    return p.expand_as(p).grad_fn.next_functions[0][0]


def on_nodes_of_the_loss(model: Any, seen: list[Any]) -> None:
    """Found as DistributedDataParallel finds them: by walking from the loss."""
    weight = model.layers[0].weight

    def walk(node: Any, met: set[Any]) -> None:
        if node is None or node in met:
            return
        met.add(node)
        if type(node).__name__ == "AccumulateGrad" and node.variable is weight:
            node.register_hook(lambda _, grads: seen.append(float(grads[0].sum())))
        for other, _ in node.next_functions:
            walk(other, met)

    model.end = lambda m, x: (lambda y: (walk(y.grad_fn, set()), y)[1])(m.head(x)) if not seen else m.head(x)


def in_a_forward(model: Any, seen: list[Any]) -> None:
    def ask(layer: Any) -> float:
        if not seen:
            layer.weight.register_hook(lambda g: seen.append(float(g.sum())))
        return 1.0

    model.layers[0].ask = ask


HOOKS: dict[str, Callable[[Any, list[Any]], Any]] = {
    "of the node": lambda m, seen: node_of(m.layers[0].weight).register_hook(
        lambda _, grads: seen.append(float(grads[0].sum()))),
    "before the node": lambda m, seen: node_of(m.layers[0].weight).register_prehook(
        lambda grads: seen.append(float(grads[0].sum())) or (grads[0] * 2,)),
    "by walking": on_nodes_of_the_loss,
    "after accumulation": lambda m, seen: m.layers[0].weight.register_post_accumulate_grad_hook(
        lambda p: seen.append(float(p.grad.sum()))),
    "of several": lambda m, seen: graph.register_multi_grad_hook(
        list(m.parameters()), lambda grads: seen.append([float(g.sum()) for g in grads])),
    "put there in a forward": in_a_forward,
}


@pytest.mark.parametrize("name", HOOKS)
def test_hooks_on_the_way_to_a_parameter(name: str) -> None:
    def prepare(model: Any) -> Any:
        seen: list[Any] = []
        model.handle = HOOKS[name](model, seen)          # a node lives while somebody has it
        return seen

    check(prepare=prepare, plans=PLANS[:2])


def test_gradients_by_an_edge() -> None:
    found = []
    for plan in (None, *PLANS):
        torch.manual_seed(0)
        model: Any = Net(lambda m, x: m.head(x))
        if plan is not None:
            model = streamed(model, plan)
        edge = graph.get_gradient_edge(model.layers[1].weight)
        found.append(torch.autograd.grad(model(X).square().sum(), [edge])[0])
        model(X).square().sum().backward(inputs=[edge])
        found[-1] = found[-1], model.layers[1].weight.grad, model.head.weight.grad
    for edge_grad, grad, other in found[1:]:
        assert torch.equal(edge_grad, found[0][0]) and torch.equal(grad, found[0][1]) and other is None
