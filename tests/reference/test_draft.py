"""Drafts change how many tokens a pass decodes, and nothing else: not the output, not the cache."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from kvstore.reference.config import ReferenceConfig
from kvstore.reference.draft import Proposal
from kvstore.reference.engine import ReferenceEngine, Result
from kvstore.reference.state import Chunk, Floors, SequenceState
from tests.reference.support import (
    LOGITS_EQUAL,
    SYSTEMS,
    difference,
    engine_of,
    entries_equal,
    open_cache,
    prompt_tokens,
)

BLOCK = 32
COUNT = 24
PROMPT = 51
SMALL = ReferenceConfig.tiny(sliding_window=16, index_topk=8, **SYSTEMS["all"])


def plain(engine: ReferenceEngine, tokens: NDArray[np.uint32], count: int) -> Result:
    """Decode one token at a time with the same weights."""
    engine.model.drafter = None
    return engine.generate(tokens, count)


@functools.cache
def expected() -> Result:
    return plain(engine_of(SMALL), prompt_tokens(PROMPT), COUNT)


def sequence(tokens: NDArray[np.uint32], prompt: int) -> SequenceState:
    """Begin a sequence whose first ``prompt`` tokens are the prompt."""
    return SequenceState(
        SMALL,
        SMALL.layout(),
        tokens,
        floors=Floors.replay(0, 16),
        prompt=prompt,
        dtype=torch.float64,
    )


def drafting(engine: ReferenceEngine, draft: Callable[[int], list[int]]) -> ReferenceEngine:
    """Let the drafter propose ``draft(position)`` after the token at a position, with confidence."""

    class Scripted:
        passes = 0

        def remember(self, inputs: torch.Tensor, chunks: object) -> None:
            pass

        def propose(self, state: SequenceState, token: int, position: int) -> Proposal:
            self.passes += 1
            # What failed before is gone.
            assert bool(state.windows[:, position:].isnan().all())
            tokens = draft(position)
            return Proposal(tuple(tokens), torch.ones(len(tokens)))

    scripted: Any = Scripted()
    engine.model.drafter = scripted
    return engine


def right(upto: int) -> Callable[[int], list[int]]:
    """Propose five tokens, of which the model will choose the first ``upto``."""
    answer = expected().new_tokens

    def draft(position: int) -> list[int]:
        at = position - PROMPT + 1
        tokens = [*answer[at : at + 5], *[0] * 5][:5]
        return [t if place < upto else (t + 1) % 256 for place, t in enumerate(tokens)]

    return draft


@pytest.mark.parametrize("upto", [0, 1, 2, 3, 4, 5])
def test_whatever_is_accepted_the_output_is_that_of_plain_decoding(upto: int) -> None:
    engine = drafting(engine_of(SMALL), right(upto))
    result = engine.generate(prompt_tokens(PROMPT), COUNT)
    drafter: Any = engine.model.drafter

    assert result.new_tokens == expected().new_tokens
    assert entries_equal(result, expected())
    assert result.accepted_tokens <= result.drafted_tokens
    # Each pass gains a token and what it accepted; the last drafts are cut at the count.
    passes = -(-(COUNT - 1) // (upto + 1))
    assert drafter.passes == passes
    assert result.accepted_tokens >= COUNT - 1 - passes


def test_the_drafters_own_drafts_are_verified_like_any_other() -> None:
    engine = engine_of(SMALL)
    assert engine.model.drafter is not None
    result = engine.generate(prompt_tokens(PROMPT), COUNT)

    assert result.drafted_tokens > 0
    assert result.new_tokens == expected().new_tokens
    assert entries_equal(result, expected())


@pytest.mark.parametrize("upto", [0, 2, 5])
def test_the_cache_never_hears_of_a_draft(
    upto: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After drafts that fail in every way, the state equals that of plain decoding, and continues it."""
    tokens, answer = prompt_tokens(PROMPT), expected()
    whole = np.concatenate([tokens, np.array(answer.new_tokens, np.uint32)])
    with open_cache(tmp_path, SMALL, window_rows=30, block_tokens=BLOCK) as cache:
        stored: list[list[int]] = []
        engine = drafting(engine_of(SMALL, cache), right(upto))
        store = cache.store

        def spy(tokens: NDArray[np.uint32], *rest: Any, **named: Any) -> Any:
            stored.append(tokens.tolist())
            return store(tokens, *rest, **named)

        monkeypatch.setattr(cache, "store", spy)
        engine.generate(tokens, COUNT)
        cache.flush()
        with cache.lookup(whole) as match:
            kept = cache.read(match)
        warm = engine_of(SMALL, cache).prefill(whole)

    for prefix in stored:
        assert prefix == whole[: len(prefix)].tolist()
    assert kept.tokens == warm.hit_tokens == (PROMPT + COUNT - 1) // BLOCK * BLOCK
    for name, entries in kept.items():
        assert np.array_equal(entries, answer.entries[name][:, : entries.shape[1]])
    assert warm.window_source == "pool"
    assert difference(warm, engine_of(SMALL).prefill(whole)) < LOGITS_EQUAL


@pytest.mark.parametrize("end", [17, 18, 23, 24])
def test_after_a_rollback_nothing_of_what_was_run_is_left(end: int) -> None:
    """At odd and even lengths: a group of two may be cut in half."""
    model = engine_of(SMALL).model
    tokens = prompt_tokens(30)
    states = []
    for prompt in (tokens, np.concatenate([tokens[:end], prompt_tokens(30 - end, seed=9)])):
        state = sequence(prompt, 16)
        chunk = [Chunk(state, 0, 30)]
        model.decode(model.encode(chunk), chunk)
        state.rollback(end)
        states.append(state)

    one, other = states
    assert bool(one.windows[:, end:].isnan().all())
    for field in ("tokens", "windows"):
        assert torch.allclose(
            getattr(one, field), getattr(other, field), atol=LOGITS_EQUAL, equal_nan=True
        )
    for owner, rows in one.groups.items():
        assert torch.allclose(rows, other.groups[owner], atol=LOGITS_EQUAL, equal_nan=True)
    for name, entries in one.entries.export(0, 30).items():
        assert np.array_equal(entries, other.entries.export(0, 30)[name])


def test_drafts_after_a_hit_read_what_decoder_replay_wrote(tmp_path: Path) -> None:
    """No cache keeps the drafter's window, and after replay of the decoder nobody misses it."""
    tokens = prompt_tokens(90)
    with open_cache(tmp_path, SMALL, window_rows=30, block_tokens=BLOCK) as cache:
        engine = engine_of(SMALL, cache)
        first = engine.generate(tokens, 20)
        cache.flush()
        again = engine.generate(tokens, 20)

    assert (again.hit_tokens, again.window_source) == (64, "pool")
    assert first.new_tokens == again.new_tokens
    assert (first.drafted_tokens, first.accepted_tokens) == (
        again.drafted_tokens,
        again.accepted_tokens,
    )


def test_a_draft_ends_where_it_is_no_longer_likely_to_hold() -> None:
    proposal = Proposal((1, 2, 3, 4), torch.tensor([0.9, 0.8, 0.6, 1.0]))

    assert proposal.trusted(0.5) == (1, 2)
    assert proposal.trusted(0.4) == (1, 2, 3, 4)
    assert proposal.trusted(0.95) == ()


def test_a_draft_depends_on_every_token_before_it_in_the_block() -> None:
    """The Markov head: the same hidden rows, another token before, another choice."""
    engine = engine_of(SMALL)
    drafter = engine.model.drafter
    assert drafter is not None
    state = sequence(prompt_tokens(30), 30)
    chunk = [Chunk(state, 0, 30)]
    engine.model.decode(engine.model.encode(chunk).rows(-16), [Chunk(state, 14, 30)])

    proposals = {drafter.propose(state, token, 30).tokens for token in range(40)}

    assert all(len(tokens) == SMALL.dspark_block_size for tokens in proposals)
    assert len(proposals) > 10


@pytest.mark.parametrize(("row", "is_read"), [(13, False), (14, True), (29, True)])
def test_a_draft_reads_the_window_that_ends_before_its_token(row: int, is_read: bool) -> None:
    """A draft at token 30 reads draft rows 14 to 29: the last W, to the one before it."""
    engine = engine_of(SMALL)
    drafter = engine.model.drafter
    assert drafter is not None
    state = sequence(prompt_tokens(30), 16)
    chunk = [Chunk(state, 0, 30)]
    engine.model.decode(engine.model.encode(chunk), chunk)
    state.windows[SMALL.draft_layers.start, row] = torch.nan

    assert bool(drafter.propose(state, 5, 30).confidence.isnan().any()) == is_read
