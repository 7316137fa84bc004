"""Trainer, Accelerate, PEFT, TRL and Lightning in two processes with stock arguments: a streamed model trains as it does
plain, with DistributedDataParallel around it."""
from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from parity import LONG
from several import Pool

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
OWN = ("lightning", "buffers", "own_arithmetic")           # whose losses are each rank's own
# Relative. Plain torch adds a rank's micro-batches before it adds ranks, and its AdamW rounds elsewhere than mt.AdamW.
# A norm is more sensitive to the weights than a loss is, which is a mean near its least.
CLOSE = {"losses": 1e-6, "norms": 1e-5, "evals": 1e-6}


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(2) as made:
        yield made


def both(pool: Pool, what: str, out: Path | None = None, **kw: Any) -> list[dict[str, Any]]:
    """(streamed, plain), of rank 0; that both ranks say the same was looked at."""
    found = []
    for streamed in (True, False):
        args = () if out is None else (out / str(streamed),)
        mine, other = pool.call(f"several_hf:{what}", 2, streamed, *args, **kw)
        assert mine == other or what in OWN
        assert mine["wrapped"] and mine["reduces"] is not streamed
        found.append(mine)
    return found


def close(found: list[dict[str, Any]], *names: str) -> None:
    for name in names:
        assert found[0][name] and found[0][name] == pytest.approx(found[1][name], rel=CLOSE[name]), name


def test_trainer_accumulates_clips_evaluates_saves_resumes_and_loads_the_best(pool: Pool, tmp_path: Path) -> None:
    how = {"eval_strategy": "steps", "save_strategy": "steps", "load_best_model_at_end": True}
    found = both(pool, "trainer", tmp_path, **how)
    close(found, "losses", "norms", "evals")
    whole, plain = found
    assert len(whole["losses"]) == 10 and len(whole["evals"]) == 2 and whole["device"] == plain["device"]
    assert Path(whole["best"]).name == Path(plain["best"]).name
    again = pool.call("several_hf:trainer", 2, True, tmp_path / "True", resume=True, **how)
    assert again[0] == again[1] == whole
    # What a plain run with DistributedDataParallel left is taken too.
    other = pool.call("several_hf:trainer", 2, True, tmp_path / "False", resume=True, **how)
    close([other[0], plain], "losses", "norms", "evals")


@LONG
@pytest.mark.parametrize("how", [{"stock": True}, {"average_tokens_across_devices": False}, {"max_grad_norm": 0.0}],
                         ids=str)
def test_trainer_as_it_is_asked_for(pool: Pool, tmp_path: Path, how: dict[str, Any]) -> None:
    close(both(pool, "trainer", tmp_path, **how), "losses", "norms")


def test_lora(pool: Pool, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    close(both(pool, "trainer", tmp_path, lora=True), "losses", "norms")


def test_sft(pool: Pool, tmp_path: Path) -> None:
    """TRL gives lm_head.weight to an autograd.Function of its own."""
    pytest.importorskip("trl")
    close(both(pool, "sft", tmp_path), "losses", "norms")


@pytest.mark.parametrize("stock", [False, pytest.param(True, marks=LONG)], ids=["mt.AdamW", "torch's AdamW"])
def test_accelerate(pool: Pool, tmp_path: Path, stock: bool) -> None:
    found = both(pool, "accelerate", tmp_path, stock=stock)
    close(found, "losses", "norms")
    assert all(of["again"] and of["same"] for of in found)


def test_what_lightnings_strategy_does(pool: Pool) -> None:
    close(both(pool, "lightning"), "losses")


def test_weights_in_a_scripts_own_arithmetic_are_trained_on_all(pool: Pool) -> None:
    close(both(pool, "own_arithmetic"), "losses")


def test_buffers_are_the_first_ranks_before_each_forward(pool: Pool) -> None:
    streamed, plain = both(pool, "buffers")
    close([streamed, plain], "losses")
    for own, other in zip(streamed["stats"], plain["stats"]):
        assert own == pytest.approx(other, abs=1e-6)


def test_what_would_change_gradients_on_their_way_is_refused(pool: Pool) -> None:
    hook, join = pool.call("several_hf:refused", 2)[1]
    assert "communication hook" in hook and "ranks with fewer batches" in join
    (alone,) = pool.call("several_hf:streamed_alone", 2)[0]
    assert "which this process streams alone: torch.distributed has to be initialized before mt.stream" in alone
