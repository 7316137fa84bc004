"""On CUDA: the scripts of this folder, waits that are left out, units at home in each place, recurrent layers, and what
`megatrain doctor` measures between GPUs."""
from __future__ import annotations

import copy
import functools
import json
import subprocess
import sys
from pathlib import Path

import edges
import pytest
import torch
from edges import Scenario
from parity import EDGES
from torch import Tensor, nn

import megatrain_torch as mt
from megatrain_torch import _core
from megatrain_torch.base.modes import FORMATS
from megatrain_torch.plans import doctor
from megatrain_torch.plans.machine import MACHINES

HERE = Path(__file__).parent


def lines(script: str, *words: str) -> list[dict[str, object]]:
    """The script's JSON lines."""
    done = subprocess.run([sys.executable, str(HERE / script), *words], capture_output=True, text=True)
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert found, done.stderr[-2000:]
    return found


def test_a_long_kernel_is_warned_of_and_one_that_hangs_ends_the_wait() -> None:
    """_sleep(3e9) takes 1.5 to 2.5 seconds: more than one limit of 0.5 s, less than six; and 4e9 more than six of 0.1."""
    engine = _core.Engine("cuda", threads=1)
    unit = engine.add_unit("layers.0", [_core.DTYPES["F32"]], [1000], [True])
    grad = torch.ones(1000, device="cuda")
    stream = torch.cuda.current_stream().cuda_stream
    names = r"compute, unit layers\.0 waits for its gradients' kernels \(the event GRAD\)"

    engine.offload(unit, [(0, grad.data_ptr(), 0, False)], stream)       # the first takes its time
    engine.wait_grads(unit)
    engine.watchdog(0.5)
    torch.cuda._sleep(3_000_000_000)
    with pytest.warns(RuntimeWarning, match=names):
        engine.offload(unit, [(0, grad.data_ptr(), 0, False)], stream)
        engine.wait_grads(unit)
    engine.watchdog(0.1)
    torch.cuda._sleep(4_000_000_000)
    with pytest.warns(RuntimeWarning, match=names):
        engine.offload(unit, [(0, grad.data_ptr(), 0, False)], stream)
        with pytest.raises(_core.MegatrainError, match=names):
            engine.wait_grads(unit)
    engine.watchdog(60)
    engine.drain()
    engine.check()
    engine.close()


def test_models_and_situations_equal_plain_torch_on_the_gpu() -> None:
    report = lines("run_parity.py", "--seconds", "600")[-1]
    wrong = [r for r in report["not_ok"] if not str(r["control"]).startswith("plain torch fails")]
    assert not wrong, wrong[:3]


PACES = {"none": [edges.COMPUTE_SLOW, edges.COPIES_SLOW, dict(compute_us=1000, delay_us=300)],
         "ready": [edges.COPIES_SLOW], "landed": [edges.COPIES_SLOW], "updated": [edges.COPIES_SLOW],
         "freed": [edges.COMPUTE_SLOW], "grad": [edges.COMPUTE_SLOW]}
SCENARIOS = [Scenario("saved"), Scenario("replay"), Scenario("saved", accumulate=2), Scenario("replay", wander=True)]


@functools.cache
def overlap_off(scenario: Scenario) -> dict[str, torch.Tensor]:
    return edges.train(scenario, "cuda", sync=True)


@pytest.mark.parametrize("edge", PACES)
def test_every_left_out_wait_is_seen_and_with_all_of_them_nothing_differs(edge: str) -> None:
    """In one run of ten at least; a run that raises counts."""
    def differs(pace: dict[str, int], seed: int) -> bool:
        scenario = SCENARIOS[seed % len(SCENARIOS)]
        right = overlap_off(scenario)
        try:
            return edges.difference(right, edges.train(scenario, "cuda", seed=seed, skip=EDGES.get(edge, 0), **pace)) is not None
        except RuntimeError:
            return edge != "none" or pytest.fail(f"{scenario.name()}, seed {seed}, {pace}")

    found = [differs(pace, seed) for pace in PACES[edge] for seed in range(10)]
    assert not any(found) if edge == "none" else any(found)


@functools.cache
def placed_first(name: str, kind: str, states: str) -> dict[str, torch.Tensor]:
    return edges.placed(name, "cuda", edges.DTYPES[kind], states)[0]


@pytest.mark.parametrize("states, kind", [(s, k) for s in FORMATS for k in (edges.DTYPES if s == "fp32" else ["bf16"])])
@pytest.mark.parametrize("name", edges.PLACES)
def test_every_placement_gives_the_same_bits(name: str, states: str, kind: str) -> None:
    right = placed_first(edges.first_of(name), kind, states)
    found = edges.misplaced(name, "cuda", edges.DTYPES[kind], right, states)
    assert found is None, found


def test_at_each_edge_of_memory_a_model_trains_or_is_refused() -> None:
    assert all(row["ok"] for row in lines("run_preflight.py"))


def test_trainer_and_lora_agree_with_plain_torch_in_bf16() -> None:
    """Training in fp32 and `generate` are among the situations above."""
    assert all(row["ok"] for row in lines("../run_dropin.py", "--only", "trainer", "lora"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("n", [1, 1000, (1 << 20) + 3])
def test_adamw_op_gives_the_bits_of_the_host(dtype: torch.dtype, n: int) -> None:
    """Twenty steps; hi begins at an odd address in half of them."""
    _core.register_ops()
    torch.manual_seed(n)
    start = torch.randn(n + 1).to(dtype)
    lo = torch.zeros(n, dtype=torch.int16) if dtype == torch.bfloat16 else None
    for skew in (0, 1):
        host = [start.clone()[skew:skew + n], None if lo is None else lo.clone(), torch.zeros(n), torch.zeros(n)]
        there = [None if t is None else t.cuda() for t in host]
        there[0] = start.cuda()[skew:skew + n]
        for step in range(1, 21):
            grad = torch.randn(n).to(dtype)
            for planes, g in ((host, grad), (there, grad.cuda())):
                torch.ops.megatrain.adamw_(*planes, g, 1e-2, 0.9, 0.999, 1e-8, 0.1, step, 0.5)
        assert all(a is None or torch.equal(a, b.cpu()) for a, b in zip(host, there))


class Reader(nn.Module):
    """Recurrent layers put their weights into one buffer for cuDNN, in place."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.rnn = nn.Embedding(64, 32), nn.LSTM(32, 32, num_layers=2, batch_first=True)
        self.attend, self.out = nn.MultiheadAttention(32, 4, batch_first=True), nn.Linear(32, 8)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.rnn(self.embed(ids))[0]
        return self.out(x + self.attend(x, x, x, need_weights=False)[0])


@pytest.mark.parametrize("activations", ["saved", "replay"])
def test_weights_that_change_between_evaluations_are_read(activations: str) -> None:
    torch.manual_seed(0)
    plain = Reader()
    model = mt.stream(copy.deepcopy(plain), device="cuda", plan={"activations": activations})
    plain = plain.cuda()
    ids = torch.randint(0, 64, (4, 16), device="cuda")
    opts = [torch.optim.SGD(m.parameters(), lr=0.5) for m in (plain, model)]
    for _ in range(3):
        with torch.no_grad():
            want, found = plain.eval()(ids), model.eval()(ids)
        torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-5)      # bits, but for the order of a sum
        for m, opt in zip((plain, model), opts):
            m.train()(ids).square().mean().backward()
            opt.step()
            opt.zero_grad()
    for m in (plain, model):
        m.load_state_dict({n: t + 0.1 for n, t in plain.state_dict().items()} if m is plain else plain.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(ids), plain.eval()(ids), rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_two_gpus_fetch_at_once_and_exchange() -> None:
    """Two links to the host carry most of what one does, where the host's memory reaches. An exchange holds up what
    is computed by no more than some times what it takes by itself."""
    device = torch.device("cuda")
    alone = doctor.copy_rates(device, doctor.CUDA.copy_bytes, doctor.CUDA.least_s)
    found = doctor.measure_links("cuda", 2)
    assert 0.4 * alone["h2d_gbps"] < found["whole_gbps"] < 1.1 * alone["h2d_gbps"]
    assert found["exchange_gbps"] > 0.1 * found["whole_gbps"] and found["lost_gbps"] > 0.1 * found["exchange_gbps"]
    assert doctor.linked(MACHINES["h200-128g"], found).exchange_gbps == float(f"{found['exchange_gbps']:.4g}")
