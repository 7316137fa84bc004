"""What ranks exchange: bytes and seconds of each unit's gradients on their way to who owns them, and of new weights.

A rank's gradients of a unit lie in one buffer. Each part goes to the rank that owns it, which adds what it is given in
fp32, in the order of ranks. Between machines go the parts of every rank: a machine's sums would be less, and of other
bits. The owner brings home what its sum is in the weights' type.
New weights go from a machine's host memory to the others', through the devices.
"""
from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..group import between
from .cost import OFFLOAD_DEPTH
from .fleet import Fleet
from .machine import Machine
from .shapes import Shape, Unit

WAY_BYTES = between.BUFFERS * between.PIECE
SECOND = 0.7                    # of a first communicator's bytes, what a further one takes, which gathers portions
POOL_BYTES = 512 << 20          # what torch keeps for streams of our own, beside compute's
BUFFERS = 2                     # of a unit's gradients: what is sent, and what is received; the next unit's is packed


class Exchange:
    """Of one model; of one of several ranks. Arrays by unit, zeros of one rank alone.

    Attributes:
        home: bytes of a micro-batch's gradients that cross to the host.
        exchange_s, network_s: in which gradients are exchanged within the machine and added, and between machines.
        lost_s: seconds by which that holds up what is computed beside it.
        parts: in so many each unit's weights are fetched, by as many GPUs; 1: by each whole.
        gather_s: in which these are given to each other; held_s: by which that holds up what is computed.
        spread_s: in which new weights go to the other machines. lowered, raised: bytes of those of a unit at home on
            the devices, that go from each down to its host, and up to each. peers: bytes/s at which these come from the
            other devices; 0: by way of the host.
        buffers: bytes on the device.
        on_link: GPUs have no links to each other, and exchange over those to the host and by way of its memory;
            link_bytes: what that moves there of a micro-batch, of one GPU.
    """

    def __init__(self, shape: Shape, machine: Machine, fleet: Fleet, delivery: str = "whole") -> None:
        units = shape.units
        self.parts = fleet.gpus if delivery == "shards" else 1
        self.gradients = np.array([u.gradients for u in units], dtype=np.int64)
        self.home = self.gradients
        self.exchange_s = self.network_s = self.lost_s = self.spread_s = np.zeros(len(units))
        self.gather_s = self.held_s = np.zeros(len(units))
        self.lowered = self.raised = np.zeros(len(units), dtype=np.int64)
        self.buffers, self.peers, self.on_link, self.link_bytes = 0, 0.0, False, 0
        if not fleet.alone:
            self._among(units, machine, fleet, np.array([u.sums for u in units], dtype=np.int64))

    def _among(self, units: Sequence[Unit], machine: Machine, fleet: Fleet, sums: np.ndarray) -> None:
        g, m, n = fleet.gpus, fleet.machines, fleet.count
        self.home = -(-self.gradients // n)
        self.on_link = g > 1 and not machine.exchange_gbps
        links = (machine.exchange_gbps or machine.both_gbps) * 1e9
        leaving = self.gradients * ((g - 1) / g)
        wide = np.maximum(self.gradients, sums)         # a sum in fp32; of fp32 weights the gradient itself
        across = g * self.gradients * ((m - 1) / m)     # of a whole machine
        added = self.gradients + wide / g               # read, and written, by the sum
        self.exchange_s = leaving / links + added / (machine.hbm_gbps * 1e9)
        network, crossing = machine.network_gbps * 1e9, self.gradients * ((m - 1) / m)
        self.network_s = across / network
        self.lost_s = (leaving + across / g) / (machine.lost_gbps * 1e9)
        given = np.array([u.crossing for u in units]) * ((self.parts - 1) / self.parts)
        self.gather_s, self.held_s = given / links, given / (machine.lost_gbps * 1e9)
        # Each GPU's part leaves over it, and each of other machines comes over one: in pieces, of which one crosses the
        # network while others are copied.
        self.spread_s = np.maximum(crossing / network, crossing / g / (machine.both_gbps * 1e9))
        updated = np.array([u.weights if u.trained else 0 for u in units], dtype=np.int64)
        self.lowered = -(-updated // n)
        self.raised = updated - self.lowered
        self.peers = links if m == 1 and not self.on_link else 0.0
        self.link_bytes = 2 * int(leaving.sum()) * self.on_link
        sizes = np.pad(self.gradients, 1)
        packed = BUFFERS * self.gradients + np.maximum(sizes[:-2], sizes[2:])
        self.buffers = int(packed.max(initial=0)) + OFFLOAD_DEPTH * int(self.home.max(initial=0))
        self.buffers += -(-int(wide.max(initial=0)) // n)       # a sum, before it is rounded
        self.buffers += int(SECOND * machine.communicator_bytes) * (self.parts > 1 and machine.device == "cuda")
        self.buffers += POOL_BYTES + m * WAY_BYTES * (m > 1)       # to all other machines, and from each
