"""Every kind of torture, in the order in which they run."""

from __future__ import annotations

from collections.abc import Sequence

from tests.torture import circumstances, damage, disk, interrupts, kills, model, power, processes
from tests.torture.runner import Kind

KINDS: Sequence[Kind] = (
    *power.KINDS,
    *kills.KINDS,
    *damage.KINDS,
    *disk.KINDS,
    *processes.KINDS,
    *interrupts.KINDS,
    *circumstances.KINDS,
    *model.KINDS,
)

SELF_TESTS: Sequence[Kind] = (power.SELF_TEST, damage.SELF_TEST)
"""Kinds that must have findings: stores without syncs or without checks."""
