"""HTML pages: content is escaped, and a page loads no other resource."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvstore.output.chart import escaped

POLICY = "default-src 'none'; style-src 'unsafe-inline'"
"""Content security policy of a page: inline style, no script, no external content."""
_EMPTY = frozenset({"meta", "br"})
"""Elements without an end tag."""
STYLE = """
:root { color-scheme: light dark; --paper: #fff; --ink: #1d2329; --soft: #59636e; --line: #d8dee4;
  --box: #f5f7f9; --accent: #0065a3; --series-0: #0072b2; --series-1: #c34f00; --series-2: #00805e;
  --series-3: #a8477f; --series-4: #946600; --series-5: #2b83b3; --series-6: #444c56; }
@media (prefers-color-scheme: dark) {
  :root { --paper: #14181d; --ink: #e4e8ec; --soft: #a3adb8; --line: #353d46; --box: #1d232a;
    --accent: #6cb8f2; --series-0: #5ab0f0; --series-1: #ff9050; --series-2: #35cc9c;
    --series-3: #ec9dc9; --series-4: #eebf4e; --series-5: #a5dcfa; --series-6: #b5bdc6; } }
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; }
body { margin: 0; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
main { max-width: 1200px; margin: 0 auto; padding: 1.25rem 1rem 3rem; }
h1, h2, h3, p, li, dd, figcaption { overflow-wrap: anywhere; }
h1, h2, h3 { line-height: 1.25; }
h1 { font-size: 1.6rem; margin: 0 0 .25rem; }
h2 { font-size: 1.3rem; margin: 2.5rem 0 .5rem; }
h3 { font-size: 1.1rem; margin: 2.25rem 0 .5rem; padding-top: 1rem; border-top: 1px solid var(--line); }
p, ul { margin: .5rem 0; max-width: 46rem; }
ul { padding-left: 1.25rem; }
a { color: var(--accent); }
.soft, figcaption, caption { color: var(--soft); font-size: .875rem; }
pre { margin: .5rem 0; padding: .75rem; background: var(--box); border: 1px solid var(--line);
  border-radius: 6px; font-size: .875rem; white-space: pre-wrap; overflow-wrap: anywhere; }
pre span { display: inline-block; max-width: 100%; vertical-align: top; }
.figures { display: grid; gap: .75rem; grid-template-columns: repeat(auto-fit, minmax(9rem, 1fr));
  margin: 1rem 0; }
.figures div { background: var(--box); border: 1px solid var(--line); border-radius: 6px;
  padding: .6rem .75rem; }
.figures dt { color: var(--soft); font-size: .875rem; }
.figures dd { margin: 0; font-size: 1.3rem; font-weight: 600; line-height: 1.3; }
.figures .small { font-size: .875rem; font-weight: 400; color: var(--soft); }
.beside { display: grid; gap: 0 2rem; grid-template-columns: minmax(0, 1fr); align-items: start; }
@media (min-width: 900px) { .beside { grid-template-columns: minmax(0, 1fr) minmax(0, 1.15fr); } }
figure { margin: .75rem 0; max-width: 540px; }
svg { display: block; width: 100%; height: auto; fill: var(--ink); }
svg .grid { stroke: var(--line); }
svg line.mark { stroke: var(--soft); }
svg text.mark { stroke: var(--paper); }
""" + "".join(f"svg .series-{n} {{ color: var(--series-{n}); }}\n" for n in range(7))
STYLE += """.scroll { overflow-x: auto; margin: .75rem 0; }
.scroll:focus-visible { outline: 2px solid var(--accent); }
table { border-collapse: collapse; font-size: .875rem; font-variant-numeric: tabular-nums; }
caption { text-align: left; padding-bottom: .35rem; max-width: calc(100vw - 2rem); }
th, td { padding: .3rem 0 .3rem .75rem; text-align: right; white-space: nowrap;
  border-bottom: 1px solid var(--line); }
th { font-weight: 600; }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
.words th, .words td { text-align: left; vertical-align: top; }
.words td { white-space: normal; overflow-wrap: anywhere; min-width: 9rem; }
.words th { white-space: normal; }
@media print { .scroll { overflow: visible; } h3, figure, table { break-inside: avoid; } }
"""
"""Light or dark by the reader's setting; one column on a phone, two on a wide screen."""


class Markup(str):
    """Text that is already HTML. Other text is escaped in an element."""

    __slots__ = ()


def element(tag: str, /, *content: str, **attributes: str) -> Markup:
    """Return an element; ``class_`` is the attribute ``class``, and ``aria_label`` ``aria-label``."""
    pairs = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escaped(text)}"'
        for key, text in attributes.items()
    )
    if tag in _EMPTY:
        return Markup(f"<{tag}{pairs}>")
    return Markup(f"<{tag}{pairs}>{joined(content)}</{tag}>")


def joined(content: Iterable[str]) -> Markup:
    """Return concatenated texts."""
    return Markup("".join(t if isinstance(t, Markup) else escaped(t) for t in content))


def table(
    caption: str, header: Sequence[str], rows: Iterable[Sequence[str]], class_: str = "numbers"
) -> Markup:
    """Return a table, scrollable if it is too wide. The first cell of a row is its header."""
    head = element("tr", *(element("th", cell, scope="col") for cell in header))
    body = [
        element("tr", element("th", first, scope="row"), *(element("td", each) for each in rest))
        for first, *rest in rows
    ]
    inside = element(
        "table",
        element("caption", caption),
        *([element("thead", head)] if header else []),
        element("tbody", *body),
        class_=class_,
    )
    # With a tab stop it is scrollable by keyboard.
    return element("div", inside, class_="scroll", role="region", tabindex="0", aria_label=caption)


def page(title: str, *content: str, language: str = "en") -> str:
    """Return a complete page."""
    head = [
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", http_equiv="Content-Security-Policy", content=POLICY),
        element("title", title),
        Markup(f"<style>{STYLE}</style>"),
    ]
    body = element("body", element("main", *content))
    whole = element("html", element("head", *head), body, lang=language)
    return f"<!doctype html>\n{whole}\n"
