"""Tables of at most 80 columns, notes and a chart of a comparison."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from kvstore.footprint.cost import (
    MEASURED_BLOCKS,
    MEASURED_BYTES,
    PUBLISHED_SAVING,
    SNAPSHOTS_PER_TURN,
)
from kvstore.output.chart import Bar, bars
from kvstore.output.sizes import size_text

_LABEL_SHOWN = 20
"""Most characters of a model's label in a table: enough for any preset's name."""
_COLUMNS = 80
_RATE_UNITS = ("B/s", "kB/s", "MB/s", "GB/s", "TB/s")
_PUBLISHED = f"-{float(PUBLISHED_SAVING):.1%}"


Model = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Table:
    """A table and the notes below it, in lines of at most 80 columns."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()


def tables(found: Mapping[str, Any], *, with_groups: bool) -> Iterator[Table]:
    """Yield the tables of a comparison; each model's groups only ``with_groups``."""
    models = found["models"]
    if with_groups:
        yield from map(_groups, models)
    yield _costs(found)
    if len(models) > 1 or models[0]["window_bytes"]:
        yield _turns(found, with_even=with_groups)
    if "context" in models[0]:
        yield _contexts(found)
    if "measured" in models[0]:
        yield _measured(models)


def shown(label: str) -> str:
    """Return a label for a table, shortened; of a path only the distinguishing part."""
    path = PurePath(label)
    if path.name == "config.json" and path.parent.name:
        label = path.parent.name
    elif path.suffix == ".json" or len(path.parts) > 1:
        label = path.name
    return label if len(label) <= _LABEL_SHOWN else f"{label[: _LABEL_SHOWN - 3]}..."


def _table(
    rows: Iterable[Model], columns: Mapping[str, Callable[[Any], str]], *notes: str
) -> Table:
    """Return a table of one function per column, with notes."""
    cells = tuple(tuple(cell(row) for cell in columns.values()) for row in rows)
    return Table(tuple(columns), cells, _noted(*notes))


def _groups(model: Model) -> Table:
    return _table(
        model["groups"],
        {
            shown(model["model"]): lambda group: group["name"],
            "kept as": lambda group: group["lifetime"],
            "entries/token": lambda group: _plain(group["entries_per_token"], 5),
            "entry bytes": lambda group: f"{group['entry_bytes']:,}",
            "bytes/token": lambda group: _plain(group["bytes_per_token"]),
        },
    )


def _costs(found: Mapping[str, Any]) -> Table:
    rate, block = found["prefill_tokens_per_second"], found["block_tokens"]
    return _table(
        found["models"],
        {
            "model": lambda model: shown(model["model"]),
            "B/token": lambda model: _plain(model["bytes_per_token"]),
            "ratio": lambda model: _ratio(model["ratio"]),
            "window": lambda model: _size(model["window_bytes"]),
            f"block of {block:,}": lambda model: size_text(model["block_bytes"]),
            "break even": lambda model: _rate(model["break_even_bytes_per_second"]),
        },
        "B/token: GLOBAL entries, which every later token reads; a store keeps them. "
        "window: one snapshot of the WINDOW entries of the last tokens, in host memory.",
        f"break even: B/token x {rate:,.0f} prefill tokens/s (--prefill-tps); loading at a higher "
        "bandwidth is faster than computing.",
    )


def _turns(found: Mapping[str, Any], *, with_even: bool) -> Table:
    models, turn = found["models"], found["turn_tokens"]
    first = shown(models[0]["model"])
    rows = [
        (
            shown(model["model"]),
            _plain(model["persistent_bytes_per_token"]["without_windows"]),
            _plain(model["persistent_bytes_per_token"]["with_windows"]),
            *(("-", "-", "-") if model is models[0] else _savings(model["first_saves"])),
        )
        for model in models
    ]
    formula = (
        f"with windows: B/token + {SNAPSHOTS_PER_TURN} x window / T, for a store that also keeps snapshots "
        f"at the end of the prompt and of the output, T = {turn:,} new tokens per turn (--turn-tokens). "
        "kvstore keeps none on SSD."
    )
    savings = (
        f"HBM, SSD: change from that model to {first}, on SSD from with windows to without. Last "
        f"column: the longest turn at which SSD is {_PUBLISHED} or better."
    )
    even = [_even(model) for model in models if with_even and model["window_bytes"]]
    notes = _noted(formula, *([savings] if len(models) > 1 else []), *even)
    header = ("model", "B/token", "with windows", "HBM", "SSD", f"T for {_PUBLISHED}")
    return Table(header, tuple(rows), notes)


def _even(model: Model) -> str:
    """Return a note on the turn whose windows are as large as its global KV, and the saving there."""
    text = (
        f"{shown(model['model'])}: {SNAPSHOTS_PER_TURN} windows have as many bytes as the global KV of "
        f"{model['even_turn_tokens']:,.0f} tokens"
    )
    saved = model["first_saves"]["hbm"]
    # Bytes per token are twice the global ones there, so the remaining share halves.
    return f"{text}; at that T, SSD is {_change((1 + saved) / 2)}." if saved > 0 else f"{text}."


def _savings(saves: Mapping[str, Any]) -> tuple[str, str, str]:
    longest = saves["ssd_published_up_to_turn_tokens"]
    if longest is not None:
        reached = f"{longest:,.0f}"
    else:
        reached = "any turn" if saves["hbm"] >= PUBLISHED_SAVING else "never"
    return _change(saves["hbm"]), _change(saves["ssd"]), reached


def _change(saved: float) -> str:
    """Return a saved share as a change, such as ``-74.7%``; a loss has a plus sign."""
    return f"{-saved:+,.1%}" if saved > -10 else f"{-saved:+,.0%}"


def _contexts(found: Mapping[str, Any]) -> Table:
    models = found["models"]
    return _table(
        models,
        {
            f"{models[0]['context']['tokens']:,} tokens": lambda model: shown(model["model"]),
            "global": lambda model: size_text(model["context"]["global_bytes"]),
            "window": lambda model: _size(model["context"]["window_bytes"]),
            "global, in blocks": lambda model: size_text(model["context"]["stored_bytes"]),
        },
    )


def _measured(models: Sequence[Model]) -> Table:
    live = "measured_ssd_bytes_per_token"
    return _table(
        models,
        {
            "measured": lambda model: shown(model["model"]),
            "blocks": lambda model: f"{model['measured']['blocks']:,}",
            "B/token": lambda model: _plain(model["bytes_per_token"]),
            "live on SSD": lambda model: _plain(model[live]),
            "over": lambda model: f"{model[live] / model['bytes_per_token'] - 1:+.2%}",
            "file": lambda model: _plain(model["measured"]["file_bytes_per_token"]),
        },
        "Blocks of random entries, written by the SSD tier and flushed, in bytes per token: pages in "
        f"use, and the file. Per model {MEASURED_BLOCKS:,} blocks or {size_text(MEASURED_BYTES)}, "
        "whichever is less, and at least one.",
    )


def chart(found: Mapping[str, Any]) -> str:
    """Return an SVG file: bytes per token of each model, on a logarithmic scale."""
    models = found["models"]
    return bars(
        [
            Bar(
                shown(model["model"]),
                float(model["bytes_per_token"]),
                _plain(model["bytes_per_token"]) + f"  ({_ratio(model['ratio'])}x)",
            )
            for model in models
        ],
        title="Bytes of global KV per token",
        x_label=f"bytes per token, logarithmic; ratio to {shown(models[0]['model'])}",
    )


def _noted(*notes: str) -> tuple[str, ...]:
    return tuple(line for note in notes for line in textwrap.wrap(note, _COLUMNS))


def _plain(value: float, digits: int = 2) -> str:
    text = f"{value:,.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _ratio(value: float) -> str:
    return f"{value:.3g}" if value < 1 else f"{value:,.2f}" if value < 10 else f"{value:,.1f}"


def _size(size: int) -> str:
    return size_text(size) if size else "-"


def _rate(rate: float) -> str:
    power = min(max(0, math.floor(math.log10(rate) / 3)), len(_RATE_UNITS) - 1)
    return f"{rate / 1000**power:,.3g} {_RATE_UNITS[power]}"
