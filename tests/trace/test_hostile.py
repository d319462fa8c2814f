"""Odd and hostile input: the right answer, or one sentence with the file and the line; never a guess."""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvstore.cli import main as cli
from kvstore.errors import TraceError
from kvstore.simulate.run import Simulation
from kvstore.trace.anonymise import anonymise
from kvstore.trace.reading import Options, read

LOGS = Path(__file__).parent / "logs"
"""Small logs in the shape of public files; names and texts are invented."""
DEEP = "[" * 50_000 + "]" * 50_000
HUGE = "9" * 400


def run(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    status = cli.main([str(word) for word in words])
    return (status, *capsys.readouterr())


def sentence(found: tuple[int, str, str]) -> str:
    """The one line that a refusal is."""
    status, out, err = found
    assert (status, out, err.count("\n")) == (2, "", 1), found
    assert "Traceback" not in err
    assert len(err) < 600
    return err


# ---- logs of other tools -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("array_line.jsonl", "line 1: has an unknown format"),
        ("string_line.jsonl", "line 1: has an unknown format"),
        ("empty.jsonl", "line 1: holds no request"),
        ("sharegpt.json", "line 1: has an unknown format.*timestamp, and tokens.*trace anonymise"),
        ("openai_chat.jsonl", "line 1: expected one of.*timestamp, and tokens.*trace anonymise"),
        ("openai_flat.jsonl", "line 1: expected one of.*timestamp, and tokens.*trace anonymise"),
        ("vllm.log", "line 1: has an unknown format.*timestamp, and tokens.*trace anonymise"),
        ("vllm_requests.jsonl", "line 1: .*rename prompt_token_ids to tokens and arrival_time"),
        ("text_log.jsonl", "line 1: is a log of text or tokens.*trace anonymise"),
        ("bad_out.jsonl", "line 1: is a log of text or tokens.*trace anonymise"),
        ("vllm_tokens_renamed.jsonl", "line 1: is a log of text or tokens.*trace anonymise"),
        ("unchained.jsonl", "ids name blocks and not prefixes; re-key them"),
    ],
)
def test_a_log_that_is_no_trace_says_how_to_make_one(
    name: str, fault: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in (["trace", "info"], ["simulate", "--html", tmp_path / "page"]):
        assert re.search(fault, sentence(run(capsys, *words, LOGS / name)))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("array_line.jsonl", "line 1: expected an object, found list"),
        ("string_line.jsonl", "line 1: expected an object, found str"),
        ("empty.jsonl", "line 1: holds no request"),
        ("sharegpt.json", "line 1: expected an object, found list"),
        ("openai_chat.jsonl", "line 1: expected input as text, or tokens.*the prompt as the model"),
        ("openai_flat.jsonl", "line 1: expected input as text, or tokens.*the prompt as the model"),
        ("vllm.log", "line 1: is not JSON"),
        ("vllm_requests.jsonl", "line 1: expected input as text, or tokens"),
        ("burstgpt.csv", "line 1: is not JSON"),
        ("bad_out.jsonl", "line 1: expected output as text or a list of token ids, found int"),
    ],
)
def test_a_log_that_cannot_be_anonymised_writes_nothing(
    name: str, fault: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--key-file", tmp_path / "key", "--block-size", 16]
    found = run(capsys, "trace", "anonymise", LOGS / name, tmp_path / "out", *words)
    assert re.search(fault, sentence(found))
    assert list(tmp_path.iterdir()) == []  # no key either


def test_logs_with_known_answers() -> None:
    tokens = Simulation(anonymise(LOGS / "vllm_tokens_renamed.jsonl", b"k" * 32, 64, "s"))
    ratios = tokens.ratios(tokens.infinite_cache_hits())
    assert (len(tokens.trace), tokens.trace.references) == (5, 44)
    assert ratios.prefix_hit_ratio == pytest.approx(0.5455, abs=5e-5)
    assert len(anonymise(LOGS / "text_log.jsonl", b"k" * 32, 16, "s")) == 4
    agents = Simulation(read(LOGS / "mooncake_toolagent.jsonl"))
    assert agents.infinite_cache_hits().sum() == 12
    assert agents.trace.references == 18
    served = agents.ratios(agents.infinite_cache_hits()).prefix_token_hit_ratio
    assert served == 6144 / 7872
    assert (read(LOGS / "one.jsonl").block_tokens, len(read(LOGS / "one.jsonl"))) == (512, 1)


@pytest.mark.parametrize(
    ("name", "tokens", "microseconds"),
    [("burstgpt.csv", [472, 1087, 417], [0, 40_000_000, 113_000_000]),
     ("azure_2024.csv", [2162, 2399], [0, 7405])],
)  # fmt: skip
def test_lengths_alone_say_what_they_can(
    name: str, tokens: list[int], microseconds: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    trace = read(LOGS / name)
    assert (trace.input_tokens.tolist(), trace.arrival.tolist()) == (tokens, microseconds)
    status, out, _ = run(capsys, "trace", "info", LOGS / name, "--json")
    assert (status, json.loads(out)["ceiling"]) == (0, None)
    assert "lengths but no block ids" in sentence(run(capsys, "simulate", LOGS / name))


def test_a_date_has_the_zone_that_it_names(tmp_path: Path) -> None:
    path = tmp_path / "t"
    dates = ("2024-05-10 02:00:00+02:00", "2024-05-10 00:00:01", "2024-05-09T23:00:02-01:00")
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(f"{d},1,1\n" for d in dates)
    )
    assert read(path).arrival.tolist() == [0, 1_000_000, 2_000_000]


# ---- each field with each wrong value ----------------------------------------------------------

MOONCAKE = {
    "timestamp": 3, "input_length": 12, "output_length": 1, "hash_ids": [1, 2, 3], "session_id": "s",
    "block_size": 4,
}  # fmt: skip
BAILIAN = {**MOONCAKE, "chat_id": 1, "input_length": 48}
LMCACHE = {"timestamp": 3, "seq_len": 12, "chunk_size": 4, "chunk_hashes": ["0xa", "0xb", "0xc"]}
WEKA = {"id": "s", "block_size": 4, "hash_id_scope": "local", "requests": []}
REQUEST = {"t": 1.5, "in": 12, "out": 1, "hash_ids": [1, 2, 3]}

WRONG = (
    "true", "false", "null", "NaN", "Infinity", "-Infinity", "-1", "1.5", "0", "1", "4611686018427387904",
    HUGE, "9" * 5000, "1e400", '"x"', '""', '"1"', f'"{"9" * 5000}"', "[]", "[[]]", "[1.5]", "[true,false]",
    "[null]", "[NaN]", "{}", '{"a":1}', "[" * 900 + "]" * 900, DEEP,
)  # fmt: skip
TIMES = {"1.5", "0", "1", '"1"'}
COUNTS = {"0", "1", '"1"'}
LABELS = {
    "null",
    "-1",
    "0",
    "1",
    "4611686018427387904",
    HUGE,
    '"x"',
    '""',
    '"1"',
    f'"{"9" * 5000}"',
}
FIELDS = [
    *((form, MOONCAKE, name, right) for form in ("auto", "mooncake") for name, right in {
        "timestamp": TIMES, "input_length": set(), "output_length": {*COUNTS, "null"}, "hash_ids": {"[]"},
        "session_id": LABELS, "block_size": set(),
    }.items()),
    *(("auto", BAILIAN, name, right) for name, right in {
        "timestamp": TIMES, "input_length": set(), "output_length": {*COUNTS, "null"}, "hash_ids": {"[]"},
    }.items()),
    *(("auto", LMCACHE, name, right) for name, right in {
        "timestamp": TIMES, "seq_len": set(), "chunk_size": set(), "chunk_hashes": {"[]"},
    }.items()),
    *(("weka", WEKA, name, right) for name, right in {
        "id": LABELS, "block_size": set(), "hash_id_scope": {"null"}, "requests": {"[]"},
    }.items()),
    *(("weka", REQUEST, name, right) for name, right in {
        "t": TIMES, "in": set(), "out": {*COUNTS, "null"}, "hash_ids": {"[]"},
    }.items()),
]  # fmt: skip
"""Format, record, field, and which of ``WRONG`` are right there. A length of 0 or 1 has no three blocks."""


@pytest.mark.parametrize(
    ("form", "record", "name", "right"),
    FIELDS,
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_wrong_field_is_named_with_its_line(
    form: Any, record: dict[str, Any], name: str, right: set[str], tmp_path: Path
) -> None:
    path = tmp_path / "log"
    good = json.dumps(record)
    for value in WRONG:
        line = json.dumps({**record, name: "HERE"}).replace('"HERE"', value)
        if form == "weka":
            requests = line if record is REQUEST else good
            whole = {**WEKA, "requests": "HERE"} if record is REQUEST else {**record, name: "HERE"}
            content = json.dumps(whole).replace(
                '"HERE"', f"[{requests}]" if record is REQUEST else value
            )
            if record is WEKA and name != "requests":
                content = content.replace("[]", f"[{json.dumps(REQUEST)}]")
        else:
            content = f"{good}\n{line}\n"
        path.write_text(content)
        if value in right and not (form == "weka" and (name, value) == ("requests", "[]")):
            read(path, Options(form=form))
            continue
        with pytest.raises(TraceError) as caught:
            read(path, Options(form=form))
        assert caught.value.line == (1 if form == "weka" else 2), (value[:40], str(caught.value))
        assert len(caught.value.fault) < 300
        assert "object has no" not in caught.value.fault
        assert "set_int_max" not in caught.value.fault


@pytest.mark.parametrize("name", ["timestamp", "input", "tokens", "output", "session_id"])
def test_a_wrong_field_of_a_log_is_named_without_what_it_holds(name: str, tmp_path: Path) -> None:
    path, good = tmp_path / "log", {"timestamp": 1, "input": "a" * 16}
    right = {
        "timestamp": TIMES,
        "input": {'"x"', '""', '"1"', f'"{"9" * 5000}"'},
        "tokens": {"[]"},
        "output": {"null", '"x"', '""', '"1"', f'"{"9" * 5000}"', "[]"},
        "session_id": LABELS,
    }[name]
    record: dict[str, Any] = {"timestamp": 1} if name in {"input", "tokens"} else good
    for value in (*WRONG, '["secret"]', "[4294967296]", "[-1]"):
        line = json.dumps({**record, name: "HERE"}).replace('"HERE"', value)
        if value in right:
            path.write_text(f"{line}\n")
            anonymise(path, b"k" * 32, 16)
            continue
        path.write_text(f"{json.dumps(good)}\n{line}\n")
        with pytest.raises(TraceError) as caught:
            anonymise(path, b"k" * 32, 16)
        assert caught.value.line == 2, (value[:40], str(caught.value))
        assert "secret" not in str(caught.value)
        assert len(caught.value.fault) < 300


@pytest.mark.parametrize(
    "line",
    [
        DEEP,
        f'{{"hash_ids":{DEEP}}}',
        '"x"',
        "[1,2]",
        "NaN",
        "Infinity",
        HUGE,
        "9" * 5000,
        "null",
        "\ufeff{}",
        "{",
        "\0",
    ],
    ids=lambda line: line[:14],
)
@pytest.mark.parametrize("at", [0, 1])
def test_a_line_that_is_no_record_is_named_wherever_it_stands(
    line: str, at: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [json.dumps(MOONCAKE)] * 2
    rows[at] = line
    path = tmp_path / "log"
    path.write_text("\n".join(rows))
    for words in (
        ["trace", "info", path],
        ["simulate", path],
        ["trace", "convert", path, tmp_path / "out"],
    ):
        assert f"log, line {at + 1}: " in sentence(run(capsys, *words))
    log = ["--key-file", tmp_path / "key", "--block-size", 16]
    assert ": " in sentence(run(capsys, "trace", "anonymise", path, tmp_path / "out", *log))
    assert list(tmp_path.iterdir()) == [path]


def test_blank_lines_before_the_first_record_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("\n" * 100 + json.dumps(MOONCAKE) + "\n{\n")
    with pytest.raises(TraceError, match="line 102: is not JSON"):
        read(path)
    path.write_text("\n" * 100 + json.dumps(MOONCAKE))
    assert len(read(path)) == 1


def test_a_pipe_is_read_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    text = (LOGS / "mooncake_toolagent.jsonl").read_text()
    writer = threading.Thread(target=pipe.write_text, args=(text,))
    writer.start()
    page = tmp_path / "page"
    words = ["--policy", "lru", "--size", "50%", "--json", "--html", page]
    status, out, _ = run(capsys, "simulate", pipe, *words)
    writer.join()
    assert "none: read from a stream" in page.read_text()
    assert (status, json.loads(out)["trace"]["requests"]) == (0, 4)
    assert json.loads(out)["trace"]["sha256"] is None


def test_lengths_that_overflow_a_sum_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "log"
    row = {**MOONCAKE, "hash_ids": [], "input_length": 2**40 - 1}
    path.write_text(f"{json.dumps(row)}\n" * 3)
    assert int(read(path).input_tokens.sum()) == 3 * (2**40 - 1)
    path.write_text(f"{json.dumps({**row, 'input_length': 2**61})}\n" * 3)
    with pytest.raises(TraceError, match="line 1: expected input_length from 0 to below"):
        read(path)


# ---- ids of 64 bits ----------------------------------------------------------------------------


def hits(path: Path) -> int:
    simulation = Simulation(read(path, Options(block_tokens=4)))
    return int(simulation.infinite_cache_hits().sum())


@pytest.mark.parametrize(
    "of",
    [
        lambda t, i: 2**63 + 1000 * t + i,
        lambda t, i: 2**62 - 1 + 1000 * t + i,
        lambda t, i: 2**64 + 1000 * t + i,
        lambda t, i: 10**30 + 1000 * t + i,
        lambda t, i: -(2**63) + 1000 * t + i,
        lambda t, i: -1 - 1000 * t - i,
        lambda t, i: (1, -1)[i % 2] * (1000 * t + i + 1),
        lambda t, i: str(1000 * t + i) if i % 2 else 1000 * t + i,
        lambda t, i: f"h{1000 * t + i}" if t % 2 else 10 * t + i,
        lambda t, i: (2**63 if t % 2 else 0) + 1000 * t + i,
    ],
)
def test_ids_that_differ_stay_apart_and_equal_ones_together(
    of: Callable[[int, int], int | str], tmp_path: Path
) -> None:
    path = tmp_path / "log"
    rows = [
        {"timestamp": t, "input_length": 40, "hash_ids": [of(t, i) for i in range(10)]}
        for t in range(20)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert read(path, Options(block_tokens=4)).distinct_blocks == 200
    assert hits(path) == 0
    path.write_text("".join(json.dumps(row) + "\n" for row in rows * 2))
    assert hits(path) == 200


def test_an_id_is_the_same_beside_text_and_alone(tmp_path: Path) -> None:
    path = tmp_path / "log"
    paths: list[list[int | str]] = [[7], [7, "a"], [7, 8], [7, "a", 2**70]]
    rows = [{"timestamp": 0, "input_length": 4 * len(p), "hash_ids": p} for p in paths]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    trace = read(path, Options(block_tokens=4))
    seen: dict[int, int] = {}
    made = [[seen.setdefault(int(b), len(seen)) for b in trace.chain(i)] for i in range(4)]
    assert made == [[0], [0, 1], [0, 2], [0, 1, 3]]


# ---- formats and block sizes that contradict the lengths ---------------------------------------


@pytest.mark.parametrize(
    "words", [["--format", "bailian"], ["--block-size", "100"], ["--block-size", "170"]]
)
def test_a_format_or_block_size_that_contradicts_the_lengths_is_refused(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    for command in (["trace", "info"], ["simulate"]):
        err = sentence(run(capsys, *command, LOGS / "mooncake_toolagent.jsonl", *words))
        assert re.search(
            r"line 1: 3 block ids for 1,200 tokens contradict blocks of \d+ tokens", err
        )
        assert "(512 tokens fits 100% of the requests)" in err


def test_a_block_size_in_the_file_that_contradicts_its_lengths_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "log"
    for record, lengths in ((MOONCAKE, "input_length"), (LMCACHE, "seq_len")):
        path.write_text(json.dumps({**record, lengths: 1200}))
        with pytest.raises(TraceError, match="line 1: 3 block ids for 1,200 tokens contradict"):
            read(path)
    path.write_text(json.dumps({**WEKA, "requests": [{**REQUEST, "in": 1200}]}))
    with pytest.raises(TraceError, match="line 1: 3 block ids for 1,200 tokens contradict"):
        read(path)


def test_lengths_that_are_estimates_may_lack_a_block(tmp_path: Path) -> None:
    path = tmp_path / "log"
    # 1,021 bytes are 256 tokens by the estimate, and 15 whole blocks of 64 bytes.
    row = {**MOONCAKE, "block_size": 16, "input_length": 256, "hash_ids": list(range(15))}
    path.write_text(json.dumps(row))
    assert read(path).references == 15


# ---- numbers of the command line ---------------------------------------------------------------


@pytest.mark.parametrize("value", [HUGE, "nan", "inf", "-1", "5e-324", "1e400"])
@pytest.mark.parametrize(
    "words",
    [
        ["--size", "{}b"], ["--size", "{}%"], ["--size", "{}GiB", "--bytes-per-token", "1"],
        ["--block-size", "{}"], ["--warmup", "{}"], ["--bytes-per-token", "{}"],
        ["--bytes-per-token", "9", "--prefill-tps", "{}"],
        ["--bytes-per-token", "9", "--prefill-tps", "9", "--bandwidth", "{}GB/s"],
        ["--window-tokens", "{}"], ["--window-tokens", "9", "--window-ttl", "{}s"],
        ["--window-tokens", "9", "--window-bytes", "{}%"],
        ["--tier", "a={}b"], ["--tier", "a=1b@{}GB/s"], ["--tier", "a=1b,latency={}s"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_a_number_that_is_none_is_refused_by_its_option(
    words: list[str], value: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [word.format(value) for word in words]
    if (words, value) == (["--warmup", "{}"], "5e-324"):
        return  # a share like any other
    page = tmp_path / "page"
    err = sentence(
        run(capsys, "simulate", LOGS / "mooncake_toolagent.jsonl", *given, "--html", page)
    )
    assert re.search("expected|must be|is a share|Invalid value|is missing|has no value", err)
    assert not page.exists()


@pytest.mark.parametrize(
    "words",
    [["--size", "99999999999999999999%"], ["--size", "999999999999999999b,9999999999999999999b"]],
)
def test_a_size_beyond_64_bits_is_refused(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert "expected a size" in sentence(run(capsys, "simulate", LOGS / "one.jsonl", *words))
