"""Models of the demo, with a common protocol."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

import kvstore

EngineName = Literal["transformers", "reference"]
Logits: TypeAlias = NDArray[np.floating[Any]]
Say: TypeAlias = Callable[[str], None]

BLOCK_TOKENS = 128
NEW_TOKENS = 32
TENANT = "kvstore demo"
"""Tenant of the demo, whose blocks are cleared before a cold run."""
STORE_WAIT_SECONDS = 60.0
"""Longest wait for a slow disk; an engine in production would drop blocks instead."""


@dataclass(slots=True)
class Stopwatch:
    """Durations of consecutive named laps, in seconds."""

    laps: dict[str, float] = field(default_factory=dict)
    _last: float = field(default_factory=time.perf_counter)

    def lap(self, name: str) -> None:
        """End the current lap as ``name``, and start the next one."""
        now = time.perf_counter()
        self.laps[name] = self.laps.get(name, 0.0) + now - self._last
        self._last = now


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Tokens and logits of one run, and the seconds of each stage of its TTFT.

    Shapes: logits ``[steps, vocab]``, of the first ``steps`` new tokens.
    """

    new_tokens: tuple[int, ...]
    logits: Logits
    hit_tokens: int
    replay_tokens: int
    stages: Mapping[str, float]

    @property
    def ttft(self) -> float:
        """Seconds to the first new token."""
        return sum(self.stages.values())

    def difference(self, other: Answer) -> float:
        """Return the largest difference between logits, over the steps that had the same input."""
        agreed = 0
        for one, two in zip(self.new_tokens, other.new_tokens, strict=True):
            if one != two:
                break
            agreed += 1
        steps = min(agreed + 1, len(self.logits))
        return float(np.abs(self.logits[:steps] - other.logits[:steps]).max())


class Engine(Protocol):
    """A loaded model."""

    name: EngineName
    spec: Mapping[str, Any]
    """Arguments for loading the same model in another process, as plain JSON."""
    options: Mapping[str, Any]
    """Options of its store: layout, namespace and window."""

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text."""
        ...

    def decode(self, tokens: tuple[int, ...]) -> str:
        """Return the text of token ids, empty if the model has no text."""
        ...

    def forward(self, tokens: list[int]) -> Logits:
        """Run one forward pass without a cache; return the last logits ``[vocab]``."""
        ...

    def open(self, path: Path) -> kvstore.PrefixCache:
        """Open a store for this model."""
        return kvstore.PrefixCache.open(
            path, block_tokens=BLOCK_TOKENS, device_bytes=0, **self.options
        )

    def run(
        self, cache: kvstore.PrefixCache, tokens: list[int], watch: Stopwatch, *, reuse: bool
    ) -> Answer:
        """Run a prompt, continue it, and store it. ``reuse=False`` does not read the cache.

        The caller starts ``watch``; the engine ends a lap for each stage up to the first token.
        """
        ...


class TransformersEngine(Engine):
    """Dense model on transformers: keys and values of every token are stored, without replay."""

    def __init__(self, folder: str, dtype: str) -> None:
        from kvstore.engine import smollm2
        from kvstore.engine.transformers import CausalModel, model_layout

        self.name = "transformers"
        self.spec = {"folder": folder, "dtype": dtype}
        self._loaded = smollm2.load(Path(folder), dtype)
        self._causal = CausalModel(self._loaded.model)
        self.options = {
            "layout": model_layout(self._loaded.model),
            "namespace": replace(self._loaded.namespace, tenant=TENANT),
            "window_bytes": 0,
        }

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
    def run(
        self, cache: kvstore.PrefixCache, tokens: list[int], watch: Stopwatch, *, reuse: bool
    ) -> Answer:
        from kvstore.engine.transformers import TransformersAdapter

        adapter = TransformersAdapter(
            self._loaded.model, cache, store_wait=STORE_WAIT_SECONDS, on_stage=watch.lap
        )
        made = adapter.generate(tokens, NEW_TOKENS, reuse=reuse)
        return Answer(
            new_tokens=made.new_tokens,
            logits=made.logits,
            hit_tokens=made.hit_tokens,
            replay_tokens=0,
            stages=watch.laps,
        )


class ReferenceEngine(Engine):
    """Small DeepSeek-V4.1-shaped model with random weights: windows are pooled or replayed.

    Its tokens are bytes. Its text is meaningless; the demo compares logits.
    """

    def __init__(self, seed: int = 0) -> None:
        from kvstore.reference.config import ReferenceConfig
        from kvstore.reference.engine import ReferenceEngine as Model

        self.name = "reference"
        self.spec = {"seed": seed}
        config = ReferenceConfig.tiny()
        # With 2 W - 2 rows a continuation from the pool is exact at every length of the suffix.
        rows = 2 * config.sliding_window - 2
        self.options = {
            "layout": config.layout(),
            "namespace": kvstore.Namespace(
                model="reference", weights=f"seed {seed}", tenant=TENANT
            ),
            "window_rows": rows,
        }
        self._watch = Stopwatch()
        self._engine = Model(config, seed=seed, window_rows=rows, on_stage=self._lap)

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
    def run(
        self, cache: kvstore.PrefixCache, tokens: list[int], watch: Stopwatch, *, reuse: bool
    ) -> Answer:
        if not reuse:
            cache.clear()  # this engine always looks up
        self._engine.cache, self._watch = cache, watch
        made = self._engine.generate(tokens, NEW_TOKENS)
        return Answer(
            new_tokens=made.new_tokens,
            logits=made.logits.numpy()[None],
            hit_tokens=made.hit_tokens,
            replay_tokens=made.replay_tokens,
            stages=watch.laps,
        )


ENGINES: Mapping[str, Callable[..., Engine]] = {
    "transformers": TransformersEngine,
    "reference": ReferenceEngine,
}


def load_engine(name: EngineName, say: Say) -> Engine:
    """Load an engine. Raises ``ConfigError`` with the command that installs missing packages."""
    if name == "reference":
        return ReferenceEngine()
    from kvstore.engine import smollm2

    folder = smollm2.prepare(say)
    say(f"loading {smollm2.NAME}")
    return TransformersEngine(str(folder), smollm2.fastest_dtype())


def check_installed(names: tuple[EngineName, ...]) -> None:
    """Raise ``ConfigError`` for missing weights, before another engine runs for minutes."""
    if "transformers" in names:
        from kvstore.engine import smollm2

        smollm2.find_gguf()
