"""Every kind of torture, in the order in which they run."""

from __future__ import annotations

from collections.abc import Sequence

from tests.torture import circumstances, damage, disk, kills, model, power, processes
from tests.torture.power import SELF_TEST
from tests.torture.runner import Kind

KINDS: Sequence[Kind] = (
    *power.KINDS,
    *kills.KINDS,
    *damage.KINDS,
    *disk.KINDS,
    *processes.KINDS,
    *circumstances.KINDS,
    *model.KINDS,
)

__all__ = ["KINDS", "SELF_TEST"]
