"""Write the golden files that do not exist yet: ``python -m tests.golden.make``.

Golden frames and archives say what stores look like and must decode for ever. A file that exists is
never written again; a new format version adds files with a new name.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import kvstore
from kvstore.admin.archive import ARCHIVE_VERSION, export_store
from kvstore.frame.at_rest import Packing, frames_of
from kvstore.frame.format import FORMAT_VERSION, Header
from kvstore.identity.block import BlockHash
from kvstore.layout import LayerGroup, Layout
from tests.builders import mixed_layout, tiny_layout
from tests.stores import BLOCK, WINDOWED, entries_of, open_cache

FOLDER = Path(__file__).parent

FORMATS = {"exact": "zstd", "wide": "zstd", "lossy": "nvfp4"}


def at_rest_layout() -> Layout:
    """Groups that are compressed, packed and left alone at rest, on layers that share them."""
    return Layout(
        model="at rest",
        groups=(
            LayerGroup(name="exact", layers=(0, 1), values=32, entry_format="bf16"),
            LayerGroup(
                name="wide", layers=(1, 2), values=16, entry_format="f32", tokens_per_entry=2
            ),
            LayerGroup(name="lossy", layers=(1,), values=16, entry_format="bf16"),
            LayerGroup(name="bytes", layers=(0, 2), values=3, entry_format="u8"),
        ),
    )


Case = tuple[Layout, int, str | None, Mapping[str, str] | None]
"""A layout, tokens of a block, the name of a preset, and formats at rest."""
CASES: dict[str, Case] = {
    "tiny-2": (tiny_layout(), 2, None, None),
    "tiny-2-images": (tiny_layout(), 2, None, None),
    "mixed-4": (mixed_layout(), 4, None, None),
    "mixed-256": (mixed_layout(), 256, None, None),
    "deepseek-v4.1-flash-2": (
        kvstore.layout("deepseek-v4.1-flash"),
        2,
        "deepseek-v4.1-flash",
        None,
    ),
    "deepseek-v4.1-flash-128": (
        kvstore.layout("deepseek-v4.1-flash"),
        128,
        "deepseek-v4.1-flash",
        None,
    ),
    "smollm2-135m-1": (kvstore.layout("smollm2-135m"), 1, "smollm2-135m", None),
    "compressed-128": (at_rest_layout(), 128, None, FORMATS),
}


def floats(shape: tuple[int, int, int], entry_format: str, salt: int) -> NDArray[np.uint8]:
    """Entries of numbers from -2 to 2, of one entry format, that are exact in float32."""
    width = {"bf16": 2, "f32": 4}[entry_format]
    cells = (*shape[:2], shape[2] // width)
    values = (pattern(cells, salt).astype(np.float32) - 128) * pattern(cells, salt + 1) / 2**14
    bits = values.view(np.uint32) >> (32 - 8 * width)
    return np.ascontiguousarray(bits.astype(f"<u{width}")).view(np.uint8)


def pattern(shape: tuple[int, int, int], salt: int) -> NDArray[np.uint8]:
    """Bytes that differ from layer to layer, entry to entry and column to column."""
    layer, entry, column = np.indices(shape)
    mixed = salt + 89 * layer + 31 * entry + 7 * column + entry * column
    return np.asarray(mixed % 256, np.uint8)


def make(
    name: str,
    layout: Layout,
    block_tokens: int,
    preset: str | None,
    formats: Mapping[str, str] | None = None,
) -> None:
    """Write one frame and what is known about it. Raises ``FileExistsError`` if it is there."""
    frames = frames_of(layout, block_tokens, Packing(formats) if formats else None)
    tokens = (np.arange(block_tokens, dtype=np.uint64) * 2654435761 % 2**32).astype(np.uint32)
    header = Header(
        block_tokens=block_tokens,
        number=3,
        namespace_id=2,
        payload_bytes=frames.payload_bytes,
        block_hash=BlockHash(hashlib.sha256(name.encode()).digest()),
        parent_hash=BlockHash(hashlib.sha256(b"parent of " + name.encode()).digest()),
        sequence=1_000_000_007,
        has_images=name.endswith("-images"),
    )
    entries = {}
    for number, group in enumerate(layout.global_groups):
        shape = (len(group.layers), frames.entries[group.name], group.entry_bytes)
        if formats and group.entry_format in ("bf16", "f32"):
            entries[group.name] = floats(shape, group.entry_format, 17 * number)
        else:
            entries[group.name] = pattern(shape, 17 * number)
    frame = frames.encode(header, tokens, frames.entries_source(entries), 0)
    if formats:
        found = frames.form_of(frame).header(memoryview(frame))
        assert found is not None
        header, entries = found, frames.empty(1)
        frames.scatter(memoryview(frame), frames.entries_target(entries), 0)
    known: dict[str, Any] = {
        "format_version": FORMAT_VERSION,
        "preset": preset,
        "sha256": hashlib.sha256(frame).hexdigest(),
        "fingerprint": layout.fingerprint,
        "groups": [
            {
                "name": group.name,
                "layers": list(group.layers),
                "values": group.values,
                "entry_format": group.entry_format,
                "tokens_per_entry": group.tokens_per_entry,
                "scale_rule": group.scale_rule,
            }
            for group in layout.global_groups
        ],
        "header": {
            "block_tokens": header.block_tokens,
            "number": header.number,
            "namespace_id": header.namespace_id,
            "payload_bytes": header.payload_bytes,
            "block_hash": header.block_hash.hex(),
            "parent_hash": header.parent_hash.hex(),
            "sequence": header.sequence,
            "has_images": header.has_images,
            "is_packed": header.is_packed,
            "error": header.error,
            "is_compressed": header.is_compressed,
        },
        "ssd_formats": dict(formats or {}),
        "tokens": tokens.tolist(),
        "entries": {
            group: {
                "shape": list(array.shape),
                "first": array[0, 0].tobytes().hex(),
                "last": array[-1, -1].tobytes().hex(),
                "sha256": hashlib.sha256(array.tobytes()).hexdigest(),
            }
            for group, array in entries.items()
        },
    }
    with (FOLDER / f"frame-{name}.json").open("x", encoding="utf-8") as file:
        file.write(json.dumps(known, indent=1) + "\n")
    with (FOLDER / f"frame-{name}.bin").open("xb") as file:
        file.write(frame)


ARCHIVE = FOLDER / f"archive-v{ARCHIVE_VERSION}.tar.zst"


def make_archive() -> None:
    """Write an archive of two prompts with one head, one of them pinned, the head used last."""
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "s"
        with open_cache(store, WINDOWED) as cache:
            for tokens in archive_prompts():
                cache.store(tokens, entries_of(WINDOWED, tokens), pin=len(tokens) > 3 * BLOCK)
                cache.flush()
            with cache.lookup(archive_prompts()[0][: BLOCK + 1]):
                pass
        export_store(store, Path(folder) / ARCHIVE.name, (), lambda _done, _total: None)
        content = (Path(folder) / ARCHIVE.name).read_bytes()
    with ARCHIVE.open("xb") as file:
        file.write(content)


def archive_prompts() -> list[NDArray[np.uint32]]:
    """Return the token ids in the golden archive."""
    first = np.arange(3 * BLOCK, dtype=np.uint32) * 7
    return [first, np.concatenate([first[:BLOCK], np.arange(3 * BLOCK, dtype=np.uint32) * 5 + 1])]


def main() -> None:
    """Make what is missing; leave what is there."""
    for case, facts in CASES.items():
        name = f"v{FORMAT_VERSION}-{case}"
        if any((FOLDER / f"frame-{name}.{kind}").exists() for kind in ("json", "bin")):
            sys.stderr.write(f"frame-{name} exists and is left alone\n")
            continue
        make(name, *facts)
    if ARCHIVE.exists():
        sys.stderr.write(f"{ARCHIVE.name} exists and is left alone\n")
    else:
        make_archive()


if __name__ == "__main__":
    main()
