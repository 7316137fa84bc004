"""What a computation gives, as numbers: equal expressions have equal numbers.

A module's own forward, and its backward, run on fake tensors, whose sizes are primes (prove.py). Every tensor that an
operation gives has the number of its expression: the operation, the numbers of what it reads, its constants to the bit,
its sizes. Two computations that give equal numbers are the same computation, for every input and every size; no graph
is matched.

Expressions have a normal form, which is small: copies, detached and contiguous tensors are what they are copies of;
chains of views are one view, of permutations one; sums and products have no order, since rounding is no part of the
claim; a tensor that was written in place has a new number, and one of which columns were written is what it was with
these columns in it.

Three functions are opaque: F.linear, F.scaled_dot_product_attention, and whatever a caller names (experts). They and
their gradients are one expression each, so that nothing depends on which kernel a machine has.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from ..templates.parts import Unfit

aten = torch.ops.aten
Shape = tuple[int, ...]
Key = tuple[Any, ...]            # an expression: (operation, ...), operands as ("#", number)


def operands(key: Any) -> Iterator[int]:
    """The numbers that an expression is made of."""
    if type(key) is tuple:
        if len(key) == 2 and key[0] == "#":
            yield key[1]
        else:
            for part in key:
                yield from operands(part)


class Values(TorchDispatchMode):
    """The table of expressions; as a mode, in front of the fake tensors' own, it numbers what every operation gives.

    Attributes:
        keys: by number, what the expression is.
        made: numbers that were given since it was emptied.
        places: by number, where in the module's own code it was made first. place: where the next operation stands.
    """

    def __init__(self) -> None:
        super().__init__()
        self.keys: list[Key] = []
        self.shapes: list[Shape] = []
        self.places: dict[int, str] = {}
        self.made: set[int] = set()
        self.place = ""
        self._numbers: dict[Key, int] = {}
        self._tensors: dict[int, tuple[Tensor, int]] = {}      # by id, which is not given anew while these are kept
        self._seen_by: dict[int, dict[int, Tensor]] = {}       # by storage, the tensors over it
        self._outlive: set[int] = set()                        # storages of atoms
        self.symbols: dict[str, str] = {}                      # by size in a run, what stands for it

    def number(self, key: Key | int, shape: Shape) -> int:
        """Of an expression; or what an operand is, which it is equal to."""
        if type(key) is int:
            return key
        found = self._numbers.get(key)
        if found is None:
            found = self._numbers[key] = len(self.keys)
            self.keys.append(key)
            self.shapes.append(shape)
        self.made.add(found)
        return found

    def atom(self, name: str, t: Tensor) -> Tensor:
        """A tensor that nothing makes: an input, a weight, a buffer."""
        self.put(t, self.number(("atom", name, str(t.dtype)), t.shape))
        self._outlive.add(t.untyped_storage()._cdata)
        return t

    def put(self, t: Tensor, number: int) -> None:
        self.made.add(number)
        self._tensors[id(t)] = t, number
        self._seen_by.setdefault(t.untyped_storage()._cdata, {})[id(t)] = t

    def of(self, t: Tensor) -> int:
        found = self._tensors.get(id(t))
        if found is None:
            raise Unfit(f"it uses a tensor {list(t.shape)} that is no input, weight or buffer of it")
        return found[1]

    def forget(self) -> None:
        """All tensors. Their graphs lead back here by way of C++, where Python's collector does not see a cycle."""
        self._tensors.clear()
        self._seen_by.clear()

    def told(self, number: int, depth: int = 2) -> str:
        """The expression in a few words."""
        def part_told(part: Any) -> str:
            if not isinstance(part, tuple):
                return self.symbols.get(str(part), str(part))
            if len(part) == 2 and part[0] == "#":
                return self.told(part[1], depth - 1) if depth else "…"
            if len(part) == 2 and part[0] == "float":
                return f"{float.fromhex(part[1]):g}"
            return "[" + ", ".join(map(part_told, part)) + "]"

        name, *rest = self.keys[number]
        return rest[0] if name == "atom" else f"{name}({', '.join(filter(None, map(part_told, rest)))})"

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            return self._write(func, args, kwargs)
        out = func(*args, **kwargs)
        if isinstance(out, Tensor):
            self._name(out, RULES.get(func.overloadpacket, Values._plain)(self, func, args, kwargs, out))
            return out
        parts = [t for t in tree_iter(out) if isinstance(t, Tensor)]
        if func.overloadpacket in (aten.split, aten.split_with_sizes, aten.unbind):
            keys = self._split(func, args, kwargs, parts)
        else:
            keys = (("part", i, self._plain(func, args, kwargs, t)) for i, t in enumerate(parts))
        for t, key in zip(parts, keys):
            self._name(t, key)
        return out

    def _name(self, out: Tensor, key: Key | int) -> int:
        number = self.number(key, out.shape)
        self.places.setdefault(number, self.place)
        self.put(out, number)
        return number

    def _operand(self, a: Any) -> Any:
        """An argument as a part of an expression."""
        if isinstance(a, Tensor):
            return "#", self.of(a)
        if isinstance(a, float):
            return "float", a.hex()
        if type(a) in (list, tuple):
            return tuple(self._operand(v) for v in a)
        return str(a)

    def _plain(self, func: Any, args: Any, kwargs: Any, out: Tensor) -> Key:
        """Operation, arguments as its schema names them, type and sizes of what it gives; not where it runs."""
        name = func._schema.name.removeprefix("aten::")
        name = name.removesuffix("_") if func._schema.is_mutable else name
        rest = tuple((k, self._operand(v)) for k, v in sorted(kwargs.items()) if isinstance(v, Tensor) or
                     k not in ("device", "layout", "pin_memory", "memory_format", "generator"))
        return name, *map(self._operand, args), rest, str(out.dtype), out.shape

    def _write(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A write in place is its function's expression, and the target's number from then on."""
        target, name = args[0], func._schema.name
        base = name.removeprefix("aten::").removesuffix("_")
        if not name.startswith("aten::") or not name.endswith("_") or "out" in kwargs or not isinstance(target, Tensor):
            raise Unfit(f"it runs {name}, which writes into its arguments")
        memory = target.untyped_storage()._cdata
        if memory in self._outlive:
            raise Unfit(f"it writes by {name} into an input, a weight or a buffer")
        beside, mine = list(self._seen_by[memory].values()), self.of(target)
        if not all(self.of(other) == mine and other.shape == target.shape for other in beside):
            return self._write_columns(func, args, kwargs, [t for t in beside if t is not target])
        if base == "copy":
            key: Key | int = self._copied(args[1], target)
        else:
            key = RULES.get(getattr(aten, base, None), Values._plain)(self, func, args, kwargs, target)
        out = func(*args, **kwargs)
        number = self._name(target, key)
        for other in (*beside, out):         # whoever has the same memory sees it
            self.put(other, number)
        return out

    def _write_columns(self, func: Any, args: Any, kwargs: Any, others: list[Tensor]) -> Any:
        """A copy into some columns of a tensor, of which other columns may have been looked at."""
        target = args[0]
        whole = next((t for t in others if _columns(target, t) and t.shape != target.shape), None)
        begin, end = _columns(target, whole) if whole is not None else (0, 0)
        places = [_columns(t, whole) for t in others] if whole is not None else []
        # They are all the whole, or columns of it that are none of the target's.
        apart = all(at is not None and (at == (0, whole.shape[-1]) or at[1] <= begin or end <= at[0]) for at in places)
        if func._schema.name != "aten::copy_" or whole is None or not apart:
            raise Unfit(f"it writes by {func._schema.name} into memory that other tensors share")
        number = self.number(self._copied(args[1], target), target.shape)
        renewed = self.number(self._with_columns(whole, (begin, end), number), whole.shape)
        out = func(*args, **kwargs)
        for t in (*(t for t in others if t.shape == whole.shape), target, out):
            self.put(t, number if t is target or t is out else renewed)
        return out

    def _copied(self, source: Tensor, target: Tensor) -> Key | int:
        if source.shape != target.shape:
            return "copy", self._operand(source), target.shape, str(target.dtype)
        return self._cast(None, (source,), {}, target)

    def _with_columns(self, whole: Tensor, at: tuple[int, int], source: int) -> Key:
        """A tensor with other columns in it: all of them, and it is what a cat makes of these."""
        number = self.of(whole)
        key = self.keys[number]
        base, parts = (key[1][1], key[2]) if key[0] == "columns" else (number, ())
        parts = sorted([*(part for part in parts if part[0] != at), (at, ("#", source))])
        if sum(end - begin for (begin, end), _ in parts) < whole.shape[-1]:
            return "columns", ("#", base), tuple(parts), whole.shape
        terms = [self._placed(n, whole.dim() - 1, begin, end, whole) for (begin, end), (_, n) in parts]
        return _joined("+", terms, whole)

    def _placed(self, number: int, dim: int, begin: Any, end: Any, out: Tensor) -> Any:
        """A term of a sum: a part of it in its place among zeros."""
        key = "slice_backward", ("#", number), dim, begin, end, 1, out.shape
        return "#", self.number(key, out.shape)

    # ---- the normal form: copies and views ----

    def _cast(self, func: Any, args: Any, kwargs: Any, out: Tensor) -> Key | int:
        number = self.of(args[0])
        return number if args[0].dtype == out.dtype else ("cast", ("#", number), str(out.dtype))

    def _viewed(self, number: int, shape: Shape) -> Key | int:
        kind, *rest = self.keys[number]
        if kind == "view":
            number = rest[0][1]
        elif kind == "+" and all(t[0] == "#" and self.shapes[t[1]] == self.shapes[number] for t in rest[0]):
            numbers = [self.number(self._viewed(t[1], shape), shape) for t in rest[0]]
            return "+", tuple(sorted((("#", n) for n in numbers), key=repr)), rest[1], shape
        return number if self.shapes[number] == shape else ("view", ("#", number), shape)

    def _view(self, func: Any, args: Any, kwargs: Any, out: Tensor) -> Key | int:
        if args[0].dtype != out.dtype:                       # the same bits, read as another type
            return self._plain(func, args, kwargs, out)
        return self._viewed(self.of(args[0]), out.shape)

    def _permute(self, func: Any, args: Any, kwargs: Any, out: Tensor) -> Key | int:
        number, order = self.of(args[0]), [d % args[0].dim() for d in args[1]]
        if self.keys[number][0] == "permute":
            _, (_, number), before = self.keys[number]
            order = [before[i] for i in order]
        return number if order == sorted(order) else ("permute", ("#", number), tuple(order))

    def _transpose(self, func: Any, args: Any, kwargs: Any, out: Tensor) -> Key | int:
        order = list(range(args[0].dim()))
        if len(order) > 1:
            a, b = args[1:3] if len(args) > 2 else (0, 1)
            order[a], order[b] = order[b], order[a]
        return self._permute(func, (args[0], order), kwargs, out)

    def _expand(self, func: Any, args: Any, kwargs: Any, out: Tensor) -> Key | int:
        number = self.of(args[0])
        return number if self.shapes[number] == out.shape else ("expand", ("#", number), out.shape)

    # ---- slices ----

    def _slice_of(self, t: Tensor, dim: int, start: Any, end: Any, step: Any) -> Key | int:
        dim, number = dim % t.dim(), self.of(t)
        start, end, step = slice(start, end, step).indices(t.shape[dim])
        if (start, end, step) == (0, t.shape[dim], 1):
            return number
        kind, *rest = self.keys[number]
        if kind == "columns" and dim == t.dim() - 1 and step == 1:
            (_, base), parts, _ = rest
            for at, (_, source) in parts:
                if at == (start, end):       # these were written together
                    return source
            number = base if all(end <= at[0] or at[1] <= start for at, _ in parts) else number
        kind, *rest = self.keys[number]
        if kind == "slice" and step == 1:
            (_, inner), d, begin, _, by = rest
            if d == dim and by == 1:
                number, start, end = inner, start + begin, end + begin
        return "slice", ("#", number), dim, start, end, step

    def _strided(self, func: Any, args: Any, kwargs: Any, out: Tensor) -> Key | int:
        """autograd's way to say which columns were written."""
        at = _columns(out, args[0])
        return self._plain(func, args, kwargs, out) if at is None else self._slice_of(args[0], out.dim() - 1, *at, 1)

    def _slice_backward(self, func: Any, args: Any, kwargs: Any, out: Tensor) -> Key | int:
        grad, _, dim, start, end, step = args
        if grad.shape == out.shape and step == 1:
            return self.of(grad)
        if grad.shape[dim] == 0:
            return "nothing", out.shape
        at = slice(start, end, step).indices(out.shape[dim])
        return "slice_backward", ("#", self.of(grad)), dim % out.dim(), *at, out.shape

    def _select(self, func: Any, args: Any, kwargs: Any, out: Tensor) -> Key | int:
        t, dim, index = args
        shape = list(t.shape)
        index, shape[dim] = index % shape[dim], 1
        return self._viewed(self.number(self._slice_of(t, dim, index, index + 1, 1), tuple(shape)), out.shape)

    def _split(self, func: Any, args: Any, kwargs: Any, parts: list[Tensor]) -> Iterator[Key | int]:
        at = 1 if func.overloadpacket is aten.unbind else 2
        dim, begin = args[at] if len(args) > at else kwargs.get("dim", 0), 0
        for i, part in enumerate(parts):
            if at == 1:
                yield self._select(None, (args[0], dim, i), {}, part)
                continue
            yield self._slice_of(args[0], dim, begin, begin + part.shape[dim], 1)
            begin += part.shape[dim]

    # ---- sums and products ----

    def _cat(self, func: Any, args: Any, kwargs: Any, out: Tensor) -> Key | int:
        """A sum of parts, each in its place among zeros: what autograd makes of slices, where a split has a cat."""
        dim, begin, terms = (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % out.dim(), 0, []
        for t in args[0]:
            end = begin + t.shape[dim]
            if begin != end:
                if t.shape == out.shape:
                    return self.of(t)
                terms.append(self._placed(self.of(t), dim, begin, end, out))
            begin = end
        return _joined("+", terms, out)

    def _flat(self, kind: str, a: Any) -> list[Any]:
        """The terms of a sum, or the factors of a product, that an argument is."""
        if not isinstance(a, Tensor):
            return [_constant(a)]
        number = self.of(a)
        key = self.keys[number]
        if kind == "+" and key[0] == "nothing":
            return []
        return list(key[1]) if key[0] == kind else [("#", number)]

    def _product(self, func: Any, args: Any, kwargs: Any, out: Tensor) -> Key | int:
        a, b = args
        if isinstance(a, Tensor) and not isinstance(b, Tensor) and b == 1 and a.dtype == out.dtype:
            return self.of(a)
        return _joined("*", self._flat("*", a) + self._flat("*", b), out)

    def _sum(self, a: Any, b: Any, factor: Any, out: Tensor) -> Key:
        """a + factor * b."""
        if factor == 1:
            terms = self._flat("+", b)
        elif not isinstance(b, Tensor):
            terms = [_constant(b * factor)]
        else:
            terms = [("#", self.number(_joined("*", [*self._flat("*", b), _constant(factor)], b), b.shape))]
        return _joined("+", self._flat("+", a) + terms, out)

    def _added(self, func: Any, args: Any, kwargs: Any, out: Tensor) -> Key:
        alpha = args[2] if len(args) > 2 else kwargs.get("alpha", 1)
        if func.overloadpacket in (aten.rsub,):
            return self._sum(args[1], args[0], -alpha, out)
        return self._sum(args[0], args[1], -alpha if func.overloadpacket in (aten.sub, aten.sub_) else alpha, out)

    def _quotient(self, func: Any, args: Any, kwargs: Any, out: Tensor) -> Key:
        a, b = args
        if len(args) == 2 and not kwargs and not isinstance(b, Tensor) and b != 0:
            return _joined("*", [*self._flat("*", a), _constant(1.0 / b)], out)
        return self._plain(func, args, kwargs, out)

    def _softmax(self, func: Any, args: Any, kwargs: Any, out: Tensor) -> Key:
        """The dimension counted from the front."""
        at = 1 if func.overloadpacket is aten._softmax else 2
        return self._plain(func, (*args[:at], args[at] % out.dim(), *args[at + 1:]), kwargs, out)


def _columns(t: Tensor, whole: Tensor) -> tuple[int, int] | None:
    """Which of its last numbers another tensor is, over the same memory; None: it is something else."""
    begin = t.storage_offset() - whole.storage_offset()
    like = t.dim() == whole.dim() > 0 and t.shape[:-1] == whole.shape[:-1] \
        and t.stride() == whole.stride() and whole.stride(-1) == 1
    return (begin, begin + t.shape[-1]) if like and 0 <= begin <= whole.shape[-1] - t.shape[-1] else None


def _constant(value: Any) -> tuple[str, str]:
    """Numbers that are equal are one constant, whole ones too."""
    return "float", float(value).hex()


def _joined(kind: str, parts: list[Any], out: Tensor) -> Key:
    unit = ("float", (1.0 if kind == "*" else 0.0).hex())
    parts = [p for p in parts if p != unit] or [unit]
    return kind, tuple(sorted(parts, key=repr)), str(out.dtype), out.shape


_V = Values
RULES: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys((aten.alias, aten.detach, aten.clone, aten.contiguous, aten.lift_fresh, aten.lift_fresh_copy),
                    lambda v, func, args, kwargs, out: v.of(args[0])),
    **dict.fromkeys((aten._to_copy, aten.to), _V._cast),
    **dict.fromkeys((aten.view, aten._unsafe_view, aten.reshape, aten._reshape_alias, aten.squeeze, aten.unsqueeze,
                     aten.flatten), _V._view),
    aten.permute: _V._permute, aten.t: _V._transpose, aten.transpose: _V._transpose, aten.expand: _V._expand,
    aten.slice: lambda v, func, args, kwargs, out: v._slice_of(*args, *(0, None, None, 1)[len(args) - 1:]),
    aten.slice_backward: _V._slice_backward, aten.as_strided: _V._strided,
    aten.select: _V._select, aten.mul: _V._product, aten.div: _V._quotient,
    aten.neg: lambda v, func, args, kwargs, out: _joined("*", [*v._flat("*", args[0]), _constant(-1.0)], out),
    aten.cat: _V._cat, aten._softmax: _V._softmax, aten._softmax_backward_data: _V._softmax,
    aten.add: _V._added, aten.sub: _V._added, aten.rsub: _V._added,
}


# ---- opaque functions ------------------------------------------------------------------------------

class Opaque(torch.autograd.Function):
    """One expression, and one for the gradient of each of its tensors."""

    @staticmethod
    def forward(ctx: Any, values: Values, name: Key, shape: Any, like: Tensor, *tensors: Tensor | None) -> Tensor:
        ctx.values, ctx.name = values, name
        ctx.save_for_backward(*tensors)
        out = like.new_empty(shape)
        key = (*name, *(None if t is None else ("#", values.of(t)) for t in tensors), str(out.dtype), out.shape)
        values.put(out, values.number(key, out.shape))
        return out

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        values, tensors = ctx.values, ctx.saved_tensors
        inputs = (("#", values.of(dy)), *(None if t is None else ("#", values.of(t)) for t in tensors))
        grads: list[Tensor | None] = []
        for i, (t, wanted) in enumerate(zip(tensors, ctx.needs_input_grad[4:])):
            grads.append(None)
            if wanted:
                grads[i] = torch.empty_like(t)
                values.put(grads[i], values.number((f"d{i}", *ctx.name, *inputs), t.shape))
        return None, None, None, None, *grads


def opaque(values: Values, name: Key, shape: Any, like: Tensor, *tensors: Tensor | None) -> Tensor:
    return Opaque.apply(values, name, tuple(shape), like, *tensors)


def linear(values: Values, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """F.linear."""
    if weight.dim() != 2 or any(t.dtype != input.dtype for t in (weight, bias) if t is not None):
        return F.linear(input, weight, bias)
    return opaque(values, ("linear",), (*input.shape[:-1], weight.shape[0]), input, input, weight, bias)


def attention(values: Values, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
              dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False
              ) -> Tensor:
    """F.scaled_dot_product_attention."""
    if enable_gqa and query.dim() == 4:
        key, value = (repeated(t, query.shape[1] // t.shape[1]) for t in (key, value))
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    name = "attention", float(scale).hex(), bool(is_causal), float(dropout_p)
    return opaque(values, name, (*query.shape[:-1], value.shape[-1]), query, query, key, value, attn_mask)


def repeated(t: Tensor, times: int) -> Tensor:
    """Heads [B, h, S, D] of keys or values, as many as there are queries'."""
    if times == 1:
        return t
    b, h, s, d = t.shape
    return t[:, :, None].expand(b, h, times, s, d).reshape(b, h * times, s, d)
