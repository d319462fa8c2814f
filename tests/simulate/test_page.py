"""HTML page of a simulation: contents, safety, independence of the network, rendering in a browser."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from typing_extensions import override

from kvstore.cli import main as cli
from tests.simulate.browser import Browser, browser
from tests.simulate.support import grown_paths, trace_of

EVERYTHING = [
    *("--policy", "lru,arc,optimal", "--size", "5%,20%,50%", "--model", "deepseek-v4.1-flash"),
    *("--prefill-tps", "1000", "--bandwidth", "1GB/s", "--exclusive", "--window-ttl", "20s"),
    *("--tier", "device=20b@200GB/s", "--tier", "ssd=60b@3GB/s,write=on-evict"),
]
HOSTILE = '<script>alert(1)<\'img src=x onerror="alert(2)"&amp;'
EMPTY = {"area", "br", "hr", "img", "input", "link", "meta"}


class Parsed(HTMLParser):
    """Every element with its attributes, the text of each kind, and whether tags are balanced."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.texts: dict[str, list[str]] = {}
        self.open: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open

    @override
    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in EMPTY:
            self.open.append(tag)

    @override
    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))

    @override
    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    @override
    def handle_data(self, data: str) -> None:
        for tag in self.open[-1:]:
            self.texts.setdefault(tag, []).append(data)

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.elements)


def write_trace(path: Path, paths: list[list[int]], step: int = 7000) -> Path:
    trace = trace_of(paths)
    with path.open("w") as file:
        for number in range(len(trace)):
            blocks = trace.blocks[trace.offsets[number] : trace.offsets[number + 1]].tolist()
            row = {"timestamp": number * step, "input_length": 4 * len(blocks), "output_length": 1}
            file.write(json.dumps({**row, "hash_ids": blocks, "block_size": 4}) + "\n")
    return path


def made(tmp_path: Path, *arguments: str | Path) -> str:
    out = tmp_path / "report.html"
    assert cli.main(["simulate", *map(str, arguments), "--html", str(out)]) == 0
    return out.read_text()


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_trace(tmp_path_factory.mktemp("page") / "chat.jsonl", grown_paths(seed=3))


def test_a_page_holds_everything_that_was_found(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = made(tmp_path, trace, *EVERYTHING)
    capsys.readouterr()
    assert cli.main(["simulate", str(trace), *EVERYTHING, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    parsed = Parsed(page)
    assert parsed.texts["h3"] == [
        "Recommendation",
        "Hits by size",
        "Capacity gap and policy gap",
        "Time to first token by size",
        "Tiers",
        "Window TTL",
        "Hints",
        "How to reproduce",
    ]
    assert parsed.count("svg") == 4
    assert parsed.count("main") == parsed.count("h1") == parsed.count("h2") == 1
    assert parsed.count("table") == parsed.count("caption")
    assert set(found["recommendation"]["text"]) <= set(parsed.texts["li"])
    words = " ".join("".join(parsed.texts["span"]).split())
    assert "".join(found["recommendation"]["command"].split()) in words
    cells = {*parsed.texts["td"], *parsed.texts["th"]}
    for row in found["rows"]:
        assert f"{row['prefix_token_hit_ratio']:.1%}" in cells
        assert f"{row['size_blocks']:,}" in cells
    for gap in found["recommendation"]["gaps"]:
        assert {f"{100 * gap['capacity']:.2f}", f"{100 * gap['policy']:.2f}"} <= cells
    for cost in found["costs"]:
        assert f"{cost['ttft_seconds']['mean']:,.3f}" in cells
    for point in found["window_pool"]["curve"]:
        assert f"{point['kept']:.1%}" in cells
    assert {found["trace"]["sha256"], found["version"], "20s", "device"} <= cells


def test_a_chart_has_words_for_those_who_do_not_see_it_and_a_line_for_each_policy(
    trace: Path, tmp_path: Path
) -> None:
    charts = [
        ET.fromstring(text)
        for text in re.findall(r"<svg.*?</svg>", made(tmp_path, trace, *EVERYTHING), re.DOTALL)
    ]
    space = "{http://www.w3.org/2000/svg}"
    for root in charts:
        assert root.attrib["role"] == "img"
        assert root[0].tag == f"{space}title"
        assert root[1].tag == f"{space}desc"
        assert len(root[0].text or "") > 10
        assert len(root[1].text or "") > 10
        assert "width" not in root.attrib
    hits = charts[0]
    names = [node.text for node in hits.iter(f"{space}text")]
    assert {"lru", "arc", "optimal", "tokens hit, %"} <= set(names)
    assert any(name and name.startswith("infinite cache ") for name in names)
    marks = {part for name in names for part in (name or "").split(", ")}
    assert {"90%", "95%", "99%", "knee"} <= marks
    assert len(list(hits.iter(f"{space}polyline"))) == 3
    # Of three simulated sizes each policy but lru, whose line is exact, has a dot; two more are keys.
    assert len(list(hits.iter(f"{space}circle"))) == 2 * 3 + 2


def test_the_same_trace_and_options_give_the_same_bytes(trace: Path, tmp_path: Path) -> None:
    first = made(tmp_path, trace, *EVERYTHING)
    assert first == made(tmp_path, trace, *EVERYTHING, "--jobs", "2")


def leads_out(page: str) -> Iterator[str]:
    """Whatever in a page could ask for anything from elsewhere, or run."""
    for tag, attributes in Parsed(page).elements:
        if tag in {"script", "link", "iframe", "object", "embed", "img", "base", "form", "use"}:
            yield tag
        for name, value in attributes.items():
            if name in {"src", "srcset", "data", "action"} or name.startswith("on"):
                yield f"{tag} {name}"
            if name.endswith("href") and not value.startswith("#"):
                yield f"{tag} {name}={value}"
            if name != "xmlns" and "://" in value and not value.startswith("3GB"):
                yield f"{tag} {name}={value}"
            if name == "style" or "url(" in value:
                yield f"{tag} {name}"
    style = "".join(Parsed(page).texts["style"])
    yield from re.findall(r"url\(|@import|://|expression", style)


def test_a_page_leads_nowhere_and_runs_nothing(trace: Path, tmp_path: Path) -> None:
    page = made(tmp_path, trace, trace, *EVERYTHING)
    assert list(leads_out(page)) == []
    metas = [attributes for tag, attributes in Parsed(page).elements if tag == "meta"]
    assert {"charset": "utf-8"} in metas
    assert any(each.get("content", "").startswith("default-src 'none'") for each in metas)
    assert list(leads_out(page.replace("<h1>", "<script src='https://example.org'></script><h1>")))


def test_names_of_traces_are_text_wherever_they_stand(trace: Path, tmp_path: Path) -> None:
    path = tmp_path / f"{HOSTILE}.jsonl"
    path.write_bytes(trace.read_bytes())
    page = made(tmp_path, path, trace, "--policy", "lru", "--size", "20%")
    assert list(leads_out(page)) == []
    parsed = Parsed(page)
    assert parsed.texts["h2"] == [HOSTILE, "chat"]
    assert parsed.texts["a"] == [HOSTILE, "chat"]
    assert HOSTILE in "".join(parsed.texts["title"])
    assert parsed.count("article") == 2
    assert 'onerror="' not in page


def test_letters_that_turn_text_around_or_are_none_are_not_written(
    trace: Path, tmp_path: Path
) -> None:
    path = tmp_path / "a\u202eb\x1b[2J\udcff.jsonl"
    path.write_bytes(trace.read_bytes())
    page = made(tmp_path, path, "--policy", "lru", "--size", "20%")
    assert Parsed(page).texts["h2"] == ["a?b?[2J?"]


@pytest.mark.parametrize(
    ("paths", "step", "arguments", "said"),
    [
        ([[0], [1], [2]], 1000, EVERYTHING, ["No block is used twice", "none needs a window"]),
        ([[0, 1]], 0, [], ["No block is used twice"]),
        ([[0, 1], [0, 1]], 0, ["--window-tokens", "4"], ["all TTLs are equivalent", "Tiers:"]),
        ([[0], [0]], 1, ["--size", "1b", "--policy", "optimal"], ["such as --policy lru,arc"]),
        ([[0, 1], [0]], 1, ["--tier", "a=1b", "--policy", "optimal"], ["cannot run in tiers"]),
        ([[0, 1], [0, 2]], 1, ["--size", "0b,9b", "--tier", "a=1b"], ["lru, inclusive tiers"]),
        ([[0, 1], [0, 1]], 1, ["--semantics", "flat", "--policy", "arc,lru"], ["lru by prefix"]),
        ([[], [0, 1], [0, 1]], 1, ["--warmup", "0.9"], ["last 10% of the requests"]),
    ],
)  # fmt: skip
def test_what_is_missing_is_said(
    tmp_path: Path, paths: list[list[int]], step: int, arguments: list[str], said: list[str]
) -> None:
    page = made(tmp_path, write_trace(tmp_path / "t.jsonl", paths, step), *arguments)
    Parsed(page)
    for words in said:
        assert words in page
    assert "nan" not in re.sub(r"<style>.*?</style>", "", page, flags=re.DOTALL)


def test_a_page_is_written_whole_or_not_at_all(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = made(tmp_path, trace, "--policy", "lru")
    bad = tmp_path / "bad.jsonl"
    bad.write_text(trace.read_text() + "{}\n")
    out = tmp_path / "report.html"
    assert cli.main(["simulate", str(trace), str(bad), "--html", str(out)]) == 2
    assert out.read_text() == before
    assert cli.main(["simulate", str(trace), "--html", str(tmp_path / "no" / "page.html")]) == 2
    assert "cannot be written" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.jsonl", "report.html"]


# ---- in a browser ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("profile")) as running:
        yield running


WIDER = """[...document.querySelectorAll("main *")].filter(each => !each.closest(".scroll table")
  && each.getBoundingClientRect().right > innerWidth + 0.5).map(each => each.tagName)"""
SHOWN = """[...document.querySelectorAll("h1, h2, h3, svg, figcaption, table")].map(each => {
  const box = each.getBoundingClientRect(); return [each.tagName, box.width, box.height]; })"""
MEETING = """[...document.querySelectorAll("svg")].flatMap(svg => {
  const texts = [...svg.querySelectorAll("text")].map(t => [t.textContent, t.getBoundingClientRect()]);
  const page = svg.getBoundingClientRect();
  return texts.flatMap(([name, a], i) => [
    ...(a.left < page.left - 1 || a.right > page.right + 1 || a.top < page.top - 1
      || a.bottom > page.bottom + 1 ? [[name, "leaves the chart"]] : []),
    ...texts.slice(i + 1).filter(([, b]) => Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1
      && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 1).map(([other]) => [name, other])]); })"""
CONTRAST = """(() => {
  const light = text => { const parts = text.match(/[0-9.]+/g).slice(0, 3).map(part => {
      const c = part / 255; return c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4; });
    return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]; };
  const paper = light(getComputedStyle(document.body).backgroundColor);
  const ratio = text => { const other = light(text);
    return (Math.max(paper, other) + 0.05) / (Math.min(paper, other) + 0.05); };
  const styles = (query, name) => [...document.querySelectorAll(query)]
    .map(each => ratio(getComputedStyle(each)[name]));
  return [Math.min(...styles("p, li, th, td, caption, figcaption, h1, h2, h3, dt, dd", "color"),
    ...styles("svg text", "fill")), Math.min(...styles("svg g", "color"))]; })()"""


@pytest.mark.parametrize("is_dark", [False, True])
@pytest.mark.parametrize("width", [360, 1200])
def test_a_browser_shows_all_of_it_at_any_width_and_asks_for_nothing(
    chromium: Browser, trace: Path, tmp_path: Path, width: int, is_dark: bool
) -> None:
    long = tmp_path / f"{'long-name-' * 12}.jsonl"
    long.write_bytes(trace.read_bytes())
    made(tmp_path, trace, long, *EVERYTHING)
    chromium.open(tmp_path / "report.html", width, is_dark=is_dark)
    assert chromium.value("innerWidth") == width
    assert chromium.value("document.documentElement.scrollWidth") == width
    assert chromium.value(WIDER) == []
    shown = chromium.value(SHOWN)
    assert [tag for tag, *_ in shown].count("svg") == 8
    assert all(across > 40 and down > 10 for _, across, down in shown), shown
    assert all(across >= 300 for tag, across, _ in shown if tag == "svg")
    assert chromium.value(MEETING) == []
    # WCAG 2.2, 1.4.3 and 1.4.11: text 4.5 to 1, what has a meaning 3 to 1.
    text, lines = chromium.value(CONTRAST)
    assert text >= 4.5
    assert lines >= 3
    requests = [each["request"]["url"] for each in chromium.heard("Network.requestWillBeSent")]
    assert requests == [(tmp_path / "report.html").as_uri()]
    assert chromium.heard("Log.entryAdded") == []
    assert len(chromium.picture()) > 20_000


def test_a_browser_runs_nothing_that_a_name_brings(
    chromium: Browser, trace: Path, tmp_path: Path
) -> None:
    path = tmp_path / f"{HOSTILE}.jsonl"
    path.write_bytes(trace.read_bytes())
    made(tmp_path, path, "--policy", "lru")
    chromium.open(tmp_path / "report.html", 360)
    assert chromium.value('document.querySelector("h2").textContent') == HOSTILE
    assert chromium.value('document.querySelectorAll("script, img").length') == 0
    assert chromium.heard("Page.javascriptDialogOpening") == []
