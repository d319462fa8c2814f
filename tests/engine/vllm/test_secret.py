"""A secret changes names and nothing else: hits, windows, tokens and events as without one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engine import require

require.engine("vllm", "vllm", "tests.engine.vllm.engine")

from kvstore.identity.block import KEY_BYTES, BlockKey
from tests.engine.vllm.engine import BLOCK, ask, connectors, engine, forget, prompt, save_model
from tests.stores import writer_of

pytestmark = pytest.mark.filterwarnings("ignore")

LENGTHS = (90, 128, 129, 300, 513, 897)
HITS = [(length - 1) // BLOCK * BLOCK for length in LENGTHS]
PROMPTS = [prompt(length, seed=length) for length in LENGTHS]
Answers = list[tuple[int, ...]]


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def cold(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, str, Answers]:
    """The answers of vLLM without any cache, for a model without windows and one with windows."""
    model = save_model(tmp_path_factory.mktemp(request.param), request.param)
    with engine(model, enable_prefix_caching=False) as llm:
        return request.param, model, [tokens for tokens, _ in ask(llm, PROMPTS)]


@pytest.mark.parametrize("secret", [False, True])
def test_hits_tokens_and_events_with_a_secret_and_without(
    cold: tuple[str, str, Answers], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, secret: bool
) -> None:
    kind, model, answers = cold
    misses, hits = list(zip(answers, [0] * 6, strict=True)), list(zip(answers, HITS, strict=True))
    events: list[Any] = []
    with engine(model, tmp_path / "s", extra={"secret": secret}) as llm:
        scheduler, worker = connectors(llm)
        scheduler.scheduler_side._sends_events = True
        side_take = scheduler.take_events

        def take() -> tuple[()]:
            events.extend(side_take())
            return ()

        monkeypatch.setattr(scheduler, "take_events", take)
        assert ask(llm, PROMPTS) == misses
        forget(llm)
        assert ask(llm, PROMPTS) == hits
        ssd = writer_of(worker._stores[0]).ssd
        named = {name for event in events for name in event.block_hashes}
        assert len(named) == sum((length + 7) // BLOCK for length in LENGTHS)
        for name in named:
            assert ssd.record(BlockKey(name[:KEY_BYTES])) is not None
        assert not scheduler.scheduler_side.faults._logged
        assert not worker.worker_side.faults._logged
    with engine(model, tmp_path / "s", extra={"secret": secret}) as llm:
        assert ask(llm, PROMPTS) == (hits if kind == "llama" else misses), "no window survives"
        forget(llm)
        assert ask(llm, PROMPTS) == hits
