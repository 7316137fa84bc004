"""Models and tokenizers by name: a run, a folder in Hugging Face format, an adapter of PEFT's, a name on the hub; and
folders that they are written to.
"""
from __future__ import annotations

import contextlib
import functools
import importlib
import json
import logging
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import megatrain_torch as mt
from megatrain_torch import MegatrainError

from . import folder
from .folder import ADAPTER
from .settings import ALL, Lora, Settings, near, need, read_table, unknown

# What a tokenizer's files begin with, one of them at least.
TOKENIZER_FILES = ("tokenizer", "tekken", "vocab", "merges", "spiece", "sentencepiece", "spm", "source.spm")


@dataclass(frozen=True)
class Source:
    """What a name on the command line stands for: what from_pretrained takes for the model, and for the tokenizer
    (words); the folder of an adapter over it; how linear weights (base) and others (dtype) were kept in training."""

    model: str
    words: str
    adapter: Path | None = None
    base: str = "none"
    dtype: str = "auto"


def source_of(name: str) -> Source:
    """Of a run its model, or its last checkpoint before there is one, or the one that is named; all else as it is."""
    run = Path(name)
    if settings := folder.run_of(name):
        named = run != folder.above(name)
        at = run if named else run / folder.FINAL if folder.is_finished(run) else folder.last_checkpoint(run)
        if settings.lora is None:
            return Source(str(at), str(at))
        return Source(beneath(settings), str(at), at, settings.base, settings.dtype)
    if (run / ADAPTER).is_file() and not (run / "config.json").is_file():
        if not isinstance(model := read_table(run / ADAPTER).get("base_model_name_or_path"), str):
            raise MegatrainError(f"{run / ADAPTER} has no base_model_name_or_path, the model that it is an adapter of")
        return Source(model, name if _has_words(run) else model, run)
    return Source(name, name)


def beneath(settings: Settings) -> str:
    """The model that a run begins with: a whole one."""
    found = source_of(settings.model)
    if found.adapter is not None:
        raise MegatrainError(f"{settings.model} is an adapter over {found.model}: megatrain export {settings.model} "
                             "FOLDER --merged makes one model of both")
    return found.model


def _has_words(path: Path) -> bool:
    return any(p.name.startswith(TOKENIZER_FILES) for p in path.iterdir())


def transformers() -> Any:
    need("this needs", "transformers")
    import transformers

    transformers.utils.logging.disable_progress_bar()
    return transformers


def check_packages(adapters: bool, base: str) -> None:
    need("adapters need", *["peft"] * adapters)
    need(f"base={base} needs", *["bitsandbytes"] * (base in ("nf4", "int8")))


def load_config(name: str) -> Any:
    return _load(str(Path(name).parent) if Path(name).is_file() else name, "config",
                 transformers().AutoConfig.from_pretrained)


def empty(config: Any, base: str = "none", layers: int | None = None) -> Any:
    try:
        return mt.from_config(config, base=None if base == "none" else base, layers=layers)
    except ValueError as why:
        raise MegatrainError(_words(why, Path())) from None


def load(source: Source, dtype: str) -> Any:
    """On the CPU, with its adapter."""
    model = load_model(source.model, dtype, base=source.base)
    return model if source.adapter is None else over(model, source.adapter)


def load_model(name: str, dtype: str, has_values: bool = True, base: str = "none", scores: bool = False) -> Any:
    """On the CPU; without has_values on the meta device: another process has them. base: how linear weights are kept,
    "whole": in 16 bits, where files have codes too. scores: it gives a text a number, and no next token."""
    tf = transformers()
    if base == "int8":                               # it says of each product that operands become fp16 first
        logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)
    kind, more = ((tf.AutoModelForSequenceClassification, {"num_labels": 1}) if scores
                  else (tf.AutoModelForCausalLM, {}))
    before = tf.utils.logging.get_verbosity()
    tf.utils.logging.set_verbosity_error()           # what its report says is said below
    try:
        model, found = _load(name, "language model", lambda path: mt.read_pretrained(
            kind, path, base=None if base == "none" else base, values=has_values,
            dtype=dtype if dtype == "auto" else getattr(torch, dtype), output_loading_info=True, **more))
    finally:
        tf.utils.logging.set_verbosity(before)
    if missing := sorted(key for key in found["missing_keys"] if not (scores and key.startswith("score."))):
        raise MegatrainError(f"{name}: its files have no {missing[0]}, and {len(missing) - 1} more of the weights that "
                             f"a {type(model).__name__} has: they are of another model than config.json says")
    return model


def load_tokenizer(name: str, chat_template: str | None = None) -> Any:
    """chat_template: a file with one, in the place of its own."""
    if (Path(name) / "config.json").is_file() and not _has_words(Path(name)):
        raise MegatrainError(f"{name} has no tokenizer (tokenizer.json): copy tokenizer.json and "
                             "tokenizer_config.json from the model that it was made from")
    tokenizer = _load(name, "tokenizer", transformers().AutoTokenizer.from_pretrained)
    if chat_template is not None:
        try:
            tokenizer.chat_template = Path(chat_template).read_text()
        except (OSError, UnicodeDecodeError) as why:
            raise MegatrainError(f"chat_template={chat_template}: {getattr(why, 'strerror', None) or why}"
                                 f"{near(chat_template)}") from None
    return tokenizer


def _load(name: str, what: str, read: Callable[[str], Any]) -> Any:
    path = Path(name)
    if path.is_file():
        raise MegatrainError(f"{name} is a file: a model is a folder in Hugging Face format, or a run of megatrain; "
                             "MODEL comes before DATA")
    if (name.startswith((".", "/", "~")) or name.count("/") > 1) and not path.is_dir():
        raise MegatrainError(f"{name}: there is no such folder{near(name)}")
    if path.is_dir() and not any((path / file).is_file() for file in ("config.json", ADAPTER)):
        raise MegatrainError(f"{name} has no config.json: a folder in Hugging Face format, or a run, is needed")
    hub = importlib.import_module("huggingface_hub.constants")
    before = hub.HF_HUB_OFFLINE
    try:
        if not path.is_dir() and not hub_answers():
            hub.HF_HUB_OFFLINE = True                # its cache has it, or not
        return read(name)
    except MegatrainError:
        raise
    except Exception as why:                         # what a folder says is run, and raises what it likes
        hint = "" if path.is_dir() else f" (no folder of this name here, so the hub was asked{near(name)})"
        raise MegatrainError(f"{name!r}: no {what} to be had{hint}: {_words(why, path)}") from None
    finally:
        hub.HF_HUB_OFFLINE = before                  # the model at the end may be pushed


@functools.cache
def hub_answers() -> bool:
    """One request, of HF_HUB_ETAG_TIMEOUT seconds (10 by default) an address of the hub. Without it each file of a
    model is asked for six times, 23 seconds long, before its place in the cache is looked at."""
    from huggingface_hub import constants, utils

    with contextlib.suppress(Exception):             # of httpx, or of huggingface_hub where it may not ask at all
        utils.get_session().head(constants.ENDPOINT, timeout=constants.HF_HUB_ETAG_TIMEOUT)
        return True
    return False


def _words(why: Exception, path: Path) -> str:
    """What from_pretrained raised, in a line that says what to do where it does not."""
    lines = str(why).strip().splitlines() or [type(why).__name__]
    if "Unrecognized configuration class" in lines[0]:
        return "it does not write one token after another (AutoModelForCausalLM); mt.stream in a loop of one's own does"
    if "ignore_mismatched_sizes" in lines[0]:
        return "its weights have other shapes than config.json says: the two are not of one model"
    if torn := _torn(path):
        return f"{torn} is damaged or cut short: copy it again"
    return f"{lines[0]} {lines[1].strip()}" if lines[0].endswith(":") and lines[1:] else lines[0]


def _torn(path: Path) -> Path | None:
    from safetensors import SafetensorError, safe_open

    for file in sorted(path.glob("*.safetensors")) + sorted(path.glob("*.json")):
        try:
            _ = json.loads(file.read_bytes()) if file.suffix == ".json" else safe_open(file, "pt").keys()
        except (SafetensorError, ValueError):
            return file
    return None


def adapted(model: nn.Module, words: str, seed: int) -> Any:
    """The model with adapters as --lora says, which start as `seed` says."""
    config = lora_config(model, words)
    torch.manual_seed(seed)
    try:
        with warnings.catch_warnings(action="ignore", category=FutureWarning):
            return importlib.import_module("peft").get_peft_model(model, config)
    except ValueError as why:                        # of a model that PEFT has no adapters for
        raise MegatrainError(f"lora={words}: {str(why).splitlines()[0]}") from None


def over(model: nn.Module, adapter: Any) -> Any:
    with warnings.catch_warnings(action="ignore", category=FutureWarning):
        return importlib.import_module("peft").PeftModel.from_pretrained(model, str(adapter))


def lora_config(model: nn.Module, words: str) -> Any:
    """PEFT's. A target is a linear layer of the model, or a parameter of its experts: a mixture has those of a layer in
    one tensor. "all-linear" would have adapters on these too, which are asked for by name."""
    lora, peft = Lora.of(words), importlib.import_module("peft")
    linear = {name: m for name, m in model.named_modules()
              if isinstance(m, nn.Linear) or type(m).__name__ == "Conv1D"}          # GPT-2's
    experts = {name for name, p in model.named_parameters() if "expert" in name and p.dim() == 3}
    modules, parameters = ([target for target in lora.targets if any(
        name == target or name.endswith(f".{target}") for name in names)] for names in (linear, experts))

    def config(modules: Any) -> Any:
        return peft.LoraConfig(
            r=lora.r, lora_alpha=lora.alpha, lora_dropout=lora.dropout, use_dora=lora.dora, use_rslora=lora.rslora,
            target_modules=modules, target_parameters=parameters or None,
            # The head of a reward model trains with the adapters.
            task_type="SEQ_CLS" if hasattr(model, "score") else "CAUSAL_LM")

    if lora.targets == (ALL,):
        if not experts:
            return config("all-linear")
        head = model.get_output_embeddings()
        made = config(sorted({name.rpartition(".")[2] for name, m in linear.items()
                              if m is not head and isinstance(m, nn.Linear)}))
        with contextlib.suppress(ImportError):
            # PEFT 0.21 takes the names that experts' layers once had, wherever they are, for these layers: not those.
            conversion = importlib.import_module("peft.utils.transformers_weight_conversion")
            conversion.convert_peft_config_for_transformers(made, model, None)
        return config(sorted(made.target_modules))
    for target in lora.targets:
        if target not in modules and target not in parameters:
            ends = sorted({name.rpartition(".")[2] for name in (*linear, *experts)})
            raise MegatrainError(f"lora: targets={target}: of the model's linear layers {unknown(target, ends, 0.6)}")
    for said in [f"dropout={lora.dropout:g}"] * bool(lora.dropout) + ["dora=true"] * lora.dora:
        if parameters:
            raise MegatrainError(f"lora: {said}: PEFT has none for experts' parameters; leave it out")
    return config(modules)


def writable(out: Path, name: str = "out") -> None:
    """Makes a folder if need be, or refuses it. name: the flag."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=out).close()
    except OSError as why:
        raise MegatrainError(f"{name}={out}: nothing can be written there ({why.strerror}); name another") from None


def save(model: Any, tokenizer: Any, to: Path, disk: Path) -> None:
    """Into a folder. disk: for messages."""
    adapter = isinstance(getattr(model, "peft_config", None), dict)
    taken = sum(p.nbytes for p in model.parameters() if p.requires_grad or not adapter)
    if taken > (free := shutil.disk_usage(to).free):
        raise MegatrainError(f"{disk}: the model takes {mt.show_bytes(taken)}, and {mt.show_bytes(free)} are free: "
                             "make room, or name a folder on another disk")
    model.save_pretrained(to, **({"save_embedding_layers": False} if adapter else {}))
    tokenizer.save_pretrained(to)


@contextlib.contextmanager
def appearing(to: Path) -> Iterator[Path]:
    """A folder to write into, which is `to` then, or gone."""
    with tempfile.TemporaryDirectory(prefix=f".{to.name}.", dir=to.parent) as own:
        half = Path(own, to.name)
        half.mkdir()                                 # with the rights that a folder of the user's has, unlike its own
        yield half
        if os.path.lexists(to):
            raise MegatrainError(f"{to} is there already, and stays as it is; name another")
        half.rename(to)
