"""Window KV of one open store: the window pool under the store's lock, and replay hooks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kvstore.cache.match import Match
from kvstore.identity.block import BlockHash
from kvstore.identity.chain import Prefix
from kvstore.layout.replay import ReplayHook, ReplayRequest, WindowSnapshot
from kvstore.store.context import Context
from kvstore.tier.window import WindowPool, check_snapshot, copy_of


class Windows:
    """Stores windows; returns those of matches from the pool or from a replay hook, which runs without a lock."""

    def __init__(self, context: Context, pool: WindowPool, block_tokens: int) -> None:
        self._context = context
        self._pool = pool
        self._block_tokens = block_tokens

    def put(self, prefix: Prefix, snapshot: WindowSnapshot) -> bool:
        """Copy a window to the pool; return whether it was kept. A replayed one replaces none."""
        is_replayed = snapshot.source == "replay"
        if is_replayed:  # as part of a prefill, without a hook
            rows = min(snapshot.stop - snapshot.start, self._pool.layout.window_tokens)
            self._count_replay(rows)
        return self._put(prefix, snapshot, is_replayed=is_replayed)

    def _put(self, prefix: Prefix, snapshot: WindowSnapshot, *, is_replayed: bool) -> bool:
        with self._context.lock:
            key = prefix.hash_at(snapshot.stop)
            return self._pool.put(key, snapshot, owner=prefix.root, is_replayed=is_replayed)

    def _count_replay(self, tokens: int) -> None:
        with self._context.lock:
            self._context.metrics.replay_requests += 1
            self._context.metrics.replayed_tokens += tokens

    def keys(self) -> frozenset[BlockHash]:
        """Return the hash of every prefix whose window is in the pool."""
        with self._context.lock:
            return self._pool.keys()

    def of(self, pairs: Sequence[tuple[Match, ReplayHook | None]]) -> list[WindowSnapshot]:
        """Return the window of each match; each hook is called once. Raises ``ValueError`` for missing windows."""
        found: dict[int, WindowSnapshot] = {}
        batches: list[tuple[ReplayHook, list[int]]] = []
        for position, (match, hook) in enumerate(pairs):
            if match.replay_start >= match.hit_tokens:
                found[position] = _from_pool(match)
                continue
            if hook is None:
                raise ValueError(
                    f"the window of a hit at {match.hit_tokens} is not in the pool and there is no "
                    "replay hook; pass one, or look up with need_window=True"
                )
            # By equality: each access of a bound method creates a new object.
            batch = next((positions for other, positions in batches if other == hook), None)
            if batch is None:
                batch = []
                batches.append((hook, batch))
            batch.append(position)
        for hook, positions in batches:
            requests = [_request(pairs[position][0]) for position in positions]
            snapshots = _called(hook, requests)
            for position, request, snapshot in zip(positions, requests, snapshots, strict=True):
                self._check(request, snapshot)
                self._count_replay(request.stop - request.start)
                self._put(pairs[position][0].prefix, snapshot, is_replayed=True)
                found[position] = replace(snapshot, source="replay")
        return [found[position] for position in range(len(pairs))]

    def _check(self, request: ReplayRequest, snapshot: object) -> None:
        if not isinstance(snapshot, WindowSnapshot):
            msg = f"the replay hook returned a {type(snapshot).__name__}, expected a WindowSnapshot"
            raise ValueError(msg)
        if snapshot.stop != request.stop or snapshot.start > request.start:
            raise ValueError(
                f"the replay hook returned rows [{snapshot.start}, {snapshot.stop}), "
                f"expected [{request.start}, {request.stop})"
            )
        check_snapshot(snapshot, self._pool.layout, self._block_tokens)


def _called(hook: ReplayHook, requests: list[ReplayRequest]) -> list[WindowSnapshot]:
    """Call a hook; return one snapshot per request. Raises ``ValueError`` for another count."""
    returned: object = hook(requests)
    if not isinstance(returned, Sequence):
        msg = f"the replay hook returned {type(returned).__name__}, expected a list of snapshots"
        raise ValueError(msg)
    snapshots = list(returned)
    if len(snapshots) != len(requests):
        msg = f"the replay hook returned {len(snapshots)} snapshots for {len(requests)} requests"
        raise ValueError(msg)
    return snapshots


def _request(match: Match) -> ReplayRequest:
    floors = match.floors
    return ReplayRequest(
        start=floors.replay_start,
        stop=match.hit_tokens,
        read_floor=floors.read_floor,
        write_floor=floors.write_floor,
        window_write_floor=floors.window_write_floor,
        tokens=match.tokens,
        images=match.prefix.images,
        pages=match.pages,
        request_id=match.request_id,
    )


def _from_pool(match: Match) -> WindowSnapshot:
    if match.snapshot is not None and match.window_hit:
        return replace(copy_of(match.snapshot), source="pool")
    return WindowSnapshot(match.hit_tokens, match.hit_tokens, {}, "none")
