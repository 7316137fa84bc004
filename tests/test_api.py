"""The package's own doors: mt.AdamW, mt.masters, mt.explain, mt.last_step, refusals of arguments.

AdamW's arithmetic is not torch's to the bit: it computes in another, more accurate order, with fused
multiply-adds (DESIGN section 6). What is compared with torch is stated beside each tolerance; what is
compared with itself must agree bit for bit.
"""
from __future__ import annotations

import importlib
import io
from typing import Any

import parity
import pytest
import torch
import torch.nn.functional as F
from situations import Tiny, batch, lm_loss, made, rows, square
from torch import Tensor, nn

pytestmark = pytest.mark.usefixtures("streaming")
if parity.IDENTITY:
    pytest.skip("plain against plain was asked for", allow_module_level=True)

ADAM = dict(lr=1e-2, betas=(0.9, 0.99), eps=1e-4, weight_decay=0.1)


def mt() -> Any:
    import megatrain_torch
    return megatrain_torch


def streamed(model: nn.Module, **kw: Any) -> nn.Module:
    return parity.stream_for_test(model, **kw)


def trained(steps: int = 4, accumulate: int = 1, clip: float | None = None, build: Any = Tiny, **kw: Any) -> dict[str, Tensor]:
    """Weights, states and norms after some steps of mt.AdamW."""
    parity.seed()
    model = streamed(made(build), **kw)
    opt = mt().AdamW(model.parameters(), max_grad_norm=clip, **ADAM)
    out: dict[str, Tensor] = {}
    for step in range(steps):
        for micro in range(accumulate):
            (lm_loss(model, batch(step * accumulate + micro)) / accumulate).backward()
        opt.step()
        opt.zero_grad()
        out[f"norm {step}"] = torch.tensor(opt.grad_norm or 0.0)
    out |= {k: v.detach().clone() for k, v in model.state_dict().items()}
    names = [n for n, _ in model.named_parameters()]
    for i, s in opt.state_dict()["state"].items():
        out |= {f"{names[i]} {k}": torch.as_tensor(v).clone() for k, v in s.items()}
    return out


def assert_same(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert list(a) == list(b)
    for k in a:
        assert torch.equal(a[k], b[k]), f"{k}: {parity.describe(a[k], b[k])}"


# ---------------------------------------------------------------- AdamW

def test_adamw_first_backward_equals_plain_bitwise() -> None:
    plain, model = made(), streamed(made())
    opt = mt().AdamW(model.parameters(), max_grad_norm=1.0, **ADAM)
    lm_loss(plain, batch(0)).backward()
    lm_loss(model, batch(0)).backward()
    for (name, p), q in zip(plain.named_parameters(), model.parameters()):
        assert torch.equal(p.grad, q.grad), name
    opt.step()


@pytest.mark.parametrize("clip", [None, 0.05], ids=["no_clip", "clip"])
def test_adamw_one_step_is_within_ulps_of_torch(clip: float | None) -> None:
    """From equal gradients. The update u = m/(sqrt(v)+eps) has about ten fp32 roundings in either order, so it
    differs by at most ~8 * 2^-24 relative; p itself is rounded once or twice (torch: after decay, after the
    update). Hence |a - b| <= 2 ulp(p) + 16 * 2^-24 * lr * |u|, with |u| <= 1 in the first step."""
    plain, model = made(), streamed(made())
    theirs = torch.optim.AdamW(plain.parameters(), **ADAM)
    ours = mt().AdamW(model.parameters(), max_grad_norm=clip, **ADAM)
    lm_loss(plain, batch(0)).backward()
    lm_loss(model, batch(0)).backward()
    if clip is not None:
        norm = nn.utils.clip_grad_norm_(plain.parameters(), clip)
    theirs.step()
    ours.step()
    for (name, p), q in zip(plain.named_parameters(), model.parameters()):
        # Clipping adds the relative error of the norm (fp32 sums in torch, double in ours): ~4 * 2^-24 of g.
        slack = (16 + 8 * (clip is not None)) * 2.0 ** -24 * ADAM["lr"]
        allowed = 2 * 2.0 ** -23 * p.detach().abs() + slack
        worst = ((p - q).abs() - allowed).max().item()
        assert worst <= 0, f"{name}: {worst:.3g} beyond the bound"
    if clip is not None:
        assert ours.grad_norm == pytest.approx(norm.item(), rel=1e-6), "sums of squares: fp32 in torch, double here"


def test_adamw_stays_near_torch_over_ten_steps() -> None:
    """Rounding differences of one step (1e-7 of a weight near 1) feed back through the gradients of later
    steps. eps = 1e-4 bounds the gain: a gradient off by d moves a weight by at most lr * d / eps = 100 d, and
    d is about 1e-8 here. Ten steps of that stay under 1e-5 where a step moves a weight by 1e-2."""
    plain, model = made(), streamed(made())
    theirs, ours = torch.optim.AdamW(plain.parameters(), **ADAM), mt().AdamW(model.parameters(), **ADAM)
    for step in range(10):
        for m, opt in ((plain, theirs), (model, ours)):
            lm_loss(m, batch(step)).backward()
            opt.step()
            opt.zero_grad()
    for (name, p), q in zip(plain.named_parameters(), model.parameters()):
        worst = (p - q).abs().max().item()
        assert worst <= 1e-5, f"{name}: off by {worst:.3g}"


@pytest.mark.parametrize("clip", [None, 0.05], ids=["no_clip", "clip"])
@pytest.mark.parametrize("accumulate", [1, 4])
def test_adamw_overlap_on_equals_overlap_off_bitwise(clip: float | None, accumulate: int) -> None:
    off = trained(clip=clip, accumulate=accumulate, debug={"sync": True})
    for kw in (dict(slots=2, delay_us=300), dict(slots=parity.MANY_SLOTS), dict(slots=3, delay_us=100, activations="saved")):
        assert_same(off, trained(clip=clip, accumulate=accumulate, **kw))


def test_adamw_without_the_wait_for_updates_is_noticed() -> None:
    """The control of the tests above: a fetch that does not wait for the update brings old weights."""
    right = trained(slots=2, delay_us=300)

    def noticed(seed: int) -> bool:
        try:
            wrong = trained(slots=2, delay_us=300, debug={"skip": parity.EDGES["updated"], "seed": seed})
        except mt().MegatrainError as error:         # a replay that is not its forward
            if "does not repeat itself" not in str(error):
                raise
            return True
        return any(not torch.equal(right[k], wrong[k]) for k in right)

    assert any([noticed(seed) for seed in (1, 2, 3)])


def test_adamw_does_not_depend_on_the_order_of_delays() -> None:
    first = trained(clip=0.1, delay_us=100, debug={"seed": 1})
    assert_same(first, trained(clip=0.1, delay_us=100, debug={"seed": 2}))


def test_adamw_clips_to_the_exact_global_norm() -> None:
    model = streamed(made())
    opt = mt().AdamW(model.parameters(), max_grad_norm=1e-3, **ADAM)
    lm_loss(model, batch(0)).backward()
    exact = sum(p.grad.double().square().sum() for p in model.parameters()).sqrt().item()
    opt.step()
    assert opt.grad_norm == pytest.approx(exact, rel=1e-7), "the norm is summed in double and rounded once"


def test_adamw_sees_gradients_edited_in_place() -> None:
    """torch's own clip_grad_norm_, GradScaler and hooks write into p.grad: the update must use what is there."""
    def run(edit: Any) -> list[Tensor]:
        model = streamed(made())
        opt = mt().AdamW(model.parameters(), **ADAM)
        for step in range(2):
            lm_loss(model, batch(step)).backward()
            edit(model)
            opt.step()
            opt.zero_grad()
        return [p.detach().clone() for p in model.parameters()]

    def halve(model: nn.Module) -> None:
        for p in model.parameters():
            p.grad.mul_(0.5)

    def replace(model: nn.Module) -> None:
        for p in model.parameters():
            p.grad = p.grad * 0.5

    untouched, halved, replaced = run(lambda m: None), run(halve), run(replace)
    assert any(not torch.equal(a, b) for a, b in zip(untouched, halved)), "the edit was ignored"
    for a, b in zip(halved, replaced):
        assert torch.equal(a, b), "mul_ in place and assignment of the same values gave different updates"


@pytest.mark.parametrize("accumulate", [1, 3])
def test_adamw_gives_a_step_without_gradient_no_update(accumulate: int) -> None:
    model = streamed(made())
    opt = mt().AdamW(model.parameters(), **ADAM)
    for step in range(3):
        for _ in range(accumulate):
            (model.layers[0](model.embed(batch(step))).square().mean() / accumulate).backward()
        before = model.head.weight.detach().clone()
        opt.step()
        opt.zero_grad()
        assert torch.equal(before, model.head.weight), "the head has no gradient and moved"


def test_adamw_skips_a_step_that_is_not_finite() -> None:
    model = streamed(made())
    opt = mt().AdamW(model.parameters(), max_grad_norm=1.0, **ADAM)
    lm_loss(model, batch(0)).backward()
    opt.step()
    opt.zero_grad()
    before = [p.detach().clone() for p in model.parameters()]
    (lm_loss(model, batch(1)) * float("inf")).backward()
    opt.step()
    opt.zero_grad()
    for a, p in zip(before, model.parameters()):
        assert torch.equal(a, p), "weights moved in a step that was not finite"
    lm_loss(model, batch(2)).backward()
    opt.step()
    assert opt.skipped_steps == 1
    assert all(int(s["step"]) == 2 for s in opt.state_dict()["state"].values()), "the skipped step was counted"


def test_adamw_state_round_trip_gives_the_bits_of_an_uninterrupted_run() -> None:
    def steps(model: nn.Module, opt: Any, span: range) -> None:
        for step in span:
            lm_loss(model, batch(step)).backward()
            opt.step()
            opt.zero_grad()

    straight = streamed(made())
    opt = mt().AdamW(straight.parameters(), max_grad_norm=0.1, **ADAM)
    steps(straight, opt, range(3))
    file = io.BytesIO()
    torch.save({"model": straight.state_dict(), "opt": opt.state_dict()}, file)
    steps(straight, opt, range(3, 6))
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    resumed = streamed(made())
    resumed.load_state_dict(saved["model"])
    again = mt().AdamW(resumed.parameters(), max_grad_norm=0.1, **ADAM)
    again.load_state_dict(saved["opt"])
    steps(resumed, again, range(3, 6))
    for (name, a), b in zip(straight.named_parameters(), resumed.parameters()):
        assert torch.equal(a, b), name


def test_adamw_takes_a_state_of_torchs_adamw() -> None:
    plain = made()
    theirs = torch.optim.AdamW(plain.parameters(), **ADAM)
    lm_loss(plain, batch(0)).backward()
    theirs.step()
    state = theirs.state_dict()
    model = streamed(made())
    model.load_state_dict(plain.state_dict())
    ours = mt().AdamW(model.parameters(), **ADAM)
    ours.load_state_dict(state)
    theirs.zero_grad()
    for m, opt in ((plain, theirs), (model, ours)):
        lm_loss(m, batch(1)).backward()
        opt.step()
    for (name, p), q in zip(plain.named_parameters(), model.parameters()):
        assert (p - q).abs().max() <= 1e-6, f"{name}: one step from a loaded state"


def test_adamw_trains_bf16_weights_with_an_fp32_master() -> None:
    """A step far smaller than a bf16 ulp must not be lost: the master moves, later the weight."""
    model = streamed(made(lambda: nn.Linear(8, 8, bias=False)).bfloat16())
    opt = mt().AdamW(model.parameters(), lr=1e-4, weight_decay=0.0)
    reference = model.weight.detach().float().clone().requires_grad_(True)
    theirs = torch.optim.AdamW([reference], lr=1e-4, weight_decay=0.0)
    x = rows(0)[:, :8].bfloat16()
    for _ in range(20):
        model(x).float().sum().backward()
        reference.grad = model.weight.grad.float()
        opt.step()
        theirs.step()
        opt.zero_grad()
    master = mt().masters(model)["weight"]
    assert master.dtype == torch.float32
    assert (master - reference).abs().max() <= 2e-6, "twenty updates of 1e-4, each rounded at ~2^-24 of a weight"
    distance = (model.weight.detach().float() - master).abs()
    assert (distance <= master.abs() * 2.0 ** -8).all(), "the weight is the master rounded to bf16 (half an ulp: 2^-9 to 2^-8)"


def test_adamw_mixes_streamed_and_other_parameters() -> None:
    model, extra = streamed(made()), nn.Parameter(torch.ones(()))
    opt = mt().AdamW([*model.parameters(), extra], max_grad_norm=0.05, **ADAM)
    plain, other = made(), nn.Parameter(torch.ones(()))
    theirs = torch.optim.AdamW([*plain.parameters(), other], **ADAM)
    for step in range(3):
        (lm_loss(model, batch(step)) * extra).backward()
        opt.step()
        opt.zero_grad()
        (lm_loss(plain, batch(step)) * other).backward()
        nn.utils.clip_grad_norm_([*plain.parameters(), other], 0.05)
        theirs.step()
        theirs.zero_grad()
    assert abs(extra.item() - other.item()) <= 1e-6
    for (name, p), q in zip(plain.named_parameters(), model.parameters()):
        assert (p - q).abs().max() <= 1e-5, name


def test_adamw_in_backward_equals_step_afterwards_bitwise() -> None:
    def run(in_backward: bool) -> list[Tensor]:
        model = streamed(made(), delay_us=100)
        opt = mt().AdamW(model.parameters(), in_backward=in_backward, **ADAM)
        for step in range(4):
            lm_loss(model, batch(step)).backward()
            opt.step()
            opt.zero_grad()
        return [p.detach().clone() for p in model.parameters()]

    for a, b in zip(run(False), run(True)):
        assert torch.equal(a, b), "the same update at another time"


def test_adamw_groups_and_schedule_follow_torch() -> None:
    def groups(model: nn.Module) -> list[dict[str, Any]]:
        return [{"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.3},
                {"params": [p for p in model.parameters() if p.dim() < 2], "lr": 1e-3, "weight_decay": 0.0}]

    plain, model = made(), streamed(made())
    theirs, ours = torch.optim.AdamW(groups(plain), **ADAM), mt().AdamW(groups(model), **ADAM)
    schedules = [torch.optim.lr_scheduler.CosineAnnealingLR(o, 5) for o in (theirs, ours)]
    for step in range(5):
        for m, opt, schedule in zip((plain, model), (theirs, ours), schedules):
            lm_loss(m, batch(step)).backward()
            opt.step()
            opt.zero_grad()
            schedule.step()
    for (name, p), q in zip(plain.named_parameters(), model.parameters()):
        assert (p - q).abs().max() <= 1e-5, name


@pytest.mark.parametrize("bad", [dict(amsgrad=True), dict(betas=(1.0, 0.9)), dict(eps=-1.0), dict(max_grad_norm=0.0),
                                 dict(states="4bit"), dict(in_backward=True, max_grad_norm=1.0), dict(lr="1e-3")], ids=str)
def test_adamw_refuses(bad: dict[str, Any]) -> None:
    model = streamed(made(lambda: nn.Linear(4, 4)))
    with pytest.raises(mt().MegatrainError, match=str(next(iter(bad)))):
        mt().AdamW(model.parameters(), **bad)


def test_adamw_refuses_words_that_torch_does_not_know() -> None:
    with pytest.raises(TypeError, match="momentum"):
        mt().AdamW([nn.Parameter(torch.ones(2))], momentum=0.9)


# ---------------------------------------------------------------- other doors

def test_masters_are_fp32_copies_of_every_parameter() -> None:
    model = streamed(made())
    found = mt().masters(model)
    assert list(found) == [n for n, _ in model.named_parameters()]
    for name, p in model.named_parameters():
        assert found[name].dtype == torch.float32 and torch.equal(found[name], p), name
    found["head.weight"].zero_()
    assert model.head.weight.abs().max() > 0, "masters() must give copies"


def test_explain_names_every_window() -> None:
    text = mt().explain(streamed(made()))
    for name in ("embed", "layers.0", "layers.3", "norm", "head"):
        assert name in text, f"{name} is missing in:\n{text}"


def test_last_step_counts_bytes() -> None:
    model = streamed(made())
    nbytes = sum(p.numel() * 4 for p in model.parameters())
    lm_loss(model, batch(0)).backward()
    mt().last_step(model)
    lm_loss(model, batch(1)).backward()
    model.zero_grad()
    next(model.parameters()).sum()
    report = mt().last_step(model)
    layer = sum(p.numel() * 4 for p in model.layers[0].parameters())
    assert 2 * layer <= report.h2d_bytes <= 2 * nbytes, "two slots: four layers cannot all stay; none crosses more than twice"
    assert report.d2h_bytes == nbytes, "every gradient leaves exactly once"
    assert report.host_bytes >= 2 * nbytes and report.seconds > 0


def test_gather_gives_weights_on_the_compute_device_and_takes_gradients() -> None:
    model = streamed(made())
    x = torch.randn(3, 32, generator=torch.Generator().manual_seed(0))
    with mt().gather(model.head):
        F.linear(x, model.head.weight).square().sum().backward()
    w = made().head.weight
    F.linear(x, w).square().sum().backward()
    assert torch.equal(model.head.weight.grad, w.grad)


@pytest.mark.parametrize("bad, words", [
    (dict(plan={"slots": 1}), "at least 2"), (dict(plan={"activation": "saved"}), "activation"),
    (dict(plan={"activations": "all"}), "activations"), (dict(compute="jit"), "compute"),
    (dict(plan="auto"), "plan='auto': give what mt.plan made, or a dict of"),
    (dict(units=["layers.9"]), "layers.9"), (dict(units=["layers", "layers.1"]), "inside"),
    (dict(host="1kB"), "host"), (dict(vram="1kB"), "vram"), (dict(vram="much"), "much"), (dict(device="xla"), "device"),
    (dict(device="tpu"), "device='tpu'"), (dict(dtype="bf16"), "give a torch.dtype"), (dict(vram="0GiB"), "is nothing"),
    (dict(plan={"slots": "3"}), "slots='3': a whole number"), (dict(plan={"slots": 2.5}), "slots=2.5"),
    (dict(plan={"slots": None}), "slots=None"), (dict(plan={"threads": "many"}), "threads='many'"),
    (dict(plan={"homes": ["ram"]}), r"homes=\['ram'\]"), (dict(nvme="/no/such"), "/no/such: No such file or directory"),
    (dict(plan={"activations": {"layers.9": "saved"}}), "layers.9"),
], ids=str)
def test_stream_refuses_and_changes_nothing(bad: dict[str, Any], words: str) -> None:
    model = made()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with pytest.raises(mt().MegatrainError, match=words):
        mt().stream(model, **{"device": "cpu", **bad})
    assert all(type(p) is nn.Parameter for p in model.parameters()), "parameters were changed"
    assert all("forward" not in vars(m) for m in model.modules()), "modules were wrapped"
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    lm_loss(model, batch(0)).backward()


def test_a_buffer_of_a_users_class_is_moved_by_that() -> None:
    """On a GPU it would else come to be a plain tensor."""
    seen = []

    class Own(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return super().__torch_function__(func, types, args, kwargs)

    model = nn.Linear(2, 2)
    model.register_buffer("own", torch.zeros(2).as_subclass(Own))
    mt().stream(model, device="cpu")
    assert torch.Tensor.to in seen and type(model.own) is Own


@pytest.mark.parametrize("late, at", [("filling.own_bytes", 1), ("add_unit", 2), ("offset", 5), ("runtime.Runtime.choose_states", 1),
                                      ("homes.Cap.hold", 1), ("open_slots", 1), ("stream.install", 1),
                                      ("stream.move_buffers", 3)])
def test_a_failure_while_memory_is_taken_gives_all_of_it_back(late: str, at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The at-th call of something fails, of the engine or on the way."""
    from megatrain_torch import _core
    engines, calls, open_engine = [], [], _core.Engine

    def failing(right: Any) -> Any:
        def call(*args: Any, **kw: Any) -> Any:
            calls.append(late)
            if len(calls) == at:
                raise MemoryError(late)
            return right(*args, **kw)
        return call

    class Engine:
        def __init__(self, *args: Any) -> None:
            self.real = open_engine(*args)
            engines.append(self.real)

        def __getattr__(self, name: str) -> Any:
            found = getattr(self.real, name)
            return failing(found) if name == late else found

    monkeypatch.setattr(_core, "Engine", Engine)
    if "." in late:
        where, _, name = late.rpartition(".")
        module, *owner = where.split(".")
        holder = importlib.import_module(f"megatrain_torch.model.{module}")
        holder = getattr(holder, *owner) if owner else holder
        monkeypatch.setattr(holder, name, failing(getattr(holder, name)))
    model = made()
    model.head.weight.grad = torch.ones_like(model.head.weight)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with pytest.raises(MemoryError, match=late):
        mt().stream(model, device="cpu", plan={"states": "8bit"})
    monkeypatch.undo()
    assert all(type(p) is nn.Parameter and "_mt" not in vars(p) for p in model.parameters()), "parameters were changed"
    assert all("forward" not in vars(m) for m in model.modules()), "modules were wrapped"
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert (model.head.weight.grad == 1).all()
    with pytest.raises(mt().MegatrainError, match="closed"):
        engines[0].stats()
    lm_loss(streamed(model), batch(0)).backward()


def test_what_is_no_module_is_refused_with_the_way() -> None:
    with pytest.raises(mt().MegatrainError, match=r"not 'runs/mine'; mt.from_pretrained\(AutoModelForCausalLM, path\)"):
        mt().stream("runs/mine")
    with pytest.raises(mt().MegatrainError, match=r"takes a torch.nn.Module, not \[1\]$"):
        mt().stream([1])


def test_streaming_twice_is_refused() -> None:
    model = streamed(made())
    with pytest.raises(mt().MegatrainError, match="unstream"):
        mt().stream(model, device="cpu")
    with pytest.raises(mt().MegatrainError):
        mt().stream(nn.Sequential(model, nn.Linear(2, 2)), device="cpu")
    lm_loss(model, batch(0)).backward()


def test_data_parallel_wrappers_are_refused() -> None:
    with pytest.raises(mt().MegatrainError, match="DataParallel"):
        mt().stream(nn.DataParallel(made()), device="cpu")
    model = streamed(made())
    with pytest.raises(mt().MegatrainError, match="DataParallel"):
        nn.parallel.replicate(model, [0]) if torch.cuda.is_available() else model._replicate_for_data_parallel()


@pytest.mark.parametrize("call", [lambda m: mt().unstream(m), lambda m: mt().explain(m), lambda m: mt().masters(m),
                                  lambda m: mt().last_step(m)], ids=["unstream", "explain", "masters", "last_step"])
def test_plain_model_where_a_streamed_one_is_needed(call: Any) -> None:
    with pytest.raises(mt().MegatrainError, match="stream"):
        call(made())


def test_lazy_modules_and_parameter_subclasses_are_refused() -> None:
    class Odd(nn.Parameter):
        pass

    odd = made(lambda: nn.Linear(4, 4))
    odd.weight = Odd(torch.ones(4, 4))
    for model in (nn.Sequential(nn.LazyLinear(4)), odd):
        with pytest.raises(mt().MegatrainError, match="weight"):
            mt().stream(model, device="cpu")


def test_meta_parameters_are_refused_and_nothing_is_changed() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, device="meta"))
    with pytest.raises(mt().MegatrainError, match=r"'1.weight' is on the meta device: load its weights first"):
        mt().stream(model, device="cpu")
    assert type(model[0].weight) is nn.Parameter and "forward" not in model[0].__dict__


def test_units_can_be_chosen_by_name() -> None:
    model = made()
    mt().stream(model, device="cpu", units=["layers.0.up", "layers.1", model.head])
    plain = made()
    for m in (plain, model):
        lm_loss(m, batch(0)).backward()
    for (name, p), q in zip(plain.named_parameters(), model.parameters()):
        assert torch.equal(p.grad, q.grad), name
    assert "layers.0.up" in mt().explain(model)


def test_dtype_converts_before_streaming() -> None:
    model = mt().stream(made(), device="cpu", dtype=torch.bfloat16)
    plain = made().bfloat16()
    for m in (plain, model):
        square(m, batch(0)).backward()
    for (name, p), q in zip(plain.named_parameters(), model.parameters()):
        assert q.dtype == torch.bfloat16 and torch.equal(p, q) and torch.equal(p.grad, q.grad), name


def test_weights_used_twice_in_a_layer_called_twice_differ_by_one_rounding() -> None:
    """The one sum whose order is ours: a window adds its own uses first, (a + b) + (c + d), where torch's engine
    adds four uses one by one. Three additions either way, so each sum is off by at most 3 * 2^-24 of the sum of
    magnitudes; cancellation here stays under a factor of 8."""
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.fc = nn.LayerNorm(32), nn.Linear(32, 32)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(self.norm(x)) + self.norm(x * 2)

    class Net(Tiny):
        def order(self) -> list[int]:
            return [0, 1, 0, 1]

    plain, model = (made(lambda: Net([Twice(), Twice()])) for _ in range(2))
    streamed(model)
    for m in (plain, model):
        lm_loss(m, batch(0)).backward()
    for (name, p), q in zip(plain.named_parameters(), model.parameters()):
        bound = 2 * 3 * 8 * 2.0 ** -24 * p.grad.abs().max()
        assert (p.grad - q.grad).abs().max() <= bound, f"{name}: {parity.describe(p.grad, q.grad)}"


def test_micro_batches_of_bf16_are_summed_in_fp32() -> None:
    """torch adds bf16 to bf16 and loses what falls below 8 bits; here `grad` is the fp32 sum, rounded once."""
    plain, model = made().bfloat16(), streamed(made().bfloat16())
    total: dict[str, Tensor] = {}
    for step in range(6):
        square(plain, batch(step)).backward()
        square(model, batch(step)).backward()
        for name, p in plain.named_parameters():
            total[name] = total.get(name, torch.zeros(p.shape)) + p.grad.float()
        plain.zero_grad()
        for name, p in model.named_parameters():
            assert torch.equal(p.grad, total[name].bfloat16()), f"after {step + 1} micro-batches: {name}"


@pytest.mark.parametrize("home", ["ram", "vram"])
def test_gradients_that_are_edited_between_micro_batches_are_added_to_as_they_are(home: str) -> None:
    """Sums of 16-bit gradients are kept in fp32 elsewhere, which an edit of `.grad` is not in."""
    model = mt().stream(made().bfloat16(), device="cpu", plan={"homes": home})
    for micro in range(2):
        lm_loss(model, batch(micro)).backward()
    with torch.no_grad():
        for p in model.parameters():
            p.grad.zero_()
    lm_loss(model, batch(2)).backward()
    found = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    lm_loss(model, batch(2)).backward()
    assert_same(found, {n: p.grad for n, p in model.named_parameters()})


def test_activations_can_differ_by_window() -> None:
    model = made()
    mt().stream(model, device="cpu", plan={"activations": {"layers.0": "replay", "layers.1": "saved"}})
    plain = made()
    for m in (plain, model):
        lm_loss(m, batch(0)).backward()
    for (name, p), q in zip(plain.named_parameters(), model.parameters()):
        assert torch.equal(p.grad, q.grad), name
    line = {row.split()[0]: row for row in mt().explain(model).splitlines()}
    assert "replay" in line["layers.0"] and "saved" in line["layers.1"]


@pytest.mark.parametrize("activations", ["saved", "replay"])
def test_memory_of_a_dropped_model_is_returned(activations: str) -> None:
    """Frames, hooks and wrappers must not hold each other: the model dies with its last reference, and with it the store."""
    import gc
    import weakref
    model = streamed(made(), activations=activations)
    opt = mt().AdamW(model.parameters(), **ADAM)
    for step in range(2):
        lm_loss(model, batch(step)).backward()
        opt.step()
        opt.zero_grad()
    dead = weakref.ref(model), weakref.ref(model.layers[1].up.weight)
    del model, opt
    gc.collect()
    assert [d() for d in dead] == [None, None], "the model is still alive"


@pytest.mark.parametrize("activations", ["saved", "replay"])
def test_nothing_grows_over_many_steps(activations: str) -> None:
    """A frame that holds its own graph is a cycle that gc cannot see: count living tensors."""
    import gc

    from megatrain_torch.model.stream import runtime_of
    gc.collect()
    gc.freeze()                 # what other tests left behind is not looked at
    model = streamed(made(lambda: Tiny(dropout=0.1)), activations=activations)
    opt = mt().AdamW(model.parameters(), max_grad_norm=1.0, **ADAM)

    def step(i: int) -> int:
        model(batch(50 + i))                                # a graph that nobody differentiates
        lm_loss(model, batch(i)).backward()
        opt.step()
        opt.zero_grad()
        runtime_of(model).drain()                           # gradients on their way home are alive
        gc.collect()
        return sum(issubclass(type(o), Tensor) for o in gc.get_objects())

    counts = [step(i) for i in range(8)]
    assert counts[-1] <= counts[3] + 4, f"living tensors after each step: {counts}"


def test_a_weight_kept_by_a_forward_without_grad_keeps_its_values() -> None:
    """The slot's memory is left to whoever holds a tensor in it; the next unit gets fresh memory."""
    class Keeps(Tiny):
        def body(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

    model = streamed(made(Keeps), slots=2)
    kept: list[Tensor] = []
    inner = model.layers[0].up
    hook = inner.register_forward_hook(lambda m, i, o: kept.append(m.weight))
    for _ in range(3):
        with torch.no_grad():
            model(batch(0))
    hook.remove()
    assert all(torch.equal(k, inner.weight) for k in kept)


class _Reads(nn.Module):
    """One layer of a kind; see the cases below."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.a, self.b, self.kind = nn.Linear(8, 8), nn.Linear(8, 8), kind

    def forward(self, x: Any, y: Tensor | None = None) -> Any:
        if self.kind == "list":
            x = x[0]
        out = x + torch.tanh(self.a(x))
        if self.kind == "two gradients":
            out = out + self.b(y) * torch.sin(y)
        if self.kind == "grad mode" and torch.is_grad_enabled():
            out = out * 3.0
        return (x, out) if self.kind == "returns its input" else out


@pytest.mark.parametrize("kind", ["list", "two gradients", "grad mode", "returns its input", "hooked later"])
def test_a_layer_that_takes_or_gives_more_than_its_input_equals_plain_torch(kind: str) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.layers = nn.Linear(8, 8), nn.ModuleList([_Reads(kind) for _ in range(4)])

        def forward(self, x: Tensor) -> Tensor:
            x = y = self.first(x)
            for layer in self.layers:
                out = layer([x] if kind == "list" else x, y if kind == "two gradients" else None)
                x = out[0] + out[1] if kind == "returns its input" else out
            return x

    def run(model: nn.Module) -> list[Any]:
        seen: list[Tensor] = []
        notes: list[Any] = []
        for step in range(3):
            if step == 2 and kind == "hooked later":
                model.layers[1].a.register_forward_hook(lambda m, i, o: seen.append(o))
            loss = model(torch.randn(6, 8, generator=torch.Generator().manual_seed(step))).square().mean()
            loss = loss + sum(t.exp().mean() for t in seen)
            loss.backward()
            notes += [loss.detach().clone(), *[None if p.grad is None else p.grad.clone() for p in model.parameters()]]
            model.zero_grad()
        return notes

    plain, other = run(made(Net)), run(streamed(made(Net), activations="replay"))
    assert all(parity.same_bits(a, b) for a, b in zip(plain, other, strict=True))
