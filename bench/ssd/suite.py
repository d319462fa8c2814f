"""Speed and size of the SSD tier, relative to the machine and other stores.

Question: what do a durable store, a warm and a cold load, and a lookup cost, and how large are the files?
Method:   interleaved pairs in changing order, the median of the pairs' ratios. The same blocks for all,
          64 per commit, each durable before the next; every figure includes verification of the reads.
Peers:    a file per block, safetensors per block, SQLite, RocksDB, LMCache's local disk backend and
          SGLang's file backend, each with the same sync per batch and the same checksum on reading.
Bound:    pwrite + fdatasync of the same bytes; memcpy of them; O_DIRECT reads of the same blocks.
Run:      python -m bench.ssd [fill steady warm shared cold lookup open index peers] [--blocks N] [--pairs N]
          [--dir DIR] [--lmcache-python PATH] [--sglang-python PATH] [--trace FILE] [--json]
          [--svg FOLDER]. Needs an idle machine. docs/ssd.md explains each figure.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import kvstore
from bench.paired import Row
from bench.ssd import compare as ssd_compare
from bench.ssd import index as ssd_index
from bench.ssd import store as ssd_store
from bench.ssd.compare import PeerRow
from bench.ssd.peers import PEERS
from kvstore.cli.terminal import progress_bar

LAYOUTS = ("deepseek-v4.1-flash", "smollm2-135m")
BLOCKS = 4096
"""Of DeepSeek-V4.1-Flash: 467 MB, or as many bytes of another layout."""
BLOCK_BYTES = 113_920
"""Bytes of such a block. Source: docs/format.md, section 4."""
PAIRS = 11

StoreSection = Callable[[kvstore.Layout, int, Path, int, ssd_store.Advance], list[Row]]
STORES: Mapping[str, StoreSection] = {
    "fill": ssd_store.fill,
    "steady": ssd_store.steady,
    "warm": ssd_store.warm,
    "shared": ssd_store.shared,
    "cold": ssd_store.cold,
}
SECTIONS = (*STORES, "lookup", "open", "index", "peers")


def measure(chosen: argparse.Namespace, folder: Path) -> list[Row]:
    """Return the rows of the chosen sections, peers apart."""
    rows: list[Row] = []
    for section, work in STORES.items():
        for name in chosen.layouts if section in chosen.sections else ():
            with progress_bar(f"{section}, {name}") as advance:
                size = chosen.blocks * BLOCK_BYTES
                rows += work(kvstore.layout(name), size, folder, chosen.pairs, advance)
    if "lookup" in chosen.sections:
        with progress_bar("lookup") as advance:
            rows += ssd_index.lookup(chosen.lookup_blocks, folder, chosen.pairs, advance)
    tree = ssd_index.read_tree(ssd_index.TREE)
    if chosen.trace is not None:
        tree = ssd_index.trace_tree(chosen.trace)
    if "open" in chosen.sections:
        with progress_bar("open") as advance:
            rows += ssd_index.opening(chosen.open_blocks, tree, folder, chosen.pairs, advance)
    if "index" in chosen.sections:
        rows += ssd_index.memory(tree, chosen.trace.name if chosen.trace else "weka_48")
    return rows


def measure_peers(chosen: argparse.Namespace, folder: Path) -> tuple[list[PeerRow], str]:
    """Return a row for each peer, and how the page cache was dropped."""
    pythons = dict.fromkeys(PEERS, Path(sys.executable))
    for name, python in (("LMCache", chosen.lmcache_python), ("SGLang", chosen.sglang_python)):
        pythons[name] = python or pythons[name]
    with progress_bar("peers") as advance:
        return ssd_compare.compare(
            *(list(PEERS), pythons, chosen.blocks, BLOCK_BYTES),
            min(chosen.pairs, ssd_compare.ROUNDS),
            *(folder, advance),
        )


def table(rows: Sequence[Row]) -> list[str]:
    """Return the lines of the table, its header first."""
    header = ["section", "what", "of", "", "unit", "beside", "", "ratio", "quartiles", "bar", ""]
    cells = [header, *(_cells(row) for row in rows)]
    numbers = {3, 6, 7, 9}
    widths = [max(len(line[at]) for line in cells) for at in range(len(cells[0]))]
    return [
        "  ".join(
            text.rjust(width) if at in numbers else text.ljust(width)
            for at, (text, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in cells
    ]


def _cells(row: Row) -> list[str]:
    return [
        *(row.section, row.what, row.of, f"{row.value:.2f}", row.unit, row.beside),
        "" if row.bound is None else f"{row.bound:.2f}",
        "" if row.ratio is None else f"{row.ratio:.2f}",
        "" if row.low is None else f"{row.low:.2f} {row.high:.2f}",
        "" if row.bar is None else f"{row.bar:g}",
        row.note,
    ]


def positive(text: str) -> int:
    """Return a count. Raises ``ValueError`` for text that is none above zero."""
    value = int(text)
    if value < 1:
        raise ValueError(text)
    return value


def options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=", ".join(SECTIONS))
    parser.add_argument("--blocks", type=positive, default=BLOCKS, help="size of a store")
    parser.add_argument("--pairs", type=positive, default=PAIRS)
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--dir", type=Path, help="folder on the disk to measure")
    parser.add_argument("--lookup-blocks", type=positive, default=ssd_index.LOOKUP_BLOCKS)
    parser.add_argument("--open-blocks", type=positive, default=ssd_index.OPEN_BLOCKS)
    parser.add_argument(
        "--trace", type=Path, help="trace for the index; default: weka_48's segments"
    )
    parser.add_argument("--lmcache-python", type=Path, help="a Python that can import LMCache")
    parser.add_argument("--sglang-python", type=Path, help="a Python that can import SGLang")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--svg", type=Path, help="write the chart of the peers to this folder")
    chosen = parser.parse_args(arguments)
    unknown = sorted(set(chosen.sections) - set(SECTIONS))
    if unknown:
        parser.error(f"unknown section {unknown[0]!r}, expected some of {', '.join(SECTIONS)}")
    chosen.sections = chosen.sections or list(SECTIONS)
    return chosen


def main() -> None:
    """Measure, and print a row per figure."""
    chosen = options()
    peers: list[PeerRow] = []
    how = ""
    with tempfile.TemporaryDirectory(prefix="kvstore-ssd-", dir=chosen.dir) as name:
        rows = measure(chosen, Path(name))
        if "peers" in chosen.sections:
            peers, how = measure_peers(chosen, Path(name))
    if chosen.svg is not None and peers:
        chosen.svg.mkdir(parents=True, exist_ok=True)
        picture = ssd_compare.picture(peers)
        (chosen.svg / "ssd-peers.svg").write_text(picture, encoding="utf-8")
    if chosen.json:
        found = {"rows": [asdict(r) for r in rows], "peers": [asdict(p) for p in peers], "how": how}
        print(json.dumps(found))
        return
    if rows:
        print("\n".join(table(rows)))
    if peers:
        print(f"{chosen.blocks} blocks of {BLOCK_BYTES:,} bytes; page cache dropped by {how}")
        print("\n".join(ssd_compare.table(peers)))
