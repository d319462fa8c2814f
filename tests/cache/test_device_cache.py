"""Device pages: promotion, pins, eviction and the gather of selected entries."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from kvstore import ConfigError, Layout, PinnedPages
from kvstore.codec import codec_for
from kvstore.frame.format import FrameFormat
from tests.stores import BLOCK, DENSE, WINDOWED, entries_of, open_cache, paged, tokens_of, writer_of

LAYOUTS = pytest.mark.parametrize("layout", [DENSE, WINDOWED], ids=["dense", "windowed"])


def page_bytes(layout: Layout) -> int:
    return FrameFormat(layout, BLOCK).payload_bytes


def valid_entries(layout: Layout, count: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """Entries that decode to numbers, made by the codecs from random values."""
    generator = torch.Generator().manual_seed(seed)
    made = {}
    for group in layout.global_groups:
        shape = (len(group.layers), count // group.tokens_per_entry, group.values)
        values = torch.randn(shape, generator=generator).to(torch.bfloat16)
        made[group.name] = codec_for(group).encode(values)
    return made


@LAYOUTS
def test_gathered_entries_are_the_stored_ones_decoded(tmp_path: Path, layout: Layout) -> None:
    tokens = tokens_of(9 * BLOCK + 1)
    entries = valid_entries(layout, len(tokens))
    with open_cache(tmp_path / "s", layout, device_bytes="1MiB") as cache:
        cache.store(tokens, entries)
        cache.flush()
        with cache.lookup(tokens) as match:
            pages = cache.load(match)
        assert pages.tokens == 9 * BLOCK
        generator = torch.Generator().manual_seed(1)
        for group in layout.global_groups:
            total = 9 * BLOCK // group.tokens_per_entry
            for position, layer in enumerate(group.layers):
                expected = codec_for(group).decode(
                    entries[group.name][position, :total], torch.float32
                )
                every = cache.device.gather(pages, group.name, layer, None, torch.float32)
                assert torch.equal(every[0], expected)
                chosen = torch.randint(-1, total, (3, 17), generator=generator)
                found = cache.device.gather(pages, group.name, layer, chosen, torch.float32)
                assert found.shape == (3, 17, group.values)
                wanted = expected[chosen.clamp(min=0)] * (chosen >= 0).unsqueeze(-1)
                assert torch.equal(found, wanted)
        pages.release()


def test_gather_names_what_is_wrong(tmp_path: Path) -> None:
    tokens = tokens_of(2 * BLOCK + 1)
    with open_cache(tmp_path / "s", WINDOWED, device_bytes="1MiB") as cache:
        cache.store(tokens, valid_entries(WINDOWED, len(tokens)))
        cache.flush()
        with cache.lookup(tokens) as match:
            pages = cache.load(match)
        gather = cache.device.gather
        with pytest.raises(ValueError, match="unknown GLOBAL group 'window', expected one of main"):
            gather(pages, "window", 0, None, torch.float32)
        with pytest.raises(
            ValueError, match=r"layer 0 owns no 'main' entries, expected .*\[1, 3\]"
        ):
            gather(pages, "main", 0, None, torch.float32)
        for index in (8, -2):
            with pytest.raises(ValueError, match=rf"must lie in \[-1, 8\), found {index}"):
                gather(pages, "main", 1, torch.tensor([[0, index]]), torch.float32)
        with pytest.raises(ValueError, match=r"must be \[queries, k\], found shape \[2\]"):
            gather(pages, "main", 1, torch.tensor([0, 1]), torch.float32)
        with pytest.raises(ValueError, match="unknown dtype 'bf17', expected a torch dtype"):
            gather(pages, "main", 1, None, "bf17")
        named = gather(pages, "main", 1, None, "float16")
        assert torch.equal(named, gather(pages, "main", 1, None, torch.float16))
        empty = gather(pages, "main", 1, torch.empty((0, 4), dtype=torch.int64), torch.float32)
        assert empty.shape == (0, 4, 32)
        pages.release()


def test_pages_are_shared_and_stay_until_released(tmp_path: Path) -> None:
    tokens = tokens_of(4 * BLOCK + 1)
    with open_cache(tmp_path / "s", device_bytes=6 * page_bytes(DENSE)) as cache:
        cache.store(tokens, entries_of(DENSE, tokens))
        cache.flush()
        with cache.lookup(tokens) as match:
            first = cache.load(match)
            second = cache.load(match)
            assert torch.equal(first.page_ids, second.page_ids)
            assert cache.device.free_pages == 2
        first.release()
        first.release()
        other = tokens_of(4 * BLOCK + 1, 5)
        cache.store(other, entries_of(DENSE, other))
        cache.flush()
        with cache.lookup(other) as match:
            squeezed = cache.load(match)  # the pinned pages leave room for two blocks
            assert squeezed.tokens == match.hit_tokens == 2 * BLOCK
            squeezed.release()
        check_pages(cache.device.tensors, second, tokens)
        second.release()
        with cache.lookup(other) as match:
            whole = cache.load(match)
            assert whole.tokens == 4 * BLOCK
            check_pages(cache.device.tensors, whole, other)
            whole.release()


def check_pages(
    tensors: object, pages: PinnedPages, tokens: np.ndarray[tuple[int], np.dtype[np.uint32]]
) -> None:
    assert isinstance(tensors, dict)
    expected = entries_of(DENSE, tokens[: pages.tokens])
    for name, tensor in tensors.items():
        for number, page in enumerate(pages.page_ids.tolist()):
            wanted = expected[name][:, number * BLOCK : (number + 1) * BLOCK]
            np.testing.assert_array_equal(tensor[page].numpy(), wanted)


def test_a_prefix_longer_than_the_tier_keeps_its_head_in_pages(tmp_path: Path) -> None:
    tokens = tokens_of(10 * BLOCK + 1)
    with open_cache(tmp_path / "s", device_bytes=4 * page_bytes(DENSE)) as cache:
        cache.store(tokens, entries_of(DENSE, tokens))
        cache.flush()
        with cache.lookup(tokens) as match, cache.load(match) as pages:
            assert pages.tokens == match.hit_tokens == 4 * BLOCK
            check_pages(cache.device.tensors, pages, tokens)


def test_least_recently_used_pages_go_first_and_from_the_tail(tmp_path: Path) -> None:
    prompts = [tokens_of(4 * BLOCK + 1, seed) for seed in range(3)]
    with open_cache(tmp_path / "s", device_bytes=10 * page_bytes(DENSE)) as cache:
        for tokens in prompts:
            cache.store(tokens, entries_of(DENSE, tokens))
        cache.flush()
        for tokens in prompts[:2]:
            with cache.lookup(tokens) as match:
                cache.load(match).release()
        with cache.lookup(prompts[0]):
            pass
        with cache.lookup(prompts[2]) as match:
            cache.load(match).release()
        resident = [cache.probe(tokens).residency["device"] for tokens in prompts]
        assert resident == [4 * BLOCK, 2 * BLOCK, 4 * BLOCK]
        assert cache.stats()["counters"]["evicted_blocks"] == {"device": 2}
        assert cache.stats()["tiers"]["device"]["blocks"] == 10


def test_device_pages_serve_a_read_when_the_disk_lost_the_blocks(tmp_path: Path) -> None:
    tokens = tokens_of(5 * BLOCK + 1)
    with open_cache(tmp_path / "s", device_bytes="1MiB") as cache:
        cache.store(tokens, entries_of(DENSE, tokens))
        cache.flush()
        with cache.lookup(tokens) as match:
            cache.load(match).release()
        index = writer_of(cache).index
        writer_of(cache).removal.delete(index.evict(5))
        with cache.lookup(tokens) as match:
            assert match.residency == {"device": 5 * BLOCK, "ssd": 0}
            found = cache.read(match)
            assert found.tokens == 5 * BLOCK
            for name, array in entries_of(DENSE, tokens[: 5 * BLOCK]).items():
                np.testing.assert_array_equal(found[name], array)


def test_no_device_pages_are_legal(tmp_path: Path) -> None:
    tokens = tokens_of(2 * BLOCK + 1)
    with open_cache(tmp_path / "s", device_bytes=0) as cache:
        cache.store(tokens, entries_of(DENSE, tokens))
        cache.flush()
        with cache.lookup(tokens) as match, cache.load(match) as pages:
            assert pages.tokens == 0


def test_an_absent_device_is_named(tmp_path: Path) -> None:
    tokens = tokens_of(2 * BLOCK + 1)
    with open_cache(tmp_path / "s", device="cuda:97") as cache:
        cache.store(tokens, entries_of(DENSE, tokens))
        cache.flush()
        with (
            cache.lookup(tokens) as match,
            pytest.raises(
                ConfigError, match="device 'cuda:97' cannot allocate .* choose another device"
            ),
        ):
            cache.load(match)


def test_threads_loading_one_prefix_agree_and_leak_no_page(tmp_path: Path) -> None:
    tokens = tokens_of(12 * BLOCK + 1)
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        try:
            for _ in range(40):
                part = tokens[: int(rng.integers(1, len(tokens) + 1))]
                with cache.lookup(part) as match, cache.load(match) as pages:
                    check_pages(cache.device.tensors, pages, part)
        except BaseException as error:
            failures.append(error)

    with open_cache(tmp_path / "s", device_bytes=16 * page_bytes(DENSE)) as cache:
        cache.store(tokens, entries_of(DENSE, tokens))
        cache.flush()
        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []
        pages_of = paged(cache)
        assert pages_of.index.blocks == len(pages_of._page_of)
        assert cache.device.free_pages == 16 - len(pages_of._page_of)
        assert not any(segment.pins for segment in pages_of.index)


def test_a_device_tier_without_a_page_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokens = tokens_of(3 * BLOCK)
    with open_cache(tmp_path / "s", device_bytes=100) as cache:
        cache.store(tokens, entries_of(DENSE, tokens))
        cache.flush()
        with cache.lookup(tokens) as match:
            assert cache.load(match).tokens == 0
    assert "device_bytes is 100, less than the 6144 of one page" in caplog.text
