"""Two checkouts in pairs: the interval, the direction of a ratio, and runs of real processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.versions import compare, faster, figures, interval


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (range(1, 10), (2, 8)),  # 2 (1 + 9) / 512 = 0.039 lie outside; one more would be 0.18
        (range(1, 7), (1, 6)),  # 2 / 64 = 0.031
        ([3.0], (3.0, 3.0)),
        ([3, 1, 2], (1, 3)),  # too few for 95 %: all there is
    ],
)
def test_the_interval_holds_the_median(values: list[float], expected: tuple[float, float]) -> None:
    assert interval(list(values)) == expected


def test_a_ratio_above_one_is_faster() -> None:
    assert faster(2.0, 1.0, "s") == 2.0
    assert faster(1.0, 2.0, "GB/s") == 2.0
    assert faster(0.5, 0.25, "ratio") == 2.0, "seconds over a peer's seconds"


def checkout(folder: Path, value: float) -> Path:
    (folder / "bench").mkdir(parents=True)
    (folder / "bench" / "__init__.py").touch()
    (folder / "bench" / "one.py").write_text(
        "import json\n"
        f"print(json.dumps([{{'section': 'a', 'what': 'b', 'value': {value}, 'unit': 'GB/s'}},"
        "{'bar': 'X', 'what': 'differences', 'found': 0}]))"
    )
    return folder


def test_each_checkout_runs_its_own_bench(tmp_path: Path) -> None:
    before, after = checkout(tmp_path / "old", 2.0), checkout(tmp_path / "new", 3.0)
    (change,) = compare(before, after, ["bench.one"], 3)
    assert (change.name, change.before, change.after, change.ratio) == ("a b", 2.0, 3.0, 1.5)
    assert (change.low, change.high, change.pairs) == (1.5, 1.5, 3)


@pytest.mark.parametrize(
    ("row", "name", "expected"),
    [
        ({"work": "pack", "by": "avx2", "gb_per_s": 2.5, "ratio": 0.3}, "pack avx2", (2.5, "GB/s")),
        (
            {"section": "cold", "what": "read", "of": "m", "value": 3, "unit": "ms", "bar": 2.0,
             "beside": "O_DIRECT, 1 thread"},
            "cold read m O_DIRECT, 1 thread",
            (3.0, "ms"),
        ),
    ],
)  # fmt: skip
def test_rows_of_each_bench_are_read(
    tmp_path: Path, row: dict[str, object], name: str, expected: tuple[float, str]
) -> None:
    folder = checkout(tmp_path / "old", 1.0)
    text = f"import json\nprint(json.dumps({{'rows': [{row!r}]}}))"
    (folder / "bench" / "three.py").write_text(text)
    assert figures(folder, ["bench.three"]) == {name: expected}


def test_a_bench_that_fails_is_said(tmp_path: Path) -> None:
    folder = checkout(tmp_path / "old", 1.0)
    with pytest.raises(SystemExit, match="bench.two printed no JSON; its exit status is 1"):
        figures(folder, ["bench.two"])
