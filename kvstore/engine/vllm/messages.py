"""What the scheduler's side and the workers' side of the connector tell each other.

They are separate processes. vLLM carries these values with its own step messages.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats

import kvstore
from kvstore.engine.paged import Hints

BlockIds = tuple[tuple[int, ...], ...]
"""A request's block table: ids of the engine's blocks, by KV cache group."""


@dataclass(frozen=True, slots=True)
class Identity(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """Whose cache an engine's is, as one worker says that has loaded the model."""

    base: kvstore.Namespace
    """The namespace of requests without salt and adapter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A span of one request, and where the engine keeps it.

    Shapes:
        tokens uint32 ``[n]``, the request from its start; n > ``stop`` for a load.
    """

    request_id: str
    namespace: kvstore.Namespace
    tokens: NDArray[np.uint32]
    images: tuple[kvstore.ImageSpan, ...] = ()
    start: int
    stop: int
    blocks: BlockIds
    hints: Hints = field(default_factory=Hints)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan(KVConnectorMetadata):  # type: ignore[misc]
    """What the workers do in one step, decided by the scheduler."""

    loads: tuple[Work, ...] = ()
    """To be copied into the engine's blocks, between steps."""
    saves: tuple[Work, ...] = ()
    """To be stored, once this step has run."""
    windows: tuple[Work, ...] = ()
    """Windows that end at ``stop``, to be taken when this step has run."""
    preempted: frozenset[str] = frozenset()
    """Requests whose blocks the engine gives away in this step."""
    awaited: frozenset[str] = frozenset()
    """Finished requests whose blocks the engine keeps until every worker has let go of them."""
    is_idle: bool = False
    """No request computes in this step."""
    update: str | None = None
    """Weights were replaced: forget what was stored, and go on under this nonce."""


@dataclass(slots=True)
class WorkerReport(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """What workers tell the scheduler after a step."""

    saved: dict[str, list[int]] = field(default_factory=dict)
    """For each save that ended: how many leading tokens each writer then had."""
    failed: set[str] = field(default_factory=set)
    """Requests whose load failed, at least in part."""
    pooled: dict[int, frozenset[bytes]] = field(default_factory=dict)
    """Hashes of the prefixes whose window a rank holds now, of ranks where that changed."""
    lacks_store: bool = False
    """A worker could not open its store, so nothing can be loaded."""

    @override
    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerReport:
        """Return this report with that of another worker in it."""
        assert isinstance(other, WorkerReport)
        saved = {name: list(ends) for name, ends in self.saved.items()}
        for name, ends in other.saved.items():
            saved.setdefault(name, []).extend(ends)
        return WorkerReport(
            saved,
            self.failed | other.failed,
            self.pooled | other.pooled,
            self.lacks_store or other.lacks_store,
        )

    @property
    def is_empty(self) -> bool:
        """Say whether there is nothing to tell."""
        return not (self.saved or self.failed or self.pooled or self.lacks_store)


class StoreStats(KVConnectorStats):  # type: ignore[misc]
    """Counters of one interval; they add up over workers and intervals."""

    @classmethod
    def of(cls, counters: Mapping[str, int | float]) -> StoreStats:
        """Return the counters that are not zero."""
        return cls(data={name: value for name, value in counters.items() if value})

    @override
    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add the counters of ``other`` to these."""
        for name, value in other.data.items():
            self.data[name] = self.data.get(name, 0) + value
        return self

    @override
    def reduce(self) -> dict[str, int | float]:
        """Return the sums."""
        return dict(self.data)

    @override
    def reset(self) -> None:
        """Start a new interval."""
        self.data: dict[str, Any] = {}

    @override
    def is_empty(self) -> bool:
        """Say whether nothing was counted."""
        return not self.data
