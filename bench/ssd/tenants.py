"""Cost of many tenants in a store that holds few: time, space and opening.

Question: is the hundred-thousandth tenant of a small store as expensive as the first, do namespaces of
          evicted tenants use space of blocks, and how long does opening take?
Method:   every tenant stores one block, in batches that are flushed; the time of each batch; the most blocks
          at the end of a batch, relative to one tenant that stores as many; the median of five openings.
Bound:    the median batch of the last tenth within 1.2 of the second tenth's; 95 % of the blocks; 1 s.
Run:      python -m bench.ssd.tenants [--tenants N] [--ssd-bytes SIZE] [--block-bytes N] [--batch N]
          [--dir DIR] [--json]. Needs an idle machine.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import numpy as np

from kvstore import LayerGroup, Layout, Namespace, PrefixCache
from kvstore.admin.inspect import store_stats
from kvstore.cli.terminal import progress_bar

TENANTS = 100_000
SSD_BYTES = "64MiB"
BLOCK_BYTES = 32 << 10
"""A small block: 16 tokens of SmolLM2-135M are 360 KB, 128 of DeepSeek-V4.1-Flash 114 KB."""
BLOCK_TOKENS = 16
BATCH = 100
OPENINGS = 5
FLAT_BAR, ROOM_BAR, OPEN_BAR_SECONDS = 1.2, 0.95, 1.0


@dataclass(frozen=True, slots=True)
class Filled:
    """Times and counts of a run of stores."""

    seconds: list[float]
    """Of each batch, its flush included."""
    most_blocks: int
    """At the end of a batch."""


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures that have limits."""

    tenants: int
    first_seconds: float
    """Median batch of the second tenth: the first fills an empty store."""
    last_seconds: float
    """Median batch of the last tenth."""
    blocks: int
    alone_blocks: int
    """Blocks of a single tenant."""
    namespaces: int
    """Namespaces on the medium at the end."""
    stored_blocks: int
    """Blocks at the end."""
    open_seconds: float

    @property
    def are_met(self) -> bool:
        """Whether all limits are met."""
        return (
            self.last_seconds <= FLAT_BAR * self.first_seconds
            and self.blocks >= ROOM_BAR * self.alone_blocks
            and self.open_seconds <= OPEN_BAR_SECONDS
        )


def layout_of(block_bytes: int) -> Layout:
    """Return a layout whose block has so many bytes of entries."""
    group = LayerGroup(
        name="kv", layers=(0,), values=block_bytes // BLOCK_TOKENS, entry_format="u8"
    )
    return Layout(model="tenants", groups=(group,))


def opened(path: Path, layout: Layout, ssd_bytes: str) -> PrefixCache:
    """Open the store of a run."""
    namespace = Namespace(model="tenants")
    return PrefixCache.open(
        path, layout=layout, namespace=namespace, block_tokens=BLOCK_TOKENS, ssd_bytes=ssd_bytes
    )


def fill(
    path: Path, layout: Layout, chosen: argparse.Namespace, tenants: int, *, is_alone: bool
) -> Filled:
    """Store one block for each tenant, or as many for one."""
    rng = np.random.default_rng(1)
    (group,) = layout.groups
    entries = {"kv": rng.integers(0, 256, (1, BLOCK_TOKENS, group.entry_bytes), np.uint8)}
    taken, most = [], 0
    name = "alone" if is_alone else "tenants"
    with opened(path, layout, chosen.ssd_bytes) as cache, progress_bar(name) as advance:
        for first in range(0, tenants, chosen.batch):
            began = time.perf_counter()
            for number in range(first, min(tenants, first + chosen.batch)):
                space = Namespace(model="tenants", tenant="" if is_alone else f"salt-{number:08}")
                tokens = np.full(BLOCK_TOKENS, number, np.uint32)
                cache.scope(space).store(tokens, entries, wait=60)
            cache.flush()
            taken.append(time.perf_counter() - began)
            most = max(most, cache.stats()["tiers"]["ssd"]["blocks"])
            advance(min(tenants, first + chosen.batch), tenants)
    return Filled(taken, most)


def measure(chosen: argparse.Namespace, folder: Path) -> Figures:
    """Run both stores and the openings."""
    layout = layout_of(chosen.block_bytes)
    path = folder / "many"
    many = fill(path, layout, chosen, chosen.tenants, is_alone=False)
    alone = fill(folder / "alone", layout, chosen, max(1, chosen.tenants // 4), is_alone=True)
    times = []
    for _ in range(OPENINGS):
        began = time.perf_counter()
        opened(path, layout, chosen.ssd_bytes).close()
        times.append(time.perf_counter() - began)
    stats = store_stats(path)
    tenth = max(1, len(many.seconds) // 10)
    return Figures(
        tenants=chosen.tenants,
        first_seconds=median(many.seconds[tenth : 2 * tenth] or many.seconds),
        last_seconds=median(many.seconds[-tenth:]),
        blocks=many.most_blocks,
        alone_blocks=alone.most_blocks,
        namespaces=len(stats["namespaces"]),
        stored_blocks=stats["blocks"],
        open_seconds=median(times),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; 0 if all limits are met."""
    parser = argparse.ArgumentParser(prog="python -m bench.ssd.tenants", description=__doc__)
    parser.add_argument("--tenants", type=int, default=TENANTS)
    parser.add_argument("--ssd-bytes", default=SSD_BYTES)
    parser.add_argument("--block-bytes", type=int, default=BLOCK_BYTES)
    parser.add_argument("--batch", type=int, default=BATCH)
    parser.add_argument("--dir", type=Path, default=None)
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(dir=chosen.dir) as folder:
        found = measure(chosen, Path(folder))
    if chosen.json:
        print(json.dumps({**asdict(found), "are_met": found.are_met}))
    else:
        print(
            f"{found.tenants:,} tenants: a batch of {chosen.batch} takes {found.first_seconds:.3f} s "
            f"at first, {found.last_seconds:.3f} s at the end\n"
            f"blocks at most: {found.blocks:,}, alone {found.alone_blocks:,} "
            f"({found.blocks / found.alone_blocks:.1%})\n"
            f"at the end {found.namespaces:,} namespaces and {found.stored_blocks:,} blocks\n"
            f"opening takes {found.open_seconds:.3f} s\n"
            f"all limits are met: {'yes' if found.are_met else 'no'}"
        )
    return 0 if found.are_met else 1


if __name__ == "__main__":
    sys.exit(main())
