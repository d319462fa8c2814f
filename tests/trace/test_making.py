"""Traces from traces and from logs: cut, merged, written, anonymised; and their paths."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import numpy as np
import pytest

from kvstore.errors import StoreError, TraceError
from kvstore.trace.anonymise import anonymise, keep_key, new_key, read_key
from kvstore.trace.chains import chains_of, links_of
from kvstore.trace.columns import Trace, dense
from kvstore.trace.cutting import head, merged, sample
from kvstore.trace.info import info
from kvstore.trace.reading import Options, read
from kvstore.trace.source import created
from kvstore.trace.writing import write
from tests.simulate.support import grown_paths, trace_of

KEY = b"k" * 32


def shape(trace: Trace) -> list[list[int]]:
    """The chains with blocks numbered by first appearance, equal for equal traces."""
    seen: dict[int, int] = {}
    rows = [trace.chain(i).tolist() for i in range(len(trace))]
    return [[seen.setdefault(block, len(seen)) for block in row] for row in rows]


# ---- paths -------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(8))
def test_segments_are_cut_where_paths_fork_and_where_requests_end(seed: int) -> None:
    paths = grown_paths(seed)
    cut = chains_of(trace_of(paths))
    prefixes = {tuple(p[: i + 1]) for p in paths for i in range(len(p))}
    children = {prefix: {each for each in prefixes if each[:-1] == prefix} for prefix in prefixes}
    ends = {tuple(path) for path in paths if path}
    heads = {p for p in prefixes if len(p) == 1 or p[:-1] in ends or len(children[p[:-1]]) > 1}
    assert cut.segments == len(heads)
    assert int(cut.blocks.sum()) == len(prefixes)
    for i, path in enumerate(paths):
        row = cut.refs[cut.offsets[i] : cut.offsets[i + 1]]
        starts = [d for d in range(len(path)) if tuple(path[: d + 1]) in heads]
        assert cut.starts[row].tolist() == starts
        assert cut.stops[row].tolist() == [*starts[1:], len(path)] if path else not len(row)
        assert cut.parents[row].tolist() == [-1, *row[:-1].tolist()] if path else not len(row)


@pytest.mark.parametrize("seed", range(8))
def test_a_link_joins_the_blocks_of_one_earlier_last_use(seed: int) -> None:
    paths = grown_paths(seed)
    links = links_of(chains_of(trace_of(paths)))
    found = {
        (later, start + i): earlier
        for later, earlier, start, blocks in zip(
            links.later.tolist(),
            links.earlier.tolist(),
            links.start.tolist(),
            links.blocks.tolist(),
            strict=True,
        )
        for i in range(blocks)
    }
    used: dict[tuple[int, ...], int] = {}
    expected = {}
    for now, path in enumerate(paths):
        for depth in range(len(path)):
            prefix = tuple(path[: depth + 1])
            if prefix in used:
                expected[now, depth] = used[prefix]
            used[prefix] = now
    assert found == expected


def test_paths_are_cut_the_same_in_small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = trace_of(grown_paths(3))
    whole = chains_of(trace)
    monkeypatch.setattr("kvstore.trace.chained.STEP", 7)
    monkeypatch.setattr("kvstore.trace.chains.STEP", 7)
    assert chains_of(trace).refs.tolist() == whole.refs.tolist()


def test_dense_numbers_keep_order_and_equality_whatever_the_ids() -> None:
    for ids in ([5, 5, 2, 9], [10**12, 3, 10**12], list(range(50)), []):
        numbers, count = dense(np.array(ids, np.int64))
        ranks = {each: rank for rank, each in enumerate(sorted(set(ids)))}
        assert numbers.tolist() == [ranks[each] for each in ids]
        assert count == len(ranks)


# ---- cutting and merging -----------------------------------------------------------------------


def with_sessions(trace: Trace, sessions: list[int]) -> Trace:
    return Trace(
        **{
            **{name: getattr(trace, name) for name in Trace.__dataclass_fields__},
            "sessions": np.array(sessions, np.int32),
        }
    )


def test_a_head_is_the_first_requests_with_blocks_numbered_again() -> None:
    trace = trace_of([[1, 2], [3], [1, 2, 4], [3, 5]])
    first = head(trace, 3)
    assert shape(first) == [[0, 1], [2], [0, 1, 3]]
    assert first.distinct_blocks == 4
    assert len(head(trace, 99)) == 4


def test_a_sample_takes_whole_sessions() -> None:
    trace = with_sessions(trace_of(grown_paths(1, 200)[:200]), [i % 40 for i in range(200)])
    part = sample(trace, 0.3, seed=5)
    assert 10 < len(part) < 120
    counts = np.bincount(part.sessions)
    assert set(counts.tolist()) == {0, 5}
    assert part.sessions.tolist() == sample(trace, 0.3, seed=5).sessions.tolist()
    assert part.arrival[0] == 0


@pytest.mark.parametrize("share", [0, -1, 1.5, float("nan")])
def test_an_impossible_share_is_refused(share: float) -> None:
    with pytest.raises(ValueError, match="expected a share above 0 and at most 1"):
        sample(trace_of([[1]]), share)


def test_merged_traces_share_no_block_and_no_session() -> None:
    one = with_sessions(trace_of([[1, 2], [1, 2, 3]]), [0, 0])
    two = with_sessions(trace_of([[1], [1, 9]]), [0, -1])
    both = merged([one, two])
    assert both.arrival.tolist() == [0, 0, 10**6, 10**6]
    assert shape(both) == [[0, 1], [2], [0, 1, 3], [2, 4]]
    assert both.sessions.tolist() == [0, 1, 0, -1]
    assert both.distinct_blocks == 5


def test_merged_traces_may_begin_at_drawn_times() -> None:
    one = trace_of([[1], [1]])
    spread = merged([one] * 20, spread=1000, seed=1)
    assert int(spread.arrival[-1]) > 500 * 10**6
    assert (np.diff(spread.arrival) >= 0).all()
    assert spread.arrival.tolist() == merged([one] * 20, spread=1000, seed=1).arrival.tolist()


def test_blocks_of_two_sizes_are_not_merged() -> None:
    with pytest.raises(ValueError, match=r"one block size, found \[4, 8\]"):
        merged([trace_of([[1]], 4), trace_of([[1]], 8)])


# ---- writing -----------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.zst", ".jsonl.gz"])
@pytest.mark.parametrize("form", ["mooncake", "bailian"])
def test_what_is_written_is_read_back_and_the_same_bytes_each_time(
    tmp_path: Path, form: str, suffix: str
) -> None:
    trace = with_sessions(trace_of([[1, 2], [7], [1, 2, 3], []], 16), [0, 1, 0, -1])
    path = tmp_path / f"t{suffix}"
    write(trace, path, form)
    first = path.read_bytes()
    write(trace, path, form)
    assert path.read_bytes() == first
    again = read(path)
    assert shape(again) == shape(trace)
    assert again.arrival.tolist() == trace.arrival.tolist()
    assert again.input_tokens.tolist() == trace.input_tokens.tolist()
    assert again.block_tokens == 16
    assert again.sessions.tolist() == ([0, 1, 0, -1] if form == "mooncake" else [-1] * 4)


def test_bailian_chats_name_the_turn_before(tmp_path: Path) -> None:
    trace = with_sessions(trace_of([[1], [7], [1, 2], [1, 2, 3]], 16), [0, 1, 0, 0])
    write(trace, tmp_path / "t", "bailian")
    rows = [json.loads(line) for line in (tmp_path / "t").read_text().splitlines()]
    assert [(row["chat_id"], row["parent_chat_id"], row["turn"]) for row in rows] == [
        (0, -1, 1),
        (1, -1, 1),
        (2, 0, 2),
        (3, 2, 3),
    ]


def test_a_format_that_cannot_hold_a_trace_refuses_it(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="blocks of 16 tokens, found 4"):
        write(trace_of([[1]]), tmp_path / "t", "bailian")
    with pytest.raises(ValueError, match="unknown output format 'csv'"):
        write(trace_of([[1]]), tmp_path / "t", "csv")


# ---- anonymising -------------------------------------------------------------------------------


def log(path: Path, rows: list[dict[str, object]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def texts(count: int) -> list[dict[str, object]]:
    system = "You are a careful assistant. Answer in one word. Zebra-7731.  "
    rows: list[dict[str, object]] = []
    for i in range(count):
        text = system + "".join(f" Turn {j} of user {i % 3}." for j in range(i // 3 + 1))
        row = {
            "timestamp": 10**15 + i * 10**6,
            "input": text,
            "output": "yes",
            "session_id": f"u{i % 3}",
        }
        rows.append(row)
    return rows


def test_an_anonymised_log_has_the_prefixes_of_its_text(tmp_path: Path) -> None:
    rows = texts(30)
    trace = anonymise(log(tmp_path / "log.jsonl", rows), KEY, 16)
    content = [str(row["input"]).encode() for row in rows]
    seen: dict[bytes, int] = {}
    expected = [
        [seen.setdefault(text[: at + 16], len(seen)) for at in range(0, len(text) - 15, 16)]
        for text in content
    ]
    assert shape(trace) == expected
    assert trace.block_tokens == 4
    assert trace.input_tokens.tolist() == [-(-len(text) // 4) for text in content]
    assert trace.output_tokens.tolist() == [1] * 30
    assert trace.sessions.tolist() == [i % 3 for i in range(30)]
    assert trace.arrival.tolist() == [i * 10**6 for i in range(30)]
    assert info(trace)["sessions"] == 3


def test_nothing_of_a_log_is_in_what_is_written(tmp_path: Path) -> None:
    rows = texts(9)
    path = tmp_path / "out.jsonl"
    write(anonymise(log(tmp_path / "log", rows), KEY, 16), path)
    for line in path.read_text().splitlines():
        row = json.loads(line)
        assert set(row) == {
            "timestamp", "input_length", "output_length", "hash_ids", "block_size", "session_id",
        }  # fmt: skip
        assert row["session_id"].isdigit()
        assert all(isinstance(each, int) for each in [*row["hash_ids"], row["timestamp"]])


def test_the_key_is_not_in_the_structure(tmp_path: Path) -> None:
    path = log(tmp_path / "log", texts(9))
    assert shape(anonymise(path, KEY, 16)) == shape(anonymise(path, b"q" * 32, 16))


def test_tokens_are_cut_in_blocks_of_tokens(tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [
        {"timestamp": 1, "tokens": [5, 6, 7, 8, 9]},
        {"timestamp": 2, "tokens": [5, 6, 7, 9]},
        {"timestamp": 3, "tokens": [6, 5]},
    ]
    trace = anonymise(log(tmp_path / "log", rows), KEY, 2, "ms")
    assert shape(trace) == [[0, 1], [0, 2], [3]]
    assert (trace.block_tokens, trace.arrival.tolist()) == (2, [0, 1000, 2000])
    assert trace.input_tokens.tolist() == [5, 4, 2]


def test_a_bad_line_of_a_log_is_named_without_its_text(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text(json.dumps(texts(1)[0]) + '\n{"timestamp": 1, "input": "secret words"\n')
    with pytest.raises(TraceError, match="line 2: is not JSON") as caught:
        anonymise(path, KEY, 16)
    assert "secret" not in str(caught.value)
    with pytest.raises(TraceError, match=r"line 1: a block of 10 bytes is not a multiple of 4"):
        anonymise(path, KEY, 10)


def test_half_a_pair_of_surrogates_is_text_too(tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [{"timestamp": 1, "input": "\ud800" * 8}]
    assert len(anonymise(log(tmp_path / "log", rows), KEY, 8).chain(0)) == 3


def test_a_key_is_made_for_its_owner_alone_and_found_again(tmp_path: Path) -> None:
    path = tmp_path / "key"
    assert read_key(path) is None
    key = new_key()
    keep_key(path, key)
    assert len(key) == 32
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert read_key(path) == key
    with pytest.raises(FileExistsError):
        keep_key(path, new_key())
    path.chmod(0o644)
    with pytest.raises(ValueError, match="can be read by other users"):
        read_key(path)
    path.write_text("short")
    path.chmod(0o600)
    with pytest.raises(ValueError, match="is not a key"):
        read_key(path)


def test_an_impossible_block_size_or_unit_is_refused(tmp_path: Path) -> None:
    path = log(tmp_path / "log", texts(1))
    with pytest.raises(ValueError, match="a block size of 1 or more, found 0"):
        anonymise(path, KEY, 0)
    with pytest.raises(ValueError, match="unknown unit of time 'h'"):
        anonymise(path, KEY, 16, "h")


def test_a_trace_of_equal_length_and_equal_blocks_is_read_by_size_given(tmp_path: Path) -> None:
    write(trace_of([[1, 2]], 4), tmp_path / "t")
    assert read(tmp_path / "t", Options(block_tokens=5)).block_tokens == 5


def test_a_trace_that_cannot_be_finished_leaves_what_was_there(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl.gz"
    out.write_bytes(b"before")

    def failing(path: Path) -> None:
        with created(path) as stream:
            stream.write(b"half")
            msg = "No space left on device"
            raise OSError(msg)

    with pytest.raises(StoreError, match="cannot be written: No space"):
        failing(out)
    assert out.read_bytes() == b"before"
    assert list(tmp_path.iterdir()) == [out]


def test_a_device_takes_bytes_as_they_come() -> None:
    with created(Path("/dev/null")) as stream:
        stream.write(b"gone")
    assert not Path("/dev/null").is_file()


def test_a_link_to_a_trace_stays_one(tmp_path: Path) -> None:
    link, target = tmp_path / "link.jsonl", tmp_path / "target.jsonl"
    link.symlink_to(target)
    write(trace_of([[1, 2]]), link)
    assert link.is_symlink()
    assert read(target).references == 2
