"""mt.stream without a plan: what the loop does is planned for, in place, with the bits of the plan given beforehand."""
from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import parity
import pytest
import torch
import transformers
from zoo import update

import megatrain_torch as mt
from megatrain_torch.model import planning, ring
from megatrain_torch.model.homes import Cap
from megatrain_torch.model.planning import Pass, batch_of
from megatrain_torch.model.stream import runtime_of

VRAM = "800MiB"              # with the CPU device's own half a GiB


def model(dtype: torch.dtype = torch.bfloat16, **more: Any) -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    shape = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4, vocab_size=128)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape | more)).to(dtype)


def batch(sequences: int, seq: int, number: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 128, (sequences, seq), generator=torch.Generator().manual_seed(number))
    return {"input_ids": ids, "labels": ids}


class Loop:
    """README's. Each step is a list of (sequences, seq) of its micro-batches."""

    def __init__(self, streamed: torch.nn.Module, **adam: Any) -> None:
        self.model, self.number = streamed, 0
        self.opt = mt.AdamW(streamed.parameters(), lr=1e-3, max_grad_norm=1.0, **adam)

    def step(self, *batches: tuple[int, int]) -> list[str]:
        said = []
        for b in batches:
            self.number += 1
            loss = self.model(**batch(*b, self.number)).loss
            loss.backward()
            said.append(float(loss.detach()).hex())
        self.opt.step()
        self.opt.zero_grad()
        return [*said, self.opt.grad_norm.hex()]

    @property
    def planning(self) -> planning.Planning:
        return runtime_of(self.model).planning

    def weights(self) -> list[torch.Tensor]:
        return [p.detach().clone() for p in self.model.parameters()]


def same(a: Loop, b: Loop) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.weights(), b.weights()))


STEPS = [[(2, 16)], [(2, 16)], [(2, 16), (2, 16)], [(2, 16)] * 3, [(3, 16)] * 2, [(1, 80)], [(1, 300)] * 2, [(2, 16)]]


def replan(monkeypatch: pytest.MonkeyPatch, change: Callable[..., mt.Plan]) -> None:
    """From now on plans are what `change` makes of mt.plan's, by what was asked for."""
    monkeypatch.setattr(planning, "plan", lambda *args, **asked: change(mt.plan(*args, **asked), **asked))


def refuse_plans(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def plan(*args: Any, **kwargs: Any) -> mt.Plan:
        raise error

    monkeypatch.setattr(planning, "plan", plan)


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    """What plans are given in turn, in the place of their own; and then their own. Until then nothing fits with units
    where they are, so that they move."""
    wanted: list[dict[str, Any]] = []

    def plan(*args: Any, **kwargs: Any) -> mt.Plan:
        if isinstance(kwargs["homes"], dict) and wanted:
            raise mt.MegatrainError("units are to move")
        found = mt.plan(*args, **kwargs)
        change = wanted.pop(0) if wanted else {}
        homes = dict(zip(found.homes, change.pop("homes", found.homes.values())))
        modes = {name: change.get("modes", mode) for name, mode in found.activations.items()}
        return dataclasses.replace(found, homes=homes, activations=modes, slots=change.get("slots", found.slots))

    monkeypatch.setattr(planning, "plan", plan)
    yield wanted


HOMES = {
    "all stream": ["ram"] * 7, "all live there": ["vram"] * 7, "ends live there": ["vram", *["ram"] * 5, "vram"],
    "some come and leave": ["arrive", "arrive", "ram", "vram", "ram", "ram", "vram"],
    "some go through": ["ram", "through", "ram", "through", "vram", "ram", "through"],
}


TURNS = [list(HOMES), list(reversed(HOMES)), ["some come and leave", "some go through"] * 2, ["all live there", "all stream"] * 2]


# Each way to turn by one kind of layers, in turn; by both with MEGATRAIN_FULL.
@pytest.mark.parametrize("turns, compute", [
    (t, c) for i, t in enumerate(TURNS) for j, c in enumerate(["eager", "fused"]) if parity.FULL or (i + j) % 2],
    ids=lambda v: v if isinstance(v, str) else f"{v[0]} first, {len(v)}")
def test_units_move_with_all_that_they_have(compute: str, turns: list[str], chosen: list[dict[str, Any]]) -> None:
    """To every home from every home: between steps, between micro-batches, with sums, states and clipping."""
    plain = Loop(mt.stream(model(), "cpu", compute=compute, plan={"activations": "saved"}))
    want = [plain.step(*s) for s in STEPS]
    chosen += [{"homes": HOMES[t], "modes": "saved", "slots": 2 + i % 3} for i, t in enumerate(turns)]
    moved = Loop(mt.stream(model(), "cpu", compute=compute, vram=VRAM))
    assert [moved.step(*s) for s in STEPS] == want and same(plain, moved)
    assert moved.planning.made >= min(len(turns), 4), "plans were not made: this test moves nothing"


@pytest.mark.parametrize("states", ["8bit", "8bit-sr"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.bfloat16], ids=str)
def test_states_of_every_format_move(states: str, dtype: torch.dtype, chosen: list[dict[str, Any]]) -> None:
    plain = Loop(mt.stream(model(dtype), "cpu", states=states))
    want = [plain.step(*s) for s in STEPS[:5]]
    chosen += [{"homes": HOMES[t]} for t in ("all live there", "some come and leave", "all stream")]
    moved = Loop(mt.stream(model(dtype), "cpu", vram=VRAM, states=states))
    assert [moved.step(*s) for s in STEPS[:5]] == want and same(plain, moved)


def test_the_first_plan_is_the_one_that_would_have_been_given() -> None:
    own = model()
    plan = mt.plan(own, tokens=32, seq=16, micro=1, vram=VRAM, compute="eager", machine="cpu")
    given = Loop(mt.stream(own, "cpu", plan=plan))
    found = Loop(mt.stream(model(), "cpu", vram=VRAM))
    assert [given.step((2, 16)) for _ in range(3)] == [found.step((2, 16)) for _ in range(3)] and same(given, found)
    again = found.planning.plan
    assert (again.homes, again.activations, again.slots, again.tokens) == (plan.homes, plan.activations, plan.slots, 32)
    assert found.planning.made == 1


def test_tokens_and_seq_plan_at_once() -> None:
    streamed = mt.stream(model(), "cpu", tokens=64, seq=16, vram=VRAM)
    assert runtime_of(streamed).planning.plan.tokens == 64
    loop = Loop(streamed)
    loop.step((4, 16))
    assert loop.planning.made == 1, "that was planned for"
    loop.step((8, 16))
    assert loop.planning.longest() == 128, "that was not"


@pytest.mark.parametrize("given, said", [
    ({"tokens": 64}, "go together"), ({"seq": 16}, "go together"), ({"tokens": 65, "seq": 16}, "whole number"),
    ({"tokens": 64, "seq": 16, "plan": {"slots": 2}}, "give one of the two"),
    ({"states": "8bit", "plan": {"states": "fp32"}}, "give one of the two"), ({"states": "9bit"}, "9bit"),
])
def test_arguments_that_make_no_sense_are_refused(given: dict[str, Any], said: str) -> None:
    own = model()
    with pytest.raises(mt.MegatrainError, match=said):
        mt.stream(own, "cpu", **given)
    assert type(own.lm_head.weight) is torch.nn.Parameter


def test_longer_passes_run_with_units_where_they_are() -> None:
    """Lengths are rounded up to steps; each is asked for once, and nothing moves."""
    loop = Loop(mt.stream(model(), "cpu", vram=VRAM))
    for seq in (64, 65, 70, 76, 77, 64, 300):
        loop.step((1, seq))
    assert loop.planning.made == 1 and loop.planning.plan.tokens == 64
    assert sorted(loop.planning._plans) == [64, 128, 320] and "up to 320" in mt.explain(loop.model)


def test_units_move_where_a_longer_pass_is_much_slower_with_them_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = []

    replan(monkeypatch, lambda found, homes, **_: dataclasses.replace(
        found, seconds=found.seconds * (slow[0] if isinstance(homes, dict) else 1)))
    for factor, made in ((1.02, 1), (1.2, 2)):
        slow[:] = [factor]
        loop = Loop(mt.stream(model(), "cpu", vram=VRAM))
        loop.step((2, 16))
        loop.step((4, 16))
        assert loop.planning.made == made


@pytest.fixture
def fits_50_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """mt.plan refuses a step of more."""
    def plan(*args: Any, tokens: int, **kwargs: Any) -> mt.Plan:
        if tokens > 50:
            raise mt.MegatrainError("too much")
        return mt.plan(*args, tokens=tokens, **kwargs)

    monkeypatch.setattr(planning, "plan", plan)


def test_where_a_grade_above_does_not_fit_the_pass_itself_is_planned_for(fits_50_tokens: None) -> None:
    loop = Loop(mt.stream(model(), "cpu", vram=VRAM))
    loop.step((2, 16))
    loop.step((2, 23))
    assert loop.planning.longest() == 46
    with pytest.raises(mt.MegatrainError, match="too much"):
        loop.step((2, 30))


class Costly:
    """Plans whose seconds are those of a machine where units on the device take the room of what long passes keep: a
    pass of n tokens takes n; the host takes 20 for each unit there; a pass beyond what the plan that chose the homes
    was for takes a quarter more."""

    def __init__(self) -> None:
        self.asked = 0

    def __call__(self, *args: Any, tokens: int, homes: Any, **kwargs: Any) -> mt.Plan:
        self.asked += 1
        found = mt.plan(*args, tokens=tokens, homes=homes, **kwargs)
        if not isinstance(homes, dict):
            there = 7 - min(tokens // 40, 7)
            homes = dict(zip(found.homes, ["vram"] * there + ["ram"] * (7 - there)))
        away = sum(h == "ram" for h in homes.values())
        seconds = max(tokens * (1.02 if tokens > 40 * (away + 1) else 1.0), 20.0 * away)
        return dataclasses.replace(found, homes=homes, seconds=seconds)


def test_units_move_once_for_lengths_that_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first pass is the longest; after some steps units are where they are best for the others, and all fit."""
    costly = Costly()
    monkeypatch.setattr(planning, "plan", costly)
    loop = Loop(mt.stream(model(), "cpu", vram=VRAM))
    plain = Loop(mt.stream(model(), "cpu"))
    draw = torch.Generator().manual_seed(0)
    rows = [16, *torch.randint(2, 17, (29,), generator=draw).tolist()]
    for n, r in enumerate(rows):
        assert loop.step((r, 16)) == plain.step((r, 16))
        assert loop.planning.made == 1 + (n >= 7)
    assert same(loop, plain) and list(loop.planning.plan.homes.values()).count("vram") == 3
    before = costly.asked
    for r in rows:
        loop.step((r, 16))
    assert costly.asked == before and loop.planning.made == 2, "all lengths are known"


def test_a_plan_with_units_where_another_has_them() -> None:
    """Of as many tokens it is that plan; of others only what layers keep differs."""
    asked = dict(seq=1024, micro=1, machine="rtx4090-64g", compute="fused", use_cache=False)
    with torch.device("meta"):
        own = model(hidden_size=2048, intermediate_size=8192, num_hidden_layers=24, vocab_size=32000)
    first = mt.plan(own, tokens=8192, **asked)
    again = mt.plan(own, tokens=8192, homes=first.homes, slots=first.slots, **asked)
    assert dataclasses.asdict(again) == dataclasses.asdict(first) and len(set(first.homes.values())) > 1
    longer = mt.plan(own, tokens=32768, homes=first.homes, slots=first.slots, **asked)
    assert longer.homes == first.homes and longer.activations != first.activations
    with pytest.raises(mt.MegatrainError, match="at these homes"):
        mt.plan(own, tokens=1 << 22, homes=first.homes, **asked)
    with pytest.raises(mt.MegatrainError, match="homes='nowhere'"):
        mt.plan(own, tokens=8192, homes=first.homes | {"model.norm": "nowhere"}, **asked)


def test_a_run_of_many_lengths_goes_on_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def kept(loop: Loop) -> set[str]:
        return {w.mode for w in runtime_of(loop.model).windows if w.fused is not None}

    replan(monkeypatch, lambda found, tokens, **_: dataclasses.replace(
        found, activations=dict.fromkeys(found.activations, "replay" if tokens > limit[0] else "saved")))
    limit = [64]
    first = Loop(mt.stream(model(), "cpu", vram=VRAM, compute="fused"))
    for rows in (8, 2, 4):
        first.step((rows, 16))
    mt.save(first.model, first.opt, tmp_path / "c")
    want = [first.step((rows, 16)) for rows in (4, 8, 2, 3)]
    limit = [1 << 20]                                        # today there is more room
    again = Loop(mt.stream(model(), "cpu", vram=VRAM, compute="fused"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mt.load(again.model, again.opt, tmp_path / "c")
    again.number = 3
    for rows, one, keep in zip((4, 8, 2, 3), want, ("saved", "replay", "saved", "saved")):
        assert again.step((rows, 16)) == one and kept(again) == {keep}
    assert same(first, again)


def test_shorter_passes_keep_more(monkeypatch: pytest.MonkeyPatch) -> None:
    replan(monkeypatch, lambda found, tokens, **_: dataclasses.replace(found, activations=dict.fromkeys(
        found.activations, "replay" if tokens > 64 else "attention" if tokens > 32 else "saved")))
    loop = Loop(mt.stream(model(), "cpu", vram=VRAM, compute="fused"))
    seen = []
    for rows in (8, 2, 4, 8, 3, 1, 2):
        loop.step((rows, 16))
        seen.append({w.mode for w in runtime_of(loop.model).windows if w.fused is not None})
    assert seen == [{"replay"}, {"saved"}, {"attention"}, {"replay"}, {"attention"}, {"saved"}, {"saved"}]
    assert loop.planning.made == 1


def test_what_does_not_fit_is_refused_before_the_first_pass_and_nothing_was_changed() -> None:
    loop = Loop(mt.stream(model(), "cpu", vram="1.5MiB"))
    before = loop.weights()
    with pytest.raises(mt.MegatrainError, match="does not fit"):
        loop.step((64, 256))
    assert all(torch.equal(a, b) for a, b in zip(before, loop.weights()))
    loop.step((1, 8))


def test_evaluation_and_generation_come_before_training() -> None:
    loop = Loop(mt.stream(model(), "cpu", vram=VRAM))
    with torch.no_grad():
        loop.model(**batch(8, 64, 1))
    loop.model.generate(batch(1, 8, 2)["input_ids"], max_new_tokens=4, do_sample=False)
    assert loop.planning.plan is None and "first forward" in mt.explain(loop.model)
    loop.step((2, 16))
    assert loop.planning.plan.tokens == 32
    assert "planned for 32 tokens a step in sequences of 16, 1 micro-batch" in mt.explain(loop.model)


def test_forwards_that_are_dropped_do_not_add_up() -> None:
    """Evaluation that forgets no_grad."""
    loop = Loop(mt.stream(model(), "cpu", vram=VRAM))
    for i in range(5):
        loop.model(**batch(2, 16, i))
    loop.step((2, 16))
    assert loop.planning.plan.tokens // loop.planning.plan.micro == 32


def test_a_step_in_a_backward_moves_nothing() -> None:
    plans, calls = object.__new__(planning.Planning), []
    plans._seen = planning.Seen()
    plans._looks, plans.runtime = list(planning.LOOKS), SimpleNamespace(homes=SimpleNamespace(on_disk=[]))
    plans._steps, plans._compare_homes = 1000, lambda: calls.append(True)
    x = torch.ones(1, requires_grad=True)
    x.register_post_accumulate_grad_hook(lambda _: plans.stepped())
    x.sum().backward()
    assert not calls
    plans.stepped()
    assert calls


def test_nothing_moves_under_a_graph() -> None:
    """Two forwards, one backward: they are planned for, together, when both are gone."""
    loop = Loop(mt.stream(model(), "cpu", vram=VRAM))
    plain = Loop(mt.stream(model(), "cpu"))
    for one in (loop, plain):
        loss = one.model(**batch(2, 16, 1)).loss + one.model(**batch(4, 16, 2)).loss
        loss.backward()
        one.opt.step()
        one.opt.zero_grad()
    made = loop.planning.made
    assert loop.step((2, 16)) == plain.step((2, 16)) and same(loop, plain) and made == 1
    assert loop.planning.longest() == 2 * 4 * 16 and loop.planning.plan.micro == 1


def test_graphs_that_were_only_held_do_not_refuse_what_fits(fits_50_tokens: None) -> None:
    """Losses of an evaluation that forgot no_grad, in a list."""
    loop = Loop(mt.stream(model(), "cpu", vram=VRAM))
    held = [loop.model(**batch(1, 16, i)).loss for i in range(6)]
    del held
    loop.step((2, 16))
    assert loop.planning.longest() == 32 and loop.planning._seen.most.tokens == 32


@pytest.mark.parametrize("skipped", ["by a scaler", "not finite", "by hand"])
def test_a_step_that_is_left_out_is_no_micro_batch(skipped: str) -> None:
    loop = Loop(mt.stream(model(), "cpu", vram=VRAM))
    for _ in range(3):
        loss = loop.model(**batch(2, 16, 1)).loss
        (loss * math.inf if skipped == "not finite" else loss).backward()
        if skipped == "not finite":
            loop.opt.step()
        loop.opt.zero_grad()
    assert loop.planning.made == 1 and loop.planning.plan.micro == 1


def test_micro_batches_are_planned_for_as_the_last_step_had_them() -> None:
    """Two as soon as there is a second, whose gradients need room; the rest at the next step."""
    loop = Loop(mt.stream(model(), "cpu", vram=VRAM))
    plain = Loop(mt.stream(model(), "cpu"))
    seen = []
    for n in (5, 5, 3, 5, 6, 1):
        assert loop.step(*[(2, 16)] * n) == plain.step(*[(2, 16)] * n)
        seen.append((loop.planning.made, loop.planning.plan.micro))
    assert seen == [(2, 2), (3, 5), (3, 5), (3, 5), (3, 5), (4, 6)] and same(loop, plain)


@pytest.mark.parametrize("torchs", [True, False])
def test_other_optimizers_find_all_in_host_memory(torchs: bool) -> None:
    def run(**limits: Any) -> tuple[list[torch.Tensor], set[str], int]:
        streamed = mt.stream(model(torch.float32), "cpu", **limits)
        opt = torch.optim.SGD(streamed.parameters(), lr=0.1)
        for i in range(6):
            if i == 3 and not torchs:
                opt = mt.AdamW(streamed.parameters(), lr=1e-3)
            update(streamed(**batch(2, 16, i)).loss, opt)
        rt = runtime_of(streamed)
        return [p.detach().clone() for p in streamed.parameters()], set(rt.room.asked.homes), \
            rt.planning.made if limits else 0

    want, _, _ = run()
    got, homes, made = run(vram=VRAM)
    assert all(torch.equal(a, b) for a, b in zip(want, got))
    assert homes == {"ram"} and made == 1 if torchs else made == 2


def test_states_on_disk_are_laid_out_with_the_first_plan(tmp_path: Path, chosen: list[dict[str, Any]],
                                                         monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Loop(mt.stream(model(), "cpu"))
    want = [plain.step(*s) for s in STEPS[:4]]
    homes = ["vram", "disk", "disk+weights", "ram", "disk+weights", "ram", "disk"]
    chosen.append({"homes": homes})
    loop = Loop(mt.stream(model(), "cpu", vram=VRAM, nvme=tmp_path))
    assert not list(tmp_path.iterdir()), "before its plan nothing is on disk"
    got = [loop.step(*s) for s in STEPS[:4]]              # the third has two micro-batches
    assert got == want and same(plain, loop) and runtime_of(loop.model).homes.on_disk == {1, 2, 4, 6}
    assert loop.planning.plan.micro == 2 and list(loop.planning.plan.homes.values()) == homes
    refuse_plans(monkeypatch, mt.MegatrainError("too much"))
    with pytest.warns(UserWarning, match="cannot move"):
        assert loop.step((8, 16)) == plain.step((8, 16))
    assert loop.step((9, 16)) == plain.step((9, 16)) and same(plain, loop)
    mt.unstream(loop.model)
    assert not list(tmp_path.iterdir())


def test_a_run_that_goes_on_keeps_what_it_kept(tmp_path: Path, chosen: list[dict[str, Any]]) -> None:
    first = Loop(mt.stream(model(), "cpu", compute="fused", vram=VRAM))
    chosen.append({"modes": "replay"})
    first.step((2, 16))
    mt.save(first.model, first.opt, tmp_path / "c")
    want = [first.step((2, 16)) for _ in range(2)]
    again = Loop(mt.stream(model(), "cpu", compute="fused", vram=VRAM))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mt.load(again.model, again.opt, tmp_path / "c")
    again.number = 1
    assert [again.step((2, 16)) for _ in range(2)] == want and same(first, again)
    kept = runtime_of(again.model).keeps.fused()
    assert kept == runtime_of(first.model).keeps.fused() and set(kept.values()) == {"replay"}
    other = Loop(mt.stream(model(), "cpu", compute="fused", vram=VRAM))
    mt.load(other.model, None, tmp_path / "c")               # weights alone: it is no run that goes on
    other.step((2, 16))
    assert runtime_of(other.model).keeps.fused() != kept


def test_what_a_run_kept_is_chosen_anew_where_it_does_not_fit(tmp_path: Path, chosen: list[dict[str, Any]],
                                                              monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "SLACK", 0)
    first = Loop(mt.stream(model(), "cpu", compute="fused", vram=VRAM))
    first.step((2, 16))
    mt.save(first.model, first.opt, tmp_path / "c")
    assert set(runtime_of(first.model).keeps.fused().values()) == {"saved"}
    again = Loop(mt.stream(model(), "cpu", compute="fused", vram=VRAM))
    chosen.append({"modes": "replay"})
    mt.load(again.model, again.opt, tmp_path / "c")
    again.step((2, 16))
    assert set(runtime_of(again.model).keeps.fused().values()) == {"replay"}


def test_a_save_under_way_is_over_before_anything_moves(tmp_path: Path, chosen: list[dict[str, Any]]) -> None:
    chosen += [{"homes": HOMES["all live there"]}, {"homes": HOMES["all stream"]}]
    for name, limits in (("moved", {"vram": VRAM}), ("plain", {})):
        loop = Loop(mt.stream(model(), "cpu", **limits))
        loop.step((2, 16))
        saving = mt.save(loop.model, loop.opt, tmp_path / name, asynchronous=True)
        loop.step((4, 16))
        saving.wait()
    a, b = (sorted((tmp_path / name).rglob("*.safetensors")) for name in ("moved", "plain"))
    assert len(a) == len(b) > 0 and all(x.read_bytes() == y.read_bytes() for x, y in zip(a, b))


def test_hands_on_gradients_and_states_survive_a_move(chosen: list[dict[str, Any]]) -> None:
    """Views that a user has kept, of weights, gradients and states, are of the same parameter afterwards."""
    def run(**limits: Any) -> list[torch.Tensor]:
        loop = Loop(mt.stream(model(torch.float32), "cpu", **limits))
        loop.step((2, 16))
        loop.model(**batch(2, 16, 9)).loss.backward()
        p = loop.model.model.layers[1].mlp.up_proj.weight
        grad, moment = p.grad.clone(), loop.opt.state[p]["exp_avg"].clone()
        loop.model(**batch(8, 16, 10)).loss.backward()       # a second micro-batch, and a longer one
        found = [grad, moment, p.grad.clone(), loop.opt.state[p]["exp_avg"].clone(), p.detach().clone()]
        loop.opt.step()
        return [*found, loop.opt.state[p]["exp_avg"].clone(), p.detach().clone()]

    for turn in ("all live there", "some come and leave", "some go through"):
        chosen += [{"homes": HOMES["all stream"]}, {"homes": HOMES[turn]}]
        assert all(torch.equal(a, b) for a, b in zip(run(), run(vram=VRAM)))


def test_lora_and_frozen_units_move(chosen: list[dict[str, Any]]) -> None:
    def run(**limits: Any) -> Loop:
        own = model()
        for p in own.parameters():
            p.requires_grad_(p.dim() < 2)
        own.model.layers[2].requires_grad_(False)
        loop = Loop(mt.stream(own, "cpu", **limits))
        for s in STEPS[:4]:
            loop.step(*s)
        own.model.layers[2].requires_grad_(True)             # and trained again, after it has moved
        own.model.layers[0].requires_grad_(False)
        for s in STEPS[3:6]:
            loop.step(*s)
        return loop

    chosen += [{"homes": HOMES[t]} for t in ("all live there", "some come and leave", "all stream", "all live there")]
    assert same(run(), run(vram=VRAM))


@pytest.mark.parametrize("limit, left", [(100, 100 - 2), (140, None)])
def test_what_others_have_of_the_device_is_not_planned_with_and_counts_once(limit: int, left: int | None,
                                                                           monkeypatch: pytest.MonkeyPatch) -> None:
    """It is missing from the device, not from the process's limit; the user's own tensors are part of that."""
    gib, machine = 1 << 30, mt.plan(model(), tokens=32, seq=16, machine="h200-128g").machine
    monkeypatch.setattr(planning, "resolve", lambda name: machine)
    total = machine.vram_bytes
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (total - 50 * gib, total))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 6 * gib)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 5 * gib)
    core = SimpleNamespace(device_bytes=lambda: 20 * gib)
    rt = SimpleNamespace(is_cuda=True, device=torch.device("cuda:7"), core=core, cap=None, ranks=None,
                         ring=SimpleNamespace(slots=[SimpleNamespace(nbytes=3 * gib - 512)]))
    rt.cap = Cap(rt.device, core.device_bytes)
    found = planning.Planning(rt, SimpleNamespace(vram=limit * gib, plan=None))
    others = (50 - 6 - 20 - 1) * gib                         # 1 GiB may be this process's context
    assert found._left() == (total - others - 2 * gib if left is None else left * gib)


IDS, WIDE = torch.zeros(3, 5, dtype=torch.long), torch.zeros(2, 7, 64)


@pytest.mark.parametrize("args, kwargs, found", [
    ((IDS,), {}, (3, 5)), ((), {"input_ids": IDS, "labels": IDS}, (3, 5)), ((WIDE,), {}, (2, 7)),
    ((), {"inputs_embeds": WIDE, "attention_mask": IDS}, (2, 7)), (({"input_ids": IDS},), {}, (3, 5)),
    ((), {"input_ids": IDS, "decoder_input_ids": IDS[:, :4]}, (3, 5)), ((IDS[0],), {}, (1, 5)),
    ((torch.zeros(2, 3, 8, 8),), {}, None), ((), {}, None), ((None, 3), {}, None), ((IDS.bool(),), {}, None),
])
def test_tokens_are_read_from_what_a_model_is_given(args: Any, kwargs: Any, found: tuple[int, int] | None) -> None:
    records = [SimpleNamespace(shape=shape) for shape in ((64,), (16, 64), (7, 16))]
    assert batch_of(args, kwargs, records) == (None if found is None else Pass(*found))


@pytest.mark.parametrize("error", [ZeroDivisionError("of a width"), NotImplementedError("on the meta device")], ids=repr)
def test_a_model_that_a_plan_cannot_read_trains_without_one(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Loop(mt.stream(model(), "cpu"))
    refuse_plans(monkeypatch, error)
    loop = Loop(mt.stream(model(), "cpu", vram=VRAM))
    with pytest.warns(UserWarning, match=f"cannot read the model .{type(error).__name__}: {error}"):
        got = [loop.step((2, 16))]
    assert [*got, loop.step((4, 16))] == [plain.step((2, 16)), plain.step((4, 16))] and same(loop, plain)


def test_without_mt_adamw_a_refusal_is_no_obstacle(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan counts AdamW's states."""
    asked = []

    def plan(*args: Any, **kwargs: Any) -> mt.Plan:
        asked.append(kwargs["tokens"])
        raise mt.MegatrainError("it does not fit:\nno")

    monkeypatch.setattr(planning, "plan", plan)
    streamed = mt.stream(model(torch.float32), "cpu", vram=VRAM)
    opt = torch.optim.SGD(streamed.parameters(), lr=0.1)
    for number in (1, 2):
        streamed(**batch(2, 16, number)).loss.backward()
        opt.step()
    assert "no plan, without mt.AdamW: it does not fit" in mt.explain(streamed) and len(asked) == 1
    mt.AdamW(streamed.parameters())
    with pytest.raises(mt.MegatrainError, match=r"plan=\{\}"):
        streamed(**batch(2, 16, 1))


def test_a_model_whose_inputs_name_no_tokens_is_not_planned_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then nobody but the optimizer asks whether its states fit."""
    streamed = mt.stream(torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Conv2d(4, 4, 3)), "cpu", vram=VRAM)
    opt = mt.AdamW(streamed.parameters())
    assert "auto" in mt.explain(streamed), "a plan may come"
    streamed(torch.randn(2, 3, 8, 8)).sum().backward()
    rt = runtime_of(streamed)
    assert rt.planning.plan is None and "tokens=, seq=" in mt.explain(streamed)
    assert "auto" not in mt.explain(streamed) and "saved" in mt.explain(streamed)
    rt.room.limit = 100
    with pytest.raises(mt.MegatrainError, match="host="):
        opt.step()
    rt.room.limit = None
    opt.step()


def test_weights_beyond_the_limit_of_the_host_live_on_the_device_until_there_is_a_plan() -> None:
    nbytes = sum(p.nbytes for p in model().parameters())
    streamed = mt.stream(model(), "cpu", vram=VRAM, host=nbytes * 2 // 3)
    homes = runtime_of(streamed).room.asked.homes
    assert set(homes) == {"ram", "vram"} and homes[-1] == "vram"
    with pytest.raises(mt.MegatrainError, match="host="):
        mt.stream(model(), "cpu", vram="600KiB", host=nbytes // 3)


def test_a_run_that_goes_on_is_planned_for_before_its_states_come(tmp_path: Path, chosen: list[dict[str, Any]]) -> None:
    """So that they can go to disk; else their room is asked for."""
    homes = ["vram", "disk", "disk+weights", "ram", "disk+weights", "ram", "disk"]
    first = Loop(mt.stream(model(), "cpu", vram=VRAM))
    for _ in range(2):
        first.step((2, 16), (2, 16))
    mt.save(first.model, first.opt, tmp_path / "c")
    want = [first.step((2, 16), (2, 16)) for _ in range(2)]
    (tmp_path / "drive").mkdir()
    again = Loop(mt.stream(model(), "cpu", vram=VRAM, nvme=tmp_path / "drive"))
    chosen.append({"homes": homes})
    mt.load(again.model, again.opt, tmp_path / "c")
    rt = runtime_of(again.model)
    assert rt.homes.on_disk == {1, 2, 4, 6} and (again.planning.plan.tokens, again.planning.plan.micro) == (64, 2)
    again.number = 4
    assert [again.step((2, 16), (2, 16)) for _ in range(2)] == want and same(first, again) and again.planning.made == 1


def test_states_that_are_in_memory_are_planned_for_without_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = []

    replan(monkeypatch, lambda found, nvme, **_: given.append(nvme) or found)
    loop = Loop(mt.stream(model(), "cpu", vram=VRAM, nvme=tmp_path))
    plain = Loop(mt.stream(model(), "cpu"))
    for one in (loop, plain):
        one.opt.load_state_dict(one.opt.state_dict())
        for p in one.model.parameters():
            p.grad = torch.ones_like(p)
        one.opt.step()
        one.opt.zero_grad()
    assert loop.step((2, 16)) == plain.step((2, 16)) and same(loop, plain)
    assert given == [None] and not list(tmp_path.iterdir())


# ---- models of other kinds ----

SHAPE = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4,
             vocab_size=128)


def mixture() -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**SHAPE, num_local_experts=4))


def dense() -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE)).bfloat16()


@pytest.mark.parametrize("compute", ["eager", "fused"])
def test_a_mixture_is_planned_for_at_its_first_pass(compute: str) -> None:
    """Its router's weight is read for a plan, while the forward that asks sees weights on the device."""
    streamed = mt.stream(mixture(), "cpu", compute=compute, vram=VRAM)
    mt.AdamW(streamed.parameters())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        streamed(**batch(2, 16, 0)).loss.backward()
    found = runtime_of(streamed).planning.plan
    given = mt.plan(mixture(), tokens=32, seq=16, vram=VRAM, compute=compute, machine="cpu")
    assert (found.homes, found.activations, found.slots) == (given.homes, given.activations, given.slots)


def test_a_plan_is_asked_for_as_outside_of_the_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is found of a router is kept for later models, so it must not depend on the autocast of a loop."""
    def plan(own: torch.nn.Module, **kwargs: Any) -> mt.Plan:
        weight = own.lm_head.weight
        seen.append((type(weight), (torch.ones(2, 2) @ torch.ones(2, 2)).dtype))
        return mt.plan(own, **kwargs)

    seen: list[Any] = []
    monkeypatch.setattr(planning, "plan", plan)
    streamed = mt.stream(mixture(), "cpu", vram=VRAM)
    outside = type(streamed.lm_head.weight)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        streamed(**batch(2, 16, 0)).loss.backward()
    assert seen == [(outside, torch.float32)] and type(streamed.lm_head.weight) is outside


@pytest.mark.parametrize("states", ["fp32", "8bit"])
@pytest.mark.parametrize("first", ["ram", "vram"])
def test_states_of_parameters_that_are_not_trained_now_move(first: str, states: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Adapters that take turns: those that rest have states, and room for them is asked for where they go."""
    def plan(*args: Any, homes: Any, **kwargs: Any) -> mt.Plan:
        if isinstance(homes, dict):
            raise mt.MegatrainError("units are to move")
        found = mt.plan(*args, homes=homes, **kwargs)
        asked.append("ram" if asked and asked[-1] == "vram" else "vram" if asked else first)
        return dataclasses.replace(found, homes=dict.fromkeys(found.homes, asked[-1]))

    def run(**limits: Any) -> list[torch.Tensor]:
        streamed = mt.stream(dense().requires_grad_(False), "cpu", **limits)
        turns = [[getattr(layer.self_attn, name).weight for layer in streamed.model.layers] for name in ("q_proj", "o_proj")]
        opt = mt.AdamW([p for turn in turns for p in turn], lr=1e-2, states=states)
        for number in range(8):
            for turn in (0, 1):
                for p in turns[turn]:
                    p.requires_grad_(turn == number // 2 % 2)
            update(streamed(**batch(2 + number, 16, number)).loss, opt)
        return [p.detach().clone() for p in streamed.parameters()]

    asked: list[str] = []
    monkeypatch.setattr(planning, "plan", plan)
    assert all(torch.equal(a, b) for a, b in zip(run(), run(vram=VRAM))) and len(asked) > 4


# ---- a plan that cannot be put into force, wherever that fails, leaves a model that trains on, with the same bits ----

CALLS = ("close_slots", "dismiss", "unsettle", "through", "open_slots", "settle", "invite", "take")
AFTER = [[(2, 16)], [(2, 16), (4, 16)], [(2, 16)], [(4, 16), (2, 16)]]


class Failing:
    """An engine whose n-th call of those that move units fails, before or after it has been done."""

    def __init__(self, core: Any, n: int, after: bool, error: type[BaseException]) -> None:
        self.core, self.n, self.after, self.error, self.names = core, n, after, error, []

    def __getattr__(self, name: str) -> Any:
        call = getattr(self.core, name)
        return (lambda *args, **kwargs: self._called(name, call, *args, **kwargs)) if name in CALLS else call

    def _called(self, name: str, call: Any, *args: Any, **kwargs: Any) -> Any:
        self.names.append(name)
        fails = len(self.names) == self.n
        if not fails or self.after:
            call(*args, **kwargs)
        if fails:
            raise self.error(f"call {self.n}: {name}")


def drives(rt: Any, core: Any) -> None:
    """Whoever moves units asks this engine."""
    rt.core = rt.homes.core = rt.ring.core = core


@pytest.fixture(scope="module")
def plain() -> tuple[Loop, list[list[str]]]:
    loop = Loop(mt.stream(model(), "cpu"))
    return loop, [loop.step(*s) for s in AFTER]


def calls(homes: list[str], then: list[str], chosen: list[dict[str, Any]]) -> int:
    """Of one move between them."""
    chosen += [{"homes": homes}, {"homes": then}]
    loop = Loop(mt.stream(model(), "cpu", vram=VRAM))
    loop.step(*AFTER[0])
    rt = runtime_of(loop.model)
    counting = Failing(rt.core, -1, False, mt.MegatrainError)
    drives(rt, counting)
    loop.step(*AFTER[1][:1], *AFTER[1][:1])
    drives(rt, counting.core)
    chosen.clear()
    return len(counting.names)


def fails_at(n: int, after: bool, error: type[BaseException], homes: list[str], then: list[str],
             chosen: list[dict[str, Any]], plain: tuple[Loop, list[list[str]]]) -> None:
    chosen += [{"homes": homes}, {"homes": then}, {"homes": then}]
    loop = Loop(mt.stream(model(), "cpu", vram=VRAM))
    assert loop.step(*AFTER[0]) == plain[1][0]
    rt = runtime_of(loop.model)
    whole = rt.core
    loop.model.zero_grad()
    said, first = [], True
    for b in AFTER[1]:
        loop.number += 1
        if not first:                                        # the second micro-batch, and a longer one, moves
            drives(rt, Failing(whole, n, after, error))
            with pytest.raises(error, match=f"call {n}"):
                loop.model(**batch(*b, loop.number))
            drives(rt, whole)
        loss = loop.model(**batch(*b, loop.number)).loss     # by the plan that was, or by another try
        loss.backward()
        said.append(float(loss.detach()).hex())
        first = False
    loop.opt.step()
    loop.opt.zero_grad()
    assert [*said, loop.opt.grad_norm.hex()] == plain[1][1]
    assert [loop.step(*s) for s in AFTER[2:]] == plain[1][2:] and same(loop, plain[0])
    assert not rt.broken and rt.room.asked.homes == tuple(then)


MOVES = [("some come and leave", "some go through"), ("all stream", "all live there"),
         ("all live there", "some come and leave"), ("some go through", "all stream")]


@pytest.mark.parametrize("turn", MOVES, ids=" to ".join)
def test_every_call_of_a_move_may_fail(turn: tuple[str, str], chosen: list[dict[str, Any]],
                                       plain: tuple[Loop, list[list[str]]]) -> None:
    homes, then = (HOMES[t] for t in turn)
    every = 1 if turn == MOVES[0] else 3
    for n in range(2, calls(homes, then, chosen) + 1, every):    # the first, close_slots, changes nothing where it fails
        after, error = bool(n % 2), (mt.MegatrainError, KeyboardInterrupt)[n % 3 == 0]
        fails_at(n, after, error, homes, then, chosen, plain)
        chosen.clear()


@pytest.fixture
def no_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """How many more slots there is memory for; [] : for all."""
    left: list[int] = []
    whole = ring.Slot

    def slot(*args: Any) -> Any:
        if left and left.pop() == 0:
            raise torch.OutOfMemoryError("a slot")
        return whole(*args)

    monkeypatch.setattr(ring, "Slot", slot)
    yield left


@pytest.mark.parametrize("n", range(8))
def test_slots_that_the_device_has_no_memory_for(n: int, no_memory: list[int], chosen: list[dict[str, Any]],
                                                 plain: tuple[Loop, list[list[str]]]) -> None:
    chosen += [{"homes": HOMES[t]} for t in ("some come and leave", "all live there", "all live there")]
    loop = Loop(mt.stream(model(), "cpu", vram=VRAM))
    assert loop.step(*AFTER[0]) == plain[1][0]
    no_memory += [0, *range(1, n + 1)]
    failed = 0
    for number, s in enumerate(AFTER[1:], 1):
        try:
            got = loop.step(*s)
        except torch.OutOfMemoryError:                       # of the second micro-batch
            failed += 1
            loss = loop.model(**batch(*s[1], loop.number)).loss
            loss.backward()
            loop.opt.step()
            loop.opt.zero_grad()
            got = [plain[1][number][0], float(loss.detach()).hex(), loop.opt.grad_norm.hex()]
        assert got == plain[1][number]
    assert failed == (n < 5) and same(loop, plain[0])


def test_where_the_way_back_fails_too_the_model_refuses_to_run(chosen: list[dict[str, Any]],
                                                               monkeypatch: pytest.MonkeyPatch) -> None:
    chosen += [{"homes": HOMES["all live there"]}, {"homes": HOMES["all stream"]}]
    loop = Loop(mt.stream(model(), "cpu", vram=VRAM))
    loop.step(*AFTER[0])
    rt = runtime_of(loop.model)

    def open_slots(*args: Any) -> None:
        raise torch.OutOfMemoryError("no slots")

    monkeypatch.setattr(rt.homes, "open_slots", open_slots)
    with pytest.raises(torch.OutOfMemoryError, match="no slots"):
        loop.step((4, 16))
    for _ in range(2):
        with pytest.raises(mt.MegatrainError, match="on their way"):
            loop.step((2, 16))
