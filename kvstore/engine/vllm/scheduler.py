"""The scheduler's part of the connector: plans of loads and saves, without access to KV.

It reads the stores of all ranks. A hit is the longest prefix that every rank has stored.
"""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from vllm.distributed.kv_events import AllBlocksCleared, BlockStored, KVCacheEvent

import kvstore
from kvstore.engine.faults import Faults
from kvstore.engine.paged import (
    Hints,
    Saving,
    final_tokens,
    images_within,
    longest_pooled,
    window_boundaries,
)
from kvstore.engine.vllm.groups import EngineLayout
from kvstore.engine.vllm.images import Images
from kvstore.engine.vllm.log import log
from kvstore.engine.vllm.messages import BlockIds, StepPlan, StoreStats, Work, WorkerReport
from kvstore.engine.vllm.options import adapter_identity, request_namespace, updated
from kvstore.errors import ConfigError

HINTS = "kvstore"
"""Key of a request's hints in its ``kv_transfer_params``."""
MEDIUM = "DISK"
"""Medium in KV events."""
FREES_SECONDS = 0.1
"""Longest wait of vLLM for blocks of a finished request before it preempts a running one. A copy takes
milliseconds; recomputing 1,000 tokens of a preempted request takes about 0.1 s."""


@dataclass(slots=True)
class Tracked:
    """State of one request in the scheduler."""

    request: Any
    scopes: tuple[kvstore.Scope, ...]
    """Scopes of the request's namespace, one for the store of each rank."""
    namespace: kvstore.Namespace
    hints: Hints
    may_load: bool
    digest: Callable[[Any], bytes | None]
    """Digest of an image's content, None for unknown content."""
    saving: Saving = field(default_factory=Saving)
    local: int = 0
    """Leading tokens in vLLM's own cache at its last query."""
    final: int = 0
    """Leading tokens with final KV."""
    is_admitted: bool = False
    """Whether its next step is the first after an allocation of blocks."""
    is_loading: bool = False
    ended: float = 0.0
    """Time of its end."""
    ids: NDArray[np.uint32] = field(default_factory=lambda: np.empty(0, np.uint32))
    spans: list[kvstore.ImageSpan] = field(default_factory=list)
    """Images of known content, in order."""
    limit: int | None = None
    """Start of the first image of unknown content."""

    @property
    def known(self) -> int:
        """Leading tokens with known content: all, or those before an image of unknown content."""
        if self.limit is None:
            # A session's next input adds images.
            for item in self.request.mm_features[len(self.spans) :]:
                digest, start = self.digest(item), item.mm_position.offset
                if digest is None:
                    self.limit = int(start)
                    break
                stop = start + item.mm_position.length
                self.spans.append(kvstore.ImageSpan(start, stop, digest))
        count = int(self.request.num_tokens)
        return count if self.limit is None else min(count, self.limit)

    @property
    def tokens(self) -> NDArray[np.uint32]:
        """Tokens that vLLM has accepted, up to an image of unknown content."""
        given = self.request.all_token_ids
        # Tokens are only appended, but the next input of a session replaces the last one.
        if len(self.ids) != len(given) or (len(given) and self.ids[-1] != given[-1]):
            self.ids = np.array(given[:], np.uint32)
        return self.ids[: self.known]

    @property
    def images(self) -> tuple[kvstore.ImageSpan, ...]:
        """Images among the known tokens."""
        known = self.known  # this extends the spans
        return images_within(self.spans, known)


class SchedulerSide:
    """Planner of the loads and saves of all requests. Threads: one, the scheduler's."""

    def __init__(
        self,
        engine: EngineLayout,
        readers: Sequence[kvstore.Scope],
        base: kvstore.Namespace,
        tenant: str,
        *,
        lora: str = "",
        sends_events: bool,
        has_fixed_weights: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``readers`` are the stores of the writing ranks; ``lora`` is the engine's ``adapter_rule``."""
        self._readers = tuple(readers)
        self._base = base
        self._tenant = tenant
        self._sends_events = sends_events
        self._has_fixed_weights = has_fixed_weights
        self._clock = clock
        self._block_tokens = engine.block_tokens
        self._has_windows = bool(engine.windows)
        self._tracked: dict[str, Tracked] = {}
        self._ending: dict[str, Tracked] = {}
        """Finished requests whose blocks vLLM keeps until the workers report their saves."""
        self._images = Images()
        self._lora = lora
        self._adapters: dict[tuple[int, str, str], str] = {}
        self._pools: dict[int, frozenset[bytes]] = {}
        self._loads: list[Work] = []
        self._saves: list[Work] = []
        self._awaited: set[str] = set()
        self._update: str | None = None
        self._may_load = True  # every worker could open its store
        self._events: list[KVCacheEvent] = []
        self._counts: Counter[str] = Counter()
        self.faults = Faults(log)

    def adopt(self, base: kvstore.Namespace) -> None:
        """Use the namespace reported by the workers. Called before the first request."""
        # Salts and adapters share the generation of the weights.
        seen = [reader.scope(base).namespace.generation for reader in self._readers]
        self._base = replace(base, generation=max(seen, default=base.generation))

    # ---- requests ------------------------------------------------------------------------------

    def add(self, request: Any) -> None:
        """Start tracking a request, unless none of it can be stored."""
        if not self._readers or request.prompt_embeds is not None:
            return
        with self.faults.noted("request"):
            self._tracked[request.request_id] = self._track(request)

    def _track(self, request: Any) -> Tracked:
        wishes = (request.kv_transfer_params or {}).get(HINTS)
        try:
            hints = Hints.of(wishes)
        except ConfigError as error:
            self.faults.counts["hint_faults"] += 1
            self.faults.say("hints of a request were ignored: %s; others are only counted", error)
            hints = Hints()
        sampling = request.sampling_params
        needs_every_row = sampling is not None and sampling.prompt_logprobs is not None
        namespace = self._namespace(request)
        scopes = tuple(reader.scope(namespace) for reader in self._readers)
        return Tracked(
            request=request,
            scopes=scopes,
            namespace=namespace,
            hints=hints,
            may_load=not (needs_every_row or request.skip_reading_prefix_cache),
            digest=self._digest,
        )

    def _digest(self, feature: Any) -> bytes | None:
        """Return the digest of an image's content; None, logged and counted, for unknown content."""
        try:
            digest = self._images.digest(feature)
        except Exception as error:
            self.faults.note("digest", error)
            return None
        if digest is None:
            self._counts["unknown_images"] += 1
            self.faults.say(
                "vLLM's scheduler has no content of image %r, or another content than before: nothing from "
                "that image on is stored or loaded (docs/vllm.md); further images are only counted",
                feature.identifier,
            )
        return digest

    def _namespace(self, request: Any) -> kvstore.Namespace:
        lora = request.lora_request
        adapter = None
        if lora is not None:
            key = (lora.lora_int_id, lora.lora_name, lora.lora_path)
            # With load_inplace the folder may have other weights now.
            if key not in self._adapters or lora.load_inplace:
                self._adapters[key] = adapter_identity(lora.lora_name, lora.lora_path, self._lora)
            adapter = self._adapters[key]
        return request_namespace(self._base, self._tenant, request.cache_salt, adapter)

    def matched(self, request: Any, local: int) -> int:
        """Return the number of tokens after the ``local`` ones that can be loaded. No side effects."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            return 0
        tracked.local = local
        if not (tracked.may_load and self._may_load):
            return 0
        with self.faults.noted("lookup"):
            return max(0, self._hit(tracked) - local)
        return 0

    def _hit(self, tracked: Tracked) -> int:
        tokens = tracked.tokens
        probes = [scope.probe(tokens, images=tracked.images) for scope in tracked.scopes]
        hit = min(probe.hit_tokens for probe in probes)
        if hit and self._has_windows:
            ranks = [
                (probe.prefix.hashes, self._pools.get(rank, frozenset()))
                for rank, probe in enumerate(probes)
            ]
            blocks = longest_pooled(ranks, hit // self._block_tokens)
            self._counts["window_misses"] += blocks * self._block_tokens < hit
            hit = blocks * self._block_tokens
        return hit

    def admit(self, request: Any, blocks: BlockIds, external: int) -> None:
        """Record the ``blocks`` of a request; plan the load of ``external`` tokens after its local ones."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            return
        tracked.is_admitted = True
        if not external:
            return
        start, stop = tracked.local, tracked.local + external
        tokens = tracked.tokens[: stop + 1]
        tracked.saving.saved = max(
            tracked.saving.saved, stop // self._block_tokens * self._block_tokens
        )
        for scope in tracked.scopes:
            with self.faults.noted("lookup"):
                images = images_within(tracked.images, len(tokens))
                scope.lookup(tokens, request.request_id, images=images)
        tracked.is_loading = True
        self._loads.append(self._work(tracked, tokens, start, stop, blocks))
        self._counts["load_requests"] += 1
        self._counts["load_tokens"] += external

    def _work(
        self, tracked: Tracked, tokens: NDArray[np.uint32], start: int, stop: int, blocks: BlockIds
    ) -> Work:
        return Work(
            request_id=tracked.request.request_id,
            namespace=tracked.namespace,
            tokens=tokens,
            images=images_within(tracked.images, len(tokens)),
            start=start,
            stop=stop,
            blocks=blocks,
            hints=tracked.hints,
        )

    # ---- steps ---------------------------------------------------------------------------------

    def plan(
        self,
        scheduled: Iterable[tuple[str, int]],
        preempted: Collection[str],
        block_ids: Callable[[str], Sequence[Sequence[int]]],
    ) -> StepPlan:
        """Return the plan of a step: ``scheduled`` has the tokens of each request, ``block_ids`` its table."""
        windows: list[Work] = []
        is_idle = True
        for request_id in preempted:
            if (tracked := self._tracked.get(request_id)) is not None:
                tracked.final = 0
        for request_id, count in scheduled:
            is_idle = False
            tracked = self._tracked.get(request_id)
            if tracked is None:
                continue
            with self.faults.noted("plan"):
                self._advance(tracked, count, block_ids, windows)
        plan = StepPlan(
            loads=tuple(self._loads),
            saves=tuple(self._saves),
            windows=tuple(windows),
            preempted=frozenset(preempted),
            awaited=frozenset(self._awaited),
            is_idle=is_idle,
            update=self._update,
        )
        self._loads, self._saves = [], []
        self._awaited = set()
        self._update = None
        return plan

    def _advance(
        self,
        tracked: Tracked,
        count: int,
        block_ids: Callable[[str], Sequence[Sequence[int]]],
        windows: list[Work],
    ) -> None:
        request = tracked.request
        if tracked.is_admitted:
            tracked.is_admitted = False
            tracked.final = request.num_computed_tokens
        before = tracked.final
        known = tracked.known
        tracked.final = final_tokens(known, request.num_computed_tokens, count)
        if not tracked.hints.store:
            return
        span = tracked.saving.start(tracked.final, self._block_tokens, len(self._readers))
        stops = (
            window_boundaries(
                before, tracked.final, min(known, request.num_prompt_tokens), self._block_tokens
            )
            if self._has_windows
            else ()
        )
        if span is None and not stops:
            return
        tokens = tracked.tokens
        blocks = _block_ids(block_ids(request.request_id))
        if span is not None:
            self._saves.append(self._work(tracked, tokens[: span[1]], *span, blocks))
        windows += [self._work(tracked, tokens[:stop], 0, stop, blocks) for stop in stops]

    def finish(self, request: Any, blocks: BlockIds) -> bool:
        """Stop tracking a request; return whether vLLM must keep its blocks until the workers report it."""
        tracked = self._tracked.pop(request.request_id, None)
        if tracked is None:
            return False
        self._release(tracked)
        if tracked.is_loading:  # vLLM keeps the blocks until the load is reported
            return False
        with self.faults.noted("save"):
            self._save_rest(tracked, blocks)
        if tracked.saving.pending is None:
            return False
        tracked.ended = self._clock()
        self._ending[request.request_id] = tracked
        self._awaited.add(request.request_id)
        return True

    def frees_blocks_soon(self) -> bool:
        """Return whether a finished request's save is expected to end soon, which frees its blocks."""
        newest = next(reversed(self._ending.values()), None)
        return newest is not None and self._clock() - newest.ended < FREES_SECONDS

    def _save_rest(self, tracked: Tracked, blocks: BlockIds) -> None:
        if not tracked.hints.store:
            return
        span = tracked.saving.finish(tracked.final, self._block_tokens, len(self._readers))
        if span is not None:
            tokens = tracked.tokens[: span[1]]
            self._saves.append(self._work(tracked, tokens, *span, blocks))

    def _release(self, tracked: Tracked) -> None:
        with self.faults.noted("release"):
            for scope in tracked.scopes:
                scope.release(tracked.request.request_id)

    def take_report(
        self, report: WorkerReport | None, received: Iterable[str], sent: Iterable[str]
    ) -> None:
        """Process a report; the loads of ``received`` and the saves of ``sent`` requests have ended."""
        if report is not None:
            self._pools |= report.pooled
            self._may_load &= not report.lacks_store
            for request_id, ends in report.saved.items():
                self._answered(request_id, ends)
            for request_id in report.failed:
                self._counts["load_failures"] += 1
                if (tracked := self._tracked.get(request_id)) is not None:
                    tracked.may_load = False  # the next lookup would find the same blocks
                    tracked.saving.saved = 0
        for request_id in received:
            if (tracked := self._tracked.get(request_id)) is not None:
                tracked.is_loading = False
                self._release(tracked)
        for request_id in sent:
            self._ending.pop(request_id, None)

    def _answered(self, request_id: str, ends: Iterable[int]) -> None:
        tracked = self._tracked.get(request_id) or self._ending.get(request_id)
        if tracked is None:
            return
        before = tracked.saving.saved
        for end in ends:
            tracked.saving.answer(end)
        if tracked.saving.saved > before and self._sends_events:
            with self.faults.noted("event"):
                self._tell_stored(tracked, before, tracked.saving.saved)

    def _tell_stored(self, tracked: Tracked, start: int, stop: int) -> None:
        tokens = tracked.tokens[:stop]
        images = images_within(tracked.images, len(tokens))
        # With secrets, block hashes differ between stores; listeners get those of the first rank.
        hashes: list[Any] = list(tracked.scopes[0].hashes(tokens, images=images))
        first = start // self._block_tokens
        lora = tracked.request.lora_request
        self._events.append(
            BlockStored(
                block_hashes=hashes[first:],
                parent_block_hash=hashes[first - 1] if first else None,
                token_ids=tokens[start:].tolist(),
                block_size=self._block_tokens,
                lora_id=None if lora is None else lora.lora_int_id,
                medium=MEDIUM,
                lora_name=None if lora is None else lora.lora_name,
            )
        )

    # ---- events and counters ---------------------------------------------------------------------

    def take_events(self) -> list[KVCacheEvent]:
        """Return the KV events since the last call."""
        events, self._events = self._events, []
        return events

    def reset(self) -> None:
        """Make all stored blocks unreachable before an update of the weights.

        With fixed weights only the planned saves are dropped: an engine resets before it sleeps, and
        its blocks do not survive sleep.
        """
        self._saves = []
        for tracked in self._tracked.values():
            tracked.saving = Saving()
        if self._has_fixed_weights:
            return
        nonce = secrets.token_hex(8)
        self._base = updated(self._base, nonce)
        self._update = nonce
        self._pools = {}
        for tracked in self._tracked.values():
            tracked.namespace = updated(tracked.namespace, nonce)
            try:
                tracked.scopes = tuple(reader.scope(tracked.namespace) for reader in self._readers)
            except Exception as error:
                self.faults.note("weight update", error)
                tracked.may_load = False  # its scopes find blocks of the old weights
        if self._sends_events:
            self._events.append(AllBlocksCleared())

    def stats(self) -> StoreStats:
        """Return the counters since the last call."""
        counts = self._counts + self.faults.counts
        self._counts, self.faults.counts = Counter(), Counter()
        return StoreStats.of(counts)


def _block_ids(lists: Sequence[Sequence[int]]) -> BlockIds:
    return tuple(tuple(ids) for ids in lists)
