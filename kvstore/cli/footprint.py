"""Command ``kvstore footprint``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from kvstore.cli.parameters import Flag, Json
from kvstore.cli.terminal import (
    OK,
    USAGE,
    complain,
    progress_bar,
    write_json,
    write_line,
    write_table,
)
from kvstore.footprint.cost import BLOCK_TOKENS, PREFILL_TOKENS_PER_SECOND, TURN_TOKENS

Names = Annotated[tuple[str, ...], Parameter(negative="", show_default=False)]


def footprint(
    models: Names = (),
    /,
    *,
    tokens: int | None = None,
    block_tokens: int = BLOCK_TOKENS,
    turn_tokens: int = TURN_TOKENS,
    prefill_tps: float = PREFILL_TOKENS_PER_SECOND,
    dtype: str | None = None,
    measure: Flag = False,
    plot: Path | None = None,
    as_json: Json = False,
) -> int:
    """Compare the cache sizes of models: bytes per token, turn and context, relative to the first model.

    Parameters
    ----------
    models
        Preset names, or paths of a Hugging Face config.json. Default: every preset.
    tokens
        Also compare a context of this many tokens.
    block_tokens
        Tokens of a block.
    turn_tokens
        New tokens per turn, prompt and output: the divisor of window snapshots.
    prefill_tps
        Prefill speed of the engine in tokens per second, for the break-even bandwidth. The default is a
        published figure of DeepSeek-V4.1-Flash on 8 H100.
    dtype
        Number format of all entries: bf16, f16, f32, u8 (FP8 or INT8 with scales in the checkpoint), or a
        format with scales in each entry: fp8, mxfp8, nvfp4, mxfp4. Default: the format of the config.
    measure
        Store random blocks in a temporary store and measure their size on disk.
    plot
        SVG file for a chart.
    """
    from kvstore.errors import ConfigError
    from kvstore.footprint import report
    from kvstore.footprint.cost import Question, blocks_to_measure, compare
    from kvstore.layout import layout
    from kvstore.layout.presets import PRESETS
    from kvstore.output.files import PUBLIC, written

    question = Question(
        block_tokens=block_tokens,
        turn_tokens=turn_tokens,
        prefill_tokens_per_second=prefill_tps,
        context_tokens=tokens,
    )
    chosen, refused = [], []
    for name in models or PRESETS:
        try:
            found_layout = layout(name)
            if dtype is not None:
                found_layout = layout(name, dtype={g.name: dtype for g in found_layout.groups})
            question.check(name, found_layout)
            blocks = blocks_to_measure(found_layout, block_tokens) if measure else 0
        except ConfigError as error:
            refused.append({"model": name, "error": str(error)})
            complain(str(error))
        else:
            chosen.append((name, found_layout, blocks))
    if not chosen:
        return USAGE
    found = compare([(name, each) for name, each, _ in chosen], question) | {"refused": refused}
    if measure:
        from kvstore.footprint.measure import measure as run

        for (name, each, blocks), row in zip(chosen, found["models"], strict=True):
            with progress_bar(f"measuring {report.shown(name)}") as advance:
                row.update(run(each, block_tokens, blocks, advance).as_dict())
    if plot is not None:
        with written(plot, PUBLIC) as file:
            file.write(report.chart(found).encode())
    if as_json:
        write_json(found)
        return USAGE if refused else OK
    for table in report.tables(found, with_groups=bool(models)):
        write_table(table.header, table.rows)
        for note in table.notes:
            write_line(note)
    return USAGE if refused else OK
