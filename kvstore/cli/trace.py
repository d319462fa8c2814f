"""Command group ``kvstore trace``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import App, Parameter

from kvstore.cli.parameters import BlockSize, File, Files, FormatOption, Json, Unchained
from kvstore.cli.terminal import OK, write_json, write_line, write_table

if TYPE_CHECKING:
    from kvstore.trace.columns import Trace

trace = App(
    name="trace", help="Inspect, convert, merge, sample or anonymise traces of recorded requests."
)
Form = Literal["mooncake", "bailian"]
Output = Annotated[
    File, Parameter(help="Output file, compressed if its name ends in .zst or .gz; - for stdout.")
]
Input = Annotated[File, Parameter(help="Trace file or directory; - for standard input.")]
JsonCount = Annotated[Json, Parameter(help="Print an object with the number of requests.")]
Seed = Annotated[int, Parameter(help="Seed of the random numbers.")]
To = Annotated[Form, Parameter(help="Output format.")]


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class _Reading:
    """Options of reading a trace."""

    block_size: BlockSize = 0
    unchained: Unchained = "refuse"
    format: FormatOption = "auto"

    def read(self, file: File) -> Trace:
        from kvstore.trace.reading import Options, read

        options = Options(block_tokens=self.block_size, unchained=self.unchained, form=self.format)
        return read(file, options)


_DEFAULTS = _Reading()


@trace.command(name="info")
def trace_info(file: Input, /, *, options: _Reading = _DEFAULTS, as_json: Json = False) -> int:
    """Print statistics of a trace: size, reuse, and time between uses."""
    from kvstore.trace.info import info

    found = info(options.read(file))
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


@trace.command(name="convert")
def trace_convert(
    file: Input,
    output: Output,
    /,
    *,
    to: To = "mooncake",
    options: _Reading = _DEFAULTS,
    as_json: JsonCount = False,
) -> int:
    """Convert a trace to another format."""
    from kvstore.trace.chained import parents

    made = options.read(file)
    parents(made)  # refuses ids that do not name prefixes
    return _write_trace(made, output, to, as_json=as_json)


@trace.command(name="merge")
def trace_merge(
    files: Files,
    /,
    *,
    output: Output,
    spread: float = 0.0,
    seed: Seed = 0,
    options: _Reading = _DEFAULTS,
    as_json: JsonCount = False,
) -> int:
    """Merge several traces in the order of arrival. Their blocks count as different.

    Parameters
    ----------
    files
        Trace files or directories.
    spread
        Interval in seconds from which each trace's start is drawn. Default: all start at once.
    """
    from kvstore.trace.cutting import merged

    if not 0 <= spread < 2**40:  # NaN is not
        raise ValueError(f"--spread must be seconds from 0 to {2**40:,}, found {spread}")
    _check_seed(seed)
    made = merged([options.read(file) for file in files], spread, seed)
    return _write_trace(made, output, as_json=as_json)


@trace.command(name="head")
def trace_head(
    file: Input,
    output: Output,
    /,
    *,
    requests: int,
    options: _Reading = _DEFAULTS,
    as_json: JsonCount = False,
) -> int:
    """Write the first requests of a trace.

    Parameters
    ----------
    requests
        Number of requests.
    """
    from kvstore.trace.cutting import head

    if requests < 1:
        raise ValueError(f"--requests must be at least 1, found {requests}")
    return _write_trace(head(options.read(file), requests), output, as_json=as_json)


@trace.command(name="sample")
def trace_sample(
    file: Input,
    output: Output,
    /,
    *,
    share: float,
    seed: Seed = 0,
    options: _Reading = _DEFAULTS,
    as_json: JsonCount = False,
) -> int:
    """Write a random sample of a trace's sessions, each whole, and of requests without a session.

    Parameters
    ----------
    share
        Share of the sessions, above 0 and at most 1.
    """
    from kvstore.trace.cutting import sample

    _check_seed(seed)
    return _write_trace(sample(options.read(file), share, seed), output, as_json=as_json)


def _check_seed(seed: int) -> None:
    if seed < 0:
        raise ValueError(f"--seed must be 0 or more, found {seed}")


@trace.command(name="anonymise")
def trace_anonymise(
    log: File,
    output: Output,
    /,
    *,
    key_file: File,
    block_size: int,
    to: To = "mooncake",
    unit: Literal["us", "ms", "s"] = "us",
    as_json: JsonCount = False,
) -> int:
    """Convert a log of texts or tokens to a trace without content, which shows equal prefixes only.

    Parameters
    ----------
    log
        File or directory of JSON lines with timestamp, and input (text) or tokens.
    key_file
        Key of the digests; created if missing, with mode 600. The trace does not contain it.
    block_size
        Block size in bytes of text, or in tokens where tokens are logged.
    unit
        Unit of the timestamps.
    """
    from kvstore.trace.anonymise import anonymise, keep_key, new_key, read_key

    if output.resolve() == key_file.resolve():
        raise ValueError(f"the output would overwrite the key {key_file}; name another file")
    known = read_key(key_file)
    key = known or new_key()
    made = anonymise(log, key, block_size, unit)
    if known is None:  # only after the log has been read without error
        keep_key(key_file, key)
    return _write_trace(made, output, to, as_json=as_json)


def _write_trace(made: Trace, output: File, form: str = "mooncake", *, as_json: bool) -> int:
    from kvstore.trace.writing import write

    write(made, output, form)
    if str(output) == "-":  # stdout has the trace
        return OK
    if as_json:
        write_json({"requests": len(made), "block_references": made.references})
    else:
        write_line(f"{len(made):,} requests with {made.references:,} block references")
    return OK
