"""Several processes on GPUs: what one process has, with N micro-batches.

Where there are as many GPUs as processes, each has its own and NCCL carries the gradients; else all share one, and gloo
does. The same code runs in both, with the same streams.
"""
from __future__ import annotations

import dataclasses
import functools
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from several import Job, Pool, alone, differences

SIZE = int(os.environ.get("MEGATRAIN_RANKS", "2"))          # of processes


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(SIZE, device="cuda") as found:
        yield found


_known: dict[str, dict[str, str]] = {}                   # by what is asked for: a plan of dictionaries has no hash


def wanted(job: Job) -> dict[str, str]:
    """Of one process, which has nobody to give portions to."""
    own = dataclasses.replace(job, plan=tuple(item for item in job.plan if item not in SHARDS))
    if str(own) not in _known:
        _known[str(own)] = alone(own, SIZE)
    return _known[str(own)]


OWN = functools.partial(Job, device="cuda", compute="eager")         # by the model's own code
JOBS = [*(OWN(case) for case in ("llama", "qwen2_moe", "gpt2", "choosy", "straight", "penalty")),
        OWN("wide", states="8bit"), OWN("wide", look=True), OWN("wide", delay_us=300), OWN("wide", micro=2),
        OWN("wide", dtype="bfloat16"), OWN("wide", dtype="bfloat16", micro=3), Job("wide", dtype="bfloat16", device="cuda"),
        Job("llama", dtype="bfloat16", frozen=("embed", "layers.0"), device="cuda")]
VRAM, ARRIVE = (("homes", "vram"),), (("homes", "arrive"),)
DISK, THROUGH = (("homes", "disk"),), (("homes", "through"),)
MIXED = (("homes", {"model.embed_tokens": "vram", "model.layers.1": "arrive", "lm_head": "vram"}),)
SHARDS = (("delivery", "shards"),)
JOBS += [OWN("wide", plan=SHARDS, delay_us=300), OWN("choosy", plan=SHARDS), OWN("llama", plan=(*MIXED, *SHARDS), micro=2),
         OWN("wide", dtype="bfloat16", plan=(("slots", 2), ("activations", "replay"), *SHARDS), delay_us=300),
         Job("wide", dtype="bfloat16", plan=SHARDS, device="cuda")]
FILED = (("homes", "disk+weights"),)
JOBS += [OWN("wide", dtype="bfloat16", plan=FILED, look=True, micro=2), OWN("wide", plan=(*FILED, ("slots", 2)), delay_us=300),
         Job("wide", dtype="bfloat16", plan=FILED, device="cuda")]
JOBS += [OWN("wide", plan=VRAM), OWN("choosy", plan=VRAM, delay_us=300), OWN("wide", plan=VRAM, states="8bit", look=True),
         OWN("wide", plan=ARRIVE, look=True), OWN("wide", plan=MIXED, micro=2), OWN("straight", plan=MIXED),
         OWN("wide", dtype="bfloat16", plan=VRAM, micro=3, look=True), OWN("wide", dtype="bfloat16", plan=ARRIVE, delay_us=200),
         OWN("wide", dtype="bfloat16", plan=DISK, look=True), OWN("wide", plan=DISK, micro=2, delay_us=300),
         OWN("wide", dtype="bfloat16", plan=THROUGH, look=True), OWN("choosy", plan=THROUGH, micro=2, delay_us=300),
         OWN("wide", dtype="bfloat16", plan=THROUGH, states="8bit"),
         Job("wide", dtype="bfloat16", plan=VRAM, device="cuda"), Job("wide", dtype="bfloat16", vram="8GiB", device="cuda")]


@pytest.mark.parametrize("job", JOBS, ids=str)
def test_ranks_have_what_one_process_has(pool: Pool, job: Job) -> None:
    assert not differences(pool.call("several:train", SIZE, job), wanted(job))


def test_ranks_fetch_their_portions(pool: Pool) -> None:
    job = Job("wide", dtype="bfloat16", plan=(("slots", 2), *SHARDS), device="cuda", look=True)
    found = pool.call("several:delivered", SIZE, job)
    assert all(gathers > 10 for _, gathers, _ in found), found


@pytest.mark.parametrize("plan", [(), VRAM, MIXED, SHARDS], ids=["ram", "vram", "mixed", "shards"])
def test_equal_runs_give_equal_bits(pool: Pool, plan: tuple) -> None:
    job = Job("wide", dtype="bfloat16", delay_us=200, device="cuda", plan=plan)
    assert pool.call("several:train", SIZE, job) == pool.call("several:train", SIZE, job)


@pytest.mark.parametrize("plan", [VRAM, MIXED], ids=["vram", "mixed"])
def test_a_checkpoint_of_states_on_the_devices(pool: Pool, plan: tuple, tmp_path: Path) -> None:
    job = OWN("wide", dtype="bfloat16", plan=plan)
    wanted, *others = pool.call("several:saved", SIZE, job, str(tmp_path / "c"))
    assert not differences(others, wanted)
    assert not differences(pool.call("several:loaded", SIZE, job, str(tmp_path / "c")), wanted)


@pytest.mark.parametrize("job", [OWN("wide", dtype="bfloat16"), OWN("wide", dtype="bfloat16", delay_us=300, look=True),
                                 OWN("wide", dtype="bfloat16", plan=VRAM, micro=2), OWN("straight", plan=MIXED)], ids=str)
def test_a_gpu_of_each_machine_has_what_one_process_has(pool: Pool, job: Job) -> None:
    """Machines are pretended: new weights go from one's share over the GPUs to the other's."""
    assert not differences(pool.call("several:apart", SIZE, 2, "several:train", job), wanted(job))


def test_bytes_that_go_over_gpus_in_pieces_are_whole_where_they_come(pool: Pool) -> None:
    """As many as go at once, and more. Locked memory, and other memory, at either end."""
    assert pool.call("several:pieces", 2, "cuda", 200) == [[True] * 6] * 2
