"""Bytes and seconds of a window, by the code that runs it and by what it keeps.

One method per way a window can be run, with its figures as data above; what is measured says where. Letters: `T`
tokens of a micro-batch, `H` hidden, `q` width of all query heads, `qkv` width that the projections in give (latent
attention's in both steps), `up` width that gate and up give together (twice the intermediate size, where gated).
"""
from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..base.modes import DISK, HOST, LINKED, read
from ..fused.loss import chunk_tokens
from ..fused.trl import ODDS, TILES
from .machine import Machine
from .shapes import Product, Window

OFFLOAD_DEPTH = 2           # units whose gradients may be on their way out: runtime of offload.h
STAGINGS = 2                # host buffers for gradients that are to be added: offload.c

# Bytes that torch's allocator holds beyond what is used, as a share of all that is not slots or homes.
# Eager: 7 to 47 % in five runs of benchmarks/results, 15 % where tokens are many.
CACHE_SHARE = {"fused": 0.05, "eager": 0.15}


@dataclass(frozen=True)
class Cost:
    """One window on one micro-batch. The dicts are by activation mode; their keys are what may be chosen."""

    forward_s: float                    # on the compute queue
    backward_s: dict[str, float]        # with what it runs again
    forward_host_s: float               # to launch it
    backward_host_s: dict[str, float]
    kept: dict[str, int]                # bytes of activations on the device from forward to backward
    work: dict[str, int]                # bytes beside those while its backward runs, weight gradients left out
    away: dict[str, int] = dataclasses.field(default_factory=dict)      # bytes in host memory, or on disk


def cost_of(window: Window, machine: Machine, tokens: int, seq: int, fused: bool) -> Cost:
    """What a window costs on `tokens` in sequences of `seq`; fused: by our templates, and with our loss."""
    run = _Run(window, machine, tokens, seq)
    if window.kind == "embedding":
        return run.embedding()
    if window.kind == "head":
        return run.tiled_head() if window.loss == TILES else run.fused_head() if fused else run.eager_head()
    if fused and window.template:
        return run.fused_layer() if window.products else run.fused_norm()
    return run.eager()


TEMPLATE_OPERATIONS = {"forward": 22, "backward": 38, "selective": 2, "attention": 10, "replay": 12, LINKED: 20}
PART_OPERATIONS = {"forward": 9, "backward": 16}       # of some experts, where they are fetched a few at a time
EXPAND_TRAFFIC = 1.3        # bytes per byte of a weight that is made of codes: written, and codes read
HEAD_TRAFFIC_BYTES = 6      # per logit: the loss reads twice and writes their gradients in place, 16 bits each

# Of the model's own code, in bytes of what its products take and give: 180 KB per token at 7B width, where autograd
# keeps 315 KB, the backward of a replayed layer reaches 281 KB beyond its input, and elementwise kernels read and write
# about 5 and 12 times as much in forward, and in backward with the forward again (fitted to benchmarks/results: seven
# runs of 8 to 28 layers, 8k to 64k tokens).
EAGER_KEPT, EAGER_WORK_SAVED, EAGER_WORK_REPLAY = 1.75, 0.8, 1.56
EAGER_TRAFFIC_FORWARD, EAGER_TRAFFIC_BACKWARD = 5.0, 7.0
EAGER_ATTENTION = 0.53      # of cuDNN's rate: flash at S=4096 does 330 and 262 TFLOP/s where cuDNN does 616 and 500
VECTOR_TRAFFIC = 24         # bytes per element of a norm that stands alone, forward; twice that in backward
VECTOR_KEPT = 14
# Attention that is written out, in bytes of each weight of a token and head: kept are the softmax in fp32 and what it
# is rounded to; in backward there are gradients of both, and of the logits.
SPELLED_KEPT, SPELLED_WORK = 6, 12
# A layer's forward takes 500 to 630 us of Python's time, and 230 to 260 us of ours, at 6 us an operation.
EAGER_OPERATIONS = {"layer": (130, 260, 130), "other": (20, 30, 15), "head": (10, 14, 0), "embedding": (8, 10, 0)}
EAGER_LOGIT_BYTES = 12      # per logit, all tokens at once: 16-bit, fp32, its softmax and gradient
EAGER_LOGIT_TRAFFIC = (18, 24)
EAGER_ODDS = 5              # logits' sizes alive at once in ORPO's backward, where they are made
TILE = (4096, 32768)        # tokens and words whose logits TRL 1.16's head has at once


class _Run(NamedTuple):
    """One window on a machine, for so many tokens."""

    w: Window
    m: Machine
    tokens: int
    seq: int

    def bytes_s(self, nbytes: float) -> float:
        return nbytes / (self.m.hbm_gbps * 1e9)

    def launch_s(self, operations: float) -> float:
        return operations * self.m.launch_us * 1e-6

    def saving(self, forward_s: float, backward_s: float, launches: tuple[float, float], kept: int, work: int) -> Cost:
        """The cost where nothing but "saved" may be chosen. launches: operations of forward and of backward."""
        once, back = map(self.launch_s, launches)
        return Cost(forward_s, {"saved": backward_s * self.w.learns}, once, {"saved": back}, {"saved": kept},
                    {"saved": work})

    # ---- products and attention ----

    def products_s(self, products: Sequence[Product], tokens: int) -> float:
        """Of 8-bit codes where they may be."""
        return sum(p.flops * tokens / self.m.gemm_flops(tokens * p.rows, p.width)
                   / (self.m.fp8_gain if self.w.coded and p.fits else 1.0) for p in products)

    def gradients_s(self, products: Sequence[Product], tokens: int) -> float:
        """dx of all products, where anything before learns; dW of those that are trained."""
        return self.w.learns * (self.products_s(products, tokens)
                                + self.products_s([p for p in products if p.trained], tokens))

    def attention_s(self, backward: bool) -> float:
        """Two products forward and five backward over the causal triangle, or the band of a window."""
        w, seq = self.w, self.seq
        if not w.attention:
            return 0.0
        reach = min(w.context or seq, seq)
        keys = reach - reach * reach / (2 * seq)        # that a query sees on average
        flops = 4.0 * w.attention * keys * self.tokens * (2.5 if backward else 1.0)
        return flops / self.m.attention_flops(min(seq, 2 * reach), backward)

    def joined(self, *parts: str) -> list[Product]:
        """Projections over the same rows are one product."""
        alike: dict[tuple[object, ...], list[Product]] = {}
        for p in self.w.products:
            if not parts or p.part in parts:
                alike.setdefault((p.part, p.fan_in, p.rows, p.trained), []).append(p)
        return [dataclasses.replace(same[0], fan_out=sum(p.fan_out for p in same)) for same in alike.values()]

    def coded(self, products: Sequence[Product]) -> list[Product]:
        """Those of 8-bit codes."""
        return [p for p in products if self.w.coded and p.fits]

    def straight(self, products: Sequence[Product]) -> int:
        """Columns of gated activations that are never there in 16 bits, since their codes are made with them."""
        gated = [p for p in self.w.products if p.part in ("up", "down")]
        straight = self.w.coded and all(p.fits and p.trained for p in gated)
        return sum(p.fan_in for p in products if p.part == "down") if straight else 0

    def linear_s(self, products: Sequence[Product]) -> float:
        """Forward products of a layer, with what makes their codes: bytes of inputs and weights by rows, once read, and
        a byte each. Of what goes straight to codes, less what is otherwise written and read again."""
        size, tokens = self.w.itemsize, self.tokens
        casts = (size + 1) * sum(tokens * p.fan_in + p.fan_in * p.fan_out for p in self.coded(products)) \
            - 2 * size * tokens * self.straight(products)
        return self.products_s(products, tokens) + self.bytes_s(casts)

    def backward_casts(self, products: Sequence[Product]) -> float:
        """Bytes of gradients by rows, and by columns with inputs for what is trained; of weights by columns. What is
        wanted by columns is read twice. What goes straight to codes is made twice, of what it is made from, and neither
        written nor read: three matrices as wide."""
        size, tokens = self.w.itemsize, self.tokens
        once, twice = size + 1, 2 * size + 1
        return sum(twice * p.fan_in * p.fan_out
                   + tokens * ((twice + 1) * p.fan_out + twice * p.fan_in if p.trained else once * p.fan_out)
                   for p in self.coded(products)) - 2 * 3 * size * tokens * self.straight(products)

    # ---- templates ----

    def template_bytes(self) -> tuple[dict[str, int], dict[str, int]]:
        """What it keeps, its input counted in, and what it needs beside that, by mode."""
        tokens, w, t, kept = self.tokens, self.w, self.w.template, dict(self.w.template.kept)
        copied = tokens * t.copied[0] if tokens > t.copied[1] else 0
        # Codes while backward runs: of all weights, and of the widest gradient both kinds, beside what it is made from
        # where it goes straight to codes.
        joined = self.joined()
        of, straight = self.coded(joined), 5 * self.straight(joined)
        codes = {mode: math.ceil(sum(p.fan_in * p.fan_out for p in of) + n * max(
            straight, *(2 * p.fan_out + p.fan_in for p in of), 0))
            for mode in kept for n in [min(tokens, t.tiled[1] or tokens) if mode != "saved" else tokens]}
        by_rows = self.m.device == "cuda" and not w.context and tokens == self.seq >= t.long[2]
        in_tiles = t.spared(tokens) + (copied + tokens * t.long[0] - t.long[1]) * by_rows
        return ({mode: math.ceil(tokens * (t.input * (mode != LINKED) + n)) for mode, n in kept.items()},
                {mode: math.ceil(tokens * (t.input * (mode == LINKED) + t.work - n)) - (mode != "saved") * in_tiles
                 + copied + codes[mode] + t.expanded[0] for mode, n in kept.items()})

    def fused_layer(self) -> Cost:
        """A decoder layer by its template. Elementwise kernels read and write, in elements per token:

        forward: two norms 4H; rotation 2qkv; the product of gate and up 1.5up; what products are added onto 2H.
        backward: two norms with what they rebuild 10H; rotation 2qkv; attention's sums 2q; gate and up 3up.
        Where its products are of codes, casts of what they read come on top, but norms are not written and read again
        for them in forward; where its weights are, what makes them 16-bit weights, for each product. Adapters read what
        goes in and read and write what comes out; in backward twice as much.

        replay runs everything but the last projection again, attention all of that but attention itself, selective gate
        and up behind a norm, and what makes q, k and v of few numbers; linked as attention, and of the layer before,
        which is taken to be alike, what is behind attention.
        """
        w, tokens = self.w, self.tokens
        h, q, qkv, up, size = w.hidden, w.attention, w.width("qkv") + w.width("latent"), w.width("up"), w.itemsize
        kept, work = self.template_bytes()
        joined = [p for p in self.joined() if p.part != "folded"]
        attention = self.attention_s(False)
        # What LoRA's products read and write in a forward: of A x, of B y twice; each is wide at that end alone.
        wide = sum(max(p.fan_in, 2 * p.fan_out) for p in w.products if p.part == "adapter")
        beside, expand = self.bytes_s(tokens * size * wide), self.bytes_s(EXPAND_TRAFFIC * w.template.expanded[1])
        # Gradients of LoRA in experts' matrices: thin products, which read the rows of x and of dy twice.
        folded = 2 * sum(p.rows * max(p.fan_in, p.fan_out) for p in w.products if p.part == "folded")
        forward = self.linear_s(joined) + (beside + expand)
        gradients = self.gradients_s(joined, tokens) + self.attention_s(True) + 2 * beside + expand + self.bytes_s(
            tokens * size * (10 * h + 2 * qkv + 2 * q + 3 * up + folded) + self.backward_casts(joined))
        again = {"saved": 0.0,
                 "selective": self.linear_s(self.joined("latent", "up")) + self.bytes_s(tokens * size * 2 * h),
                 "attention": forward - self.linear_s(self.joined("down"))
                 + self.bytes_s(tokens * size * (5 * h + 2 * qkv))}
        again["replay"] = again["attention"] + attention
        again[LINKED] = again["attention"] + forward - self.linear_s(self.joined("qkv", "latent")) \
            + self.bytes_s(tokens * size * (4 * h + 1.5 * up))
        normed = sum(p.fan_in for p in self.coded(self.joined("qkv", "latent", "up")))   # codes are made with them
        ops, more = TEMPLATE_OPERATIONS, w.template.parts - 1
        back = ops["backward"] + more * PART_OPERATIONS["backward"]
        return _with_host(Cost(
            forward + attention + self.bytes_s(tokens * size * (6 * h + 2 * qkv + 1.5 * up - 2 * normed)),
            {mode: (gradients + again[mode]) * w.learns for mode in again},
            self.launch_s(ops["forward"] + more * PART_OPERATIONS["forward"]),
            {mode: self.launch_s(back + ops.get(mode, 0)) for mode in again}, kept, work))

    def fused_norm(self) -> Cost:
        """A norm that stands alone: reads and writes, and in backward reads two and writes one."""
        kept, work = self.template_bytes()
        row = self.tokens * self.w.hidden * self.w.itemsize
        return self.saving(self.bytes_s(2 * row), self.bytes_s(3 * row), (6, 8), kept["saved"], work["saved"])

    def fused_head(self) -> Cost:
        """Head and loss in chunks of tokens: forward makes the gradients too, backward hands them out.

        With several chunks the weight's gradient is summed in fp32, [V,H], by the products themselves.
        """
        w, tokens = self.w, self.tokens
        wide, trained = sum(p.fan_out for p in w.products), self._elements(trained=True)
        chunk = min(tokens, chunk_tokens(wide, w.itemsize))
        chunks, rows, logits = -(-tokens // chunk), tokens * w.hidden * w.itemsize, chunk * wide * w.itemsize
        sums = 4 * trained if chunks > 1 else 0
        forward = chunks * (self.products_s(w.products, chunk) + self.gradients_s(w.products, chunk)) \
            + self.bytes_s(tokens * wide * HEAD_TRAFFIC_BYTES + 2 * sums * chunks)
        backward = self.bytes_s(2 * rows)
        if w.loss != ODDS:
            return self.saving(forward, backward, (8 * chunks, 8), rows, logits + rows + sums)
        # A loss of half of the rows, whose gradients wait for backward, and losses of each row (head.Loss), for which
        # backward makes logits again, of rows picked into memory of their own; and means of logits. Then the weight's
        # two gradients are added up.
        sums = max(sums, trained * w.itemsize)
        return self.saving(forward / 2 + 2 * self.products_s(w.products, tokens), forward + backward,
                           (16 * chunks, 8 * chunks), 2 * rows + sums,
                           max(logits, trained * w.itemsize) + 2 * rows + sums)

    def tiled_head(self) -> Cost:
        """TRL's: a copy of the weight stays from forward to backward, which makes each tile of logits again. Gradients
        are summed in fp32, and rounded at the end."""
        w, tokens = self.w, self.tokens
        wide, trained = sum(p.fan_out for p in w.products), self._elements(trained=True)
        tiles = -(-tokens // TILE[0]) * -(-wide // TILE[1])
        tile = min(tokens, TILE[0]) * min(wide, TILE[1]) * w.itemsize
        rows, again = tokens * w.hidden * w.itemsize, self.products_s(w.products, tokens)
        traffic = self.bytes_s(tokens * wide * HEAD_TRAFFIC_BYTES / 2)
        return self.saving(again + traffic, again + self.gradients_s(w.products, tokens) + traffic,
                           (4 * tiles, 8 * tiles), 2 * rows + self._elements() * w.itemsize,
                           tile + rows + 4 * (trained + tokens * w.hidden) + trained * w.itemsize)

    def _elements(self, trained: bool = False) -> int:
        return sum(p.fan_in * p.fan_out for p in self.w.products if p.trained or not trained)

    # ---- the model's own code ----

    def eager(self) -> Cost:
        """Any window by its own forward: kept by autograd, or run again but for its last product."""
        w, tokens = self.w, self.tokens
        moved = sum(p.rows * (p.fan_in + p.fan_out) * (4 if p.part == "adapter" else w.itemsize) for p in w.products
                    if p.part != "folded")
        kept = {"replay": w.hidden * w.itemsize, "saved": EAGER_KEPT * moved}
        work = {"replay": EAGER_WORK_REPLAY * moved, "saved": EAGER_WORK_SAVED * moved}
        traffic = EAGER_TRAFFIC_FORWARD * moved
        if not w.products:
            kept["saved"], work = VECTOR_KEPT * w.hidden, dict.fromkeys(work, VECTOR_KEPT * w.hidden)
            traffic = VECTOR_TRAFFIC * w.hidden
        square = w.heads * self.seq * w.spelled
        kept["saved"] += SPELLED_KEPT * square
        work = {mode: n + SPELLED_WORK * square for mode, n in work.items()}
        traffic += 2 * SPELLED_WORK * square
        elementwise, (dense, stay) = self.bytes_s(tokens * traffic), w.dense
        forward = self.products_s(w.products, tokens) + elementwise + self.bytes_s(2 * w.made) \
            + self.attention_s(False) / EAGER_ATTENTION
        gradients = self.gradients_s(w.products, tokens) \
            + elementwise * EAGER_TRAFFIC_BACKWARD / EAGER_TRAFFIC_FORWARD \
            + self.bytes_s(2 * w.made) + self.attention_s(True) / EAGER_ATTENTION
        last = self.products_s([p for p in w.products if p.part == "down"], tokens)
        once, back, again = EAGER_OPERATIONS["layer" if w.kind == "layer" else "other"]
        cost = Cost(forward, {"replay": (gradients + forward - last) * w.learns, "saved": gradients * w.learns},
                    self.launch_s(once), {"replay": self.launch_s(back + again), "saved": self.launch_s(back)},
                    {mode: math.ceil(tokens * n) + stay * (mode == "saved") for mode, n in kept.items()},
                    {mode: math.ceil(tokens * n) + dense for mode, n in work.items()})
        if w.writes:
            for by_mode in (cost.backward_s, cost.backward_host_s, cost.kept, cost.work):
                del by_mode["replay"]
        return _with_host(cost) if w.kind == "layer" else cost

    def eager_head(self) -> Cost:
        """The model's own head and loss: logits of all tokens exist at once, in fp32 too."""
        w, tokens = self.w, self.tokens
        wide = sum(p.fan_out for p in w.products)
        once, back = (self.bytes_s(tokens * wide * n) for n in EAGER_LOGIT_TRAFFIC)
        each = max(EAGER_LOGIT_BYTES, EAGER_ODDS * w.itemsize) if w.loss == ODDS else EAGER_LOGIT_BYTES
        return self.saving(self.products_s(w.products, tokens) + once, self.gradients_s(w.products, tokens) + back,
                           EAGER_OPERATIONS["head"][:2], tokens * w.hidden * w.itemsize, tokens * wide * each)

    def embedding(self) -> Cost:
        """Rows are looked up; the gradient is a whole table, mostly zeros."""
        rows, table = self.tokens * self.w.hidden * self.w.itemsize, self.w.table * self.w.itemsize
        return self.saving(self.bytes_s(2 * rows), self.bytes_s(2 * table + 6 * rows),
                           EAGER_OPERATIONS["embedding"][:2], 8 * self.tokens, 2 * rows)


def _with_host(cost: Cost) -> Cost:
    """With what it has by keeping it in host memory or on disk. While its backward runs, what it kept is on the device,
    and what the window before it kept comes back: as much."""
    for name in (*HOST, *DISK):
        if (keep := read(name).keep) in cost.kept:
            away = cost.kept[keep]
            cost.backward_s[name], cost.backward_host_s[name] = cost.backward_s[keep], cost.backward_host_s[keep]
            cost.kept[name], cost.away[name], cost.work[name] = 0, away, cost.work[keep] + 2 * away
    return cost
