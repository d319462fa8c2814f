"""The ``kvstore`` command: options in, text or JSON out. It decides nothing.

Every command takes ``--json`` and returns its exit status: 0 fine, 1 the check failed, 2 bad usage or
input. Results go to stdout; progress and errors go to stderr, progress only if that is a terminal.
To add a command, decorate a function with ``@app.command`` that calls the module with the logic.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import App, CycloptsError, Parameter

from kvstore.errors import KVStoreError

OK, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130
"""Exit statuses. The last is what a shell reports after Ctrl-C."""


def _version() -> str:
    from importlib.metadata import version

    return version("kvstore")


Json = Annotated[bool, Parameter(name="--json", negative="")]

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


# ---- what commands share ---------------------------------------------------------------------------


def progress() -> Callable[[str], None]:
    """Return what says on stderr what is going on, and says nothing if nobody is watching."""
    if not sys.stderr.isatty():
        return lambda _message: None
    from rich.console import Console

    console = Console(stderr=True, highlight=False)
    return lambda message: console.print(message, style="dim", markup=False)


def write_line(text: str) -> None:
    """Print a paragraph on stdout."""
    sys.stdout.write(text + "\n")


def write_json(value: Any) -> None:
    """Print a result as JSON on stdout."""
    write_line(json.dumps(value, indent=2, ensure_ascii=False))


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
        table.add_row(*(Text(cell) for cell in row))
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
