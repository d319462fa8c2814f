"""Messages between the connectors of scheduler and workers, sent with vLLM's step messages."""

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
"""Block table of a request: ids of the engine's blocks, by KV cache group."""


@dataclass(frozen=True, slots=True)
class Identity(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """Namespace of requests without salt and adapter, reported by a worker with a loaded model."""

    base: kvstore.Namespace


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A token span of one request, with the engine's blocks.

    Shapes:
        tokens uint32 ``[n]``, from the request's start; n > ``stop`` for a load.
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
    """Plan of one step, for the workers."""

    loads: tuple[Work, ...] = ()
    """Spans to copy to the engine's blocks, between steps."""
    saves: tuple[Work, ...] = ()
    """Spans to store after this step."""
    windows: tuple[Work, ...] = ()
    """Windows that end at ``stop``, to copy after this step."""
    preempted: frozenset[str] = frozenset()
    """Requests whose blocks the engine frees in this step."""
    awaited: frozenset[str] = frozenset()
    """Finished requests whose blocks the engine keeps until every worker reports them."""
    is_idle: bool = False
    """Whether no request computes in this step."""
    update: str | None = None
    """Nonce of a weight update, which makes earlier blocks unreachable."""


@dataclass(slots=True)
class WorkerReport(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """Report of the workers to the scheduler after a step."""

    saved: dict[str, list[int]] = field(default_factory=dict)
    """For each ended save, the number of leading tokens stored by each writer."""
    failed: set[str] = field(default_factory=set)
    """Requests whose load failed, wholly or partly."""
    pooled: dict[int, frozenset[bytes]] = field(default_factory=dict)
    """Hashes of the prefixes with a pooled window, by rank; without ranks that have no change."""
    lacks_store: bool = False
    """Whether a worker could not open its store, so that loads are impossible."""

    @override
    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerReport:
        """Return this report merged with that of another worker."""
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
        """Whether all fields are empty."""
        return not (self.saved or self.failed or self.pooled or self.lacks_store)


class StoreStats(KVConnectorStats):  # type: ignore[misc]
    """Counters of one interval, summed over workers and intervals."""

    @classmethod
    def of(cls, counters: Mapping[str, int | float]) -> StoreStats:
        """Return the non-zero counters."""
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
        """Return whether all counters are zero."""
        return not self.data
