"""What a model is made of, as far as time and memory depend on it: units, windows, and their products.

Reads modules, or a transformers config from which it builds them on the meta device: no weights, no GPU.
Windows and units are those of units.py, so they are the ones that mt.stream makes.
"""
from __future__ import annotations

import dataclasses
import functools
import importlib
import itertools
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..base.codes import dense_bytes, elements, format_of, owner_of
from ..base.errors import MegatrainError, check_count, check_dtype
from ..base.modes import check_layers, inner, master_bytes, moment_bytes
from ..base.units import (
    ADAPTER,
    ALIGN,
    cut,
    find,
    group,
    output_embeddings,
    stored_dtype,
    usual_experts,
    weight_bytes,
    wrapped_parameters,
)
from ..fused.layer import runs
from ..fused.templates import Sizes, Unfit
from ..fused.trl import OWN, loss_of, trainers
from ..graph.door import window_of
from ..store.bases import shape_codes


@dataclass(frozen=True)
class Unit:
    """Bytes of a unit's planes (docs/design.md section 4)."""

    name: str
    numel: int
    weights: int                # plane HI, and a slot for it
    trained: int                # elements; the next four are bytes of trained parameters
    gradients: int              # GRAD
    masters: int                # LO, or MASTER of fp16 weights
    moments: int                # M and V
    sums: int                   # ACC, which exists with several micro-batches only
    count: int                  # tensors
    fetched: tuple[int, ...] = ()       # bytes of a slot for what is fetched by itself: some experts at a time

    @property
    def slots(self) -> tuple[int, ...]:
        """Bytes of what is fetched at once."""
        return self.fetched or (self.weights,)


@dataclass(frozen=True)
class Product:
    """A matrix product: `rows` rows per token (experts per token in a mixture), fan_in to fan_out."""

    # "qkv", "out", "up", "down", "router", "head"; "latent": makes q, k and v of the few numbers that "qkv" gives then;
    # "adapter": of LoRA, beside one of the others; or "folded": of LoRA, in a sum with experts' matrices, so that it is
    # a product in backward alone
    part: str
    fan_in: int
    fan_out: int
    rows: float
    trained: bool

    @property
    def flops(self) -> float:
        """Of one token's forward."""
        return 2.0 * self.rows * self.fan_in * self.fan_out

    @property
    def fits(self) -> bool:
        """May it be of 8-bit codes? Experts' are not (fused/templates/weights.py)."""
        known = self.part in ("qkv", "latent", "out", "up", "down")
        return known and self.rows == 1 and not (self.fan_in | self.fan_out) % 16

    @property
    def width(self) -> float:
        return math.sqrt(self.fan_in * self.fan_out)


@dataclass(frozen=True)
class Window:
    """One window. Windows with equal `shape` cost the same."""

    name: str
    kind: str                   # "embedding", "layer" (has attention), "head" (gives the logits) or "other"
    units: tuple[int, ...]      # whose weights it binds
    products: tuple[Product, ...]
    template: Sizes | None      # what the template that runs it keeps; None: its own code runs
    hidden: int                 # elements of what it is given per token
    attention: int              # width of all query heads; where values' heads have another, the mean of both
    heads: int                  # query heads
    context: int                # keys a query sees at most (a sliding window); 0: all before it
    table: int                  # elements of embedding tables
    itemsize: int               # bytes of an activation's element
    learns: bool                # it or a window before it has trained parameters: a gradient passes through it
    coded: bool = False         # its products, where `fits` says so, are of 8-bit codes
    dense: tuple[int, int] = (0, 0)     # as codes.dense_bytes has it
    made: int = 0               # bytes of 16-bit weights that its forward makes of codes
    why: str = ""               # its own code runs, of a layer
    writes: bool = False        # that changes something beside its output, so it does not run again in backward
    spelled: bool = False       # attention is written out, and makes [S, S] weights of each head
    loss: str = OWN             # of a head: who takes the loss, and how (fused/trl.py)

    @functools.cached_property
    def shape(self) -> Window:
        """All that its cost depends on."""
        return dataclasses.replace(self, name="", units=(), why="")

    def width(self, part: str) -> float:
        """Elements per token that the products of a part give."""
        return sum(p.rows * p.fan_out for p in self.products if p.part == part)


@dataclass(frozen=True)
class Shape:
    """A model: its units, and its windows in the order of the modules, which is taken for the forward's."""

    name: str
    units: tuple[Unit, ...]
    windows: tuple[Window, ...]
    experts: int = 0            # fetched at a time, where not all of a layer's are at once; 0: it has no stack of such

    @property
    def parameters(self) -> int:
        return sum(u.numel for u in self.units)

    @property
    def trained(self) -> int:
        return sum(u.trained for u in self.units)


def shapes_of(model: Any, *, dtype: torch.dtype | None = None, units: list[str | nn.Module] | None = None,
              layers: int | None = None, products: str = "bf16", base: str | None = None, adapter: Any = None,
              device: str = "cpu", trainer: Any = None) -> Callable[..., Shape]:
    """The shape of a module, or of a transformers config, by how AdamW's states are kept (base/modes.py), and by the
    experts that are fetched at a time (0: all). Arguments are mt.plan's; device: "cuda" or "cpu", for which templates
    are asked. A config without a dtype of its own is taken for bf16. Raises MegatrainError where it is neither; for
    `layers`, `base` or `adapter` with a module; and as mt.from_pretrained of `base`."""
    check_dtype(dtype)
    its = trainers.get(model) if isinstance(model, nn.Module) else None
    loss = loss_of(trainer) if trainer is not None else loss_of(type(its and its()))     # without one: OWN
    if layers is not None:
        check_count(layers, "layers")
    if not isinstance(model, nn.Module):                # what mt.from_pretrained makes of such a checkpoint
        model, dtype = shaped(model, base, layers, dtype), None
        if adapter is not None:
            with torch.random.fork_rng(devices=[]):      # adapters are made with numbers
                model = importlib.import_module("peft").get_peft_model(model, adapter)
    elif base is not None or adapter is not None:
        raise MegatrainError("base, adapter: of a config; a module is planned as it is, with its codes and adapters")
    elif layers is not None:
        raise MegatrainError("layers: a module has the layers it has; give its config instead")
    found = find(model, units)
    groups = group(model, found)
    if not groups:
        raise MegatrainError(f"{type(model).__name__} has no parameters: there is nothing to plan")
    unit_of = {id(owner_of(p)): i for i, (_, own) in enumerate(groups) for _, p in own}
    windows, learns = [], False
    configs = {id(c): c for m in model.modules() if (c := vars(m).get("config")) is not None}     # most share theirs
    for name, module in found.windows:
        learns = learns or any(p.requires_grad for p in module.parameters())
        made = _window(model, [*configs.values()], name or type(model).__name__, module, unit_of, dtype, learns, device)
        windows.append(dataclasses.replace(made, loss=loss) if made.kind == "head" else made)
    if products == "fp8":               # as mt.stream chooses them
        coded = {w.name for w in inner([w for w in windows if w.kind == "layer" and w.template is not None
                                            and any(p.fits for p in w.products)])}
        if coded or not any(w.why for w in windows):  # a layer that its own code runs today is no reason to refuse
            check_layers(type(model).__name__, coded, {torch.bfloat16 if w.itemsize == 2 else torch.float32
                                                           for w in windows if w.name in coded})
        windows = [dataclasses.replace(w, coded=w.name in coded) for w in windows]

    def shape_with(states: str, experts: int = 0) -> Shape:
        own = [unit_bytes(name, params, dtype, states, experts=experts) for name, params in groups]
        cut = (_in_pieces(w, m, experts) if any(own[u].fetched for u in w.units) else w
               for w, (_, m) in zip(windows, found.windows))
        return Shape(type(model).__name__, tuple(own), tuple(cut), max(usual_experts(params) for _, params in groups))

    return shape_with


def _in_pieces(w: Window, module: nn.Module, experts: int) -> Window:
    """Where so many experts are fetched at a time."""
    t, cut = w.template, None
    if t is not None and t.experts[0]:
        count, made, each = t.experts
        share = min(1.0, experts / count)
        cut = dataclasses.replace(t, expanded=(t.expanded[0] - math.floor(made * (1 - share)), t.expanded[1]),
                                  tiled=(math.floor(each * (1 - share)), 0, 0), parts=-(-count // experts))
    return dataclasses.replace(w, template=cut, dense=_dense(module, w.itemsize, experts))


def _dense(module: nn.Module, item: int, experts: int = 0) -> tuple[int, int]:
    """Bytes of weights that a module's own code makes, as codes.dense_bytes has them: of codes, and what PEFT adds up,
    to which a gradient as large belongs. item: bytes of a weight."""
    at_once, kept = dense_bytes(module, experts)
    sums = item * sum(m.get_param().numel() for m in wrapped_parameters(module))
    return at_once + 2 * sums, kept + sums


def shaped(config: Any, base: str | None, layers: int | None = None, dtype: torch.dtype | None = None) -> nn.Module:
    """A config's model on the meta device, its linear layers as mt.from_pretrained(base=) would have them."""
    try:
        import transformers
    except ImportError:
        raise MegatrainError("a plan from a config needs transformers; give a module") from None
    if not isinstance(config, transformers.PretrainedConfig):
        raise MegatrainError(f"{type(config).__name__}: give a torch.nn.Module or a transformers config")
    if layers is not None:
        fields = config.to_dict() | {"num_hidden_layers": layers}
        if types := fields.get("layer_types"):
            fields["layer_types"] = [types[i % len(types)] for i in range(layers)]
        config = type(config).from_dict(fields)
    kinds = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING
    auto = transformers.AutoModelForCausalLM if type(config) in kinds else transformers.AutoModel
    with torch.device("meta"):
        model = auto.from_config(config)
    dtype = dtype or getattr(config, "dtype", None) or torch.bfloat16
    model.to(dtype)
    if base is not None:
        shape_codes(model, config, base, dtype)
    return model


# ---- units ---------------------------------------------------------------------------------------

def unit_bytes(name: str, own: list[tuple[str, nn.Parameter]], dtype: torch.dtype | None,
               states: str = "fp32", align: int = ALIGN, experts: int = 0) -> Unit:
    """Bytes of a unit. states: AdamW's. align: as weight_bytes. experts: of a stack, at a time; 0: all."""
    types = [stored_dtype(p, dtype) for _, p in own]
    fetched = tuple(c.bytes for c in cut(own, experts, types, [0] * len(own)) or ())
    kinds = [(p.numel(), kind) for (_, p), kind in zip(own, types) if p.requires_grad]
    return Unit(name, sum(map(elements, {owner_of(p) for _, p in own})), weight_bytes(own, dtype, align),
                sum([n for n, _ in kinds]), sum([n * kind.itemsize for n, kind in kinds]),
                sum([n * master_bytes(states, kind) for n, kind in kinds]),
                sum([moment_bytes(states, kind, n) for n, kind in kinds]),
                sum([4 * n for n, kind in kinds if kind in (torch.bfloat16, torch.float16)]), len(own), fetched)


# ---- windows -------------------------------------------------------------------------------------

_ATTENTION = re.compile(r"attn|attention", re.IGNORECASE)
_OUT = re.compile(r"^(o_proj|out_proj|dense|c_proj|wo|o|out_lin|proj)$")
_LATENT = re.compile(r"^(q_b_proj|kv_b_proj)$")
_DOWN = re.compile(r"^(down_proj|fc2|w2|c_proj|wo|dense_4h_to_h|lin2|linear2|fc_out|output|dense_out)$")
_ROUTER = re.compile(r"^(gate|router|classifier)$")
_EXPERT = re.compile(r"experts\.\d+\.")
_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "top_k", "moe_k", "moe_topk", "num_selected_experts")


def _window(root: nn.Module, configs: list[Any], name: str, module: nn.Module, unit_of: dict[int, int],
            dtype: torch.dtype | None, learns: bool, device: str) -> Window:
    parameters = dict(module.named_parameters())
    tables = {id(p) for m in module.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag))
              for p in m.parameters(recurse=False)}
    head = output_embeddings(root) is module
    for n, p in parameters.items():
        if (format := format_of(p)) is not None:        # by the 16-bit weight that the codes stand for
            parameters[n] = torch.empty(format.shape(p), dtype=torch.bfloat16, device="meta")
    matrices = {n: p for n, p in parameters.items() if p.dim() > 1 and p.is_floating_point()
                and not n.endswith("bias") and (head or id(p) not in tables)}
    products = _products(configs, module, matrices, head)
    attention = [p for p in products if p.part == "out"] if any(p.part == "qkv" for p in products) else []
    kind = "head" if head else "layer" if attention else "embedding" if tables and not products else "other"
    floating = [stored_dtype(p, dtype).itemsize for n, p in parameters.items()
                if p.is_floating_point() and not ADAPTER.search(n)]
    item = max(floating, default=4)
    width = q_width = sum(p.fan_in for p in attention)         # of all heads of values
    if any(p.part == "latent" for p in products):
        of_q, of_v = (_attribute([], module, (name,), 1) for name in ("qk_head_dim", "v_head_dim"))
        width = q_width * (of_q + of_v) // (2 * of_v)
    found, why = None, ""                # what the template that runs it keeps, or why there is none
    try:
        found = runs(module, device).sizes(item)
    except Unfit as reason:
        why = str(reason)
    config = next((c for m in module.modules() if (c := getattr(m, "config", None)) is not None), None)
    return Window(name, kind, tuple(dict.fromkeys(unit_of[id(p)] for p in module.parameters())), products,
                  found, _hidden(products, parameters), width,
                  q_width // max(1, _attribute(configs, module, ("head_dim",), 128)),
                  _attribute([], module, ("sliding_window",), 0),
                  sum(p.numel() for p in parameters.values() if id(p) in tables and not head), item, learns,
                  dense=_dense(module, item), made=dense_bytes(module)[0], why=why * (kind == "layer"),
                  writes=bool(getattr(window_of(module), "writes", "")),
                  spelled=kind == "layer" and getattr(config, "_attn_implementation", None) == "eager")


def attends(module: nn.Module) -> bool:
    """Is it a layer, one with attention?"""
    return any(p.dim() > 1 and _part(n) == "qkv" for n, p in module.named_parameters())


def _products(configs: list[Any], module: nn.Module, matrices: dict[str, nn.Parameter],
              head: bool) -> tuple[Product, ...]:
    """One of each matrix; 3-D ones are a mixture's experts, of which a token takes a few."""
    found = []
    experts = {m.group() for n in matrices if (m := _EXPERT.search(n))}
    taken = _attribute(configs, module, _PER_TOKEN, 1)
    stacks = {n.rpartition(".")[0].replace(".base_layer", ""): len(p) for n, p in matrices.items()
              if p.dim() == 3 and "expert" in n}
    for name, p in matrices.items():
        part, (fan_out, *rest), rows = "head" if head else _part(name), p.shape, 1.0
        if part == "adapter" and (count := stacks.get(ADAPTER.sub("", name).replace(".base_layer", ""))):
            first = ".lora_A." in name
            part, rows = "folded", float(min(taken, count))
            fan_out, rest = (fan_out // count, rest) if first else (fan_out, [rest[0] // count])
        elif _EXPERT.search(name):
            rows = taken / len(experts)
        elif p.dim() == 3 and "expert" in name:
            rows, (fan_out, *rest) = float(min(taken, fan_out)), rest
        found.append(Product(part, math.prod(rest), fan_out, rows, p.requires_grad))
    hidden = _hidden(tuple(found), matrices)
    for i, p in enumerate(found):       # experts are [in, out] or [out, in]: up begins and down ends at hidden
        begins, ends = (p.fan_in, p.fan_out) if p.part == "up" else (p.fan_out, p.fan_in)
        if p.part in ("up", "down") and p.rows != 1 and begins != hidden and ends == hidden:
            found[i] = dataclasses.replace(p, fan_in=p.fan_out, fan_out=p.fan_in)
    return tuple(found)


def _part(name: str) -> str:
    if ADAPTER.search(name):
        return "adapter"
    owner, _, leaf = name.removesuffix(".weight").removesuffix(".base_layer").rpartition(".")
    if _ATTENTION.search(owner):
        return "out" if _OUT.match(leaf) else "latent" if _LATENT.match(leaf) else "qkv"
    if _ROUTER.match(leaf):
        return "router"
    return "down" if _DOWN.match(leaf) else "up"


def _hidden(products: tuple[Product, ...], parameters: dict[str, nn.Parameter]) -> int:
    """Width of what passes between windows: what attention gives back, else what the first product takes."""
    if products:
        return next((p.fan_out for p in products if p.part == "out"), products[0].fan_in)
    return max((p.shape[-1] for p in parameters.values() if p.dim()), default=0)


def _attribute(configs: list[Any], module: nn.Module, names: tuple[str, ...], default: int) -> int:
    """An int that some module of the window, or one of the model's configs, calls by one of these names."""
    found = (getattr(place, name, None) for place in itertools.chain(module.modules(), configs) for name in names)
    return next((value for value in found if type(value) is int), default)
