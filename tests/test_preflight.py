"""What does not fit is refused before it is allocated, by the byte; and what fits runs."""
from __future__ import annotations

import copy
import dataclasses
import gc
import json
import subprocess
import sys
import textwrap
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path

import doors
import pytest
import torch
import zoo
from torch import nn

import megatrain_torch as mt
from megatrain_torch.base.limits import Bound, HostLimits, with_margin
from megatrain_torch.model.stream import runtime_of
from megatrain_torch.plans import room as room_module
from megatrain_torch.plans.room import short
from megatrain_torch.plans.search import OVERHEAD
from megatrain_torch.plans.tally import Asked, Fleet
from megatrain_torch.store.disk import file_bytes

WIDTH, LAYERS = 128, 4
NUMEL = LAYERS * WIDTH * WIDTH
STEP = 12 * NUMEL               # of bf16: gradients, masters, moments


def stack(dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    torch.manual_seed(0)
    return zoo.Residual(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))).to(dtype)


def train(model: nn.Module, opt: torch.optim.Optimizer, micro: int = 1) -> None:
    x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(1)).bfloat16()
    for _ in range(micro):
        model(x).float().square().mean().backward()
    opt.step()
    opt.zero_grad()


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """free(n, ...): from now on so many bytes may be taken."""
    def say(nbytes: int, files: tuple[int, int] = (3, 1024)) -> None:
        found = HostLimits((Bound("cgroup box: memory.max", nbytes, nbytes, "raise memory.max of the cgroup"),),
                           files=files)
        monkeypatch.setattr(room_module, "host_limits", lambda: found)
    return say


def stream(**asked: object) -> nn.Module:
    return doors.stream(stack(), device="cpu", **asked)


def test_weights_are_refused_by_the_byte(free: Callable) -> None:
    free(10**9)
    model = stream()
    slots = sum(s.nbytes for s in runtime_of(model).ring.slots)
    free(with_margin(slots))
    mt.unstream(stream())
    free(with_margin(slots) - 1)
    model = stack()
    with pytest.raises(mt.MegatrainError, match=r"to take over the weights[^$]*cgroup box: memory.max") as why:
        mt.stream(model, device="cpu")
    assert type(model.layers[0].weight) is nn.Parameter, "the model was changed"
    stream(host=why.value.changes["host"])             # the user's word


def test_states_are_refused_by_the_byte_and_nothing_is_allocated(free: Callable) -> None:
    free(10**9)
    model = stream()
    core = runtime_of(model).core
    before = core.host_bytes()
    free(with_margin(STEP) - 1)
    with pytest.raises(mt.MegatrainError, match=r"for gradients and AdamW's states[^$]*moments[^$]*margin") as why:
        mt.AdamW(model.parameters())
    assert core.host_bytes() == before
    for layer in list(model.layers.parameters())[: -(-why.value.changes["frozen"] * LAYERS // NUMEL)]:
        layer.requires_grad_(False)
    train(model, mt.AdamW(p for p in model.parameters() if p.requires_grad))
    model = stream()
    train(model, mt.AdamW(model.parameters(), states=why.value.changes["states"]))
    model = stream()
    free(with_margin(STEP))
    train(model, mt.AdamW(model.parameters()))


def test_the_first_step_asks_again_for_what_is_not_there_yet(free: Callable) -> None:
    """Gradients have come since AdamW was made; somebody else has taken memory."""
    free(10**9)
    model = stream()
    opt = mt.AdamW(model.parameters(), lr=0.1)
    weights = [p.detach().clone() for p in model.parameters()]
    model(torch.ones(2, WIDTH).bfloat16()).float().square().mean().backward()
    free(with_margin(10 * NUMEL) - 1)
    with pytest.raises(mt.MegatrainError, match="for gradients and AdamW's states"):
        opt.step()
    assert all(torch.equal(a, b) for a, b in zip(weights, model.parameters()))
    free(with_margin(10 * NUMEL))
    opt.step()
    assert not torch.equal(weights[0], model.layers[0].weight)


def test_a_second_micro_batch_asks_for_its_sums(free: Callable) -> None:
    free(10**9)
    model = stream()
    opt = mt.AdamW(model.parameters())
    train(model, opt)
    sums = 4 * NUMEL + 2 * 2 * NUMEL // LAYERS          # ACC, and two staging buffers of the largest unit
    free(with_margin(sums) - 1)
    with pytest.raises(mt.MegatrainError, match=r"to add up micro-batches[^$]*sums"):
        train(model, opt, 2)
    opt.zero_grad()
    free(with_margin(sums))
    train(model, opt, 2)
    free(0)
    train(model, opt, 2)                                # what is there is there
    mt.AdamW(model.parameters())                        # staging too


def test_gradients_are_asked_for_where_no_adamw_has(free: Callable) -> None:
    free(10**9)
    model = stream()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    free(with_margin(2 * NUMEL) - 1)
    with pytest.raises(mt.MegatrainError, match=r"for gradients\b[^$]*gradients"):
        train(model, opt)
    free(with_margin(2 * NUMEL))
    train(model, opt)


def test_activations_that_wait_in_host_memory_are_asked_for(free: Callable) -> None:
    free(10**9)
    model = stream(plan={"activations": "saved+host"}, compute="eager")
    x = torch.ones(4096, WIDTH).bfloat16()
    free(with_margin(2 * x.nbytes) // 2)
    with pytest.raises(mt.MegatrainError, match=r"for activations[^$]*kept from one window"):
        model(x)
    free(10**9)
    model(x).sum().backward()
    free(0)
    model(x)                                            # the memory of the step before is used again


def test_copies_of_states_on_the_device_are_asked_for(free: Callable) -> None:
    free(10**9)
    model = stream(plan={"homes": "vram"})
    opt = mt.AdamW(model.parameters())
    train(model, opt)
    free(with_margin(12 * NUMEL) - 1)                   # masters are in it: weights too
    with pytest.raises(mt.MegatrainError, match=r"for copies of states[^$]*moments"):
        opt.state_dict()
    free(with_margin(12 * NUMEL))
    assert len(opt.state_dict()["state"]) == LAYERS
    free(0)
    opt.state_dict()                                    # they are there


def test_weights_on_the_device_are_asked_for_before_they_are_read(free: Callable) -> None:
    free(10**9)
    unit = 2 * NUMEL // LAYERS
    model = stream(plan={"homes": "vram"})
    core = runtime_of(model).core
    free(with_margin(unit) - 1)
    first = model.layers[0].weight
    for look in (first.norm, lambda: first.data.zero_(), model.state_dict, lambda: copy.deepcopy(model)):
        with pytest.raises(mt.MegatrainError, match=r"to read layers\.0[^$]*mt\.save, which brings units one by one"):
            look()
    assert core.host_bytes() == 0
    free(with_margin(unit))
    assert first.norm() > 0 and core.host_bytes() == unit
    free(0)
    assert first.norm() > 0, "it is there"
    free(10**9)
    train(model, mt.AdamW(model.parameters(), lr=0.1))


def test_models_that_were_dropped_are_collected_before_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when a notebook's cell runs again: the old model is in a cycle of the user's."""
    model = stream()
    model.whole = [model]
    opt = mt.AdamW(model.parameters(), lr=0.1)
    train(model, opt)
    old = weakref.ref(runtime_of(model))

    def found() -> HostLimits:
        return HostLimits((Bound("cgroup box: memory.max", 10**9, 0 if old() else 10**9, "raise it"),), nodes=1)

    monkeypatch.setattr(room_module, "host_limits", found)
    gc.disable()
    try:
        del model, opt
        assert old() is not None
        stream()
        assert old() is None
    finally:
        gc.enable()


def test_a_limit_counts_weights_that_are_read(free: Callable) -> None:
    free(10**9)
    unit = 2 * NUMEL // LAYERS
    model = stream(plan={"homes": "vram"}, host=unit)
    core = runtime_of(model).core
    assert model.layers[0].weight.norm() > 0 and core.host_bytes() == unit
    with pytest.raises(mt.MegatrainError, match=r"to read layers\.1[^$]*free: host=[^$]*a larger host="):
        model.layers[1].weight.norm()
    opt = mt.AdamW(model.parameters(), lr=0.1)
    train(model, opt)
    train(model, opt)
    assert model.layers[1].weight.norm() > 0, "a step and a forward gave the other's memory back"


def test_a_limit_counts_copies_of_states_on_the_device(free: Callable) -> None:
    model = stream(plan={"homes": "vram"}, host=12 * NUMEL - 1)
    opt = mt.AdamW(model.parameters())
    train(model, opt)
    with pytest.raises(mt.MegatrainError, match=r"host memory[^$]*moments") as why:
        opt.state_dict()
    model = stream(plan={"homes": "vram"}, host=why.value.changes["host"])
    opt = mt.AdamW(model.parameters())
    train(model, opt)
    assert why.value.changes["host"] == 12 * NUMEL and len(opt.state_dict()["state"]) == LAYERS


def test_buffers_of_a_disk_are_asked_for_once(free: Callable, tmp_path: Path) -> None:
    free(10**9)
    model = stream(plan={"homes": "disk", "debug": {"disk": {"buffer_bytes": 1 << 20}}}, nvme=str(tmp_path))
    free(with_margin(2 * NUMEL))                        # gradients
    mt.AdamW(model.parameters())
    mt.unstream(model)


@pytest.mark.parametrize("asked", [{"micro": 2}, {"grads": "none"}, {"homes": "vram", "micro": 2}, {"homes": "arrive"},
                                   {"nvme": {"limit": "1GB"}, "homes": "disk"}], ids=str)
def test_a_plan_and_what_is_asked_for_it_are_the_same_bytes(asked: dict, tmp_path: Path) -> None:
    """So that a plan for a limit is not refused under that limit."""
    plan = mt.plan(stack(), tokens=64, seq=8, machine="cpu", **asked)
    model = stream(plan=plan, nvme=str(tmp_path) if plan.disk else None)
    assert sum(runtime_of(model).room.asked.planes().values()) == plan.host_bytes - plan.host[OVERHEAD]
    mt.unstream(model)


def test_a_plan_is_asked_for_as_a_whole(free: Callable) -> None:
    """What mt.plan chose is known from the start: its states and sums count at once."""
    plan = mt.plan(stack(), tokens=64, seq=8, machine="cpu", micro=2)
    free(with_margin(STEP + 4 * NUMEL))
    with pytest.raises(mt.MegatrainError, match=r"for a training step[^$]*sums") as why:
        stream(plan=plan)
    assert why.value.changes["micro"] == 1


def test_each_change_that_is_named_fits(free: Callable) -> None:
    slots = (LAYERS - 1) * NUMEL // LAYERS * 4          # three slots; the module gives back what the store takes
    free(with_margin(slots) - 1)
    with pytest.raises(mt.MegatrainError, match="to take over the weights") as why:
        mt.stream(stack(torch.float32), device="cpu", plan={"slots": 3})
    mt.stream(stack(torch.float32), device="cpu", dtype=why.value.changes["dtype"])


def test_the_device_is_refused_with_the_homes_that_fit() -> None:
    slot = 2 * NUMEL // LAYERS
    home = slot + STEP // LAYERS
    small = 2 * slot + home                             # two slots, one unit at home
    with pytest.raises(mt.MegatrainError, match=r"device memory[^$]*at home: moments") as why:
        stream(vram=small, plan={"homes": "vram"})
    homes = why.value.changes["homes"]
    assert list(homes.values()) == ["vram"]
    mt.unstream(stream(vram=small, plan={"homes": homes}))
    with pytest.raises(mt.MegatrainError):
        stream(vram=small - 1, plan={"homes": homes})
    mt.unstream(stream(vram=why.value.changes["vram"], plan={"homes": "vram"}))


def test_a_large_model_is_told_of_the_device_and_of_the_disk() -> None:
    """Without memory for it: parameters on the meta device have sizes."""
    layers = [nn.Linear(8192, 8192, bias=False, device="meta", dtype=torch.bfloat16) for _ in range(24)]
    groups = [(f"layers.{i}", [(f"layers.{i}.weight", layer.weight)]) for i, layer in enumerate(layers)]
    asked = Asked("Large", groups, None, ("ram",) * 24)
    step, unit = 14 * 24 * 8192**2, 14 * 8192**2
    free = Bound("a limit", 0, with_margin(step - 3 * 12 * 8192**2), "")
    why = short(asked, Asked.host, free, "for a training step", 10 * unit)
    assert list(why.changes["homes"].values()) == ["vram"] * 3
    on_disk = Asked("Large", groups, None, ("ram",) * 19 + ("disk",) * 5)
    assert why.changes["nvme"] == file_bytes(on_disk)         # 10 of 12 bytes, and the disk's own buffers
    assert "3 units at home in VRAM" in str(why) and "nvme= a directory" in str(why)


def test_of_several_machines_each_has_a_part_of_states_and_who_reads_them_has_all() -> None:
    groups = [("layer", [("layer.weight", nn.Linear(1024, 1024, bias=False, device="meta").bfloat16().weight)])]
    for home in ("ram", "vram"):
        one, two = (Asked("Stack", groups, None, (home,), fleet=Fleet(2, machines)) for machines in (1, 2))
        assert two.planes().get("moments", 0) == one.planes().get("moments", 0) // 2
        one, two = (dataclasses.replace(asked, copied=True).planes() for asked in (one, two))
        assert two["moments"] == one["moments"] == 8 * 1024**2 and two["masters"] == one["masters"]


def test_too_few_files_are_refused(free: Callable) -> None:
    free(10**9, files=(1000, 1024))
    with pytest.raises(mt.MegatrainError, match=r"ulimit -n.* to 1032"):
        stream()


def test_weights_that_are_a_files_make_no_room(tmp_path: Path) -> None:
    """Mapped, not read: what they give back is the page cache's."""
    read, path = stack(), tmp_path / "weights"
    torch.save(read.state_dict(), path)
    mapped = stack()
    mapped.load_state_dict(torch.load(path, mmap=True), assign=True)
    for model, n in ((read, 2 * NUMEL // LAYERS), (mapped, 0)):
        assert room_module.own_bytes([(name, [(name, p)]) for name, p in model.named_parameters()]) == [n] * LAYERS


def test_memory_that_cannot_be_locked_is_told_once() -> None:
    with pytest.warns(UserWarning, match=r"could not be locked for the GPU \(.*0 may be.*slower.*ulimit -l.*WSL2"):
        model = stream(plan={"debug": {"lock": 0}})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, mt.AdamW(model.parameters()))


PEAK = """
    import json, re, sys, torch, megatrain_torch as mt
    from torch import nn
    def kib(name):
        return int(re.search(name + r":\\s+(\\d+) kB", open("/proc/self/status").read())[1])
    del [torch.zeros(4 << 20)][:]               # 16 MiB freed: from now on malloc keeps pieces that are smaller
    model = nn.Sequential(*[nn.Sequential(*[nn.Linear(1024, 1024, bias=False, dtype=torch.bfloat16)
                                            for _ in range(8)]) for _ in range(16)])
    mt.stream(model[:1], device="cpu")          # threads and libraries
    before = kib("VmRSS")
    mt.stream(model[1:], device="cpu", plan=json.loads(sys.argv[1]))
    print(kib("VmHWM") - before, kib("VmRSS") - before)
    for p in model[1:].parameters():
        p.norm()
    print(kib("VmRSS") - before)
"""


@pytest.mark.parametrize("plan, read", [({"slots": 2}, 0), ({"homes": "vram"}, 240)], ids=["ram", "vram"])
def test_the_module_and_the_store_are_never_there_twice(plan: dict, read: int) -> None:
    """15 units of 16 MiB, of pieces that malloc would keep: at most a few of them at once. At home on the device (its
    memory is the host's here) they have host memory once somebody reads them."""
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(PEAK), json.dumps(plan)], stdout=subprocess.PIPE,
                          text=True, check=True)
    peak, after, at_last = (int(n) >> 10 for n in done.stdout.split())
    assert after <= 64 + 32 and peak <= 2 * 16 + 64 + 32, f"MiB more at the peak: {peak}; afterwards: {after}"
    assert abs(at_last - after - read) <= 32, f"MiB more after, and when all was read: {after}, {at_last}"


def test_at_each_edge_a_model_trains_or_is_refused() -> None:
    program = Path(__file__).parent / "gpu" / "run_preflight.py"
    done = subprocess.run([sys.executable, str(program), "--device", "cpu"], stdout=subprocess.PIPE, text=True)
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) >= 20 and [f for f in found if not f["ok"]] == [] and done.returncode == 0
