"""``python -m tests.torture``: run kinds of torture, and print their findings."""

from __future__ import annotations

import argparse
import json
import logging
import os
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from tests.torture import preload
from tests.torture.kinds import KINDS, SELF_TESTS
from tests.torture.runner import Outcome, run, table

MEMORY = Path("/dev/shm")
"""A file system in memory, for kinds that need no disk."""


def _arguments() -> argparse.Namespace:
    known = {kind.name: kind for kind in (*KINDS, *SELF_TESTS)}
    figures = "\n".join(f"  {k.name:22} {k.small:>6} {k.full:>10,}  {k.about}" for k in KINDS)
    parser = argparse.ArgumentParser(
        prog="python -m tests.torture",
        description="Inject faults into stores, and check their promises.",
        epilog=f"kinds, and their counts at each scale:\n{figures}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "kinds", nargs="*", metavar="KIND", choices=[[], *known], help="default: all"
    )
    parser.add_argument("--count", type=int, help="cases of each kind, instead of a scale")
    parser.add_argument("--scale", choices=["small", "full"], default="small")
    parser.add_argument("--seed", type=int, help="default: a random one, printed")
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--json", action="store_true", help="outcomes as JSON on stdout")
    found = parser.parse_args()
    found.kinds = [known[name] for name in found.kinds] or list(KINDS)
    return found


def _progress(kind: str, began: float) -> Callable[[int, int], None]:
    def show(done: int, total: int) -> None:
        share = int(30 * done / total)
        bar = "#" * share + "." * (30 - share)
        sys.stderr.write(f"\r{kind:22} {bar} {done:,}/{total:,}  {time.monotonic() - began:.0f} s ")
        if done == total:
            sys.stderr.write("\r\033[K")
        sys.stderr.flush()

    return show if sys.stderr.isatty() else lambda done, total: None


def main() -> int:
    """Run the chosen kinds; return 1 if there are findings."""
    given = _arguments()
    seed = secrets.randbelow(1_000_000) if given.seed is None else given.seed
    base = MEMORY if os.access(MEMORY, os.W_OK) else None
    if not preload.is_loaded():
        folder = Path(tempfile.mkdtemp(prefix="torture-", dir=base))
        arguments = sys.argv[1:] + ([] if given.seed is not None else [f"--seed={seed}"])
        preload.restart_with_it("tests.torture", arguments, folder)
    folder = Path(os.environ["TORTURE_FOLDER"])
    disk = Path(tempfile.mkdtemp(prefix="torture-"))
    logging.disable(logging.CRITICAL)  # each of a thousand broken stores logs
    print(f"seed {seed}", file=sys.stderr)
    outcomes: list[Outcome] = []
    for kind in given.kinds:
        count = given.count if given.count is not None else getattr(kind, given.scale)
        where = disk if kind.on_disk else folder
        progress = _progress(kind.name, time.monotonic())
        outcomes.append(run(kind, count, seed, where, first=given.first, progress=progress))
        for text in outcomes[-1].texts:
            print(text, file=sys.stderr)
    is_good = all(outcome.is_good for outcome in outcomes)
    if given.json:
        print(json.dumps({"seed": seed, "outcomes": [asdict(outcome) for outcome in outcomes]}))
    else:
        print(table(outcomes))
    for place in (folder, disk):
        if any(item for kind in given.kinds for item in place.glob(f"{kind.name}-[0-9]*")):
            print(f"stores with findings are kept in {place}", file=sys.stderr)
        else:
            shutil.rmtree(place)
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
