"""Optimizer states that somebody writes, replaces or moves: what `opt.state` shows is what an update uses."""
from __future__ import annotations

import collections
import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import doors
import pytest
import torch
from edges import TIGHT
from test_adamw import Dots, assert_all_same, dots, everything, fed, feed, grads_for, plain_dots
from torch import Tensor

import megatrain_torch as mt


def trained(make: Any, **kw: Any) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = dots(**kw)
    return fed(model, make(model.parameters(), lr=1e-2), range(2))


def move(opt: torch.optim.Optimizer, to: Any) -> None:
    """As Lightning does with what it loaded."""
    for states in opt.state.values():
        for name, value in states.items():
            if name != "step":
                states[name] = to(value)


@pytest.mark.parametrize("states", ["fp32", "8bit"])
def test_what_is_put_over_the_stores_states_is_copied_into_it(states: str) -> None:
    made = [trained(lambda p, **kw: mt.AdamW(p, states=states, **kw)) for _ in range(2)]
    (model, opt), (other, moved) = made
    kept = [dict(s) for s in moved.state.values()]
    move(moved, lambda t: Tensor.detach(t).clone())
    for m, o in made:
        feed(m, o, grads_for(m, 2))
    assert all(s[name] is value for s, before in zip(moved.state.values(), kept) for name, value in before.items())
    assert_all_same(everything(model, opt), everything(other, moved))
    move(moved, torch.zeros_like)
    for p in other.parameters():
        assert not any(t.any() for t in moved.moments(p))


def test_states_are_plain_dicts_when_they_are_saved() -> None:
    _, opt = trained(mt.AdamW)
    saved = opt.state_dict()["state"]
    assert {type(s) for s in saved.values()} == {dict}
    assert copy.deepcopy(saved).keys() == saved.keys()


def test_torchs_states_come_home_before_the_step() -> None:
    """There is no other device here than meta, from which nothing can be brought: that says that it is tried."""
    model, opt = trained(torch.optim.AdamW)
    move(opt, lambda t: t.to("meta"))
    with pytest.raises(NotImplementedError, match="meta"):
        feed(model, opt, grads_for(model, 2))


def test_an_optimizer_of_somebody_elses_may_keep_states_elsewhere() -> None:
    class Momentum(torch.optim.Optimizer):
        def step(self, closure: Any = None) -> None:
            seen.extend(s["m"].device.type for s in self.state.values())

    seen: list[str] = []
    model = dots()
    opt = Momentum(model.parameters(), {})
    for p in model.parameters():
        opt.state[p]["m"] = torch.empty(p.shape, device="meta")
    feed(model, opt, grads_for(model, 0))
    assert set(seen) == {"meta"}


def test_an_optimizer_of_other_parameters_is_left_alone() -> None:
    dots()
    p = torch.nn.Parameter(torch.ones(3, device="meta"))
    opt = torch.optim.SGD([p], lr=1.0, momentum=0.9)
    p.grad = torch.ones(3, device="meta")
    opt.step()
    assert opt.state[p]["momentum_buffer"].is_meta


# ---- the same operation on torch's states and on ours ----

Change = Callable[[Dots, torch.optim.Optimizer], Any]
SHAPES = [(9, 4), (9, 4), (16, 40)]
CHANGES: dict[str, Change] = {}


def change(f: Change) -> Change:
    CHANGES[f.__name__] = f
    return f


def each(opt: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [opt.state[p] for group in opt.param_groups for p in group["params"]]


@change
def fill_the_count(model: Dots, opt: torch.optim.Optimizer) -> None:
    for s in each(opt):
        s["step"].fill_(0)


@change
def assign_the_count(model: Dots, opt: torch.optim.Optimizer) -> None:
    for s in each(opt):
        s["step"] = torch.tensor(0.0)


@change
def add_to_the_count(model: Dots, opt: torch.optim.Optimizer) -> None:
    each(opt)[0]["step"] += 1000
    each(opt)[1]["step"].data.zero_()


@change
def restart_by_an_empty_state(model: Dots, opt: torch.optim.Optimizer) -> None:
    opt.state = collections.defaultdict(dict)


@change
def drop_the_state_of_one(model: Dots, opt: torch.optim.Optimizer) -> None:
    opt.state.pop(model.layers[1].weight)
    opt.state[model.layers[1].weight]                    # who looks makes an empty one


@change
def put_another_dict(model: Dots, opt: torch.optim.Optimizer) -> None:
    p = model.layers[0].weight
    opt.state[p] = {"step": torch.tensor(1.0), "exp_avg": torch.full(SHAPES[0], 0.3),
                    "exp_avg_sq": torch.full(SHAPES[0], 0.2)}


@change
def swap_two_states(model: Dots, opt: torch.optim.Optimizer) -> None:
    a, b = model.layers[0].weight, model.layers[1].weight
    opt.state[a]["step"] += 3
    opt.state[a], opt.state[b] = opt.state[b], opt.state[a]


@change
def swap_two_moments(model: Dots, opt: torch.optim.Optimizer) -> None:
    a, b = each(opt)[:2]
    a["exp_avg"], b["exp_avg"] = b["exp_avg"], a["exp_avg"]


@change
def update_a_dict(model: Dots, opt: torch.optim.Optimizer) -> None:
    each(opt)[0].update(exp_avg=torch.zeros(SHAPES[0]), step=torch.tensor(0.0))


@change
def load_an_edited_state(model: Dots, opt: torch.optim.Optimizer) -> None:
    saved = copy.deepcopy(opt.state_dict())
    for s in saved["state"].values():
        s["step"].fill_(1.0)
        s["exp_avg_sq"].mul_(0.5)
    opt.load_state_dict(saved)


@change
def load_another_order(model: Dots, opt: torch.optim.Optimizer) -> None:
    saved = opt.state_dict()                             # not copied: views of what is about to be written
    saved["state"][0], saved["state"][1] = saved["state"][1], saved["state"][0]
    opt.load_state_dict(saved)


@change
def write_past_the_moments(model: Dots, opt: torch.optim.Optimizer) -> None:
    a, b, c = each(opt)
    a["exp_avg"].data.zero_()
    a["exp_avg_sq"].data.mul_(4)
    b["exp_avg"].detach()[1:].fill_(0.1)
    b["exp_avg_sq"].view(-1)[::2] = 0.01
    c["exp_avg"].data = torch.full(SHAPES[2], -0.1)
    torch._foreach_mul_([*c["exp_avg_sq"].unbind(0)], 2.0)


@change
def zero_a_row_of_a_kept_view(model: Dots, opt: torch.optim.Optimizer) -> None:
    view = each(opt)[0]["exp_avg"].data[2]
    feed(model, opt, grads_for(model, 50))
    view.zero_()


@change
def write_the_groups(model: Dots, opt: torch.optim.Optimizer) -> None:
    opt.param_groups[0].update(lr=3e-3, betas=(0.5, 0.9), eps=1e-3, weight_decay=0.3)


@change
def write_a_tensor_rate(model: Dots, opt: torch.optim.Optimizer) -> None:
    opt.param_groups[0]["lr"] = rate = torch.tensor(1e-2)
    feed(model, opt, grads_for(model, 50))
    rate.mul_(0.1)


@change
def split_the_group(model: Dots, opt: torch.optim.Optimizer) -> None:
    opt.add_param_group({"params": [opt.param_groups[0]["params"].pop()], "lr": 1e-3, "betas": (0.8, 0.99)})


@change
def step_with_a_closure_and_zeros(model: Dots, opt: torch.optim.Optimizer) -> None:
    def closure() -> Tensor:
        opt.zero_grad(set_to_none=False)
        loss = model([g * 2 for g in grads_for(model, 51)])
        loss.backward()
        return loss

    opt.step(closure)
    opt.zero_grad(set_to_none=False)


HYPER = dict(lr=1e-2, betas=(0.9, 0.99), eps=1e-6, weight_decay=0.1)
HOMES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "ram": ({}, {}), "vram": ({"homes": "vram"}, {}), "arrive": ({"homes": "arrive"}, {}),
    "through": ({"homes": "through"}, {}), "disk": ({"homes": "disk", "debug": {"disk": TIGHT}}, {}),
    "weights_on_disk": ({"homes": "disk+weights", "slots": 2, "debug": {"disk": TIGHT}}, {}),
    "in_backward": ({}, {"in_backward": True})}


def changed(model: Dots, opt: torch.optim.Optimizer, what: Change) -> Dots:
    fed(model, opt, range(2))
    what(model, opt)
    fed(model, opt, range(2, 5))
    return model


def by_ours(what: Change, home: str, folder: Path) -> dict[str, Tensor]:
    plan, options = HOMES[home]
    disk = {"nvme": str(folder)} if "disk" in home else {}
    model = doors.stream(plain_dots(shapes=SHAPES), device="cpu", plan=plan, **disk)
    opt = mt.AdamW(model.parameters(), **HYPER, **options)
    changed(model, opt, what)
    saved = opt.state_dict()["state"]
    assert [int(s["step"]) for s in each(opt)] == [int(saved[i]["step"]) for i in range(len(SHAPES))], what
    found = everything(model, opt)
    mt.unstream(model)
    return found


@pytest.fixture(scope="module")
def in_ram(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Tensor]]:
    return {name: by_ours(what, "ram", tmp_path_factory.getbasetemp()) for name, what in CHANGES.items()}


def test_a_change_of_the_state_does_what_it_does_to_torchs(in_ram: dict[str, dict[str, Tensor]]) -> None:
    """In fp32: 1e-6 of a weight is five steps' rounding, whose order ours and torch's do not share; what a change moves
    is 1e-3 and more."""
    for name, what in CHANGES.items():
        model = plain_dots(shapes=SHAPES)
        changed(model, torch.optim.AdamW(model.parameters(), foreach=False, **HYPER), what)
        for n, p in model.named_parameters():
            off = (in_ram[name][f"weight {n}"] - p.detach()).abs()
            assert (off <= 1e-6 + 1e-6 * p.detach().abs()).all(), f"{name}: {n} is {float(off.max()):.1e} off torch's"


@pytest.mark.parametrize("home", [h for h in HOMES if h != "ram"])
def test_a_change_of_the_state_does_in_every_home_what_it_does_in_ram(home: str, in_ram: dict[str, dict[str, Tensor]],
                                                                      tmp_path: Path) -> None:
    for name, what in CHANGES.items():
        if home != "in_backward" or "closure" not in name:
            found = by_ours(what, home, tmp_path)
            assert [k for k in found if not torch.equal(found[k], in_ram[name][k])] == [], name


@pytest.mark.parametrize("states", ["8bit", "8bit-sr"])
@pytest.mark.parametrize("name", ["fill_the_count", "swap_two_states", "restart_by_an_empty_state"])
def test_a_change_of_8_bit_states_is_what_is_used(name: str, states: str) -> None:
    """As it does to a state_dict that is loaded."""
    found = []
    for way in ("state", "state_dict"):
        model = dots(torch.bfloat16, SHAPES)
        opt = mt.AdamW(model.parameters(), states=states, **HYPER)
        fed(model, opt, range(2))
        if way == "state":
            CHANGES[name](model, opt)
        else:
            saved = copy.deepcopy(opt.state_dict())
            state = saved["state"]
            if name == "fill_the_count":
                for s in state.values():
                    s["step"].zero_()
            elif name == "swap_two_states":
                state[0]["step"] += 3
                for key in ("step", "exp_avg_codes", "exp_avg_sq_codes", "scales"):
                    state[0][key], state[1][key] = state[1][key], state[0][key]
            else:
                state.clear()
            opt.load_state_dict(saved)
        fed(model, opt, range(2, 4))
        found.append(everything(model, opt))
    assert_all_same(*found)


def test_a_count_written_before_a_step_was_found_to_be_skipped_stays() -> None:
    model = dots(delay_us=500)
    opt = mt.AdamW(model.parameters(), **HYPER)
    feed(model, opt, grads_for(model, 0))
    p, q = model.layers[0].weight, model.layers[1].weight
    feed(model, opt, [g * math.nan for g in grads_for(model, 1)])
    opt.state[p]["step"].fill_(7)                        # waits: it was 1
    opt.state[q]["step"] += 7
    assert (int(opt.state[p]["step"]), int(opt.state[q]["step"]), opt.skipped_steps) == (7, 8, 1)


def test_a_checkpoint_has_the_count_that_is_shown(tmp_path: Path) -> None:
    model, opt = trained(mt.AdamW)
    for s in each(opt):
        s["step"] = 41
        s["exp_avg"] = torch.full_like(s["exp_avg"], 0.25)
    mt.save(model, opt, tmp_path / "c")
    right = everything(model, opt)
    feed(model, opt, grads_for(model, 2))
    mt.load(model, opt, tmp_path / "c")
    assert_all_same(right, everything(model, opt))
    assert {int(s["step"]) for s in each(opt)} == {41}


@pytest.mark.parametrize("bad", [-1, 0.5, math.nan, "2", torch.ones(2)], ids=str)
def test_a_count_that_is_none_is_named(bad: Any) -> None:
    model, opt = trained(mt.AdamW)
    opt.state[model.layers[1].weight]["step"] = bad
    model(grads_for(model, 2)).backward()
    with pytest.raises(mt.MegatrainError, match=r"layers\.1\.weight: its state has step="):
        opt.step()


@pytest.mark.parametrize("write, words", [
    (lambda s: s.pop("exp_avg"), r"layers\.1\.weight: .*no 'exp_avg'"),
    (lambda s: s.update(exp_avg_sq=torch.ones(3)), r"layers\.1\.weight: .*'exp_avg_sq'.*\[3\].*\[7, 13\]"),
    (lambda s: s.clear(), "")], ids=["missing", "shape", "empty"])
def test_states_that_are_none_are_named(write: Callable[[Any], Any], words: str) -> None:
    model, opt = trained(mt.AdamW)
    write(opt.state[model.layers[1].weight])
    model(grads_for(model, 2)).backward()
    if not words:
        opt.step()                                       # begins anew
        assert int(opt.state[model.layers[1].weight]["step"]) == 1
        return
    with pytest.raises(mt.MegatrainError, match=words):
        opt.step()


@pytest.mark.parametrize("key, value", [("amsgrad", True), ("capturable", True), ("decoupled_weight_decay", False)])
@pytest.mark.parametrize("loaded", [False, True])
def test_a_group_that_asks_for_more_is_refused(key: str, value: Any, loaded: bool) -> None:
    model, opt = trained(mt.AdamW)
    saved = copy.deepcopy(opt.state_dict())
    (saved if loaded else opt.state_dict())["param_groups"][0][key] = value
    if not loaded:
        opt.param_groups[0][key] = value
        model(grads_for(model, 2)).backward()
    with pytest.raises(mt.MegatrainError, match=key):
        opt.load_state_dict(saved) if loaded else opt.step()


def test_what_comes_too_late_for_an_update_in_backward_is_refused() -> None:
    model, opt = trained(lambda p, **kw: mt.AdamW(p, in_backward=True, **kw))
    model(grads_for(model, 2)).backward()
    opt.param_groups[0]["lr"] = 1e-3
    with pytest.raises(mt.MegatrainError, match=r"layers\.0\.weight: its group's lr.* changed after its update"):
        opt.step()
    opt.param_groups[0]["lr"] = 1e-2
    opt.max_grad_norm = 1.0
    with pytest.raises(mt.MegatrainError, match="in_backward=True cannot clip"):
        opt.step()


# ---- optimizers of other people ----

class Compiled(torch.optim.Optimizer):
    """As torchao's: its arithmetic is compiled, whole, for each parameter."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> None:
        def update(p: Tensor, grad: Tensor, lr: float) -> None:
            p.mul_(1 - lr).sub_(grad, alpha=lr)

        with torch.no_grad():
            for p in self.param_groups[0]["params"]:
                torch.compile(update, fullgraph=True, backend="eager")(p, p.grad, self.param_groups[0]["lr"])


class Data(Compiled):
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            p.data.mul_(1 - 1e-2).sub_(p.grad.data, alpha=1e-2)


class Breaks(Data):
    def step(self, closure: Any = None) -> None:
        super().step()
        if not self.state:
            self.state["broke"] = True
            raise RuntimeError("half way")


@pytest.mark.parametrize("make", [Compiled, Data, Breaks])
def test_an_optimizer_of_somebody_elses_writes_ordinary_parameters(make: Any) -> None:
    found = []
    for model in (plain_dots(), dots()):
        kinds = [type(p) for p in model.parameters()]
        opt = make(model.parameters(), 1e-2)
        for step in range(3):
            model.zero_grad()
            model(grads_for(model, step)).backward()
            try:
                opt.step()
            except RuntimeError:
                assert make is Breaks and step == 0
        found.append([model(grads_for(model, 5)).item(), *(p.detach().clone() for p in model.parameters())])
        assert [type(p) for p in model.parameters()] == kinds
    assert found[0][0] == found[1][0]
    assert all(torch.equal(a, b) for a, b in zip(found[0][1:], found[1][1:]))
