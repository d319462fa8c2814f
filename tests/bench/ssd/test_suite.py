"""Benchmark of the SSD tier: its sections run, its arithmetic is right, and reads are checked."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from xml.etree import ElementTree as ET

import numpy as np
import pytest

from bench.paired import Row, paired, speeds
from bench.ssd import compare as ssd_compare
from bench.ssd import index as ssd_index
from bench.ssd import peers as ssd_peers
from bench.ssd import store as ssd_store
from bench.ssd import suite as ssd
from bench.ssd.compare import PeerRow, Samples, chosen, compare, percentiles, picture
from bench.ssd.flat import FlatTier
from bench.ssd.index import read_tree, trace_tree, tree_of, write_tree
from bench.ssd.keys import key_of, number_of
from bench.ssd.peers import PEERS, Worker
from kvstore import Layout
from tests.builders import mixed_layout, tiny_layout

BLOCK_BYTES = 4096
MODULES = {name: peer.module for name, peer in PEERS.items() if peer.module}


@pytest.fixture(autouse=True)
def keep_the_machines_page_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Whoever runs tests as root keeps what other programs have in memory."""
    monkeypatch.setattr(ssd_store, "DROP_CACHES", tmp_path / "no" / "such file")


def no_advance(_done: int, _total: int) -> None:
    """Nobody watches."""


def has_direct_reads(folder: Path) -> bool:
    (folder / "probe").write_bytes(b"x")
    try:
        os.close(os.open(folder / "probe", os.O_RDONLY | os.O_DIRECT))
    except OSError:
        return False
    return True


# ---- arithmetic ------------------------------------------------------------------------------------


def test_a_ratio_is_the_median_of_the_pairs_ratios_and_larger_is_faster() -> None:
    found = speeds([1.0, 2.0, 4.0], [1.0, 1.0, 8.0], 10**9)
    assert found["value"] == 0.5
    assert found["bound"] == 1.0
    assert found["unit"] == "GB/s"
    assert found["ratio"] == 1.0, "of 1, 0.5 and 2; the medians' own would be 0.5"
    assert (found["low"], found["high"]) == (0.75, 1.5)
    single = speeds([2.0], [1.0], 10**9)
    assert (single["ratio"], single["low"], single["high"]) == (0.5, 0.5, 0.5)


def test_pairs_alternate_and_the_first_run_of_each_does_not_count() -> None:
    order: list[str] = []

    def timed(name: str) -> float:
        order.append(name)
        return float(len(order))

    mine, theirs = paired(lambda: timed("a"), lambda: timed("b"), 4)
    assert order[:2] == ["a", "b"]
    assert order[2:] == ["b", "a", "a", "b", "b", "a", "a", "b"]
    assert (mine, theirs) == ([4, 5, 8, 9], [3, 6, 7, 10])


@pytest.mark.parametrize(
    ("value", "ratio", "bar", "is_met"),
    [
        (9.0, 0.8, 0.75, True),
        (9.0, 0.7, 0.75, False),
        (4.0, None, 5.0, True),
        (6.0, None, 5.0, False),
        (6.0, None, None, None),
    ],
)
def test_a_bar_is_for_the_ratio_or_else_for_the_value(
    value: float, ratio: float | None, bar: float | None, is_met: bool | None
) -> None:
    row = Row(section="s", what="w", value=value, unit="ms", ratio=ratio, bar=bar)
    assert row.is_met is is_met


def test_percentiles_are_of_the_whole_sample() -> None:
    assert percentiles([float(n) for n in range(101)], (25, 99)) == [25.0, 99.0]
    assert percentiles([7.0], (25, 99)) == [7.0, 7.0]


def test_speeds_of_a_peer_are_bytes_over_all_seconds() -> None:
    samples = Samples(sync="s", batches=[1.0, 3.0], disk_bytes=128 * 128 * 3)
    for phase in ("warm", "cold"):
        samples.runs[phase], samples.singles[phase] = [0.5, 0.5], [0.001] * 98 + [0.002] * 2
    row = ssd_compare._row("raw file, no index", samples, 128, 10**6)
    assert row.gb_per_s == pytest.approx({"store": 0.032, "warm": 0.064, "cold": 0.064})
    assert row.p50_us == pytest.approx({"store": 2e6, "warm": 1e3, "cold": 1e3})
    assert row.p99_us["warm"] == pytest.approx(2e3)
    assert row.bytes_per_token == 3.0
    uneven = ssd_compare._row("raw file, no index", samples, 96, 10**6)
    assert uneven.gb_per_s["store"] == pytest.approx(0.024), "64 and 32 blocks in 4 s"


@pytest.mark.parametrize(("blocks", "share"), [(4096, 0.2), (4096, 1.0), (64, 0.2), (3, 0.2)])
def test_a_measurement_reads_no_block_twice_and_no_more_than_its_share(
    blocks: int, share: float
) -> None:
    runs, singles = chosen(blocks, share, np.random.default_rng(0))
    read = [number for run in [*runs, *singles] for number in run]
    assert len(set(read)) == len(read)
    assert set(read) <= set(range(blocks))
    assert all(run == list(range(run[0], run[0] + len(run))) for run in runs)
    run = len(runs[0])
    assert len(read) <= max(share * blocks, 2 * run)
    assert singles
    assert all(len(one) == 1 for one in singles)


# ---- stores ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", [tiny_layout(), mixed_layout()], ids=lambda one: one.model)
def test_filling_and_warm_loads_make_a_row_for_each_figure(layout: Layout, tmp_path: Path) -> None:
    rows = ssd_store.fill(layout, 100_000, tmp_path, 2, no_advance)
    assert [row.bar for row in rows] == [1.0, None, None]
    assert {row.section for row in rows} == {"fill"}
    rows += ssd_store.warm(layout, 50_000, tmp_path, 2, no_advance)
    assert [row.bar for row in rows[3:]] == [0.75, None, 0.75, 0.75]
    for row in rows:
        assert row.value > 0
        assert row.bound is not None
        assert row.ratio is not None
    assert not list(tmp_path.iterdir()), "nothing is left behind"


@pytest.mark.parametrize("layout", [tiny_layout(), mixed_layout()], ids=lambda one: one.model)
def test_two_threads_are_held_against_one_and_a_layer_against_all(
    layout: Layout, tmp_path: Path
) -> None:
    rows = ssd_store.shared(layout, 50_000, tmp_path, 1, no_advance)
    assert [(row.beside, row.bar) for row in rows] == [
        ("1 thread", None),
        ("until all of it is", None),
    ]
    assert all(row.ratio is not None and row.ratio > 0 for row in rows)
    assert not list(tmp_path.iterdir()), "nothing is left behind"


def test_steady_state_evicts(tmp_path: Path) -> None:
    [row] = ssd_store.steady(mixed_layout(), 0, tmp_path, 2, no_advance)
    evicted = int(row.note.split(", ")[-1].removesuffix(" evicted"))
    assert evicted > 0
    assert row.bar == 0.8


def test_cold_loads_are_held_against_the_same_blocks(tmp_path: Path) -> None:
    if not has_direct_reads(tmp_path):
        pytest.skip("the file system of temporary files has no O_DIRECT")
    rows = ssd_store.cold(mixed_layout(), 0, tmp_path, 1, no_advance)
    assert [row.bar for row in rows] == [0.9, 0.9, None] * 2
    assert all("8 of 40 runs of 32" in row.note for row in rows)
    assert all("posix_fadvise" in row.note for row in rows)


def test_a_raw_file_goes_round_within_its_size_and_grows_without_one(tmp_path: Path) -> None:
    data = np.arange(100, dtype=np.uint8)
    for size, expected in ((250, 250), (0, 300)):
        file = ssd_store.RawFile(tmp_path / str(size), size)
        for _ in range(3):
            file.write(data, 30)
        file.close()
        assert (tmp_path / str(size)).stat().st_size == expected
    assert (tmp_path / "0").read_bytes() == data.tobytes() * 3


def test_a_changed_byte_ends_the_measurement(tmp_path: Path) -> None:
    blocks = np.random.default_rng(0).integers(0, 256, (4, BLOCK_BYTES), np.uint8)
    keys = [key_of(number) for number in range(4)]
    tier = FlatTier(tmp_path, BLOCK_BYTES, 1 << 30)
    tier.put(keys, list(blocks))
    out = np.zeros_like(blocks)
    tier.get(keys, out)
    assert np.array_equal(out, blocks)
    with pytest.raises(RuntimeError, match="block 0 of 1 is missing"):
        tier.get([key_of(9)], out[:1])
    tier.close()
    data = tmp_path / "tier" / "data.mdb"
    stored = bytearray(data.read_bytes())
    stored[stored.index(blocks[2].tobytes()) + 5] ^= 1
    data.write_bytes(stored)
    tier = FlatTier(tmp_path, BLOCK_BYTES, 1 << 30)
    with pytest.raises(RuntimeError, match="block 2 of 4 is checksum"):
        tier.get(keys, out)
    tier.close()


# ---- peers -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PEERS)
def test_every_peer_does_every_job(name: str, tmp_path: Path) -> None:
    module = MODULES.get(name)
    if module is not None and find_spec(module) is None:
        pytest.skip(f"{module} is not installed")
    worker = Worker(PEERS[name])
    shape = {"folder": str(tmp_path), "blocks": 5, "block_bytes": BLOCK_BYTES, "batch": 2}
    assert worker.prepare(**shape)["sync"]
    assert len(worker.store()["seconds"]) == 3
    assert len(worker.load([[4, 0], [3]])["seconds"]) == 2
    worker.release()
    worker.acquire()
    worker.load([[1, 2]])
    assert worker.close()["disk_bytes"] >= 5 * BLOCK_BYTES


def test_no_peer_wins_by_not_checking(tmp_path: Path) -> None:
    worker = Worker(PEERS["raw file, no index"])
    worker.prepare(folder=str(tmp_path), blocks=4, block_bytes=BLOCK_BYTES, batch=4)
    worker.store()
    data = bytearray((tmp_path / "raw").read_bytes())
    data[2 * BLOCK_BYTES] ^= 1
    (tmp_path / "raw").write_bytes(data)
    worker.load([[0, 1, 3]])
    with pytest.raises(RuntimeError, match="block 2 was returned with another checksum"):
        worker.load([[2]])
    worker.close()


def test_keys_are_in_no_order_and_name_their_block() -> None:
    keys = [key_of(number) for number in range(100)]
    assert {len(key) for key in keys} == {16}
    assert [number_of(key) for key in keys] == list(range(100))
    assert keys != sorted(keys)


def compared(names: Sequence[str], folder: Path, rounds: int = 1) -> list[PeerRow]:
    pythons = dict.fromkeys(names, Path(sys.executable))
    rows, how = compare(names, pythons, 70, BLOCK_BYTES, rounds, folder, no_advance)
    assert how.startswith("posix_fadvise")
    return rows


def test_peers_are_compared_in_processes_of_their_own(tmp_path: Path) -> None:
    rows = compared(["kvstore, tier", "raw file, no index", "SQLite"], tmp_path, rounds=2)
    assert [row.peer for row in rows] == ["kvstore, tier", "raw file, no index", "SQLite"]
    for row in rows:
        assert row.gb_per_s.keys() == {"store", "warm", "cold"}
        assert min(row.gb_per_s.values()) > 0
        assert all(row.p50_us[phase] <= row.p99_us[phase] for phase in row.p50_us)
        assert row.bytes_per_token >= BLOCK_BYTES / 128
    assert rows[1].bytes_per_token == pytest.approx(BLOCK_BYTES / 128)
    assert not list(tmp_path.glob("round-*"))
    words = ET.fromstring(picture(rows)).itertext()
    assert {row.peer for row in rows} <= set(words)
    assert len(ssd_compare.table(rows)) == 2 + 3


def test_a_peer_that_is_not_installed_is_named_with_what_to_install(tmp_path: Path) -> None:
    missing = [name for name, module in MODULES.items() if find_spec(module) is None]
    if not missing:
        pytest.skip("every peer is installed here")
    name = missing[0]
    [row, _] = compared([name, "raw file, no index"], tmp_path)
    assert row.sync.startswith(f"missing {MODULES[name]}")
    assert "pip install" in row.sync
    assert "pip install" in "\n".join(ssd_compare.table([row]))


def test_a_peer_that_fails_is_told_with_what_it_said(tmp_path: Path) -> None:
    peer = ssd_compare.Contender("SQLite", Path(sys.executable), tmp_path / "log")
    with pytest.raises(RuntimeError, match=r"SQLite failed at prepare:(.|\n)*unable to open"):
        peer.do("prepare", folder=str(tmp_path / "none"), blocks=1, block_bytes=8, batch=1)
    peer.end()


# ---- index -----------------------------------------------------------------------------------------


def test_a_tree_is_cut_at_forks_and_where_a_request_ended(tmp_path: Path) -> None:
    requests = [[1, 2, 3, 4], [1, 2, 5], [1, 2, 3], [9], []]
    tree = tree_of(requests)
    ends: list[int] = []
    for parent, blocks in tree:
        assert parent < len(ends)
        ends.append((ends[parent] if parent >= 0 else 0) + blocks)
    assert sorted(zip(ends, [blocks for _, blocks in tree], strict=True)) == [
        (1, 1),  # 9
        (2, 2),  # 1 2
        (3, 1),  # 3
        (3, 1),  # 5
        (4, 1),  # 4
    ]
    write_tree(tree, "a test", 64, tmp_path / "tree.json")
    assert read_tree(tmp_path / "tree.json") == tree


def test_the_committed_tree_is_that_of_its_trace() -> None:
    tree = read_tree(ssd_index.TREE)
    # Both as the trace's own README counts them.
    assert sum(blocks for _, blocks in tree) == 208_640
    assert len(tree) == 2_406
    assert all(parent < at and blocks > 0 for at, (parent, blocks) in enumerate(tree))


def test_an_index_is_made_of_a_tree_and_its_bytes_are_counted() -> None:
    tree = [(-1, 3), (0, 2), (0, 1), (-1, 4)]
    index = ssd_index.index_of(tree)
    assert (index.blocks, index.segments) == (10, 4)
    long, short = ssd_index.memory([(-1, 1000)], "one segment")
    assert 16 <= long.value < short.value
    assert long.unit == "B/block"


def test_a_made_up_store_opens_with_every_block(tmp_path: Path) -> None:
    rows = ssd_index.opening(50, [(-1, 3), (0, 2), (0, 1)], tmp_path, 1, no_advance)
    assert [row.unit for row in rows] == ["s", "s"]
    assert rows[1].what == "page cache dropped (posix_fadvise(DONTNEED))"


def test_looking_up_measures_the_whole_and_its_parts(tmp_path: Path) -> None:
    rows = ssd_index.lookup(3, tmp_path, 1, no_advance)
    assert [row.bar for row in rows] == [5.0, 5.0, 12.0, None, None, None]
    assert {row.unit for row in rows} == {"ms"}
    assert all(row.of == "384 tokens" for row in rows)


# ---- the command -----------------------------------------------------------------------------------


def test_the_command_runs_the_sections_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text("\n".join(json.dumps({"hash_ids": ids}) for ids in ([1, 2], [1, 3])))
    arguments = ["lookup", "index", "--lookup-blocks", "2", "--pairs", "1"]
    arguments += ["--trace", str(trace), "--dir", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["ssd", *arguments, "--json"])
    ssd.main()
    found = json.loads(capsys.readouterr().out)
    assert {row["section"] for row in found["rows"]} == {"lookup", "index"}
    assert found["peers"] == []
    assert trace_tree(trace) == tree_of([[1, 2], [1, 3]])
    monkeypatch.setattr(sys, "argv", ["ssd", *arguments])
    ssd.main()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + len(found["rows"])
    for wrong in (["no such section"], ["--pairs", "0"], ["--blocks", "many"]):
        with pytest.raises(SystemExit):
            ssd.options(wrong)
    assert ssd.options([]).sections == list(ssd.SECTIONS)


def test_all_blocks_are_of_the_same_pool(tmp_path: Path) -> None:
    worker = Worker(ssd_peers.FilePerBlock)
    worker.prepare(folder=str(tmp_path), blocks=2, block_bytes=BLOCK_BYTES, batch=2)
    worker.store()
    rng = np.random.default_rng(0)
    expected = rng.integers(0, 256, (2, BLOCK_BYTES), np.uint8)
    for number in range(2):
        stored = (tmp_path / f"{key_of(number).hex()}.bin").read_bytes()
        assert stored == expected[number].tobytes()
