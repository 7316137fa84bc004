"""The command line keeps what it did not make: a run is marked and locked; what goes was checked, and was the run's."""
from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import parity
import pytest

pytest.importorskip("transformers")
from test_cli import TEXT, bytes_tokenizer, lines, megatrain, refused, threads, toy, toy_model  # noqa: F401
from transformers import TrainerControl

import megatrain_torch as mt
from megatrain_torch import MegatrainError, cli
from megatrain_torch.commands import folder, models, train
from megatrain_torch.commands.folder import LOCK, MARKER, Owned, write_yaml
from megatrain_torch.commands.launch import Team
from megatrain_torch.commands.loop import Bar, Requests

Tree = dict[str, bytes | str]


def tree(path: Path) -> Tree:
    """All that is below, but for the lock."""
    return {str(p.relative_to(path)): os.readlink(p) if p.is_symlink() else p.read_bytes() if p.is_file() else "folder"
            for p in path.rglob("*")}


@pytest.fixture(scope="module")
def made(toy: str, tmp_path_factory: pytest.TempPathFactory) -> Path:  # noqa: F811
    where = tmp_path_factory.mktemp("made")
    (where / "my.txt").write_text(TEXT[:2000])
    assert megatrain("train", toy, where / "my.txt", "--out", where / "run", "--seq", 64, "--tokens", 128, "--steps", 3,
                     "--save-every", 1, "--keep", 2) == 0
    return where


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    """A finished run, and the data beside it."""
    shutil.copy(made / "my.txt", tmp_path / "my.txt")
    return Path(shutil.copytree(made / "run", tmp_path / "run"))


def again(run: Path, toy: str, *words: Any) -> tuple[Any, ...]:  # noqa: F811
    return ("train", toy, run.parent / "my.txt", "--out", run, "--seq", 64, "--tokens", 128, "--steps", 1, *words)


def test_a_run_lists_what_it_made(run: Path) -> None:
    names = {p.name for p in run.iterdir()}
    owned = Owned(run)
    assert names - {MARKER} <= owned.entries.keys() and {"checkpoint-2", "checkpoint-3", "model", MARKER} <= names
    assert not owned.strangers()
    assert not (run / LOCK).exists() and "checkpoint-1" not in owned.entries


# ---- what is there already ----

def fills(name: str) -> Callable[[Path], Any]:
    def fill(folder: Path) -> None:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("mine")
    return fill


@pytest.mark.parametrize("name", ["model/config.json", "config.yaml", "log.jsonl", "checkpoint-5/model.safetensors",
                                  "checkpoint-1.tmp-9-9/a", ".unfinished/a", "model.unfinished/a"])
def test_a_folder_in_which_a_runs_names_are_somebody_elses_is_refused(made: Path, toy: str, tmp_path: Path,  # noqa: F811
                                                                      monkeypatch: pytest.MonkeyPatch, name: str,
                                                                      capsys: pytest.CaptureFixture[str]) -> None:
    fills(name)(tmp_path)
    before = tree(tmp_path)
    monkeypatch.chdir(tmp_path)
    for words in ((), ("--overwrite",)):
        said = refused(capsys, "train", toy, made / "my.txt", "--out", ".", "--seq", 64, *words)
        assert name.split("/")[0] in said and "which no run of megatrain made" in said
        assert tree(tmp_path) == before
    assert "is no run: it has no megatrain-run.json" in refused(capsys, "resume", ".")


def test_a_folder_with_other_things_in_it_is_run_in(made: Path, toy: str, tmp_path: Path,  # noqa: F811
                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    mine = ("notes.txt", "model-of-mine/config.json", "checkpoint-best/a", "checkpoint-/b", "run.yaml")
    for name in mine:
        fills(name)(tmp_path)
    monkeypatch.chdir(tmp_path)
    for words in ((), ("--overwrite",)):
        assert megatrain("train", toy, made / "my.txt", "--out", ".", "--seq", 64, "--tokens", 128, "--steps", 1, *words) == 0
        assert all((tmp_path / name).read_text() == "mine" for name in mine)


# ---- --overwrite ----

@pytest.mark.parametrize("model", ["toy", "run", "run/model", "run/checkpoint-3"])
def test_overwrite_with_what_is_refused_keeps_the_run(run: Path, toy: str, model: str,  # noqa: F811
                                                      capsys: pytest.CaptureFixture[str]) -> None:
    before = tree(run)
    source = toy if model == "toy" else str(run.parent / model)
    for words in (("--seq", 9999), ("--micro", 3), ("--host", "200KiB"), ("--lr", "fast"), ("--nvme", "/nothing"),
                  ("--validation", "nothing.txt"), ("--steps", 0), ("--tokens", 9999 * 64)):
        refused(capsys, *again(run, source, "--overwrite", *words))
        assert tree(run) == before, words
    refused(capsys, "train", source, run.parent / "my.txtt", "--out", run, "--overwrite")
    refused(capsys, "train", source + "x", run.parent / "my.txt", "--out", run, "--overwrite")
    assert tree(run) == before


@pytest.mark.parametrize("model", ["run", "run/model"])
def test_overwrite_takes_the_runs_own_model_before_it_goes(run: Path, model: str) -> None:
    assert megatrain(*again(run, str(run.parent / model), "--overwrite", "--save-every", 9)) == 0
    assert [p.name for p in run.glob("checkpoint-*")] == ["checkpoint-1"] and (run / "model/config.json").is_file()


def linked(run: Path) -> None:
    (run / "model").rename(run.parent / "away")
    (run / "model").symlink_to(run.parent / "away")


@pytest.mark.parametrize("change", [fills("model/notes.txt"), fills("checkpoint-3/more/a.txt"), fills("checkpoint-9/a"), linked],
                         ids=["beside", "in a checkpoint", "another checkpoint", "linked"])
def test_overwrite_removes_nothing_that_the_run_does_not_list(run: Path, toy: str, change: Callable[[Path], Any],  # noqa: F811
                                                              capsys: pytest.CaptureFixture[str]) -> None:
    change(run)
    before = tree(run.parent)
    assert "which no run of megatrain made" in refused(capsys, *again(run, toy, "--overwrite"))
    assert tree(run.parent) == before


# ---- rotation, and what a crash left ----

def test_rotation_removes_what_the_run_lists_alone(run: Path) -> None:
    shutil.rmtree(run / "model")
    for name in ("checkpoint-1/trainer_state.json", "checkpoint-9000/trainer_state.json", "checkpoint-3/notes.txt",
                 "checkpoint-5.tmp-backup/a"):
        fills(name)(run)
    (run / "checkpoint-2").rename(run.parent / "away")
    (run / "checkpoint-2").symlink_to(run.parent / "away")           # on a larger disk, say
    kept = tree(run.parent / "away")
    mine = {name: value for name, value in tree(run).items() if value == b"mine"}
    write_yaml(run / "config.yaml", folder.settings_of(run).with_(steps=6, keep=1))
    assert megatrain("resume", run) == 0
    assert mine.items() <= tree(run).items() and tree(run.parent / "away") == kept
    assert [p.name for p in (run / "checkpoint-3").iterdir()] == ["notes.txt"]
    assert [p.name for p in folder.checkpoints(run)] == ["checkpoint-6"]
    assert {p.name for p in run.glob("checkpoint-*")} == {"checkpoint-1", "checkpoint-3", "checkpoint-5.tmp-backup",
                                                          "checkpoint-6", "checkpoint-9000"}


def test_what_is_in_the_runs_way_is_said_before_it_goes_on(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(run / "model")
    write_yaml(run / "config.yaml", folder.settings_of(run).with_(steps=6))
    for name in ("checkpoint-5/a", "model/a"):
        fills(name)(run)
        before = tree(run)
        assert f"{run / name.split('/')[0]}" in (said := refused(capsys, "resume", run)) and "this run did not make" in said
        assert tree(run) == before
        shutil.rmtree((run / name).parent)


def test_a_checkpoint_that_came_between_is_not_replaced(run: Path, monkeypatch: pytest.MonkeyPatch,
                                                        capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(run / "model")
    write_yaml(run / "config.yaml", folder.settings_of(run).with_(steps=5))
    step = mt.AdamW.step
    monkeypatch.setattr(mt.AdamW, "step", lambda *a, **k: (shutil.copytree(
        run / "checkpoint-3", run / "checkpoint-4", dirs_exist_ok=True), step(*a, **k))[1])
    assert "checkpoint-4 is there, and this run did not make it" in refused(capsys, "resume", run)
    assert tree(run / "checkpoint-4") == tree(run / "checkpoint-3")


def test_a_run_that_was_stopped_in_its_last_step_makes_no_more(run: Path) -> None:
    before = (run / "model/model.safetensors").read_bytes()
    shutil.rmtree(run / "model")
    assert megatrain("resume", run) == 0
    assert (run / "model/model.safetensors").read_bytes() == before
    assert [line["step"] for line in lines(run) if "loss" in line] == [1, 2, 3]


# ---- the marker and the lock ----

@pytest.mark.parametrize("text", ["", "[]", "{}", "3", "[" * 100_000, '{"program": "other"}', "entries ../x", "entries /a",
                                  "entries notes.txt", "entries checkpoint-1/a", "files ../../x", "files /x", "data"])
def test_a_marker_that_is_none_is_refused(run: Path, toy: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:  # noqa: F811
    found = json.loads((run / MARKER).read_text())
    kind, _, name = text.partition(" ")
    if kind == "entries":
        found["entries"][name] = None
    elif kind == "files":
        found["entries"]["model"].append(name)
    elif kind == "data":
        found["data"] = 3
    (run / MARKER).write_text(json.dumps(found) if kind in ("entries", "files", "data") else text)
    before = tree(run.parent)
    for words in (again(run, toy, "--overwrite"), ("resume", run), ("generate", run, "--prompt", "a")):
        assert MARKER in refused(capsys, *words)
    assert tree(run.parent) == before


def test_a_folder_that_is_written_by_another_is_left_alone(run: Path, toy: str, made: Path,  # noqa: F811
                                                           capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(run / "model")
    words = f"is being written by process {os.getpid()} on"
    with Owned(run).locked():
        before = tree(run)
        for command in (("resume", run), again(run, toy, "--overwrite")):
            assert words in refused(capsys, *command)
        assert tree(run) == before
        assert megatrain("generate", run, "--prompt", "a", "--max-new-tokens", 1) == 0, "who only reads may"
    assert not (run / LOCK).exists()
    (run / LOCK).write_text("process 1 on earth\n")                  # of one that was killed
    assert megatrain("resume", run) == 0 and not (run / LOCK).exists()


def test_a_run_that_came_between_is_seen(run: Path, toy: str, tmp_path: Path,  # noqa: F811
                                         monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """While the model is loaded: into a folder that was not there, so that nothing was locked."""
    load = models.load_model
    monkeypatch.setattr(models, "load_model", lambda *words: (shutil.copytree(run, tmp_path / "new"), load(*words))[1])
    said = refused(capsys, "train", toy, tmp_path / "my.txt", "--out", tmp_path / "new", "--seq", 64, "--overwrite")
    assert "has another run since this one was asked for" in said and tree(run) == tree(tmp_path / "new")


def test_a_folder_of_data_leaves_runs_out(run: Path) -> None:
    from megatrain_torch.commands import records
    assert records.files_of(str(run.parent)) == [run.parent / "my.txt"]


def test_a_forked_child_keeps_no_lock_and_takes_none_away(tmp_path: Path) -> None:
    """As a DataLoader's worker that outlives a killed command, and as one that ends while the command writes."""
    program = """if True:
        import os, sys
        from pathlib import Path
        from megatrain_torch.commands.folder import LOCK, Owned
        run = Path(sys.argv[1])
        with Owned(run).locked():
            child = os.fork()
            if not child:
                sys.exit()
            os.waitpid(child, 0)
            print((run / LOCK).exists(), flush=True)
            if os.fork():
                os._exit(0)
            print("lives", flush=True)                  # and has closed what is not its own
            sys.stdin.read()
        """
    root = Path(mt.__file__).parents[1]
    command = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdin=subprocess.PIPE, text=True,
                               stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(root)})
    assert command.stdout.readline() == "True\n", "a child removed its parent's lock"
    assert command.stdout.readline() == "lives\n"
    command.wait()
    with Owned(tmp_path).locked():                       # though a child of the command lives
        pass
    command.stdin.close()
    command.stdout.close()


def test_a_lock_that_was_removed_meanwhile_is_none(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import fcntl
    flock, taken = fcntl.flock, []

    def slow(fd: int, how: int) -> None:
        if not taken:
            (run / LOCK).unlink()                                    # its owner ended between open and lock
        taken.append(fd)
        flock(fd, how)

    monkeypatch.setattr(fcntl, "flock", slow)
    with pytest.raises(MegatrainError, match="is being written by another process"), Owned(run).locked():
        pass
    with Owned(run).locked(), pytest.raises(MegatrainError, match="is being written by process"):
        Owned(run).lock()


def test_a_file_system_that_counts_no_links_has_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some of users' own (FUSE) say 0 of all files; of NFS a file that is removed while it is open has one still."""
    fstat, asked = os.fstat, []

    def uncounted(fd: int) -> os.stat_result:
        asked.append(fd)
        assert len(asked) < 9, "it asks for ever"
        return os.stat_result(0 if i == 3 else n for i, n in enumerate(fstat(fd)[:10]))

    monkeypatch.setattr(os, "fstat", uncounted)
    with Owned(tmp_path).locked():
        assert (tmp_path / LOCK).is_file()


# ---- signals, and words without a terminal ----

@pytest.mark.parametrize("number, status, step", [
    (signal.SIGINT, 130, 1), (signal.SIGTERM, 143, 2),
    pytest.param(signal.SIGINT, 130, 2, marks=parity.LONG), pytest.param(signal.SIGTERM, 143, 1, marks=parity.LONG)])
def test_a_signal_ends_a_run_with_its_own_status_behind_a_checkpoint(made: Path, toy: str, tmp_path: Path,  # noqa: F811
                                                                     number: int, status: int, step: int,
                                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    own, calls = mt.AdamW.step, []

    def stepped(*args: Any, **kw: Any) -> Any:
        calls.append(1)
        if len(calls) == step:
            signal.raise_signal(number)
        return own(*args, **kw)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    monkeypatch.setattr(mt.AdamW, "step", stepped)
    try:
        assert megatrain("train", toy, made / "my.txt", "--out", tmp_path / "r", "--seq", 64, "--tokens", 128, "--steps", 2,
                         "--validation", 0) == status
    finally:
        signal.signal(signal.SIGINT, before)
    assert folder.last_checkpoint(tmp_path / "r").name == f"checkpoint-{step}"
    assert not (tmp_path / "r/model").exists()
    assert megatrain("resume", tmp_path / "r") == 0 and (tmp_path / "r/model").exists()
    assert [line["step"] for line in lines(tmp_path / "r")] == [1, 2]


def test_the_first_signal_says_how_a_run_ends() -> None:
    requests = Requests(Team())
    requests.heard(signal.SIGUSR1, None)
    assert requests.save and not requests.stop
    requests.heard(signal.SIGTERM, None)
    with pytest.raises(KeyboardInterrupt):
        requests.heard(signal.SIGINT, None)
    control = TrainerControl()
    requests.on_step_end(None, None, control)
    assert requests.stop == signal.SIGTERM and control.should_save and control.should_log and control.should_training_stop


def test_steps_that_share_a_line_of_the_log_have_their_mean_and_the_last_step_has_a_line(
        made: Path, toy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:  # noqa: F811
    for name, more in {"each": [], "ten": ["--log-every", 10]}.items():
        assert megatrain("train", toy, made / "my.txt", "--out", tmp_path / name, "--seq", 64, "--tokens", 128, "--steps", 7,
                         "--save-every", 100, "--validation", 0.1, "--eval-every", 3, *more) == 0
        assert "step 7/7: loss " in capsys.readouterr().out and folder.settings_of(tmp_path / name).log_every == (more or [1])[-1]
    each, ten = ([line for line in lines(tmp_path / name) if "loss" in line] for name in ("each", "ten"))
    assert [line["step"] for line in ten] == [1, 3, 6, 7], "what is evaluated has a line too"
    assert ten[2]["loss"] == pytest.approx(sum(line["loss"] for line in each[3:6]) / 3, rel=1e-5)
    assert ten[3] | (timed := {"tokens_per_second": 0, "bound": ""}) == each[6] | timed


@pytest.mark.parametrize("own, seconds, every", [(None, 1.3, 10), (None, 5.0, 1), (3, 1.3, 3)])
def test_steps_that_are_short_on_a_gpu_share_lines(own: int | None, seconds: float, every: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mt, "plan", lambda *_, **__: types.SimpleNamespace(seconds=seconds, micro=2))
    asked = train.Settings.of({"log_every": own, "tokens": 64, "seq": 64}, "here").with_(device="cuda")
    assert train._planned(None, asked, Team())[0] == asked.with_(micro=2, log_every=every)


def test_without_a_terminal_the_loss_is_told_every_30_seconds_and_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatrain_torch.commands import loop
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    now, said = [0.0], []
    monkeypatch.setattr(loop, "monotonic", lambda: now[0])
    bar = Bar(said.append, types.SimpleNamespace(progress=str))
    state = types.SimpleNamespace(max_steps=7, global_step=0)
    bar.on_train_begin(None, state, None)
    for step, at in enumerate((1, 5, 30.9, 31, 32, 70, 71), 1):
        state.global_step, now[0] = step, float(at)
        bar.on_log(None, state, None, {"loss": step / 10, "tokens_per_second": 5.0})
    bar.on_train_end(None, state, None)
    assert [line.split("  ")[0] for line in said] == ["step 1/7: loss 0.1", "step 4/7: loss 0.4", "step 6/7: loss 0.6",
                                                      "step 7/7: loss 0.7"]


def test_version_and_help_name_what_they_take(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--version"], ["train", "--help"], ["plan", "--help"], ["resume", "--help"], ["export", "--help"]):
        with pytest.raises(SystemExit) as end:
            cli.main(words)
        assert end.value.code == 0
    said = " ".join(capsys.readouterr().out.split())
    assert f"megatrain {mt.__version__}" in said
    for words in ("--out FOLDER", "--vram SIZE", "--host SIZE", "--nvme FOLDER", "--validation SHARE|DATA", "RUN FOLDER",
                  "--host SIZE, --ram SIZE", "[DATA ...]"):
        assert words in said, words
    assert "WORD" not in said


# ---- the log ----

ODD = ['{"step": 3, "lo', "[]", "3", "null", '"a"', "{}", '{"step": "a"}', '{"step": null, "loss": 1}', '{"step": true}',
       '{"step": -1, "loss": 1}', '{"step": 3, "loss": NaN}', '{"step": 3, "loss": Infinity, "eval_loss": -Infinity}',
       '{"step": 3, "loss": "a", "eval_loss": [], "bound": ["x"], "grad_norm": {}}', '{"step": 3, "loss": true}',
       '{"step": 3, "loss": 1' + "0" * 400 + "}", '{"step": ' + "9" * 30 + ', "loss": 1}', "[" * 100_000, "\ufeff{}",
       '{"step": 3, "loss": 1e308, "bound": "<script>"}', '{"step": 3, "bound": 3, "learning_rate": 1e-320}']


def test_resume_survives_whatever_is_in_the_log(run: Path) -> None:
    log = (run / folder.LOG).read_bytes()
    (run / folder.LOG).write_bytes(log + b"\xff\xfe\n" + "\n".join(ODD).encode() + b"\n\0")
    shutil.rmtree(run / "checkpoint-3")                  # as if it had been stopped behind step 2
    owned = Owned(run)
    owned.go_on(owned.data)
    kept = (run / folder.LOG).read_text()
    assert '"loss": "a"' not in kept and all(json.loads(line)["step"] <= 2 for line in kept.splitlines()) and "tokens_per" in kept


def test_an_export_leaves_what_has_its_name(run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    fills("e.unfinished/a")(run.parent)
    model, tokenizer = toy_model(), bytes_tokenizer()
    save = tokenizer.save_pretrained

    def meanwhile(path: Any) -> None:
        save(path)
        fills("e/a")(run.parent)

    monkeypatch.setattr(type(tokenizer), "save_pretrained", lambda _, path: meanwhile(path))
    before = {p.name for p in run.parent.iterdir()}
    with pytest.raises(MegatrainError, match="is there already"), models.appearing(run.parent / "e") as half:
        models.save(model, tokenizer, half, run.parent)
    assert {p.name for p in run.parent.iterdir()} == before | {"e"} and (run.parent / "e/a").read_text() == "mine"
    assert (run.parent / "e.unfinished/a").read_text() == "mine"


@pytest.mark.parametrize("name, content", [
    ("trainer_state.json", b""), ("trainer_state.json", b"[" * 100_000), ("trainer_state.json", b"[]"),
    ("trainer_state.json", b'{"global_step": 4, "epoch": 1, "log_history": []}'),
    ("trainer_state.json", b'{"global_step": "3", "epoch": 1, "log_history": []}'),
    ("trainer_state.json", b'{"global_step": 3, "epoch": "a", "log_history": []}'),
    ("trainer_state.json", b'{"global_step": 3, "epoch": 1, "log_history": 3}'),
    ("trainer_state.json", b'{"global_step": 3, "epoch": 1, "log_history": [], "strange": 3}'),
    ("rng_state.pth", b"abc"), ("config.json", b"[]"), ("manifest.json", b"{}")], ids=str)
def test_a_checkpoint_whose_small_files_are_odd_is_named_before_anything_changes(
        run: Path, name: str, content: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(run / "model")
    write_yaml(run / "config.yaml", folder.settings_of(run).with_(steps=5))
    (run / "checkpoint-3" / name).write_bytes(content)
    before = tree(run)
    said = refused(capsys, "resume", run)
    assert f"checkpoint-3/{name}" in said and "goes on from checkpoint-2" in said and tree(run) == before


def test_doctor_replaces_no_file_that_describes_no_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "thesis.tex").write_text("mine")
    assert "describes no machine: it stays" in refused(capsys, "doctor", "--device", "cpu", "--out", tmp_path / "thesis.tex")
    assert (tmp_path / "thesis.tex").read_text() == "mine"


def test_where_there_are_no_locks_it_is_said(run: Path, monkeypatch: pytest.MonkeyPatch,
                                             capsys: pytest.CaptureFixture[str]) -> None:
    import errno
    import fcntl

    def none(*_: Any) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", none)
    with Owned(run).locked():
        assert "this file system has no locks (Function not implemented)" in capsys.readouterr().out
