"""A run's folder, and models by name.

    config.yaml               settings, those that were chosen too
    log.jsonl                 a line for each logged step and each evaluation
    checkpoint-200/ ...       all that resume needs, in Hugging Face format
    model/                    the model at the end
    plan.html, step.html, storage.html, timeline.svg      for `megatrain report`
    megatrain-run.json        what of all this the run made (owned.py)
"""
from __future__ import annotations

import contextlib
import difflib
import functools
import json
import logging
import os
import re
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatrain_torch import MegatrainError

from ..base.strict import field, is_count, parsed, table
from ..checkpoint import manifest
from ..model.pretrained import loaded
from ..store.bases import expands, with_base
from . import lora
from .owned import CONFIG, FINAL, HALF, LOG, MARKER, SCRATCH, WHOLE, Owned, replace
from .settings import Settings, read_yaml

__all__ = ["CONFIG", "FINAL", "HALF", "LOG", "SCRATCH", "WHOLE"]
ADAPTER = "adapter_config.json"              # of PEFT: what makes a folder an adapter
# What a tokenizer's files begin with, one of them at least.
TOKENIZER_FILES = ("tokenizer", "tekken", "vocab", "merges", "spiece", "sentencepiece", "spm", "source.spm")


def settings_of(run: Path) -> Settings:
    """Raises: MegatrainError: it is no run's folder."""
    if not run.exists():
        raise MegatrainError(f"{run}: there is no such folder{near(str(run))}")
    Owned.opened(run)
    return Settings.of(read_yaml(run / CONFIG), str(run / CONFIG))


def checkpoints(run: Path) -> list[Path]:
    """The whole ones that the run made, oldest first."""
    found = [(step_of(name), run / name) for name in Owned(run).entries if step_of(name) >= 0]
    return [p for _, p in sorted(found) if (p / WHOLE).is_file()]


def step_of(name: str) -> int:
    """Of a checkpoint, by its name; -1: it is none."""
    found = re.fullmatch(r"checkpoint-(\d{1,18})", name)
    return int(found[1]) if found else -1


def remove_torn(owned: Owned) -> list[str]:
    """Names of checkpoints that the run never finished. They are gone then, as is what killed saves left."""
    whole = {p.name for p in checkpoints(owned.run)}
    listed = [name for name in owned.entries if step_of(name) >= 0]
    for name in listed:
        manifest.sweep(owned.run / name)
    torn = [name for name in listed if name not in whole]
    found = [name for name in torn if (owned.run / name).exists()]
    for name in torn:
        owned.remove(name)
    return sorted(found)


def last_checkpoint(run: Path) -> Path:
    """Raises: MegatrainError: there is none."""
    found = checkpoints(run)
    if not found:
        raise MegatrainError(f"{run} has no checkpoint yet; megatrain train --out {run} --overwrite begins again")
    return found[-1]


def dtype_of(checkpoint: Path) -> str | None:
    """Of the model, as its config.json says; None where it has none, as of a model with adapters."""
    path = checkpoint / "config.json"
    if not path.is_file() and (checkpoint / ADAPTER).is_file():
        return None
    return table(parsed(path.read_bytes(), path), str(path)).get("dtype")


@dataclass(frozen=True)
class Source:
    """What a name on the command line stands for.

    Attributes:
        model: what from_pretrained takes. words: the same of the tokenizer.
        adapter: the folder of an adapter over it, None: there is none. base: how its linear weights are kept, and
            dtype: of the others, as it was trained so.
    """

    model: str
    words: str
    adapter: Path | None = None
    base: str = "none"
    dtype: str = "auto"

    def alone(self, name: str) -> Source:
        """Raises: MegatrainError: it is not a whole model."""
        if self.adapter is not None:
            raise MegatrainError(f"{name} is an adapter over {self.model}: megatrain export {name} FOLDER --merged "
                                 "makes one model of both")
        return self


def source_of(name: str, step: Path | None = None) -> Source:
    """Of a run its model, or its last checkpoint before there is one, or that of `step`; anything else as it is."""
    run = Path(name)
    if (run / MARKER).is_file():
        at = step or (run / FINAL if is_finished(run) else last_checkpoint(run))
        settings = settings_of(run)
        if settings.lora is None:
            return Source(str(at), str(at))
        return Source(beneath(settings), str(at), at, settings.base, settings.dtype)
    if (run / ADAPTER).is_file() and not (run / "config.json").is_file():
        there = table(parsed((run / ADAPTER).read_bytes(), run / ADAPTER), str(run / ADAPTER))
        model = field(there, "base_model_name_or_path", lambda v: isinstance(v, str), "a name", str(run / ADAPTER))
        words = any(p.name.startswith(TOKENIZER_FILES) for p in run.iterdir())
        return Source(model, name if words else model, run)
    return Source(name, name)


def run_of(name: str) -> Settings | None:
    """The settings of the run that a name stands for."""
    return settings_of(Path(name)) if (Path(name) / MARKER).is_file() else None


def is_chat(name: str) -> bool:
    """Is it a run that was trained on conversations?"""
    return (Path(name) / MARKER).is_file() and bool(Owned(Path(name)).data.get("chat"))


def beneath(settings: Settings) -> str:
    """The model that a run began with."""
    return source_of(settings.model).alone(settings.model).model


def is_finished(run: Path) -> bool:
    """Has the run made its model, or its adapter?"""
    return FINAL in Owned(run).entries and any((run / FINAL / name).is_file() for name in ("config.json", ADAPTER))


def lines(run: Path) -> list[dict[str, Any]]:
    """Of log.jsonl. What is no line of ours, such as one that a crash cut short, is left out."""
    return [line for _, line in _lines(run) if line is not None]


def _lines(run: Path) -> list[tuple[bytes, dict[str, Any] | None]]:
    """Each line, and what it says; None: it is none of ours."""
    if not (run / LOG).is_file():
        return []
    return [(line, _line(line)) for line in (run / LOG).read_bytes().splitlines()]


def _line(text: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) and is_count(found.get("step")) else None


def forget_after(run: Path, step: int) -> None:
    """Takes from log.jsonl what comes after a checkpoint, as these steps will be made again, and a line cut short."""
    kept = [(text, line) for text, line in _lines(run) if line is None or line["step"] <= step]
    if kept and kept[-1][1] is None:
        kept.pop()
    replace(run / LOG, b"".join(text + b"\n" for text, _ in kept))


# ---- models --------------------------------------------------------------------------------------

def transformers() -> Any:
    """The package, without its progress bars. Raises: MegatrainError: it is not installed."""
    try:
        import transformers
    except ImportError:
        raise MegatrainError("this needs transformers: pip install transformers") from None
    transformers.utils.logging.disable_progress_bar()
    return transformers


def load_config(name: str) -> Any:
    if Path(name).is_file():                         # the file itself will do
        name = str(Path(name).parent)
    return _load(transformers().AutoConfig, name, "config")


def empty(config: Any) -> Any:
    """A model of it on the meta device.

    Raises:
        MegatrainError: it is no language model's.
    """
    try:
        with torch.device("meta"):
            return transformers().AutoModelForCausalLM.from_config(config)
    except ValueError as why:
        raise MegatrainError(_words(why, Path())) from None


def load(source: Source, dtype: str) -> Any:
    """On the CPU, with its adapter."""
    model = load_model(source.model, dtype, base=source.base)
    return model if source.adapter is None else lora.over(model, source.adapter)


def load_model(name: str, dtype: str, has_values: bool = True, base: str = "none", scores: bool = False) -> Any:
    """On the CPU. has_values: else on the meta device, where transformers can: another process has them. base: how its
    linear weights are kept; "whole": in 16 bits, where files have codes of them too. scores: one that gives a text a
    number, in the place of the next token.

    Raises:
        MegatrainError: there is none, it is no language model, or some of its weights are not there.
    """
    tf = transformers()
    if base == "int8":                               # it says of each product that operands become fp16 first
        logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)
    before = tf.utils.logging.get_verbosity()
    tf.utils.logging.set_verbosity_error()           # what its report says is said below
    try:
        kind, more = ((tf.AutoModelForSequenceClassification, {"num_labels": 1}) if scores
                      else (tf.AutoModelForCausalLM, {}))
        model, found = _load(kind, name, "language model", has_values, base, dtype=dtype, output_loading_info=True,
                             **more)
    finally:
        tf.utils.logging.set_verbosity(before)
    if missing := sorted(key for key in found["missing_keys"] if not (scores and key.startswith("score."))):
        raise MegatrainError(f"{name}: its files have no {missing[0]}, and {len(missing) - 1} more of the weights that "
                             f"a {type(model).__name__} has: they are of another model than config.json says")
    return model


def load_tokenizer(name: str, chat_template: str | None = None) -> Any:
    """chat_template: a file with one, in the place of its own."""
    if Path(name).is_dir() and (Path(name) / "config.json").is_file() and not any(
            p.name.startswith(TOKENIZER_FILES) for p in Path(name).iterdir()):
        raise MegatrainError(f"{name} has no tokenizer (tokenizer.json): copy tokenizer.json and "
                             "tokenizer_config.json from the model that it was made from")
    tokenizer = _load(transformers().AutoTokenizer, name, "tokenizer")
    if chat_template is not None:
        try:
            tokenizer.chat_template = Path(chat_template).read_text()
        except (OSError, UnicodeDecodeError) as why:
            raise MegatrainError(f"chat_template={chat_template}: {getattr(why, 'strerror', None) or why}"
                                 f"{near(chat_template)}") from None
    return tokenizer


def near(name: str) -> str:
    """Words for what a path that is not there may have meant: the nearest name beside it, or nothing."""
    path = Path(name)
    beside = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
    found = difflib.get_close_matches(path.name, beside, 1)
    return f"; did you mean {path.parent / found[0]}?" if found else ""


def may_write(path: Path, name: str, kinds: tuple[str, ...] = ()) -> None:
    """That a file can be made, before much time is spent on what goes into it.

    Raises:
        MegatrainError: it cannot; the message begins with `name`, the flag.
    """
    if kinds and path.suffix not in kinds:
        raise MegatrainError(f"{name}={path}: a name that ends in {' or '.join(kinds)} is needed")
    if path.is_dir():
        raise MegatrainError(f"{name}={path} is a folder: the name of a file is needed")
    if not path.parent.is_dir():
        raise MegatrainError(f"{name}={path}: there is no folder {path.parent}{near(str(path.parent))}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise MegatrainError(f"{name}={path} may not be written; name another")


def _load(auto: Any, name: str, what: str, has_values: bool = True, base: str = "none", **kw: Any) -> Any:
    if Path(name).is_file():
        raise MegatrainError(f"{name} is a file: a model is a folder in Hugging Face format, or a run of megatrain; "
                             "MODEL comes before DATA")
    if (name.startswith((".", "/", "~")) or name.count("/") > 1) and not Path(name).is_dir():
        raise MegatrainError(f"{name}: there is no such folder{near(name)}")
    if Path(name).is_dir() and not any((Path(name) / file).is_file() for file in ("config.json", ADAPTER)):
        raise MegatrainError(f"{name} has no config.json: a folder in Hugging Face format, or a run of megatrain, "
                             "is needed")
    try:
        if base == "whole":
            kw |= expands(transformers().AutoConfig.from_pretrained(_source(name)))
        elif base != "none":
            kind = kw.pop("dtype")
            return with_base(auto, _source(name), base, None if kind == "auto" else getattr(torch, kind), **kw)
        return loaded(auto, _source(name), has_values, **kw)
    except MegatrainError:
        raise
    except Exception as why:                         # what a folder says is run, and raises what it likes
        hint = "" if Path(name).is_dir() else f" (no folder of this name here, so the hub was asked{near(name)})"
        raise MegatrainError(f"{name!r}: no {what} to be had{hint}: {_words(why, Path(name))}") from None


def _source(name: str) -> str:
    """What from_pretrained is given: a name on the hub, or its folder in the hub's cache where the hub does not answer.

    Raises:
        OSError: it does not, and the cache has none.
    """
    if Path(name).is_dir() or hub_answers():
        return name
    from huggingface_hub import constants, errors, snapshot_download

    try:
        return snapshot_download(name, local_files_only=True)
    except errors.LocalEntryNotFoundError:
        why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else f"{constants.ENDPOINT} does not answer"
        raise OSError(f"{why}, and its cache here has no {name}") from None


@functools.cache
def hub_answers() -> bool:
    """One request, of HF_HUB_ETAG_TIMEOUT seconds at most (10 by default). Without it each file of a model is asked for
    six times, 23 seconds long, before its place in the cache is looked at."""
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    answers: list[Any] = []

    def ask() -> None:
        with contextlib.suppress(Exception):         # of httpx, or of huggingface_hub where it may not ask at all
            answers.append(get_session().head(constants.ENDPOINT, timeout=constants.HF_HUB_ETAG_TIMEOUT))

    # A thread of its own, left behind when it is late: looking up a host's name has no time limit, and each of its
    # addresses has one. The answer is read after the join, or not at all.
    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(constants.HF_HUB_ETAG_TIMEOUT)
    return bool(answers)


def _words(why: Exception, folder: Path) -> str:
    """What from_pretrained raised, in a line that says what to do where it does not."""
    lines = str(why).strip().splitlines() or [type(why).__name__]
    if "Unrecognized configuration class" in lines[0]:
        return "it does not write one token after another (AutoModelForCausalLM); mt.stream in a loop of one's own does"
    if "ignore_mismatched_sizes" in lines[0]:
        return "its weights have other shapes than config.json says: the two are not of one model"
    if torn := _torn(folder):
        return f"{torn} is damaged or cut short: copy it again"
    return f"{lines[0]} {lines[1].strip()}" if lines[0].endswith(":") and lines[1:] else lines[0]


def _torn(folder: Path) -> Path | None:
    """A file of weights or of JSON that cannot be read."""
    from safetensors import SafetensorError, safe_open

    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, "pt"):
                pass
        except SafetensorError:
            return path
    for path in sorted(folder.glob("*.json")):
        try:
            json.loads(path.read_bytes())
        except ValueError:
            return path
    return None
