"""Command ``kvstore demo``."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from kvstore.cli.parameters import Json
from kvstore.cli.terminal import FAILED, OK, complain, progress, write_json, write_line, write_table


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
        UTF-8 file with the prompt. Default: 4,120 tokens of Python's documentation.
    store
        Directory of the store, which is kept; with both engines, of one store each. Default: temporary.
    """
    from kvstore.cli.demo.engines import EngineName
    from kvstore.cli.demo.measure import run_demo
    from kvstore.cli.demo.prompt import read_text
    from kvstore.cli.demo.report import summary, table_rows

    names: tuple[EngineName, ...] = ("transformers", "reference") if engine == "all" else (engine,)
    content = read_text(text) if text is not None else None
    reports = run_demo(names, content, store, progress())
    if as_json:
        write_json([report.as_dict() for report in reports])
    else:
        rows = [table_rows(report) for report in reports]
        columns = [[value for _, value in column] for column in rows]
        labels = [label for label, _ in rows[0]]
        write_table(["", *(r.engine for r in reports)], zip(labels, *columns, strict=True))
        for report in reports:
            write_line("\n" + summary(report))
            if report.continuation:
                write_line(f"It continued with: {report.continuation!r}")
    failures = [failure for report in reports for failure in report.failures]
    for failure in failures:
        complain(failure)
    return FAILED if failures else OK
