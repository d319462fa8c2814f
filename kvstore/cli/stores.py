"""Commands on one store: statistics, inspection, verification, maintenance, export and import."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from kvstore.cli.parameters import Json
from kvstore.cli.terminal import (
    FAILED,
    OK,
    complain,
    progress_bar,
    write_json,
    write_line,
    write_result,
    write_table,
)

Directory = Annotated[Path, Parameter(help="Directory of the store.")]
Unowned = Annotated[Path, Parameter(help="Directory of the store. No process may own it.")]

_NAMESPACE_COLUMNS = ("model", "weights", "adapter", "tenant", "generation")
_BLOCK_COLUMNS = ("number", "namespace_id", "sequence")
_DIGITS_SHOWN = 12
"""Hex digits of a digest in a table: enough to search for it, and for 80 columns."""


def stats(directory: Directory, /, *, as_json: Json = False) -> int:
    """Show sizes, block counts and namespaces of a store."""
    from kvstore.admin.inspect import store_stats

    found = store_stats(directory)
    if as_json:
        write_json(found)
        return OK
    owner, per_token = found["owner_pid"], found["ssd_bytes_per_token"]
    facts = [
        ("layout", found["layout"] or "unknown"),
        ("owner", f"process {owner}" if owner else "none"),
        ("blocks", f"{found['blocks']:,} of {found['block_tokens']} tokens"),
        ("tokens", f"{found['tokens']:,}"),
        ("live bytes", f"{found['live_bytes']:,}"),
        ("file bytes", f"{found['file_bytes']:,}"),
        ("capacity bytes", _count(found["capacity_bytes"], "unknown")),
        ("bytes per token, by the layout", f"{found['bytes_per_token']:,.2f}"),
        ("bytes per token, on SSD", f"{per_token:,.2f}" if per_token else "-"),
    ]
    write_table(["store", str(directory)], facts)
    if found["ssd_formats"]:
        at_rest = [
            ("formats", ", ".join(f"{name} {f}" for name, f in found["ssd_formats"].items())),
            ("quantized blocks", f"{found['packed_blocks']:,}"),
            ("lossless blocks", f"{found['lossless_blocks']:,}"),
            ("compressed blocks", f"{found['compressed_blocks']:,}"),
            *((f"relative error {bound}", f"{n:,}") for bound, n in found["block_errors"].items()),
        ]
        write_table(["at rest", "blocks"], at_rest)
    spaces = found["namespaces"]
    names = [
        [str(n["id"]), *(str(n.get(name) or "-") for name in _NAMESPACE_COLUMNS)] for n in spaces
    ]
    write_table(["namespace", *_NAMESPACE_COLUMNS], names)
    held = [
        [str(n["id"]), f"{n['blocks']:,}", f"{n['bytes']:,}", _count(n["quota"])] for n in spaces
    ]
    write_table(["namespace", "blocks", "bytes", "quota"], held)
    return OK


def inspect(
    directory: Directory, key: str | None = None, /, *, limit: int = 20, as_json: Json = False
) -> int:
    """Show one block: its record, header and parents. Without a key, list the most recently used blocks.

    Parameters
    ----------
    key
        The start of a block's key, in hex.
    limit
        Most blocks to list.
    """
    from kvstore.admin.inspect import inspect_block, list_blocks

    if limit < 1:
        raise ValueError(f"--limit must be at least 1, found {limit}")
    if key is None:
        blocks = list_blocks(directory, limit)
        if as_json:
            write_json(blocks)
        else:
            rows = [
                [b["key"], *(str(b[name]) for name in _BLOCK_COLUMNS), _short(b["parent"])]
                for b in blocks
            ]
            write_table(["key", "number", "namespace", "last use", "parent"], rows)
        return OK
    block = inspect_block(directory, key)
    if as_json:
        write_json(block)
    else:
        write_table(["block", block["key"]], _block_rows(block))
        parents = block["parents"]
        write_table(["parent", "number"], [(p["key"], str(p["number"])) for p in parents])
        more = block["parent_count"] - len(parents)
        if more:
            write_line(f"and {more:,} more, up to the first block")
    return FAILED if block["fault"] else OK


def _count(number: int | None, unknown: str = "-") -> str:
    return unknown if number is None else f"{number:,}"


def _short(digest: str | None) -> str:
    return digest[:_DIGITS_SHOWN] if digest else "-"


def _error(error: float | None) -> str:
    return "not finite" if error is None else f"{error:.4g}" if error else "-"


def _yes(value: object) -> str:
    return "yes" if value else "no"


def _block_rows(block: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the rows of one block's table: label and value."""
    space, header = block["namespace"], block["header"] or {}
    first, stop = block["tokens"]
    return [
        ("state", block["fault"] or "intact"),
        ("number", str(block["number"])),
        ("tokens", f"{first:,} to {stop - 1:,}"),
        ("model", str(space["model"])),
        ("tenant", str(space.get("tenant") or "-")),
        ("blocks of its namespace", f"{space['blocks']:,}"),
        ("bytes of its namespace", f"{space['bytes']:,}"),
        ("quota of its namespace", _count(space["quota"])),
        ("last use (logical time)", str(block["sequence"])),
        ("stored at (logical time)", str(header.get("sequence", "-"))),
        ("pinned", _yes(block["is_pinned"])),
        ("expires", str(block["expires"] or "never")),
        ("frame bytes", f"{block['frame_bytes']:,}"),
        ("bytes in the file", f"{block['bytes']:,}"),
        ("payload bytes", f"{header.get('payload_bytes', 0):,}"),
        ("quantized at rest", _yes(block["is_packed"])),
        ("compressed at rest", _yes(block["is_compressed"])),
        ("relative error", _error(block["error"])),
        ("page in the file", str(block["page"] or "unknown")),
        ("images", _yes(header.get("has_images"))),
        ("hash", _short(header.get("block_hash"))),
        ("parent hash", _short(header.get("parent_hash"))),
    ]


def verify(directory: Directory, /, *, as_json: Json = False) -> int:
    """Check every block's checksums, identity and parent; exit 1 if any is bad."""
    from kvstore.admin.inspect import verify_store

    with progress_bar("verifying") as advance:
        found = verify_store(directory, advance)
    bad = found["bad"]
    write_result(found, f"{found['blocks']:,} blocks checked, {len(bad):,} bad", as_json=as_json)
    if bad and not as_json:
        write_table(["key", "number", "fault"], [[str(v) for v in b.values()] for b in bad])
    return FAILED if bad else OK


def evict(directory: Unowned, /, *, to: str, as_json: Json = False) -> int:
    """Evict least recently used blocks down to a size; exit 1 if pinned blocks prevent it.

    Parameters
    ----------
    to
        Most bytes in use afterwards: a size such as 4GiB (a number alone is bytes), or a share of the
        store's cap such as 50%.
    """
    from kvstore.admin import upkeep

    found = upkeep.evict(directory, to)
    text = (
        f"{found['evicted_blocks']:,} blocks of {found['evicted_bytes']:,} bytes evicted; "
        f"{found['blocks']:,} blocks and {found['live_bytes']:,} bytes are left"
    )
    write_result(found, text, as_json=as_json)
    if not found["is_reached"]:
        complain(f"pinned blocks keep {directory} above {found['target_bytes']:,} bytes")
    return OK if found["is_reached"] else FAILED


def compact(directory: Unowned, /, *, as_json: Json = False) -> int:
    """Return the free pages of a store to the disk.

    No process may have the store open, and the disk needs room for a copy of the bytes in use. A kill at
    any time leaves the old file or the new one.
    """
    from kvstore.admin import upkeep

    found = upkeep.compact(directory)
    sizes = f"{found['bytes_before']:,} bytes before, {found['bytes_after']:,} now"
    write_result(found, f"{found['blocks']:,} blocks: {sizes}", as_json=as_json)
    return OK


def export(
    directory: Directory,
    file: Path,
    /,
    *,
    namespace: Annotated[tuple[int, ...], Parameter(negative="")] = (),
    as_json: Json = False,
) -> int:
    """Write a store's blocks to one file, each verified; exit 1 if bad ones were left out.

    A process may own the store and use it meanwhile.

    Parameters
    ----------
    file
        A tar, compressed with zstd if the name ends in .zst. It is replaced when it is complete.
    namespace
        Number of a namespace, as kvstore stats shows it; give it once for each. Default: all.
    """
    from kvstore.admin.archive import export_store

    with progress_bar("exporting") as advance:
        found = export_store(directory, file, namespace, advance)
    text = f"{found['blocks']:,} blocks in {found['file_bytes']:,} bytes"
    write_result(found, text, as_json=as_json)
    if found["bad_blocks"]:
        complain(
            f"{found['bad_blocks']:,} blocks were left out, bad ones and their descendants: "
            f"{_reasons(found['bad'])}"
        )
    return FAILED if found["bad_blocks"] else OK


def import_(file: Path, directory: Path, /, *, ssd_bytes: str, as_json: Json = False) -> int:
    """Store an archive's blocks, each verified; exit 1 if it is damaged or blocks were refused.

    Parameters
    ----------
    file
        A file that kvstore export wrote.
    directory
        A store of the same layout that no process owns, or a path for a new one.
    ssd_bytes
        The store's cap, such as 4GiB. A cap that is too small evicts the least recently used blocks, and
        stores the first blocks of a chain that is longer than the store.
    """
    from kvstore.admin.archive import import_store

    with progress_bar("importing") as advance:
        found = import_store(file, directory, ssd_bytes, advance)
    text = (
        f"{found['imported_blocks']:,} blocks imported, {found['present_blocks']:,} already present, "
        f"{found['expired_blocks']:,} expired, {found['evicted_blocks']:,} evicted; "
        f"{found['blocks']:,} blocks are in the store"
    )
    write_result(found, text, as_json=as_json)
    if found["damage"]:
        complain(f"{file} was read only partly: {found['damage']}")
    if found["refused_members"]:
        complain(f"{found['refused_members']:,} members refused: {_reasons(found['refused'])}")
    if found["refused"].get("parent") and found["dropped_blocks"]:
        complain("blocks whose parent was not stored are refused: give a larger --ssd-bytes")
    if found["dropped_blocks"]:
        complain(f"{found['dropped_blocks']:,} blocks not stored: {_reasons(found['dropped'])}")
    is_whole = not (found["damage"] or found["refused_members"] or found["dropped_blocks"])
    return OK if is_whole else FAILED


def _reasons(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{reason} {count:,}" for reason, count in counts.items())
