"""An engine around the reference model: prefill, bounded replay and decoding with a prefix cache.

It uses ``PrefixCache`` through its public contract only, so it shows what any engine has to do:

    lookup ─▶ restore global entries ─▶ restore or rebuild windows ─▶ encode the rest ─▶ store
                                                                          └─▶ decode once ─▶ logits
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import kvstore
from kvstore.reference.config import ReferenceConfig
from kvstore.reference.engram import DiskTable, open_tables
from kvstore.reference.entries import PageReader
from kvstore.reference.formats import Entries
from kvstore.reference.model import ReferenceModel
from kvstore.reference.residual import Streams
from kvstore.reference.state import Chunk, Floors, SequenceState
from kvstore.reference.vision import Image
from kvstore.reference.weights import Weights, random_weights

CHUNK_TOKENS = 512
"""Rows in one pass unless the caller cuts elsewhere: bounds the memory of gathered keys."""

Tokens = Sequence[int] | NDArray[np.integer]
WindowSource = Literal["pool", "replay", "none"]
Stage = Literal["lookup", "read", "restore", "forward"]
"""The stages of a prefill, in order. The first three are missing without a cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What one request computed, and how much of it came from the cache.

    Shapes:
        logits ``[vocab]``; entries[group] uint8 ``[layers, n, entry_bytes]``.
    """

    logits: Tensor
    """Of the last prompt row."""
    new_tokens: tuple[int, ...]
    hit_tokens: int
    """Tokens whose global entries were restored."""
    replay_tokens: int
    """Tokens of the hit that were run to rebuild their window."""
    window_source: WindowSource
    """Where the encoder window of the hit came from; ``"none"`` without a hit."""
    encoder_rows: int
    """Rows that the prompt cost in the encoder, replay included."""
    entries: Entries
    """Global entries of tokens ``[entries_start, end)``; the end leaves out the last new token."""
    entries_start: int
    """0, unless the hit was read out of device pages."""
    drafted_tokens: int = 0
    """Tokens that the drafter proposed and the model verified."""
    accepted_tokens: int = 0
    """Those of them that the model would have chosen itself."""
    engram_bytes: int = 0
    """Bytes that the request gathered from Engram's tables."""


@dataclass(slots=True)
class _Run:
    """A sequence from lookup to its end."""

    state: SequenceState
    tokens: NDArray[np.uint32]
    hit_tokens: int = 0
    replay_tokens: int = 0
    window_source: WindowSource = "none"
    encoder_rows: int = 0
    stored_tokens: int = 0
    """A block boundary: the cache has been offered everything below it."""
    windows_kept: set[int] = field(default_factory=set)
    """Boundaries whose window the cache has already."""
    logits: Tensor = field(default_factory=lambda: torch.empty(0))
    drafted_tokens: int = 0
    accepted_tokens: int = 0

    @property
    def spans(self) -> tuple[kvstore.ImageSpan, ...]:
        """The request's images, as the cache identifies them."""
        return tuple(image.span for image in self.state.images)


class ReferenceEngine:
    """Runs the reference model over a prefix cache.

    ``replay`` says how a missing window is rebuilt. ``"fold"`` runs the rows again as the first rows
    of the prefill; ``"hook"`` lets the cache ask for them through ``replay_hook``. The results are
    the same. ``restore`` says how a hit is read: ``"read"`` copies its entries to host memory,
    ``"pages"`` gathers from device pages only what attention chooses. The hook reads from device
    pages as well, so with ``device_bytes=0`` only ``"fold"`` and ``"read"`` find anything.

    Threads: one thread at a time.
    """

    def __init__(
        self,
        config: ReferenceConfig,
        cache: kvstore.Scope | None = None,
        *,
        seed: int = 0,
        weights: Weights | None = None,
        dtype: torch.dtype = torch.float64,
        tokenizer: str = "",
        tables: str | Path | None = None,
        window_rows: int | None = None,
        replay: Literal["fold", "hook"] = "fold",
        restore: Literal["read", "pages"] = "read",
        on_stage: Callable[[Stage], None] | None = None,
    ) -> None:
        """Make the model that belongs to ``seed``, or of ``weights``, of type ``dtype``.

        ``tokenizer`` is the identity of whatever makes tokens of text. ``tables`` is the folder of
        the Engram tables, for a config that has any; they are made if they are missing.
        ``window_rows`` is how many rows a snapshot holds at most: 2 W - 2 by default, with which
        whatever follows a pooled window is exact. The cache keeps no more than it was opened for.
        ``on_stage`` is called with the name of each stage of a prefill when it ends.
        """
        self.config = config
        self.cache = cache
        self.dtype = dtype
        self.layout = config.layout(dtype)
        self._tables: dict[int, DiskTable] = {}
        if config.engram_layer_ids:
            if tables is None:
                msg = f"layers {config.engram_layer_ids} look n-grams up: give a folder for their tables"
                raise ValueError(msg)
            self._tables = open_tables(config, Path(tables), seed=seed, dtype=dtype)
        # Config, seed and number format decide every random weight, so they stand for the weights.
        digest = hashlib.sha256(f"{config} {seed} {dtype}".encode())
        if weights is None:
            weights = random_weights(config, seed, dtype)
        else:
            for name, tensor in weights.tensors().items():
                digest.update(name.encode() + tensor.detach().numpy().tobytes())
        for layer, table in sorted(self._tables.items()):
            # Made from the seed if they were missing, and whatever they hold if they were there.
            digest.update(f"{layer} {kvstore.weights_digest(table.path)}".encode())
        self.model = ReferenceModel(config, weights, self._tables)
        self.namespace = kvstore.Namespace(
            model="reference", weights=digest.hexdigest(), tokenizer=tokenizer
        )
        """What to open a cache with, so that engines of other weights never share a block."""
        self._window_rows = window_rows or 2 * config.sliding_window - 2
        self._replay = replay
        self._restore = restore
        self._on_stage = on_stage
        self._images: dict[bytes, Image] = {}
        """By digest, those of the request that runs: a replay needs their features again."""

    def prefill(
        self,
        tokens: Tokens,
        *,
        images: Sequence[Image] = (),
        chunks: Iterable[int] | None = None,
    ) -> Result:
        """Run a prompt; keep what it computed.

        ``images`` lie where the prompt has the image token. ``chunks`` are the positions at which
        prefill is cut. In binary64 the result does not depend on them; in binary32 a rounding may
        tip the choice of an entry.
        """
        prompt = kvstore.as_tokens(tokens)
        with torch.inference_mode(), contextlib.ExitStack() as held:
            run = self._prefill(prompt, len(prompt), images, chunks, held)
            return self._result(run, len(prompt), ())

    def generate(
        self,
        tokens: Tokens,
        count: int,
        *,
        images: Sequence[Image] = (),
        chunks: Iterable[int] | None = None,
    ) -> Result:
        """Run a prompt, then decode ``count`` tokens, always the likeliest; keep both.

        A config with draft layers runs several tokens at once: one that is known, and a draft of
        those that may follow. Where the model would have chosen otherwise, the rest of the draft is
        rolled back; so the output is the same as without drafts, and the cache never hears of them.
        The last new token is not run, so what is kept ends one token before it.
        """
        if count < 1:
            msg = f"count must be at least 1, found {count}"
            raise ValueError(msg)
        prompt = kvstore.as_tokens(tokens)
        end = len(prompt) + count - 1
        with torch.inference_mode(), contextlib.ExitStack() as held:
            run = self._prefill(prompt, end, images, chunks, held)
            state, new_tokens = run.state, self._likeliest(run.logits[None])
            while len(new_tokens) < count:
                position = len(prompt) + len(new_tokens) - 1
                draft = self._draft(state, new_tokens[-1], position)[: count - len(new_tokens) - 1]
                stop = position + 1 + len(draft)
                state.tokens[position:stop] = torch.tensor([new_tokens[-1], *draft])
                step = [Chunk(state, position, stop)]
                decoded = self.model.decode(self.model.encode(step), step)
                choices = self._likeliest(self.model.logits(decoded))
                accepted = _agreeing(draft, choices)
                state.rollback(position + 1 + accepted)
                new_tokens += choices[: accepted + 1]
                run.drafted_tokens += len(draft)
                run.accepted_tokens += accepted
            run.tokens[len(prompt) :] = new_tokens[:-1]
            self._publish(run, end)
            return self._result(run, end, tuple(new_tokens))

    def _likeliest(self, logits: Tensor) -> list[int]:
        """Return the likeliest token of each row, never the one that stands for images.

        Shapes:
            logits ``[rows, vocab]``.
        """
        image = self.config.image_token_id
        if image is not None:
            logits = logits.index_fill(1, torch.tensor([image]), -math.inf)
        choices: list[int] = logits.argmax(dim=-1).tolist()
        return choices

    def _draft(self, state: SequenceState, token: int, position: int) -> tuple[int, ...]:
        """Return what may follow ``token`` at ``position``, as far as it is worth verifying."""
        if self.model.drafter is None:
            return ()
        return self.model.drafter.propose(state, token, position).trusted()

    def replay_hook(self, requests: list[kvstore.ReplayRequest], /) -> list[kvstore.WindowSnapshot]:
        """Rebuild windows, all requests in one pass. A ``kvstore.ReplayHook``.

        Raises:
            ValueError: if a request comes without pages: replay reads the hit's global entries, so
                ``PrefixCache.load`` comes before ``PrefixCache.window``. Or with an image that is
                not at hand: its rows cannot be run without its features.
        """
        with torch.inference_mode():
            chunks = []
            for request in requests:
                if request.pages is None:
                    msg = "replay needs the global entries of the hit: load the match before its window"
                    raise ValueError(msg)
                floors = Floors(
                    start=request.start,
                    hit=request.write_floor,
                    read_floor=request.read_floor,
                    window_write_floor=request.window_write_floor,
                )
                images = [self._shown(span) for span in request.images]
                state = self._state(request.tokens, floors, prompt=request.stop, images=images)
                state.entries.attach(self._reader(request.pages), request.write_floor)
                chunks.append(Chunk(state, request.start, request.stop))
            if chunks:
                self.model.encode(chunks)
            return [chunk.state.snapshot(chunk.start, chunk.stop, "replay") for chunk in chunks]

    def _shown(self, span: kvstore.ImageSpan) -> Image:
        """Return the image that a span names, placed where it lies."""
        image = self._images.get(span.digest)
        if image is None:
            msg = f"no features at hand for the image at tokens [{span.start}, {span.stop})"
            raise ValueError(msg)
        return dataclasses.replace(image, start=span.start)

    def _check_images(self, prompt: NDArray[np.uint32], images: Sequence[Image]) -> None:
        """Reject images of other features, or not exactly where the prompt has the image token."""
        shape = (self.config.downsample_ratio, self.config.vision_hidden_size)
        for found in ((image.ratio, image.patches.shape[2]) for image in images):
            if found != shape:
                msg = f"an image needs squares of {shape[0]} patches with {shape[1]} features, found {found}"
                raise ValueError(msg)
        shown = np.zeros(len(prompt), bool)
        for span in (image.span for image in images):
            if span.stop > len(prompt) or shown[span.start : span.stop].any():
                msg = f"image at tokens [{span.start}, {span.stop}) overlaps another or leaves a prompt of {len(prompt)}"
                raise ValueError(msg)
            shown[span.start : span.stop] = True
        token = self.config.image_token_id
        expected = np.zeros_like(shown) if token is None else prompt == token
        if not np.array_equal(shown, expected):
            at = int(np.argmax(shown != expected))
            msg = f"images must lie where the prompt has token {token}, and nowhere else; token {at} differs"
            raise ValueError(msg)

    def _prefill(
        self,
        prompt: NDArray[np.uint32],
        capacity: int,
        images: Sequence[Image],
        chunks: Iterable[int] | None,
        held: contextlib.ExitStack,
    ) -> _Run:
        if not len(prompt):
            msg = "a prompt needs at least one token, found none"
            raise ValueError(msg)
        self._check_images(prompt, images)
        self._images = {image.span.digest: image for image in images}
        for table in self._tables.values():
            table.bytes_read = 0
        tokens = np.zeros(capacity, np.uint32)
        tokens[: len(prompt)] = prompt
        run = self._adopt(tokens, len(prompt), images, held)
        tail = self._encode(run.state, len(prompt), chunks)
        # Once, whatever the chunks were: logits must not depend on them.
        last_rows = [Chunk(run.state, run.state.decoder_floor, len(prompt))]
        run.logits = self.model.logits(self.model.decode(tail, last_rows).rows(-1))[0]
        run.encoder_rows += len(prompt) - run.state.floors.start
        self._end("forward")
        self._publish(run, len(prompt))
        return run

    def _adopt(
        self,
        tokens: NDArray[np.uint32],
        prompt: int,
        images: Sequence[Image],
        held: contextlib.ExitStack,
    ) -> _Run:
        """Look the prompt up and start a sequence from what is there.

        Pages stay pinned as long as ``held`` is open; everything else is copied out of the match.
        """
        if self.cache is None:
            floors = Floors.replay(0, self.config.sliding_window)
            return _Run(self._state(tokens, floors, prompt, images), tokens)
        spans = tuple(image.span for image in images)
        with self.cache.lookup(tokens[:prompt], images=spans) as match:
            self._end("lookup")
            # Reading and loading shorten the match where a block turns out to be lost.
            entries, pages, snapshot = None, None, None
            if match.hit_tokens and self._restore == "read":
                entries = self.cache.read(match)
            if match.hit_tokens and (self._restore == "pages" or self._replay == "hook"):
                pages = self.cache.load(match)
                held.callback(pages.release)
            self._end("read")
            if match.window_hit or (match.hit_tokens and self._replay == "hook"):
                snapshot = self.cache.window(match, self.replay_hook)
            hit = match.hit_tokens
            floors = self._floors(match, snapshot, prompt)
            state = self._state(tokens, floors, prompt, images)
            run = _Run(state, tokens, hit, stored_tokens=hit)
            if entries is not None:
                run.state.entries.restore(entries, hit)
            elif pages is not None:
                run.state.entries.attach(self._reader(pages), hit)
        if snapshot is not None:
            run.state.restore_window(snapshot)
            run.windows_kept.add(hit)
        if snapshot is not None and snapshot.source == "pool":
            run.window_source = "pool"
        elif hit:
            run.window_source = "replay"
            run.replay_tokens = hit - floors.read_floor
            run.encoder_rows = run.replay_tokens if snapshot is not None else 0
        self._end("restore")
        return run

    def _end(self, stage: Stage) -> None:
        if self._on_stage is not None:
            self._on_stage(stage)

    def _floors(
        self, match: kvstore.Match, snapshot: kvstore.WindowSnapshot | None, prompt: int
    ) -> Floors:
        if snapshot is None:
            return Floors(
                start=match.replay_start,
                hit=match.write_floor,
                read_floor=match.read_floor,
                window_write_floor=match.window_write_floor,
            )
        # The window is there, but the decoder needs the encoder's output for the last W rows of the
        # prompt, which no cache keeps. Rows of the hit among them run again, for that output only.
        return Floors(
            start=min(match.hit_tokens, max(0, prompt - self.config.sliding_window)),
            hit=match.write_floor,
            read_floor=match.read_floor,
            window_write_floor=match.hit_tokens,
        )

    def _publish(self, run: _Run, end: int) -> None:
        """Offer the cache what tokens ``[0, end)`` have that it has not seen.

        A snapshot serves a hit at its end only, and a hit ends at a block boundary before the last
        token. So one is taken at the last boundary, and one a block earlier where ``end`` is itself
        a boundary: an exact repeat hits there.
        """
        if self.cache is None:
            return
        block = self.cache.block_tokens
        boundary = end // block * block
        if boundary > run.stored_tokens:
            start = run.stored_tokens
            entries = run.state.entries.export(start, end)
            self.cache.store(run.tokens[:end], entries, start=start, images=run.spans)
            run.stored_tokens = boundary
        stops = {boundary, boundary - block} if boundary == end else {boundary}
        for stop in sorted(stops - run.windows_kept):
            start = max(0, stop - self._window_rows, run.state.floors.read_floor)
            if stop < max(1, run.hit_tokens):
                continue
            source = "replay" if stop == run.hit_tokens else "engine"
            snapshot = run.state.snapshot(start, stop, source)
            self.cache.put_window(run.tokens[:end], snapshot, images=run.spans)
            run.windows_kept.add(stop)

    def _result(self, run: _Run, end: int, new_tokens: tuple[int, ...]) -> Result:
        entries = run.state.entries
        return Result(
            logits=run.logits,
            new_tokens=new_tokens,
            hit_tokens=run.hit_tokens,
            replay_tokens=run.replay_tokens,
            window_source=run.window_source,
            encoder_rows=run.encoder_rows,
            entries=entries.export(entries.bytes_from, end),
            entries_start=entries.bytes_from,
            drafted_tokens=run.drafted_tokens,
            accepted_tokens=run.accepted_tokens,
            engram_bytes=sum(table.bytes_read for table in self._tables.values()),
        )

    def _state(
        self,
        tokens: NDArray[np.uint32],
        floors: Floors,
        prompt: int,
        images: Sequence[Image] = (),
    ) -> SequenceState:
        return SequenceState(
            self.config,
            self.layout,
            tokens,
            floors=floors,
            prompt=prompt,
            dtype=self.dtype,
            images=images,
        )

    def _reader(self, pages: kvstore.PinnedPages) -> PageReader:
        """Return what reads entries out of ``pages``. Binary32 holds every FP4 value exactly."""
        cache = self.cache
        assert cache is not None

        def read(group: str, layer: int, indices: Tensor | None, /) -> Tensor:
            values = cache.device.gather(pages, group, layer, indices, torch.float32).cpu()
            return values if indices is not None else values.reshape(-1, values.shape[-1])

        return read

    def _encode(self, state: SequenceState, prompt: int, chunks: Iterable[int] | None) -> Streams:
        """Run the encoder over the prompt's rows from ``start`` on, cut at ``chunks``.

        Shapes:
            returns the encoder's output for the last W rows, which the decoder starts from:
            ``prompt - decoder_floor`` rows.
        """
        start, window = state.floors.start, self.config.sliding_window
        cuts = range(start, prompt, CHUNK_TOKENS) if chunks is None else chunks
        ends = sorted({cut for cut in cuts if start < cut < prompt} | {start, prompt})
        parts: list[Streams] = []
        for begin, end in itertools.pairwise(ends):
            parts.append(self.model.encode([Chunk(state, begin, end)]))
            parts = [Streams.join(parts).rows(-window)]
        return parts[0]


def _agreeing(draft: Sequence[int], choices: Sequence[int]) -> int:
    """Return how many tokens of a draft are what the model chooses after those before them."""
    for accepted, (token, choice) in enumerate(zip(draft, choices, strict=False)):
        if token != choice:
            return accepted
    return len(draft)
