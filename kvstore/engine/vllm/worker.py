"""The worker's part of the connector: loads and saves of this rank's KV tensors, as planned.

The store's background threads copy whole blocks. Windows are small, and vLLM frees their blocks in the
next step, so they are copied within the step.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

import kvstore
from kvstore.engine.faults import Faults
from kvstore.engine.paged import WindowPages, pages_of
from kvstore.engine.vllm.groups import EngineLayout, PagedLayers, page_views
from kvstore.engine.vllm.log import log
from kvstore.engine.vllm.messages import StepPlan, StoreStats, Work, WorkerReport
from kvstore.engine.vllm.options import updated
from kvstore.errors import StoreError

NULL_BLOCK = 0
"""vLLM's id of a missing block."""
JOB_SECONDS = 60.0
"""Timeout of a load or save."""
IDLE_SECONDS = 0.005
"""Longest wait for a job in a step without computation, so that vLLM does not busy-wait."""
SAVE_WAIT_SECONDS = 1.0
"""Longest wait of a background thread for room in the store's queue."""


@dataclass(slots=True)
class _Transfer:
    work: Work
    job: kvstore.Job
    deadline: float
    window: kvstore.WindowSnapshot | None = None


def record_event(device: torch.device) -> kvstore.Event | None:
    """Return an event after all work queued on ``device``, None for a CPU."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


@dataclass(eq=False)
class WorkerSide:
    """Loads and saves of one rank. Threads: one, the model runner's.

    Without a ``store`` (it could not be opened) every lookup misses. Of several ranks with the same
    bytes one writes; the others open its store with ``open_late`` at their first load.
    """

    engine: EngineLayout
    store: kvstore.Scope | None
    base: kvstore.Namespace
    rank: int
    _: KW_ONLY
    writes: bool
    open_late: Callable[[], kvstore.Scope | None] = lambda: None
    record: Callable[[torch.device], kvstore.Event | None] = record_event
    clock: Callable[[], float] = time.monotonic
    faults: Faults = field(default_factory=lambda: Faults(log))
    _pages: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    """vLLM's blocks of each layer, by group of the layout."""
    _saves: dict[str, list[_Transfer]] = field(default_factory=dict)
    _loads: dict[str, _Transfer] = field(default_factory=dict)
    _awaited: set[str] = field(default_factory=set)
    _received: set[str] = field(default_factory=set)
    _failed: set[str] = field(default_factory=set)
    _invalid_blocks: set[int] = field(default_factory=set)
    _report: WorkerReport = field(default_factory=WorkerReport)
    _pooled: frozenset[bytes] = frozenset()
    _counts: Counter[str] = field(default_factory=Counter)

    def register(self, caches: Mapping[str, torch.Tensor]) -> None:
        """Register vLLM's KV tensors. Raises ``LayoutMismatch`` if they do not match the config."""
        self._pages = {part.name: page_views(part, caches) for part in self.engine.layers}

    # ---- a step --------------------------------------------------------------------------------

    def begin(self, plan: StepPlan) -> None:
        """Cancel the saves of blocks that vLLM frees in this step, before they are overwritten."""
        if plan.update is not None:
            self._forget(plan.update)
        jobs = [save.job for name in plan.preempted for save in self._saves.get(name, ())]
        for job in jobs:  # all before the first wait, because the engine is stopped meanwhile
            job.is_cancelled = True
        for job in jobs:
            self._cancel(job)

    def _forget(self, nonce: str) -> None:
        """Make all stored blocks unreachable before a weight update."""
        with self.faults.noted("weight update"):
            if self.store is not None and self.store.role == "owner":
                self.store.bump_generation()
        self.base = updated(self.base, nonce)

    def load(self, plan: StepPlan) -> None:
        """Start the loads of a step."""
        # Work queued on the device may still zero the blocks, or use them for an earlier request.
        after = self._queued() if plan.loads else None
        for work in plan.loads:
            self._counts["loads"] += 1
            try:
                transfer = self._start_load(work, after)
            except Exception as error:
                self.faults.note("load", error)
                transfer = None
            if transfer is None:
                self._fail(work, work.start)
                self._received.add(work.request_id)
            else:
                self._loads[work.request_id] = transfer

    def _start_load(self, work: Work, after: kvstore.Event | None) -> _Transfer | None:
        """Return the started load, None if the planned blocks are no longer stored."""
        if self.store is None:
            self.store = self.open_late()
        if self.store is None:
            self._report.lacks_store = True
            return None
        needs_window = bool(self.engine.windows)
        scope = self.store.scope(work.namespace)
        match = scope.lookup(
            work.tokens, work.request_id, need_window=needs_window, images=work.images
        )
        with match:
            if match.hit_tokens <= work.start:
                return None
            window = None
            if needs_window:
                if match.hit_tokens != work.stop or not match.window_hit:
                    return None
                window = scope.window(match)
            job = scope.load(match, self._blocks_of(work), work.start, after=after)
        return _Transfer(work, job, self.clock() + JOB_SECONDS, window)

    def save(self, plan: StepPlan) -> None:
        """Start the saves of a computed step, and copy its windows to the window pool."""
        for work in plan.windows:
            with self.faults.noted("window"):
                self._take_window(work)
        if not self.writes:
            return
        event = None
        for work in plan.saves:
            try:
                if self.store is None:
                    self._answer(work, work.start)
                    continue
                event = event or self._queued()
                job = self.store.scope(work.namespace).save(
                    work.tokens,
                    self._blocks_of(work),
                    work.start,
                    work.stop,
                    event,
                    wait=SAVE_WAIT_SECONDS,
                    ttl=work.hints.ttl,
                    pin=work.hints.pin,
                    images=work.images,
                )
            except Exception as error:
                self.faults.note("save", error)
                self._answer(work, work.start)
                continue
            transfer = _Transfer(work, job, self.clock() + JOB_SECONDS)
            self._saves.setdefault(work.request_id, []).append(transfer)

    def finished(self, plan: StepPlan) -> tuple[set[str], set[str], set[str]]:
        """Return the requests with ended saves, with an ended load, and with a failed load."""
        self._awaited |= plan.awaited
        if plan.is_idle:
            self._wait_a_moment()
        for request_id, load in list(self._loads.items()):
            if self._is_over(load) and request_id not in self._saves:
                del self._loads[request_id]
                self._end_load(load)
                self._received.add(request_id)
        for request_id, saves in list(self._saves.items()):
            left = []
            for save in saves:
                if self._is_over(save):
                    self._end_save(save)
                else:
                    left.append(save)
            self._saves[request_id] = left
            if not left:
                del self._saves[request_id]
        sent = {request_id for request_id in self._awaited if request_id not in self._saves}
        self._awaited -= sent
        received, self._received = self._received, set()
        failed, self._failed = self._failed, set()
        return sent, received, failed

    def _wait_a_moment(self) -> None:
        jobs = [load.job for load in self._loads.values()]
        jobs += [save.job for name in self._awaited for save in self._saves.get(name, ())]
        if jobs:
            jobs[0].wait(IDLE_SECONDS)

    def _is_over(self, transfer: _Transfer) -> bool:
        if transfer.job.done:
            return True
        if self.clock() >= transfer.deadline and not transfer.job.is_cancelled:
            self._counts["overdue_jobs"] += 1
            transfer.job.is_cancelled = True  # no wait: other requests continue
        return transfer.job.done

    def _end(self, job: kvstore.Job, deadline: float) -> None:
        """Wait for a job until the deadline, then cancel it. It accesses no block of vLLM after this."""
        if job.wait(max(0.0, deadline - self.clock())):
            return
        self._counts["overdue_jobs"] += 1
        self._cancel(job)

    def _cancel(self, job: kvstore.Job) -> None:
        """Cancel a job; return when it no longer accesses vLLM's blocks."""
        try:
            job.cancel()
        except StoreError as error:
            self.faults.note("cancellation", error)

    def _end_load(self, load: _Transfer) -> None:
        work, job = load.work, load.job
        with self.faults.noted("release"):
            if self.store is not None:
                self.store.scope(work.namespace).release(work.request_id)
        loaded = max(work.start, job.loaded_tokens)
        if loaded == work.stop and load.window is not None:
            try:
                self._put_back(work, load.window)
            except Exception as error:
                self.faults.note("window", error)
                loaded = work.start
        self._counts["loaded_tokens"] += loaded - work.start
        if loaded < work.stop:
            self._fail(work, loaded)

    def _fail(self, work: Work, loaded: int) -> None:
        """Report planned tokens that were not loaded, which vLLM must compute."""
        self._counts["failed_load_tokens"] += work.stop - loaded
        self._report.failed.add(work.request_id)
        if self.engine.group_count == 1:
            layers = self.engine.layers[0]
            self._invalid_blocks |= set(
                pages_of(work.blocks[layers.index], layers.page_tokens, loaded, work.stop)
            )
        else:  # block ids of several groups overlap, so vLLM expects the request id
            self._failed.add(work.request_id)

    def _end_save(self, save: _Transfer) -> None:
        stored = save.job.stored
        end = save.work.start if stored is None else stored.end
        present = 0 if stored is None else stored.present * self.engine.block_tokens
        self._counts["saved_tokens"] += max(0, end - save.work.start - present)
        self._counts["dropped_blocks"] += 0 if stored is None else stored.dropped
        self._answer(save.work, end)

    def _answer(self, work: Work, end: int) -> None:
        """Report to the scheduler the number of leading tokens stored after a save."""
        self._report.saved.setdefault(work.request_id, []).append(end)

    # ---- tensors -------------------------------------------------------------------------------

    def _blocks_of(self, work: Work) -> kvstore.Pages:
        """Return the pages of the GLOBAL entries of a request."""
        stored = [layers for layers in self.engine.layers if not layers.is_window]
        return kvstore.Pages(
            {layers.name: self._pages[layers.name] for layers in stored},
            {layers.name: work.blocks[layers.index] for layers in stored},
        )

    def _queued(self) -> kvstore.Event | None:
        return self.record(self._pages[self.engine.layers[0].name][0].device)

    def _window_pages(self, work: Work) -> WindowPages:
        sizes = [layers.page_tokens for layers in self.engine.windows]
        return WindowPages.of(work.stop, self.engine.layout.window_tokens, sizes)

    def _take_window(self, work: Work) -> None:
        if self.store is None:
            return
        span = self._window_pages(work)
        rows: dict[str, NDArray[np.uint8]] = {}
        for layers in self.engine.windows:
            size = layers.page_tokens
            first, stop = span.needed(size)
            pages = self._pages[layers.name]
            shape = (len(pages), (span.stop - span.start) // size, layers.page_bytes)
            taken = torch.zeros(shape, dtype=torch.uint8)
            ids = _live(work, layers, first, stop).to(pages[0].device)
            for target, view in zip(taken, pages, strict=True):
                target[first - span.start // size :] = view[ids].flatten(1).to(target.device)
            rows[layers.name] = taken.numpy()
        snapshot = kvstore.WindowSnapshot(span.start, span.stop, rows)
        self._counts["windows_taken"] += self.store.scope(work.namespace).put_window(
            work.tokens, snapshot, images=work.images
        )

    def _put_back(self, work: Work, window: kvstore.WindowSnapshot) -> None:
        """Copy a window to the request's own blocks. Those before ``start`` are shared and unchanged."""
        span = self._window_pages(work)
        for layers in self.engine.windows:
            first, stop = span.needed(layers.page_tokens, work.start)
            if first == stop:
                continue
            held = window.rows[layers.name][:, first - window.start // layers.page_tokens :]
            pages = self._pages[layers.name]
            ids = _live(work, layers, first, stop).to(pages[0].device)
            for view, rows in zip(pages, torch.from_numpy(held), strict=True):
                view[ids] = rows.to(view.device).reshape(len(ids), *view.shape[1:])

    # ---- reports -------------------------------------------------------------------------------

    def take_invalid_blocks(self) -> set[int]:
        """Return the blocks that loads left unfilled since the last call."""
        invalid, self._invalid_blocks = self._invalid_blocks, set()
        return invalid

    def take_report(self) -> WorkerReport | None:
        """Return the report since the last call, None if it is empty."""
        if self.engine.windows and self.store is not None:
            try:
                pooled = self.store.pooled_windows()
            except Exception as error:
                self.faults.note("window", error)
                pooled = frozenset()
            if pooled != self._pooled:
                self._pooled = pooled
                self._report.pooled[self.rank] = pooled
        report, self._report = self._report, WorkerReport()
        return None if report.is_empty else report

    def stats(self) -> StoreStats:
        """Return the counters since the last call."""
        counts = self._counts + self.faults.counts
        self._counts, self.faults.counts = Counter(), Counter()
        return StoreStats.of(counts)

    def flush(self) -> None:
        """Wait until all saves so far survive power loss. For tests and measurements."""
        if self.store is not None:
            self.store.flush()

    def close(self) -> None:
        """End all transfers. vLLM's blocks are not accessed after this."""
        for load in self._loads.values():
            self._end(load.job, self.clock())
        for saves in self._saves.values():
            for save in saves:
                self._end(save.job, save.deadline)


def _live(work: Work, layers: PagedLayers, first: int, stop: int) -> torch.Tensor:
    """Return ids of blocks ``[first, stop)``. Raises ``ValueError`` if vLLM has freed one."""
    ids = work.blocks[layers.index][first:stop]
    if len(ids) < stop - first or NULL_BLOCK in ids:
        msg = f"vLLM has freed a block of the window of {layers.name}: found {ids} for blocks [{first}, {stop})"
        raise ValueError(msg)
    return torch.tensor(ids, dtype=torch.int64)
