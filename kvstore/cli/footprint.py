"""``kvstore footprint``."""

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
    dtype
        Number format of every entry, as an engine's option for its KV cache chooses it: bf16, f16, f32,
        u8 (FP8 or INT8 with scales of the checkpoint), or one with scales in each entry: fp8, mxfp8,
        nvfp4, mxfp4. Default: what the config says.
    measure
        Write real blocks into a temporary store, and tell what they take on disk.
    plot
        Write a chart to this SVG file.
    as_json
        Print one object instead of tables.
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
