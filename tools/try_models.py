#!/usr/bin/env python3
"""Streams tiny models of every architecture on the CPU device and compares each with plain torch, bit for bit.

    python tools/try_models.py --transformers DIR --diffusers DIR     # what build/models.json lacks
    python tools/try_models.py --only llama --again                   # some, anew
    python tools/try_models.py --page                                 # docs/models.md from what is known

Where the models come from: tiny_models.py. Of each, two plain runs must agree first: then the same loop is streamed
with activations kept, replayed, and with fused layers. Two steps of torch's AdamW in fp32; compared are losses, every
gradient, weights and buffers at the end, and the next random number. Each file of trials runs in a process of its
own, with a limit of time and memory. Besides the test extra it needs diffusers, timm, scipy and what the tests import.
"""
from __future__ import annotations

import argparse
import gc
import json
import os
import re
import resource
import select
import signal
import sys
import time
import unittest
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["OMP_NUM_THREADS"] = "1"             # threads do not outlive a fork
os.environ["OPENBLAS_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
sys.path.insert(0, str(Path(__file__).parent.parent))

import fusing
import parity
import tiny_models
import torch
from models_page import page
from tiny_models import Candidate, Source, Tried
from torch import Tensor, nn

import megatrain_torch as mt
from megatrain_torch.model.stream import runtime_of

ROOT = Path(__file__).resolve().parent.parent
SECONDS = 600                 # for one model, all its runs
MEMORY_BYTES = 12 << 30       # of address space, beside what the process that forks has
STEPS = 2
LAST_BITS = 1e-6              # relative: some ten roundings of fp32, as when a sum is taken in another order
Row = dict[str, Any]


# ---------------------------------------------------------------- one model

class NoTemplate(Exception):
    """Nothing to fuse: a run would be the eager one again."""


class Loop:
    """The training loop of a candidate, as a script for parity.run_one; and what it learnt about the model."""

    def __init__(self, candidate: Candidate, compute: str = "eager") -> None:
        self.candidate, self.compute = candidate, compute
        self.own_loss = False
        self.units, self.templates, self.parameters = 0, 0, 0

    def __call__(self, t: parity.Trial) -> None:
        built = self.candidate.build()
        self.parameters = sum(p.numel() for p in built.parameters())
        model = t.stream(built, compute=self.compute)
        try:
            if self.compute == "fused" and not any(w.fused or w.head for w in runtime_of(model).windows):
                raise NoTemplate
            t.train(model, self.candidate.batch, self.loss, steps=1 if self.compute == "fused" else STEPS)
            if t.streamed:
                self.look(model)
        finally:
            if t.streamed:
                mt.unstream(model)

    def loss(self, model: nn.Module, batch: dict[str, Any]) -> Tensor:
        value, self.own_loss = tiny_models.loss_of(model, batch)
        return value

    def look(self, model: nn.Module) -> None:
        rt = runtime_of(model)
        self.units = len(rt.units)
        self.templates = sum(w.code in ("template", "fused with the loss") for w in rt.windows)


def run(loop: Loop, activations: str = "saved", streamed: bool = True) -> parity.Trial:
    return parity.run_one(loop, parity.Options(activations=activations, steps=STEPS), streamed)


def choose(tried: Tried) -> tuple[Candidate, Loop, parity.Trial]:
    """The first candidate with a loss that plain torch can train; else the first that it can train at all.

    Raises:
        Exception: what the first candidate met, when plain torch can train none.
    """
    first: Exception | None = None
    usable = None
    for candidate in tried.candidates():
        loop = Loop(candidate)
        try:
            trial = run(loop, streamed=False)
            trained(trial)
        except Exception as e:
            first = first or e
            continue
        if loop.own_loss:
            return candidate, loop, trial
        usable = usable or (candidate, loop, trial)
    if usable is None:
        raise first or ValueError("no model class")
    return usable


def trained(trial: parity.Trial) -> None:
    """Raises ValueError where a comparison would prove nothing: no gradient, or a loss that is no number."""
    losses = [v for label, v in trial.notes if label.endswith("loss")]
    if not all(bool(v.isfinite().all()) for v in losses):
        raise ValueError("the loss of plain torch is not finite")
    if not any(v is not None and bool(v.any()) for label, v in trial.notes if ", gradient of " in label):
        raise ValueError("plain torch gives no gradient but zeros")


def judge(tried: Tried, say: Any) -> Row:
    """All runs of one trial. `say` is told which run begins, for the case that it never ends."""
    row: Row = {"test": tried.name, "class": "", "plain": "trained"}
    say("plain")
    try:
        candidate, loop, plain = choose(tried)
    except (Exception, unittest.SkipTest) as e:
        return row | {"plain": reason(e)}
    row |= {"class": candidate.name, "loss": loop.own_loss, "parameters": loop.parameters}
    parted = parity.first_difference(plain, run(Loop(candidate), streamed=False))
    if parted:
        return row | {"plain": f"two plain runs differ: {parted}"}
    for mode in ("saved", "replay"):
        say(mode)
        row[mode] = compared(plain, Loop(candidate), mode, row)
    say("fused")
    row["fused"] = fused(plain, candidate)
    return row


def compared(plain: parity.Trial, loop: Loop, mode: str, row: Row) -> str:
    try:
        streamed = run(loop, mode)
    except mt.MegatrainError as e:
        return f"refused: {reason(e)}"
    except Exception as e:
        return f"fails: {reason(e)}"
    row["units"] = loop.units
    if streamed.faults:
        return f"differs: {'; '.join(streamed.faults)}"
    found = parity.first_difference(plain, streamed)
    if found is None:
        return "equal"
    off = gradient_error(first_gradients(plain), first_gradients(streamed))
    same_loss = parity.same_bits(plain.notes[0], streamed.notes[0])
    return f"last bits ({off:.0e}): {found}" if same_loss and off <= LAST_BITS else f"differs: {found}"


def fused(plain: parity.Trial, candidate: Candidate) -> str:
    """The largest relative error of a gradient of the first step, where any template runs; "" where none does."""
    loop = Loop(candidate, "fused")
    try:
        streamed = run(loop)
    except NoTemplate:
        return ""
    except mt.MegatrainError as e:
        return f"refused: {reason(e)}"
    except Exception as e:
        return f"fails: {reason(e)}"
    if not loop.templates:
        return ""
    off = gradient_error(first_gradients(plain), first_gradients(streamed))
    word = "within" if off <= fusing.TOLERANCE else "off by"
    return f"{word} {off:.0e} ({loop.templates})"


def first_gradients(trial: parity.Trial) -> dict[str, Tensor | None]:
    mark = "step 0, micro-batch 0, gradient of "
    return {label.removeprefix(mark): v for label, v in trial.notes if label.startswith(mark)}


def gradient_error(truth: dict[str, Tensor | None], found: dict[str, Tensor | None]) -> float:
    """As fusing.grads_agree measures it; infinite where one has a gradient and the other none."""
    largest = max(float(t.double().norm()) for t in truth.values() if t is not None)
    worst = 0.0
    for name, t in truth.items():
        f = found[name]
        if (t is None) != (f is None):
            return float("inf")
        if t is not None:
            off = fusing.error(t, f, fusing.FLOOR * largest)
            worst = max(worst, off if off == off else float("inf"))
    return worst


def reason(e: BaseException) -> str:
    text = " ".join(str(e).split())[:300]
    return f"{type(e).__name__}: {text}" if not isinstance(e, mt.MegatrainError) else text


# ---------------------------------------------------------------- processes

def child(source: Source, file: str, done: set[str], out: int) -> None:
    """Runs a file's trials; writes one JSON line when a run begins and one for each row."""
    def tell(message: Any) -> None:
        os.write(out, (json.dumps(message) + "\n").encode())

    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + MEMORY_BYTES,) * 2)
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    gc.freeze()                   # what was imported before the fork is looked through by no collection
    tell({"begins": "import", "test": ""})
    try:
        trials = source.trials(file)
    except Exception as e:
        tell({"test": "", "class": "", "plain": reason(e)})
        return
    for tried in trials:
        if tried.name not in done:
            began = time.monotonic()
            row = judge(tried, lambda what, name=tried.name: tell({"begins": what, "test": name}))
            tell(row | {"seconds": round(time.monotonic() - began, 1)})


def lines(pipe: int, deadline: list[float]) -> Iterator[Any]:
    """Messages of a child until it ends; raises TimeoutError at the deadline, which the reader moves."""
    text = b""
    while True:
        ready, _, _ = select.select([pipe], [], [], max(0.0, deadline[0] - time.monotonic()))
        if not ready:
            raise TimeoutError
        piece = os.read(pipe, 1 << 16)
        if not piece:
            return
        *whole, text = (text + piece).split(b"\n")
        yield from map(json.loads, whole)


def rows_of(source: Source, file: str) -> list[Row]:
    """All rows of a file; a trial whose process dies gets a row that says how, and the rest run in another."""
    rows: list[Row] = []
    while True:
        last, ended = _one_process(source, file, rows)
        if ended is None:
            return rows
        stage = {"plain": ended} if last["begins"] in ("plain", "import") else \
            {"plain": "trained", last["begins"]: f"fails: {ended}"}
        rows.append({"test": last["test"], "class": "", **stage})
        if last["begins"] == "import":
            return rows


def _one_process(source: Source, file: str, rows: list[Row]) -> tuple[Any, str | None]:
    """Adds rows; returns the last run begun and how the process ended, None for well."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.close(read_end)
            child(source, file, {r["test"] for r in rows}, write_end)
            code = 0
        finally:
            os._exit(code)
    os.close(write_end)
    last, ended = {"begins": "import", "test": ""}, None
    deadline = [time.monotonic() + SECONDS]
    try:
        for message in lines(read_end, deadline):
            if "begins" in message:
                last = message
                if message["begins"] in ("plain", "import"):
                    deadline[0] = time.monotonic() + SECONDS
            else:
                rows.append(message)
    except TimeoutError:
        os.kill(pid, signal.SIGKILL)
        ended = f"not over after {SECONDS} s"
    os.close(read_end)
    status = os.waitpid(pid, 0)[1]
    if ended is None and status != 0:
        ended = f"the process ended with status {os.waitstatus_to_exitcode(status)}"
    return last, ended


# ---------------------------------------------------------------- all of them

def versions(source: Source) -> str:
    from importlib.metadata import version
    text = f"{source.name} {version(source.name)}"
    if source.tests is None:
        return text
    setup = (source.tests / "setup.py").read_text()
    return f"{text}, its tests of {re.search('version=.([0-9a-z.]+)', setup)[1]}"


def try_all(source: Source, only: re.Pattern[str], again: bool, cache: Path) -> None:
    files = [f for f in source.files() if only.search(f"{source.name}/{f}")]
    known = read(cache)
    todo = [f for f in files if again or f"{source.name}/{f}" not in known]
    if not todo:
        return
    source.prepare()
    for i, file in enumerate(todo):
        rows = rows_of(source, file)
        known = read(cache)
        known[f"{source.name}/{file}"] = rows
        known["versions"] = known.get("versions", {}) | {"torch": f"torch {torch.__version__}",
                                                         source.name: versions(source)}
        known["installed"] = known.get("installed", {}) | {source.name: sorted(source.installed())}
        write(cache, known)
        for row in rows:
            sys.stdout.write(f"{i + 1}/{len(todo)} {file} {brief(row)}\n")
        sys.stdout.flush()


def brief(row: Row) -> str:
    text = row["plain"] if row["plain"] != "trained" else \
        " | ".join(f"{k}: {row[k]}" for k in ("saved", "replay", "fused") if row.get(k))
    return f"{row['class'] or row['test']} [{row.get('seconds', 0)} s] {text[:200]}"


def read(cache: Path) -> dict[str, Any]:
    return json.loads(cache.read_text()) if cache.exists() else {}


def write(cache: Path, known: dict[str, Any]) -> None:
    cache.parent.mkdir(exist_ok=True)
    fresh = cache.with_suffix(".new")
    fresh.write_text(json.dumps(known, indent=0, sort_keys=True))
    fresh.replace(cache)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--transformers", type=Path, help="a checkout of transformers, for its tests' configurations")
    parser.add_argument("--diffusers", type=Path, help="a checkout of diffusers, likewise")
    parser.add_argument("--only", default="", help="regular expression over source/file")
    parser.add_argument("--again", action="store_true", help="also what is known")
    parser.add_argument("--page", action="store_true", help="try nothing; write docs/models.md")
    parser.add_argument("--cache", type=Path, default=ROOT / "build" / "models.json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if not args.page:
        for source in tiny_models.sources(args.transformers, args.diffusers):
            try_all(source, re.compile(args.only), args.again, args.cache)
    (ROOT / "docs" / "models.md").write_text(page(read(args.cache), f"{fusing.TOLERANCE:.0e}"))


if __name__ == "__main__":
    main()
