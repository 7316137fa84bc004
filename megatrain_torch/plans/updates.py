"""Seconds of each unit's update, by where it is made, and of what goes with it."""
from __future__ import annotations

import numpy as np

from ..store.disk import POOL
from .cost import visiting_planes
from .machine import Machine
from .shapes import Shape
from .wishes import Wishes

# Bytes per parameter that a gradient moves into the planes of a unit at home in VRAM: measured and
# copied; by each further micro-batch added to its fp32 sum, rounded and measured. Beside compute,
# but of the same memory. Of several ranks the first has a sum in fp32 too.
GATHERED = (6, 16)


class Updates:
    """Arrays by unit. Of several machines each updates its part, of several GPUs too.

    Attributes:
        host: on all threads of the host. pool: on those of updates from the drive. through: by way
            of the device; infinite where nothing is left of the bus.
        drive: of the drive, for what an update reads and writes; drive_weights: with weights.
        read: of the drive, for a fetch. add: to add up a further micro-batch's gradients.
    """

    def __init__(self, shape: Shape, machine: Machine, wishes: Wishes) -> None:
        self.machine, m = machine, machine
        self.fleet = wishes.fleet
        units = shape.units
        self.trained = np.array([u.trained for u in units], dtype=np.float64)
        self.host = self.trained / self.fleet.machines / m.adam_rate(states=wishes.states)
        there = min(POOL * self.fleet.gpus, m.adam_gparams[-1][0])
        self.pool = self.trained / self.fleet.machines / m.adam_rate(there, wishes.states)
        rate = m.through_rate(wishes.states, alone=wishes.homes == "through")
        self.through = self.trained / self.fleet.count / rate if rate else np.full(len(units), np.inf)
        moved = np.array([sum(visiting_planes(u).values()) for u in units], dtype=np.float64) / self.fleet.machines
        weights = np.array([u.gradients for u in units], dtype=np.float64)
        both = m.disk_both_gbps * 1e9
        self.drive, self.drive_weights = 2 * moved / both, 2 * (moved + weights) / both
        # A rank reads its portion, with its part of the drive's rate. What is copied and gathered takes less time.
        self.read = np.array([u.weights for u in units]) / self.fleet.gpus / (m.disk_read_gbps * 1e9)
        self.add = self.trained * self.fleet.added / (m.add_gparams * 1e9)

    def device(self, micro: int) -> np.ndarray:
        """Of units at home in VRAM: AdamW on the device; and a step's gradients into their planes,
        measured and copied, then added up."""
        moved = GATHERED[not self.fleet.alone] + (micro - 1) * GATHERED[1]
        own = self.trained / self.fleet.count
        return own / (self.machine.device_adam_gparams * 1e9) \
            + own * moved / (self.machine.hbm_gbps * 1e9)
