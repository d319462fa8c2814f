"""Loss of bounded replay right after a hit, and over many turns that each replay.

Question: is the first token after a hit predicted worse than by a cold run, which a mean over 32 tokens may
          hide? Do errors accumulate over turns that store entries computed from a replayed window?
Method:   held-out text, given and not sampled; ways and measures are those of ``bench.replay.quality``.
          *Near*: prompts that end one token after the hit, 32 tokens scored. *Drift*: conversations of
          ``TURNS`` turns of ``TURN_TOKENS`` tokens. A turn hits all tokens of earlier turns, has one token of
          prompt and scores the rest. In a *chain* each turn stores its own entries; *once* is the same turn
          over a cold run's entries. The excess is chain less once, both relative to the cold run: the cost
          of earlier turns' replays. The KL of the chain relative to once is the size of the change. Slopes
          are least squares over turns, per conversation; late is the last quarter of the turns. 95 %
          intervals: contexts or conversations resampled with replacement.
Bound:    0 bits. Two exact controls must reach it, up to binary32 rounding, which may change the choice of
          an entry: windows from the pool, and replay of the whole halo. Replays of 0 and of two windows are
          further references.
Run:      python -m bench.replay.drift models/deep/model.npz --out FOLDER
          Results in FOLDER are not measured again.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from bench.replay.quality import (
    LEAST_KL,
    MEASURES,
    MILLIBITS,
    SCORED_TOKENS,
    SEED,
    Answer,
    Bench,
    Context,
    Interval,
    Way,
    contexts,
    interval,
    measured,
    point,
    remembered,
    score,
    shown,
)
from bench.replay.train import read_text
from kvstore.cli.terminal import progress_bar, write_table
from kvstore.output.chart import Axis, Series, chart
from kvstore.reference.config import ReferenceConfig
from kvstore.reference.state import SequenceState

TURNS = 40
TURN_TOKENS = 16
"""Half a window of the trained models, as 64 tokens of the release's: short turns replay most often."""
FIRST_HITS = range(256, 320, 2)
"""Hits are at every even position of a window. All turns together have at most the 1,024 trained tokens."""
SUFFIX = 1
"""Tokens between a hit and the first that is scored."""
LATE = 4
"""The last turns, one in so many, are called late."""
PLOTTED_TURNS = 4
"""Turns per point of the plot: the mean of one turn is noisy."""
ONCE = ", once"
Numbers = NDArray[np.float64]


def chains_of(config: ReferenceConfig) -> tuple[Way, ...]:
    """Return the ways of running every turn of a conversation; the controls are exact."""
    window = config.sliding_window
    halo = config.last_owner * (window - 1)
    return (
        *(Way(name=f"replay {n}", encoder=n, decoder=window) for n in (0, window, 2 * window)),
        Way(name="pool kept", pool=2 * window - 2, decoder=window, is_exact=True),
        Way(name="halo replay", encoder=halo, is_below_decoder=True, decoder=window, is_exact=True),
    )


def ways_of(config: ReferenceConfig) -> tuple[Way, ...]:
    """Return the ways of one turn: cold, the chains, and once each chain that is not exact."""
    chains = chains_of(config)
    once = [dataclasses.replace(way, name=way.name + ONCE) for way in chains if not way.is_exact]
    cold = Way(name="cold", beside="cold", decoder=config.sliding_window)
    return (cold, *once, *chains)


@dataclass(frozen=True, slots=True)
class Conversation:
    """Text with a hit at the beginning of each turn. Shapes: ``[first_hit + turns * TURN_TOKENS]``."""

    tokens: NDArray[np.uint32]
    first_hit: int

    @property
    def turns(self) -> list[Context]:
        """Each turn after all before it."""
        ends = range(self.first_hit + TURN_TOKENS, len(self.tokens) + 1, TURN_TOKENS)
        return [Context(self.tokens[:end], end - TURN_TOKENS, SUFFIX) for end in ends]


def conversations(text: NDArray[np.uint8], count: int, turns: int = TURNS) -> list[Conversation]:
    """Return disjoint conversations, evenly spread over a text. Raises ``ValueError`` if it is too short."""
    longest = FIRST_HITS[-1] + turns * TURN_TOKENS
    stride = len(text) // count
    if stride < longest:
        msg = f"{count} conversations of {longest} tokens need {count * longest:,} bytes of text, found {len(text):,}"
        raise ValueError(msg)
    rng = np.random.default_rng(SEED)
    found = []
    for start in range(0, count * stride, stride):
        first = int(rng.choice(FIRST_HITS))
        tokens = text[start : start + first + turns * TURN_TOKENS].astype(np.uint32)
        found.append(Conversation(tokens, first))
    return found


def answered(
    bench: Bench, conversation: Conversation
) -> Iterator[tuple[Context, SequenceState, dict[str, Answer]]]:
    """Yield each turn with the cold run's sequence and the result of every way."""
    ways, chains = ways_of(bench.config), chains_of(bench.config)
    turns = conversation.turns
    cold = bench.cold(turns[-1])
    sources: dict[str, SequenceState] = {}
    for turn in turns:
        answers = bench.answers(turn, ways, cold, sources)
        yield turn, cold.state, answers
        sources = {way.name: answers[way.name].state for way in chains}


def converse(bench: Bench, conversation: Conversation) -> dict[str, Any]:
    """Return each way's measures by turn: means of its scored tokens, and of its stored bytes.

    ``first_loss`` and ``first_kl`` are those of the first scored token. ``moved_kl`` is the KL of a chain
    relative to once, of exact chains relative to the cold run.
    """
    ways, chains = ways_of(bench.config), chains_of(bench.config)
    moved = [
        way if way.is_exact else dataclasses.replace(way, beside=way.name + ONCE) for way in chains
    ]
    found: dict[str, dict[str, list[float]]] = {way.name: {} for way in ways}
    for turn, cold, answers in answered(bench, conversation):
        logits = {name: answer.logits for name, answer in answers.items()}
        scores, beside_once = score(turn, ways, logits), score(turn, moved, logits)
        for way in ways:
            means = {name: float(np.mean(scores[way.name][name])) for name in MEASURES}
            means |= {f"first_{name}": scores[way.name][name][0] for name in ("loss", "kl")}
            means["changed"] = changed(answers[way.name].state, cold, turn)
            if way in chains:
                means["moved_kl"] = float(np.mean(beside_once[way.name]["kl"]))
            for name, value in means.items():
                found[way.name].setdefault(name, []).append(round(value, 8))
    return {"first_hit": conversation.first_hit, "ways": found}


def changed(own: SequenceState, cold: SequenceState, turn: Context) -> float:
    """Return the share of bytes of a turn's entries that differ from the cold run's."""
    end = len(turn.tokens)
    mine, theirs = (state.entries.export(turn.hit, end) for state in (own, cold))
    differ = sum(int((mine[name] != theirs[name]).sum()) for name in mine)
    return differ / sum(stored.size for stored in mine.values())


@dataclass(frozen=True, slots=True)
class Near:
    """Cost of one way over the cold run in the tokens after a hit, in bits per byte."""

    loss_increase: Interval
    """Mean of ``SCORED_TOKENS``."""
    kl: Interval
    first_loss_increase: Interval
    """Of the first token that is predicted after the hit."""
    first_kl: Interval


@dataclass(frozen=True, slots=True)
class Drift:
    """Cost of one chain in bits per byte, means by turn. The excess is None for exact ways."""

    kl: list[float]
    late_kl: Interval
    late_loss_increase: Interval
    """Relative to the cold run."""
    first_loss_increase: Interval
    """Of the first token of every turn, relative to the cold run."""
    first_kl: Interval
    excess_kl: list[float] | None
    excess_kl_a_turn: Interval | None
    late_excess_kl: Interval | None
    late_excess_loss: Interval | None
    moved_kl: list[float]
    """Relative to once; of exact ways, to the cold run."""
    moved_kl_a_turn: Interval
    late_moved_kl: Interval
    early_changed: Interval
    """Share of the bytes stored in the first quarter of the turns that are not the cold run's."""
    late_changed: Interval


def near_figures(ways: Sequence[Way], rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the figures of every way right after a hit, from the results of each context."""
    found = {}
    for way in ways:
        own, cold = (
            {name: np.array([row["ways"][which][name] for row in rows]) for name in MEASURES}
            for which in (way.name, way.beside)
        )
        worse = own["loss"] - cold["loss"]
        figures = Near(
            loss_increase=interval(worse.mean(axis=1)),
            kl=interval(own["kl"].mean(axis=1)),
            first_loss_increase=interval(worse[:, 0]),
            first_kl=interval(own["kl"][:, 0]),
        )
        found[way.name] = dataclasses.asdict(figures)
    return found


def slopes(values: Numbers) -> Numbers:
    """Return the least-squares slope over turns of each conversation. Shapes: ``[conversations, turns]``."""
    turns = np.arange(values.shape[1]) - (values.shape[1] - 1) / 2
    found: Numbers = values @ turns / (turns @ turns)
    return found


def drift_figures(ways: Sequence[Way], rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the figures of every chain, from the results of each conversation."""

    def of(name: str, measure: str) -> Numbers:
        return np.array([row["ways"][name][measure] for row in rows])

    found = {}
    for way in ways:
        own = {name: of(way.name, name) for name in rows[0]["ways"][way.name]}
        worse = own["loss"] - of(way.beside, "loss")
        first_worse = own["first_loss"] - of(way.beside, "first_loss")
        late = slice(-max(1, worse.shape[1] // LATE), None)
        early = slice(0, max(1, worse.shape[1] // LATE))
        excess = late_loss = None
        if not way.is_exact:
            excess = own["kl"] - of(way.name + ONCE, "kl")
            late_loss = interval((own["loss"] - of(way.name + ONCE, "loss"))[:, late].mean(axis=1))
        figures = Drift(
            kl=own["kl"].mean(axis=0).tolist(),
            late_kl=interval(own["kl"][:, late].mean(axis=1)),
            late_loss_increase=interval(worse[:, late].mean(axis=1)),
            first_loss_increase=interval(first_worse.mean(axis=1)),
            first_kl=interval(own["first_kl"].mean(axis=1)),
            excess_kl=None if excess is None else excess.mean(axis=0).tolist(),
            excess_kl_a_turn=None if excess is None else interval(slopes(excess)),
            late_excess_kl=None if excess is None else interval(excess[:, late].mean(axis=1)),
            late_excess_loss=late_loss,
            moved_kl=own["moved_kl"].mean(axis=0).tolist(),
            moved_kl_a_turn=interval(slopes(own["moved_kl"])),
            late_moved_kl=interval(own["moved_kl"][:, late].mean(axis=1)),
            early_changed=interval(own["changed"][:, early].mean(axis=1)),
            late_changed=interval(own["changed"][:, late].mean(axis=1)),
        )
        found[way.name] = dataclasses.asdict(figures)
    return found


def write_tables(found: Mapping[str, Any]) -> None:
    """Print a row for each way, near and over turns."""
    write_table(
        (f"near, {SUFFIX} token after a hit", *("loss, + mbit", "KL, mbit") * 2),
        [
            (
                name,
                shown(one["first_loss_increase"], MILLIBITS, 2),
                shown(one["first_kl"], MILLIBITS, 3),
                shown(one["loss_increase"], MILLIBITS, 2),
                shown(one["kl"], MILLIBITS, 3),
            )
            for name, one in found["near"].items()
        ],
    )
    print(f"the first token alone, then the mean of {SCORED_TOKENS}")
    columns = (
        ("late KL", "late_kl", MILLIBITS, 3),
        ("moved a turn", "moved_kl_a_turn", MILLIBITS, 4),
        ("late moved", "late_moved_kl", MILLIBITS, 3),
        ("late excess", "late_excess_kl", MILLIBITS, 3),
        ("excess loss", "late_excess_loss", MILLIBITS, 2),
        ("changed, %", "late_changed", 100, 2),
    )
    write_table(
        ("turns", *(title for title, *_ in columns)),
        [
            (
                name,
                *(
                    "-" if one[field] is None else shown(one[field], scale, digits)
                    for _, field, scale, digits in columns
                ),
            )
            for name, one in found["drift"].items()
        ],
    )
    print("late: the last quarter of the turns; moved: KL of the chain beside once")
    print("mbit: thousandths of a bit a byte; in brackets 95 % intervals")


def draw(found: Mapping[str, Any]) -> str:
    """Return the change of each chain by earlier turns' replays, by turn, as SVG."""
    series = []
    for name, one in found["drift"].items():
        if one["excess_kl"] is None:
            continue
        points = []
        for at in range(0, len(one["moved_kl"]), PLOTTED_TURNS):
            part = one["moved_kl"][at : at + PLOTTED_TURNS]
            mean = float(np.mean(part))
            own = {"mean": mean, "low": mean, "high": mean}
            points.append(point(at + len(part) / 2, own, LEAST_KL))
        series.append(Series(name, tuple(points), is_line=True))
    return chart(
        series,
        title=f"What earlier turns' replays move, {found['encoder_layers']} encoder layers",
        x=Axis(f"turns, of {TURN_TOKENS} tokens"),
        y=Axis(f"KL beside once, mbit a byte (at most {LEAST_KL:g}: at the bottom)", is_log=True),
        description="The KL divergence of each chain beside the same turn over a cold run's entries.",
    )


def measure(
    model: Path, out: Path, held_out: NDArray[np.uint8], near: int, drift: int
) -> dict[str, Any]:
    """Return every figure of a model, from ``near`` contexts and ``drift`` conversations."""
    digest = hashlib.sha256(model.read_bytes()).hexdigest()
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(model, Path(folder), torch.float32)
        ways, talks = ways_of(bench.config), conversations(held_out, drift)
        near_ways = (ways[0], *chains_of(bench.config))
        chosen = contexts(held_out, near, (SUFFIX,))
        rows: dict[str, list[dict[str, Any]]] = {"near": [], "drift": []}
        with progress_bar("contexts") as advance:
            for row in measured(bench, chosen, out / "near.jsonl", digest, near_ways):
                rows["near"].append(row)
                advance(len(rows["near"]), near)
        keys = [
            f"{digest} {talk.first_hit} {ways}".encode() + talk.tokens.tobytes() for talk in talks
        ]
        with progress_bar("conversations") as advance:
            for row in remembered(
                lambda talk: converse(bench, talk), talks, keys, out / "conversations.jsonl"
            ):
                rows["drift"].append(row)
                advance(len(rows["drift"]), drift)
    return {
        "model": digest,
        "text": {"bytes": len(held_out), "sha256": hashlib.sha256(held_out.tobytes()).hexdigest()},
        "contexts": near,
        "conversations": drift,
        "turns": TURNS,
        "turn_tokens": TURN_TOKENS,
        "window": bench.config.sliding_window,
        "encoder_layers": bench.config.last_owner,
        "near": near_figures(near_ways[1:], rows["near"]),
        "drift": drift_figures(chains_of(bench.config), rows["drift"]),
    }


def main() -> None:
    """Measure one trained model."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path, help="model.npz of bench.replay.train")
    parser.add_argument("--contexts", type=int, default=1024, help="hits with one more token")
    parser.add_argument("--conversations", type=int, default=256)
    parser.add_argument("--out", type=Path, required=True, help="folder")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if not options.model.is_file():
        parser.error(f"{options.model} does not exist: expected a model.npz of bench.replay.train")
    if min(options.contexts, options.conversations) < 1:
        parser.error("expected at least one context and one conversation")
    torch.set_num_threads(1)
    options.out.mkdir(parents=True, exist_ok=True)
    _, held_out = read_text()
    found = measure(options.model, options.out, held_out, options.contexts, options.conversations)
    (options.out / "drift.json").write_text(json.dumps(found, indent=1) + "\n")
    (options.out / "drift.svg").write_text(draw(found))
    if options.json:
        print(json.dumps(found))
    else:
        write_tables(found)


if __name__ == "__main__":
    main()
