"""Charts: well-formed, every point and every bar where its value belongs."""

from __future__ import annotations

from xml.etree import ElementTree as ET

import pytest

from kvstore.output.chart import (
    INLINE,
    LABELS,
    NAMES,
    WIDTH,
    Axis,
    Bar,
    Mark,
    Point,
    Scale,
    Series,
    bars,
    chart,
)


def test_a_chart_is_xml_with_a_mark_for_each_point_and_each_series() -> None:
    points = (Point(1, 2.0, 1.5, 2.5, "a <label>"), Point(3, 4.0, 4.0, 4.0))
    text = chart([Series("one & only", points, is_line=True)], title="t", x=Axis("x"), y=Axis("y"))
    root = ET.fromstring(text)
    space = "{http://www.w3.org/2000/svg}"
    assert len(list(root.iter(f"{space}circle"))) == 3
    assert len(list(root.iter(f"{space}polyline"))) == 1
    words = {node.text for node in root.iter(f"{space}text")}
    assert {"one & only", "a <label>", "t", "x", "y"} <= words


def test_a_scale_places_its_ends_and_labels_round_values() -> None:
    linear = Scale(0, 10, 100, 200)
    assert [linear.position(v) for v in (0, 5, 10)] == [100, 150, 200]
    assert linear.ticks() == [0, 2, 4, 6, 8, 10]
    by_powers = Scale(0.1, 10, 100, 200, is_log=True)
    assert by_powers.position(1.0) == pytest.approx(150)
    assert by_powers.ticks() == pytest.approx([0.1, 0.2, 0.5, 1, 2, 5, 10])


@pytest.mark.parametrize("is_log", [False, True])
def test_equal_values_still_make_a_chart(is_log: bool) -> None:
    text = chart(
        [Series("s", (Point(5, 5, 5, 5),))], title="t", x=Axis("x"), y=Axis("y", is_log=is_log)
    )
    assert "nan" not in text


def test_no_point_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one point"):
        chart([Series("s", ())], title="t", x=Axis("x"), y=Axis("y"))


def test_names_stand_where_numbers_would() -> None:
    points = tuple(Point(x, 1, 1, 1) for x in (1, 2, 3))
    names = ["one", "two", "three"]
    x = Axis("", ticks=tuple(enumerate(names, 1)))
    text = chart([Series("s", points)], title="t", x=x, y=Axis("y"))
    root = ET.fromstring(text)
    space = "{http://www.w3.org/2000/svg}"
    places = {node.text: node.attrib["x"] for node in root.findall(f"{space}text")}
    dots = [node.attrib["cx"] for node in root.iter(f"{space}circle")]
    assert [places[name] for name in names] == dots[:3]


def rectangles(svg: str) -> list[dict[str, str]]:
    """Return the bars of a chart: its rectangles, but for the page itself."""
    return [dict(node.attrib) for node in ET.fromstring(svg).iter() if node.tag.endswith("}rect")][
        1:
    ]


def test_a_bar_is_as_long_as_the_logarithm_of_its_value() -> None:
    rows = [Bar(str(value), value, "") for value in (100.0, 1000.0, 10_000.0)]
    widths = [float(bar["width"]) for bar in rectangles(bars(rows, title="t", x_label="x"))]
    # The scale begins a decade below the least value and ends with the greatest.
    decade = (WIDTH - LABELS - NAMES) / 3
    assert widths == pytest.approx([decade, 2 * decade, 3 * decade], abs=0.1)


@pytest.mark.parametrize("values", [(1.0,), (7.0, 7.0), (0.003, 4e9), (890.0, 389_120.0)])
def test_no_bar_is_without_length_or_leaves_the_page(values: tuple[float, ...]) -> None:
    svg = bars([Bar("n", value, "l") for value in values], title="t", x_label="x")
    widths = [float(bar["width"]) for bar in rectangles(svg)]
    assert len(widths) == len(values)
    assert all(5 < width <= WIDTH - LABELS - NAMES for width in widths)


def test_a_name_of_any_characters_leaves_the_file_well_formed() -> None:
    svg = bars([Bar("<&>\x00\x1b\udcff'", 1.0, "]]>")], title="a\nb", x_label="x")
    texts = [node.text for node in ET.fromstring(svg.encode()).iter() if node.tag.endswith("}text")]
    assert texts[0] == "a?b"
    assert {"<&>???'", "]]>"} <= set(texts)


@pytest.mark.parametrize("rows", [[], [Bar("n", 0.0, "")], [Bar("n", 2.0, ""), Bar("m", -1.0, "")]])
def test_what_has_no_logarithm_has_no_bars(rows: list[Bar]) -> None:
    with pytest.raises(ValueError, match="positive values"):
        bars(rows, title="t", x_label="x")


def inline(marks: list[Mark], names: tuple[str, ...] = ("a",)) -> ET.Element:
    points = tuple(Point(x, x, x, x) for x in (1.0, 10.0, 1000.0))
    series = [Series(name, points, is_line=True, has_dots=False) for name in names]
    x, y = Axis("x", is_log=True, ends=(1, 1000)), Axis("y", ends=(0, 1000))
    text = chart(series, title="t", x=x, y=y, marks=marks, frame=INLINE, description="d")
    return ET.fromstring(text)


def places(root: ET.Element) -> dict[str, tuple[float, float]]:
    texts = (node for node in root.iter() if node.tag.endswith("}text"))
    return {node.text or "": (float(node.attrib["x"]), float(node.attrib["y"])) for node in texts}


def test_marks_that_are_near_are_named_one_above_the_other_and_stay_on_the_chart() -> None:
    root = inline([Mark("far", 2.0), Mark("left one", 100.0), Mark("right one", 101.0),
                   Mark("a very long name", 1000.0), Mark("level", 500.0, is_of_y=True)])  # fmt: skip
    found = places(root)
    assert found["far"][1] == found["left one"][1] > found["right one"][1]
    assert found["a very long name"][0] < INLINE.width - INLINE.right - 16 * 3
    dashed = [node for node in root.iter() if node.attrib.get("class") == "mark"]
    lines = [node.attrib for node in dashed if node.tag.endswith("}line")]
    assert sorted(line["x1"] == line["x2"] for line in lines) == [False, True, True, True, True]


def test_a_chart_within_a_page_takes_its_width_and_names_its_lines_below() -> None:
    names = tuple(f"a long name of line {number}" for number in range(9))
    root = inline([], names)
    assert "width" not in root.attrib
    assert [child.text for child in root[:2]] == ["t", "d"]
    height = float(root.attrib["viewBox"].split()[3])
    found = places(root)
    for name in names:
        assert 0 < found[name][0] < INLINE.width
        assert INLINE.height < found[name][1] < height
    lines = [node.attrib for node in root.iter() if node.tag.endswith("}polyline")]
    # There are seven colours: the eighth line has the first one again, and dashes.
    assert [("stroke-dasharray" in line) for line in lines] == [False] * 7 + [True] * 2
