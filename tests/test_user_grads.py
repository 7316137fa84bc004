"""Gradients in the user's hands: graphs on the host, changes that no version counter tells, tensors that are kept.

Plain torch says what `.grad` is; mt.AdamW's definition (test_adamw.py) what the update with it is.
"""
from __future__ import annotations

import copy
import ctypes
import math
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import doors
import pytest
import test_adamw
import torch
from test_adamw import BF16, F32, HYPER, assert_follows, assert_same, follow, grads_for, plain_dots
from torch import Tensor, nn

import megatrain_torch as mt

PLACES = ["ram", "vram", "arrive", "through", "disk", "disk+weights"]
HOMES = pytest.mark.parametrize("homes", PLACES)
NEAR_AND_FAR = pytest.mark.parametrize("homes", ["ram", "vram", "disk+weights"])
HALF = pytest.mark.parametrize("dtype", [F32, BF16], ids=["fp32", "bf16"])


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., tuple[test_adamw.Dots, test_adamw.Dots, mt.AdamW, list[Any]]]:
    """(streamed, plain, the streamed one's optimizer, its references); copies dawdle."""
    def pair(homes: Any = "ram", dtype: torch.dtype = F32, **kw: Any) -> tuple[Any, ...]:
        plan = {"homes": homes, "debug": {"delay_us": 100, "seed": 7}, **kw.pop("plan", {})}
        model = doors.stream(plain_dots(dtype), device="cpu", nvme=str(tmp_path) if "disk" in str(homes) else None,
                             plan=plan)
        plain = plain_dots(dtype)
        return model, plain, mt.AdamW(model.parameters(), **{**HYPER, **kw}), test_adamw.references(plain)

    return pair


def given(model: nn.Module) -> list[Tensor | None]:
    return [None if p.grad is None else p.grad.clone(memory_format=torch.contiguous_format) for p in model.parameters()]


def norm(grads: list[Tensor | None]) -> float:
    return math.sqrt(sum(g.double().square().sum().item() for g in grads if g is not None))


def stepped(model: test_adamw.Dots, plain: test_adamw.Dots, opt: mt.AdamW, refs: list[Any]) -> None:
    """A step with the plain model's gradients; both are cleared."""
    grads = given(plain)
    opt.step()
    assert opt.grad_norm == pytest.approx(norm(grads), rel=1e-12)
    follow(refs, grads)
    assert_follows(model, opt, refs)
    opt.zero_grad()
    plain.zero_grad()
    with torch.no_grad():
        for p, q in zip(model.parameters(), plain.parameters()):
            q.copy_(p)


def same_grads(model: test_adamw.Dots, plain: test_adamw.Dots) -> None:
    for (name, p), q in zip(model.named_parameters(), plain.parameters()):
        if q.grad is None:
            assert p.grad is None, name
        else:
            assert_same(p.grad, q.grad, name)


# ---------------------------------------------------------------- graphs on the host

class Squared(torch.autograd.Function):
    """No tensor of its output tells that weights were used."""

    @staticmethod
    def forward(ctx: Any, p: Tensor) -> Tensor:
        ctx.save_for_backward(p)
        return p.square().sum()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        p, = ctx.saved_tensors
        return 2 * g * p


PENALTIES: dict[str, Callable[[list[Tensor]], Tensor]] = {
    "sum": lambda ps: 0.3 * sum(p.square().sum() for p in ps),
    "foreach": lambda ps: 0.3 * sum(t.sum() for t in torch._foreach_mul(ps, ps)),
    "function": lambda ps: 0.3 * sum(Squared.apply(p) for p in ps),
    "some": lambda ps: 0.3 * (ps[1] - 0.5).square().sum(),
    "unbound": lambda ps: sum(row.sum() for row in ps[1].unbind(0)) * 0.25}


def twice(m: test_adamw.Dots, g: list[Tensor], pen: Callable[..., Tensor]) -> None:
    penalty = pen(list(m.parameters()))
    penalty.backward(retain_graph=True)
    m(g).backward()
    penalty.backward()


def before(m: test_adamw.Dots, g: list[Tensor], pen: Callable[..., Tensor]) -> None:
    pen(list(m.parameters())).backward()
    m(g).backward()


def after(m: test_adamw.Dots, g: list[Tensor], pen: Callable[..., Tensor]) -> None:
    m(g).backward()
    pen(list(m.parameters())).backward()


def between(m: test_adamw.Dots, g: list[Tensor], pen: Callable[..., Tensor]) -> None:
    m(g).backward()
    pen(list(m.parameters())).backward()
    m(g).backward()


def inside(m: test_adamw.Dots, g: list[Tensor], pen: Callable[..., Tensor]) -> None:
    (m(g) + pen(list(m.parameters()))).backward()


def crossed(m: test_adamw.Dots, g: list[Tensor], pen: Callable[..., Tensor]) -> None:
    loss, penalty = m(g), pen(list(m.parameters()))
    loss.backward()
    penalty.backward()


ORDERS = [before, after, between, inside, crossed, twice]


@pytest.mark.parametrize("homes, pen", [*((homes, pen) for homes in ("ram", "vram") for pen in PENALTIES),
                                        *((homes, pen) for homes in PLACES[2:] for pen in ("sum", "function"))])
def test_graphs_on_the_host_give_torchs_gradients(make: Any, homes: str, pen: str) -> None:
    for dtype in (F32, BF16):
        model, plain, opt, refs = make(homes, dtype)
        for step, order in enumerate([after, *(o for o in ORDERS if o is not between or dtype == F32)]):
            for m in (model, plain):
                order(m, grads_for(m, step), PENALTIES[pen])
            if step % 2:
                same_grads(model, plain)         # nobody looks before the other steps
            stepped(model, plain, opt, refs)


@NEAR_AND_FAR
def test_a_graph_in_a_hook_of_the_models_backward(make: Any, homes: str) -> None:
    """A backward inside of a backward, for parameters that had their gradient already and for others."""
    def penalize(m: test_adamw.Dots) -> None:
        with torch.enable_grad():
            PENALTIES["function"](list(m.parameters())).backward()

    model, plain, opt, refs = make(homes)
    for step in range(2):
        for m in (model, plain):
            grads = [g.clone().requires_grad_() for g in grads_for(m, step)]
            grads[2].register_hook(lambda _, m=m: penalize(m))
            m(grads).backward()
        stepped(model, plain, opt, refs)


def test_a_graph_on_the_host_may_be_differentiated_again(make: Any) -> None:
    model, plain, _, _ = make("vram")
    with warnings.catch_warnings():          # torch's, of create_graph, which it gives once in a process
        warnings.simplefilter("ignore")
        for m in (model, plain):
            m(grads_for(m, 0)).backward()
            PENALTIES["sum"](list(m.parameters())).backward(create_graph=True)
    same_grads(model, plain)


def test_who_looks_in_inference_mode_changes_nothing(make: Any) -> None:
    model, plain, opt, refs = make("vram")
    for m in (model, plain):
        m(grads_for(m, 0)).backward()
        with torch.inference_mode():
            assert all(bool(p.grad.isfinite().all()) for p in m.parameters())
        PENALTIES["sum"](list(m.parameters())).backward()
    stepped(model, plain, opt, refs)


def test_a_graph_on_the_host_after_a_step_is_refused_as_by_torch(make: Any) -> None:
    """It has kept weights that the optimizer is changing."""
    model, plain, opt, _ = make()
    for m, o in ((model, opt), (plain, torch.optim.AdamW(plain.parameters()))):
        penalty = PENALTIES["sum"](list(m.parameters()))
        m(grads_for(m, 0)).backward()
        o.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            penalty.backward()


LATE: dict[str, Callable[[test_adamw.Dots], Any]] = {
    "penalty": lambda m: PENALTIES["sum"](list(m.parameters())).backward(),
    "function": lambda m: PENALTIES["function"](list(m.parameters())).backward(),
    "scaler": lambda m: unscaled(m.layers[0].weight),
    "data": lambda m: m.layers[0].weight.grad.data.mul_(2),
    "another": lambda m: setattr(m.layers[0].weight, "grad", torch.ones(33))}


@pytest.mark.parametrize("grads, late", [*(("ram", late) for late in LATE), ("none", "penalty"), ("none", "another")])
@pytest.mark.parametrize("homes", ["ram", "vram"])
def test_what_comes_after_an_update_in_backward_is_refused(make: Any, homes: str, grads: str, late: str) -> None:
    model, _, opt, _ = make(homes, in_backward=True, plan={"grads": grads})
    model(grads_for(model, 0)).backward()
    LATE[late](model)
    with pytest.raises(mt.MegatrainError, match=r"layers\.0\.weight: its \.grad came or changed after its update"):
        opt.step()


def test_who_looks_at_what_an_update_in_backward_used_may(make: Any) -> None:
    for homes in ("ram", "vram"):
        model, _, opt, refs = make(homes, in_backward=True)
        for step in range(2):
            model(grads_for(model, step)).backward()
            for p, g in zip(model.parameters(), grads_for(model, step)):
                assert_same(p.grad, g, "gradient")
            opt.step()
            opt.zero_grad()
            follow(refs, grads_for(model, step))
        assert_follows(model, opt, refs)


def test_a_penalty_before_or_inside_is_used_where_updates_are_in_backward(make: Any) -> None:
    for homes in ("ram", "vram"):
        model, plain, opt, refs = make(homes, in_backward=True)
        for step, order in enumerate((before, inside)):
            for m in (model, plain):
                order(m, grads_for(m, step), PENALTIES["sum"])
            opt.step()
            follow(refs, given(plain))
            assert_follows(model, opt, refs)
            opt.zero_grad()
            plain.zero_grad()
            plain.load_state_dict(model.state_dict())


# ---------------------------------------------------------------- changes that no version counter tells

def unscaled(p: Tensor) -> None:
    torch._amp_foreach_non_finite_check_and_unscale_([p.grad], torch.zeros(()), torch.tensor(0.25))


def behind(p: Tensor) -> None:
    grad = p.grad
    ctypes.memset(grad.data_ptr(), 0, grad.numel() * grad.element_size() // 2)


CHANGES: dict[str, Callable[[Tensor], Any]] = {
    "data": lambda p: p.grad.data.clamp_(-0.01, 0.01),
    "turned": lambda p: p.grad.data.neg_(),
    "foreach": lambda p: torch._foreach_mul_([p.grad.data], 0.5),
    "amp": unscaled,
    "ctypes": behind,
    "view": lambda p: p.grad.view(-1)[:1].data.add_(3.0),
    "bytes": lambda p: p.grad.data.view(-1).view(torch.uint8)[:2].zero_(),
    "numpy": lambda p: p.grad.numpy().fill(0.5) if p.dtype == F32 else p.grad.view(torch.int16).numpy().fill(0x3E80)}


@NEAR_AND_FAR
@HALF
def test_a_change_without_a_version_counts(make: Any, homes: str, dtype: torch.dtype) -> None:
    """In the norm, in the update, and in what the next micro-batch is added to; 16-bit sums included."""
    model, plain, opt, refs = make(homes, dtype)
    for step, change in enumerate(CHANGES.values()):
        for micro in range(1 + step % 2):
            for m in (model, plain):
                m(grads_for(m, step)).backward()
                for p in m.parameters() if dtype == BF16 or micro else [m.layers[1].weight]:
                    change(p)
        stepped(model, plain, opt, refs)


@NEAR_AND_FAR
def test_a_tensor_that_was_kept_is_the_gradient_still(make: Any, homes: str) -> None:
    model, plain, opt, refs = make(homes, BF16)
    for step in range(3):
        kept: dict[Any, Any] = {}
        for m in (model, plain):
            m(grads_for(m, step)).backward()
            kept[m] = [p.grad.detach().view(-1) for p in m.parameters()]
            m(grads_for(m, step + 10)).backward()
            for k, p in zip(kept[m], m.parameters()):
                assert_same(k, p.grad.view(-1), "kept")
                k.mul_(0.5)
        same_grads(model, plain)
        stepped(model, plain, opt, refs)


@NEAR_AND_FAR
def test_who_only_looks_keeps_the_sum_in_fp32(make: Any, homes: str) -> None:
    model, _, opt, refs = make(homes, BF16)
    for step in range(2):
        micros = [grads_for(model, 10 * step + k, decades=1) for k in range(4)]
        for grads in micros:
            model(grads).backward()
            assert all(bool(p.grad.isfinite().all()) for p in model.parameters())
        opt.step()
        opt.zero_grad()
        follow(refs, [m[0].float() + m[1].float() + m[2].float() + m[3].float() for m in zip(*micros)])
    assert_follows(model, opt, refs)


@NEAR_AND_FAR
def test_gradscaler_trains_as_without_it(make: Any, homes: str) -> None:
    """A power of two as the scale: unscaled gradients have the bits of those that were never scaled."""
    model, _, opt, _ = make(homes, max_grad_norm=1.0)
    other, _, theirs, _ = make(homes, max_grad_norm=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for step in range(4):
        grads = grads_for(model, step)
        scaler.scale(model(grads)).backward()
        if step % 2:
            scaler.unscale_(opt)
        if step == 3:
            model.layers[0].weight.grad.view(-1)[0] = float("inf")
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
        if step < 3:
            test_adamw.feed(other, theirs, grads)
            assert opt.grad_norm == theirs.grad_norm
    for p, q in zip(model.parameters(), other.parameters()):
        assert_same(p, q, "weight")


def test_the_ordinary_loop_hands_nothing_out(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from megatrain_torch.store import gradient
    model, _, opt, _ = make("vram", max_grad_norm=1.0)

    def refuse(*_: Any) -> None:
        raise AssertionError("a gradient was handed out")

    monkeypatch.setattr(gradient, "show", refuse)
    for step in range(4):
        if step == 2:
            assert mt.last_step(model).d2h_bytes == 0
        for _ in range(2):
            model(grads_for(model, step)).backward()
        assert opt.clips_alone(list(model.parameters()))
        opt.clip_next(1.0)
        opt.step()
        (model if step % 2 else opt).zero_grad(set_to_none=step < 2)


# ---------------------------------------------------------------- tensors that are kept over their time

KEEPERS: dict[str, Callable[[Tensor], Any]] = {
    "itself": lambda p: p.grad,
    "detached": lambda p: p.grad.detach(),
    "numpy": lambda p: p.grad.numpy(),
    "row": lambda p: p.grad.view(-1)[1:],
    "graph": lambda p: (torch.ones(p.shape, requires_grad=True) * p.grad).sum(),
    "storage": lambda p: p.grad.untyped_storage(),
    "dlpack": lambda p: torch.from_dlpack(p.grad.detach()),
    "memoryview": lambda p: memoryview(p.grad.numpy())}


def value(kept: Any) -> bytes:
    if isinstance(kept, torch.UntypedStorage):
        return bytes(kept.tolist())
    if isinstance(kept, Tensor) and kept.requires_grad:
        leaf = kept.grad_fn.next_functions[0][0].next_functions[0][0].variable
        return torch.autograd.grad(kept, leaf, retain_graph=True)[0].numpy().tobytes()
    return bytes(kept) if isinstance(kept, memoryview) else kept.tobytes() if not isinstance(kept, Tensor) \
        else kept.numpy().tobytes()


@pytest.mark.parametrize("homes", ["ram", "vram"])
@pytest.mark.parametrize("keep", KEEPERS)
@pytest.mark.parametrize("to_none", [True, False], ids=["dropped", "zeroed"])
def test_what_is_kept_shows_what_torch_shows(make: Any, homes: str, keep: str, to_none: bool) -> None:
    """Over step(), zero_grad() and further gradients, while the parameter's own are right."""
    model, plain, opt, _ = make(homes)
    if keep == "graph" and not to_none:
        return                               # torch refuses it: the graph's gradient was zeroed
    refs, kept = test_adamw.references(model), []
    for step in range(4):
        for m in (model, plain):
            m(grads_for(m, step)).backward()
        grads = given(plain)
        if step < 2:
            kept.append(([KEEPERS[keep](p) for p in model.parameters()], [KEEPERS[keep](p) for p in plain.parameters()]))
        opt.step()
        follow(refs, grads)
        for m in (opt, model, plain):
            m.zero_grad(set_to_none=to_none)
        for ours, theirs in kept:
            assert [value(k) for k in ours] == [value(k) for k in theirs]
        if step == 2:
            kept.clear()
        assert_follows(model, opt, refs)


@HOMES
@HALF
def test_a_writer_after_step_writes_into_its_own(make: Any, homes: str, dtype: torch.dtype) -> None:
    model, _, opt, refs = make(homes, dtype)
    for step in range(4):
        grads = grads_for(model, step)
        model(grads).backward()
        kept = [p.grad if step % 2 else p.grad.detach() for p in model.parameters()]
        opt.step()
        for k, p in zip(kept, model.parameters()):
            k.fill_(7.0)
            assert p.grad is k or step % 2 == 0
            assert float(p.grad.float().mean()) == 7.0
        del kept
        opt.zero_grad()
        follow(refs, grads)
    assert_follows(model, opt, refs)


@pytest.mark.parametrize("homes", ["ram", "vram"])
def test_what_is_kept_beside_updates_in_backward_is_right_too(make: Any, homes: str) -> None:
    """Kept from before the update, which then reads memory of its own, and from behind it."""
    (model, _, opt, refs), kept = make(homes, in_backward=True, max_grad_norm=None), []
    for step in range(4):
        model(grads_for(model, step)).backward()
        kept.append(([p._grad.detach() for p in model.parameters()], grads_for(model, step)))
        opt.step()
        opt.zero_grad()
        follow(refs, grads_for(model, step))
        for tensors, grads in kept:
            for t, g in zip(tensors, grads):
                assert_same(t, g, "kept")
    assert_follows(model, opt, refs)


def test_a_gradient_that_was_looked_at_takes_no_memory_of_its_own(make: Any) -> None:
    model, _, opt, _ = make()
    weight, addresses = model.layers[1].weight, set()
    for step in range(3):
        model(grads_for(model, step)).backward()
        addresses.add(weight.grad.data_ptr())
        opt.step()
        addresses.add(weight.grad.data_ptr())
        opt.zero_grad()
    assert len(addresses) == 1 and not mt.model.stream.runtime_of(model).handover.copied


def test_tensors_that_only_look_like_it_are_copied(make: Any) -> None:
    """A transposed view of its own memory as `.grad`."""
    torch.manual_seed(0)
    model, plain = (plain_dots(F32, [(8, 8)]) for _ in range(2))
    mt.stream(model, device="cpu")
    opt, refs = mt.AdamW(model.parameters(), **HYPER), test_adamw.references(model)
    for m in (model, plain):
        m(grads_for(m, 0)).backward()
        weight = m.layers[0].weight
        weight.grad = weight.grad.t()
    stepped(model, plain, opt, refs)


def test_gradients_outlive_the_store(make: Any) -> None:
    for homes in ("ram", "vram"):
        model, plain, _, _ = make(homes)
        for m in (model, plain):
            m(grads_for(m, 0)).backward()
        kept = model.layers[3].weight.grad
        mt.unstream(model)
        same_grads(model, plain)
        assert model.layers[3].weight.grad is kept
        del model
        assert_same(kept, plain.layers[3].weight.grad, "kept")


def test_torchs_optimizers_step_with_it(make: Any) -> None:
    for homes in ("ram", "vram"):
        model, plain, _, _ = make(homes)
        pairs = [(m, torch.optim.AdamW(m.parameters(), lr=1e-2)) for m in (model, plain)]
        for step in range(3):
            for m, opt in pairs:
                m(grads_for(m, step)).backward()
                nn.utils.clip_grad_norm_(m.parameters(), 0.5)
                opt.step()
                opt.zero_grad(set_to_none=step != 1)
        for p, q in zip(model.parameters(), plain.parameters()):
            assert_same(p, q, homes)


# ---------------------------------------------------------------- reading beside writing

READERS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "copy_": lambda e, p: e.copy_(p), "lerp_": lambda e, p: e.lerp_(p.float(), 0.1),
    "add_": lambda e, p: e.mul_(0.9).add_(p, alpha=0.1), "foreach": lambda e, p: torch._foreach_add_([e], [p]),
    "setitem": lambda e, p: e.__setitem__(0, p[0] if p.dim() else p), "out": lambda e, p: torch.mul(p, 2, out=e),
    "iadd": lambda e, p: e.__iadd__(p)}


def test_a_mean_of_weights_leaves_masters_as_they_are(make: Any) -> None:
    """What an operation only reads was not written: the bits below a bf16 weight stay."""
    model, _, opt, _ = make("vram", BF16)
    refs, means = test_adamw.references(model), [p.detach().float().reshape(p.shape or (1,)) for p in model.parameters()]
    for step, read in enumerate(READERS.values()):
        test_adamw.feed(model, opt, grads_for(model, step))
        follow(refs, grads_for(model, step))
        with torch.no_grad():
            for e, p in zip(means, model.parameters()):
                read(e, p.view(e.shape))
    assert_follows(model, opt, refs)


# ---------------------------------------------------------------- the optimizer object

@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("states", ["fp32", "8bit"])
def test_a_parameter_that_is_put_into_a_group_is_trained(states: str, in_backward: bool) -> None:
    model, whole = (mt.stream(plain_dots(BF16), device="cpu") for _ in range(2))
    params, chosen = list(model.parameters()), dict(states=states, in_backward=in_backward, **HYPER)
    opt, theirs = mt.AdamW(params[:2], **chosen), mt.AdamW(whole.parameters(), **chosen)
    group = opt.param_groups[0]["params"]
    group.append(params[2])
    for step in range(3):
        if step == 1:
            group.append(params[3])
        for m, o in ((model, opt), (whole, theirs)):
            test_adamw.feed(m, o, [*grads_for(m, step)[:3], grads_for(m, step)[3] if step else None])
    for p, q in zip(params, whole.parameters()):
        assert_same(p, q, "weight")


def test_training_goes_on_from_the_state_of_such_a_group() -> None:
    """8-bit states are rounded by a parameter's number, which is then not its place."""
    model, other = (mt.stream(plain_dots(BF16), device="cpu") for _ in range(2))
    params, theirs, chosen = list(model.parameters()), list(other.parameters()), dict(states="8bit-sr", **HYPER)
    opt = mt.AdamW([{"params": params[:1]}, {"params": params[3:]}], **chosen)
    opt.param_groups[0]["params"].extend(params[1:3])
    test_adamw.feed(model, opt, grads_for(model, 0))
    other.load_state_dict(model.state_dict())
    again = mt.AdamW([{"params": theirs[:3]}, {"params": theirs[3:]}], **chosen)
    again.load_state_dict(opt.state_dict())
    for m, o in ((model, opt), (other, again)):
        test_adamw.feed(m, o, grads_for(model, 1))
    for p, q in zip(params, theirs):
        assert_same(q, p, "weight")


def test_copies_are_refused_by_name_where_states_are_the_stores() -> None:
    model = mt.stream(plain_dots(), device="cpu")
    opt = mt.AdamW(model.parameters())
    for copied in (copy.deepcopy, pickle.dumps, copy.copy):
        with pytest.raises(mt.MegatrainError, match=r"neither copied nor pickled.*state_dict"):
            copied(opt)
