"""The demo: a cold run, then a second process that answers from what the first one stored.

It measures and compares. What differs between engines is behind :class:`Engine`; what a store is,
is behind ``PrefixCache``. The second process is this module, run with the path of a job in JSON.

Time to first token (TTFT) runs from token ids and a loaded model, after one unrelated warm-up
forward, to the logits that the first new token is chosen from. Warm, it includes opening the store,
lookup, reading with verification, restoring and the forward over what is left. Cold, it is the whole
prefill and nothing of the store: so the comparison never favours the store. Imports and loading the
model are outside both.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

import kvstore
from kvstore.errors import ConfigError, KVStoreError, StoreError
from kvstore.layout import Layout

EngineName = Literal["transformers", "reference"]
ENGINES: tuple[EngineName, ...] = ("transformers", "reference")

BLOCK_TOKENS = 128
PROMPT_TOKENS = 4200
"""Length of the default prompt: 32 blocks and 104 tokens that are left to compute."""
MAX_PROMPT_TOKENS = 8192 - 128
"""The demo model has 8,192 positions; the new tokens need some."""
NEW_TOKENS = 32
UNCHUNKED_BELOW_SECONDS = 5.0
"""The prompt is run once more, in one piece, only where the cold run took less: it costs as much."""
SECOND_PROCESS_SECONDS = 1800.0
"""A bound on the wait for the second process: hours of thrashing are a failure too."""
REFERENCE_TOLERANCE = 1e-9
"""Reference logits (binary64) that differ by less are equal: see the law in its tests."""

Stages = ("open", "lookup", "read", "restore", "forward")
"""Parts of a warm TTFT, in order. ``read`` includes verification: it is one pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What one run computed, and how long the parts of its TTFT took.

    Shapes:
        logits ``[steps, vocab]``: those that the first ``steps`` new tokens were chosen from.
    """

    new_tokens: tuple[int, ...]
    logits: NDArray[np.floating[Any]]
    hit_tokens: int
    replay_tokens: int
    parts: Mapping[str, float]

    @property
    def ttft(self) -> float:
        """Seconds to the first new token."""
        return sum(self.parts.values())


@dataclass(slots=True)
class Stopwatch:
    """Splits a stretch of time into named laps."""

    laps: dict[str, float] = field(default_factory=dict)
    _last: float = field(default_factory=time.perf_counter)

    def lap(self, name: str) -> None:
        """End the lap ``name`` now; the next one starts here."""
        now = time.perf_counter()
        self.laps[name] = self.laps.get(name, 0.0) + now - self._last
        self._last = now


class Engine(Protocol):
    """A loaded model, as far as the demo needs to know it."""

    @property
    def name(self) -> EngineName:
        """Which engine it is."""
        ...

    @property
    def facts(self) -> Mapping[str, Any]:
        """What another process needs to load the same: plain JSON, also for the report."""
        ...

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text."""
        ...

    def warm_up(self) -> None:
        """Run one forward over tokens that have nothing to do with the prompt."""
        ...

    def open(self, path: Path) -> kvstore.PrefixCache:
        """Open a store for this model."""
        ...

    def run(
        self, cache: kvstore.PrefixCache, tokens: list[int], watch: Stopwatch, *, reuse: bool
    ) -> Run:
        """Run a prompt, continue it, and store what was computed."""
        ...


class TransformersEngine:
    """SmolLM2-135M-Instruct, or any folder that transformers loads, on transformers."""

    name: EngineName = "transformers"

    def __init__(self, folder: Path, dtype: str) -> None:
        from kvstore.engine import smollm2
        from kvstore.engine.transformers import TransformersAdapter, model_layout

        self._loaded = smollm2.load(folder, dtype)
        self._adapter = TransformersAdapter
        self.layout: Layout = model_layout(self._loaded.model)
        self.facts = {"folder": str(folder), "dtype": dtype}

    @classmethod
    def default(cls, say: Callable[[str], None]) -> TransformersEngine:
        """Load the demo model in the dtype that this machine is fastest in."""
        from kvstore.engine import smollm2

        return cls(smollm2.prepare(say), smollm2.fastest_dtype())

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, with no chat template around it."""
        return [int(token) for token in self._loaded.tokenizer(text)["input_ids"]]

    def decode(self, tokens: tuple[int, ...]) -> str:
        """Return the text of token ids."""
        return str(self._loaded.tokenizer.decode(list(tokens)))

    def warm_up(self) -> None:
        """Run one forward over tokens that have nothing to do with the prompt."""
        self.unchunked(list(range(1, BLOCK_TOKENS + 1)))

    def unchunked(self, tokens: list[int]) -> tuple[NDArray[np.float32], float]:
        """Return the logits of a prompt run in one piece, and the seconds that took."""
        with tempfile.TemporaryDirectory(prefix="kvstore-demo-") as folder:
            with self.open(Path(folder)) as cache:
                adapter = self._adapter(self._loaded.model, cache)
                start = time.perf_counter()
                logits = adapter.forward(tokens, adapter.empty())
                return logits, time.perf_counter() - start

    def open(self, path: Path) -> kvstore.PrefixCache:
        """Open a store for this model. Everything is read to the host: no device pages."""
        return kvstore.PrefixCache.open(
            path,
            layout=self.layout,
            namespace=_demo_namespace(self._loaded.namespace),
            block_tokens=BLOCK_TOKENS,
            device_bytes=0,
            window_bytes=0,
        )

    def run(
        self, cache: kvstore.PrefixCache, tokens: list[int], watch: Stopwatch, *, reuse: bool
    ) -> Run:
        """Run a prompt, continue it, and store what was computed."""
        adapter = self._adapter(self._loaded.model, cache, on_stage=watch.lap)
        made = adapter.generate(tokens, NEW_TOKENS, reuse=reuse)
        return Run(
            new_tokens=made.new_tokens,
            logits=made.logits,
            hit_tokens=made.hit_tokens,
            replay_tokens=0,
            parts=watch.laps,
        )
