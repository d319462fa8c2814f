"""Loss of a model with a quantized KV cache: K and V separately and together.

Question: by how much does the next-token loss of a real model rise if a restored prefix has bf16, fp8, mxfp8,
          nvfp4 or mxfp4 entries instead of exact ones?
Method:   SmolLM2-135M-Instruct in float32, on texts of CPython: half language reference (pydoc's topics),
          half source code of the standard library. Each context has 512 restored tokens and 512 scored ones
          after them. The restored keys and values are encoded and decoded as in a store; those of the scored
          tokens are the model's own. The scored ranges tile the text. Contexts are measured in a random
          order from a fixed seed, so an interrupted measurement is a sample of the whole text. Differences
          are paired by context; the 95 % interval is Student's, over contexts.
Bound:    f32 entries of a real store must be bit-exact and leave the loss bit-identical, else exit 1.
Run:      python -m bench.codec.quality [--out FILE] [--minutes N] [--json] [--svg FILE]
          Minutes for --tokens 1000, hours for all 100,000: one model pass per setting. With --out every
          result is written at once, and the same command continues an interrupted measurement.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import hashlib
import inspect
import json
import math
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import Cache, DynamicCache

import kvstore
from kvstore.cli.demo.prompt import default_text
from kvstore.cli.terminal import progress, progress_bar
from kvstore.engine import smollm2
from kvstore.engine.transformers import TransformersAdapter, model_layout
from kvstore.output.chart import Axis, Point, Series, chart

EXACT = "f32"
"""The model's own number format: the baseline, which must be bit-exact."""
FORMATS = ("f32", "bf16", "fp8", "mxfp8", "nvfp4", "mxfp4")
GROUPS = ("k", "v", "both")
RESTORED, SCORED = 512, 512
"""Tokens of a context that are restored, and scored tokens after them."""
SOURCES = (
    *("argparse", "ast", "difflib", "fractions", "heapq", "inspect", "ipaddress", "mailbox"),
    *("pathlib", "pdb", "shutil", "statistics", "tarfile", "textwrap", "typing", "uuid"),
)
"""Modules of the standard library; their source is the second half of the text."""


@dataclass(frozen=True, slots=True)
class Setting:
    """Entry formats of restored keys and values."""

    k: str
    v: str

    @property
    def name(self) -> str:
        """Name in tables and files, such as ``"nvfp4 K"`` or ``"fp8 K+V"``."""
        parts = {"K": self.k, "V": self.v}
        changed = [part for part, entry_format in parts.items() if entry_format != EXACT]
        lossy = self.k if self.k != EXACT else self.v
        return f"{lossy} {'+'.join(changed or parts)}"


Measured = Mapping[tuple[int, str], float]
"""Nats of the scored tokens by context and setting; those of the computed prefix are ``BASELINE``."""
BASELINE = "computed"


@dataclass(frozen=True, slots=True)
class Row:
    """One setting and the computed prefix. Losses are nats per token; sizes are bytes per token."""

    setting: str
    bytes_per_token: float
    """Unquantized entries count as bf16, the model's own format, though they are f32 here."""
    saved: float
    """Share of the bytes of bf16 keys and values that is saved."""
    scored_tokens: int
    baseline_loss: float
    loss: float
    difference: float
    interval: tuple[float, float] | None
    """Ends of the 95 % interval of ``difference``; None after one context."""
    perplexity_ratio: float
    is_exact: bool
    """Whether the loss of every context is the baseline's, to the last bit."""


def settings(formats: Iterable[str], groups: Iterable[str]) -> list[Setting]:
    """Return the settings of some formats, each on some of k, v and both; f32 is one setting."""
    chosen = set(groups)
    found = []
    for name in formats:
        of_group = {
            "k": Setting(name, EXACT),
            "v": Setting(EXACT, name),
            "both": Setting(name, name),
        }
        found += [of_group[group] for group in GROUPS if group in chosen or name == EXACT]
    return list(dict.fromkeys(found))


def interval(differences: NDArray[np.float64]) -> tuple[float, float] | None:
    """Return the 95 % interval of the mean of ``[contexts]``, by Student's t; None for a single value."""
    count = len(differences)
    if count < 2:
        return None
    half = student(count - 1) * float(differences.std(ddof=1)) / math.sqrt(count)
    mean = float(differences.mean())
    return mean - half, mean + half


def student(freedom: int) -> float:
    """Return the 97.5 % point of Student's t.

    Source: the expansion about the normal point, Abramowitz and Stegun 26.7.5; the first three are exact.
    """
    if freedom <= 3:
        return (12.7062, 4.3027, 3.1824)[freedom - 1]
    z = NormalDist().inv_cdf(0.975)
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return float(sum(term / freedom**power for power, term in enumerate(terms)))


def summarise(
    measured: Measured, chosen: Sequence[Setting], sizes: Mapping[str, float], scored: int = SCORED
) -> list[Row]:
    """Return a row per setting that has been measured, paired with the baseline by context."""
    rows = []
    for setting in chosen:
        contexts = sorted(context for context, name in measured if name == setting.name)
        if not contexts:
            continue
        losses = np.array([measured[c, setting.name] for c in contexts]) / scored
        baseline = np.array([measured[c, BASELINE] for c in contexts]) / scored
        difference = float((losses - baseline).mean())
        rows.append(
            Row(
                setting=setting.name,
                bytes_per_token=sizes[setting.name],
                saved=1 - sizes[setting.name] / sizes["bf16 K+V"],
                scored_tokens=len(contexts) * scored,
                baseline_loss=float(baseline.mean()),
                loss=float(losses.mean()),
                difference=difference,
                interval=interval(losses - baseline),
                perplexity_ratio=math.exp(difference),
                is_exact=bool(np.array_equal(losses, baseline)),
            )
        )
    return rows


def source_text() -> str:
    """Return the source of some modules of the standard library, in the order of ``SOURCES``."""
    return "\n\n".join(inspect.getsource(__import__(name)) for name in SOURCES)


def corpus(encode: Callable[[str], Sequence[int]], contexts: int) -> NDArray[np.int64]:
    """Return the tokens of ``contexts`` contexts: reference prose, then source code.

    Raises ``SystemExit`` if the text of this Python is too short.
    """
    needed = RESTORED + contexts * SCORED + 1
    half = needed // 2
    prose, code = encode(default_text()), encode(source_text())
    tokens = np.array([*prose[:half], *code[: needed - half]], np.int64)
    if len(tokens) < needed:
        sys.exit(
            f"this Python's texts have {len(prose):,} tokens of prose and {len(code):,} of code, "
            f"expected {half:,} of each; ask for fewer with --tokens"
        )
    return tokens


def window(tokens: NDArray[np.int64], context: int) -> NDArray[np.int64]:
    """Return the tokens of a context and the next one, which is only predicted."""
    start = context * SCORED
    return tokens[start : start + RESTORED + SCORED + 1]


class Runner:
    """Scores contexts of one text with one model."""

    def __init__(self, model: Any, chosen: Sequence[Setting], folder: Path) -> None:
        self._model = model
        self._folder = folder
        self._adapters: dict[str, TransformersAdapter] = {}
        self._stack = contextlib.ExitStack()
        self._exact = self._open(EXACT, EXACT)
        for setting in chosen:
            cache = self._open(setting.k, setting.v)
            self._adapters[setting.name] = TransformersAdapter(model, cache)

    def _open(self, k: str, v: str) -> kvstore.PrefixCache:
        return self._stack.enter_context(
            kvstore.PrefixCache.open(
                self._folder / f"{k} {v}",
                layout=model_layout(self._model, dtype={"k": k, "v": v}),
                namespace=kvstore.Namespace(model=smollm2.NAME),
                ssd_bytes="256MiB",
                device_bytes=0,
                window_bytes=0,
            )
        )

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def prefix(self, tokens: NDArray[np.int64]) -> Cache:
        """Compute the KV cache of a context's first part."""
        past = DynamicCache()
        self._forward(tokens[:RESTORED], past, logits_to_keep=1)
        return past

    def nats(self, tokens: NDArray[np.int64], past: Cache) -> float:
        """Return the summed loss of the scored tokens after ``past``, which grows by them."""
        logits = self._forward(tokens[RESTORED:-1], past)
        targets = torch.from_numpy(tokens[RESTORED + 1 :])
        losses = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
        return float(losses.double().sum())

    def _forward(self, tokens: NDArray[np.int64], past: Cache, **options: Any) -> torch.Tensor:
        with torch.inference_mode():
            ids = torch.from_numpy(tokens)[None]
            made = self._model(input_ids=ids, cache=past, use_cache=True, **options)
        logits: torch.Tensor = made.logits[0]
        return logits

    def restored(self, setting: Setting, tokens: NDArray[np.int64], past: Cache) -> Cache:
        """Return ``past`` after encoding and decoding in a setting's formats."""
        adapter = self._adapters[setting.name]
        if setting == Setting(EXACT, EXACT):
            return self._through_a_store(adapter, tokens, past)
        return adapter.restore(adapter.capture(past))

    def _through_a_store(
        self, adapter: TransformersAdapter, tokens: NDArray[np.int64], past: Cache
    ) -> Cache:
        prompt = tokens[: RESTORED + 1]
        adapter.keep(prompt[:RESTORED], past)
        self._exact.flush()
        with self._exact.lookup(prompt) as match:
            entries = self._exact.read(match)
        found = adapter.restore(entries)
        pairs = zip(tensors(found), tensors(past), strict=True)
        if entries.tokens != RESTORED or not all(torch.equal(*pair) for pair in pairs):
            sys.exit(
                f"a store returned other keys and values than were stored ({entries.tokens} of "
                f"{RESTORED} tokens): this is a bug of kvstore"
            )
        return found


def tensors(past: Cache) -> list[torch.Tensor]:
    """Return the keys and values of every layer."""
    return [tensor for layer in past.layers for tensor in (layer.keys, layer.values)]


def run(
    runner: Runner,
    tokens: NDArray[np.int64],
    chosen: Sequence[Setting],
    context: int,
    known: Measured,
) -> Iterator[tuple[str, float]]:
    """Yield the missing results of one context: the names of settings and their nats."""
    missing = [setting for setting in chosen if (context, setting.name) not in known]
    is_based = (context, BASELINE) in known
    if is_based and not missing:
        return
    inputs = window(tokens, context)
    past = runner.prefix(inputs)
    if not is_based:
        yield BASELINE, runner.nats(inputs, copy.deepcopy(past))
    for setting in missing:
        yield setting.name, runner.nats(inputs, runner.restored(setting, inputs, past))


def bytes_per_token(model: Any, setting: Setting) -> float:
    """Return the stored bytes of one token; the lossless part of a setting counts as bf16."""
    is_exact = setting == Setting(EXACT, EXACT)
    formats = {
        group: "bf16" if name == EXACT and not is_exact else name
        for group, name in asdict(setting).items()
    }
    return float(model_layout(model, dtype=formats).bytes_per_token)


class Ledger:
    """Results by context and setting in a file of JSON lines; the first line identifies the measurement."""

    def __init__(self, path: Path | None, identity: Mapping[str, Any]) -> None:
        self.measured: dict[tuple[int, str], float] = {}
        self._path = path
        if path is None:
            return
        if not path.exists():
            path.write_text(json.dumps(identity) + "\n", encoding="utf-8")
        text = path.read_text(encoding="utf-8")
        if not text.endswith("\n"):  # truncated by a kill: measured again
            text = text[: text.rindex("\n") + 1]
            path.write_text(text, encoding="utf-8")
        head, *lines = text.splitlines()
        if json.loads(head) != identity:
            sys.exit(
                f"{path} has results of {head}, expected {json.dumps(identity)}; name another file"
            )
        for line in lines:
            found = json.loads(line)
            self.measured[found["context"], found["setting"]] = found["nats"]

    def add(self, context: int, setting: str, nats: float) -> None:
        """Append a result to the file."""
        self.measured[context, setting] = nats
        if self._path is not None:
            line = json.dumps({"context": context, "setting": setting, "nats": nats})
            with self._path.open("a", encoding="utf-8") as file:
                file.write(line + "\n")


def table(rows: Sequence[Row]) -> list[str]:
    """Return the lines of the table, its header first."""
    header = (
        f"{'restored as':11} {'bytes/token':>11} {'saved':>6} {'tokens':>7} {'loss':>7} "
        f"{'more loss':>10}  {'95 %':17} {'perplexity':>10}"
    )
    lines = [header]
    for row in rows:
        ends = row.interval
        spread = "-" if ends is None else f"{ends[0]:+.5f} {ends[1]:+.5f}"
        more = "0 (exact)" if row.is_exact else f"{row.difference:+.5f}"
        lines.append(
            f"{row.setting:11} {row.bytes_per_token:11,.0f} {row.saved:6.0%} {row.scored_tokens:7,} "
            f"{row.loss:7.4f} {more:>10}  {spread:17}  x {row.perplexity_ratio:8.4f}"
        )
    return lines


def picture(rows: Sequence[Row]) -> str:
    """Return loss against bytes as SVG: a colour for K, for V and for both."""
    of_group = {
        group: tuple(
            point(row)
            for row in rows
            if row.setting.split()[1] == group and not row.setting.startswith(EXACT)
        )
        for group in ("K", "V", "K+V")
    }
    return chart(
        [Series(f"{group} in fewer bytes", points) for group, points in of_group.items()],
        title="Loss after a restored prefix, more than after a computed one",
        x=Axis("bytes a token, keys and values (what is not in fewer bytes counts as bf16)"),
        y=Axis("nats a token"),
    )


def point(row: Row) -> Point:
    """Return a row as a point of the chart, labelled with its format."""
    low, high = row.interval or (row.difference, row.difference)
    return Point(row.bytes_per_token, row.difference, low, high, row.setting.split()[0])


def options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=100_000, help="tokens to score, at least")
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=FORMATS)
    parser.add_argument("--groups", nargs="+", choices=GROUPS, default=GROUPS)
    parser.add_argument(
        "--out", type=Path, help="results as JSON lines; a later run continues there"
    )
    parser.add_argument(
        "--minutes", type=float, default=math.inf, help="start no context after this time"
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--svg", type=Path, help="write the chart to this file")
    return parser.parse_args(arguments)


def main() -> None:
    """Measure the missing results, then print a row per setting."""
    chosen = options()
    wanted = settings(chosen.formats, chosen.groups)
    contexts = max(1, math.ceil(chosen.tokens / SCORED))
    loaded = smollm2.load(smollm2.prepare(progress()), "float32")
    tokens = corpus(lambda text: loaded.tokenizer(text)["input_ids"], contexts)
    identity = {
        "model": smollm2.NAME,
        "weights": loaded.namespace.weights,
        "text": hashlib.sha256(tokens.astype("<u4").tobytes()).hexdigest(),
        "text_tokens": len(tokens),
        "restored": RESTORED,
        "scored": SCORED,
    }
    ledger = Ledger(chosen.out, identity)
    kept = settings(FORMATS, GROUPS)
    sizes = {setting.name: bytes_per_token(loaded.model, setting) for setting in kept}
    order = random.Random(0).sample(range(contexts), contexts)
    deadline = time.monotonic() + 60 * chosen.minutes
    with (
        tempfile.TemporaryDirectory(prefix="kvstore-quality-") as folder,
        Runner(loaded.model, wanted, Path(folder)) as runner,
        progress_bar("scoring") as advance,
        contextlib.suppress(KeyboardInterrupt),  # the table of the results so far follows
    ):
        for done, context in enumerate(order, 1):
            if time.monotonic() > deadline:
                break
            for name, nats in run(runner, tokens, wanted, context, ledger.measured):
                ledger.add(context, name, nats)
            advance(done, contexts)
    rows = summarise(ledger.measured, wanted, sizes)
    report(rows, identity, contexts, chosen)


def report(
    rows: Sequence[Row], identity: Mapping[str, Any], contexts: int, chosen: argparse.Namespace
) -> None:
    """Print the rows, draw them, and exit 1 if the exact format was not exact."""
    if chosen.svg is not None and any(not row.setting.startswith(EXACT) for row in rows):
        chosen.svg.write_text(picture(rows), encoding="utf-8")
    if chosen.json:
        print(json.dumps({**identity, "contexts": contexts, "rows": [asdict(r) for r in rows]}))
    else:
        print(f"text: {identity['text_tokens']:,} tokens, SHA-256 {identity['text']}")
        print(
            f"{RESTORED} tokens restored, {SCORED} scored; asked for {contexts * SCORED:,} tokens"
        )
        print("\n".join(table(rows)))
    if any(row.setting.startswith(EXACT) and not row.is_exact for row in rows):
        sys.exit("an exact restore changed the loss: this is a bug of kvstore")


if __name__ == "__main__":
    main()
