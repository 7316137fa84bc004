"""What a computation gives, as numbers: equal expressions have equal numbers.

A module's own forward, and its backward, run on fake tensors of symbolic sizes. Every tensor that an operation gives
has the number of its expression: the operation, the numbers of what it reads, its constants to the bit, its sizes. Two
computations that give equal numbers are the same computation, for every input and every size; no graph is matched.

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
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

aten = torch.ops.aten
_ALL = 1 << 62                   # slices that end here or beyond end with their dimension


class Refused(Exception):
    """A computation that cannot be proved; the text says what is to blame."""


class Values:
    """The table of expressions.

    Attributes:
        keys: by number, what the expression is: (operation, ...), operands as ("#", number).
        places: by number, where in the module's own code it was made first. made: numbers that were given since it
            was emptied.
    """

    def __init__(self) -> None:
        self.keys: list[tuple[Any, ...]] = []
        self.shapes: list[tuple[str, ...]] = []
        self.places: dict[int, str] = {}
        self.made: set[int] = set()
        self._numbers: dict[tuple[Any, ...], int] = {}
        self._tensors: dict[int, tuple[Tensor, int]] = {}      # by id, which is not given anew while these are kept
        self._seen_by: dict[int, dict[int, Tensor]] = {}       # by storage, the tensors over it
        self._outlive: set[int] = set()                        # storages of atoms

    def number(self, key: tuple[Any, ...], shape: tuple[str, ...]) -> int:
        found = self._numbers.get(key)
        if found is None:
            found = self._numbers[key] = len(self.keys)
            self.keys.append(key)
            self.shapes.append(shape)
        self.made.add(found)
        return found

    def atom(self, name: str, t: Tensor) -> Tensor:
        """A tensor that nothing makes: an input, a weight, a buffer."""
        self.put(t, self.number(("atom", name, str(t.dtype)), _shape(t)))
        self._outlive.add(t.untyped_storage()._cdata)
        return t

    def put(self, t: Tensor, number: int) -> None:
        self.made.add(number)
        self._tensors[id(t)] = t, number
        self._seen_by.setdefault(t.untyped_storage()._cdata, {})[id(t)] = t

    def of(self, t: Tensor) -> int:
        found = self._tensors.get(id(t))
        if found is None:
            raise Refused(f"it uses a tensor {list(t.shape)} that is no input, weight or buffer of it")
        return found[1]

    def forget(self) -> None:
        """All tensors. Their graphs lead back here by way of C++, where Python's collector does not see a cycle."""
        self._tensors.clear()
        self._seen_by.clear()

    def outlives(self, t: Tensor) -> bool:
        """Is it memory of an input, a weight or a buffer?"""
        return t.untyped_storage()._cdata in self._outlive

    def alone(self, t: Tensor) -> bool:
        """Does nobody else look at its memory, but as what it is itself?"""
        mine = self.of(t)
        return all(self.of(other) == mine and other.shape == t.shape
                   for other in self._seen_by[t.untyped_storage()._cdata].values())

    def written(self, t: Tensor, number: int) -> None:
        """A write in place: whoever has the same memory sees it."""
        for other in self.beside(t):
            self._tensors[id(other)] = other, number

    def beside(self, t: Tensor) -> list[Tensor]:
        """All tensors over the same memory."""
        return list(self._seen_by[t.untyped_storage()._cdata].values())

    def told(self, number: int, depth: int = 2) -> str:
        """The expression in a few words."""
        name, *rest = self.keys[number]
        if name == "atom":
            return rest[0]
        parts = [self._told(part, depth) for part in rest]
        return f"{name}({', '.join(p for p in parts if p)})"

    def _told(self, part: Any, depth: int) -> str:
        if type(part) is tuple and len(part) == 2 and part[0] == "#":
            return self.told(part[1], depth - 1) if depth else "…"
        if type(part) is tuple and len(part) == 2 and part[0] == "float":
            return f"{float.fromhex(part[1]):g}"
        if type(part) is tuple:
            return "[" + ", ".join(self._told(p, depth) for p in part) + "]"
        return str(part)


def _shape(t: Tensor) -> tuple[str, ...]:
    return tuple(map(str, t.shape))


def operands(key: Any) -> Iterator[int]:
    """The numbers that an expression is made of."""
    if type(key) is tuple:
        if len(key) == 2 and key[0] == "#":
            yield key[1]
        else:
            for part in key:
                yield from operands(part)


# ---- operations ------------------------------------------------------------------------------------

class Recorder(TorchDispatchMode):
    """Numbers what every operation gives. Stands in front of the fake tensors' own mode."""

    def __init__(self, values: Values) -> None:
        super().__init__()
        self.values, self.place = values, ""             # where the operation stands in the module's code

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            return self._write(func, args, kwargs)
        out = func(*args, **kwargs)
        rule = RULES.get(func.overloadpacket)
        if isinstance(out, Tensor):
            self._name(out, (rule or _plain)(self.values, func, args, kwargs, out))
        else:
            self._name_each(func, args, kwargs, out)
        return out

    def _name(self, out: Tensor, key: Any) -> None:
        """key: an expression, or the number of an operand that it is equal to."""
        number = key if type(key) is int else self.values.number(key, _shape(out))
        self.values.places.setdefault(number, self.place)
        self.values.put(out, number)

    def _name_each(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        cut = CUTS.get(func.overloadpacket)
        parts = [t for t in tree_iter(out) if isinstance(t, Tensor)]
        if cut is not None:
            for t, key in zip(parts, cut(self.values, args, kwargs, parts)):
                self._name(t, key)
            return
        for i, t in enumerate(parts):
            self._name(t, ("part", i, _plain(self.values, func, args, kwargs, t)))

    def _write(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A write in place is its function's expression, and the target's number from then on."""
        target, name = args[0], func._schema.name
        base = name.removeprefix("aten::").removesuffix("_")
        if not name.startswith("aten::") or not name.endswith("_") or "out" in kwargs or not isinstance(target, Tensor):
            raise Refused(f"it runs {name}, which writes into its arguments")
        if self.values.outlives(target):
            raise Refused(f"it writes by {name} into an input, a weight or a buffer")
        if not self.values.alone(target):
            return self._write_columns(func, args, kwargs)
        rule = RULES.get(getattr(aten, base, None))
        if base == "copy":
            key: Any = _copied(self.values, args[1], target)
        elif rule is not None:
            key = rule(self.values, func, args, kwargs, target)
        else:
            key = _plain(self.values, func, args, kwargs, target, base)
        out = func(*args, **kwargs)
        number = key if type(key) is int else self.values.number(key, _shape(target))
        self.values.places.setdefault(number, self.place)
        self.values.written(target, number)
        if out is not target:
            self.values.put(out, number)
        return out

    def _write_columns(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A copy into some columns of a tensor, of which other columns may have been looked at."""
        target, values = args[0], self.values
        others = [t for t in values.beside(target) if t is not target]
        whole = next((t for t in others if _columns(target, t) and t.shape != target.shape), None)
        if func._schema.name != "aten::copy_" or whole is None or not _apart(target, whole, others):
            raise Refused(f"it writes by {func._schema.name} into memory that other tensors share")
        number = _numbered(values, _copied(values, args[1], target), target)
        renewed = _numbered(values, _with_columns(values, whole, _columns(target, whole), number), whole)
        out = func(*args, **kwargs)
        for t in (*(t for t in others if t.shape == whole.shape), target, out):
            values.put(t, number if t is target or t is out else renewed)
        return out


def _apart(target: Tensor, whole: Tensor, others: list[Tensor]) -> bool:
    """Are they all the whole, or columns of it that are none of the target's?"""
    begin, end = _columns(target, whole)
    places = [_columns(t, whole) for t in others]
    return all(at is not None and (at == (0, whole.shape[-1]) or at[1] <= begin or end <= at[0]) for at in places)


def _columns(t: Tensor, whole: Tensor) -> tuple[int, int] | None:
    """Which of its last numbers another tensor is, over the same memory; None: it is something else."""
    begin = t.storage_offset() - whole.storage_offset()
    like = t.dim() == whole.dim() > 0 and _shape(t)[:-1] == _shape(whole)[:-1] \
        and tuple(map(str, t.stride())) == tuple(map(str, whole.stride())) and str(whole.stride(-1)) == "1"
    if not like or any(type(n) is not int for n in (begin, t.shape[-1], whole.shape[-1])):
        return None
    return (begin, begin + t.shape[-1]) if 0 <= begin <= whole.shape[-1] - t.shape[-1] else None


def _copied(values: Values, source: Tensor, target: Tensor) -> Any:
    if _shape(source) != _shape(target):
        return "copy", _operand(values, source), _shape(target), str(target.dtype)
    return _cast(values, None, (source,), {}, target)


def _numbered(values: Values, key: Any, t: Tensor) -> int:
    return key if type(key) is int else values.number(key, _shape(t))


def _with_columns(values: Values, whole: Tensor, at: tuple[int, int], source: int) -> Any:
    """A tensor with other columns in it: all of them, and it is what a cat makes of these."""
    number = values.of(whole)
    key = values.keys[number]
    base, parts = (key[1][1], key[2]) if key[0] == "columns" else (number, ())
    parts = sorted([*(part for part in parts if part[0] != at), (at, ("#", source))])
    if sum(end - begin for (begin, end), _ in parts) < whole.shape[-1]:
        return "columns", ("#", base), tuple(parts), _shape(whole)
    terms = [_placed(values, n, whole.dim() - 1, begin, end, whole) for (begin, end), (_, n) in parts]
    return _joined("+", terms, whole)


def _placed(values: Values, number: int, dim: int, begin: Any, end: Any, out: Tensor) -> Any:
    """A term of a sum: a part of it in its place among zeros."""
    key = "slice_backward", ("#", number), dim, str(begin), str(end), "1", _shape(out)
    return "#", values.number(key, _shape(out))


def _operand(values: Values, a: Any) -> Any:
    """An argument as a part of an expression."""
    if isinstance(a, Tensor):
        return "#", values.of(a)
    if isinstance(a, float):
        return "float", a.hex()
    if type(a) in (list, tuple):
        return tuple(_operand(values, v) for v in a)
    return str(a)


def _plain(values: Values, func: Any, args: Any, kwargs: Any, out: Tensor, name: str = "") -> tuple[Any, ...]:
    """Operation, arguments as its schema names them, type and sizes of what it gives. Where it runs says nothing."""
    name = name or func._schema.name.removeprefix("aten::")
    name = name.removesuffix("_") if func._schema.is_mutable else name
    rest = tuple((k, _operand(values, v)) for k, v in sorted(kwargs.items())
                 if k not in ("device", "layout", "pin_memory", "memory_format", "generator") or isinstance(v, Tensor))
    return name, *(_operand(values, a) for a in args), rest, str(out.dtype), _shape(out)


# ---- the normal form -------------------------------------------------------------------------------

def _same(values: Values, func: Any, args: Any, kwargs: Any, out: Tensor) -> int:
    return values.of(args[0])


def _cast(values: Values, func: Any, args: Any, kwargs: Any, out: Tensor) -> Any:
    source = args[0]
    if source.dtype == out.dtype:
        return values.of(source)
    return "cast", ("#", values.of(source)), str(out.dtype)


def _viewed(values: Values, number: int, shape: tuple[str, ...]) -> Any:
    kind, *rest = values.keys[number]
    if kind == "view":
        number = rest[0][1]
    elif kind == "+" and all(t[0] == "#" and values.shapes[t[1]] == values.shapes[number] for t in rest[0]):
        parts = [_viewed(values, t[1], shape) for t in rest[0]]
        numbers = [p if type(p) is int else values.number(p, shape) for p in parts]
        return "+", tuple(sorted((("#", n) for n in numbers), key=repr)), rest[1], shape
    return number if values.shapes[number] == shape else ("view", ("#", number), shape)


def _view(values: Values, func: Any, args: Any, kwargs: Any, out: Tensor) -> Any:
    if args[0].dtype != out.dtype:                       # the same bits, read as another type
        return _plain(values, func, args, kwargs, out)
    return _viewed(values, values.of(args[0]), _shape(out))


def _permuted(values: Values, t: Tensor, order: list[int]) -> Any:
    number = values.of(t)
    if values.keys[number][0] == "permute":
        _, (_, number), before = values.keys[number]
        order = [before[i] for i in order]
    return number if order == sorted(order) else ("permute", ("#", number), tuple(order))


def _permute(values: Values, func: Any, args: Any, kwargs: Any, out: Tensor) -> Any:
    n = args[0].dim()
    return _permuted(values, args[0], [d % n for d in args[1]])


def _transpose(values: Values, func: Any, args: Any, kwargs: Any, out: Tensor) -> Any:
    n = args[0].dim()
    if n < 2:
        return values.of(args[0])
    a, b = (d % n for d in (args[1:3] if len(args) > 2 else (0, 1)))
    order = list(range(n))
    order[a], order[b] = order[b], order[a]
    return _permuted(values, args[0], order)


def _expand(values: Values, func: Any, args: Any, kwargs: Any, out: Tensor) -> Any:
    number = values.of(args[0])
    return number if values.shapes[number] == _shape(out) else ("expand", ("#", number), _shape(out))


def _slice_of(values: Values, t: Tensor, dim: int, start: Any, end: Any, step: Any) -> Any:
    """start, end: None, numbers or symbols; ends beyond the dimension, and those from the back, are made plain."""
    dim, size = dim % t.dim(), t.shape[dim]
    start = 0 if start is None else start
    end = size if end is None or (type(end) is int and end >= _ALL) else end
    if type(size) is int:
        start, end = (min(max(v + size if v < 0 else v, 0), size) if type(v) is int else v for v in (start, end))
    if str(start) == "0" and str(end) == str(size) and step == 1:
        return values.of(t)
    number = values.of(t)
    if values.keys[number][0] == "columns" and dim == t.dim() - 1 and step == 1:
        found, number = _of_columns(values.keys[number], number, start, end)
        if found:
            return number
    if values.keys[number][0] == "slice" and step == 1 and type(start) is int and type(end) is int:
        _, inner, d, begin, _, by = values.keys[number]
        if d == dim and by == "1" and begin.isdigit():
            number, start, end = inner[1], start + int(begin), end + int(begin)
    return "slice", ("#", number), dim, str(start), str(end), str(step)


def _of_columns(key: tuple[Any, ...], number: int, start: Any, end: Any) -> tuple[bool, int]:
    """Whether these columns are a tensor that was written there, and which; else of which tensor they are."""
    _, (_, base), parts, _ = key
    if type(start) is not int or type(end) is not int:
        return False, number
    for at, (_, source) in parts:
        if at == (start, end):
            return True, source
    return False, base if all(end <= at[0] or at[1] <= start for at, _ in parts) else number


def _strided(values: Values, func: Any, args: Any, kwargs: Any, out: Tensor) -> Any:
    """autograd's way to say which columns were written."""
    at = _columns(out, args[0])
    if at is None:
        return _plain(values, func, args, kwargs, out)
    return _slice_of(values, args[0], out.dim() - 1, *at, 1)


def _slice(values: Values, func: Any, args: Any, kwargs: Any, out: Tensor) -> Any:
    t, dim, start, end, step = (*args, *(0, None, None, 1)[len(args) - 1:])
    return _slice_of(values, t, dim, start, end, step)


def _slice_backward(values: Values, func: Any, args: Any, kwargs: Any, out: Tensor) -> Any:
    grad, _, dim, start, end, step = args
    if _shape(grad) == _shape(out) and step == 1:
        return values.of(grad)
    size = out.shape[dim]
    if str(grad.shape[dim]) == "0":
        return "nothing", _shape(out)
    end = size if type(end) is int and (end >= _ALL or (type(size) is int and end > size)) else end
    return "slice_backward", ("#", values.of(grad)), dim % out.dim(), str(start), str(end), str(step), _shape(out)


def _select(values: Values, func: Any, args: Any, kwargs: Any, out: Tensor) -> Any:
    t, dim, index = args
    n = t.shape[dim]
    index = index + n if type(index) is int and type(n) is int and index < 0 else index
    key = _slice_of(values, t, dim, index, index + 1, 1)
    if type(key) is tuple:
        shape = list(_shape(t))
        shape[dim % t.dim()] = "1"
        key = values.number(key, tuple(shape))
    return _viewed(values, key, _shape(out))


def _split(values: Values, args: Any, kwargs: Any, parts: list[Tensor]) -> Iterator[Any]:
    t, dim = args[0], (args[2] if len(args) > 2 else kwargs.get("dim", 0))
    begin: Any = 0
    for part in parts:
        end = begin + part.shape[dim]
        yield _slice_of(values, t, dim, begin, end, 1)
        begin = end


def _unbind(values: Values, args: Any, kwargs: Any, parts: list[Tensor]) -> Iterator[Any]:
    dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
    for i, part in enumerate(parts):
        yield _select(values, None, (args[0], dim, i), {}, part)


def _cat(values: Values, func: Any, args: Any, kwargs: Any, out: Tensor) -> Any:
    """The sum of its parts, each in its place among zeros: what autograd makes of slices, where a split has a cat."""
    tensors, dim = args[0], (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % out.dim()
    begin: Any = 0
    terms: list[Any] = []
    for t in tensors:
        end = begin + t.shape[dim]
        if str(begin) != str(end):
            if _shape(t) == _shape(out):
                return values.of(t)
            terms.append(_placed(values, values.of(t), dim, begin, end, out))
        begin = end
    return _joined("+", terms, out)


def _constant(value: Any) -> tuple[str, str]:
    """Numbers that are equal are one constant, whole ones too."""
    if isinstance(value, torch.SymInt | torch.SymFloat):
        return "symbol", str(value)
    return "float", float(value).hex()


def _flat(values: Values, kind: str, a: Any) -> list[Any]:
    """The terms of a sum, or the factors of a product, that an argument is."""
    if not isinstance(a, Tensor):
        return [_constant(a)]
    number = values.of(a)
    key = values.keys[number]
    if kind == "+" and key[0] == "nothing":
        return []
    return list(key[1]) if key[0] == kind else [("#", number)]


def _joined(kind: str, parts: list[Any], out: Tensor) -> Any:
    unit = ("float", (1.0 if kind == "*" else 0.0).hex())
    parts = [p for p in parts if p != unit] or [unit]
    return kind, tuple(sorted(parts, key=repr)), str(out.dtype), _shape(out)


def _product(values: Values, func: Any, args: Any, kwargs: Any, out: Tensor) -> Any:
    a, b = args
    if isinstance(a, Tensor) and not isinstance(b, Tensor) and b == 1 and a.dtype == out.dtype:
        return values.of(a)
    return _joined("*", _flat(values, "*", a) + _flat(values, "*", b), out)


def _times(values: Values, a: Any, factor: Any, out: Tensor) -> Any:
    """A term of a sum: factor * a."""
    if factor == 1:
        return _flat(values, "+", a)
    if not isinstance(a, Tensor):
        return [_constant(a * factor)]
    key = _joined("*", [*_flat(values, "*", a), _constant(factor)], a)
    return [("#", values.number(key, _shape(a)))]


def _sum_of(sign: int) -> Callable[..., Any]:
    def rule(values: Values, func: Any, args: Any, kwargs: Any, out: Tensor) -> Any:
        a, b = args[:2]
        alpha = args[2] if len(args) > 2 else kwargs.get("alpha", 1)
        return _joined("+", _flat(values, "+", a) + _times(values, b, sign * alpha, out), out)
    return rule


def _rsub(values: Values, func: Any, args: Any, kwargs: Any, out: Tensor) -> Any:
    alpha = args[2] if len(args) > 2 else kwargs.get("alpha", 1)
    return _joined("+", _flat(values, "+", args[1]) + _times(values, args[0], -alpha, out), out)


def _negated(values: Values, func: Any, args: Any, kwargs: Any, out: Tensor) -> Any:
    return _joined("*", [*_flat(values, "*", args[0]), _constant(-1.0)], out)


def _quotient(values: Values, func: Any, args: Any, kwargs: Any, out: Tensor) -> Any:
    a, b = args
    if len(args) == 2 and not kwargs and not isinstance(b, Tensor | torch.SymInt | torch.SymFloat) and b != 0:
        return _joined("*", [*_flat(values, "*", a), _constant(1.0 / b)], out)
    return _plain(values, func, args, kwargs, out)


def _softmax(values: Values, func: Any, args: Any, kwargs: Any, out: Tensor) -> Any:
    """The dimension counted from the front."""
    at = 1 if func.overloadpacket is aten._softmax else 2
    return _plain(values, func, (*args[:at], args[at] % out.dim(), *args[at + 1:]), kwargs, out)


RULES: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys((aten.alias, aten.detach, aten.clone, aten.contiguous, aten.lift_fresh, aten.lift_fresh_copy),
                    _same),
    **dict.fromkeys((aten._to_copy, aten.to), _cast),
    **dict.fromkeys((aten.view, aten._unsafe_view, aten.reshape, aten._reshape_alias, aten.squeeze, aten.unsqueeze,
                     aten.flatten), _view),
    aten.permute: _permute, aten.t: _transpose, aten.transpose: _transpose, aten.expand: _expand,
    aten.slice: _slice, aten.slice_backward: _slice_backward, aten.as_strided: _strided,
    aten.select: _select, aten.mul: _product, aten.neg: _negated, aten.div: _quotient,
    aten.cat: _cat, aten._softmax: _softmax, aten._softmax_backward_data: _softmax,
    aten.add: _sum_of(1), aten.sub: _sum_of(-1), aten.rsub: _rsub,
}
CUTS: dict[Any, Callable[..., Any]] = {aten.split: _split, aten.split_with_sizes: _split, aten.unbind: _unbind}


# ---- opaque functions ------------------------------------------------------------------------------

class Opaque(torch.autograd.Function):
    """One expression, and one for the gradient of each of its tensors."""

    @staticmethod
    def forward(ctx: Any, values: Values, name: tuple[Any, ...], shape: Any, like: Tensor, *tensors: Tensor | None
                ) -> Tensor:
        ctx.values, ctx.name, ctx.count = values, name, len(tensors)
        ctx.save_for_backward(*[t for t in tensors if t is not None])
        ctx.there = [t is not None for t in tensors]
        out = like.new_empty(shape)
        key = (*name, *(None if t is None else ("#", values.of(t)) for t in tensors), str(out.dtype), _shape(out))
        values.put(out, values.number(key, _shape(out)))
        return out

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        values, saved = ctx.values, iter(ctx.saved_tensors)
        tensors = [next(saved) if there else None for there in ctx.there]
        inputs = (("#", values.of(dy)), *(None if t is None else ("#", values.of(t)) for t in tensors))
        grads: list[Tensor | None] = []
        for i, (t, wanted) in enumerate(zip(tensors, ctx.needs_input_grad[4:])):
            grads.append(None)
            if wanted:
                grads[i] = torch.empty_like(t)
                values.put(grads[i], values.number((f"d{i}", *ctx.name, *inputs), _shape(t)))
        return None, None, None, None, *grads


def opaque(values: Values, name: tuple[Any, ...], shape: Any, like: Tensor, *tensors: Tensor | None) -> Tensor:
    return Opaque.apply(values, name, tuple(shape), like, *tensors)


class Functions(TorchFunctionMode):
    """Makes opaque what is opaque."""

    def __init__(self, values: Values) -> None:
        super().__init__()
        self.values = values

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.linear:
            return self._linear(*args, **kwargs)
        if func in _PRODUCTS and len(args) == 2 and args[0].dim() == args[1].dim() > 2:
            return self._product(*args)
        if func is F.scaled_dot_product_attention:
            return self._attention(*args, **kwargs)
        return func(*args, **kwargs)

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if weight.dim() != 2 or any(t.dtype != input.dtype for t in (weight, bias) if t is not None):
            return F.linear(input, weight, bias)
        shape = (*input.shape[:-1], weight.shape[0])
        return opaque(self.values, ("linear",), shape, input, input, weight, bias)

    def _product(self, a: Tensor, b: Tensor) -> Tensor:
        """Of matrices in equal batches; torch.matmul would ask for sizes as numbers."""
        if _shape(a)[:-2] != _shape(b)[:-2] or a.dtype != b.dtype:
            return torch.matmul(a, b)
        return opaque(self.values, ("matmul",), (*a.shape[:-1], b.shape[-1]), a, a, b)

    def _attention(self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
                   dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None,
                   enable_gqa: bool = False) -> Tensor:
        if enable_gqa and query.dim() == 4:
            key, value = (repeated(t, query.shape[1] // t.shape[1]) for t in (key, value))
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        name = "attention", float(scale).hex(), bool(is_causal), float(dropout_p)
        return opaque(self.values, name, (*query.shape[:-1], value.shape[-1]), query, query, key, value, attn_mask)


def repeated(t: Tensor, times: int) -> Tensor:
    """Heads [B, h, S, D] of keys or values, as many as there are queries'."""
    if times == 1:
        return t
    b, h, s, d = t.shape
    return t[:, :, None].expand(b, h, times, s, d).reshape(b, h * times, s, d)


_T = Tensor
_PRODUCTS = {torch.matmul, _T.matmul, _T.__matmul__}

__all__ = ["Functions", "Recorder", "Refused", "Values", "opaque", "operands", "repeated"]
