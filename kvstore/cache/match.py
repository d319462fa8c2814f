"""The values that lookups and stores hand back. They hold state, not behaviour of tiers."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvstore import plan
from kvstore.block import KEY_BYTES, BlockHash, BlockKey, ImageSpan, block_key
from kvstore.index import Segment
from kvstore.layout import Layout
from kvstore.replay import WindowSnapshot

if TYPE_CHECKING:
    from kvstore.cache.shared import SharedTiers


@dataclass(frozen=True, slots=True)
class Stored:
    """What became of a ``store``."""

    end: int
    """Leading tokens that are now stored or queued."""
    present: int
    """Blocks offered that were there already."""
    dropped: int
    """Blocks not taken: the queue was full, the parent was missing, or this is a reader."""


class Entries(dict[str, NDArray[np.uint8]]):
    """Entries of tokens ``[0, tokens)``, by GLOBAL group.

    Shapes:
        Each is uint8 ``[len(group.layers), tokens // tokens_per_entry, entry_bytes]``.
    """

    def __init__(self, arrays: Mapping[str, NDArray[np.uint8]], tokens: int) -> None:
        super().__init__(arrays)
        self.tokens = tokens
        """How many leading tokens these entries cover: at most the hit, less after a bad block."""


@dataclass(frozen=True, slots=True)
class Prefix:
    """A request's tokens with the identity of every whole block of them."""

    root: BlockHash
    tokens: NDArray[np.uint32]
    hashes: Sequence[BlockHash]
    images: Sequence[ImageSpan]
    block_tokens: int
    path: bytes = field(default=b"", init=False)
    """Keys of its blocks, end to end: what an index matches."""

    def __post_init__(self) -> None:
        """Cut the hashes down to keys, once."""
        object.__setattr__(self, "path", b"".join([h[:KEY_BYTES] for h in self.hashes]))

    def key(self, number: int) -> BlockKey:
        """Key of block ``number``."""
        return block_key(self.hashes[number])

    def parent_hash(self, number: int) -> BlockHash:
        """Hash of the block before ``number``, the root's for the first."""
        return self.hashes[number - 1] if number else self.root

    def hash_at(self, tokens: int) -> BlockHash:
        """Hash of the prefix that ends at a block boundary."""
        return self.parent_hash(tokens // self.block_tokens)

    def block_ids(self, number: int) -> NDArray[np.uint32]:
        """Token ids of block ``number``."""
        return self.tokens[number * self.block_tokens : (number + 1) * self.block_tokens]


@dataclass(slots=True)
class Hold:
    """What a match protects from eviction until it is released."""

    segments: list[tuple[Any, Segment]] = field(default_factory=list)
    """Pinned segments with the index that each belongs to."""
    snapshot: WindowSnapshot | None = None
    expires: float = 0.0
    request: tuple[BlockHash, str] | None = None
    """The namespace and request id that stand for it as long as it lasts."""
    is_released: bool = False


class Match:
    """The longest reusable prefix of a request, and what an engine needs to use it.

    ``lookup`` takes a lease on what it found; entering the match turns the lease into a pin, and
    leaving drops it. A match belongs to one thread.
    """

    def __init__(
        self,
        shared: SharedTiers,
        prefix: Prefix,
        resident: dict[str, int],
        hit_tokens: int,
        snapshot: WindowSnapshot | None,
        hold: Hold | None,
        request_id: str | None,
        *,
        needs_window: bool = False,
    ) -> None:
        self._shared = shared
        self.prefix = prefix
        self.resident_blocks = resident
        """Leading blocks in each tier, nearest tier first."""
        self.hit_tokens = hit_tokens
        """H: tokens whose GLOBAL entries are at hand; a bad block found later shortens it."""
        self.snapshot = snapshot
        self.hold = hold
        self.request_id = request_id
        self.needs_window = needs_window
        """Whether a hit without its window is of no use, because the engine cannot replay."""
        self.entered = 0
        """How often it was entered and not left again."""
        self.pages: Pages | None = None
        """What ``load`` made of it."""

    @property
    def tokens(self) -> NDArray[np.uint32]:
        """The request's token ids."""
        return self.prefix.tokens

    @property
    def residency(self) -> dict[str, int]:
        """Leading tokens of the hit in each tier, nearest tier first."""
        size = self.prefix.block_tokens
        return {
            tier: min(blocks * size, self.hit_tokens)
            for tier, blocks in self.resident_blocks.items()
        }

    @property
    def window_hit(self) -> bool:
        """Say whether the pool holds the window that ends at the hit."""
        return self.snapshot is not None and self.snapshot.stop == self.hit_tokens > 0

    @property
    def floors(self) -> plan.Floors:
        """The four floors together."""
        start = self.snapshot.start if self.snapshot is not None and self.window_hit else None
        return plan.floors(self.hit_tokens, self._shared.layout.window_tokens, start)

    @property
    def replay_start(self) -> int:
        """Tokens ``[replay_start, H)`` must run again for their window KV; H when none must."""
        return self.floors.replay_start

    @property
    def read_floor(self) -> int:
        """Window rows exist from here."""
        return self.floors.read_floor

    @property
    def write_floor(self) -> int:
        """Global entries below it are settled: rows run again below it overwrite nothing."""
        return self.floors.write_floor

    @property
    def window_write_floor(self) -> int:
        """Window rows below it are settled."""
        return self.floors.window_write_floor

    @property
    def worth_loading(self) -> bool:
        """Say whether using the hit is cheaper than computing it again, by measured speeds."""
        return self._shared.is_worth_loading(self)

    def shrink(self, hit_tokens: int) -> None:
        """Note that only ``hit_tokens`` could be had."""
        if hit_tokens < self.hit_tokens:
            self.hit_tokens = hit_tokens
            self.snapshot = self._shared.window_at(self)

    def __enter__(self) -> Match:
        self._shared.enter(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._shared.leave(self)

    def __repr__(self) -> str:
        return (
            f"Match(hit_tokens={self.hit_tokens}, of={len(self.tokens)}, "
            f"residency={self.residency}, window_hit={self.window_hit})"
        )


class Pages:
    """A page table: which device page holds each block of a prefix.

    It carries a pin of its own: pages stay until ``release``, however long, also after the match
    that they were loaded for has been left.
    """

    def __init__(
        self, shared: SharedTiers, page_ids: Any, tokens: int, hold: Hold, layout_tag: str
    ) -> None:
        self._shared = shared
        self.page_ids = page_ids
        """int64 torch tensor ``[blocks]``: the page of each block."""
        self.tokens = tokens
        """Leading tokens in the pages."""
        self.layout_tag = layout_tag
        self._hold = hold

    @property
    def tensors(self) -> Mapping[str, Any]:
        """Page tensors by group: uint8 ``[pages, layers, entries of a block, entry_bytes]``."""
        tensors: Mapping[str, Any] = self._shared.device.tensors
        return tensors

    @property
    def is_released(self) -> bool:
        """Say whether the pin was dropped, so that the pages may hold anything."""
        return self._hold.is_released

    def release(self) -> None:
        """Drop the pin. Idempotent."""
        self._shared.release(self._hold)

    def __enter__(self) -> Pages:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()


def host_entries(
    layout: Layout, entries: Mapping[str, Any], start: int, stop: int
) -> dict[str, NDArray[np.uint8]]:
    """Return ``entries`` as host arrays after checking that they are the whole of ``[start, stop)``.

    Raises:
        ValueError: naming the group, what was expected and what was found.
    """
    groups = {group.name: group for group in layout.global_groups}
    given: object = entries
    if not isinstance(given, Mapping):
        msg = f"entries must map GLOBAL groups to arrays, found {type(given).__name__}"
        raise ValueError(msg)
    missing, unknown = groups.keys() - entries.keys(), entries.keys() - groups.keys()
    if missing or unknown:
        wrong = (
            f"group {min(missing)!r} is missing"
            if missing
            else f"group {min(unknown)!r} is unknown"
        )
        msg = f"entries: {wrong}, expected exactly {sorted(groups)}, found {sorted(entries)}"
        raise ValueError(msg)
    arrays = {}
    for name, group in groups.items():
        array = _on_host(name, entries[name])
        expected = (len(group.layers), (stop - start) // group.tokens_per_entry, group.entry_bytes)
        if array.shape != expected:
            msg = (
                f"entries of group {name!r} for tokens [{start}, {stop}): expected shape "
                f"{list(expected)} (layers, entries, bytes of an entry), found {list(array.shape)}"
            )
            raise ValueError(msg)
        arrays[name] = array
    return arrays


def _on_host(name: str, array: Any) -> NDArray[np.uint8]:
    torch = sys.modules.get("torch")  # a tensor can only come from a torch that is imported
    kind = getattr(array, "dtype", type(array).__name__)
    if str(kind).removeprefix("torch.") != "uint8":
        msg = f"entries of group {name!r}: expected dtype uint8 (view the values as bytes), found {kind}"
        raise ValueError(msg)
    if torch is not None and isinstance(array, torch.Tensor):
        array = array.detach().cpu().numpy()
    if isinstance(array, np.ndarray) and array.ndim and array.strides[-1] != 1:
        array = np.ascontiguousarray(array)  # frames copy an entry's bytes as one item
    if not isinstance(array, np.ndarray):
        msg = f"entries of group {name!r}: expected a numpy array or a torch tensor, found {type(array).__name__}"
        raise ValueError(msg)
    return array
