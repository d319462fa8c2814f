"""The demo: a cold run, then a second process that answers from what the first one stored.

It measures and compares. What differs between engines is behind :class:`Engine`; what a store is,
is behind ``PrefixCache``. The second process is this module, run with the path of a job in JSON.

Time to first token (TTFT) runs from token ids and a loaded model, after one unrelated warm-up
forward, to the logits that the first new token is chosen from. Warm, it includes opening the store,
lookup, reading with verification, restoring, and the forward over what is left. Cold, it is the
whole prefill, cut in two chunks where the warm one starts, and neither opening nor storing: the
comparison never favours the store. Imports and loading the model are outside both.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

import kvstore
from kvstore.errors import ConfigError, KVStoreError, StoreError
from kvstore.index.plan import hit_limit

EngineName = Literal["transformers", "reference"]
Logits: TypeAlias = NDArray[np.floating[Any]]
Say: TypeAlias = Callable[[str], None]

BLOCK_TOKENS = 128
PROMPT_TOKENS = 4120
"""Length of the default prompt: 32 blocks, and 24 tokens to compute, as of a question at the end."""
MAX_PROMPT_TOKENS = 8192 - 128
"""The demo model has 8,192 positions; the new tokens need some."""
NEW_TOKENS = 32
TENANT = "kvstore demo"
"""The demo clears its own blocks before a cold run, and never those of anybody else."""
STORE_WAIT_SECONDS = 60.0
"""The demo waits for a slow disk; an engine in production would drop blocks instead."""
UNCHUNKED_BELOW_SECONDS = 5.0
"""The prompt is run once more, in one piece, only where the cold run took less: it costs as much."""
SECOND_PROCESS_SECONDS = 1800.0
"""A bound on the wait for the second process: hours of thrashing are a failure too."""
REFERENCE_TOLERANCE = 1e-9
"""Reference logits (binary64) that differ by less are equal: sums of other shapes round otherwise."""
STAGES = ("open", "lookup", "read", "restore", "forward")
"""Parts of a warm TTFT, in order. ``read`` verifies what it reads, in the same pass."""


# ---- what is measured ------------------------------------------------------------------------------


@dataclass(slots=True)
class Stopwatch:
    """Splits a stretch of time into named laps, in seconds."""

    laps: dict[str, float] = field(default_factory=dict)
    _last: float = field(default_factory=time.perf_counter)

    def lap(self, name: str) -> None:
        """End the lap ``name`` now; the next one starts here."""
        now = time.perf_counter()
        self.laps[name] = self.laps.get(name, 0.0) + now - self._last
        self._last = now


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What one run computed, and how long the parts of its TTFT took.

    Shapes:
        logits ``[steps, vocab]``: those that the first ``steps`` new tokens were chosen from.
    """

    new_tokens: tuple[int, ...]
    logits: Logits
    hit_tokens: int
    replay_tokens: int
    parts: Mapping[str, float]

    @property
    def ttft(self) -> float:
        """Seconds to the first new token."""
        return sum(self.parts.values())

    def difference(self, other: Run) -> float:
        """Return the largest difference between logits, over the steps that had the same input."""
        agreed = 0
        for one, two in zip(self.new_tokens, other.new_tokens, strict=True):
            if one != two:
                break
            agreed += 1
        steps = min(agreed + 1, len(self.logits))
        return float(np.abs(self.logits[:steps] - other.logits[:steps]).max())


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """One engine's result. The fields are those of ``kvstore demo --json``, in its order."""

    engine: EngineName
    model: str
    dtype: str
    threads: int
    prompt_tokens: int
    hit_tokens: int
    replay_tokens: int
    cold_ttft_s: float
    warm_ttft_s: float
    """In the second process; with the file in the page cache, because it has just been written."""
    speedup: float
    ttft_parts: Mapping[str, float]
    """Of the warm TTFT, in seconds."""
    page_cache: str
    cold_disk_ttft_s: float | None
    """In a third process, after asking the system to drop the file from the page cache."""
    cold_disk_parts: Mapping[str, float] | None
    cold_disk_page_cache: str | None
    """``"dropped"`` if the disk was seen to be read, ``"kept"`` if not, ``"unknown"`` if unseen."""
    pool_ttft_s: float | None
    """In the first process, with the window in the pool: for models that have windows."""
    bytes_per_token: float
    ssd_bytes_per_token: float
    same_tokens: bool
    max_logit_diff: float
    """Restored against cold; where windows exist, with the window from the pool."""
    replayed_same_tokens: bool | None
    replayed_logit_diff: float | None
    """The same after a replay. A replay is an approximation by design: no error if not 0."""
    unchunked_ttft_s: float | None
    unchunked_logit_diff: float | None
    """The cold run against one in one piece: what the choice of chunks alone changes."""
    continuation: str
    """What the second process wrote, where tokens stand for text."""

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as plain JSON values."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    @property
    def failures(self) -> list[str]:
        """Sentences about what is not as promised; empty when all is well."""
        found = []
        expected = hit_limit(self.prompt_tokens, BLOCK_TOKENS)
        if self.hit_tokens != expected:
            found.append(f"restored {self.hit_tokens} tokens, expected {expected}")
        if not self.same_tokens:
            found.append("the restored run continued with other tokens than the cold run")
        tolerance = REFERENCE_TOLERANCE if self.engine == "reference" else 0.0
        if not self.max_logit_diff <= tolerance:  # also when it is not a number
            found.append(
                f"logits differ by {self.max_logit_diff:.3g}, expected at most {tolerance:g}"
            )
        return [f"{self.engine}: {sentence}" for sentence in found]


# ---- engines ---------------------------------------------------------------------------------------


class Engine(Protocol):
    """A loaded model, as far as the demo needs to know it."""

    name: EngineName
    spec: Mapping[str, Any]
    """What another process needs to load the same model: plain JSON."""

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text."""
        ...

    def decode(self, tokens: tuple[int, ...]) -> str:
        """Return the text of token ids, or nothing if they stand for none."""
        ...

    def forward(self, tokens: list[int]) -> Logits:
        """Run a prompt in one piece, without any cache; return the last logits ``[vocab]``."""
        ...

    def open(self, path: Path) -> kvstore.PrefixCache:
        """Open a store for this model."""
        ...

    def run(
        self, cache: kvstore.PrefixCache, tokens: list[int], watch: Stopwatch, *, reuse: bool
    ) -> Run:
        """Run a prompt, continue it, and store it. ``reuse=False`` takes nothing from the cache.

        ``watch`` is started by the caller; the laps that end before the first token are its own.
        """
        ...


class TransformersEngine(Engine):
    """A dense model on transformers: every token's keys and values are kept, nothing is replayed."""

    def __init__(self, folder: str, dtype: str) -> None:
        from kvstore.engine import smollm2
        from kvstore.engine.transformers import CausalModel, model_layout

        self.name = "transformers"
        self.spec = {"folder": folder, "dtype": dtype}
        self._loaded = smollm2.load(Path(folder), dtype)
        self._causal = CausalModel(self._loaded.model)
        self._layout = model_layout(self._loaded.model)

    @override
    def encode(self, text: str) -> list[int]:
        return [int(token) for token in self._loaded.tokenizer(text)["input_ids"]]

    @override
    def decode(self, tokens: tuple[int, ...]) -> str:
        return str(self._loaded.tokenizer.decode(list(tokens)))

    @override
    def forward(self, tokens: list[int]) -> Logits:
        return self._causal.forward(tokens)

    @override
    def open(self, path: Path) -> kvstore.PrefixCache:
        return kvstore.PrefixCache.open(
            path,
            layout=self._layout,
            namespace=replace(self._loaded.namespace, tenant=TENANT),
            block_tokens=BLOCK_TOKENS,
            device_bytes=0,
            window_bytes=0,
        )

    @override
    def run(
        self, cache: kvstore.PrefixCache, tokens: list[int], watch: Stopwatch, *, reuse: bool
    ) -> Run:
        from kvstore.engine.transformers import TransformersAdapter

        adapter = TransformersAdapter(
            self._loaded.model, cache, store_wait=STORE_WAIT_SECONDS, on_stage=watch.lap
        )
        made = adapter.generate(tokens, NEW_TOKENS, reuse=reuse)
        return Run(
            new_tokens=made.new_tokens,
            logits=made.logits,
            hit_tokens=made.hit_tokens,
            replay_tokens=0,
            parts=watch.laps,
        )


class ReferenceEngine(Engine):
    """A small DeepSeek-V4.1-shaped model with random weights: windows are pooled or replayed.

    Its tokens are bytes. What it writes means nothing; what is compared is the arithmetic.
    """

    def __init__(self, seed: int = 0) -> None:
        from kvstore.reference.config import ReferenceConfig
        from kvstore.reference.engine import ReferenceEngine as Model

        self.name = "reference"
        self.spec = {"seed": seed}
        self._config = ReferenceConfig.tiny()
        # With 2 W - 2 rows a continuation from the pool is exact at every length of the suffix.
        self._rows = 2 * self._config.sliding_window - 2
        self._seed = seed
        self._watch = Stopwatch()
        self._engine = Model(self._config, seed=seed, window_rows=self._rows, on_stage=self._lap)

    def _lap(self, stage: str) -> None:
        self._watch.lap(stage)

    @override
    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    @override
    def decode(self, tokens: tuple[int, ...]) -> str:
        return ""

    @override
    def forward(self, tokens: list[int]) -> Logits:
        self._engine.cache = None
        logits: Logits = self._engine.prefill(tokens).logits.numpy()
        return logits

    @override
    def open(self, path: Path) -> kvstore.PrefixCache:
        return kvstore.PrefixCache.open(
            path,
            layout=self._config.layout(),
            namespace=kvstore.Namespace(
                model="reference", weights=f"seed {self._seed}", tenant=TENANT
            ),
            block_tokens=BLOCK_TOKENS,
            device_bytes=0,
            window_rows=self._rows,
        )

    @override
    def run(
        self, cache: kvstore.PrefixCache, tokens: list[int], watch: Stopwatch, *, reuse: bool
    ) -> Run:
        if not reuse:
            cache.clear()  # this engine always looks up, so there must be nothing to find
        self._engine.cache, self._watch = cache, watch
        made = self._engine.generate(tokens, NEW_TOKENS)
        return Run(
            new_tokens=made.new_tokens,
            logits=made.logits.numpy()[None],
            hit_tokens=made.hit_tokens,
            replay_tokens=made.replay_tokens,
            parts=watch.laps,
        )


_ENGINES: Mapping[str, Callable[..., Engine]] = {
    "transformers": TransformersEngine,
    "reference": ReferenceEngine,
}


def load_engine(name: EngineName, say: Say) -> Engine:
    """Load an engine as the demo uses it.

    Raises:
        ConfigError: naming the command that installs what is missing.
    """
    if name == "reference":
        return ReferenceEngine()
    from kvstore.engine import smollm2

    folder = smollm2.prepare(say)
    say(f"loading {smollm2.NAME}")
    return TransformersEngine(str(folder), smollm2.fastest_dtype())


def check_installed(names: tuple[EngineName, ...]) -> None:
    """Raise ``ConfigError`` now, rather than after minutes of another engine's run."""
    if "transformers" in names:
        from kvstore.engine import smollm2

        smollm2.find_gguf()


# ---- the second process ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Remote:
    """What another process measured."""

    run: Run
    pid: int
    disk_read_bytes: int | None
    """Bytes that it had to fetch from the disk, or None where the system does not say."""


def run_elsewhere(
    engine: Engine, store: Path, tokens: list[int], *, threads: int, drop_page_cache: bool = False
) -> Remote:
    """Load the same model in a new process, and answer there from the store.

    Raises:
        KVStoreError: with what the process said, if it failed.
    """
    with tempfile.TemporaryDirectory(prefix="kvstore-demo-") as folder:
        work = Path(folder)
        job = {
            "engine": engine.name,
            "spec": dict(engine.spec),
            "store": str(store),
            "tokens": tokens,
            "drop_page_cache": drop_page_cache,
        }
        (work / "job.json").write_text(json.dumps(job), encoding="utf-8")
        # -P: what lies in the current folder must not stand in for an installed package.
        command = [sys.executable, "-P", "-m", "kvstore.cli.demo", str(work)]
        try:
            done = subprocess.run(
                command,
                env={**os.environ, "OMP_NUM_THREADS": str(threads)},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=SECOND_PROCESS_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            msg = f"the second process did not finish in {SECOND_PROCESS_SECONDS:.0f} seconds"
            raise StoreError(msg) from error
        if done.returncode != 0 or not (work / "result.json").is_file():
            said = done.stderr.strip().splitlines()[-1:] or ["nothing on stderr"]
            msg = f"the second process failed with exit status {done.returncode}: {said[0]}"
            raise KVStoreError(msg)
        result = json.loads((work / "result.json").read_text(encoding="utf-8"))
        run = Run(
            new_tokens=tuple(result["new_tokens"]),
            logits=np.load(work / "logits.npy", allow_pickle=False),
            hit_tokens=result["hit_tokens"],
            replay_tokens=result["replay_tokens"],
            parts=result["parts"],
        )
        return Remote(run=run, pid=result["pid"], disk_read_bytes=result["disk_read_bytes"])


def _work(folder: Path) -> None:
    """Do the job in ``folder`` and leave the result there: the second process's whole life."""
    job = json.loads((folder / "job.json").read_text(encoding="utf-8"))
    engine = _ENGINES[job["engine"]](**job["spec"])
    store = Path(job["store"])
    _warm_up(engine)
    if job["drop_page_cache"]:
        drop_page_cache(store)
    read_before = _disk_read_bytes()
    watch = Stopwatch()
    with engine.open(store) as cache:
        watch.lap("open")
        run = engine.run(cache, job["tokens"], watch, reuse=True)
    read_after = _disk_read_bytes()
    np.save(folder / "logits.npy", run.logits, allow_pickle=False)
    known = read_before is not None and read_after is not None
    result = {
        "pid": os.getpid(),
        "new_tokens": run.new_tokens,
        "hit_tokens": run.hit_tokens,
        "replay_tokens": run.replay_tokens,
        "parts": dict(run.parts),
        "disk_read_bytes": (read_after or 0) - (read_before or 0) if known else None,
    }
    (folder / "result.json").write_text(json.dumps(result), encoding="utf-8")


def _warm_up(engine: Engine) -> None:
    """Run one forward over tokens that have nothing to do with the prompt."""
    engine.forward(list(range(1, BLOCK_TOKENS + 1)))


def drop_page_cache(store: Path) -> None:
    """Ask the system to forget the cached pages of a closed, flushed store. Needs no privilege."""
    if not hasattr(os, "posix_fadvise"):
        return
    for path in sorted(store.rglob("*")):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)


def _disk_read_bytes() -> int | None:
    """Return how many bytes this process has made the system fetch from a disk, where it says so."""
    try:
        text = Path("/proc/self/io").read_text(encoding="ascii")
    except OSError:
        return None
    fields = dict(line.split(": ") for line in text.splitlines())
    return int(fields["read_bytes"]) if "read_bytes" in fields else None


def _threads() -> int:
    """Return how many threads torch computes with. An engine is loaded, so torch is imported."""
    return int(sys.modules["torch"].get_num_threads())


# ---- the demo --------------------------------------------------------------------------------------


def default_text() -> str:
    """Return an English text of some 120,000 tokens that every CPython carries: its own topics."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


def read_text(path: Path) -> str:
    """Return the text of a file. Raises ``ConfigError`` if it cannot be read as UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        msg = f"cannot read the text file {path}: {error}; expected a UTF-8 text file"
        raise ConfigError(msg) from error


def prompt(engine: Engine, text: str | None) -> list[int]:
    """Return the prompt's token ids: ``text``, or the first tokens of the default text.

    Raises:
        ConfigError: if the text is too short for one block to be restored.
    """
    if text is None:
        # Enough characters for any tokenizer, without tokenizing all of it.
        return engine.encode(default_text()[: 16 * PROMPT_TOKENS])[:PROMPT_TOKENS]
    tokens = engine.encode(text)[:MAX_PROMPT_TOKENS]
    if len(tokens) <= BLOCK_TOKENS:
        msg = (
            f"the text has {len(tokens)} tokens for engine {engine.name}, expected more than "
            f"{BLOCK_TOKENS}: nothing shorter than a block is kept; give a longer text"
        )
        raise ConfigError(msg)
    return tokens


def demonstrate(engine: Engine, text: str | None, store: Path, say: Say) -> Report:
    """Run the demo of one engine with a store in directory ``store``, which is made if missing."""
    tokens = prompt(engine, text)
    _warm_up(engine)
    with engine.open(store) as cache:
        cache.clear()
        say(f"{engine.name}: cold run of {len(tokens):,} tokens")
        cold = engine.run(cache, tokens, Stopwatch(), reuse=False)
        cache.flush()
        has_windows = bool(cache.layout.window_groups)
        pooled = engine.run(cache, tokens, Stopwatch(), reuse=True) if has_windows else None
        ssd_bytes = float(cache.stats()["tiers"]["ssd"]["bytes_per_token"])
        layout = cache.layout
        model = cache.namespace.model
    threads = _threads()
    say(f"{engine.name}: second process")
    warm = run_elsewhere(engine, store, tokens, threads=threads)
    say(f"{engine.name}: third process, with the file dropped from the page cache")
    disk = (
        run_elsewhere(engine, store, tokens, threads=threads, drop_page_cache=True)
        if hasattr(os, "posix_fadvise")
        else None
    )
    unchunked_seconds, unchunked_difference = _unchunked(engine, tokens, cold)
    exact = pooled if pooled is not None else warm.run
    return Report(
        engine=engine.name,
        model=model,
        dtype=str(engine.spec.get("dtype", "float64")),
        threads=threads,
        prompt_tokens=len(tokens),
        hit_tokens=warm.run.hit_tokens,
        replay_tokens=warm.run.replay_tokens,
        cold_ttft_s=cold.ttft,
        warm_ttft_s=warm.run.ttft,
        speedup=cold.ttft / warm.run.ttft,
        ttft_parts={stage: warm.run.parts.get(stage, 0.0) for stage in STAGES},
        page_cache="warm",
        cold_disk_ttft_s=disk.run.ttft if disk else None,
        cold_disk_parts=dict(disk.run.parts) if disk else None,
        cold_disk_page_cache=_page_cache(disk, layout.bytes_per_token) if disk else None,
        pool_ttft_s=pooled.ttft if pooled else None,
        bytes_per_token=float(layout.bytes_per_token),
        ssd_bytes_per_token=ssd_bytes,
        same_tokens=exact.new_tokens == cold.new_tokens,
        max_logit_diff=exact.difference(cold),
        replayed_same_tokens=warm.run.new_tokens == cold.new_tokens if pooled else None,
        replayed_logit_diff=warm.run.difference(cold) if pooled else None,
        unchunked_ttft_s=unchunked_seconds,
        unchunked_logit_diff=unchunked_difference,
        continuation=engine.decode(warm.run.new_tokens),
    )


def _page_cache(remote: Remote, bytes_per_token: Fraction) -> str:
    """Say whether the pages were gone, going by what the process had to fetch from the disk."""
    if remote.disk_read_bytes is None:
        return "unknown"
    # Half of the payload: read-ahead blurs the exact number, and some pages may be shared.
    wanted = remote.run.hit_tokens * bytes_per_token / 2
    return "dropped" if remote.disk_read_bytes >= wanted else "kept"


def _unchunked(
    engine: Engine, tokens: list[int], cold: Run
) -> tuple[float, float] | tuple[None, None]:
    if cold.ttft > UNCHUNKED_BELOW_SECONDS or engine.name == "reference":
        return None, None  # the reference engine's results do not depend on chunks
    start = time.perf_counter()
    logits = engine.forward(tokens)
    return time.perf_counter() - start, float(np.abs(logits - cold.logits[0]).max())


def run_demo(
    names: tuple[EngineName, ...], text: str | None, store: Path | None, say: Say
) -> list[Report]:
    """Run the demo of each engine. A ``store`` directory is kept, a temporary one removed.

    A store holds one layout: with several engines each has a directory of its own in ``store``.

    Raises:
        ConfigError: if an engine or its weights are not installed, or the text is too short.
    """
    check_installed(names)
    reports = []
    with tempfile.TemporaryDirectory(prefix="kvstore-demo-") as scratch:
        for name in names:
            base = store if store is not None else Path(scratch)
            directory = base if len(names) == 1 else base / name
            reports.append(demonstrate(load_engine(name, say), text, directory, say))
    return reports


# ---- for people ------------------------------------------------------------------------------------


def _seconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.2f} s" if value >= 1 else f"{value * 1000:.1f} ms"


def _difference(value: float | None) -> str:
    return "-" if value is None else "0 (exact)" if value == 0 else f"{value:.2g}"


def _yes(value: bool | None) -> str:  # noqa: FBT001 - a value to show
    return "-" if value is None else "yes" if value else "no"


def table_rows(report: Report) -> list[tuple[str, str]]:
    """Return what the table shows of one report: label and value."""
    parts = [(f"    {stage}", _seconds(report.ttft_parts[stage])) for stage in STAGES]
    return [
        ("model", report.model),
        ("computes in", f"{report.dtype}, threads: {report.threads}"),
        ("prompt", f"{report.prompt_tokens:,} tokens"),
        ("restored from the store", f"{report.hit_tokens:,} tokens"),
        ("    of these run again (replay)", f"{report.replay_tokens:,} tokens"),
        ("first token, cold", _seconds(report.cold_ttft_s)),
        ("first token, window still pooled", _seconds(report.pool_ttft_s)),
        ("first token, second process", _seconds(report.warm_ttft_s)),
        *parts,
        ("    sooner than cold", f"{report.speedup:.1f} x"),
        (
            f"first token, page cache {report.cold_disk_page_cache or 'dropped'}",
            _seconds(report.cold_disk_ttft_s),
        ),
        ("bytes a token, by layout", f"{report.bytes_per_token:,.0f}"),
        ("bytes a token, on SSD", f"{report.ssd_bytes_per_token:,.0f}"),
        (f"same {NEW_TOKENS} tokens as cold", _yes(report.same_tokens)),
        ("    after a replay", _yes(report.replayed_same_tokens)),
        ("largest difference of a logit", _difference(report.max_logit_diff)),
        ("    after a replay", _difference(report.replayed_logit_diff)),
    ]


def summary(report: Report) -> str:
    """Return the result in plain words."""
    left = report.prompt_tokens - report.hit_tokens
    sentence = (
        f"{report.engine}: the second process answered {report.speedup:.1f} times sooner, "
        f"{_seconds(report.warm_ttft_s)} instead of {_seconds(report.cold_ttft_s)}: it restored "
        f"{report.hit_tokens:,} of {report.prompt_tokens:,} tokens and computed the other {left:,}"
    )
    if report.replay_tokens:
        sentence += f", after running the last {report.replay_tokens:,} restored ones again"
    if report.replayed_logit_diff is not None:
        near = "exactly" if report.max_logit_diff == 0 else f"to {report.max_logit_diff:.2g}"
        sentence += (
            f". With the window still pooled, in the first process, its logits are {near} those of "
            f"the cold run. A replay approximates: after it they differ by up to "
            f"{_difference(report.replayed_logit_diff)}, and the {NEW_TOKENS} tokens are "
            f"{'the same' if report.replayed_same_tokens else 'others'} (the weights are random, so "
            f"this says nothing about a trained model)"
        )
    elif report.same_tokens and report.max_logit_diff == 0:
        sentence += (
            f". Its {NEW_TOKENS} tokens and all their logits are the cold run's, bit for bit"
        )
    return sentence + "."


if __name__ == "__main__":
    _work(Path(sys.argv[1]))
