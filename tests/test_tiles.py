"""Gate and up made in tiles of rows: as without tiles, but for the order in which weight gradients are summed."""
from __future__ import annotations

import fusing
import parity
import pytest
import torch
from fusing import padded
from test_fused import FAMILIES
from torch import Tensor

from megatrain_torch.fused.templates import decoder
from megatrain_torch.fused.templates.decoder import GatedMLP

ROWS = 8                                     # of 24 tokens


@pytest.fixture
def tiles(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tiles of so few rows; yields the rows of each forward and backward."""
    seen: list[int] = []
    monkeypatch.setattr(decoder, "TILE_BYTES", 0)
    monkeypatch.setattr(decoder, "LEAST_ROWS", ROWS)
    for name in ("_forward", "_backward"):
        own = getattr(GatedMLP, name)
        monkeypatch.setattr(GatedMLP, name, lambda self, *args, own=own: (seen.append(args[0].shape[0]), own(self, *args))[1])
    return seen


@pytest.mark.parametrize("family, keep", [
    ("llama_biases", "replay"), pytest.param("llama_biases", "selective", marks=parity.LONG), ("gemma2", "selective"),
    pytest.param("olmo2", "replay", marks=parity.LONG), ("olmo2", "attention"),
    *(pytest.param(*case, marks=parity.LONG) for case in (("granite", "selective"), ("phi3", "attention+host")))])
def test_a_layer_in_tiles_trains_as_plain_torch(family: str, keep: str, tiles: list[int]) -> None:
    """fusing.TOLERANCE: sums over 24 tokens in three parts, each rounded as torch rounds its own."""
    run = fusing.fused(FAMILIES[family], padded, keep)
    fusing.all_fused(run.codes)
    fusing.agree(fusing.truth(FAMILIES[family], padded), run)
    assert set(tiles[-30:]) == {ROWS}


def test_what_is_kept_whole_is_made_whole(tiles: list[int]) -> None:
    fusing.fused(FAMILIES["llama"], padded, "saved")
    assert ROWS not in tiles[-4:]


def test_in_bf16_tiles_are_no_further_from_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums in fp32, rounded once: a gradient in tiles is as near as one product."""
    def grads(dtype: torch.dtype, keep: str) -> dict[str, Tensor]:
        parity.seed()
        model = FAMILIES["qwen2"]()
        model.load_state_dict({n: t.bfloat16() for n, t in model.state_dict().items()})
        model = fusing.stream(model.to(dtype), keep)
        model(**padded(0)).loss.backward()
        return {n: parity.frozen(p.grad).double() for n, p in model.named_parameters() if "mlp" in n}

    exact, whole = grads(torch.float32, "replay"), grads(torch.bfloat16, "replay")
    monkeypatch.setattr(decoder, "TILE_BYTES", 0)
    monkeypatch.setattr(decoder, "LEAST_ROWS", 4)
    tiled = grads(torch.bfloat16, "replay")

    def distance(other: dict[str, Tensor]) -> float:
        return sum(float((other[n] - exact[n]).norm() ** 2 / exact[n].norm() ** 2) for n in exact) ** 0.5

    assert 0 < distance(tiled) < 1.2 * distance(whole)
