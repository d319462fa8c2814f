"""Cost of a prompt whose decoder runs over the last rows only.

Question: how many multiply-adds and seconds does prefill take with the encoder over every token and the
          decoder over the last W, relative to all layers over all tokens? And after a hit, with a replay
          of its last W tokens?
Method:   torch's flop counter counts multiply-adds on the executed code: every matrix product, by its
          shape (not norms, softmax, sorting and reads). Both sides project only the last row to logits.
          Seconds are the minimum of ``--rounds``, both sides in turn, on one thread. ``--config full`` has
          6 + 6 narrow layers with every part of the release that computes in a prompt; ``attention`` the
          same without any; ``release`` the release's layer table, 20 + 20, W, top-k and candidates, over
          narrow layers.
Bound:    half of the layers, and W of N tokens of the other half: (1 + W / N) / 2, if both halves cost the
          same. They differ slightly: decoder layers read an entry per token, encoder layers one per two, and
          the entries of the decoder's first owner are computed in both.
Run:      python -m bench.replay.prefill_cost [--config release] [--out FOLDER] [--json]
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from kvstore.cli.terminal import progress_bar, write_table
from kvstore.output.chart import Axis, Mark, Point, Series, chart
from kvstore.reference.config import ReferenceConfig
from kvstore.reference.engine import ReferenceEngine
from kvstore.reference.residual import Streams
from kvstore.reference.state import Chunk, Floors, SequenceState

LENGTHS = (512, 1024, 2048, 4096, 8192)
TURN_TOKENS = 512
"""New tokens of the prompt after a hit."""
CHUNK_TOKENS = 128
"""Rows per pass, which bounds the memory of gathered entries."""

NO_DRAFTS: dict[str, Any] = {
    "num_nextn_predict_layers": 0,
    "dspark_target_layer_ids": (),
    "image_token_id": None,
}
CONFIGS = {
    "attention": ReferenceConfig.tiny(),
    "full": ReferenceConfig.full(**NO_DRAFTS),
    "release": dataclasses.replace(
        ReferenceConfig.release(),
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_attention_heads=4,
        head_dim=32,
        qk_rope_head_dim=16,
        q_lora_rank=48,
        index_n_heads=4,
        index_head_dim=32,
        engram_vocab_size=500,
        engram_n_heads=2,
        engram_head_dim=32,
        window_format="exact",
        **NO_DRAFTS,
    ),
}


@dataclass(frozen=True, slots=True)
class Row:
    """Costs of one prompt length in three ways."""

    tokens: int
    all_madds: int
    prefill_madds: int
    hit_madds: int
    all_seconds: float
    prefill_seconds: float
    hit_seconds: float


class Prompt:
    """A prompt to be run in several ways."""

    def __init__(self, engine: ReferenceEngine, tokens: NDArray[np.uint32]) -> None:
        self._engine = engine
        self._tokens = tokens

    def all_layers(self) -> Tensor:
        """Run all layers over all tokens."""
        state = self._state(Floors.replay(0, 1))
        state.decoder_floor = 0
        return self._run(state)

    def prefill(self) -> Tensor:
        """Run the encoder over all tokens, then the decoder over the last W."""
        return self._run(self._state(Floors.replay(0, 1)))

    def hit(self, before: SequenceState) -> Tensor:
        """Run the rest of a prompt after a hit without a window."""
        hit = len(self._tokens) - TURN_TOKENS
        state = self._state(Floors.replay(hit, self._engine.config.sliding_window))
        state.entries.restore(before.entries.export(0, hit), hit)
        return self._run(state)

    def cold_state(self) -> SequenceState:
        """Return a sequence with all entries written."""
        state = self._state(Floors.replay(0, 1))
        self._run(state)
        return state

    def _run(self, state: SequenceState) -> Tensor:
        """Return the logits of the last row."""
        model, stop = self._engine.model, len(self._tokens)
        encoded = [model.encode([Chunk(state, *part)]) for part in parts(state.floors.start, stop)]
        first = state.decoder_floor - state.floors.start
        rows = Streams.join(encoded).rows(first, None)
        decoded = rows
        for begin, end in parts(state.decoder_floor, stop):
            low = begin - state.decoder_floor
            decoded = model.decode(rows.rows(low, low + end - begin), [Chunk(state, begin, end)])
        return model.logits(decoded.rows(-1))

    def _state(self, floors: Floors) -> SequenceState:
        return SequenceState(
            self._engine.config,
            self._engine.layout,
            self._tokens,
            floors=floors,
            prompt=len(self._tokens),
            dtype=self._engine.dtype,
        )


def parts(start: int, stop: int) -> list[tuple[int, int]]:
    """Split a range into chunks of ``CHUNK_TOKENS``."""
    return list(itertools.pairwise([*range(start, stop, CHUNK_TOKENS), stop]))


def measure(engine: ReferenceEngine, tokens: NDArray[np.uint32], rounds: int) -> Row:
    """Count and time one prompt."""
    prompt = Prompt(engine, tokens)
    before = prompt.cold_state()
    ways = (prompt.all_layers, prompt.prefill, lambda: prompt.hit(before))
    madds = []
    seconds: list[list[float]] = [[] for _ in ways]
    for way in ways:
        with FlopCounterMode(display=False) as counter:
            way()
        # The counter counts addition and multiplication separately.
        madds.append(counter.get_total_flops() // 2)
    for _ in range(rounds):
        for way, taken in zip(ways, seconds, strict=True):
            began = time.perf_counter()
            way()
            taken.append(time.perf_counter() - began)
    return Row(len(tokens), *madds, *(min(taken, default=0.0) for taken in seconds))


def write_rows(rows: list[Row], window: int) -> None:
    """Print a line for each length."""
    write_table(
        ("tokens", "all layers, M madds", "prefill, M madds", "of all", "bound", "hit", "of all"),
        [
            (
                f"{row.tokens:,}",
                f"{row.all_madds / 1e6:,.0f}",
                f"{row.prefill_madds / 1e6:,.0f}",
                f"{row.prefill_madds / row.all_madds:.3f}",
                f"{(1 + window / row.tokens) / 2:.3f}",
                f"{row.hit_madds / 1e6:,.0f}",
                f"{row.hit_madds / row.all_madds:.3f}",
            )
            for row in rows
        ],
    )
    write_table(
        ("tokens", "all layers, s", "prefill, s", "of all", "hit, s", "of all"),
        [
            (
                f"{row.tokens:,}",
                f"{row.all_seconds:.2f}",
                f"{row.prefill_seconds:.2f}",
                f"{row.prefill_seconds / row.all_seconds:.3f}",
                f"{row.hit_seconds:.2f}",
                f"{row.hit_seconds / row.all_seconds:.3f}",
            )
            for row in rows
            if row.all_seconds
        ],
    )
    print(f"hit: all but {TURN_TOKENS} tokens, and the last {window} of it run again")


def draw(rows: list[Row], window: int) -> str:
    """Return the costs as shares of all layers over all tokens, as SVG."""
    curves = {
        "prefill, multiply-adds": [(row, row.prefill_madds / row.all_madds) for row in rows],
        "prefill, seconds": [
            (row, row.prefill_seconds / row.all_seconds) for row in rows if row.all_seconds
        ],
        "bound": [(row, (1 + window / row.tokens) / 2) for row in rows],
        "after a hit, multiply-adds": [(row, row.hit_madds / row.all_madds) for row in rows],
    }
    series = [
        Series(
            name,
            tuple(Point(row.tokens, share, share, share) for row, share in points),
            is_line=True,
            is_dashed=name == "bound",
        )
        for name, points in curves.items()
        if points
    ]
    return chart(
        series,
        title="What a prompt costs, of all layers over all tokens",
        x=Axis("tokens", is_log=True, ticks=tuple((row.tokens, f"{row.tokens:,}") for row in rows)),
        y=Axis("share", ends=(0, 1)),
        marks=(Mark("0.53", 0.53, is_of_y=True),),
        description="Prefill costs about half of running all layers; after a hit, a fraction of that.",
    )


def main() -> None:
    """Measure every length."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--config", choices=CONFIGS, default="full")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, metavar="N")
    parser.add_argument("--rounds", type=int, default=3, help="0: count only")
    parser.add_argument("--out", type=Path, help="folder for prefill-CONFIG.json and .svg")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if min(options.lengths) < TURN_TOKENS:
        parser.error(f"--lengths: at least {TURN_TOKENS}, found {min(options.lengths)}")
    torch.set_num_threads(1)
    config = CONFIGS[options.config]
    rows = []
    with tempfile.TemporaryDirectory() as tables, torch.inference_mode():
        engine = ReferenceEngine(config, dtype=torch.float32, tables=tables)
        rng = np.random.default_rng(1)
        with progress_bar("prompts") as advance:
            for length in options.lengths:
                tokens = rng.integers(0, 256, length).astype(np.uint32)
                rows.append(measure(engine, tokens, options.rounds))
                advance(len(rows), len(options.lengths))
    found = {"config": options.config, "rows": [dataclasses.asdict(row) for row in rows]}
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        name = f"prefill-{options.config}"
        (options.out / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n")
        (options.out / f"{name}.svg").write_text(draw(rows, config.sliding_window))
    if options.json:
        print(json.dumps(found))
    else:
        write_rows(rows, config.sliding_window)


if __name__ == "__main__":
    main()
