"""Loss of rebuilding window KV by bounded replay, on a trained model.

Question: after a hit, how much worse is the next token predicted than by a cold run, for each source of the
          window: the pool, a replay of 0 to 512 tokens, exact halo replay? What is the cost of a decoder
          that starts at the last rows of the prompt, and of FP4?
Method:   held-out text. A context is a hit of H tokens, r more tokens of prompt, and the next
          ``SCORED_TOKENS`` tokens, given and not sampled. H is any even number in ``HITS``, r is in
          ``SUFFIXES``: hits are at and between block boundaries, prompts end inside a group of two and at its
          end. Every way restores the same global entries, those of the cold run. Loss, KL divergence and
          top-1 agreement are means over the scored tokens; each way is compared with the run that differs
          from it in one property. 95 % intervals: contexts resampled ``RESAMPLED`` times.
Bound:    0 bits for ways that are exact (docs/decisions/0010); they run again in binary64, to separate errors
          from rounding.
Run:      python -m bench.replay.quality models/deep/model.npz --out FOLDER
          Contexts in FOLDER are not measured again.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import itertools
import json
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bench.replay.train import load_model, read_text
from kvstore.cli.terminal import progress_bar, write_table
from kvstore.output.chart import Axis, Point, Series, chart
from kvstore.reference.config import ReferenceConfig
from kvstore.reference.engine import ReferenceEngine
from kvstore.reference.model import ReferenceModel
from kvstore.reference.residual import Streams
from kvstore.reference.state import Chunk, Floors, SequenceState, rows_of

T = TypeVar("T")

REPLAYED = (0, 16, 32, 64, 128, 256, 512)
HITS = range(512, 640, 2)
SUFFIXES = range(1, 65)
"""Twice the trained models' windows, so that only some scored tokens read rows of the hit."""
SCORED_TOKENS = 32
DISTANCES = (1, 5, 9, 17, 33, 65, 97)
"""Boundaries of the ranges of tokens since the hit: at most 64 + 32 are scored."""
RESAMPLED = 2000
MILLIBITS = 1000
LEAST_KL = 1e-3
"""Millibits at which the plots begin: of the order of binary32 rounding."""
EXACT_CONTEXTS = 20
SEED = 7
MEASURES = ("loss", "kl", "agreement")


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way to continue after a hit, or to run cold."""

    name: str
    beside: str = "cold"
    """Reference of the comparison."""
    encoder: int | None = None
    """Tokens of the hit that the encoder replays; None: all that a cold run computes."""
    pool: int | None = None
    """Window rows from the pool; only the decoder's inputs are replayed then."""
    decoder: int | None
    """Tokens of the prompt that run through the decoder, at least one; None: all."""
    is_below_decoder: bool = False
    """``encoder`` counts from the decoder's first row, where that lies below the hit."""
    is_bf16: bool = False
    is_exact: bool = False
    """The way must equal its reference."""


def ways_of(config: ReferenceConfig) -> tuple[Way, ...]:
    """Return every way that is measured, references first."""
    window = config.sliding_window
    # A row of the encoder's output depends on that many rows below it, through every layer's window.
    halo = config.last_owner * (window - 1)
    return (
        Way(name="all rows", beside="all rows", decoder=None),
        *(
            Way(name=f"decoder replay {n}", beside="all rows", decoder=n)
            for n in REPLAYED
            if n != window
        ),
        # A cold run of an engine: the decoder starts W tokens before the prompt's end.
        Way(name="cold", beside="all rows", decoder=window),
        Way(name="pool, W rows", pool=window, decoder=window),
        Way(name="pool, 2W-2 rows", pool=2 * window - 2, decoder=window, is_exact=True),
        *(
            Way(name=f"encoder replay {n}", encoder=n, decoder=window, is_exact=n >= halo + window)
            for n in REPLAYED
        ),
        Way(name="halo replay", encoder=halo, is_below_decoder=True, decoder=window, is_exact=True),
        Way(name="as served: both replay W", beside="all rows", encoder=window, decoder=window),
        Way(name="BF16, cold", decoder=window, is_bf16=True),
        Way(
            name="BF16, encoder replay W",
            beside="BF16, cold",
            encoder=window,
            decoder=window,
            is_bf16=True,
        ),
    )


@dataclass(frozen=True, slots=True)
class Context:
    """Text with a hit. Shapes: tokens ``[hit + suffix + SCORED_TOKENS]``."""

    tokens: NDArray[np.uint32]
    hit: int
    suffix: int

    @property
    def prompt(self) -> int:
        """Tokens before those that are scored."""
        return self.hit + self.suffix

    @property
    def scored(self) -> int:
        """Tokens after the prompt."""
        return len(self.tokens) - self.prompt


def contexts(
    text: NDArray[np.uint8], count: int, suffixes: Sequence[int] = SUFFIXES
) -> list[Context]:
    """Return disjoint contexts, evenly spread over a text. Raises ``ValueError`` if it is too short."""
    longest = HITS[-1] + max(suffixes) + SCORED_TOKENS
    stride = len(text) // count
    if stride < longest:
        msg = f"{count} contexts of {longest} tokens need {count * longest:,} bytes of text, found {len(text):,}"
        raise ValueError(msg)
    rng = np.random.default_rng(SEED)
    found = []
    for number in range(count):
        hit, suffix = int(rng.choice(HITS)), int(rng.choice(suffixes))
        start = number * stride
        tokens = text[start : start + hit + suffix + SCORED_TOKENS].astype(np.uint32)
        found.append(Context(tokens, hit, suffix))
    return found


@dataclass(frozen=True)
class Run:
    """Encoded sequence; ``encoded`` has the rows of tokens from ``start`` on."""

    state: SequenceState
    start: int
    encoded: Streams


@dataclass(frozen=True, slots=True)
class Answer:
    """Result of one way for a context. Shapes: logits ``[scored, vocab]``."""

    state: SequenceState
    logits: Tensor


class Bench:
    """Runs one context in every way. It has the model twice: with entries in FP4 and in BF16."""

    def __init__(self, model: Path, tables: Path, dtype: torch.dtype) -> None:
        config, weights = load_model(model, tables, dtype)
        self.config = config
        self.weights = weights
        self.tables = tables
        self.ways = ways_of(config)
        self.dtype = dtype
        self._models: dict[bool, ReferenceModel] = {}
        for is_bf16 in (False, True):
            changed = dataclasses.replace(config, global_format="bf16" if is_bf16 else "fp4")
            engine = ReferenceEngine(changed, weights=weights, dtype=dtype, tables=tables)
            self._models[is_bf16] = engine.model

    def logits(self, context: Context, ways: Sequence[Way]) -> dict[str, Tensor]:
        """Return the predictions of each way for the scored tokens, ``[scored, vocab]``."""
        found = {}
        for is_bf16 in self._models:
            chosen = [way for way in ways if way.is_bf16 == is_bf16]
            if chosen:
                cold = self.cold(context, is_bf16=is_bf16)
                answers = self.answers(context, chosen, cold, {})
                found.update({name: answer.logits for name, answer in answers.items()})
        return found

    def cold(self, context: Context, *, is_bf16: bool = False) -> Run:
        """Run all of a context through the encoder."""
        state = self._state(self._models[is_bf16], context, Floors.replay(0, 1))
        (run,) = self._encode(self._models[is_bf16], [state])
        return run

    def answers(
        self, context: Context, ways: Sequence[Way], cold: Run, sources: Mapping[str, SequenceState]
    ) -> dict[str, Answer]:
        """Return the result of each way for a context; all have entries of one format.

        ``cold`` includes the context's tokens. ``sources`` has the sequences with the hit's entries and window
        of ways that do not use those of the cold run.
        """
        model = self._models[ways[0].is_bf16]
        warm = [way for way in ways if way.encoder is not None or way.pool is not None]
        states = [
            self._restored(model, context, sources.get(way.name, cold.state), way) for way in warm
        ]
        encoded = dict(zip((way.name for way in warm), self._encode(model, states), strict=True))
        chunks, tails = [], []
        for way in ways:
            run = encoded.get(way.name, cold)
            state = run.state
            if way.name not in encoded:
                # Decoder windows of its own, over the same entries.
                state = self._state(model, context, Floors.replay(0, 1))
                state.entries = cold.state.entries
            kept = context.prompt if way.decoder is None else max(1, way.decoder)
            # No row can run for which there is no encoder output.
            state.decoder_floor = max(run.start, context.prompt - kept)
            chunks.append(Chunk(state, state.decoder_floor, len(context.tokens)))
            tails.append(
                run.encoded.rows(chunks[-1].start - run.start, chunks[-1].stop - run.start)
            )
        decoded = model.decode(Streams.join(tails), chunks)
        # The row before a token predicts it.
        scored = [
            decoded.rows(own.stop - context.scored - 1, own.stop - 1) for _, own in rows_of(chunks)
        ]
        logits = model.logits(Streams.join(scored)).split(context.scored)  # type: ignore[no-untyped-call]
        return {
            way.name: Answer(chunk.state, own)
            for way, chunk, own in zip(ways, chunks, logits, strict=True)
        }

    def _encode(self, model: ReferenceModel, states: Sequence[SequenceState]) -> list[Run]:
        """Run the encoder over all states in one pass, each from its start."""
        if not states:
            return []
        chunks = [Chunk(state, state.floors.start, len(state.tokens)) for state in states]
        encoded = model.encode(chunks)
        return [
            Run(chunk.state, chunk.start, encoded.rows(own.start, own.stop))
            for chunk, own in rows_of(chunks)
        ]

    def _restored(
        self, model: ReferenceModel, context: Context, source: SequenceState, way: Way
    ) -> SequenceState:
        """Return a sequence with the source's entries of the hit, and its window if the way pools it."""
        hit, window = context.hit, self.config.sliding_window
        if way.pool is None:
            assert way.encoder is not None
            below = max(0, hit - (context.prompt - window)) if way.is_below_decoder else 0
            state = self._state(model, context, Floors.replay(hit, way.encoder + below))
        else:
            floors = Floors(
                start=min(hit, context.prompt - window),
                hit=hit,
                read_floor=hit - way.pool,
                window_write_floor=hit,
            )
            state = self._state(model, context, floors)
            state.restore_window(source.snapshot(hit - way.pool, hit, "engine"))
        state.entries.restore(source.entries.export(0, hit), hit)
        return state

    def _state(self, model: ReferenceModel, context: Context, floors: Floors) -> SequenceState:
        return SequenceState(
            model.config,
            model.config.layout(self.dtype),
            context.tokens,
            floors=floors,
            prompt=context.prompt,
            dtype=self.dtype,
        )


def score(context: Context, ways: Sequence[Way], logits: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return each way's measures at each scored token, in bits and in tokens."""
    targets = torch.from_numpy(context.tokens[context.prompt :].astype(np.int64))[:, None]
    said = {name: one.double().log_softmax(dim=1) / math.log(2) for name, one in logits.items()}
    found = {}
    for way in ways:
        own, other = said[way.name], said[way.beside]
        measures = {
            "loss": -own.gather(1, targets)[:, 0],
            # Of distributions that are equal, rounding may make a little less than zero.
            "kl": (other.exp2() * (other - own)).sum(dim=1).clamp(min=0),
            "agreement": (own.argmax(1) == other.argmax(1)).double(),
        }
        found[way.name] = {name: [round(v, 7) for v in m.tolist()] for name, m in measures.items()}
    return found


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean over contexts, and the ends of its 95 % interval."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Figures:
    """Cost of one way over another."""

    beside: str
    loss: Interval
    loss_increase: Interval
    kl: Interval
    agreement: Interval
    kl_since_hit: tuple[Interval | None, ...]
    """By ``DISTANCES``; None where no context has a scored token."""


def interval(values: NDArray[np.float64]) -> Interval:
    """Return the mean of one value a context. Shapes: ``[contexts]``, at least one."""
    rng = np.random.default_rng(SEED)
    drawn = rng.integers(0, len(values), (RESAMPLED, len(values)))
    low, high = np.quantile(values[drawn].mean(axis=1), (0.025, 0.975))
    return Interval(float(values.mean()), float(low), float(high))


def interval_where(values: NDArray[np.float64], is_in: NDArray[np.bool_]) -> Interval | None:
    """Return the mean of contexts' means over selected tokens, ``[contexts, SCORED_TOKENS]``; None without any."""
    counts = is_in.sum(axis=1)
    sums = np.where(is_in, values, 0.0).sum(axis=1)
    return interval(sums[counts > 0] / counts[counts > 0]) if counts.any() else None


def summarise(ways: Sequence[Way], rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return every figure of every way, from the results of each context."""
    scored = {
        way.name: {
            name: np.array([row["ways"][way.name][name] for row in rows]) for name in MEASURES
        }
        for way in ways
    }
    since = np.array([row["suffix"] for row in rows])[:, None] + np.arange(SCORED_TOKENS)
    found = {}
    for way in ways:
        own = scored[way.name]
        worse = own["loss"] - scored[way.beside]["loss"]
        figures = Figures(
            beside=way.beside,
            loss=interval(own["loss"].mean(axis=1)),
            loss_increase=interval(worse.mean(axis=1)),
            kl=interval(own["kl"].mean(axis=1)),
            agreement=interval(own["agreement"].mean(axis=1)),
            kl_since_hit=tuple(
                interval_where(own["kl"], (since >= low) & (since < high))
                for low, high in itertools.pairwise(DISTANCES)
            ),
        )
        found[way.name] = dataclasses.asdict(figures)
    return found


def exact_differences(bench: Bench, chosen: Sequence[Context]) -> dict[str, float]:
    """Return the largest difference of the logits of exact ways, in binary64."""
    ways = [way for way in bench.ways if way.is_exact]
    ways += [way for way in bench.ways if way.name in {each.beside for each in ways}]
    most = {way.name: 0.0 for way in ways if way.is_exact}
    with torch.inference_mode():
        for context in chosen:
            logits = bench.logits(context, ways)
            for way in ways:
                if way.is_exact:
                    gap = float((logits[way.name] - logits[way.beside]).abs().max())
                    most[way.name] = max(most[way.name], gap)
    return most


def measured(
    bench: Bench, chosen: Sequence[Context], stored: Path, digest: str, ways: Sequence[Way] = ()
) -> Iterator[dict[str, Any]]:
    """Yield the results of each context, by default of all ways; known ones come from ``stored``."""
    ways = ways or bench.ways

    def measure(context: Context) -> dict[str, Any]:
        scores = score(context, ways, bench.logits(context, ways))
        return {"hit": context.hit, "suffix": context.suffix, "ways": scores}

    keys = [
        f"{digest} {context.hit} {context.suffix} {tuple(ways)}".encode() + context.tokens.tobytes()
        for context in chosen
    ]
    return remembered(measure, chosen, keys, stored)


def remembered(
    measure: Callable[[T], dict[str, Any]], chosen: Sequence[T], keys: Sequence[bytes], stored: Path
) -> Iterator[dict[str, Any]]:
    """Yield the result of ``measure`` for each, or an earlier one from a file of JSON lines, by ``keys``."""
    known = {}
    if stored.exists():
        for line in stored.read_text().splitlines():
            row = json.loads(line)
            known[row["key"]] = row
    with stored.open("a") as file, torch.inference_mode():
        for number, (one, content) in enumerate(zip(chosen, keys, strict=True)):
            key = hashlib.sha256(content).hexdigest()
            row = known.get(key)
            if row is None:
                row = {"key": key, "number": number, **measure(one)}
                file.write(json.dumps(row) + "\n")
                file.flush()
            yield row


def write_tables(found: Mapping[str, Any]) -> None:
    """Print a row for each way."""
    header = ("way", "beside", "bits a byte", "loss, + mbit", "KL, mbit", "same top 1, %")
    rows = [
        (
            name,
            figures["beside"],
            f"{figures['loss']['mean']:.3f}",
            shown(figures["loss_increase"], MILLIBITS, 2),
            shown(figures["kl"], MILLIBITS, 3),
            shown(figures["agreement"], 100, 1),
        )
        for name, figures in found["ways"].items()
    ]
    write_table(header, rows, labels=2)
    print("mbit: thousandths of a bit a byte; in brackets 95 % intervals over contexts")
    for name, gap in found["exact"].items():
        print(f"{name}: logits in binary64 differ by {gap:.1e} at most")


def shown(one: Mapping[str, float], scale: float, digits: int) -> str:
    """Return a mean and its interval as text."""
    mean, low, high = (f"{scale * one[end]:.{digits}f}" for end in ("mean", "low", "high"))
    return f"{mean} [{low}, {high}]"


def point(x: float, one: Mapping[str, float], lowest: float) -> Point:
    """Return a mean and its interval, of bits, as a point of millibits no lower than ``lowest``."""
    mean, low, high = (max(lowest, MILLIBITS * one[end]) for end in ("mean", "low", "high"))
    return Point(x, mean, low, high)


def replayed_curves(found: Mapping[str, Any], measure: str, lowest: float) -> list[Series]:
    """Return a measure against tokens replayed, by the encoder and by the decoder."""
    series = []
    for part in ("encoder", "decoder"):
        points = []
        for count in REPLAYED:
            # A cold run is the decoder's replay of a window.
            is_cold = part == "decoder" and count == found["window"]
            way = found["ways"]["cold" if is_cold else f"{part} replay {count}"]
            points.append(point(place(count), way[measure], lowest))
        series.append(Series(f"{part} replay", tuple(points), is_line=True))
    return series


def place(count: int) -> float:
    """Return the position of a number of tokens on a logarithmic axis; 0 is left of the least."""
    return float(max(REPLAYED[1] // 2, count))


def draw(found: Mapping[str, Any]) -> dict[str, str]:
    """Return the plots as SVG, by name."""
    layers, window = f"{found['encoder_layers']} encoder layers", found["window"]
    across = Axis(
        f"tokens replayed (the window is {window})",
        is_log=True,
        ticks=tuple((place(count), str(count)) for count in REPLAYED),
    )
    kl = Axis(f"KL, mbit a byte (at most {LEAST_KL:g}: at the bottom)", is_log=True)
    since = [
        Series(
            f"replay of {count}",
            tuple(
                point(math.sqrt(low * (high - 1)), one, LEAST_KL)
                for (low, high), one in zip(
                    itertools.pairwise(DISTANCES),
                    found["ways"][f"encoder replay {count}"]["kl_since_hit"],
                    strict=True,
                )
                if one is not None
            ),
            is_line=True,
        )
        for count in (0, window // 2, window, 2 * window)
    ]
    return {
        "kl": chart(
            replayed_curves(found, "kl", LEAST_KL),
            title=f"How far predictions move, {layers}",
            x=across,
            y=kl,
            description="KL divergence falls with the number of tokens replayed.",
        ),
        "loss": chart(
            replayed_curves(found, "loss_increase", -math.inf),
            title=f"What replay costs, {layers}",
            x=across,
            y=Axis("loss increase, mbit a byte"),
            description="The loss increase against the number of tokens replayed.",
        ),
        "since": chart(
            since,
            title=f"Encoder replay, by distance from the hit, {layers}",
            x=Axis("tokens since the hit", is_log=True),
            y=kl,
            description="KL divergence falls with the distance from the hit.",
        ),
    }


def main() -> None:
    """Measure one trained model."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path, help="model.npz of bench.replay.train")
    parser.add_argument("--contexts", type=int, default=512)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if not options.model.is_file():
        parser.error(f"{options.model} does not exist: expected a model.npz of bench.replay.train")
    torch.set_num_threads(1)
    options.out.mkdir(parents=True, exist_ok=True)
    _, held_out = read_text()
    chosen = contexts(held_out, options.contexts)
    digest = hashlib.sha256(options.model.read_bytes()).hexdigest()
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(options.model, Path(folder), torch.float32)
        rows = []
        with progress_bar("contexts") as advance:
            for row in measured(bench, chosen, options.out / "contexts.jsonl", digest):
                rows.append(row)
                advance(len(rows), len(chosen))
        exact = Bench(options.model, Path(folder), torch.float64)
        found = {
            "model": digest,
            "text": {
                "bytes": len(held_out),
                "sha256": hashlib.sha256(held_out.tobytes()).hexdigest(),
            },
            "contexts": len(rows),
            "scored_tokens": SCORED_TOKENS,
            "window": bench.config.sliding_window,
            "encoder_layers": bench.config.last_owner,
            "ways": summarise(bench.ways, rows),
            "exact": exact_differences(exact, chosen[:EXACT_CONTEXTS]),
        }
    (options.out / "replay.json").write_text(json.dumps(found, indent=1) + "\n")
    for name, svg in draw(found).items():
        (options.out / f"replay-{name}.svg").write_text(svg)
    if options.json:
        print(json.dumps(found))
    else:
        write_tables(found)


if __name__ == "__main__":
    main()
