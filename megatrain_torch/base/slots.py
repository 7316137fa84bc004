"""How many slots of which size: the ring that weights pass through. See mt_plan_slots in csrc/walk/search.h."""
from __future__ import annotations

from .. import _core

plan_slots = _core.plan_slots
