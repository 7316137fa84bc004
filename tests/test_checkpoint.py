"""Checkpoints: the same bits after a resume, wherever things were at home; nothing torn, nothing lost.

The C side is tests/c/test_shards.c and test_ledger.c; kill -9 at random moments is tests/run_kill.py.
"""
from __future__ import annotations

import io
import json
import os
import random
import re
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import doors
import parity
import pytest
import torch
from test_adamw import Dots, fed, feed, grads_for, plain_dots
from test_states import everything
from torch import Tensor, nn
from zoo import update

import megatrain_torch as mt
from megatrain_torch.checkpoint import manifest, parts
from megatrain_torch.checkpoint import save as checkpoint
from megatrain_torch.model.stream import runtime_of

BF16 = torch.bfloat16
SHAPES = [(300, 7), (257,), (64, 32), (1,), (700, 1000)]
DELAYS = {"delay_us": 300, "seed": 3}
SOME = {"layers.0": "vram", "layers.1": "arrive", "layers.2": "through", "layers.4": "disk"}
Pair = tuple[Dots, mt.AdamW]


def make(tmp_path: Path, homes: Any = "ram", states: str | None = None, dtype: torch.dtype = BF16, **plan: Any) -> Pair:
    disk = {"disk": {"buffers": 2, "buffer_bytes": 65536, "threads": 2}} if "disk" in str(homes) else {}
    plan |= {"states": states} if homes == "disk+weights" and states else {}
    model = doors.stream(plain_dots(dtype, SHAPES), device="cpu", nvme=str(tmp_path) if disk else None,
                         plan={"homes": homes, **plan, "debug": {**plan.get("debug", {}), **disk}})
    return model, mt.AdamW(model.parameters(), lr=1e-2, max_grad_norm=0.5, states=states)


def train(pair: Pair, begin: int, end: int) -> Pair:
    for step in range(begin, end):
        feed(*pair, grads_for(pair[0], step))
    return pair


def assert_same(one: Pair, other: Pair) -> None:
    a, b = everything(*one), everything(*other)
    assert a.keys() == b.keys()
    assert not [name for name in a if not torch.equal(a[name], b[name])]
    assert [int(one[1].state[p]["step"]) for p in one[0].parameters()] == \
        [int(other[1].state[p]["step"]) for p in other[0].parameters()]


def assert_has(folder: Path, want: dict[str, Tensor]) -> None:
    """The checkpoint there, c."""
    other = make(folder)
    mt.load(*other, folder / "c")
    parity.assert_same(want, everything(*other))


@pytest.fixture
def saved(tmp_path: Path) -> Iterator[Pair]:
    """One that was saved and trained on. The test's own save fails: it leaves the one before, and holds nothing back."""
    pair = train(make(tmp_path), 0, 1)
    mt.save(*pair, tmp_path / "c")
    want = everything(*pair)
    yield train(pair, 1, 2)
    assert [p.name for p in tmp_path.iterdir()] == ["c"]
    train(pair, 2, 3)
    assert_has(tmp_path, want)
    mt.save(*pair, tmp_path / "c")


# ---- the same bits ----

@pytest.mark.parametrize("states", ["fp32", "8bit-sr"])
@pytest.mark.parametrize("saved, loaded", [("ram", SOME), (SOME, "disk+weights"), ("disk+weights", "ram")],
                         ids=["ram-some", "some-weights on disk", "weights on disk-ram"])
def test_resume_gives_the_bits_of_an_uninterrupted_run(tmp_path: Path, saved: Any, loaded: Any, states: str) -> None:
    first = train(make(tmp_path, saved, states), 0, 2)
    mt.save(*first, tmp_path / "c", extra={"position": 2})
    again = train(make(tmp_path, loaded, states), 0, 1)          # it had other states
    assert mt.load(*again, tmp_path / "c") == {"position": 2}
    assert_same(first, again)
    assert_same(train(first, 2, 4), train(again, 2, 4))


@pytest.mark.parametrize("home", ["vram", "disk", "disk+weights"])
def test_updates_of_every_home_wait_for_the_copy(tmp_path: Path, home: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their gradients are home already, so they would begin at once, and the first unit's copy takes longer."""
    monkeypatch.setattr(checkpoint, "COPIERS", 1)
    monkeypatch.setattr(checkpoint, "WRITERS", 1)
    monkeypatch.setattr(checkpoint, "_check", lambda *_: None)           # which refuses to save with gradients
    model = mt.stream(plain_dots(BF16, [(2100, 2100), (70, 50)]), device="cpu", nvme=str(tmp_path),
                      plan={"homes": {"layers.1": home}})
    opt = mt.AdamW(model.parameters(), lr=1e-2)
    train((model, opt), 0, 1)
    want = everything(model, opt)
    model(grads_for(model, 1)).backward()
    saving = mt.save(model, opt, tmp_path / "c", asynchronous=True, spare=1)
    opt.step()
    saving.wait()
    mt.load(model, opt, tmp_path / "c")
    found = everything(model, opt)
    assert not [name for name in want if not torch.equal(want[name], found[name])]


@pytest.mark.parametrize("homes", ["ram", SOME, "disk+weights"], ids=["ram", "some", "weights on disk"])
def test_training_that_goes_on_does_not_change_what_is_saved(tmp_path: Path, homes: Any,
                                                             monkeypatch: pytest.MonkeyPatch) -> None:
    """With no spare memory, one slow copier, delays in every queue, and updates and writes at once."""
    monkeypatch.setattr(checkpoint, "COPIERS", 1)
    pair = train(make(tmp_path, homes, debug=DELAYS), 0, 2)
    for save in range(2):
        want = everything(*pair)
        saving = mt.save(*pair, tmp_path / "c", asynchronous=True, spare=1)
        pair[1].state[pair[0].layers[4].weight]["exp_avg"].mul_(0.5)         # before an update waits for the copy
        train(pair, 2 + save, 3 + save)
        with torch.no_grad():
            pair[0].layers[0].weight.mul_(0.5)
        saving.wait()
        assert_has(tmp_path, want)


def test_weights_on_disk_that_are_read_during_a_save_stay_until_they_were(tmp_path: Path,
                                                                          monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "COPIERS", 1)
    monkeypatch.setattr(checkpoint, "WRITERS", 1)
    plain = plain_dots(BF16, [(2100, 2100)] * 3)
    want = [p.detach().clone() for p in plain.parameters()]
    model = mt.stream(plain, device="cpu", nvme=str(tmp_path), plan={"homes": "disk+weights"})
    for _ in range(2):
        saving = mt.save(model, None, tmp_path / "c", asynchronous=True, spare=1)
        while not saving.over:
            assert all(torch.equal(p, value) for p, value in zip(model.parameters(), want))
        saving.wait()


class Dropped(nn.Module):
    """With dropout, BatchNorm's buffers, a tied weight, and a convolution in channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(12, 12), nn.BatchNorm1d(12), nn.Dropout(0.3)) for _ in range(2))
        self.head = nn.Linear(12, 12, bias=False)
        self.head.weight = self.layers[0][0].weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x).flatten(1)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def dropped(folder: Path | None = None, states: str = "fp32") -> Any:
    torch.manual_seed(7)
    model = mt.stream(Dropped(), device="cpu")
    opt = mt.AdamW(model.parameters(), lr=1e-2, max_grad_norm=1.0, states=states)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 10)
    return model, opt, scheduler, (mt.load(model, opt, folder, scheduler=scheduler) if folder is not None else 0)


def go_on(model: nn.Module, opt: mt.AdamW, scheduler: Any, begin: int, end: int) -> list[float]:
    seen = []
    for step in range(begin, end):
        for micro in range(2):
            x = torch.randn(4, 2, 4, 4, generator=torch.Generator().manual_seed(2 * step + micro))
            loss = model(x).square().mean() * (float("nan") if step == 1 else 1.0)
            loss.backward()
            seen.append(loss.item())
        opt.step()
        scheduler.step()
        opt.zero_grad()
    return [*seen, random.random(), *scheduler.get_last_lr()]


def test_scheduler_dropout_buffers_micro_batches_and_skipped_steps_resume(tmp_path: Path) -> None:
    model, opt, scheduler, _ = dropped()
    go_on(model, opt, scheduler, 0, 3)
    mt.save(model, opt, tmp_path / "c", scheduler=scheduler, extra=3)
    want = go_on(model, opt, scheduler, 3, 5)
    other, opt2, scheduler2, at = dropped(tmp_path / "c")
    assert go_on(other, opt2, scheduler2, at, 5) == want
    assert opt2.skipped_steps == opt.skipped_steps == 1
    assert not [k for k, v in model.state_dict().items() if not torch.equal(v, other.state_dict()[k])]


def test_other_optimizers_resume(tmp_path: Path) -> None:
    model = mt.stream(plain_dots(torch.float32, SHAPES), device="cpu")
    opt = torch.optim.Adagrad(model.parameters(), lr=0.1)
    feed(model, opt, grads_for(model, 0))
    mt.save(model, opt, tmp_path / "c")
    other = mt.stream(plain_dots(torch.float32, SHAPES), device="cpu")
    opt2 = torch.optim.Adagrad(other.parameters(), lr=0.2)
    mt.load(other, opt2, tmp_path / "c")
    for pair in ((model, opt), (other, opt2)):
        feed(*pair, grads_for(model, 1))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters()))


# ---- other types and formats ----

@pytest.mark.parametrize("kind, states, to_kind, to_states", [
    (BF16, "fp32", torch.float32, "fp32"), (torch.float32, "fp32", BF16, "fp32"), (torch.float16, "fp32", BF16, "fp32"),
    (BF16, "8bit-lo8", BF16, "fp32"), (BF16, "8bit-sr", BF16, "8bit"), (BF16, "8bit", torch.float32, "8bit")])
def test_formats_that_hold_as_much_take_the_same_values(tmp_path: Path, kind: torch.dtype, states: str,
                                                        to_kind: torch.dtype, to_states: str) -> None:
    one, other = train(make(tmp_path, "ram", states, kind), 0, 2), make(tmp_path, "vram", to_states, to_kind)
    mt.save(*one, tmp_path / "c")
    mt.load(*other, tmp_path / "c")
    assert all(torch.equal(a, b) for a, b in zip(mt.masters(one[0]).values(), mt.masters(other[0]).values()))
    for p, q in zip(one[0].parameters(), other[0].parameters()):
        assert all(torch.equal(a, b) for a, b in zip(one[1].moments(p), other[1].moments(q)))


@pytest.mark.parametrize("kind, states, to_kind, to_states, why", [
    (BF16, "fp32", BF16, "8bit", "its moments are fp32 there"), (BF16, "8bit", BF16, "8bit-lo8", "master has 32 bits"),
    (torch.float32, "8bit", BF16, "8bit-sr", "master has 32 bits")])
def test_formats_that_hold_less_are_converted_on_request(tmp_path: Path, kind: torch.dtype, states: str,
                                                         to_kind: torch.dtype, to_states: str, why: str) -> None:
    one, other = train(make(tmp_path, "ram", states, kind), 0, 2), make(tmp_path, "ram", to_states, to_kind)
    mt.save(*one, tmp_path / "c")
    before = everything(*other)
    with pytest.raises(mt.MegatrainError, match=f"{why}.*convert=True"):
        mt.load(*other, tmp_path / "c")
    assert all(torch.equal(v, before[k]) for k, v in everything(*other).items())
    mt.load(*other, tmp_path / "c", convert=True)
    for a, b in zip(mt.masters(one[0]).values(), mt.masters(other[0]).values()):
        torch.testing.assert_close(a, b, rtol=2**-7, atol=0)           # half a bf16 ulp, and a carry


def test_weights_alone(tmp_path: Path) -> None:
    one = train(make(tmp_path), 0, 1)
    mt.save(one[0], None, tmp_path / "c")
    with pytest.raises(mt.MegatrainError, match="states of no optimizer"):
        mt.load(*make(tmp_path), tmp_path / "c")
    other = mt.stream(plain_dots(BF16, SHAPES), device="cpu")
    mt.load(other, None, tmp_path / "c")
    assert all(torch.equal(a, b) for a, b in zip(one[0].parameters(), other.parameters()))


# ---- other optimizers' states ----

def stepped(opt_class: Any, steps: int = 2) -> tuple[Any, Any]:
    model = mt.stream(plain_dots(torch.float32, SHAPES), device="cpu")
    return fed(model, opt_class(model.parameters(), lr=1e-2), range(steps))


@pytest.mark.parametrize("there, here", [(mt.AdamW, torch.optim.AdamW), (torch.optim.AdamW, mt.AdamW)])
def test_states_of_the_other_adamw_come_by_its_state_dict(tmp_path: Path, there: Any, here: Any) -> None:
    """mt.load says so, and changes nothing."""
    one, other, third = stepped(there), stepped(here, steps=1), stepped(there, steps=0)
    mt.save(*one, tmp_path / "c")
    before = everything(*other)
    with pytest.raises(mt.MegatrainError, match=r"load them into .*AdamW and give its state_dict\(\) to .*AdamW; mt.load"):
        mt.load(*other, tmp_path / "c")
    assert all(torch.equal(v, before[k]) for k, v in everything(*other).items())
    mt.load(*third, tmp_path / "c")
    mt.load(other[0], None, tmp_path / "c")
    other[1].load_state_dict(third[1].state_dict())
    for p, q in zip(one[0].parameters(), other[0].parameters()):
        a, b = one[1].state[p], other[1].state[q]
        assert torch.equal(p, q) and all(torch.equal(a[k], b[k]) for k in ("step", "exp_avg", "exp_avg_sq"))
    feed(*other, grads_for(other[0], 2))


def test_optimizers_that_share_a_name_alone_are_refused_before_anything_is_touched(tmp_path: Path) -> None:
    mt.save(*stepped(type("AdamW", (torch.optim.Adagrad,), {"__module__": "other.optimizers"})), tmp_path / "c")
    for kind, folder, why in ((mt.AdamW, "c", "states of other.AdamW, and mt.AdamW is to"),
                              (torch.optim.AdamW, "c", "states of other.AdamW, and torch.optim.AdamW")):
        pair = stepped(kind, steps=1)
        before = everything(*pair)
        with pytest.raises(mt.MegatrainError, match=why):
            mt.load(*pair, tmp_path / folder)
        assert all(torch.equal(v, before[k]) for k, v in everything(*pair).items())
        feed(*pair, grads_for(pair[0], 1))
    mt.load(*stepped(type("AdamW", (torch.optim.Adagrad,), {"__module__": "__main__"})), tmp_path / "c")


def test_an_optimizer_that_refuses_its_states_does_so_before_anything_changes(tmp_path: Path) -> None:
    class Picky(torch.optim.Adagrad):
        def load_state_dict(self, state_dict: Any) -> None:
            raise KeyError("of another version")

    there, pair = stepped(Picky), stepped(Picky, steps=1)
    schedulers = [torch.optim.lr_scheduler.StepLR(opt, size) for (_, opt), size in ((there, 10), (pair, 7))]
    mt.save(*there, tmp_path / "c", scheduler=schedulers[0])
    before, state = [p.clone() for p in pair[0].parameters()], schedulers[1].state_dict()
    with pytest.raises(KeyError, match="another version"):
        mt.load(*pair, tmp_path / "c", scheduler=schedulers[1])
    assert all(torch.equal(a, b) for a, b in zip(before, pair[0].parameters())) and schedulers[1].state_dict() == state
    feed(*pair, grads_for(pair[0], 1))


def test_states_of_another_optimizer_are_the_files_own_until_they_are_loaded(tmp_path: Path) -> None:
    """No copy of them is made to look at a checkpoint, and one to load it."""
    mt.save(*stepped(torch.optim.AdamW), tmp_path / "c")
    maps, file = Path("/proc/self/maps"), str(tmp_path / "c" / parts.TRAINING)
    found = manifest.Checkpoint(tmp_path / "c")
    assert file in maps.read_text()
    del found
    pair = stepped(torch.optim.AdamW, steps=0)
    mt.load(*pair, tmp_path / "c")
    assert file not in maps.read_text() and pair[1].state


def test_states_in_the_form_of_an_earlier_version_are_refused_by_what_to_do(tmp_path: Path) -> None:
    pair = stepped(torch.optim.AdamW)
    mt.save(*pair, tmp_path / "c")
    where = tmp_path / "c" / parts.TRAINING
    found = manifest.training_of(str(where), True)
    memory = io.BytesIO()
    torch.save(found | {"others": {"layers.0.weight": {"step": torch.tensor(2.0)}}}, memory)
    where.write_bytes(memory.getvalue())
    body = manifest.read(tmp_path / "c")
    body["files"][parts.TRAINING] = {"bytes": len(memory.getvalue()), "sha256": manifest.sha256(memory.getvalue())}
    (tmp_path / "c" / manifest.NAME).write_bytes(manifest.dump(body))
    other = stepped(torch.optim.AdamW, steps=1)
    with pytest.raises(mt.MegatrainError, match=r"an earlier version [^$]* mt.load\(model, None, folder\) takes the wei"):
        mt.load(*other, tmp_path / "c")
    mt.load(other[0], None, tmp_path / "c")
    assert all(torch.equal(a, b) for a, b in zip(pair[0].parameters(), other[0].parameters()))


def test_progress_of_a_save_and_a_load_is_told(tmp_path: Path) -> None:
    pair, told = train(make(tmp_path), 0, 1), []
    done = mt.save(*pair, tmp_path / "c", progress=lambda *p: told.append(p))
    assert told[-1] == (done.bytes, done.bytes)
    told.clear()
    mt.load(*pair, tmp_path / "c", progress=lambda *p: told.append(p))
    units = len(runtime_of(pair[0]).units)
    assert told == [(n, units) for n in range(1, units + 1)]


# ---- what others read ----

def test_other_readers_find_weights_and_states(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from safetensors.torch import load_file
    monkeypatch.setattr(checkpoint, "FILE_BYTES", 1 << 20)
    model, opt = train(make(tmp_path), 0, 2)
    mt.save(model, opt, tmp_path / "c")
    index = json.loads((tmp_path / "c" / parts.INDEX).read_text())["weight_map"]
    assert len(set(index.values())) == 2
    for name, p in model.named_parameters():
        assert torch.equal(load_file(tmp_path / "c" / index[name])[name], p)
    found: dict[str, Tensor] = {}
    for path in (tmp_path / "c").glob("states-*-of-*.safetensors"):
        found |= load_file(path)
    for name, p in model.named_parameters():
        assert torch.equal(found[f"{name}.exp_avg_sq"], opt.state[p]["exp_avg_sq"])


# ---- what goes wrong ----

def break_file(path: Path, how: str) -> None:
    data = bytearray(path.read_bytes())
    if how == "flipped":
        data[len(data) * 2 // 3] ^= 4
    path.write_bytes(data[:-1] if how == "truncated" else data)
    if how == "missing":
        path.unlink()


@pytest.mark.parametrize("how", ["flipped", "truncated", "missing"])
def test_each_broken_file_is_told_and_changes_nothing(tmp_path: Path, how: str) -> None:
    pair, other = train(make(tmp_path), 0, 1), train(make(tmp_path), 3, 4)
    mt.save(*pair, tmp_path / "c")
    before = everything(*other)
    files = sorted(p.name for p in (tmp_path / "c").iterdir())
    assert files == [manifest.NAME, "model.safetensors", "states.safetensors", parts.TRAINING]
    for name in files:
        whole = (tmp_path / "c" / name).read_bytes()
        break_file(tmp_path / "c" / name, how)
        why = "has no manifest" if (name, how) == (manifest.NAME, "missing") else "nothing was changed; load another one"
        with pytest.raises(mt.MegatrainError, match=f"{re.escape(name)}.*{why}" if why[:3] != "has" else why):
            mt.load(*other, tmp_path / "c")
        (tmp_path / "c" / name).write_bytes(whole)
    assert all(torch.equal(v, before[k]) for k, v in everything(*other).items())
    train(other, 5, 6)


def test_model_that_is_half_loaded_says_so_until_it_is_loaded(tmp_path: Path) -> None:
    pair, other = train(make(tmp_path), 0, 1), make(tmp_path)
    mt.save(*pair, tmp_path / "c")
    whole = (tmp_path / "c" / "states.safetensors").read_bytes()
    break_file(tmp_path / "c" / "states.safetensors", "flipped")
    with pytest.raises(mt.MegatrainError, match=r"not those that were written.*half-loaded.*load a checkpoint that is"):
        mt.load(*other, tmp_path / "c", verify=False)
    for refused in (lambda: train(other, 1, 2), lambda: mt.save(*other, tmp_path / "d")):
        with pytest.raises(mt.MegatrainError, match="half-loaded"):
            refused()
    (tmp_path / "c" / "states.safetensors").write_bytes(whole)
    mt.load(*other, tmp_path / "c", verify=False)
    assert_same(pair, other)


def test_what_to_do_is_told_when_the_store_is_lost(tmp_path: Path) -> None:
    """By everything that waits for it, from the first read of states that the drive changed on."""
    pair = train(make(tmp_path, "disk"), 0, 2)
    model, _ = pair
    model.state_dict()
    with doors.scratch_file(runtime_of(model).core.disk_file()[0]).open("r+b") as f:
        data = f.read()
        f.seek(0)
        f.write(bytes(x ^ 1 for x in data))
    why = "not those that were written.*the run cannot go on: make the model again, stream it, and load the last checkpoint"
    for call in (lambda: train(pair, 2, 6), model.state_dict, lambda: mt.save(model, None, tmp_path / "c"),
                 lambda: mt.unstream(model)):
        with pytest.raises(mt.MegatrainError, match=why):
            call()


def test_failed_save_leaves_the_one_before_and_says_so(saved: Pair, tmp_path: Path) -> None:
    """The disk's part is played by RLIMIT_FSIZE."""
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 << 20, old[1]))
    try:
        with pytest.raises(mt.MegatrainError, match="File too large"):
            mt.save(*saved, tmp_path / "c")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
        signal.signal(signal.SIGXFSZ, handler)


def test_failure_behind_the_callers_back_reaches_the_next_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = train(make(tmp_path), 0, 1)

    def full(path: Path, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    for caller in (lambda: train(pair, 1, 2), lambda: mt.save(*pair, tmp_path / "d"), None):
        monkeypatch.setattr(manifest, "write", full)
        saving = mt.save(*pair, tmp_path / "c", asynchronous=True)
        saving._over.wait()
        monkeypatch.undo()
        with pytest.raises(mt.MegatrainError, match="No space left.*" if caller is None else "saving .* failed"):
            (caller or saving.wait)()
        for _ in range(2):
            with pytest.raises(mt.MegatrainError, match="No space left"):
                saving.wait()                                    # whoever was told before
        assert not list(tmp_path.iterdir())
        train(pair, 2, 3)                                        # which is told no more


def interrupt(*_: int) -> None:
    raise KeyboardInterrupt


def test_interrupted_save_stays_an_interruption_and_leaves_the_one_before(saved: Pair, tmp_path: Path) -> None:
    for owner, name in ((checkpoint.Saving, "_follow"), (checkpoint, "held_by")):
        with pytest.MonkeyPatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(owner, name, interrupt)
            mt.save(*saved, tmp_path / "c")


@pytest.mark.usefixtures("interruptible")
def test_save_that_somebody_stopped_waiting_for_is_still_under_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = train(make(tmp_path), 0, 1)
    write, may_write = manifest.write, threading.Event()
    monkeypatch.setattr(manifest, "write", lambda *args: (may_write.wait(30), write(*args)))
    saving = mt.save(*pair, tmp_path / "c", asynchronous=True)
    threading.Timer(0.2, lambda: signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        mt.save(*pair, tmp_path / "d")
    assert not saving.over and runtime_of(pair[0]).saving is saving and not (tmp_path / "d").exists()
    may_write.set()
    mt.save(*pair, tmp_path / "d")
    assert saving.over and sorted(p.name for p in tmp_path.iterdir()) == ["c", "d"]


@pytest.fixture
def interruptible() -> Iterator[None]:
    """SIGINT as in a terminal: a shell's background job is born with it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("when", ["before", "behind"])
def test_interruption_while_the_thread_starts(tmp_path: Path, when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before there is a thread nothing is left of the save; with one it goes on, and is waited for as any."""
    pair = train(make(tmp_path), 0, 1)
    begin, follow, runs, may_end = threading.Thread.start, checkpoint.Saving._follow, threading.Event(), threading.Event()

    def start(thread: threading.Thread) -> None:
        if when == "behind":
            begin(thread)
            runs.wait(30)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(threading.Thread, "start", start)
        patched.setattr(checkpoint.Saving, "_follow", lambda *args: (runs.set(), may_end.wait(30), follow(*args)))
        mt.save(*pair, tmp_path / "c", asynchronous=True)
    rt = runtime_of(pair[0])
    if when == "before":
        assert rt.saving is None and not list(tmp_path.iterdir())
    else:
        saving, rt.saving = rt.saving, None                      # as another thread's call would find it
        with pytest.raises(mt.MegatrainError, match="a save is under way"):
            mt.save(*pair, tmp_path / "d")
        rt.saving = saving
        may_end.set()
    mt.save(*pair, tmp_path / "d")
    assert {p.name for p in tmp_path.iterdir()} == ({"d"} if when == "before" else {"c", "d"})
    train(pair, 1, 2)                                            # nothing is held back
    mt.load(*make(tmp_path), tmp_path / "d")


def test_save_that_is_given_no_thread_is_made_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = train(make(tmp_path), 0, 1)

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        saving = mt.save(*pair, tmp_path / "c", asynchronous=True)
    assert saving.over and saving.wait() is saving and saving.held == saving.seconds

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(threading.Thread, "start", refuse)
        patched.setattr(checkpoint.Saving, "_follow", interrupt)
        mt.save(*pair, tmp_path / "d", asynchronous=True)
    assert [p.name for p in tmp_path.iterdir()] == ["c"]
    train(pair, 1, 2)
    mt.load(*make(tmp_path), tmp_path / "c")


def test_what_cannot_be_saved_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    model, opt = train(make(tmp_path), 0, 1)
    with pytest.raises(mt.MegatrainError, match=r"extra: what .* is given"):
        mt.save(model, opt, tmp_path / "c", extra=object())
    model(grads_for(model, 1)).backward()
    with pytest.raises(mt.MegatrainError, match="gradients of 5 parameters"):
        mt.save(model, opt, tmp_path / "c")
    opt.zero_grad()
    with pytest.raises(mt.MegatrainError, match="not a part of it"):
        mt.save(model.layers[0], opt, tmp_path / "c")
    with pytest.raises(mt.MegatrainError, match="that is not the model's"):
        mt.save(model, mt.AdamW([*model.parameters(), nn.Parameter(torch.ones(3))]), tmp_path / "c")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("")
    with pytest.raises(mt.MegatrainError, match="is no checkpoint"):
        mt.save(model, opt, tmp_path / "mine")
    (tmp_path / "file").write_text("")
    with pytest.raises(mt.MegatrainError, match="cannot be written there: File exists"):
        mt.save(model, opt, tmp_path / "file" / "c")
    with pytest.MonkeyPatch().context() as m, pytest.raises(mt.MegatrainError, match="are free in"):
        m.setattr(checkpoint.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 1000}))
        mt.save(model, opt, tmp_path / "c")
    with pytest.raises(mt.MegatrainError, match="there is no host memory"):
        mt.save(model, opt, tmp_path / "c", spare="1000TiB")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "mine"]


def test_another_order_in_memory_matters_to_moments_of_8_bits_alone(tmp_path: Path) -> None:
    model, opt, scheduler, _ = dropped(states="8bit")
    go_on(model, opt, scheduler, 0, 1)
    mt.save(model, opt, tmp_path / "c")
    plain = Dropped()
    plain.conv.to(memory_format=torch.contiguous_format)
    other = mt.stream(plain, device="cpu")
    mt.load(other, None, tmp_path / "c")
    assert not [k for k, v in model.state_dict().items() if not torch.equal(v, other.state_dict()[k])]
    with pytest.raises(mt.MegatrainError, match=r"conv\.weight lies in memory with strides"):
        mt.load(other, mt.AdamW(other.parameters(), states="8bit"), tmp_path / "c")


def test_checkpoints_of_other_models_are_refused(tmp_path: Path) -> None:
    mt.save(*train(make(tmp_path), 0, 1), tmp_path / "c")
    for shapes, why in ((SHAPES[:-1], "of another model"), ([*SHAPES[:-1], (5, 5)], "is .700, 1000. there")):
        model = mt.stream(plain_dots(BF16, shapes), device="cpu")
        with pytest.raises(mt.MegatrainError, match=why):
            mt.load(model, mt.AdamW(model.parameters()), tmp_path / "c")
    model, _ = make(tmp_path)
    with pytest.raises(mt.MegatrainError, match="groups have"):
        mt.load(model, mt.AdamW([{"params": [p]} for p in model.parameters()]), tmp_path / "c")
    with pytest.raises(mt.MegatrainError, match="nowhere: there is no such folder"):
        mt.load(model, None, tmp_path / "nowhere")
    (tmp_path / "c" / manifest.NAME).unlink()
    with pytest.raises(mt.MegatrainError, match=r"no checkpoint of mt.save: it has no manifest\.json$"):
        mt.load(model, None, tmp_path / "c")
    (tmp_path / "c" / "config.json").write_text("{}")
    with pytest.raises(mt.MegatrainError, match=r"no checkpoint.*mt.from_pretrained loads a folder in Hugging Face"):
        mt.load(model, None, tmp_path / "c")


# ---- names and leftovers ----

@pytest.mark.parametrize("at_once", [True, False])
def test_files_beside_a_checkpoints_own_stay_when_it_is_replaced(tmp_path: Path, at_once: bool,
                                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    if not at_once:
        monkeypatch.setattr(manifest, "_exchange", lambda one, other: False)
    pair = make(tmp_path)
    mt.save(*pair, tmp_path / "c")
    (tmp_path / "c" / "tokenizer.json").write_text("{}")
    (tmp_path / "c" / "more").mkdir()
    os.utime(tmp_path / "c", (1, 1))
    train(pair, 0, 1)
    mt.save(*pair, tmp_path / "c")
    assert (tmp_path / "c").stat().st_mtime > 1, "it is new"
    assert [p.name for p in tmp_path.iterdir()] == ["c"]
    assert {p.name for p in (tmp_path / "c").iterdir()} == {
        manifest.NAME, "model.safetensors", "more", "states.safetensors", "tokenizer.json", parts.TRAINING}


def test_files_beside_a_checkpoints_own_are_on_the_disk_before_its_name(tmp_path: Path,
                                                                         monkeypatch: pytest.MonkeyPatch) -> None:
    pair = make(tmp_path)
    mt.save(*pair, tmp_path / "c")
    (tmp_path / "c" / "more").mkdir()
    (tmp_path / "c" / "more" / "tokenizer.json").write_text("{}")
    synced, fsync, take = [], os.fsync, manifest.Draft._take_name
    monkeypatch.setattr(os, "fsync", lambda fd: (synced.append(Path(os.readlink(f"/proc/self/fd/{fd}"))), fsync(fd)))
    monkeypatch.setattr(manifest.Draft, "_take_name", lambda draft: (synced.append(draft.path / "renamed"), take(draft))[1])
    mt.save(*pair, tmp_path / "c")
    before = [p.name for p in synced[:[p.name for p in synced].index("renamed")]]
    assert {"tokenizer.json", "more", manifest.NAME} <= set(before) and before[-1].startswith("c.tmp-")


def test_files_beside_a_checkpoint_that_cannot_be_read_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = make(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(checkpoint, "FILE_BYTES", 1 << 20)
        mt.save(*pair, tmp_path / "c")
    assert (tmp_path / "c" / parts.INDEX).exists()
    (tmp_path / "c" / "tokenizer.json").write_text("{}")
    break_file(tmp_path / "c" / manifest.NAME, "flipped")
    mt.save(*pair, tmp_path / "c")
    assert {p.name for p in (tmp_path / "c").iterdir()} == {
        manifest.NAME, "model.safetensors", "tokenizer.json", parts.TRAINING}
    mt.load(*make(tmp_path), tmp_path / "c")


@pytest.mark.parametrize("at_once", [True, False])
def test_failure_behind_the_new_name_is_told_and_both_are_left(tmp_path: Path, at_once: bool,
                                                               monkeypatch: pytest.MonkeyPatch) -> None:
    pair = train(make(tmp_path), 0, 1)
    mt.save(*pair, tmp_path / "c")
    train(pair, 1, 2)
    sync = manifest.sync

    def failing(path: Path) -> None:
        if path == tmp_path:
            raise OSError(5, "Input/output error")
        sync(path)

    with monkeypatch.context() as patched:
        patched.setattr(manifest, "sync", failing)
        if not at_once:
            patched.setattr(manifest, "_exchange", lambda one, other: False)
        with pytest.raises(mt.MegatrainError, match=r"c is whole and has its name.*Input/output error"):
            mt.save(*pair, tmp_path / "c")
    assert len([p for p in tmp_path.iterdir() if (p / manifest.NAME).exists()]) == 2, "which one a crash leaves is open"
    other = make(tmp_path)
    mt.load(*other, tmp_path / "c")
    assert_same(pair, other)
    mt.save(*pair, tmp_path / "c")
    assert [p.name for p in tmp_path.iterdir()] == ["c"]


def test_failure_between_two_renames_gives_the_name_back(saved: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
                                                         ) -> None:
    rename = os.rename

    def failing(one: Path, other: Path) -> None:
        if ".tmp-" in one.name:
            raise OSError(13, "Permission denied")
        rename(one, other)

    with monkeypatch.context() as patched:
        patched.setattr(manifest, "_exchange", lambda one, other: False)
        patched.setattr(os, "rename", failing)
        with pytest.raises(mt.MegatrainError, match=r"as it was: .*Permission denied"):
            mt.save(*saved, tmp_path / "c")


# ---- what was put beside a checkpoint, or taken out of a model ----

def three(**limits: Any) -> tuple[nn.Module, mt.AdamW]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    model = mt.stream(model, "cpu", units=["0", "1", "2"], **limits)
    return model, mt.AdamW(model.parameters(), lr=0.1)


def stepped_three(model: nn.Module, opt: torch.optim.Optimizer) -> list[torch.Tensor]:
    update(model(torch.ones(2, 4)).square().sum(), opt)
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("held", [True, False], ids=["held by somebody", "gone"])
def test_a_model_that_a_layer_was_taken_out_of_is_loaded(held: bool, tmp_path: Path) -> None:
    model, opt = three()
    stepped_three(model, opt)
    kept = [model[1].weight] if held else []
    if not held:
        opt.param_groups[0]["params"] = [p for i in (0, 2) for p in model[i].parameters()]
        opt.state.clear()
        del opt
    del model[1]
    mt.save(model, None, tmp_path / "a")
    before = [p.detach().clone() for p in model.parameters()]
    for p in model.parameters():
        p.data = torch.zeros_like(p)
    mt.load(model, None, tmp_path / "a")
    assert all(map(torch.equal, before, model.parameters())) and model(torch.ones(2, 4)).shape == (2, 4)
    del kept


def test_links_beside_a_checkpoint_stay_links(tmp_path: Path) -> None:
    """Wherever they lead: to a file of the checkpoint's own, out of it, or nowhere."""
    model, opt = three()
    stepped_three(model, opt)
    mt.save(model, opt, tmp_path / "a")
    (tmp_path / "tokens.json").write_text("{}")
    (tmp_path / "a/more").mkdir()
    links = {"best": "model.safetensors", "tokens.json": "../tokens.json", "old": "/no/such/file", "more/gone": "nothing",
             "up": ".."}
    for name, to in links.items():
        os.symlink(to, tmp_path / "a" / name)
    after = stepped_three(model, opt)
    mt.save(model, opt, tmp_path / "a")
    assert {name: os.readlink(tmp_path / "a" / name) for name in links} == links
    assert (tmp_path / "a/tokens.json").read_text() == "{}"
    other = three()
    mt.load(*other, tmp_path / "a")
    assert all(map(torch.equal, after, other[0].parameters()))


def test_where_states_do_not_fit_the_scheduler_is_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, opt = three()
    scheduler = torch.optim.lr_scheduler.StepLR(opt, 1)
    stepped_three(model, opt)
    scheduler.step()
    mt.save(model, opt, tmp_path / "a", scheduler=scheduler)
    model, opt = three()
    scheduler = torch.optim.lr_scheduler.StepLR(opt, 1)
    before = scheduler.state_dict()

    def refuse(self: mt.AdamW) -> None:
        raise mt.MegatrainError("no room")

    monkeypatch.setattr(mt.AdamW, "_ask_for_room", refuse)
    with pytest.raises(mt.MegatrainError, match="no room"):
        mt.load(model, opt, tmp_path / "a", scheduler=scheduler)
    assert scheduler.state_dict() == before


@pytest.mark.parametrize("kind", [mt.AdamW, torch.optim.AdamW])
def test_a_layer_that_was_taken_out_of_model_and_optimizer_is_in_no_checkpoint(kind: Any, tmp_path: Path) -> None:
    model, _ = three()
    opt = kind(model.parameters(), lr=0.1)
    stepped_three(model, opt)
    taken = model[1]
    del model[1]
    opt.param_groups[0]["params"] = list(model.parameters())
    for p in taken.parameters():
        del opt.state[p]
    mt.save(model, opt, tmp_path / "a")
    after = stepped_three(model, opt)
    mt.load(model, opt, tmp_path / "a")
    assert all(map(torch.equal, after, stepped_three(model, opt))) and taken.weight.shape == (4, 4)


# ---- killed ----

def save_and_die(folder: Path, at: str) -> None:
    pair = train(make(folder), 0, 1)
    mt.save(*pair, folder / "c", extra=1)
    train(pair, 1, 2)
    rename = os.rename
    if at == "write":
        manifest.write = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    else:
        manifest._exchange = lambda one, other: False
        os.rename = lambda one, other: (rename(one, other), os.kill(os.getpid(), signal.SIGKILL))
    mt.save(*pair, folder / "c", extra=2)


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for each way to die. Children of a process that has no threads yet, where torch is imported once."""
    folder = tmp_path_factory.mktemp("killed")
    script = f"""if True:
        import os, sys
        from pathlib import Path
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from test_checkpoint import save_and_die
        for at in ("write", "rename"):
            folder = Path({str(folder)!r}) / at
            folder.mkdir()
            if os.fork() == 0:
                save_and_die(folder, at)
            assert os.waitstatus_to_exitcode(os.wait()[1]) == -9
    """
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", script], env=env, check=True, timeout=60)
    return folder


@pytest.mark.parametrize("at", ["write", "rename"])
def test_killed_save_leaves_a_checkpoint_and_what_the_next_save_removes(killed: Path, at: str) -> None:
    """Between two renames, where names cannot change at once, the old one is found under its other name."""
    tmp_path = killed / at
    left = {p.name.split("-")[0] for p in tmp_path.iterdir()}
    assert left == ({"c", "c.tmp"} if at == "write" else {"c.old", "c.tmp"})
    pair = make(tmp_path)
    assert mt.load(*pair, tmp_path / "c") == 1
    assert_same(pair, train(make(tmp_path), 0, 1))
    mt.save(*pair, tmp_path / "c")
    assert [p.name for p in tmp_path.iterdir()] == ["c"]


def test_unstream_waits_for_a_save(tmp_path: Path) -> None:
    model, opt = train(make(tmp_path), 0, 1)
    mt.save(model, opt, tmp_path / "c", asynchronous=True)
    assert runtime_of(model).saving is not None
    mt.unstream(model)
    mt.load(*make(tmp_path), tmp_path / "c")
