"""What a window keeps between forward and backward, and where: the words of a plan's "activations".

keep        "replay": its input alone; "attention": attention's output and log-sum-exp besides; "selective": all but
            the largest part; "saved": everything that backward needs. "linked": attention's output and log-sum-exp in
            place of the input, which the layer before makes again from what it keeps, without attention.
where       nothing: on the device. "+host": in host memory, the input too. "+disk": in a file, by way of a few
            bays of host memory, the input too. So "selective+host", "replay+disk". "attention+split": attention's
            output in host memory, the input on the device.
"""
from __future__ import annotations

import functools
from typing import NamedTuple

KEEPS = ("replay", "attention", "selective", "saved")        # least first
LINKED = "linked"
HOST = ("replay+host", "attention+split", "attention+host", "selective+host", "saved+host", "linked+host")
DISK = (*(f"{keep}+disk" for keep in KEEPS), "linked+disk")
MODES = (*KEEPS, LINKED, *HOST, *DISK)
HOMES = ("ram", "vram", "arrive", "through", "disk", "disk+weights")        # of a unit: weights, gradients and states
DISKS = ("disk", "disk+weights")            # of which states are in a file; weights too
DELIVERIES = ("whole", "shards")            # a rank fetches all weights; or its portion, and gathers the others'
GRADS = ("ram", "none")     # where gradients wait for their update: at home with their unit, or nowhere


class Mode(NamedTuple):
    """
    Attributes:
        keep: one of KEEPS, or LINKED. host: what is kept leaves the device. input: so does the window's input.
            disk: for a file.
    """

    keep: str
    host: bool
    input: bool
    disk: bool

    @property
    def saved(self) -> Mode:
        """All that backward needs, there; the input is not told from the rest."""
        return Mode("saved", self.host, self.host, self.disk)

    def __str__(self) -> str:
        return self.keep + ("+disk" if self.disk else "+host" if self.input else "+split" if self.host else "")


@functools.cache
def read(mode: str) -> Mode:
    keep, _, where = mode.partition("+")
    return Mode(keep, bool(where), where in ("host", "disk"), where == "disk")
