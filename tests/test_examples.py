"""The recipes in examples/ run as they stand there, with --tiny: they learn, and resume where they can."""
from __future__ import annotations

import argparse
import ast
import gc
import json
import os
import re
import runpy
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from parity import LONG

import megatrain_torch as mt
from megatrain_torch.cli import main
from megatrain_torch.commands.settings import Settings, read_yaml
from megatrain_torch.model.runtime import find_runtime

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


# ---- examples/configs: what each file says of its machine is what `megatrain plan` says ----

FILES = sorted((FOLDER / "configs").glob("*.yaml"))


def shape(kind: str, hidden: int, inner: int, layers: int, heads: int, kv: int, words: int, longest: int,
          **more: Any) -> dict[str, Any]:
    return {"model_type": kind, "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers,
            "num_attention_heads": heads, "num_key_value_heads": kv, "vocab_size": words,
            "max_position_embeddings": longest, "dtype": "bfloat16"} | more


GPT_OSS = {"head_dim": 64, "num_experts_per_tok": 4, "quantization_config": {"quant_method": "mxfp4"}}
# As their config.json on the hub have it.
MODELS = {
    "HuggingFaceTB/SmolLM2-135M-Instruct": shape("llama", 576, 1536, 30, 9, 3, 49152, 8192, tie_word_embeddings=True),
    "Qwen/Qwen2.5-7B-Instruct": shape("qwen2", 3584, 18944, 28, 28, 4, 152064, 32768),
    "Qwen/Qwen3-8B": shape("qwen3", 4096, 12288, 36, 32, 8, 151936, 40960, head_dim=128),
    "Qwen/Qwen3-14B": shape("qwen3", 5120, 17408, 40, 40, 8, 151936, 40960, head_dim=128),
    "Qwen/Qwen3-32B": shape("qwen3", 5120, 25600, 64, 64, 8, 151936, 40960, head_dim=128),
    "Qwen/Qwen3-30B-A3B-Instruct-2507": shape("qwen3_moe", 2048, 6144, 48, 32, 4, 151936, 262144, head_dim=128,
                                              moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8),
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-32B": shape("qwen2", 5120, 27648, 64, 40, 8, 152064, 131072),
    "meta-llama/Llama-3.1-8B-Instruct": shape("llama", 4096, 14336, 32, 32, 8, 128256, 131072),
    "meta-llama/Llama-3.3-70B-Instruct": shape("llama", 8192, 28672, 80, 64, 8, 128256, 131072),
    "mistralai/Mistral-Small-24B-Instruct-2501": shape("mistral", 5120, 32768, 40, 32, 8, 131072, 32768, head_dim=128,
                                                       sliding_window=None),
    "microsoft/phi-4": shape("phi3", 5120, 17920, 40, 40, 10, 100352, 16384, pad_token_id=100349),
    "openai/gpt-oss-20b": shape("gpt_oss", 2880, 2880, 24, 64, 8, 201088, 131072, num_local_experts=32, **GPT_OSS),
    "openai/gpt-oss-120b": shape("gpt_oss", 2880, 2880, 36, 64, 8, 201088, 131072, num_local_experts=128, **GPT_OSS),
}


def said(file: Path, name: str) -> str:
    return re.search(rf"^# {name}: (.*)$", file.read_text(), re.MULTILINE)[1]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_configuration_fits_its_machine_at_the_rate_it_says(
        file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings.of(read_yaml(file), file.name)
    (tmp_path / "config.json").write_text(json.dumps(MODELS[settings.model]))
    asked = {"machine": said(file, "machine"), "tokens": settings.tokens, "seq": settings.seq,
             "states": settings.states, "base": settings.base, "lora": settings.lora}
    # PEFT draws an adapter's first values even where there is no memory for them: half of a 70B's time here.
    monkeypatch.setattr(torch.nn.init, "kaiming_uniform_", lambda tensor, *args, **kwargs: tensor)
    assert main(["plan", str(tmp_path), "--json", *(f"--{k}={v}" for k, v in asked.items() if v is not None)]) == 0
    found = [*map(json.loads(capsys.readouterr().out).get, ("tokens_per_second", "vram_bytes", "host_bytes"))]
    words = "{:,.0f} tokens/s, {} of the GPU's memory, {} of the host's".format(found[0], *map(mt.show_bytes, found[1:]))
    rate, *sizes = re.findall(r"[\d.,]+\d(?: [MGT]iB)?", said(file, "predicted"))
    right = [float(rate.replace(",", "")), *(mt.parse_bytes(size, file.name) for size in sizes)]
    assert found == pytest.approx(right, rel=0.03), f"# predicted: {words}"


def test_the_page_lists_every_configuration_with_its_rate() -> None:
    rows = re.findall(r"^\| `(.*?\.yaml)` .* ([\d,]+) \|$", (FOLDER / "README.md").read_text(), re.MULTILINE)
    assert len(rows) >= 12 and dict(rows) == {file.name: said(file, "predicted").split()[0] for file in FILES}


# ---- notebooks, cell by cell as a kernel would run them, one a second time in the same session ----

NOTEBOOK = FOLDER / "notebook.ipynb"
QUICK_START = NOTEBOOK.with_name("quickstart.ipynb")


def cells(notebook: Path = NOTEBOOK) -> list[str]:
    pytest.importorskip("matplotlib")
    return ["".join(c["source"]) for c in json.loads(notebook.read_text())["cells"] if c["cell_type"] == "code"]


def shown(source: str, names: dict[str, Any]) -> Any:
    """Runs a cell; the value of its last line, if that is an expression."""
    tree = ast.parse(source)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, str(NOTEBOOK), "exec"), names)
    return None if last is None else eval(compile(ast.Expression(last.value), str(NOTEBOOK), "eval"), names)


def as_seen(value: Any) -> Any:
    """What a notebook shows of it."""
    for kind in ("_repr_png_", "_repr_html_"):
        if hasattr(value, kind):
            return getattr(value, kind)()
    return repr(value)


def test_the_notebook_runs_and_shows_tables_and_pictures() -> None:
    names: dict[str, Any] = {}
    seen = [as_seen(shown(source, names)) for source in cells()]
    plan, before, report, picture, after = seen[1:6]
    assert "<pre>" in plan and "predicted" in plan and "device memory" in plan
    assert "weights" in before and "moments" not in before and "moments" in after
    assert "bound by" in report and picture.startswith(b"\x89PNG")
    losses = names["losses"]
    assert len(losses) == 6 and losses[5] < losses[0] - 0.5, f"it learns, interrupted or not: {losses}"


def test_cells_that_are_run_again_leave_nothing_of_the_model_before() -> None:
    names: dict[str, Any] = {}
    sources = cells()
    shown(sources[0], names)
    gone = []
    for _ in range(3):
        for source in (sources[2], sources[3], sources[6]):          # stream, train, interrupt
            shown(source, names)
        gone.append(weakref.ref(find_runtime(names["model"])))
    gc.collect()
    # The trace is the third run's too, so nothing but the last model is left.
    assert [ref() is None for ref in gone] == [True, True, False]


def test_the_quick_start_trains_with_the_bits_of_plain_torch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its own assertions: it learns, five losses and all gradients are plain torch's, a saved run goes on to the bit."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    names: dict[str, Any] = {}
    seen = [as_seen(shown(source, names)) for source in cells(QUICK_START)]
    assert "layers.0" in seen[2] and "moments" in seen[3]
    assert "To be," in seen[-1]
