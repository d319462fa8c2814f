"""The ``kvstore`` command line application.

Every command has ``--json`` and an exit status: 0 success, 1 a check failed, 2 bad usage or input. Results
are written to stdout, errors to stderr, progress to stderr if that is a terminal.
To add a command, register a function that calls the module with the logic.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from cyclopts import App, CycloptsError
from cyclopts.exceptions import MissingArgumentError, UnknownCommandError

from kvstore.cli import stores
from kvstore.cli.demo.command import demo
from kvstore.cli.footprint import footprint
from kvstore.cli.simulate import policies, simulate
from kvstore.cli.terminal import FAILED, INTERRUPTED, OK, USAGE, complain
from kvstore.cli.trace import trace
from kvstore.distribution import VERSION
from kvstore.errors import KVStoreError

app = App(
    name="kvstore",
    help="Persistent KV cache for LLM inference: prefix KV on GPU and SSD, sliding-window KV in host memory.",
    version_flags=["--version"],
    version=VERSION,
    result_action="return_value",
    exit_on_error=False,
    print_error=False,
    help_on_error=False,
    suppress_keyboard_interrupt=False,
)
for command in (
    *(footprint, simulate, policies, trace, demo),
    *(stores.stats, stores.inspect, stores.verify, stores.evict, stores.compact, stores.export),
):
    app.command(command)
app.command(stores.import_, name="import")


def _usage(error: CycloptsError) -> str:
    """Return the mistake in some arguments, and the command that shows the right ones."""
    text = str(error).rstrip(".")
    if isinstance(error, MissingArgumentError) and error.argument is not None:
        name = error.argument.name
        text = f"{error.keyword} has no value" if error.keyword else f"{name} is missing"
    elif isinstance(error, UnknownCommandError) and str(error).endswith("..."):
        text = text.partition(". Available commands")[0]  # cyclopts lists the first ones only
    return f"{text}; see {' '.join(('kvstore', *(error.command_chain or ())))} --help"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status; errors become one line on stderr."""
    try:
        status = app(list(arguments) if arguments is not None else None)
    except CycloptsError as error:
        complain(_usage(error))
    except BrokenPipeError:
        # Python would report it again when it closes stdout.
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
