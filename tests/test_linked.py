"""Linked layers, whose input the layer before makes again from attention's output: the bits of keeping both, in less.

The control of each run is the same training with "attention", which keeps the input as well.
"""
from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fusing
import parity
import pytest
from flat import seven
from fusing import padded
from kept import FEW, LINKS, grads_of, once, same
from kept import tiny as made
from test_fused import FAMILIES
from test_moe import FAMILIES as MIXTURES
from torch import Tensor, nn

import megatrain_torch as mt
from megatrain_torch.model.stream import runtime_of
from megatrain_torch.plans import search
from megatrain_torch.plans.cost import cost_of
from megatrain_torch.plans.machine import MACHINES
from megatrain_torch.plans.shapes import shapes_of

MODES = ("linked", "linked+host", "linked+disk")


def tiny(mode: Any, build: Callable[[], nn.Module] = LINKS, **debug: Any) -> nn.Module:
    return made(mode, build=build, **debug)


def place(mode: str, tmp_path: Path) -> Path | None:
    return tmp_path if mode.endswith("+disk") else None


def kept_by(model: nn.Module) -> list[str]:
    """What each layer's node keeps of a forward, the last one's first."""
    node, found = model(**padded(0)).logits.grad_fn, []
    while node is not None:
        found += [node.keep] if hasattr(node, "keep") and node.fused.template.swaps else []
        node = node.next_functions[0][0] if node.next_functions else None
    return found


# ---------------------------------------------------------------- bits

@pytest.mark.parametrize("family, mode", parity.turns(["llama_biases", "qwen3", "gemma3", "olmo2", "granite"], MODES))
def test_a_linked_layer_has_the_bits_of_one_that_keeps_its_input(family: str, mode: str, tmp_path: Path) -> None:
    right = fusing.fused(FAMILIES[family], padded, "attention")
    nvme = place(mode, tmp_path)
    engine = {"delay_us": 100, "nvme": nvme and str(nvme), **(FEW if nvme else {})}
    assert same(right, fusing.fused(FAMILIES[family], padded, mode, engine))


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_so_has_a_mixture_of_experts(family: str) -> None:
    right = fusing.fused(MIXTURES[family], padded, "attention")
    assert same(right, fusing.fused(MIXTURES[family], padded, "linked+host", {"delay_us": 100}))


@pytest.mark.parametrize("keep", ["attention", "selective", "saved"])
@pytest.mark.parametrize("where", ["", "+host"])
def test_the_layer_before_may_keep_more(keep: str, where: str) -> None:
    def train(first: str, second: str) -> dict[str, Tensor]:
        return grads_of(tiny({f"model.layers.{i}": (first, second)[i % 2] for i in range(5)}, delay_us=50), once)

    right, found = train(keep, keep), train(keep + where, f"linked{where}")
    assert all(parity.same_bits(right[n], found[n]) for n in right)


# ---------------------------------------------------------------- what is kept

def test_every_second_layer_is_linked_where_all_are_asked_to_be() -> None:
    assert kept_by(tiny("linked")) == ["linked" if i % 2 else "attention" for i in range(5)][::-1]


def test_the_input_is_gone_between_forward_and_backward() -> None:
    def alive(mode: str) -> list[bool]:
        model, seen = tiny(mode), []
        for layer in model.model.layers:
            layer.register_forward_pre_hook(lambda m, args: seen.append(weakref.ref(args[0].untyped_storage())))
        loss = model(**padded(0)).loss
        gc.collect()
        found = [ref() is not None for ref in seen]
        loss.backward()                                    # till here it has held the graph
        return found

    assert all(alive("attention"))
    assert alive("linked") == [i % 2 == 0 for i in range(5)]
    assert not any(alive("linked+host")[1::2])


def test_attentions_output_alone_leaves_for_the_host() -> None:
    model = tiny("linked+host")
    loss = model(**padded(0)).loss
    bundles = [b for ref in runtime_of(model).swap.out if "layers" in runtime_of(model).unit_names[(b := ref()).unit]]
    assert [len(b.shapes) for b in bundles] == [2, 1, 2, 1, 2], "of a linked layer, without its input"
    loss.backward()


def test_an_output_that_others_change_is_kept_as_input() -> None:
    """Between layers something is done: no layer's output is the next one's input as it came."""
    def hooked(mode: str) -> nn.Module:
        model = tiny(mode)
        for layer in model.model.layers:
            layer.register_forward_hook(lambda m, args, out: out.mul(0.5))
        return model

    assert set(kept_by(hooked("linked"))[:-1]) == {"replay"}
    right, found = grads_of(hooked("attention"), once), grads_of(hooked("linked"), once)
    assert all(parity.same_bits(right[n], found[n]) for n in right)


def test_layers_before_the_first_trained_weight_are_no_part_of_it() -> None:
    def build() -> nn.Module:
        model = LINKS()
        for name, p in model.named_parameters():
            p.requires_grad_(not any(part in name for part in ("embed", "layers.0.", "layers.1.")))
        return model

    right, found = (grads_of(tiny(mode, build=build), once) for mode in ("attention", "linked"))
    assert all(parity.same_bits(right[n], found[n]) for n in right)
    assert kept_by(tiny("linked", build=build)) == ["linked", "attention", "replay"]


def test_an_update_of_the_layer_before_is_noticed_before_its_output_is_made_again() -> None:
    model = tiny("linked")
    opt = mt.AdamW(model.model.layers[0].parameters(), lr=1e-3)
    late = model(**padded(1)).loss
    once(model)
    grads = {n: parity.frozen(p.grad) for n, p in model.model.layers[1].named_parameters()}
    opt.step()
    with pytest.raises(RuntimeError, match=r"weights of unit 'model\.layers\.0'"):
        late.backward()
    assert all(parity.same_bits(grads[n], p.grad) for n, p in model.model.layers[1].named_parameters())


# ---------------------------------------------------------------- plans

def test_pairs_are_planned_for_a_long_sequence_that_memory_is_short_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = dict(tokens=1 << 20, seq=1 << 20, machine="h200-1.5t,host=250GiB", states="8bit-sr", grads="none")
    plan = mt.plan(seven(28), **asked)
    modes = [plan.activations[f"model.layers.{i}"] for i in range(28)]
    linked = [i for i, mode in enumerate(modes) if mode.startswith("linked")]
    assert len(linked) >= 4
    assert all(modes[i - 1].startswith(("attention", "selective", "saved")) for i in linked)
    monkeypatch.setattr(search, "LONG_SEQ", 1 << 40)
    assert plan.seconds < 0.9 * mt.plan(seven(28), **asked).seconds


def test_short_sequences_have_no_links() -> None:
    plan = mt.plan(seven(28), tokens=1 << 16, seq=4096, machine="h200-128g")
    assert not any(mode.startswith("linked") for mode in plan.activations.values())


def test_a_plan_may_be_asked_for_links() -> None:
    plan = mt.plan(seven(4), tokens=1 << 17, seq=1 << 17, machine="h200-128g", activations="linked+host")
    assert [plan.activations[f"model.layers.{i}"] for i in range(4)] == ["attention+host", "linked+host"] * 2
    rows = [line for line in str(plan).splitlines() if line.startswith("model.layers.")]
    assert len(rows) < 4 and all(row.endswith("attention+host, linked+host in turn") for row in rows)


def test_a_link_costs_what_is_behind_attention_and_spares_the_input() -> None:
    """7B's widths: of a token's forward products of a layer, q, k and v are 33 of 466 MFLOP."""
    layer, tokens = shapes_of(seven(1))("fp32").windows[1], 1 << 17
    cost = cost_of(layer, MACHINES["h200-128g"], tokens, tokens, True)
    assert cost.kept["attention"] - cost.kept["linked"] == tokens * 3584 * 2
    assert cost.away["linked+host"] == cost.kept["linked"] and cost.kept["linked+host"] == 0
    assert cost.work["linked"] == cost.work["attention"] + tokens * 3584 * 2, "the input that was made again"
    more = cost.backward_s["linked"] - cost.backward_s["attention"]
    assert 0.8 * cost.forward_s > more > 0 and cost.backward_s["linked"] < cost.backward_s["replay"]
