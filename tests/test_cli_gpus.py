"""megatrain train --gpus: a process for each GPU, which train as one does; stopped, killed and refused."""
from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from parity import LONG
from safetensors.torch import load_file
from test_cli import TEXT, bytes_tokenizer, toy_model

from megatrain_torch import MegatrainError, cli
from megatrain_torch.commands import launch
from megatrain_torch.commands.data import Rows, collate
from megatrain_torch.commands.loop import Filled
from megatrain_torch.commands.settings import Settings, in_flags

STEPS = 14
SETTINGS = ("--device", "cpu", "--seq", "32", "--tokens", "256", "--steps", STEPS, "--lr", "1e-3", "--save-every", "100",
            "--eval-every", "7", "--validation", "0.1")


@pytest.fixture(autouse=True)
def one_core(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """So that a product is cut into parts in the same way in all processes."""
    threads = torch.get_num_threads()
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """A model without dropout, which several processes draw alike, and data of more rows than an epoch has steps."""
    where = tmp_path_factory.mktemp("toy")
    model = toy_model()
    model.config.attention_dropout = 0.0
    model.save_pretrained(where)
    bytes_tokenizer().save_pretrained(where)
    (where / "text.txt").write_text(TEXT[:3000])
    return [where, where / "text.txt"]


def megatrain(*words: Any) -> int:
    return cli.main([str(w) for w in words])


def log(run: Path) -> list[dict[str, Any]]:
    path = run / "log.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines]


def rank(number: int, launcher: int) -> int:
    """The process that is it."""
    wanted = {f"RANK={number}".encode(), f"{launch.LAUNCHER}={launcher}".encode()}
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if wanted <= set(path.read_bytes().split(b"\0")):
                return int(path.parent.name)
    raise LookupError(number)


def when_it_trains(run: Path, do: Callable[[], Any]) -> threading.Thread:
    """Does something, in a thread, when three steps are logged."""
    def watch() -> None:
        end = time.monotonic() + 60
        while len(log(run)) < 3 and time.monotonic() < end:
            time.sleep(0.02)
        do()

    thread = threading.Thread(target=watch)
    thread.start()
    return thread


# ---- runs ----------------------------------------------------------------------------------------

def test_two_processes_train_as_one_and_are_stopped_and_resumed_by_another_number(
        toy: list[Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    alone, run = tmp_path / "alone", tmp_path / "run"
    assert megatrain("train", *toy, "--out", alone, *SETTINGS, "--micro", 2) == 0
    capfd.readouterr()
    told = when_it_trains(run, lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert megatrain("train", *toy, "--out", run, *SETTINGS, "--gpus", 2) == 128 + signal.SIGTERM
    told.join()
    said = capfd.readouterr()
    stopped = next(int(p.name.split("-")[1]) for p in run.glob("checkpoint-*"))
    assert said.out.count(f"checkpoint-{stopped}") == 1 and said.out.count("stopped at step") == 1 and not said.err
    assert {p.name for p in (run / f"checkpoint-{stopped}").glob("rng*")} == {"rng_state_0.pth", "rng_state_1.pth"}
    assert "gpus: 2" in (run / "config.yaml").read_text()
    assert megatrain("resume", run, "--gpus", 1) == 0
    assert "gpus: 1" in (run / "config.yaml").read_text()
    own, other = (load_file(folder / "model/model.safetensors") for folder in (run, alone))
    assert all(torch.equal(own[name], other[name]) for name in other)
    found, wanted = ([{k: v for k, v in line.items() if k in ("step", "loss", "grad_norm", "eval_loss")}
                      for line in log(folder)] for folder in (run, alone))
    assert found == wanted and len(found) == STEPS + 2
    begun, after = ([line["step"] for line in log(run) if line.get("gpus", 1) == many] for many in (2, 1))
    assert begun == list(range(1, stopped + 1)) or begun == sorted([*range(1, stopped + 1), 7])
    assert after[-1] == STEPS
    assert not list(run.glob("*.unfinished")) and not (run / ".unfinished").exists()


@LONG
def test_the_death_of_one_ends_all_and_is_named(toy: list[Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run, begun = tmp_path / "run", 0.0

    def kill() -> None:
        nonlocal begun
        begun = time.monotonic()
        os.kill(rank(1, os.getpid()), signal.SIGKILL)

    told = when_it_trains(run, kill)
    status = megatrain("train", *toy, "--out", run, *SETTINGS, "--steps", 5000, "--gpus", 2)
    told.join()
    assert status == 128 + signal.SIGKILL and time.monotonic() - begun < launch.GRACE_S
    said = [line for line in capfd.readouterr().err.splitlines() if line.startswith("megatrain:")]
    assert len(said) == 1 and "rank 1 (process" in said[0] and "was ended by SIGKILL" in said[0]


@LONG
def test_they_save_and_end_when_who_started_them_is_gone(toy: list[Any], tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = [str(w) for w in ("train", *toy, "--out", run, *SETTINGS, "--steps", 5000, "--gpus", 2)]
    started = subprocess.Popen([sys.executable, "-m", "megatrain_torch", *words], stdout=subprocess.DEVNULL)
    when_it_trains(run, started.kill).join()
    started.wait()
    end = time.monotonic() + 30
    while time.monotonic() < end:
        try:
            rank(0, started.pid)
        except LookupError:
            break
        time.sleep(0.05)
    assert [p.name for p in run.glob("checkpoint-*") if (p / "trainer_state.json").exists()]
    assert not (run / ".megatrain-run.lock").exists()


@LONG
def test_what_is_refused_is_said_once(toy: list[Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    assert megatrain("train", toy[0], tmp_path / "gone.txt", "--out", run, *SETTINGS, "--gpus", 2) == 1
    said = capfd.readouterr()
    assert said.err.count("megatrain:") == 1 and "gone.txt" in said.err and "rank" not in said.err and not said.out
    assert not run.exists()


# ---- settings ------------------------------------------------------------------------------------

@pytest.mark.parametrize("values, words", [
    ({"gpus": 0}, "gpus=0: at least 1 is needed"),
    ({"tokens": 320, "gpus": 4}, "10 rows of 32 tokens cannot be divided among 4 GPUs; nearest: tokens=256; or as many "
     "GPUs as 1, 2, 5, 10"),
    ({"tokens": 256, "gpus": 4, "micro": 4}, "micro=4: 2 rows (tokens / seq / gpus) cannot be cut into so many equal "
     "parts; 1, 2 can")], ids=str)
def test_a_step_that_cannot_be_divided_is_refused_with_what_can(values: dict[str, Any], words: str) -> None:
    with pytest.raises(MegatrainError) as why:
        Settings.of({"seq": 32, **values}, "here").for_data(1000)
    assert words in str(why.value)


@pytest.mark.parametrize("gpus", [1, 2, 3, 8])
def test_tokens_that_were_not_said_are_divided_evenly(gpus: int) -> None:
    found = Settings(seq=32, device="cpu", gpus=gpus).for_data(1000)
    assert found.tokens // 32 % gpus == 0 and 48 // gpus * gpus <= found.tokens // 32 <= 50


@pytest.mark.parametrize("micro, before, now, wanted", [(1, 2, 1, 2), (4, 1, 2, 2), (1, 4, 2, 2), (1, 1, 2, None),
                                                        (3, 2, 2, 3), (3, 1, 2, None)])
def test_a_resumed_run_keeps_its_micro_batches_where_it_can(micro: int, before: int, now: int, wanted: int | None) -> None:
    assert Settings(micro=micro, gpus=before).for_gpus(now) == Settings(micro=wanted, gpus=now)


def test_gpus_that_are_not_there_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(MegatrainError, match="gpus=3: there are 2 CUDA devices here; --gpus 2 or fewer"):
        Settings(gpus=3).for_machine()


def test_another_launcher_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert megatrain("train", "model", "data") == 1
    assert "start one, and --gpus 4 starts the others" in capsys.readouterr().err


@pytest.mark.parametrize("rank, own, failed, said", [
    (0, "no room", [1, 0, 0], [0, "no room"]), (1, None, [1, 0, 0], None),
    (1, "no room", [0, 1, 0], [1, "no room"]), (0, None, [0, 1, 0], None),
    (0, "not the same", [1, 1, 1], [0, "not the same"]), (2, "not the same", [1, 1, 1], None),
    (2, "no room", None, [2, "no room"]),
    (0, None, None, [0, "another process is gone"])], ids=str)
def test_the_first_that_fails_says_why_and_no_other(rank: int, own: str | None, failed: list[int] | None,
                                                    said: list[Any] | None, monkeypatch: pytest.MonkeyPatch,
                                                    tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """failed: of three; None: a process is gone."""
    def gather(found: list[bool], *_: Any) -> None:
        if failed is None:
            raise RuntimeError("closed")
        found[:] = map(bool, failed)

    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    (tmp_path / "told").touch()
    monkeypatch.setenv(launch.LAUNCHER, str(os.getppid()))
    monkeypatch.setenv(launch.TOLD, str(tmp_path / "told"))
    monkeypatch.setenv("RANK", str(rank))
    with pytest.raises(MegatrainError) as why, in_flags("seq"), launch.Team(3, rank).as_one():
        if own is not None:
            raise MegatrainError(own)
    launch.complain(why.value, str(why.value))
    assert [json.loads(line) for line in (tmp_path / "told").read_text().splitlines()] == [said] * (said is not None)
    monkeypatch.setenv(launch.LAUNCHER, "1")                 # as the launcher was killed
    launch.complain(why.value, str(why.value))
    assert capsys.readouterr().err == (f"megatrain: {said[1]}\n" if said else "")
    monkeypatch.setenv(launch.LAUNCHER, str(os.getppid()))
    (tmp_path / "told").unlink()                             # as it ended
    launch.complain(why.value, str(why.value))
    assert capsys.readouterr().err == (f"megatrain: {said[1]}\n" if said else "")


def test_the_port_on_which_processes_meet_is_nobody_elses(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first process has it from the launcher, whatever is opened on this machine until it is there."""
    class Process:
        pid = returncode = 0
        poll = kill = wait = staticmethod(lambda: 0)

        def __init__(self, *_: Any, env: dict[str, str], pass_fds: tuple[int, ...], **__: Any) -> None:
            with socket.socket() as other, pytest.raises(OSError, match="in use"):
                other.bind(("127.0.0.1", int(env["MASTER_PORT"])))
            if env["RANK"] == "0":
                assert pass_fds == (int(env[launch.MEET]),)
                with socket.socket(fileno=os.dup(pass_fds[0])) as listens:
                    assert listens.getsockname()[1] == int(env["MASTER_PORT"])

    monkeypatch.setattr(launch.subprocess, "Popen", Process)
    assert launch.launch(["doctor"], 2) == 0


# ---- rows ----------------------------------------------------------------------------------------

def test_an_epochs_last_step_has_the_rows_of_one_process() -> None:
    order = Filled(torch.utils.data.SequentialSampler(range(10)), 4)
    assert [*order] == [*range(10), None, None] and len(order) == 12
    ids = torch.arange(12).view(3, 4).numpy()
    rows = Rows(ids, ids >= 0, ids < 0)
    batch = collate(False)
    assert batch([rows[0], rows[None]])["input_ids"].tolist() == [[0, 1, 2, 3]]
    assert (batch([rows[None], rows[None]])["labels"] == -100).all()
