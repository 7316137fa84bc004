"""Where tools/try_models.py finds models: tiny configurations and inputs that the libraries' own tests use.

    transformers   DIR/tests/models/*/test_modeling_*.py of a checkout (the tag of the installed release, or near it):
                   a test class names the model classes and makes their configuration and inputs
    diffusers      DIR/tests/models/*/test_models_*.py, likewise
    timm           its own models named test_*, and the smallest shapes of others: TIMM

A source lists *files*; a file gives trials, one for each of its test classes; a trial lists candidates, of which the
first is taken that plain torch can train, one with a loss before one without.
"""
from __future__ import annotations

import copy
import dataclasses
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import TestCase

import parity
import torch
from torch import Tensor, nn

BATCHES = 2


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One model class: how it is built, and what it is fed in step 0, 1."""
    name: str
    build: Callable[[], nn.Module]
    batches: list[dict[str, Any]]

    def batch(self, step: int) -> dict[str, Any]:
        return copy.deepcopy(self.batches[step % len(self.batches)])


@dataclasses.dataclass(frozen=True)
class Tried:
    """What one test class describes. `candidates` is asked for when it is tried: it may raise."""
    name: str
    candidates: Callable[[], Iterator[Candidate]]


def loss_of(model: nn.Module, batch: dict[str, Any]) -> tuple[Tensor, bool]:
    """The model's own loss, and True; else False, and all outputs with a gradient, each times fixed random numbers.

    Their squares would not do: many models end in a norm, of which squares are constant and gradients rounding noise.
    """
    out = model(*batch.pop("args", ()), **batch)
    own = own_loss(out)
    if own is not None:
        return own, True
    g = torch.Generator().manual_seed(0)
    parts = [(t.float() * torch.randn(t.shape, generator=g)).mean() for t in floats(out)]
    if not parts:
        raise ValueError("no output has a gradient")
    return torch.stack(parts).sum(), False


def own_loss(out: Any) -> Tensor | None:
    loss = out if isinstance(out, Tensor) and out.dim() == 0 else getattr(out, "loss", None)
    return loss.mean() if isinstance(loss, Tensor) and loss.requires_grad else None


def floats(value: Any, depth: int = 0) -> Iterator[Tensor]:
    """Tensors with a gradient in what a model returns: tuples, lists, dictionaries, dataclasses of them."""
    if isinstance(value, Tensor):
        if value.requires_grad and value.is_floating_point():
            yield value
        return
    if isinstance(value, (list, tuple)):
        parts: Any = value
    elif isinstance(value, dict):
        parts = value.values()
    else:
        parts = vars(value).values() if dataclasses.is_dataclass(value) else ()
    for part in parts if depth < 4 else ():
        yield from floats(part, depth + 1)


class Source:
    """A library whose models are tried. `tests`: its checkout, where the configurations come from there."""

    name = ""

    def __init__(self, tests: Path | None = None) -> None:
        self.tests = tests

    def files(self) -> list[str]:
        raise NotImplementedError

    def installed(self) -> set[str]:
        """Architectures of the library, where it can be asked; of some there may be no file."""
        return set()

    def prepare(self) -> None:
        """Imports what all files need, once, before processes are forked."""

    def trials(self, file: str) -> list[Tried]:
        raise NotImplementedError

    def _enter(self) -> None:
        """Makes this checkout's `tests` the package of that name."""
        for name in [n for n in sys.modules if n == "tests" or n.startswith("tests.")]:
            del sys.modules[name]
        sys.path[:0] = [str(self.tests), str(self.tests / "utils")]

    def _module(self, file: str) -> ModuleType:
        return importlib.import_module(file.removesuffix(".py").replace("/", "."))


# ---------------------------------------------------------------- transformers

# Classes with one of these in their names come first: they are what is trained, and they have a loss.
PREFERRED = ("ForConditionalGeneration", "ForCausalLM", "LMHead", "ForSpeechSeq2Seq", "ForCTC", "ForMaskedLM",
             "ForPreTraining", "ForObjectDetection", "ForUniversalSegmentation", "ForImageClassification", "For")


def rank(cls: type) -> int:
    return next((i for i, part in enumerate(PREFERRED) if part in cls.__name__), len(PREFERRED))


def has_task(test: type) -> bool:
    """Does it list a model with a task of its own? The others are towers and bodies; the whole comes last in a file.

    Some list their classes when they are set up: those count as having one.
    """
    classes = getattr(test, "all_model_classes", None)
    return not classes or any(rank(c) < len(PREFERRED) for c in classes)


class Transformers(Source):
    name = "transformers"

    def files(self) -> list[str]:
        return sorted(str(p.relative_to(self.tests)) for p in self.tests.glob("tests/models/*/test_modeling_*.py"))

    def installed(self) -> set[str]:
        import transformers
        return {p.parent.name for p in Path(transformers.__file__).parent.glob("models/*/modeling_*.py")}

    def prepare(self) -> None:
        import transformers
        # Some of the tests' helpers would put the checkout's own code in the place of what is installed.
        transformers.utils.direct_transformers_import = lambda *_, **__: transformers
        self.home = Path(transformers.__file__).parent
        self._enter()
        self.common = importlib.import_module("tests.test_modeling_common")

    def trials(self, file: str) -> list[Tried]:
        tests = [c for c in vars(self._module(file)).values() if inspect.isclass(c) and issubclass(c, TestCase)
                 and issubclass(c, self.common.ModelTesterMixin) and c.__module__.endswith(Path(file).stem)]
        bodies = [c for c in tests if not has_task(c)]
        return [Tried(c.__name__, lambda c=c: self._candidates(c)) for c in tests if c not in bodies[:-1]]

    def _candidates(self, cls: type) -> Iterator[Candidate]:
        test = cls("test_training")
        parity.seed()
        self.common.global_rng.seed(0)
        test.setUp()
        for model_class in sorted(test.all_model_classes, key=rank):
            if not Path(inspect.getfile(model_class)).is_relative_to(self.home):
                raise ImportError(f"{model_class.__name__} is not the installed transformers'")
            config, inputs = test.model_tester.prepare_config_and_inputs_for_common()
            more = [test.model_tester.prepare_config_and_inputs_for_common()[1] for _ in range(BATCHES - 1)]
            config.return_dict = True
            batches = [test._prepare_for_class(i, model_class, return_labels=True) for i in [inputs, *more]]
            yield Candidate(model_class.__name__, _from_config(model_class, config), batches)


def _from_config(model_class: type, config: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        torch.manual_seed(7)
        return model_class(copy.deepcopy(config)).float().train()
    return build


# ---------------------------------------------------------------- diffusers

class Diffusers(Source):
    name = "diffusers"
    folders = ("transformers", "unets", "autoencoders", "controlnets")

    def files(self) -> list[str]:
        return sorted(str(p.relative_to(self.tests)) for folder in self.folders
                      for p in self.tests.glob(f"tests/models/{folder}/test_models_*.py"))

    def prepare(self) -> None:
        self._enter()
        self.common = importlib.import_module("tests.models.testing_utils.common")

    def trials(self, file: str) -> list[Tried]:
        module = self._module(file)
        found = {}
        for cls in vars(module).values():
            if inspect.isclass(cls) and issubclass(cls, self.common.BaseModelTesterConfig) and \
                    cls.__module__ == module.__name__:
                model = cls().model_class
                found.setdefault(model.__name__, Tried(model.__name__, lambda cls=cls: self._candidates(cls)))
        return list(found.values())

    def _candidates(self, cls: type) -> Iterator[Candidate]:
        parity.seed()
        test = cls()
        model, config = test.model_class, test.get_init_dict()

        def build() -> nn.Module:
            torch.manual_seed(7)
            return model(**copy.deepcopy(config)).float().train()

        yield Candidate(model.__name__, build, [test.get_dummy_inputs() for _ in range(BATCHES)])


# ---------------------------------------------------------------- timm

# What is passed to timm.create_model besides num_classes; "size" is the side of the images.
_VIT = dict(img_size=32, patch_size=8, embed_dim=32, depth=3, num_heads=4, size=32)
_STAGES = dict(img_size=64, embed_dim=16, depths=(1, 1, 2, 1), num_heads=(1, 2, 2, 4), size=64)
TIMM: dict[str, dict[str, Any]] = {
    "vit_tiny_patch16_224": _VIT,
    "deit_tiny_distilled_patch16_224": _VIT,
    "deit3_small_patch16_224": _VIT,
    "beit_base_patch16_224": _VIT,
    "beitv2_base_patch16_224": _VIT,
    "eva02_tiny_patch14_224": _VIT,
    "vit_relpos_small_patch16_224": _VIT,
    "vit_small_patch14_reg4_dinov2": _VIT,
    "vit_base_patch16_siglip_224": _VIT,
    "samvit_base_patch16_224": dict(_VIT, window_size=2, global_attn_indexes=(1,)),
    "cait_xxs24_224": _VIT,
    "convit_tiny": dict(img_size=32, patch_size=8, embed_dim=8, depth=3, num_heads=4, size=32),
    "xcit_nano_12_p8_224": _VIT,
    "mixer_s16_224": dict(img_size=64, size=64),
    "gmlp_s16_224": dict(img_size=64, size=64),
    "swin_tiny_patch4_window7_224": dict(_STAGES, window_size=4, patch_size=2),
    "swinv2_tiny_window8_256": dict(_STAGES, window_size=4, patch_size=2),
    "swin_s3_tiny_224": dict(_STAGES, window_size=(4, 4, 4, 4), patch_size=2),
    "convnext_atto": dict(depths=(1, 1, 2, 1), dims=(8, 16, 24, 32), size=32),
    "convnextv2_atto": dict(depths=(1, 1, 2, 1), dims=(8, 16, 24, 32), size=32),
    "inception_next_tiny": dict(depths=(1, 1, 2, 1), dims=(16, 16, 24, 32), size=64),
    "edgenext_xx_small": dict(depths=(1, 1, 2, 1), dims=(8, 16, 24, 32), size=64),
    "davit_tiny": dict(depths=(1, 1, 1, 1), embed_dims=(16, 32, 32, 64), num_heads=(1, 2, 2, 4),
                       window_size=2, size=64),
    "focalnet_tiny_srf": dict(size=64),
    "gcvit_xxtiny": dict(img_size=224, size=224),
    "pvt_v2_b0": dict(depths=(1, 1, 1, 1), embed_dims=(8, 16, 40, 64), size=64),
    "poolformer_s12": dict(size=64),
    "caformer_s18": dict(size=64),
    "hiera_tiny_224": dict(img_size=64, embed_dim=16, num_heads=1, stages=(1, 1, 1, 1), size=64),
    "mambaout_femto": dict(depths=(1, 1, 1, 1), dims=(8, 16, 24, 32), size=64),
    "starnet_s1": dict(base_dim=8, depths=(1, 1, 1, 1), size=64),
    "rdnet_tiny": dict(size=64),
    "resnet10t": dict(size=64),
    "resnetv2_18": dict(size=64),
    "mobilenetv3_small_050": dict(size=64),
    "efficientnet_lite0": dict(size=64),
    "regnetx_002": dict(size=64),
    "ghostnet_050": dict(size=64),
    "repvit_m0_9": dict(size=64),
    "fastvit_t8": dict(size=64),
    "mobilevit_xxs": dict(size=64),
    "densenet121": dict(block_config=(1, 1, 1, 1), growth_rate=8, size=64),
    "levit_128s": dict(img_size=64, size=64),
    "efficientformer_l1": dict(size=224),
    "sequencer2d_s": dict(img_size=64, layers=(1, 1, 1, 1), embed_dims=(16, 32, 32, 32), hidden_sizes=(4, 8, 8, 8),
                          size=64),
}


class Timm(Source):
    name = "timm"

    def prepare(self) -> None:
        import timm  # noqa: F401

    def files(self) -> list[str]:
        import timm
        return sorted({*timm.list_models("test_*"), *TIMM})

    def trials(self, file: str) -> list[Tried]:
        return [Tried(file, lambda: iter([self._candidate(file)]))]

    def _candidate(self, name: str) -> Candidate:
        import timm
        config = dict(TIMM.get(name, dict(size=160)))
        size = config.pop("size")

        def build() -> nn.Module:
            torch.manual_seed(7)
            return Labelled(timm.create_model(name, num_classes=5, **config)).float().train()

        def batch(step: int) -> dict[str, Any]:
            g = torch.Generator().manual_seed(step)
            return {"args": (torch.randn(2, 3, size, size, generator=g), torch.tensor([step % 5, 3]))}

        return Candidate(name, build, [batch(i) for i in range(BATCHES)])


class Labelled(nn.Module):
    """A classifier and its loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        out = self.model(x)
        parts = out if isinstance(out, tuple) else (out,)          # a distilled model has two heads
        return torch.stack([nn.functional.cross_entropy(p, labels) for p in parts]).sum()


def sources(transformers: Path | None, diffusers: Path | None) -> list[Source]:
    """Those whose tests are at hand; timm's need none, only timm."""
    found: list[Source] = [cls(path.resolve()) for cls, path in ((Transformers, transformers), (Diffusers, diffusers))
                           if path is not None]
    return [*found, *([Timm()] if importlib.util.find_spec("timm") else [])]
