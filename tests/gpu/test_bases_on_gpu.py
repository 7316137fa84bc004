"""Frozen bases of codes on a GPU: the bits of the same model resident there, with the package's own kernels; the device
never has more than its slots of them. Needs bitsandbytes and torchao; each is skipped without."""
from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
bases = pytest.importorskip("test_bases", reason="bitsandbytes, torchao, transformers and PEFT are needed")
import parity  # noqa: E402

import megatrain_torch as mt  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def on_device(step: int) -> dict[str, Any]:
    return {k: v.to(DEVICE) for k, v in OWN_BATCH(step).items()}


OWN_BATCH = bases.batch


@pytest.fixture(autouse=True)
def _batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bases, "batch", on_device)


folder = bases.folder


def trained(model: Any) -> list[torch.Tensor]:
    """A step of SGD by a power of two is the same on a CPU, where streamed adapters live, and on a GPU."""
    return [t.cpu() for t in bases.trained(model, optimizer=torch.optim.SGD, lr=2**-4)]


def loaded(at: Path, form: str | None, device: str) -> Any:
    """form: of the codes that are made of the weights there; None: they are codes."""
    how = {} if form is None else {"quantization_config": bases.FORMATS[form]()}
    return bases.transformers.AutoModelForCausalLM.from_pretrained(at, dtype=torch.bfloat16, device_map=device, **how)


def resident(model: Any, form: str, tmp_path: Path) -> Any:
    """bitsandbytes' int8 has states that do not go with a module to a GPU: it is read there."""
    if form.startswith("int8"):
        model.save_pretrained(tmp_path / "codes")
        return loaded(tmp_path / "codes", None, DEVICE)
    return copy.deepcopy(model).to(DEVICE)


def both(model: Any, form: str, how: str, home: str, tmp_path: Path) -> None:
    there = bases.with_adapter(resident(model, form, tmp_path)).to(DEVICE)
    wanted = trained(there)
    del there
    model = bases.with_adapter(model)
    mt.stream(model, DEVICE, compute="eager", nvme=str(tmp_path) if "disk" in home else None,
              plan={"activations": how, "slots": 2, "homes": home})
    bases.assert_same(trained(model), wanted)


@pytest.mark.parametrize("home", ["ram", "vram", "disk+weights"])
@pytest.mark.parametrize("how", ["replay", "saved"])
@pytest.mark.parametrize("form", bases.FORMATS)
def test_streamed_codes_give_their_packages_bits_on_a_gpu(form: str, how: str, home: str, tmp_path: Path,
                                                          folder: Callable[[str], Path]) -> None:
    both(loaded(folder("llama"), form, "cpu"), form, how, home, tmp_path)


@pytest.mark.parametrize("how", ["replay", "saved"])
@pytest.mark.parametrize("form", bases.PUBLISHED)
def test_published_codes_give_the_bits_of_the_16_bit_model_on_a_gpu(form: str, how: str, tmp_path: Path) -> None:
    make, change, said = bases.PUBLISHED[form]
    at = bases.written(tmp_path / "published", make(), change, said)
    adapter = bases.peft.LoraConfig(r=4, target_modules=bases.ATTENTION, init_lora_weights=False)
    plain = bases.plain_of(form, at)
    parity.seed()
    plain = bases.peft.get_peft_model(plain, adapter).train().to(DEVICE)
    wanted = trained(plain)
    parity.seed()
    model = mt.from_pretrained(bases.transformers.AutoModelForCausalLM, at, base=form.removesuffix("-experts"),
                               adapter=adapter, device=DEVICE, compute="eager",
                               plan={"activations": how, "slots": 2}).train()
    bases.assert_same(trained(model), wanted)


# ---- run by templates ----------------------------------------------------------------------------

@pytest.fixture(autouse=True)
def _device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bases, "DEVICE", DEVICE)


@pytest.mark.parametrize("form", bases.EXPANDED)
def test_weights_are_made_of_codes_to_their_packages_bits_on_a_gpu(form: str, tmp_path: Path,
                                                                   folder: Callable[[str], Path]) -> None:
    bases.test_weights_are_made_of_codes_to_their_packages_bits(form, folder, tmp_path)


@pytest.mark.parametrize("form", bases.EXPANDED)
def test_templates_run_over_codes_on_a_gpu(form: str, tmp_path: Path, folder: Callable[[str], Path]) -> None:
    bases.test_templates_run_over_codes(form, folder, tmp_path)
