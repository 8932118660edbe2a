"""Small pieces of HTML, and the look of the page: light and dark, wide and narrow, on screen and on paper.

Every text that comes from a record is escaped here or by `escape` itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from fedpmt.report.groups import clean, group_runs
from fedpmt.report.theme import looks_of, new_figure, themed, to_svg

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from matplotlib.axes import Axes

    from fedpmt.records import RunRecord
    from fedpmt.report.groups import Group
    from fedpmt.report.theme import Look


@dataclass(frozen=True)
class Material:
    """What all sections draw from, worked out once."""

    runs: tuple[RunRecord, ...]
    groups: list[Group]
    looks: dict[str, Look]
    targets: tuple[float, ...] | None  # None: round accuracies that some run reaches

    @classmethod
    def of(cls, runs: Sequence[RunRecord], targets: Sequence[float] | None) -> Material:
        """Group the runs and give each group its look."""
        groups = group_runs(runs)
        return cls(tuple(runs), groups, looks_of(groups), None if targets is None else tuple(targets))

    @property
    def score_name(self) -> str:
        """What the score of all runs is called; "score" where they have different ones."""
        names = {group.score_name for group in self.groups}
        return names.pop() if len(names) == 1 else "score"

    @property
    def score_title(self) -> str:
        """The same as a heading begins."""
        return self.score_name[:1].upper() + self.score_name[1:]


def document(title: str, header: str, sections: Mapping[str, tuple[str, str]], footer: str) -> str:
    """A whole page: its header, links to its sections, and these; each has a name, a title and a body of HTML."""
    links = "".join(
        f'<li><a href="#{name}">{escape(heading)}</a></li>' for name, (heading, _) in sections.items()
    )
    return "\n".join(
        [
            '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            # An empty icon: else a browser asks the server for one.
            '<link rel="icon" href="data:,">',
            f"<title>{escape(clean(title))}</title>\n<style>\n{STYLESHEET}</style>\n</head>\n<body>",
            header,
            f'<nav aria-label="Sections"><ul>{links}</ul></nav>\n<main>',
            *(body for _, body in sections.values()),
            f"</main>\n<footer><p>{footer}</p></footer>\n</body>\n</html>\n",
        ]
    )


def section(identity: str, title: str, *parts: str) -> str:
    """A titled section that links can point at."""
    body = "\n".join(part for part in parts if part)
    return f'<section id="{identity}">\n<h2>{escape(title)}</h2>\n{body}\n</section>'


def note(text: str) -> str:
    """A line of explanation; nothing for no text."""
    return f'<p class="note">{escape(text)}</p>' if text else ""


def panel_title(panel: str) -> str:
    """The heading of a panel; none where there is only one."""
    return f"<h3>{escape(panel)}</h3>" if panel else ""


@themed
def picture(
    name: str,
    title: str,
    size: tuple[float, float],
    draw: Callable[[Axes], None],
    aside: str = "",
    css: str = "",
) -> str:
    """One panel as an inline SVG with its caption above it."""
    figure = new_figure(*size)
    draw(figure.subplots())
    caption = escape(title) + (f" <span>{escape(aside)}</span>" if aside else "")
    opening = f'<figure class="{css}">' if css else "<figure>"
    return f"{opening}<figcaption>{caption}</figcaption>\n{to_svg(figure, name, f'{title} {aside}'.strip())}</figure>"


def swatch(look: Look) -> str:
    """A short piece of a group's line."""
    dashes = (
        f' stroke-dasharray="{" ".join(f"{part * 1.5:g}" for part in look.dashes)}"' if look.dashes else ""
    )
    line = f'<path d="M1 5H25" stroke="{look.variable}" stroke-width="3"{dashes}></path>'
    return f'<svg class="swatch" viewBox="0 0 26 10" aria-hidden="true">{line}</svg>'


def box(css: str, colour: str = "") -> str:
    """A small square in a legend."""
    fill = f' style="--fill: {colour}"' if colour else ""
    return f'<span class="box {css}"{fill}></span>'


def legend(entries: Iterable[tuple[str, str]]) -> str:
    """Marks (HTML) and what they stand for (text)."""
    return (
        '<ul class="legend">' + "".join(f"<li>{mark}{escape(text)}</li>" for mark, text in entries) + "</ul>"
    )


def line_legend(looks: Mapping[str, Look]) -> str:
    """Which line is whose; left out where there is only one."""
    return legend((swatch(look), line) for line, look in looks.items()) if len(looks) > 1 else ""


def named(line: str, look: Look | None) -> str:
    """The name of a group beside its mark."""
    return f'<span class="name">{swatch(look) if look else ""}{escape(line)}</span>'


def table(head: Iterable[str], rows: Iterable[str], css: str = "") -> str:
    """A table that scrolls sideways where it does not fit; rows are HTML, the head is text."""
    cells = "".join(f'<th scope="col">{escape(text)}</th>' for text in head)
    opening = f'<table class="{css}">' if css else "<table>"
    body = "\n".join(rows)
    return (
        f'<div class="scroll">{opening}<thead><tr>{cells}</tr></thead><tbody>\n{body}\n</tbody></table></div>'
    )


def panel_row(panel: str, columns: int) -> str:
    """A row that heads the groups of a panel; none where there is only one panel."""
    return (
        f'<tr class="panel"><th scope="rowgroup" colspan="{columns}">{escape(panel)}</th></tr>'
        if panel
        else ""
    )


def details(title: str, *parts: str) -> str:
    """What a reader opens when it is needed."""
    return (
        f"<details><summary>{escape(title)}</summary>\n"
        + "\n".join(part for part in parts if part)
        + "\n</details>"
    )


LIGHT = """
  --ink: #1b2331; --muted: #566173; --grid: #dfe4ea; --paper: #ffffff; --track: #e9edf1;
  --ground: #f4f6f8; --line: #dde2e8; --soft: #f7f9fb; --link: #005f95; --warn: #fff6e0; --warn-line: #e6b54a;
  --series-0: #0072b2; --series-1: #d55e00; --series-2: #009e73;
  --series-3: #cc79a7; --series-4: #e69f00; --series-5: #56b4e9;
"""

DARK = """
  --ink: #e7ebf1; --muted: #a3aebd; --grid: #2e3743; --paper: #171c24; --track: #2a323d;
  --ground: #0f1319; --line: #2b333f; --soft: #1d232c; --link: #7cc1ee; --warn: #2e2613; --warn-line: #b58a2b;
  --series-0: #4aa8e0; --series-1: #f58442; --series-2: #2ec498;
  --series-3: #e09fc4; --series-4: #f3b83d; --series-5: #9ad7f7;
"""

RULES = """
* { box-sizing: border-box; }
html { scroll-behavior: smooth; scroll-padding-top: 3.5rem; -webkit-text-size-adjust: 100%; }
body { margin: 0; background: var(--ground); color: var(--ink); line-height: 1.55;
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", "Noto Sans", Arial, sans-serif; }
header, main, footer { max-width: 1240px; margin: 0 auto; padding: 0 1.5rem; }
header { padding-top: 2.75rem; }
h1 { font-size: clamp(1.6rem, 1.2rem + 1.8vw, 2.3rem); line-height: 1.15; letter-spacing: -0.02em;
  margin: 0 0 .5rem;
  overflow-wrap: anywhere; }
h2 { font-size: 1.3rem; letter-spacing: -0.01em; line-height: 1.25; margin: 0 0 .3rem; }
h3 { font-size: .95rem; margin: 1.4rem 0 .5rem; overflow-wrap: anywhere; }
h3 .tag { color: var(--muted); font-weight: 500; }
p { margin: 0 0 .8rem; max-width: 48rem; }
a { color: var(--link); }
code { font: .9em ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace;
  overflow-wrap: anywhere; }
.lead { font-size: 1.1rem; color: var(--muted); margin-bottom: 1.4rem; }
.note { color: var(--muted); font-size: .92rem; }
nav { position: sticky; top: 0; z-index: 2; background: var(--ground);
  border-bottom: 1px solid var(--line); margin-top: 1.4rem; }
nav ul { max-width: 1240px; margin: 0 auto; padding: .55rem 1.5rem; display: flex; gap: 1.4rem;
  overflow-x: auto;
  list-style: none; white-space: nowrap; font-size: .92rem; scrollbar-width: none; }
nav a { text-decoration: none; color: var(--muted); }
nav a:hover { color: var(--link); text-decoration: underline; }
section { background: var(--paper); border: 1px solid var(--line); border-radius: 12px;
  padding: 1.6rem 1.75rem 1.75rem; margin: 1.5rem 0; }
.facts { display: grid; grid-template-columns: repeat(auto-fill, minmax(10.5rem, 1fr)); gap: 1px; margin: 0;
  background: var(--paper); border: 1px solid var(--line); border-radius: 12px; overflow: hidden; }
.facts div { background: var(--paper); padding: .6rem .9rem; box-shadow: 0 0 0 1px var(--line); }
.facts dt { font-size: .78rem; color: var(--muted); }
.facts dd { margin: 0; font-weight: 600; overflow-wrap: anywhere; font-variant-numeric: tabular-nums; }
.warning { background: var(--warn); border: 1px solid var(--warn-line); border-radius: 10px;
  padding: .7rem 1rem; margin: 1.2rem 0 0;
  max-width: none; font-size: .95rem; overflow-wrap: anywhere; }
.legend { display: flex; flex-wrap: wrap; gap: .3rem 1.3rem; margin: .7rem 0 1rem; padding: 0;
  list-style: none; font-size: .92rem; }
.legend li, .name { display: inline-flex; align-items: center; gap: .5rem; overflow-wrap: anywhere; }
.name { align-items: flex-start; }
.name .swatch { margin-top: .42em; }
section > :last-child { margin-bottom: 0; }
.swatch { flex: none; width: 26px; height: 10px; }
.box { flex: none; width: 14px; height: 14px; border-radius: 3px; background: var(--fill); }
.box.late, .box.failed, .box.surplus { border: 1px solid var(--muted);
  background: repeating-linear-gradient(135deg, var(--muted) 0 1px, var(--track) 1px 4px); }
.box.failed { background: repeating-linear-gradient(45deg, var(--muted) 0 1px, transparent 1px 4px),
  repeating-linear-gradient(135deg, var(--muted) 0 1px, var(--track) 1px 4px); }
.box.surplus { background: repeating-linear-gradient(0deg, var(--muted) 0 1px, var(--track) 1px 4px); }
.box.waiting { background: var(--track); }
.box.transfer { background: linear-gradient(90deg, var(--fill) 50%, transparent 50%), var(--fill);
  opacity: .55; }
.grid { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 21rem), 1fr));
  gap: 1.1rem 1.4rem; }
.grid.wide { grid-template-columns: repeat(auto-fit, minmax(min(100%, 28rem), 1fr)); }
figure { margin: 0; min-width: 0; max-width: 30rem; }
.grid.wide figure { max-width: 38rem; }
.grid.wide figure.broad { max-width: none; grid-column: 1 / -1; overflow-x: auto; }
figure.broad svg { min-width: 44rem; }
figcaption { font-size: .92rem; font-weight: 600; margin-bottom: .2rem; overflow-wrap: anywhere; }
figcaption span { font-weight: 400; color: var(--muted); }
svg { display: block; width: 100%; height: auto; }
svg * { stroke-linejoin: round; stroke-linecap: butt; }
.scroll { overflow-x: auto; margin: .6rem 0 0; }
table { border-collapse: collapse; width: 100%; font-size: .92rem; font-variant-numeric: tabular-nums; }
th, td { padding: .5rem .65rem; text-align: right; border-bottom: 1px solid var(--line);
  vertical-align: top; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; padding-left: 0; white-space: normal;
  min-width: min(12.5rem, 34vw);
  position: sticky; left: 0; background: var(--paper); }
th:last-child, td:last-child { padding-right: 0; }
thead th { font-weight: 500; color: var(--muted); font-size: .84rem; vertical-align: bottom;
  white-space: normal; line-height: 1.25; }
tbody th { font-weight: 500; }
tbody tr:last-child > * { border-bottom: 0; }
tr.panel th { font-weight: 600; padding-top: 1.1rem; text-align: left; }
tr.panel .tag { color: var(--muted); font-weight: 500; }
td.best small { font-weight: 400; }
td small { display: block; color: var(--muted); font-size: .84rem; }
td.best { font-weight: 700; }
.after { margin: 1rem 0 0; }
.none { color: var(--muted); }
table.pair { max-width: 40rem; }
table.left td, table.left th { text-align: left; white-space: normal; overflow-wrap: anywhere; }
table.words td, table.words th { text-align: left; white-space: normal; overflow-wrap: break-word; }
details { border-top: 1px solid var(--line); padding: .7rem 0; }
details:last-of-type { padding-bottom: 0; }
summary { cursor: pointer; font-weight: 600; }
details[open] summary { margin-bottom: .7rem; }
footer { padding-bottom: 3rem; color: var(--muted); font-size: .88rem; }
.button { display: inline-block; border: 1px solid var(--line); background: var(--paper);
  border-radius: 8px; padding: .35rem .8rem;
  text-decoration: none; font-size: .92rem; font-weight: 500; }
.button:hover { border-color: var(--link); }
dl.how { margin: .8rem 0 0; display: grid; grid-template-columns: minmax(8rem, 12rem) 1fr; gap: .6rem 1.4rem;
  font-size: .95rem; }
dl.how dt { font-weight: 600; }
dl.how dd { margin: 0; max-width: 46rem; }
@media (max-width: 700px) {
  header, main, footer, nav ul { padding-left: 1rem; padding-right: 1rem; }
  header { padding-top: 1.75rem; }
  section { padding: 1.15rem 1rem 1.25rem; border-radius: 10px; }
  .facts { grid-template-columns: repeat(auto-fill, minmax(7.6rem, 1fr)); }
  dl.how { grid-template-columns: 1fr; gap: .1rem; }
  dl.how dd { margin-bottom: .8rem; }
}
@media print {
  body { background: none; font-size: 11pt; }
  nav, .button { display: none; }
  header, main, footer { max-width: none; padding: 0; }
  section { border: 0; padding: 0; margin: 1.2rem 0; }
  figure, tr, .facts div { break-inside: avoid; }
  h2, h3 { break-after: avoid; }
  .scroll { overflow: visible; }
  table { font-size: 9pt; }
  th, td { padding: .3rem .45rem; }
  * { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
}
"""

# Paper is white whatever the reader's screen prefers.
STYLESHEET = (
    f":root {{ color-scheme: light dark; {LIGHT} }}\n"
    f"@media screen and (prefers-color-scheme: dark) {{ :root {{ {DARK} }} }}\n{RULES}"
)
