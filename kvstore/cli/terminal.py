"""Output of commands: results on stdout, progress and errors on stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

OK, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130
"""Exit statuses. The last is that of a shell after Ctrl-C."""


def progress() -> Callable[[str], None]:
    """Return a function that prints messages on stderr if that is a terminal, else nothing."""
    if not sys.stderr.isatty():
        return lambda _message: None
    from rich.console import Console

    console = Console(stderr=True, highlight=False)
    return lambda message: console.print(message, style="dim", markup=False)


@contextmanager
def progress_bar(title: str) -> Iterator[Callable[[int, int], None]]:
    """Yield a function ``(done, total)`` that draws a bar on stderr if that is a terminal."""
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
    # ASCII, because names may have characters outside the terminal's encoding, or lone surrogates.
    write_line(json.dumps(value, indent=2))


def write_result(value: Any, text: str, *, as_json: bool) -> None:
    """Print a result on stdout, as JSON or as a paragraph."""
    if as_json:
        write_json(value)
    else:
        write_line(text)


def _printable(text: str) -> str:
    """Return text with escapes for characters that stdout cannot encode."""
    encoding = sys.stdout.encoding or "ascii"
    return text.encode(encoding, "backslashreplace").decode(encoding)


def write_table(header: Sequence[str], rows: Any, labels: int = 1) -> None:
    """Print a table on stdout: ``labels`` columns of text to the left, then values to the right."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table()
    for number, title in enumerate(header):
        side: Literal["left", "right"] = "right" if number >= labels else "left"
        table.add_column(title, justify=side, no_wrap=not number, overflow="fold")
    for row in rows:
        table.add_row(*(Text(_printable(cell)) for cell in row))
    Console().print(table)


def complain(message: str) -> None:
    """Print one line on stderr."""
    sys.stderr.write(f"kvstore: {' '.join(message.split())}\n")
