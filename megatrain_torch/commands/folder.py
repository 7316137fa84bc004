"""A run's folder, and models by name.

    config.yaml               settings, those that were chosen too
    log.jsonl                 a line for each logged step and each evaluation
    checkpoint-200/ ...       all that resume needs, in Hugging Face format
    model/                    the model at the end
    plan.html, step.html, storage.html, timeline.svg      for `megatrain report`
"""
from __future__ import annotations

import difflib
import json
import re
import shutil
from pathlib import Path
from typing import Any

from .. import manifest
from ..errors import MegatrainError
from .settings import Settings, read_yaml

CONFIG, LOG, FINAL = "config.yaml", "log.jsonl", "model"
WHOLE = "trainer_state.json"                 # of a checkpoint, written last


def settings_of(run: Path) -> Settings:
    """Raises: MegatrainError: it is no run's folder."""
    if not (run / CONFIG).is_file():
        raise MegatrainError(f"{run} is no run: it has no {CONFIG}; megatrain train makes one")
    return Settings.of(read_yaml(run / CONFIG), str(run / CONFIG))


def checkpoints(run: Path) -> list[Path]:
    """The whole ones, oldest first."""
    found = [(int(m[1]), p) for p in run.glob("checkpoint-*") if (m := re.fullmatch(r"checkpoint-(\d+)", p.name))]
    return [p for _, p in sorted(found) if (p / WHOLE).is_file()]


def remove_torn(run: Path) -> list[str]:
    """Names of checkpoints that were never finished. They are gone then, as is what killed saves left."""
    for name in {m[0] for p in run.glob("checkpoint-*") if (m := re.match(r"checkpoint-\d+", p.name))}:
        manifest.sweep(run / name)
    whole = checkpoints(run)
    torn = [p for p in run.glob("checkpoint-*") if re.fullmatch(r"checkpoint-\d+", p.name) and p not in whole]
    for path in torn:
        shutil.rmtree(path)
    return sorted(p.name for p in torn)


def last_checkpoint(run: Path) -> Path:
    """Raises: MegatrainError: there is none."""
    found = checkpoints(run)
    if not found:
        raise MegatrainError(f"{run} has no checkpoint yet; megatrain train --out {run} --overwrite begins again")
    return found[-1]


def model_of(name: str) -> str:
    """What to load: of a run its model, or its last checkpoint before there is one; anything else as it is."""
    run = Path(name)
    if not (run / CONFIG).is_file():
        return name
    return str(run / FINAL if (run / FINAL / "config.json").is_file() else last_checkpoint(run))


def lines(run: Path) -> list[dict[str, Any]]:
    """Of log.jsonl. A line that a crash cut short is left out."""
    found = []
    for line in (run / LOG).read_text().splitlines() if (run / LOG).is_file() else ():
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return found


def forget_after(run: Path, step: int) -> None:
    """Takes from log.jsonl what comes after a checkpoint: these steps will be made again."""
    kept = [json.dumps(line) + "\n" for line in lines(run) if line["step"] <= step]
    (run / LOG).write_text("".join(kept))


# ---- models --------------------------------------------------------------------------------------

def transformers() -> Any:
    """The package, without its progress bars. Raises: MegatrainError: it is not installed."""
    try:
        import transformers
    except ImportError:
        raise MegatrainError("this needs transformers: pip install 'megatrain-torch[cli]'") from None
    transformers.utils.logging.disable_progress_bar()
    return transformers


def load_config(name: str) -> Any:
    return _load(transformers().AutoConfig, name, "config")


def load_model(name: str, dtype: str) -> Any:
    """On the CPU. Raises: MegatrainError: there is none, or it is no language model."""
    return _load(transformers().AutoModelForCausalLM, name, "language model", dtype=dtype)


def load_tokenizer(name: str) -> Any:
    return _load(transformers().AutoTokenizer, name, "tokenizer")


def near(name: str) -> str:
    """Words for what a path that is not there may have meant: the nearest name beside it, or nothing."""
    path = Path(name)
    beside = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
    found = difflib.get_close_matches(path.name, beside, 1)
    return f"; did you mean {path.parent / found[0]}?" if found else ""


def _load(auto: Any, name: str, what: str, **kw: Any) -> Any:
    if (name.startswith((".", "/", "~")) or name.count("/") > 1) and not Path(name).is_dir():
        raise MegatrainError(f"{name}: there is no such folder{near(name)}")
    if Path(name).is_dir() and not (Path(name) / "config.json").is_file():
        raise MegatrainError(f"{name} has no config.json: a folder in Hugging Face format, or a run of megatrain, "
                             "is needed")
    try:
        return auto.from_pretrained(name, **kw)
    except (OSError, ValueError, KeyError) as why:
        first = str(why).strip().splitlines()[0] if str(why).strip() else type(why).__name__
        hint = "" if Path(name).is_dir() else f" (no folder of this name here, so the hub was asked{near(name)})"
        raise MegatrainError(f"{name!r}: no {what} to be had{hint}: {first}") from None
