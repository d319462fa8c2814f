"""At every prompt length: a continuation from a snapshot equals the cold prefill where it must.

A prompt of N tokens hits at H; of the encoder window, rows ``[H - R, H)`` are restored. Decoder replay
runs rows ``[N - W, N)``, whose encoder windows reach down to ``N - 2 W + 1``. So entries are those of the
cold run if ``R >= W - 1``, and logits are if and only if the snapshot reaches that far down as well:
``max(0, H - R) <= max(0, N - 2 W + 1)``. With R = 2 W - 2 it always does.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvstore.reference.config import ReferenceConfig
from kvstore.reference.model import ReferenceModel
from kvstore.reference.residual import Streams
from kvstore.reference.state import Chunk, Floors, SequenceState, rows_of
from kvstore.reference.vision import Image
from tests.reference.support import (
    LOGITS_EQUAL,
    SYSTEMS,
    engine_of,
    image_at,
    prompt_tokens,
    with_images,
)

LOG = logging.getLogger(__name__)
"""How many codes flip in binary32; shown with ``-o log_cli=1 --log-level=INFO``."""

BATCH = 16
"""Prompts in one pass: it bounds memory."""

# Three layers of the encoder and three of the decoder, narrow: cheap enough for every length.
SHALLOW = {
    "num_hidden_layers": 6,
    "compress_ratios": (0, 2, 2, 1, 1, 1, 0),
    "kv_source_layer_ids": (1, 3),
    "index_source_layer_ids": (1, 3),
    "hidden_size": 16,
    "q_lora_rank": 16,
    "num_attention_heads": 1,
    "index_n_heads": 2,
    "intermediate_size": 16,
    "index_topk": 16,
}
IN_SHALLOW: dict[str, dict[str, object]] = {
    "candidate_source_layer_id": {
        "index_source_layer_ids": (1, 3, 4),
        "candidate_source_layer_id": 3,
    },
    "engram_layer_ids": {"engram_layer_ids": (1,)},
    "num_nextn_predict_layers": {
        "num_nextn_predict_layers": 1,
        "dspark_target_layer_ids": (4, 5),
    },
}
"""Where each system's layers are in it, by the field that switches the system on."""
IMAGE = (10, 26)
"""Where the prompt has an image: a window that ends at 32 starts inside it."""


def shallow(system: str, window: int) -> ReferenceConfig:
    changes: dict[str, object] = {**SYSTEMS[system], **SHALLOW, "sliding_window": window}
    for field in IN_SHALLOW.keys() & SYSTEMS[system]:
        changes.update(IN_SHALLOW[field])
    return ReferenceConfig.tiny(**changes)


@dataclass(frozen=True)
class Cold:
    """A cold run of the longest prompt. Any shorter prompt is a part of it: rows read no later ones."""

    model: ReferenceModel
    state: SequenceState
    encoded: Streams

    def decoded(self, lengths: Iterable[int]) -> list[Tensor]:
        """Return the logits of the last W rows of each prompt; nothing but a decoder's floor differs."""
        states = []
        for length in lengths:
            state = start(self.model.config, self.state, length, Floors.replay(0, 1))
            state.entries = self.state.entries
            states.append(state)
        return decode(self.model, states, [self.encoded.rows(0, len(s.tokens)) for s in states])


def start(
    config: ReferenceConfig, whole: SequenceState, length: int, floors: Floors
) -> SequenceState:
    """Begin a sequence of the first ``length`` tokens of another one."""
    return SequenceState(
        config,
        config.layout(whole.windows.dtype),
        whole.tokens[:length].numpy().astype(np.uint32),
        floors=floors,
        prompt=length,
        dtype=whole.windows.dtype,
        images=whole.images,
    )


def decode(
    model: ReferenceModel, states: Sequence[SequenceState], encoded: Sequence[Streams]
) -> list[Tensor]:
    """Run the decoder over the last W rows of each sequence, all in one pass."""
    window = model.config.sliding_window
    tails = [
        rows.rows(-min(window, len(s.tokens))) for rows, s in zip(encoded, states, strict=True)
    ]
    chunks = [Chunk(s, max(0, len(s.tokens) - window), len(s.tokens)) for s in states]
    logits = model.logits(model.decode(Streams.join(tails), chunks))
    return list(logits.split([len(tail.read) for tail in tails]))  # type: ignore[no-untyped-call]


@functools.cache
def cold(
    config: ReferenceConfig, length: int, images: tuple[Image, ...], dtype: torch.dtype
) -> Cold:
    tokens = prompt_tokens(length)
    model = engine_of(config, dtype=dtype).model
    whole = SequenceState(
        config,
        config.layout(dtype),
        with_images(config, tokens, images),
        floors=Floors.replay(0, config.sliding_window),
        prompt=length,
        dtype=dtype,
        images=images,
    )
    return Cold(model, whole, model.encode([Chunk(whole, 0, length)]))


def continued(cold: Cold, length: int, hit: int, rows: int) -> SequenceState:
    """Begin a prompt from a hit of the cold run, as the engine does, with ``rows`` window rows."""
    window = cold.model.config.sliding_window
    floors = Floors(
        start=min(hit, max(0, length - window)),
        hit=hit,
        read_floor=max(0, hit - rows),
        window_write_floor=hit,
    )
    state = start(cold.model.config, cold.state, length, floors)
    if hit:
        state.entries.restore(cold.state.entries.export(0, hit), hit)
        state.restore_window(cold.state.snapshot(max(0, hit - rows), hit, "engine"))
    return state


def suffix(state: SequenceState, hit: int) -> dict[str, NDArray[np.uint8]]:
    return state.entries.export(hit, len(state.tokens))


def compared(cold: Cold, states: Sequence[SequenceState]) -> Iterator[tuple[list[str], float]]:
    """Run each sequence from its start; yield the groups whose entries of the suffix are not those of
    the cold run, and by how much the last logits differ.
    """
    chunks = [Chunk(state, state.floors.start, len(state.tokens)) for state in states]
    encoded = cold.model.encode(chunks)
    parts = [encoded.rows(own.start, own.stop) for _, own in rows_of(chunks)]
    warm = decode(cold.model, states, parts)
    expected = cold.decoded(len(state.tokens) for state in states)
    for state, own, other in zip(states, warm, expected, strict=True):
        hit = state.floors.hit
        same = cold.state.entries.export(hit, len(state.tokens))
        stored = suffix(state, hit)
        changed = [name for name in stored if not np.array_equal(stored[name], same[name])]
        yield changed, float((own[-1] - other[-1]).abs().max())


def check(cold: Cold, lengths: Sequence[int], block: int, rows: int) -> None:
    """Compare prompts of ``lengths`` that hit at their last block boundary with the cold run."""
    window = cold.model.config.sliding_window
    for at in range(0, len(lengths), BATCH):
        batch = lengths[at : at + BATCH]
        hits = [(length - 1) // block * block for length in batch]
        states = [continued(cold, *each, rows) for each in zip(batch, hits, strict=True)]
        for length, hit, (changed, difference) in zip(
            batch, hits, compared(cold, states), strict=True
        ):
            assert not changed, (length, changed)
            reaches = max(0, hit - rows) <= max(0, length - 2 * window + 1)
            assert (difference < LOGITS_EQUAL) == reaches, (length, hit, difference)


def test_every_length_to_400_continues_as_the_cold_run() -> None:
    """With 254 rows, and hits at every 16 tokens."""
    config = shallow("all", 128)
    image = image_at(120, height=3, width=4, seed=3)
    with torch.inference_mode():
        # A prompt does not end inside an image; without it, it is another prompt.
        check(cold(config, 140, (), torch.float64), range(1, image.span.stop), 16, 254)
        check(cold(config, 400, (image,), torch.float64), range(image.span.stop, 401), 16, 254)


def test_with_128_rows_lengths_follow_the_law() -> None:
    """After hits at 256 and 384: equal from suffixes of 127 tokens on, and not before."""
    config = shallow("all", 128)
    image = image_at(120, height=3, width=4, seed=3)
    with torch.inference_mode():
        check(
            cold(config, 400, (image,), torch.float64),
            [*range(257, 375, 9), *range(375, 401)],
            128,
            128,
        )


@pytest.mark.parametrize("rows", [254, 128])
def test_lengths_past_the_halo_continue_as_the_cold_run(rows: int) -> None:
    """After W + (layers - 1) (W - 1) tokens, a row no longer depends on the start."""
    config = dataclasses.replace(
        ReferenceConfig.tiny(sliding_window=128, **SYSTEMS["all"]), hidden_size=32
    )
    halo = 128 + (config.last_owner - 1) * 127
    with torch.inference_mode():
        run = cold(config, 1024, (image_at(700, seed=3),), torch.float64)
        lengths = [897, 898, 960, 1021, 1022, 1023, 1024]
        assert lengths[0] > halo
        check(run, lengths, 128, rows)


@pytest.mark.parametrize(
    ("system", "rows"),
    [*((s, rows) for s in SYSTEMS for rows in (30, 16)), ("all", 24), ("all", 15)],
)
def test_every_system_continues_as_the_cold_run(system: str, rows: int) -> None:
    """The same law at W = 16, with each system on and the others off."""
    config = shallow(system, 16)
    images = (
        () if config.image_token_id is None else (image_at(IMAGE[0], height=2, width=6, seed=4),)
    )
    assert all((image.span.start, image.span.stop) == IMAGE for image in images)
    with torch.inference_mode():
        run = cold(config, 50, images, torch.float64)
        first = images[0].span.stop if images else 17
        check(run, range(first, 51), 16, rows)


@pytest.mark.parametrize(("fewer", "is_exact"), [(0, True), (1, False)])
def test_a_halo_replay_is_the_cold_run_and_a_row_less_is_not(fewer: int, is_exact: bool) -> None:
    """A row of the encoder's output reaches W - 1 rows down through each of its layers, and no further."""
    config = shallow("all", 16)
    halo = config.last_owner * (config.sliding_window - 1) - fewer
    images = (image_at(IMAGE[0], height=2, width=6, seed=4),)
    with torch.inference_mode():
        run = cold(config, 140, images, torch.float64)
        # Beyond a window the decoder starts after the hit, and a row less may go unnoticed.
        lengths = [97, 98, 103, 111, 112, *([113, 120, 128] if is_exact else [])]
        states = []
        for length in lengths:
            # The decoder needs the encoder's output from here on, and that is the halo's end.
            needed = min(96, length - config.sliding_window)
            floor = needed - halo
            floors = Floors(start=floor, hit=96, read_floor=floor, window_write_floor=floor)
            state = start(config, run.state, length, floors)
            state.entries.restore(run.state.entries.export(0, 96), 96)
            states.append(state)
        for length, (changed, difference) in zip(lengths, compared(run, states), strict=True):
            assert (difference < LOGITS_EQUAL) == is_exact, (length, difference)
            # Entries of the suffix need the windows of the hit's last rows only.
            assert not changed or not is_exact


def test_in_binary32_few_codes_of_a_continuation_flip() -> None:
    """Products of other shapes round differently, and a value at a rounding border tips over."""
    config = shallow("all", 128)
    with torch.inference_mode():
        run = cold(config, 400, (), torch.float32)
        state = continued(run, 400, 256, 254)
        # Cut as no cold run is, so that shapes differ.
        for begin, end in ((256, 293), (293, 400)):
            run.model.encode([Chunk(state, begin, end)])
        flipped = total = 0
        for name, stored in suffix(state, 256).items():
            nibbles = config.layout().group(name).planes[0]
            changed = (stored ^ run.state.entries.export(256, 400)[name])[..., :nibbles]
            flipped += int((changed & 0x0F != 0).sum()) + int((changed & 0xF0 != 0).sum())
            total += 2 * changed.size
    LOG.info("binary32: %d of %d codes flipped", flipped, total)
    assert flipped < total / 100
