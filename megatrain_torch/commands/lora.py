"""--lora: adapters of rank r that train beside a model which stays as it is.

    r=16,alpha=32,targets=all                       all linear layers but the head
    r=8,targets=q_proj,v_proj,dropout=0.05          alpha: twice r, where it is not said
"""
from __future__ import annotations

import contextlib
import dataclasses
import difflib
import importlib
import importlib.util
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from megatrain_torch import MegatrainError

from ..base.units import output_embeddings

ALL = "all"
AS = "r=16,alpha=32,targets=all"


@dataclass(frozen=True)
class Lora:
    """
    Attributes:
        targets: names of modules, or their ends behind a point; ("all",): every linear layer but the head.
    """

    r: int
    alpha: float
    targets: tuple[str, ...] = (ALL,)
    dropout: float = 0.0

    @staticmethod
    def of(value: Any) -> Lora:
        """Of a flag's words, or of a table in YAML.

        Raises:
            MegatrainError: something in it is not known, or out of its range.
        """
        given = {str(k): v for k, v in value.items()} if isinstance(value, Mapping) else _split(value)
        known = [f.name for f in dataclasses.fields(Lora)]
        for name in given:
            if name not in known:
                near = difflib.get_close_matches(name, known, 1, 0.4)
                raise MegatrainError(f"lora: there is no {name!r}"
                                     + (f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(known)}"))
        if given.get("r") is None:
            raise MegatrainError(f"lora={value!r}: r is needed, the adapters' rank, as in lora={AS}")
        r = _number(given["r"], "r", int)
        found = Lora(r, _number(given.get("alpha", 2 * r), "alpha", float), _targets(given.get("targets", ALL)),
                     _number(given.get("dropout", 0), "dropout", float))
        if found.r < 1:
            raise MegatrainError(f"lora: r={found.r}: at least 1 is needed")
        if not 0 < found.alpha < float("inf"):
            raise MegatrainError(f"lora: alpha={found.alpha:g}: more than 0 is needed")
        if not 0 <= found.dropout < 1:
            raise MegatrainError(f"lora: dropout={found.dropout:g}: a share is needed, less than 1")
        return found

    def __str__(self) -> str:
        """As a flag has it: what was not said too."""
        return (f"r={self.r},alpha={_short(self.alpha)},targets={','.join(self.targets)}"
                + (f",dropout={_short(self.dropout)}" if self.dropout else ""))

    def config(self, model: nn.Module) -> Any:
        """PEFT's. Of a mixture "all-linear" has adapters on its experts' parameters too, which are no linear layers."""
        scores = hasattr(model, "score")                 # a reward model's head, which trains with the adapters
        made = self._config("all-linear" if self.targets == (ALL,) else list(self.targets), scores)
        if self.targets == (ALL,) and any("expert" in name and p.dim() == 3 for name, p in model.named_parameters()):
            made.target_modules = set(_linear_names(model))
            return self._config(_but_for_experts(made, model), scores)
        return made

    def _config(self, targets: Any, scores: bool = False) -> Any:
        return _peft().LoraConfig(r=self.r, lora_alpha=self.alpha, lora_dropout=self.dropout, target_modules=targets,
                                  task_type="SEQ_CLS" if scores else "CAUSAL_LM")

    def check(self, model: nn.Module) -> None:
        """Raises: MegatrainError: a target is no linear layer of the model."""
        linear = {name for name, m in model.named_modules()
                  if isinstance(m, nn.Linear) or type(m).__name__ == "Conv1D"}          # GPT-2's
        ends = sorted({name.rpartition(".")[2] for name in linear})
        for target in self.targets if self.targets != (ALL,) else ():
            if not any(name == target or name.endswith(f".{target}") for name in linear):
                near = difflib.get_close_matches(target, ends, 1)
                raise MegatrainError(f"lora: targets={target}: the model has no linear layer of that name"
                                     + (f"; did you mean {near[0]}?" if near else f"; it has {', '.join(ends)}"))

    def beside(self, model: nn.Module, seed: int) -> Any:
        """The model with adapters, which start as `seed` says."""
        self.check(model)
        torch.manual_seed(seed)
        try:
            with _quiet():
                return _peft().get_peft_model(model, self.config(model))
        except ValueError as why:                        # of a model that PEFT has no adapters for
            raise MegatrainError(f"lora={self}: {str(why).splitlines()[0]}") from None


def _linear_names(model: nn.Module) -> list[str]:
    """Of all but the head."""
    head = output_embeddings(model)
    return sorted({name.rpartition(".")[2] for name, m in model.named_modules()
                   if isinstance(m, nn.Linear) and m is not head})


def _but_for_experts(config: Any, model: nn.Module) -> list[str]:
    """Of its targets those that PEFT leaves as they are: 0.21 takes the names that experts' layers once had,
    wherever they are, for these layers."""
    with contextlib.suppress(ImportError):
        conversion = importlib.import_module("peft.utils.transformers_weight_conversion")
        conversion.convert_peft_config_for_transformers(config, model, None)
    return sorted(config.target_modules)


def as_words(value: Any) -> str:
    """Of a setting, checked; the same for all ways to write the same."""
    return str(Lora.of(value))


def _split(value: Any) -> dict[str, Any]:
    """A word without `=` goes on with the list before it."""
    if not isinstance(value, str):
        raise MegatrainError(f"lora={value!r}: words such as {AS} are needed")
    found: dict[str, Any] = {}
    last = ""
    for word in filter(None, (word.strip() for word in value.split(","))):
        name, said, rest = word.partition("=")
        if not said and not last:
            raise MegatrainError(f"lora={value!r}: words such as {AS} are needed")
        if said and name in found:
            raise MegatrainError(f"lora={value!r}: {name} is said twice")
        last, found[name if said else last] = (name, rest) if said else (last, f"{found[last]},{word}")
    return found


def _number(value: Any, name: str, kind: type) -> Any:
    """YAML reads 1e-5 as a word: numbers may come as words."""
    try:
        if isinstance(value, bool) or kind(value) != float(value):
            raise ValueError
        return kind(value)
    except (TypeError, ValueError, OverflowError):       # the last: of int(inf)
        what = "a whole number" if kind is int else "a number"
        raise MegatrainError(f"lora: {name}={value!r}: {what} is needed") from None


def _short(number: float) -> str:
    """As a person writes it, with all its digits."""
    return repr(number).removesuffix(".0")


def _targets(value: Any) -> tuple[str, ...]:
    found = tuple(filter(None, map(str.strip, value.split(",")))) if isinstance(value, str) else value
    if not isinstance(found, (list, tuple)) or not found or not all(isinstance(t, str) and t for t in found):
        raise MegatrainError(f"lora: targets={value!r}: {ALL}, or names of linear layers, are needed")
    if ALL in found and len(found) > 1:
        raise MegatrainError(f"lora: targets={','.join(found)}: {ALL} has the others in it; leave them out, or it")
    return tuple(found)


def _peft() -> Any:
    return importlib.import_module("peft")


def check_packages(adapters: bool, base: str) -> None:
    """Raises: MegatrainError: what these need is not installed."""
    if adapters and importlib.util.find_spec("peft") is None:
        raise MegatrainError("adapters need peft: pip install peft")
    if base in ("nf4", "int8") and importlib.util.find_spec("bitsandbytes") is None:
        raise MegatrainError(f"base={base} needs bitsandbytes: pip install bitsandbytes")


def over(model: nn.Module, adapter: Any) -> Any:
    """The model with an adapter that PEFT's files have. adapter: their folder."""
    with _quiet():
        return _peft().PeftModel.from_pretrained(model, str(adapter))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without what PEFT is told about transformers' names."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        yield
