"""What a window keeps between forward and backward, and where: the words of a plan's "activations".

keep        "replay": its input alone; "attention": attention's output and log-sum-exp besides; "selective": all but
            the largest part; "saved": everything that backward needs.
where       nothing: on the device. "+host": in host memory, the input too. "+split": in host memory, the input on the
            device. So "selective+host", "replay+host", "attention+split".
"""
from __future__ import annotations

import functools
from typing import NamedTuple

KEEPS = ("replay", "attention", "selective", "saved")        # least first
HOST = ("replay+host", *(f"{keep}{where}" for keep in KEEPS[1:] for where in ("+split", "+host")))
MODES = (*KEEPS, *HOST)
HOMES = ("ram", "vram", "arrive", "through", "disk")        # of a unit: weights, gradients and states
GRADS = ("ram", "none")     # where gradients wait for their update: at home with their unit, or nowhere


class Mode(NamedTuple):
    """
    Attributes:
        keep: one of KEEPS, or "whole". host: what is kept goes to host memory. input: so does the window's input.
    """

    keep: str
    host: bool
    input: bool

    def __str__(self) -> str:
        return self.keep + ("+host" if self.input else "+split" if self.host else "")


@functools.cache
def read(mode: str) -> Mode:
    keep, _, where = mode.partition("+")
    return Mode(keep, bool(where), where == "host")
