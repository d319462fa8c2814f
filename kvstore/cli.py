"""The ``kvstore`` command: options in, text or JSON out. It decides nothing.

Every command takes ``--json`` and returns its exit status: 0 fine, 1 the check failed, 2 bad usage or
input. Results go to stdout; progress and errors go to stderr, progress only if that is a terminal.
To add a command, decorate a function with ``@app.command`` that calls the module with the logic.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import App, CycloptsError, Parameter

from kvstore.errors import KVStoreError
from kvstore.footprint.cost import BLOCK_TOKENS, PREFILL_TOKENS_PER_SECOND, TURN_TOKENS

OK, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130
"""Exit statuses. The last is what a shell reports after Ctrl-C."""


def _version() -> str:
    from importlib.metadata import version

    return version("kvstore")


Json = Annotated[bool, Parameter(name="--json", negative="")]
File = Annotated[Path, Parameter(allow_leading_hyphen=True)]
"""A file, or ``-`` for a standard stream."""
Files = Annotated[tuple[Path, ...], Parameter(negative="", allow_leading_hyphen=True)]

Names = Annotated[tuple[str, ...], Parameter(negative="", show_default=False)]
Switch = Annotated[bool, Parameter(negative="")]

app = App(
    name="kvstore",
    help="A KV-cache store for LLM inference that knows what each byte of a model's cache is for.",
    version_flags=["--version"],
    version=_version,
    result_action="return_value",
    exit_on_error=False,
    print_error=False,
    help_on_error=False,
    suppress_keyboard_interrupt=False,
)


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
    from kvstore import demo as logic

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
    from kvstore import admin

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
    from kvstore import admin

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
    from kvstore import admin

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
    from kvstore import upkeep

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
    from kvstore import upkeep

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
    from kvstore import archive

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
    from kvstore import archive

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


@app.command
def footprint(
    models: Names = (),
    /,
    *,
    tokens: int | None = None,
    block_tokens: int = BLOCK_TOKENS,
    turn_tokens: int = TURN_TOKENS,
    prefill_tps: float = PREFILL_TOKENS_PER_SECOND,
    measure: Switch = False,
    plot: Path | None = None,
    as_json: Json = False,
) -> int:
    """Tell what models' caches cost: bytes a token, a turn, a context, beside the first model's.

    Parameters
    ----------
    models
        Names of presets, or paths of a Hugging Face config.json. Default: every preset.
    tokens
        Add up a context of so many tokens.
    block_tokens
        Tokens of a block.
    turn_tokens
        New tokens of a turn, prompt and output: what its window snapshots are spread over.
    prefill_tps
        Tokens that the engine computes in a second, for the break-even bandwidth. The default is a
        public figure of DeepSeek-V4.1-Flash on 8 H100.
    measure
        Write real blocks into a temporary store, and tell what they take on disk.
    plot
        Write a chart to this SVG file.
    as_json
        Print one object instead of tables.
    """
    from kvstore.files import PUBLIC, written
    from kvstore.footprint import report
    from kvstore.footprint.cost import Question, blocks_to_measure, compare
    from kvstore.layout import layout
    from kvstore.presets import PRESETS

    question = Question(
        block_tokens=block_tokens,
        turn_tokens=turn_tokens,
        prefill_tokens_per_second=prefill_tps,
        context_tokens=tokens,
    )
    chosen = [(name, layout(name)) for name in models or PRESETS]
    found = compare(chosen, question)
    if measure:
        from kvstore.footprint.measure import measure as run

        counts = [blocks_to_measure(each, block_tokens) for _, each in chosen]
        for (name, each), blocks, row in zip(chosen, counts, found["models"], strict=True):
            with progress_bar(f"measuring {report.shown(name)}") as advance:
                row.update(run(each, block_tokens, blocks, advance).as_dict())
    if plot is not None:
        with written(plot, PUBLIC) as file:
            file.write(report.chart(found).encode())
    if as_json:
        write_json(found)
        return OK
    for table in report.tables(found, with_groups=bool(models)):
        write_table(table.header, table.rows)
        for note in table.notes:
            write_line(note)
    return OK


@app.command
def simulate(
    traces: Files,
    /,
    *,
    policy: str = "lru,arc,s3fifo,optimal",
    size: str = "1%,5%,10%,25%,50%",
    window: Literal["all", "last_half"] = "all",
    semantics: Literal["prefix", "flat"] = "prefix",
    block_size: int = 0,
    bytes_per_token: float | None = None,
    unchained: Literal["refuse", "rekey"] = "refuse",
    as_json: Json = False,
) -> int:
    """Tell what caches of these sizes and policies would have hit on recorded traces.

    A block counts as hit only if all before it are there too, as an engine needs it. "optimal" is the
    bound: it knows the future and may decline to store.

    Parameters
    ----------
    traces
        Files or directories; - is standard input. Plain, gzip, zstd or tar.
    policy
        Names, with commas between them; kvstore policies lists them.
    size
        Sizes, with commas between them: a share of all distinct blocks such as 5%, blocks such as
        20000b, or bytes such as 64GiB.
    window
        Count all requests, or the last half of them with the first as a warm-up.
    semantics
        prefix, or flat: single blocks without an order between them, as other simulators have it.
    block_size
        Tokens of a block, where the trace does not tell.
    bytes_per_token
        What a cached token takes, for sizes in bytes.
    unchained
        Refuse ids that name blocks and not prefixes, or make them names of prefixes.
    as_json
        Print an object, or an array with one for each of several traces, instead of tables.
    """
    from fractions import Fraction

    from kvstore.simulate.run import Simulation
    from kvstore.simulate.run import simulate as run
    from kvstore.simulate.sizes import size_of
    from kvstore.trace.reading import Options, read

    if block_size < 0 or (bytes_per_token is not None and not 0 < bytes_per_token < 2**60):
        msg = f"expected sizes above 0, found blocks of {block_size} tokens of {bytes_per_token} bytes"
        raise ValueError(msg)
    options = Options(block_tokens=block_size, unchained=unchained)
    results = []
    for path in traces:
        progress()(f"reading {path}")
        recorded = read(path, options)
        simulation = Simulation(recorded)
        block_bytes = Fraction(bytes_per_token) * recorded.block_tokens if bytes_per_token else None
        sizes = [size_of(each, recorded.distinct_blocks, block_bytes) for each in _names(size)]
        found = run(
            simulation,
            _names(policy),
            sizes,
            window=window,
            semantics=semantics,
            progress=progress(),
        )
        results.append(found)
        if not as_json:
            _write_simulation(recorded.name, found)
    if as_json:
        write_json(results[0] if len(results) == 1 else results)
    return OK


def _names(text: str) -> list[str]:
    return [each.strip() for each in text.split(",") if each.strip()]


def _write_simulation(name: str, found: Mapping[str, Any]) -> None:
    """Print the rows of one trace, and the ceiling, with the sizes that its LRU curve speaks for."""
    ceiling = {"policy": "ceiling", "size_fraction": 1.0, **found["ceiling"]}
    rows = [
        [
            row["policy"],
            f"{row['size_blocks']:,}",
            *(f"{row[share]:.2%}" for share in _SHARES.values()),
        ]
        for row in [*found["rows"], ceiling]
    ]
    write_line(f"{name}: what was hit, as a share of what was asked")
    write_table(["policy", "blocks", *_SHARES], rows)
    advice = found["recommendation"]
    sizes = [
        (f"{share} of the ceiling", f"{blocks:,}" if blocks is not None else "-")
        for share, blocks in advice["sizes"].items()
    ]
    sizes.append(("knee of the curve", f"{advice['knee']['size_blocks']:,}"))
    write_table(["LRU reaches", "with blocks"], sizes)


_SHARES = {
    "size": "size_fraction",
    "tokens": "prefix_token_hit_ratio",
    "prefix": "prefix_hit_ratio",
    "any block": "block_hit_ratio",
    "requests": "requests_with_hit_ratio",
}
"""Columns of a simulation, and the field that each shows."""


@app.command
def policies(*, as_json: Json = False) -> int:
    """List the eviction policies.

    Parameters
    ----------
    as_json
        Print an array instead of a table.
    """
    from kvstore.policy.registry import POLICIES
    from kvstore.simulate.optimal import SUMMARY
    from kvstore.simulate.run import OPTIMAL

    found = [
        {"policy": name, "summary": entry.summary, "source": entry.source, "online": True}
        for name, entry in POLICIES.items()
    ]
    found.append({"policy": OPTIMAL, "summary": SUMMARY, "source": "Belady 1966", "online": False})
    if as_json:
        write_json(found)
    else:
        write_table(
            ["policy", "what goes", "source"],
            [(str(row["policy"]), str(row["summary"]), str(row["source"])) for row in found],
        )
    return OK


trace = App(name="trace", help="Look into recorded traces, and make others of them.")
app.command(trace)


@trace.command(name="info")
def trace_info(
    file: File,
    /,
    *,
    block_size: int = 0,
    unchained: Literal["refuse", "rekey"] = "refuse",
    as_json: Json = False,
) -> int:
    """Tell what a trace is like: its size, how much is reused, and after how long.

    Parameters
    ----------
    file
        A file or directory; - is standard input.
    block_size
        Tokens of a block, where the trace does not tell.
    unchained
        Refuse ids that name blocks and not prefixes, or make them names of prefixes.
    as_json
        Print one object instead of a table.
    """
    from kvstore.trace.info import info
    from kvstore.trace.reading import Options, read

    found = info(read(file, Options(block_tokens=block_size, unchained=unchained)))
    if as_json:
        write_json(found)
    else:
        write_table(["trace", found.pop("trace")], _flat_facts(found))
    return OK


def _flat_facts(found: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, str]]:
    for name, value in found.items():
        label = f"{above} {name}".replace("_", " ").strip()
        if isinstance(value, Mapping):
            yield from _flat_facts(value, label)
        elif value is None:
            yield label, "-"
        elif isinstance(value, bool):
            yield label, "yes" if value else "no"
        else:
            yield label, f"{value:,.4f}" if isinstance(value, float) else f"{value:,}"


Form = Literal["mooncake", "bailian"]


@trace.command(name="convert")
def trace_convert(
    file: File,
    output: File,
    /,
    *,
    to: Form = "mooncake",
    block_size: int = 0,
    unchained: Literal["refuse", "rekey"] = "refuse",
    as_json: Json = False,
) -> int:
    """Write a trace in another format.

    Parameters
    ----------
    file
        A file or directory; - is standard input.
    output
        A file, compressed if its name ends in .zst or .gz; - is standard output.
    to
        The format.
    block_size
        Tokens of a block, where the trace does not tell.
    unchained
        Refuse ids that name blocks and not prefixes, or make them names of prefixes.
    as_json
        Print an object with the number of requests.
    """
    from kvstore.trace.chained import parents
    from kvstore.trace.reading import Options, read

    made = read(file, Options(block_tokens=block_size, unchained=unchained))
    parents(made)  # a trace of ids that are no prefixes is not passed on as one
    return _write_trace(made, output, to, as_json=as_json)


@trace.command(name="merge")
def trace_merge(
    files: Files,
    /,
    *,
    output: File,
    spread: float = 0.0,
    seed: int = 0,
    as_json: Json = False,
) -> int:
    """Write several traces, which share no block, as one in the order of arrival.

    Parameters
    ----------
    files
        Files or directories.
    output
        A file, compressed if its name ends in .zst or .gz; - is standard output.
    spread
        Seconds from which each trace's beginning is drawn. By default all begin at once.
    seed
        Of the draw.
    as_json
        Print an object with the number of requests.
    """
    from kvstore.trace.cutting import merged
    from kvstore.trace.reading import read

    made = merged([read(file) for file in files], spread, seed)
    return _write_trace(made, output, "mooncake", as_json=as_json)


@trace.command(name="head")
def trace_head(file: File, output: File, /, *, requests: int, as_json: Json = False) -> int:
    """Write the first requests of a trace.

    Parameters
    ----------
    file
        A file or directory; - is standard input.
    output
        A file, compressed if its name ends in .zst or .gz; - is standard output.
    requests
        How many.
    as_json
        Print an object with the number of requests.
    """
    from kvstore.trace.cutting import head
    from kvstore.trace.reading import read

    if requests < 1:
        msg = f"--requests must be at least 1, found {requests}"
        raise ValueError(msg)
    return _write_trace(head(read(file), requests), output, "mooncake", as_json=as_json)


@trace.command(name="sample")
def trace_sample(
    file: File, output: File, /, *, share: float, seed: int = 0, as_json: Json = False
) -> int:
    """Write some of a trace's sessions, each whole; requests without a session are drawn singly.

    Parameters
    ----------
    file
        A file or directory; - is standard input.
    output
        A file, compressed if its name ends in .zst or .gz; - is standard output.
    share
        How many of the sessions, above 0 and at most 1.
    seed
        Of the draw.
    as_json
        Print an object with the number of requests.
    """
    from kvstore.trace.cutting import sample
    from kvstore.trace.reading import read

    return _write_trace(sample(read(file), share, seed), output, "mooncake", as_json=as_json)


@trace.command(name="anonymise")
def trace_anonymise(
    log: File,
    output: File,
    /,
    *,
    key_file: File,
    block_size: int,
    to: Form = "mooncake",
    unit: Literal["us", "ms", "s"] = "us",
    as_json: Json = False,
) -> int:
    """Make a trace of a log of texts or tokens: which prefixes are equal, and nothing else of them.

    Parameters
    ----------
    log
        A file or directory of JSON lines with timestamp, and input (text) or tokens.
    output
        A file, compressed if its name ends in .zst or .gz; - is standard output.
    key_file
        The key of the digests, made if there is none, readable for you alone. It is never written
        into a trace.
    block_size
        Bytes of text in a block, or tokens where tokens are logged.
    to
        The format.
    unit
        What timestamps count.
    as_json
        Print an object with the number of requests.
    """
    from kvstore.trace.anonymise import anonymise, load_key

    made = anonymise(log, load_key(key_file), block_size, unit)
    return _write_trace(made, output, to, as_json=as_json)


def _write_trace(made: Any, output: File, form: str, *, as_json: bool) -> int:
    from kvstore.trace.writing import write

    write(made, output, form)
    facts = {"requests": len(made), "block_references": made.references}
    if str(output) == "-":  # which has the trace itself
        return OK
    if as_json:
        write_json(facts)
    else:
        write_line(
            f"{facts['requests']:,} requests with {facts['block_references']:,} block references"
        )
    return OK


def _reasons(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{reason} {count:,}" for reason, count in counts.items())


# ---- what commands share ---------------------------------------------------------------------------


def progress() -> Callable[[str], None]:
    """Return what says on stderr what is going on, and says nothing if nobody is watching."""
    if not sys.stderr.isatty():
        return lambda _message: None
    from rich.console import Console

    console = Console(stderr=True, highlight=False)
    return lambda message: console.print(message, style="dim", markup=False)


@contextmanager
def progress_bar(title: str) -> Iterator[Callable[[int, int], None]]:
    """Give a function ``(done, total)`` that draws a bar on stderr, or nothing if nobody watches."""
    if not sys.stderr.isatty():
        yield lambda _done, _total: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def write_line(text: str) -> None:
    """Print a paragraph on stdout."""
    sys.stdout.write(_printable(text) + "\n")


def write_json(value: Any) -> None:
    """Print a result as JSON on stdout."""
    # ASCII, because names may hold what the terminal's encoding or UTF-8 itself has no bytes for.
    write_line(json.dumps(value, indent=2))


def _printable(text: str) -> str:
    """Return text with what stdout cannot encode spelled out."""
    encoding = sys.stdout.encoding or "ascii"
    return text.encode(encoding, "backslashreplace").decode(encoding)


def write_table(header: Sequence[str], rows: Any) -> None:
    """Print a table on stdout: labels on the left, values on the right."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table()
    for number, title in enumerate(header):
        side: Literal["left", "right"] = "right" if number else "left"
        table.add_column(title, justify=side, no_wrap=not number, overflow="fold")
    for row in rows:
        table.add_row(*(Text(_printable(cell)) for cell in row))
    Console().print(table)


def complain(message: str) -> None:
    """Print one line on stderr."""
    sys.stderr.write(f"kvstore: {' '.join(message.split())}\n")


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
