"""docs/trainer-tests.md from what tools/run_transformers_tests.py found."""
from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Iterable, Iterator
from typing import Any

Row = dict[str, list[Any]]              # by run: outcome, reason, how many models were streamed
NAMES = {"plain": "plain", "streamed": "streamed", "mt.AdamW": "streamed, `mt.AdamW`"}

HEAD = """# transformers' own tests, streamed

The tests that transformers has of its Trainer, and Accelerate of its Accelerator, run with every model streamed to the
CPU device. [tools/run_transformers_tests.py](../tools/run_transformers_tests.py) runs them and writes this page:

    python tools/run_transformers_tests.py transformers/ --known found.json
    python tools/run_transformers_tests.py accelerate/ --known found.json --page

**Selected** are the files that concern training, accumulation, clipping, optimizers, schedulers, checkpoints, resuming,
evaluation, data and callbacks. Of `tests/trainer` the data collators' and the arguments', which have no model, and the
distributed ones are left out. `tests/optimization` is in; of Accelerate what concerns one process's loop. No test of a
file is left out.

**Plain** is the test as it is. **Streamed**: a Trainer streams the model that it is handed, or that its `model_init`
makes. An Accelerator streams the models that it prepares; optimizers may be made before. **Streamed, `mt.AdamW`**:
Trainer makes `mt.AdamW` besides, with the same arguments, where it would make torch's AdamW. Nothing else is changed.
In all three, models and text that are on the Hub have small stand-ins, and tests marked as needing an accelerator are
tried on the CPU. A Llama whose test leaves its MLP at the default, 11,008 wide, has one of 64.

Versions: {versions}.
"""

# Why a test fails or is skipped: the first pattern found in "test run: reason". Checked by hand, one by one.
REASONS: list[tuple[str, str]] = [
    ("test_gradient_sync_cpu_multi streamed", "Two processes, and DistributedDataParallel around the model, which was "
     "refused when this was measured; it is a shell since (several-gpus.md)."),
    ("test_bnb_compile (streamed|mt)", "The base is in bitsandbytes' 4 bits, whose scales lie beside the weight and "
     "would not go along with a copy of it: refused before anything is changed. Right so."),
    ("test_mixed_bf16", "The arguments refuse bf16 where there is no GPU and `use_cpu` is not set."),
    ("feature extractor|wav2vec2", "Needs a feature extractor from the Hub, which has no stand-in."),
    ("test_run_seq2seq", "Runs the example `run_translation.py`, which needs `evaluate` and a model from the Hub."),
    ("test_(bf|fp)16_full_eval", "Reads the memory of a GPU."),
    ("test_adalomo|galore_adamw_8bit", "The optimizer's own package asks torch for a CUDA device."),
    ("test_galore_adafactor", "Holds a GPU's peak memory to bounds, with the MLP of 11,008."),
    ("a streamed model's types are fixed", "Sets `fp16_full_eval`, which would convert the model: refused. Right so."),
    ("test_bad_generation_config_fail_early", "Needs a tokenizer and a T5 from the Hub, which have no stand-in."),
    ("staging test", "Pushes to the Hub's staging server."),
    ("test is slow", "Marked slow: models and data from the Hub, or GPUs."),
    ("seedable_sampler", "Switched off by transformers itself."),
    ("Torchvision|torchvision", "Needs torchvision."),
    ("stateful_dataloader", "Needs torchdata."),
    ("deepspeed", "Needs DeepSpeed."),
    ("liger", "Needs Liger, whose kernels need a GPU."),
    ("optuna|wandb|[Rr]ay", "Needs Optuna, Ray or W&B, which choose hyperparameters."),
    ("IPython|ipython", "Needs IPython."),
    ("serialization issue", "Switched off by transformers itself."),
    ("FP8", "Needs FP8 on a GPU."),
    ("multiple (hardware )?(accelerators|GPUs)|multi.?(accelerator|gpu|device)", "Needs several GPUs."),
    ("GPU|gpu|accelerator|CUDA|cuda|XPU", "Needs a GPU."),
]


def tests(known: dict[str, Any]) -> Iterator[tuple[str, str, Row]]:
    """(file, test without it, row) of all that is known."""
    for library in ("transformers", "accelerate"):
        for file, found in known.get(library, {}).items():
            for test, row in found.items():
                yield f"{library}: {file.removesuffix('.py')}", test.split("::", 1)[-1], row


def count(found: Iterable[list[Any]]) -> dict[str, int]:
    """How often each outcome came, how many tests streamed a model, and how many models."""
    rows = list(found)
    return {kind: sum(row[0] == kind for row in rows) for kind in ("passed", "failed", "skipped")} | {
        "streamed": sum(row[2] > 0 for row in rows), "models": sum(row[2] for row in rows)}


def versions() -> dict[str, str]:
    return {name: importlib.metadata.version(name) for name in ("torch", "transformers", "accelerate")}


def why(test: str, run: str, reason: str) -> str:
    """The explanation of one outcome, or "" where there is none."""
    return next((text for pattern, text in REASONS if re.search(pattern, f"{test} {run}: {reason}")), "")


def failures(known: dict[str, Any], plain: bool) -> Iterator[tuple[str, str, list[str], str]]:
    """(file, test, runs that failed, reason): those that fail plain too, or those that do not."""
    for file, test, row in tests(known):
        runs = [run for run, found in row.items() if found[0] == "failed"]
        if runs and (row["plain"][0] == "failed") == plain:
            yield file, test, runs, row[runs[0]][1]


def unexplained(known: dict[str, Any]) -> list[str]:
    """Tests that fail, or came out otherwise than plain, and have no reason in REASONS."""
    return [f"{file}::{test}" for file, test, row in tests(known) for run, (outcome, reason, _) in row.items()
            if (outcome == "failed" or outcome != row["plain"][0]) and not why(test, run, reason)]


def totals(known: dict[str, Any]) -> str:
    """A line per file and one per library; a cell is how many passed of those that ran."""
    rows = list(tests(known))
    lines = ["| file | tests | plain | streamed | a model was streamed in | streamed, `mt.AdamW` | skipped |",
             "|---|---|---|---|---|---|---|"]
    names = list(dict.fromkeys(file for file, _, _ in rows))
    for name in [*names, *dict.fromkeys(f"all of {name.split(':')[0]}" for name in names)]:
        mine = [row for file, _, row in rows if name in (file, f"all of {file.split(':')[0]}")]
        by = {run: count(row[run] for row in mine if run in row) for run in NAMES}
        cells = {run: f"{n['passed']} of {n['passed'] + n['failed']}" for run, n in by.items()}
        adamw = cells["mt.AdamW"] if any("mt.AdamW" in row for row in mine) else ""
        lines.append(f"| {name} | {len(mine)} | {cells['plain']} | {cells['streamed']} | {by['streamed']['streamed']} |"
                     f" {adamw} | {by['plain']['skipped']} |")
    return "\n".join(lines) + "\n"


def grouped(found: Iterable[tuple[str, str, list[str], str]]) -> str:
    """A line per test; who fails, and why."""
    lines = ["| test | fails | why |", "|---|---|---|"]
    for file, test, runs, reason in found:
        text = why(test, runs[0], reason) or f"**not explained**: {brief(reason)}"
        name = f"`{test}`" if "::" in test else f"`{file.split('/')[-1]}`"
        lines.append(f"| {name} | {', '.join(NAMES[run] for run in runs)} | {text} |")
    return "\n".join(lines) + "\n"


def skipped(known: dict[str, Any]) -> str:
    """A line per reason, with the tests it skips."""
    by: dict[str, list[str]] = {}
    for _, test, row in tests(known):
        if row["plain"][0] == "skipped":
            reason = row["plain"][1]
            by.setdefault(why(test, "plain", reason) or brief(reason), []).append(test.split("::")[-1])
    lines = ["| why | tests |", "|---|---|"]
    for reason, names in sorted(by.items(), key=lambda item: -len(item[1])):
        lines.append(f"| {reason} | {len(names)}: {', '.join(f'`{name}`' for name in dict.fromkeys(names))} |")
    return "\n".join(lines) + "\n"


def brief(reason: str) -> str:
    return re.sub(r"\s+", " ", re.sub(r"^Skipped: |/[^ ]*/", "", reason)).replace("|", "\\|")[:160]


def page(known: dict[str, Any]) -> str:
    """The whole page, from outcomes by library, file, test and run."""
    version = ", ".join(f"{name} {number}" for name, number in known["versions"].items())
    sources = "".join(f"; tests of {name} {number}" for name, number in known.get("sources", {}).items())
    parts = [HEAD.format(versions=version + sources),
             "How many passed, of those that ran.\n\n" + totals(known)]
    lost = list(failures(known, plain=False))
    parts.append("## Pass plain, not streamed\n\n" + (grouped(lost) if lost else "None.\n"))
    parts.append("## Fail plain too\n\n" + grouped(failures(known, plain=True)))
    parts.append("## Skipped\n\nIn every run.\n\n" + skipped(known))
    return "\n".join(parts)
