"""Writes memory until a number of bytes is reached, and says after each step how many there were.

Run as a program, by limits.touch. It asks the kernel to end it before any other process when memory runs out.
"""
from __future__ import annotations

import contextlib
import mmap
import sys
from pathlib import Path

STEP_BYTES = 256 << 20
SCORE = "1000"                  # of oom_score_adj: the first to go


def main(nbytes: int) -> None:
    Path("/proc/self/oom_score_adj").write_text(SCORE)
    kept, reached = [], 0
    while reached < nbytes:
        step = min(STEP_BYTES, nbytes - reached)
        memory = mmap.mmap(-1, step, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):      # a wish: many times as fast
            memory.madvise(mmap.MADV_HUGEPAGE)
        memory[::mmap.PAGESIZE] = b"\1" * len(range(0, step, mmap.PAGESIZE))
        kept.append(memory)
        reached += step
        sys.stdout.write(f"{reached}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(int(sys.argv[1]))
