"""``kvstore trace``: what recorded traces are like, and others made of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from cyclopts import App

from kvstore.cli.parameters import BlockSize, File, Files, FormatOption, Json, Unchained
from kvstore.cli.terminal import OK, write_json, write_line, write_table

trace = App(name="trace", help="Look into recorded traces, and make others of them.")


@trace.command(name="info")
def trace_info(
    file: File,
    /,
    *,
    block_size: BlockSize = 0,
    unchained: Unchained = "refuse",
    format_: FormatOption = "auto",
    as_json: Json = False,
) -> int:
    """Tell what a trace is like: its size, how much is reused, and after how long.

    Parameters
    ----------
    file
        A file or directory; - is standard input.
    as_json
        Print one object instead of a table.
    """
    from kvstore.trace.info import info
    from kvstore.trace.reading import Options, read

    found = info(read(file, Options(block_tokens=block_size, unchained=unchained, form=format_)))
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
        elif isinstance(value, float):
            # Shares to four digits, as ratios are; seconds and counts to one.
            yield label, f"{value:.4f}" if abs(value) <= 1 else f"{value:,.1f}"
        else:
            yield label, f"{value:,}"


Form = Literal["mooncake", "bailian"]


@trace.command(name="convert")
def trace_convert(
    file: File,
    output: File,
    /,
    *,
    to: Form = "mooncake",
    block_size: BlockSize = 0,
    unchained: Unchained = "refuse",
    format_: FormatOption = "auto",
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
    as_json
        Print an object with the number of requests.
    """
    from kvstore.trace.chained import parents
    from kvstore.trace.reading import Options, read

    made = read(file, Options(block_tokens=block_size, unchained=unchained, form=format_))
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

    if not 0 <= spread < 2**40:  # NaN is not
        msg = f"--spread must be seconds from 0 to {2**40:,}, found {spread}"
        raise ValueError(msg)
    _check_seed(seed)
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

    _check_seed(seed)
    return _write_trace(sample(read(file), share, seed), output, "mooncake", as_json=as_json)


def _check_seed(seed: int) -> None:
    if seed < 0:
        msg = f"--seed must be 0 or more, found {seed}"
        raise ValueError(msg)


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
    from kvstore.trace.anonymise import anonymise, keep_key, new_key, read_key

    if output.resolve() == key_file.resolve():
        msg = f"the trace would take the place of its key, {key_file}; name another file"
        raise ValueError(msg)
    known = read_key(key_file)
    key = known or new_key()
    made = anonymise(log, key, block_size, unit)
    if known is None:  # not before the log is known to be one
        keep_key(key_file, key)
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
