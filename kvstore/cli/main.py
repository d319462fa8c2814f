"""The ``kvstore`` command: options in, text or JSON out. It decides nothing.

Every command takes ``--json`` and returns its exit status: 0 fine, 1 the check failed, 2 bad usage or
input. Results go to stdout; progress and errors go to stderr, progress only if that is a terminal.
To add a command, decorate a function with ``@app.command`` that calls the module with the logic; those
of one subject that are many have a module in ``command``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import App, CycloptsError, Parameter

from kvstore.cli.footprint import footprint
from kvstore.cli.parameters import Json
from kvstore.cli.simulate import policies, simulate
from kvstore.cli.terminal import (
    FAILED,
    INTERRUPTED,
    OK,
    USAGE,
    complain,
    progress,
    progress_bar,
    write_json,
    write_line,
    write_table,
)
from kvstore.cli.trace import trace
from kvstore.distribution import VERSION
from kvstore.errors import KVStoreError

app = App(
    name="kvstore",
    help="A KV-cache store for LLM inference that knows what each byte of a model's cache is for.",
    version_flags=["--version"],
    version=VERSION,
    result_action="return_value",
    exit_on_error=False,
    print_error=False,
    help_on_error=False,
    suppress_keyboard_interrupt=False,
)
app.command(footprint)
app.command(simulate)
app.command(policies)
app.command(trace)


@app.command
def demo(
    *,
    engine: Literal["transformers", "reference", "all"] = "all",
    text: Path | None = None,
    store: Path | None = None,
    as_json: Json = False,
) -> int:
    """Answer a long prompt, then answer it again from the store in a second process.

    Parameters
    ----------
    engine
        The model: SmolLM2-135M on transformers, the small V4.1-shaped reference, or both.
    text
        A UTF-8 text file for the prompt. Default: 4,120 tokens of Python's own documentation.
    store
        A directory for the store, kept afterwards; with both engines, one store each inside it.
        Default: a temporary one.
    as_json
        Print an array with one object per engine instead of a table.
    """
    from kvstore.cli import demo as logic

    names: tuple[logic.EngineName, ...] = (
        ("transformers", "reference") if engine == "all" else (engine,)
    )
    content = logic.read_text(text) if text is not None else None
    reports = logic.run_demo(names, content, store, progress())
    if as_json:
        write_json([report.as_dict() for report in reports])
    else:
        rows = [logic.table_rows(report) for report in reports]
        columns = [[value for _, value in column] for column in rows]
        labels = [label for label, _ in rows[0]]
        write_table(["", *(r.engine for r in reports)], zip(labels, *columns, strict=True))
        for report in reports:
            write_line("\n" + logic.summary(report))
            if report.continuation:
                write_line(f"It continued with: {report.continuation!r}")
    failures = [failure for report in reports for failure in report.failures]
    for failure in failures:
        complain(failure)
    return FAILED if failures else OK


@app.command
def stats(directory: Path, /, *, as_json: Json = False) -> int:
    """Tell what is in a store: blocks, tokens, bytes, and whose they are.

    Parameters
    ----------
    directory
        The store.
    as_json
        Print one object instead of tables.
    """
    from kvstore.admin import inspect as admin

    found = admin.store_stats(directory)
    if as_json:
        write_json(found)
        return OK
    per_token = found["ssd_bytes_per_token"]
    facts = [
        ("layout", found["layout"] or "unknown"),
        ("owner", f"process {found['owner_pid']}" if found["owner_pid"] else "nobody now"),
        ("blocks", f"{found['blocks']:,} of {found['block_tokens']} tokens"),
        ("tokens", f"{found['tokens']:,}"),
        ("live bytes", f"{found['live_bytes']:,}"),
        ("file bytes", f"{found['file_bytes']:,}"),
        (
            "capacity bytes",
            f"{found['capacity_bytes']:,}" if found["capacity_bytes"] else "unknown",
        ),
        ("bytes per token, by the layout", f"{found['bytes_per_token']:,.2f}"),
        ("bytes per token, on SSD", f"{per_token:,.2f}" if per_token else "-"),
    ]
    write_table(["store", str(directory)], facts)
    if found["ssd_formats"]:
        packed = [
            ("formats", ", ".join(f"{name} {f}" for name, f in found["ssd_formats"].items())),
            ("packed blocks", f"{found['packed_blocks']:,}"),
            ("lossless blocks", f"{found['lossless_blocks']:,}"),
            ("compressed blocks", f"{found['compressed_blocks']:,}"),
            *((f"relative error {bound}", f"{n:,}") for bound, n in found["block_errors"].items()),
        ]
        write_table(["at rest", "blocks"], packed)
    spaces = found["namespaces"]
    names = [
        [str(n["id"]), *(str(n.get(name) or "-") for name in _NAMESPACE_COLUMNS)] for n in spaces
    ]
    write_table(["namespace", *_NAMESPACE_COLUMNS], names)
    held = [
        [str(n["id"]), f"{n['blocks']:,}", f"{n['bytes']:,}", _quota(n["quota"])] for n in spaces
    ]
    write_table(["namespace", "blocks", "bytes", "quota"], held)
    return OK


def _quota(quota: int | None) -> str:
    return "-" if quota is None else f"{quota:,}"


_LABEL_SHOWN = 20
"""Characters of a name or digest in a table; --json has them whole."""
_NAMESPACE_COLUMNS = ("model", "weights", "adapter", "tenant", "generation")


@app.command
def inspect(
    directory: Path, key: str | None = None, /, *, limit: int = 20, as_json: Json = False
) -> int:
    """Show one block: its record, header and parents. Without a key, list the newest blocks.

    Parameters
    ----------
    directory
        The store.
    key
        The start of a block's key, in hex.
    limit
        How many blocks to list.
    as_json
        Print JSON instead of tables.
    """
    from kvstore.admin import inspect as admin

    if limit < 1:
        msg = f"--limit must be at least 1, found {limit}"
        raise ValueError(msg)
    if key is None:
        blocks = admin.list_blocks(directory, limit)
        if as_json:
            write_json(blocks)
        else:
            rows = [
                [b["key"], *(str(b[name]) for name in _BLOCK_COLUMNS), _short(b["parent"])]
                for b in blocks
            ]
            write_table(["key", "number", "space", "used", "parent"], rows)
        return OK
    block = admin.inspect_block(directory, key)
    if as_json:
        write_json(block)
    else:
        write_table(["block", block["key"]], _block_rows(block))
        parents = block["parents"]
        write_table(["parent", "number"], [(p["key"], str(p["number"])) for p in parents])
        more = block["parent_count"] - len(parents)
        if more:
            write_line(f"and {more:,} more, back to the first block")
    return FAILED if block["fault"] else OK


_BLOCK_COLUMNS = ("number", "namespace_id", "sequence")
_DIGITS_SHOWN = 12
"""Hex digits of a digest in a table: enough to find it again, short enough for 80 columns."""


def _short(digest: str | None) -> str:
    return digest[:_DIGITS_SHOWN] if digest else "-"


def _error(error: float | None) -> str:
    return "not finite" if error is None else f"{error:.4g}" if error else "-"


def _block_rows(block: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return what the table of one block shows: label and value."""
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
        ("quota of its namespace", _quota(space["quota"])),
        ("last use (sequence)", str(block["sequence"])),
        ("stored at (sequence)", str(header.get("sequence", "-"))),
        ("pinned", "yes" if block["is_pinned"] else "no"),
        ("expires", str(block["expires"] or "never")),
        ("frame bytes", f"{block['frame_bytes']:,}"),
        ("bytes in the file", f"{block['bytes']:,}"),
        ("payload bytes", f"{header.get('payload_bytes', 0):,}"),
        ("packed at rest", "yes" if block["is_packed"] else "no"),
        ("compressed at rest", "yes" if block["is_compressed"] else "no"),
        ("relative error of packing", _error(block["error"])),
        ("page in the file", str(block["page"] or "unknown")),
        ("images", "yes" if header.get("has_images") else "no"),
        ("hash", _short(header.get("block_hash"))),
        ("parent hash", _short(header.get("parent_hash"))),
    ]


@app.command
def verify(directory: Path, /, *, as_json: Json = False) -> int:
    """Check every block's checksums, identity and parent; exit 1 if any is bad.

    Parameters
    ----------
    directory
        The store.
    as_json
        Print one object instead of a sentence and a table.
    """
    from kvstore.admin import inspect as admin

    with progress_bar("verifying") as advance:
        found = admin.verify_store(directory, advance)
    bad = found["bad"]
    if as_json:
        write_json(found)
    else:
        write_line(f"{found['blocks']:,} blocks checked, {len(bad):,} bad")
        if bad:
            write_table(["key", "number", "fault"], [[str(v) for v in b.values()] for b in bad])
    return FAILED if bad else OK


@app.command
def evict(directory: Path, /, *, to: str, as_json: Json = False) -> int:
    """Evict blocks that were used least recently; exit 1 if pins keep the store above the size.

    Parameters
    ----------
    directory
        The store. No process may own it.
    to
        What stays in use at most: a size such as 4GiB, or a share of the store's cap such as 50%.
    as_json
        Print one object instead of a sentence.
    """
    from kvstore.admin import upkeep

    found = upkeep.evict(directory, to)
    if as_json:
        write_json(found)
    else:
        write_line(
            f"{found['evicted_blocks']:,} blocks of {found['evicted_bytes']:,} bytes evicted; "
            f"{found['blocks']:,} blocks and {found['live_bytes']:,} bytes are left"
        )
    if not found["is_reached"]:
        complain(f"pinned blocks keep {directory} above {found['target_bytes']:,} bytes")
    return OK if found["is_reached"] else FAILED


@app.command
def compact(directory: Path, /, *, as_json: Json = False) -> int:
    """Give the free pages of a store back to the disk. A kill at any time costs nothing.

    Parameters
    ----------
    directory
        The store. No process may own it or read it; its disk needs room for a copy of what is in use.
    as_json
        Print one object instead of a sentence.
    """
    from kvstore.admin import upkeep

    found = upkeep.compact(directory)
    if as_json:
        write_json(found)
    else:
        write_line(
            f"{found['blocks']:,} blocks: {found['bytes_before']:,} bytes before, "
            f"{found['bytes_after']:,} now"
        )
    return OK


@app.command
def export(
    directory: Path,
    file: Path,
    /,
    *,
    namespace: Annotated[tuple[int, ...], Parameter(negative="")] = (),
    as_json: Json = False,
) -> int:
    """Write a store's blocks to one file, each verified; exit 1 if bad ones were left out.

    Parameters
    ----------
    directory
        The store. A process may own it and go on.
    file
        A tar, compressed with zstd if the name ends in .zst. It is replaced when it is complete.
    namespace
        Number of a namespace, as kvstore stats shows it; give it once for each. Default: all.
    as_json
        Print one object instead of a sentence.
    """
    from kvstore.admin import archive

    with progress_bar("exporting") as advance:
        found = archive.export_store(directory, file, namespace, advance)
    if as_json:
        write_json(found)
    else:
        write_line(f"{found['blocks']:,} blocks in {found['file_bytes']:,} bytes")
    if found["bad_blocks"]:
        complain(f"{found['bad_blocks']:,} bad blocks were left out: {_reasons(found['bad'])}")
    return FAILED if found["bad_blocks"] else OK


@app.command(name="import")
def import_(file: Path, directory: Path, /, *, ssd_bytes: str, as_json: Json = False) -> int:
    """Store an archive's blocks, each verified; exit 1 if it is damaged or blocks were refused.

    Parameters
    ----------
    file
        What kvstore export wrote.
    directory
        A store for the same layout, which no process may own, or where to make one.
    ssd_bytes
        The store's cap, such as 4GiB. Where it is too small, what was used least recently goes.
    as_json
        Print one object instead of a sentence.
    """
    from kvstore.admin import archive

    with progress_bar("importing") as advance:
        found = archive.import_store(file, directory, ssd_bytes, advance)
    if as_json:
        write_json(found)
    else:
        write_line(
            f"{found['imported_blocks']:,} blocks imported, {found['present_blocks']:,} were there, "
            f"{found['expired_blocks']:,} had expired; {found['blocks']:,} blocks are in the store"
        )
    if found["damage"]:
        complain(f"{file} was read only in part: {found['damage']}")
    if found["refused_members"]:
        complain(f"{found['refused_members']:,} members refused: {_reasons(found['refused'])}")
    if found["dropped_blocks"]:
        complain(f"{found['dropped_blocks']:,} blocks not stored: {_reasons(found['dropped'])}")
    is_whole = not (found["damage"] or found["refused_members"] or found["dropped_blocks"])
    return OK if is_whole else FAILED


def _reasons(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{reason} {count:,}" for reason, count in counts.items())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status; errors become one line on stderr."""
    try:
        status = app(list(arguments) if arguments is not None else None)
    except CycloptsError as error:
        complain(f"{str(error).rstrip('.')}; see kvstore --help")
    except BrokenPipeError:
        # Whoever read the output has left. Python would complain once more while it shuts down.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except (KVStoreError, ValueError, OSError) as error:
        complain(str(error))
    except KeyboardInterrupt:
        complain("interrupted")
        return INTERRUPTED
    else:
        return status if isinstance(status, int) else OK
    return USAGE
