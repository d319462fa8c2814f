"""Engine of the reference model: prefill, bounded replay and decoding with a prefix cache.

It uses only the public API of ``PrefixCache``, and shows the steps of every engine:

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
"""Default rows per pass; bounds the memory of gathered keys."""

Tokens = Sequence[int] | NDArray[np.integer]
WindowSource = Literal["pool", "replay", "none"]
Stage = Literal["lookup", "read", "restore", "forward"]
"""Stages of a prefill, in order; only the last without a cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Result of one request, with counters of its reuse.

    Shapes:
        logits ``[vocab]``, of the last prompt row; entries[group] uint8 ``[layers, n, entry_bytes]``.
    """

    logits: Tensor
    new_tokens: tuple[int, ...]
    hit_tokens: int
    """Tokens with restored global entries."""
    replay_tokens: int
    """Tokens of the hit that were recomputed to rebuild their window."""
    window_source: WindowSource
    """Source of the hit's encoder window; ``"none"`` without a hit."""
    encoder_rows: int
    """Rows computed by the encoder for the prompt, with replay."""
    entries: Entries
    """Global entries of tokens ``[entries_start, end)``, without the last new token."""
    entries_start: int
    """0, unless the hit was read from device pages."""
    drafted_tokens: int = 0
    """Tokens proposed by the drafter and verified by the model."""
    accepted_tokens: int = 0
    """Drafted tokens equal to the model's own choices."""
    engram_bytes: int = 0
    """Bytes gathered from Engram's tables."""


@dataclass(slots=True)
class _Request:
    """A request from its lookup to its end."""

    state: SequenceState
    tokens: NDArray[np.uint32]
    hit_tokens: int = 0
    replay_tokens: int = 0
    window_source: WindowSource = "none"
    encoder_rows: int = 0
    stored_tokens: int = 0
    """Block boundary up to which tokens were passed to the cache."""
    stored_windows: set[int] = field(default_factory=set)
    """Boundaries whose window was passed to the cache."""
    logits: Tensor = field(default_factory=lambda: torch.empty(0))
    drafted_tokens: int = 0
    accepted_tokens: int = 0

    @property
    def spans(self) -> tuple[kvstore.ImageSpan, ...]:
        """Image spans, as identified by the cache."""
        return tuple(image.span for image in self.state.images)


class ReferenceEngine:
    """Reference model with a prefix cache. Threads: one at a time.

    ``replay`` rebuilds a missing window: ``"fold"`` recomputes its rows as the first rows of the
    prefill; with ``"hook"`` the cache calls ``replay_hook``. The results are equal. ``restore`` reads a
    hit: ``"read"`` copies its entries to host memory, ``"pages"`` gathers the entries chosen by
    attention from device pages. The hook reads device pages too, so ``device_bytes=0`` requires
    ``"fold"`` and ``"read"``.
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
        """Create the model of ``seed`` or of ``weights``, in ``dtype``.

        ``tokenizer`` is the identity of the tokenizer. ``tables`` is the folder of the Engram tables;
        missing ones are created. ``window_rows`` limits the rows of a snapshot: by default 2 W - 2, with
        which a continuation of a pooled window is exact; the cache keeps at most its ``window_tokens``.
        ``on_stage`` is called with the name of each stage of a prefill at its end.
        """
        self.config = config
        self.cache = cache
        self.dtype = dtype
        self.layout = config.layout(dtype)
        self._tables: dict[int, DiskTable] = {}
        if config.engram_layer_ids:
            if tables is None:
                msg = f"layers {config.engram_layer_ids} look up n-grams; give a folder for their tables"
                raise ValueError(msg)
            self._tables = open_tables(config, Path(tables), seed=seed, dtype=dtype)
        # Config, seed and dtype decide all random weights, so they identify the weights.
        digest = hashlib.sha256(f"{config} {seed} {dtype}".encode())
        if weights is None:
            weights = random_weights(config, seed, dtype)
        else:
            for name, tensor in weights.tensors().items():
                digest.update(name.encode() + tensor.detach().numpy().tobytes())
        for layer, table in sorted(self._tables.items()):
            # An existing table may have other rows than those of the seed.
            digest.update(f"{layer} {kvstore.weights_digest(table.path)}".encode())
        self.model = ReferenceModel(config, weights, self._tables)
        self.namespace = kvstore.Namespace(
            model="reference", weights=digest.hexdigest(), tokenizer=tokenizer
        )
        """Namespace for opening a cache; engines with other weights share no block."""
        self._window_rows = window_rows or 2 * config.sliding_window - 2
        self._replay = replay
        self._restore = restore
        self._on_stage = on_stage
        self._images: dict[bytes, Image] = {}
        """Images of the current request by digest; a replay needs their features."""

    def prefill(
        self, tokens: Tokens, *, images: Sequence[Image] = (), chunks: Iterable[int] | None = None
    ) -> Result:
        """Compute a prompt, and store its entries and windows.

        ``images`` cover exactly the positions with the image token. ``chunks`` are positions that divide
        the prefill. In binary64 the result does not depend on them; in binary32 rounding may change
        the choice of an entry.
        """
        prompt = kvstore.as_tokens(tokens)
        with torch.inference_mode(), contextlib.ExitStack() as held:
            request = self._prefill(prompt, len(prompt), images, chunks, held)
            return self._result(request, len(prompt), ())

    def generate(
        self,
        tokens: Tokens,
        count: int,
        *,
        images: Sequence[Image] = (),
        chunks: Iterable[int] | None = None,
    ) -> Result:
        """Compute a prompt, then decode ``count`` tokens greedily; store the entries of both.

        With draft layers, a pass computes the last known token and a draft, which is rolled back from
        its first token that differs from the model's choice. So the output equals that without drafts,
        and rejected tokens are never stored. The last new token is not computed or stored.
        """
        if count < 1:
            raise ValueError(f"count must be at least 1, found {count}")
        prompt = kvstore.as_tokens(tokens)
        end = len(prompt) + count - 1
        with torch.inference_mode(), contextlib.ExitStack() as held:
            request = self._prefill(prompt, end, images, chunks, held)
            state, new_tokens = request.state, self._likeliest(request.logits[None])
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
                request.drafted_tokens += len(draft)
                request.accepted_tokens += accepted
            request.tokens[len(prompt) :] = new_tokens[:-1]
            self._publish(request, end)
            return self._result(request, end, tuple(new_tokens))

    def _likeliest(self, logits: Tensor) -> list[int]:
        """Return the likeliest token of each row except the image token. Shapes: ``[rows, vocab]``."""
        image = self.config.image_token_id
        if image is not None:
            logits = logits.index_fill(1, torch.tensor([image]), -math.inf)
        choices: list[int] = logits.argmax(dim=-1).tolist()
        return choices

    def _draft(self, state: SequenceState, token: int, position: int) -> tuple[int, ...]:
        """Return the draft to verify after ``token`` at ``position``."""
        if self.model.drafter is None:
            return ()
        return self.model.drafter.propose(state, token, position).trusted()

    def replay_hook(self, requests: list[kvstore.ReplayRequest], /) -> list[kvstore.WindowSnapshot]:
        """Rebuild the windows of all requests in one pass. A ``kvstore.ReplayHook``.

        Raises:
            ValueError: if a request has no pages (replay reads the hit's global entries, so
                ``PrefixCache.load`` precedes ``PrefixCache.window``), or an image is not of the current
                request, so that its features are unknown.
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
                images = [self._image(span) for span in request.images]
                state = self._state(request.tokens, floors, prompt=request.stop, images=images)
                state.entries.attach(self._reader(request.pages), request.write_floor)
                chunks.append(Chunk(state, request.start, request.stop))
            if chunks:
                self.model.encode(chunks)
            return [chunk.state.snapshot(chunk.start, chunk.stop, "replay") for chunk in chunks]

    def _image(self, span: kvstore.ImageSpan) -> Image:
        """Return the image of a span, at the span's position."""
        image = self._images.get(span.digest)
        if image is None:
            msg = f"found no features for the image at tokens [{span.start}, {span.stop}); pass the image to prefill"
            raise ValueError(msg)
        return dataclasses.replace(image, start=span.start)

    def _check_images(self, prompt: NDArray[np.uint32], images: Sequence[Image]) -> None:
        """Raise ``ValueError`` for images of an unexpected shape, or not exactly at the image tokens."""
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
            msg = f"images must cover exactly the tokens {token} of the prompt; token {at} differs"
            raise ValueError(msg)

    def _prefill(
        self,
        prompt: NDArray[np.uint32],
        capacity: int,
        images: Sequence[Image],
        chunks: Iterable[int] | None,
        held: contextlib.ExitStack,
    ) -> _Request:
        if not len(prompt):
            raise ValueError("a prompt needs at least one token, found none")
        self._check_images(prompt, images)
        self._images = {image.span.digest: image for image in images}
        for table in self._tables.values():
            table.bytes_read = 0
        tokens = np.zeros(capacity, np.uint32)
        tokens[: len(prompt)] = prompt
        request = self._adopt(tokens, len(prompt), images, held)
        tail = self._encode(request.state, len(prompt), chunks)
        # One pass, so that logits do not depend on the chunks.
        last_rows = [Chunk(request.state, request.state.decoder_floor, len(prompt))]
        request.logits = self.model.logits(self.model.decode(tail, last_rows).rows(-1))[0]
        request.encoder_rows += len(prompt) - request.state.floors.start
        self._end("forward")
        self._publish(request, len(prompt))
        return request

    def _adopt(
        self,
        tokens: NDArray[np.uint32],
        prompt: int,
        images: Sequence[Image],
        held: contextlib.ExitStack,
    ) -> _Request:
        """Start a sequence from the hit of its prompt. Pages stay pinned while ``held`` is open."""
        if self.cache is None:
            floors = Floors.replay(0, self.config.sliding_window)
            return _Request(self._state(tokens, floors, prompt, images), tokens)
        spans = tuple(image.span for image in images)
        with self.cache.lookup(tokens[:prompt], images=spans) as match:
            self._end("lookup")
            # A missing or corrupt block shortens the match in these calls.
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
            request = _Request(state, tokens, hit, stored_tokens=hit)
            if entries is not None:
                request.state.entries.restore(entries, hit)
            elif pages is not None:
                request.state.entries.attach(self._reader(pages), hit)
        if snapshot is not None:
            request.state.restore_window(snapshot)
            request.stored_windows.add(hit)
        if snapshot is not None and snapshot.source == "pool":
            request.window_source = "pool"
        elif hit:
            request.window_source = "replay"
            request.replay_tokens = hit - floors.read_floor
            request.encoder_rows = request.replay_tokens if snapshot is not None else 0
        self._end("restore")
        return request

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
        # The decoder needs the encoder's output of the prompt's last W rows, which is never stored, so
        # rows of the hit among them are recomputed despite the restored window.
        return Floors(
            start=min(match.hit_tokens, max(0, prompt - self.config.sliding_window)),
            hit=match.write_floor,
            read_floor=match.read_floor,
            window_write_floor=match.hit_tokens,
        )

    def _publish(self, request: _Request, end: int) -> None:
        """Store the entries and windows of tokens ``[0, end)`` that are not yet in the cache.

        A snapshot is usable only by a hit that ends where it ends, and a hit ends at a block boundary
        before the last token. So there is one at the last boundary and, if that is ``end``, one a block
        earlier, for an exact repeat.
        """
        if self.cache is None:
            return
        block = self.cache.block_tokens
        boundary = end // block * block
        if boundary > request.stored_tokens:
            start = request.stored_tokens
            entries = request.state.entries.export(start, end)
            self.cache.store(request.tokens[:end], entries, start=start, images=request.spans)
            request.stored_tokens = boundary
        stops = {boundary, boundary - block} if boundary == end else {boundary}
        for stop in sorted(stops - request.stored_windows):
            start = max(0, stop - self._window_rows, request.state.floors.read_floor)
            if stop < max(1, request.hit_tokens):
                continue
            source = "replay" if stop == request.hit_tokens else "engine"
            snapshot = request.state.snapshot(start, stop, source)
            self.cache.put_window(request.tokens[:end], snapshot, images=request.spans)
            request.stored_windows.add(stop)

    def _result(self, request: _Request, end: int, new_tokens: tuple[int, ...]) -> Result:
        entries = request.state.entries
        return Result(
            logits=request.logits,
            new_tokens=new_tokens,
            hit_tokens=request.hit_tokens,
            replay_tokens=request.replay_tokens,
            window_source=request.window_source,
            encoder_rows=request.encoder_rows,
            entries=entries.export(entries.bytes_from, end),
            entries_start=entries.bytes_from,
            drafted_tokens=request.drafted_tokens,
            accepted_tokens=request.accepted_tokens,
            engram_bytes=sum(table.bytes_read for table in self._tables.values()),
        )

    def _state(
        self, tokens: NDArray[np.uint32], floors: Floors, prompt: int, images: Sequence[Image] = ()
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
        """Return a reader of entries in ``pages``. Binary32 represents every FP4 value exactly."""
        cache = self.cache
        assert cache is not None

        def read(group: str, layer: int, indices: Tensor | None, /) -> Tensor:
            values = cache.device.gather(pages, group, layer, indices, torch.float32).cpu()
            return values if indices is not None else values.reshape(-1, values.shape[-1])

        return read

    def _encode(self, state: SequenceState, prompt: int, chunks: Iterable[int] | None) -> Streams:
        """Compute the encoder for the prompt's rows from ``start`` on, divided at ``chunks``.

        Shapes:
            returns the decoder's input, the last W encoder outputs: ``prompt - decoder_floor`` rows.
        """
        start, window = state.floors.start, self.config.sliding_window
        cuts = range(start, prompt, CHUNK_TOKENS) if chunks is None else chunks
        ends = sorted({cut for cut in cuts if start < cut < prompt} | {start, prompt})
        last: list[Streams] = []
        for begin, end in itertools.pairwise(ends):
            last.append(self.model.encode([Chunk(state, begin, end)]))
            last = [Streams.join(last).rows(-window)]
        return last[0]


def _agreeing(draft: Sequence[int], choices: Sequence[int]) -> int:
    """Return the number of leading tokens of a draft that equal the model's choices."""
    pairs = enumerate(zip(draft, choices, strict=False))
    return next((i for i, (token, choice) in pairs if token != choice), len(draft))
