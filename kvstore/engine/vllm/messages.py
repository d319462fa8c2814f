"""Messages between the connectors of scheduler and workers, which vLLM sends with its step messages."""

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
    """The namespace of an engine, reported by a worker that has loaded the model."""

    base: kvstore.Namespace
    """The namespace of requests without salt and adapter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A span of one request, and its blocks in the engine.

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
    """The plan of one step for the workers."""

    loads: tuple[Work, ...] = ()
    """To be copied to the engine's blocks, between steps."""
    saves: tuple[Work, ...] = ()
    """To be stored after this step."""
    windows: tuple[Work, ...] = ()
    """Windows that end at ``stop``, to be taken after this step."""
    preempted: frozenset[str] = frozenset()
    """Requests whose blocks the engine frees in this step."""
    awaited: frozenset[str] = frozenset()
    """Finished requests whose blocks the engine keeps until every worker reports them."""
    is_idle: bool = False
    """No request computes in this step."""
    update: str | None = None
    """The nonce of a weight update: earlier blocks become unreachable."""


@dataclass(slots=True)
class WorkerReport(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """The workers' report to the scheduler after a step."""

    saved: dict[str, list[int]] = field(default_factory=dict)
    """For each save that ended: the leading tokens stored by each writer."""
    failed: set[str] = field(default_factory=set)
    """Requests whose load failed, wholly or partly."""
    pooled: dict[int, frozenset[bytes]] = field(default_factory=dict)
    """By rank, the hashes of the prefixes whose window it has pooled; ranks without a change are left out."""
    lacks_store: bool = False
    """Whether a worker could not open its store, so that nothing can be loaded."""

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
        """Whether there is nothing to report."""
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
        """Return whether nothing was counted."""
        return not self.data
