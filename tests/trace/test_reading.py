"""Reading of traces: formats, compression, order, lengths, and refused files with their messages."""

from __future__ import annotations

import gzip
import io
import json
import sys
import tarfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import zstandard

from kvstore.errors import TraceError
from kvstore.trace.chains import chains_of, links_of
from kvstore.trace.columns import Trace
from kvstore.trace.info import info
from kvstore.trace.reading import Options, read

ROWS = [
    {"timestamp": 0, "input_length": 10, "output_length": 3, "hash_ids": [0, 1, 2]},
    {"timestamp": 7, "input_length": 8, "output_length": 0, "hash_ids": [0, 1]},
    {"timestamp": 9, "input_length": 12, "output_length": 5, "hash_ids": [0, 1, 3]},
    {"timestamp": 9, "input_length": 3, "output_length": 5, "hash_ids": []},
]
FOUR = Options(block_tokens=4)


def lines(rows: Iterable[Any]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def written(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def paths(trace: Trace) -> list[list[int]]:
    return [trace.chain(i).tolist() for i in range(len(trace))]


def test_a_mooncake_file_is_read_as_it_is(tmp_path: Path) -> None:
    trace = read(written(tmp_path / "chat.jsonl", lines(ROWS)), FOUR)
    assert (trace.name, len(trace), trace.block_tokens, trace.distinct_blocks) == ("chat", 4, 4, 4)
    assert trace.arrival.tolist() == [0, 7000, 9000, 9000]
    assert trace.input_tokens.tolist() == [10, 8, 12, 3]
    assert trace.output_tokens.tolist() == [3, 0, 5, 5]
    assert paths(trace) == [[0, 1, 2], [0, 1], [0, 1, 3], []]


def as_tar(content: bytes) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        member = tarfile.TarInfo("./inner/file.jsonl")
        member.size = len(content)
        tar.addfile(member, io.BytesIO(content))
    return out.getvalue()


@pytest.mark.parametrize(
    "pack",
    [
        gzip.compress,
        zstandard.compress,
        as_tar,
        lambda content: zstandard.compress(as_tar(content)),
        lambda content: zstandard.compress(content[:50]) + zstandard.compress(content[50:]),
        lambda content: content.replace(b"\n", b"\r\n\n"),
        lambda content: content.replace(b", ", b","),
        lambda content: content.replace(b": ", b"  :\t"),
    ],
    ids=["gzip", "zstd", "tar", "tar.zst", "two frames", "crlf", "compact", "spaced"],
)
def test_what_a_file_is_packed_in_is_recognised_by_its_bytes(tmp_path: Path, pack: Any) -> None:
    plain = read(written(tmp_path / "plain", lines(ROWS)), FOUR)
    packed = read(written(tmp_path / "packed", pack(lines(ROWS))), FOUR)
    assert paths(packed) == paths(plain)
    assert packed.arrival.tolist() == plain.arrival.tolist()


def test_standard_input_is_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        sys, "stdin", io.TextIOWrapper(io.BufferedReader(io.BytesIO(gzip.compress(lines(ROWS)))))
    )
    assert len(read("-", FOUR)) == 4


def test_late_requests_are_sorted_and_counted_or_refused(tmp_path: Path) -> None:
    late = written(tmp_path / "late", lines([ROWS[1], ROWS[0], ROWS[2], ROWS[3]]))
    trace = read(late, FOUR)
    assert trace.reordered == 1
    assert paths(trace) == [[0, 1, 2], [0, 1], [0, 1, 3], []]
    with pytest.raises(TraceError, match=r"late, line 2: is earlier than a request before it"):
        read(late, Options(block_tokens=4, unsorted="refuse"))


def test_ids_need_not_be_dense_nor_small(tmp_path: Path) -> None:
    rows = [{**row, "hash_ids": [each * 10**15 + 7 for each in row["hash_ids"]]} for row in ROWS]  # type: ignore[attr-defined]
    trace = read(written(tmp_path / "t", lines(rows)), FOUR)
    assert trace.distinct_blocks == 4
    assert paths(trace) == [[0, 1, 2], [0, 1], [0, 1, 3], []]


def test_ids_may_be_text(tmp_path: Path) -> None:
    rows = [{**row, "hash_ids": [f"h{each}" for each in row["hash_ids"]]} for row in ROWS]  # type: ignore[attr-defined]
    assert paths(read(written(tmp_path / "t", lines(rows)), FOUR)) == paths(
        read(written(tmp_path / "u", lines(ROWS)), FOUR)
    )


@pytest.mark.parametrize("size", [16, 64, 512])
@pytest.mark.parametrize("is_whole", [True, False])
def test_a_block_size_that_nobody_gave_is_the_one_that_lengths_agree_with(
    tmp_path: Path, size: int, is_whole: bool
) -> None:
    rows = []
    for i, tokens in enumerate(range(size, 30 * size, size // 2 + 3)):
        count = tokens // size if is_whole else -(-tokens // size)
        rows.append({"timestamp": i, "input_length": tokens, "hash_ids": list(range(count))})
    trace = read(written(tmp_path / "t", lines(rows)))
    assert trace.block_tokens == size
    assert info(trace)["has_partial_blocks"] is not is_whole


def test_a_block_size_that_is_too_large_is_refused_with_the_line(tmp_path: Path) -> None:
    path = written(tmp_path / "t", lines(ROWS))
    with pytest.raises(TraceError, match=r"line 1: 3 block ids for 10 tokens.*blocks of 8"):
        read(path, Options(block_tokens=8))


def test_lengths_that_agree_with_no_block_size_ask_for_one(tmp_path: Path) -> None:
    rows = [{"timestamp": 0, "input_length": n, "hash_ids": [1, 2, 3]} for n in (9, 700, 31, 5000)]
    with pytest.raises(TraceError, match="has no block size"):
        read(written(tmp_path / "t", lines(rows)))


GOOD = json.dumps(ROWS[0])


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("{", "is not JSON"),
        ("[1]", "expected an object, found list"),
        ('{"timestamp": 1, "input_length": 3}', "expected a list as hash_ids, found None"),
        ('{"timestamp": 1, "hash_ids": [1]}', "expected a number as input_length, found None"),
        (GOOD.replace("10", "-1"), "expected input_length from 0 to below [0-9,]*, found -1"),
        (GOOD.replace("10", "1.5"), "expected a whole number as input_length, found 1.5"),
        (GOOD.replace("10", "NaN"), "expected input_length from 0 to below [0-9,]*, found nan"),
        (GOOD.replace("10", "1e300"), "expected input_length from 0 to below"),
        (GOOD.replace("10", "true"), "expected a number as input_length, found True"),
        (GOOD.replace("[0, 1, 2]", "[0, 1, 2"), "is not JSON"),
        (GOOD.replace("[0, 1, 2]", "[0, 1,, 2]"), "is not JSON"),
        (GOOD.replace("[0, 1, 2]", "[0 1 2]"), "is not JSON"),
        (GOOD.replace("[0, 1, 2]", "[0, 1.5]"), "numbers or strings in hash_ids, found 1.5"),
        (GOOD.replace("[0, 1, 2]", "[[1]]"), r"numbers or strings in hash_ids, found \[1\]"),
        (GOOD.replace("[0, 1, 2]", "7"), "expected a list as hash_ids, found 7"),
        ("\xff", "is not JSON"),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_a_bad_line_is_named_with_what_is_wrong(tmp_path: Path, line: str, fault: str) -> None:
    content = lines(ROWS[:2]) + line.encode("latin-1") + b"\n" + lines(ROWS[2:])
    with pytest.raises(TraceError, match=rf"t, line 3: .*({fault})"):
        read(written(tmp_path / "t", content), FOUR)


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (b"", "holds no request"),
        (b"hello\n", r"has an unknown format: it begins with b'hello"),
        (b'{"a": 1}\n', r"expected one of chat_id, hash_ids, chunk_hashes in each object"),
        (b'{"timestamp": 1, "input": "hi"}\n', "kvstore trace anonymise"),
        (b"\x1f\x8b\x08broken", "cannot be decompressed"),
        (zstandard.compress(lines(ROWS))[:40], "cannot be decompressed: the file ends"),
        (zstandard.compress(lines(ROWS), 3)[:-1], "cannot be decompressed|is not JSON"),
        (gzip.compress(lines(ROWS))[:-1], "cannot be decompressed"),
        (b"\x28\xb5\x2f\xfdbroken", "cannot be decompressed"),
    ],
)
def test_a_file_that_is_no_trace_says_why(tmp_path: Path, content: bytes, fault: str) -> None:
    with pytest.raises(TraceError, match=fault):
        read(written(tmp_path / "t", content))


def test_a_file_that_is_not_there_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="no such file"):
        read(tmp_path / "nothing")
    with pytest.raises(TraceError, match="an empty directory"):
        read(tmp_path)


def test_lookup_hash_logs_carry_their_own_block_size(tmp_path: Path) -> None:
    row = {
        "timestamp": 1711929600.5,
        "request_id": "r",
        "model_name": "a",
        "chunk_size": 256,
        "seq_len": 600,
        "dtypes": ["x"],
        "chunk_hashes": ["0xab", "0xcd"],
    }
    later = {**row, "timestamp": 1711929601.25, "chunk_hashes": ["0xab", "0xef"], "model_name": "b"}
    written(tmp_path / "lookup_hashes_2.jsonl", lines([later]))
    written(tmp_path / "lookup_hashes_1.jsonl", lines([row]))
    trace = read(tmp_path)
    assert (trace.block_tokens, trace.arrival.tolist()) == (256, [0, 750_000])
    assert paths(trace) == [[0, 1], [0, 2]]
    assert trace.reordered == 0
    assert len(read(tmp_path, Options(model="b"))) == 1


BAILIAN = [
    {"chat_id": 1, "parent_chat_id": -1, "timestamp": 0.5, "input_length": 32, "hash_ids": [7, 8]},
    {
        "chat_id": 2,
        "parent_chat_id": 1,
        "timestamp": 1.5,
        "input_length": 48,
        "hash_ids": [7, 8, 9],
    },
    {"chat_id": 3, "parent_chat_id": -1, "timestamp": 2.0, "input_length": 32, "hash_ids": [6, 8]},
]


def test_ids_that_name_blocks_alone_are_refused_unless_asked_to_be_rekeyed(tmp_path: Path) -> None:
    path = written(tmp_path / "t", lines(BAILIAN))
    naive = read(path)
    assert (naive.block_tokens, naive.arrival.tolist()) == (16, [0, 1_000_000, 1_500_000])
    with pytest.raises(TraceError, match=r"two different blocks.*re-key them"):
        chains_of(naive)
    trace = read(path, Options(unchained="rekey"))
    assert paths(trace) == [[0, 1], [0, 1, 2], [3, 4]]
    assert trace.distinct_blocks == 5
    assert links_of(chains_of(trace)).blocks.tolist() == [2]


def test_an_id_that_comes_twice_in_a_request_names_no_prefix(tmp_path: Path) -> None:
    rows = [{"timestamp": 0, "input_length": 12, "hash_ids": [1, 2, 1]}]
    trace = read(written(tmp_path / "t", lines(rows)), FOUR)
    with pytest.raises(TraceError, match="two different blocks"):
        chains_of(trace)


SESSION = {
    "id": "s1",
    "block_size": 64,
    "hash_id_scope": "local",
    "requests": [
        {"t": 0.0, "in": 128, "out": 5, "hash_ids": [1, 2]},
        {"t": 10.0, "requests": [{"t": 2.5, "in": 64, "out": 1, "hash_ids": [9]}]},
        {"t": 11.0, "in": 200, "out": 2, "hash_ids": [1, 2, 3]},
    ],
}


@pytest.mark.parametrize("indent", [None, 1])
def test_sessions_keep_their_ids_to_themselves_and_nest_their_agents(
    tmp_path: Path, indent: int | None
) -> None:
    for name in ("s1", "s2"):
        content = json.dumps({**SESSION, "id": name}, indent=indent).encode()
        written(tmp_path / f"{name}.json", content)
    trace = read(tmp_path)
    assert trace.block_tokens == 64
    assert trace.arrival.tolist() == [0, 0, 11_000_000, 11_000_000, 12_500_000, 12_500_000]
    assert trace.sessions.tolist() == [0, 1, 0, 1, 0, 1]
    assert trace.distinct_blocks == 8
    assert len(trace.chain(2)) == 3
    assert trace.chain(2)[0] == trace.chain(0)[0] != trace.chain(1)[0]
    assert trace.reordered == 0


def test_a_broken_session_is_named(tmp_path: Path) -> None:
    bad = {**SESSION, "requests": [{"t": 0.0, "in": "x", "hash_ids": []}]}
    written(tmp_path / "s.json", json.dumps(bad, indent=1).encode())
    with pytest.raises(TraceError, match=r"s\.json.*expected a number as in, found 'x'"):
        read(tmp_path)


AZURE = b"""TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:04.0319600,3180,8
"""


def test_lengths_alone_are_a_trace_that_says_nothing_of_reuse(tmp_path: Path) -> None:
    trace = read(written(tmp_path / "azure.csv", AZURE))
    assert trace.arrival.tolist() == [0, 52_000]
    assert trace.input_tokens.tolist() == [4808, 3180]
    assert info(trace)["ceiling"] is None
    with pytest.raises(TraceError, match="azure: has lengths but no block ids"):
        chains_of(trace)


def test_a_bad_line_of_lengths_is_named(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"line 3: expected a number as ContextTokens, found 'x'"):
        read(written(tmp_path / "t", AZURE.replace(b"3180", b"x")))


def test_a_format_that_is_named_is_not_guessed(tmp_path: Path) -> None:
    row = {"timestamp": 3, "input_length": 32, "hash_ids": [1, 2], "chat_id": 1}
    path = written(tmp_path / "t", lines([row, {**row, "timestamp": 5}]))
    assert read(path).arrival.tolist() == [0, 2_000_000]  # Bailian's are seconds
    guessed = read(path, Options(form="mooncake", block_tokens=16))
    assert guessed.arrival.tolist() == [0, 2_000]  # Mooncake's are milliseconds
    for form in ("weka", "azure", "lmcache"):
        with pytest.raises(TraceError, match="line [01]|expected|TIMESTAMP"):
            read(path, Options(form=form))
