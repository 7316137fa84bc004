"""The recipes in examples/ run as they stand there, with --tiny: they learn, and resume where they can."""
from __future__ import annotations

import argparse
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from parity import LONG

import megatrain_torch as mt

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")
FOLDER = Path(__file__).parents[1] / "examples"
# The loss that --tiny comes down to, at most; what it needs besides transformers.
RECIPES = {"finetune_chat": (3.6, ()), "continue_pretraining": (3.5, ()), "lora_70b": (5.35, ("peft",)),
           "lora_over_codes": (5.2, ("peft",)), "long_context": (3.8, ()), "dpo_trl": (0.1, ("trl", "datasets")), "diffusion_transformer": (0.8, ("diffusers",))}
FROM_TO = re.compile(r"^(.*?)(\d+\.\d+) at first, (\d+\.\d+) at last", re.MULTILINE)
Run = Callable[..., str]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Run]:
    """Runs a recipe as `python examples/name.py ...` in a fresh folder; what it says."""
    threads = torch.get_num_threads()
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(FOLDER)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def of(name: str, *words: str) -> str:
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *words])
        runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
        return capsys.readouterr().out

    yield of
    torch.set_num_threads(threads)


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_learns(name: str, run: Run) -> None:
    most, packages = RECIPES[name]
    for package in packages:
        pytest.importorskip(package, reason=f"{package} is not installed: pip install '.[examples]'")
    said = run(name, "--tiny")
    ends = {what: (float(first), float(last)) for what, first, last in FROM_TO.findall(said)}
    rewards = ends.pop("rewards/margins ", None)
    assert ends and all(last < most for _, last in ends.values()), said
    assert rewards is None or rewards[1] > rewards[0] + 2


@pytest.mark.parametrize(("name", "words"), [("lora_over_codes", ["--base", "mxfp4", "--targets", "attention"]),
                                             pytest.param("continue_pretraining", ["--products", "fp8"], marks=LONG)])
def test_a_recipe_learns_in_low_precision(name: str, words: list[str], run: Run) -> None:
    for package in RECIPES[name][1]:
        pytest.importorskip(package)
    losses = [float(words.split()[1]) for words in steps(run(name, "--tiny", "--steps", "3", *words)).values()]
    assert len(losses) == 3 and losses[-1] < losses[0] - 0.05


def steps(said: str) -> dict[str, str]:
    """Loss and norm of each step."""
    return dict(re.findall(r"^step (\d+)  (loss \S+  norm \S+)", said, re.MULTILINE))


@pytest.mark.parametrize("name, at, end", [("finetune_chat", 8, 12), ("continue_pretraining", 16, 20)])
def test_a_recipe_resumes_as_if_it_had_not_stopped(name: str, at: int, end: int, run: Run) -> None:
    whole = steps(run(name, "--tiny", "--save-every", str(at)))
    again = steps(run(name, "--tiny", "--save-every", str(at), "--resume"))
    assert list(again) == [str(i) for i in range(at + 1, end + 1)]
    assert again == {step: whole[step] for step in again}


def together(folder: Path, processes: int, *words: str) -> str:
    """What several_gpus.py says, started by torchrun."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes),
               str(FOLDER / "several_gpus.py"), "--tiny", *words]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@LONG
def test_several_processes_learn_and_go_on_in_another_number(tmp_path: Path) -> None:
    first = together(tmp_path, 2, "--steps", "11")
    losses = [float(loss) for loss in re.findall(r"^step \d+  loss (\S+)", first, re.MULTILINE)]
    assert len(losses) == 2 and losses[1] < losses[0] - 1, first
    again = together(tmp_path, 1, "--steps", "13", "--resume")
    assert [step for step, _ in steps(again).items()] == ["12"], again
    assert float(re.search(r"loss (\S+)", again)[1]) < losses[0] - 1


@pytest.mark.parametrize("name, words, says", [
    ("finetune_chat", ["--seq", "1"], "the assistant says nothing"),
    ("continue_pretraining", ["--seq", "4096"], "7 rows of 4096 tokens; at least 10"),
    ("long_context", ["--seq", "20000"], "30,000 tokens; at least 40,000"),
    ("diffusion_transformer", ["--micro", "3"], "8 images cannot be cut into 3")])
def test_what_cannot_be_trained_on_is_said_before_a_model_is_loaded(
        name: str, words: list[str], says: str, run: Run, monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str]) -> None:
    for package in RECIPES[name][1]:
        pytest.importorskip(package)
    monkeypatch.setattr(mt, "from_pretrained", None)
    monkeypatch.setattr(mt, "stream", None)
    with pytest.raises(SystemExit) as ended:
        run(name, "--tiny", *words)
    assert says in f"{ended.value} {capsys.readouterr().err}"


def test_a_conversation_counts_by_what_is_learnt_of_it(run: Run, tmp_path: Path) -> None:
    """Two rows, of which one has few targets; and a run that is resumed at its end is not told of twice."""
    recipe = runpy.run_path(str(FOLDER / "finetune_chat.py"))
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    plain = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=64, **shape))
    talks = [{"input_ids": torch.randint(64, (9,)).tolist(), "labels": [-100] * 9} for _ in range(4)]
    for talk, learnt in zip(talks, (1, 8, 8, 8)):
        talk["labels"][-learnt:] = talk["input_ids"][-learnt:]
    some = [row for row, _ in zip(recipe["rows"](talks, 9, 0), range(2))]
    counts = [int((row["labels"] != -100).sum()) for row in some]
    want = sum(plain(**row).loss.item() * n for row, n in zip(some, counts)) / sum(counts)
    args = argparse.Namespace(lr=1e-3, states="fp32", steps=1, out=tmp_path, resume=False, tokens=18, save_every=1)
    model = mt.stream(plain, device="cpu")
    assert counts[0] != counts[1] and recipe["train"](model, talks, 2, args) == [pytest.approx(want, rel=1e-5)]
    args.resume = True
    assert recipe["train"](model, talks, 2, args) == []


def test_the_page_lists_every_recipe_and_what_is_asked_for_is_said(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    page = (FOLDER / "README.md").read_text()
    assert {p.stem for p in FOLDER.glob("*.py")} == {*RECIPES, "several_gpus", "tiny", "train_shakespeare"}
    assert all(f"`{name}.py`" in page for name in (*RECIPES, "several_gpus"))
    with pytest.raises(SystemExit):
        run("finetune_chat")
    assert "a model and data are needed, or --tiny" in capsys.readouterr().err
