"""What a computation gives, as numbers: equal expressions have equal numbers.

A module's own forward runs on fake tensors, whose sizes are primes (prove.py). Every tensor that an operation gives has
the number of its expression: the operation, the numbers of what it reads, its constants to the bit, its sizes, and what
of it no gradient goes through. Two computations that give equal numbers are the same computation, for every input and
every size; no graph is matched. Their gradients are the same too: autograd makes them of these operations alone.

Expressions have a normal form, which is small: copies, detached and contiguous tensors are what they are copies of;
chains of views are one view, of permutations one; sums and products have no order, since rounding is no part of the
claim; a tensor that was written in place has a new number, and one of which columns were written is what it was with
these columns in it.

A tensor that has a gradient has two numbers: that of its expression, and that of the same without a gradient anywhere,
which is what a detached tensor, an index, and all that is computed under no_grad() has or is made of.

Some functions are opaque: F.linear, F.scaled_dot_product_attention, and products of experts. They are one expression
each, so that nothing depends on which kernel a machine has.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from ..templates.parts import Unfit

aten = torch.ops.aten
_CUT_OFF = frozenset((aten.detach, aten.empty_like, aten.zeros_like, aten.ones_like, aten.full_like, aten.new_empty,
                      aten.new_zeros, aten.new_ones, aten.new_full))        # no gradient goes through these
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
        keys: by number, what the expression is. held: the number of the same without a gradient, which may be itself.
        made: numbers that were given since it was emptied.
        places: by number, where in the module's own code it was made first. place: where the next operation stands.
    """

    def __init__(self) -> None:
        super().__init__()
        self.keys: list[Key] = []
        self.shapes: list[Shape] = []
        self.held: list[int] = []
        self.places: list[str] = []
        self.made: set[int] = set()
        self.place = ""
        self._holds = False                                    # are expressions without a gradient made now?
        self._numbers: dict[Key, int] = {}
        self._tensors: dict[int, tuple[Tensor, int]] = {}      # by id, which is not given anew while these are kept
        self._seen_by: dict[int, dict[int, Tensor]] = {}       # by storage, the tensors over it
        self._outlive: set[int] = set()                        # storages of atoms
        self._roots: dict[int, int] = {}                       # by id of a tensor, the detached one that it comes from
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
            self.held.append(found)
            self.places.append(self.place)
        self.made.add(found)
        return found

    def numbers(self, make: Callable[[], Iterable[tuple[Key | int, Shape]]], *read: Any) -> list[int]:
        """Of expressions that an operation on `read` gives; make: these, from what `of` says."""
        self._holds = True                   # first: who is to blame is told by the lowest number
        try:
            held = [self.number(*one) for one in make()]
        finally:
            self._holds = False
        if not torch.is_grad_enabled() or not any(self.learns(t) for t in tree_iter(read) if isinstance(t, Tensor)):
            return held
        found = [self.number(*one) for one in make()]
        for number, without in zip(found, held):
            self.held[number] = without
        return found

    def atom(self, name: str, t: Tensor, learns: bool) -> Tensor:
        """A tensor that nothing makes: an input, a weight, a buffer. learns: its gradient is wanted."""
        number = held = self.number(("atom", name, str(t.dtype)), t.shape)
        if learns:
            number = self.number(("atom", name, str(t.dtype), "learns"), t.shape)
            self.held[number] = held
        self.put(t, number)
        self._outlive.add(t.untyped_storage()._cdata)
        return t

    def put(self, t: Tensor, number: int) -> None:
        """Numbers have no gradient but where they are floating-point ones."""
        number = number if t.is_floating_point() else self.held[number]
        self.made.add(number)
        self._tensors[id(t)] = t, number
        self._seen_by.setdefault(t.untyped_storage()._cdata, {})[id(t)] = t

    def of(self, t: Tensor) -> int:
        found = self._tensors.get(id(t))
        if found is None:
            raise Unfit(f"it uses a tensor {list(t.shape)} that is no input, weight or buffer of it")
        return self.held[found[1]] if self._holds else found[1]

    def learns(self, t: Tensor) -> bool:
        """Does a gradient go through it?"""
        number = self.of(t)
        return self.held[number] != number

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
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise Unfit(f"it takes random numbers, by {func._schema.name}")
        if func._schema.is_mutable:
            return self._write(func, args, kwargs)
        out = func(*args, **kwargs)
        parts = [t for t in tree_iter(out) if isinstance(t, Tensor)]

        def made() -> Iterator[tuple[Key | int, Shape]]:
            if isinstance(out, Tensor):
                yield RULES.get(func.overloadpacket, Values._plain)(self, func, args, kwargs, out), out.shape
            elif func.overloadpacket in (aten.split, aten.split_with_sizes):
                yield from zip(self._split(args, kwargs, parts), (t.shape for t in parts))
            else:
                yield from ((("part", i, self._plain(func, args, kwargs, t)), t.shape) for i, t in enumerate(parts))

        read = () if func.overloadpacket in _CUT_OFF else (args, kwargs)
        for t, number in zip(parts, self.numbers(made, *read)):
            self.put(t, number)
            first = id(args[0]) if args else 0
            self._roots[id(t)] = id(t) if func.overloadpacket is aten.detach else self._roots.get(first, 0)
        return out

    def _near(self, a: Tensor, b: Tensor) -> bool:
        """Of two over the same memory: does autograd see what is written by the one in the other? Not where one of them
        was detached; values are the same all the same."""
        return self._roots.get(id(a), 0) == self._roots.get(id(b), 0)

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
        name = func._schema.name.removeprefix("aten::").removeprefix("megatrain_torch::")
        name = name.removesuffix("_" * func._schema.is_mutable)
        rest = tuple((k, self._operand(v)) for k, v in sorted(kwargs.items()) if isinstance(v, Tensor) or
                     k not in ("device", "layout", "pin_memory", "memory_format", "generator"))
        return name, *map(self._operand, args), rest, str(out.dtype), out.shape

    def _write(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A write in place is its function's expression, and the target's number from then on."""
        target, name = args[0], func._schema.name
        base = name.removeprefix("aten::").removesuffix("_")
        if not name.startswith("aten::") or not name.endswith("_") or torch.Tag.inplace_view in func.tags \
                or "out" in kwargs or not isinstance(target, Tensor):
            raise Unfit(f"it runs {name}, which writes into its arguments")
        memory = target.untyped_storage()._cdata
        if memory in self._outlive:
            raise Unfit(f"it writes by {name} into an input, a weight or a buffer")
        beside, mine = list(self._seen_by[memory].values()), self.of(target)
        if any(self.learns(t) and not (torch.is_grad_enabled() and self._near(t, target)) for t in beside):
            # Autograd would go by what was there before.
            raise Unfit(f"it writes by {name}, under no_grad() or detached, into what has a gradient")
        if not all(self.of(other) == (mine if self._near(other, target) else self.held[mine])
                   and other.shape == target.shape for other in beside):
            return self._write_columns(func, args, kwargs, [t for t in beside if t is not target])

        def made() -> Iterator[tuple[Key | int, Shape]]:
            rule = RULES.get(getattr(aten, base, None), Values._plain)
            yield (self._copied(args[1], target) if base == "copy" else rule(self, func, args, kwargs, target),
                   target.shape)

        (number,) = self.numbers(made, args, kwargs)
        out = func(*args, **kwargs)
        for other in (*beside, target, out):     # whoever has the same memory sees it
            self.put(other, number if self._near(other, target) else self.held[number])
        return out

    def _write_columns(self, func: Any, args: Any, kwargs: Any, others: list[Tensor]) -> Any:
        """A copy into some columns of a tensor, of which other columns may have been looked at."""
        target = args[0]
        near = [t for t in others if self._near(t, target) and t.shape != target.shape]
        whole = next((t for t in near if _columns(target, t)), None)
        begin, end = _columns(target, whole) if whole is not None else (0, 0)
        places = [_columns(t, whole) for t in others] if whole is not None else []
        # They are all the whole, or columns of it that are none of the target's.
        apart = all(at is not None and (at == (0, whole.shape[-1]) or at[1] <= begin or end <= at[0]) for at in places)
        if func._schema.name != "aten::copy_" or whole is None or not apart:
            raise Unfit(f"it writes by {func._schema.name} into memory that other tensors share")

        def made() -> Iterator[tuple[Key | int, Shape]]:
            source = self.number(self._copied(args[1], target), target.shape)
            yield source, target.shape
            yield self._with_columns(whole, (begin, end), source), whole.shape

        number, renewed = self.numbers(made, args[1], whole)
        out = func(*args, **kwargs)
        for t in (*(t for t in others if t.shape == whole.shape), target, out):
            found = number if t is target or t is out else renewed
            self.put(t, found if self._near(t, target) else self.held[found])
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
        return "cat", whole.dim() - 1, tuple(parts)

    # ---- the normal form: copies and views ----

    def _cast(self, func: Any, args: Any, kwargs: Any, out: Tensor) -> Key | int:
        number = self.of(args[0])
        return number if args[0].dtype == out.dtype else ("cast", ("#", number), str(out.dtype))

    def _view(self, func: Any, args: Any, kwargs: Any, out: Tensor) -> Key | int:
        if args[0].dtype != out.dtype:                       # the same bits, read as another type
            return self._plain(func, args, kwargs, out)
        number = self.of(args[0])
        if self.keys[number][0] == "view":
            number = self.keys[number][1][1]
        return number if self.shapes[number] == out.shape else ("view", ("#", number), out.shape)

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

    def _split(self, args: Any, kwargs: Any, parts: list[Tensor]) -> Iterator[Key | int]:
        dim, begin = args[2] if len(args) > 2 else kwargs.get("dim", 0), 0
        for part in parts:
            yield self._slice_of(args[0], dim, begin, begin + part.shape[dim], 1)
            begin += part.shape[dim]

    def _cat(self, func: Any, args: Any, kwargs: Any, out: Tensor) -> Key | int:
        """Parts, each with its place."""
        dim, begin, parts = (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % out.dim(), 0, []
        for t in args[0]:
            end = begin + t.shape[dim]
            if t.shape == out.shape:
                return self.of(t)
            if begin != end:
                parts.append(((begin, end), ("#", self.of(t))))
            begin = end
        return "cat", dim, tuple(parts)

    # ---- sums and products ----

    def _commuted(self, func: Any, args: Any, kwargs: Any, out: Tensor) -> Key | int:
        """A sum, or a product, of two in either order. Numbers that are equal are one constant, whole ones too; a
        product with one is the other factor."""
        if func.overloadpacket is aten.mul and not isinstance(args[1], Tensor) and args[1] == 1 \
                and args[0].dtype == out.dtype:
            return self.of(args[0])
        parts = (self._operand(a if isinstance(a, Tensor) else float(a)) for a in args)
        name, rest = func._schema.name.removeprefix("aten::").removesuffix("_"), tuple(sorted(kwargs.items()))
        return name, tuple(sorted(parts, key=repr)), *rest, str(out.dtype), out.shape


def _columns(t: Tensor, whole: Tensor) -> tuple[int, int] | None:
    """Which of its last numbers another tensor is, over the same memory; None: it is something else."""
    begin = t.storage_offset() - whole.storage_offset()
    like = t.dim() == whole.dim() > 0 and t.shape[:-1] == whole.shape[:-1] \
        and t.stride() == whole.stride() and whole.stride(-1) == 1
    return (begin, begin + t.shape[-1]) if like and 0 <= begin <= whole.shape[-1] - t.shape[-1] else None


_V = Values
RULES: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys((aten.alias, aten.detach, aten.clone, aten.contiguous, aten.lift_fresh, aten.lift_fresh_copy),
                    lambda v, func, args, kwargs, out: v.of(args[0])),
    **dict.fromkeys((aten._to_copy, aten.to), _V._cast),
    **dict.fromkeys((aten.view, aten._unsafe_view, aten.reshape, aten._reshape_alias, aten.squeeze, aten.unsqueeze,
                     aten.flatten), _V._view),
    aten.permute: _V._permute, aten.t: _V._transpose, aten.transpose: _V._transpose, aten.expand: _V._expand,
    aten.slice: lambda v, func, args, kwargs, out: v._slice_of(*args, *(0, None, None, 1)[len(args) - 1:]),
    aten.mul: _V._commuted, aten.add: _V._commuted, aten.cat: _V._cat,
    aten._softmax: lambda v, func, args, kwargs, out:                        # its dimension counted from the front
        v._plain(func, (args[0], args[1] % out.dim(), *args[2:]), kwargs, out),
}


# ---- opaque functions ------------------------------------------------------------------------------

def opaque(function: Callable[..., Tensor]) -> Any:
    """An operation that is one expression; the function makes a tensor of the shape and type that it gives."""
    name = function.__name__.removeprefix("_")
    torch.library.custom_op(f"megatrain_torch::{name}", function, mutates_args=()).register_fake(function)
    return getattr(torch.ops.megatrain_torch, name).default


@opaque
def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return F.linear(input, weight, bias)


@opaque
def _attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float, causal: bool,
               scale: float) -> Tensor:
    return query.new_empty(*query.shape[:-1], value.shape[-1])


def attention(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
              is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False) -> Tensor:
    """F.scaled_dot_product_attention."""
    if enable_gqa and query.dim() == 4:
        key, value = (repeated(t, query.shape[1] // t.shape[1]) for t in (key, value))
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    return _attention(query, key, value, attn_mask, dropout_p, is_causal, scale)


def repeated(t: Tensor, times: int) -> Tensor:
    """Heads [B, h, S, D] of keys or values, as many as there are queries'."""
    if times == 1:
        return t
    b, h, s, d = t.shape
    return t[:, :, None].expand(b, h, times, s, d).reshape(b, h * times, s, d)
