"""Filling an index from the records of a store, without touching a payload."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kvstore.block import BlockKey
from kvstore.index import NEVER, PrefixIndex, Segment
from kvstore.tier.ssd import Record


def rebuild(
    index: PrefixIndex, records: Mapping[BlockKey, Record], stick: Callable[[Segment], None]
) -> list[BlockKey]:
    """Fill an empty index from records; return orphans, deepest first.

    A persisted use stands at the deepest block of its hit only, so a block's recency is the newest
    in its subtree. A segment ends at a fork, behind a pin, and wherever that recency or the expiry
    changes, which is where a request ended. ``stick`` is called with each segment that holds a pinned block.

    Cost: about 3 µs a block.
    """
    by_depth = sorted(records, key=lambda key: records[key].number, reverse=True)
    recency = {key: record.sequence for key, record in records.items()}
    children: dict[BlockKey, list[BlockKey]] = {}
    heads: list[BlockKey] = []
    for key in by_depth:
        record = records[key]
        parent = records.get(record.parent)
        if record.number == 0:
            heads.append(key)
        elif parent is not None and parent.number == record.number - 1:
            children.setdefault(record.parent, []).append(key)
            recency[record.parent] = max(recency[record.parent], recency[key])
    reached = 0
    pending = [(index.root, key) for key in heads]
    while pending:
        above, key = pending.pop()
        run = [key]
        below = children.get(key, [])
        while len(below) == 1 and _continues(records, recency, run[-1], below[0]):
            run.append(below[0])
            below = children.get(below[0], [])
        first = records[key]
        segment = index.insert(
            above,
            b"".join(run),
            now=recency[key],
            namespace_id=first.namespace_id,
            expires=first.expires or NEVER,
        )
        if any(records[k].is_pinned for k in run):
            stick(segment)
        reached += len(run)
        pending.extend((segment, child) for child in below)
    if reached == len(records):
        return []
    present = {key for segment in index for key in segment.block_keys()}
    return [key for key in by_depth if key not in present]


def _continues(
    records: Mapping[BlockKey, Record],
    recency: Mapping[BlockKey, int],
    upper: BlockKey,
    lower: BlockKey,
) -> bool:
    """Say whether a block belongs to the same segment as its parent."""
    above, below = records[upper], records[lower]
    return (
        recency[upper] == recency[lower]
        and above.expires == below.expires
        and above.is_pinned <= below.is_pinned  # a pin ends where the pinned prefix did
    )
