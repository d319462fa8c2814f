"""Models with sliding layers in vLLM, which cannot replay them: a hit needs its window."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engine import require

require.engine("vllm", "vllm", "tests.engine.vllm.engine")

from kvstore.engine.vllm.messages import Work
from tests.engine.vllm.engine import BLOCK, ask, connectors, engine, prompt, save_model
from tests.stores import inside

pytestmark = pytest.mark.filterwarnings("ignore")

LENGTHS = (90, 128, 129, 256, 300, 513, 900)


def repeat(llm: Any) -> list[tuple[tuple[int, ...], int]]:
    """Answers without vLLM's own prefix cache."""
    assert llm.reset_prefix_cache()
    return ask(llm, [prompt(length, seed=length) for length in LENGTHS], count=12)


def drop_windows(llm: Any) -> None:
    pool = inside(connectors(llm)[1]._stores[0]).window
    for key in pool.keys():  # noqa: SIM118 - not a mapping
        pool._drop(key, pool._held[key])


@pytest.mark.parametrize("kind", ["gpt_oss", "gemma3"])
def test_with_its_window_a_hit_answers_alike_and_without_it_is_shorter(
    kind: str, tmp_path: Path
) -> None:
    model = save_model(tmp_path / kind, kind)
    with engine(model, enable_prefix_caching=False) as llm:
        cold = [tokens for tokens, _ in repeat(llm)]
        longer = ask(llm, [[*prompt(900, seed=900), *cold[-1]]])[0][0]
    with engine(model, tmp_path / "s") as llm:
        assert repeat(llm) == [(tokens, 0) for tokens in cold]
        hits = [(length - 1) // BLOCK * BLOCK for length in LENGTHS]
        assert repeat(llm) == list(zip(cold, hits, strict=True))

        # What a window ends at is a hit; a longer prefix has no window there.
        stats = connectors(llm)[1]._stores[0].stats()
        assert stats["tiers"]["ssd"]["blocks"] == sum(
            (length + 11) // BLOCK for length in LENGTHS
        ), "of global groups, and of windows none"

        # The scheduler believes in windows that are gone: a failed load, and the right answer.
        drop_windows(llm)
        assert repeat(llm) == [(tokens, 0) for tokens in cold]
        # The windows were taken again. The same once more without a race is an honest miss.
        connectors(llm)[0].scheduler_side._pools = {0: frozenset()}
        assert repeat(llm) == [(tokens, 0) for tokens in cold]
        worker = connectors(llm)[1].worker_side
        assert not worker.faults._logged
    with engine(model, tmp_path / "s") as llm:
        assert repeat(llm) == [(tokens, 0) for tokens in cold], "windows survive no restart"
        assert repeat(llm) == list(zip(cold, hits, strict=True))
        assert ask(llm, [[*prompt(900, seed=900), *cold[-1]]])[0][0] == longer


def test_a_window_goes_into_the_blocks_of_its_request_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A local hit shares sliding blocks with other requests: they keep every byte."""
    model = save_model(tmp_path / "gemma3", "gemma3")  # a window of 300 tokens: three pages
    ids = prompt(640, seed=5)
    with engine(model, enable_prefix_caching=False) as llm:
        cold = ask(llm, [[*ids, 7]])[0][0]
    with engine(model, tmp_path / "s") as llm:
        ask(llm, [[*ids, 7]])
        llm.reset_prefix_cache()
        ask(llm, [[*ids[:512], 9, 9]])
        worker = connectors(llm)[1].worker_side
        put_back = worker._put_back
        seen: list[Work] = []

        def watch(work: Work, window: Any) -> None:
            shared = {
                layers.name: [b for b in work.blocks[layers.index][: work.start // BLOCK] if b]
                for layers in worker.engine.windows
            }
            before = {
                name: [page[ids].clone() for page in worker._pages[name]]
                for name, ids in shared.items()
            }
            for name, ids in shared.items():  # what is left alone is worth noticing
                for page in worker._pages[name]:
                    page[ids] = 0x5A
            put_back(work, window)
            for name, ids in shared.items():
                for page, held in zip(worker._pages[name], before[name], strict=True):
                    assert bool((page[ids] == 0x5A).all())
                    page[ids] = held
            seen.append(work)

        monkeypatch.setattr(worker, "_put_back", watch)
        tokens, cached = ask(llm, [[*ids, 7]])[0]
        assert (tokens, cached) == (cold, 640)
        assert [work.start for work in seen] == [512]
        assert not worker.faults._logged
