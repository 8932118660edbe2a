"""Small pieces of HTML.

Every text that comes from a record is escaped here or by `escape` itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from fedpmt.records import ACCURACY
from fedpmt.report.embedded import read_asset
from fedpmt.report.groups import clean, group_runs
from fedpmt.report.tables import default_targets
from fedpmt.report.theme import looks_of, new_figure, themed, to_svg

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from matplotlib.axes import Axes

    from fedpmt.records import RunRecord
    from fedpmt.report.groups import Group
    from fedpmt.report.script import Script
    from fedpmt.report.theme import Look


@dataclass(frozen=True)
class Material:
    """What all sections draw from, worked out once."""

    runs: tuple[RunRecord, ...]
    groups: list[Group]
    looks: dict[str, Look]
    targets: tuple[float, ...] | None  # None: round accuracies that some run reaches
    live: bool = False  # whether runs go on: then only the script draws

    @classmethod
    def of(
        cls, runs: Sequence[RunRecord], targets: Sequence[float] | None = None, *, live: bool = False
    ) -> Material:
        """Group the runs and give each group its look."""
        groups = group_runs(runs)
        if targets is None and all(group.score_name == ACCURACY for group in groups):
            targets = default_targets(runs)
        wanted = None if targets is None else tuple(targets)
        return cls(tuple(runs), groups, looks_of(groups), wanted, live)

    @property
    def score_name(self) -> str:
        """What the score of all runs is called; "score" where they have different ones."""
        names = {group.score_name for group in self.groups}
        return names.pop() if len(names) == 1 else "score"

    @property
    def score_title(self) -> str:
        """The same as a heading begins."""
        return self.score_name[:1].upper() + self.score_name[1:]


def document(
    title: str,
    header: str,
    sections: Mapping[str, tuple[str, str]],
    footer: str,
    script: Script | None = None,
) -> str:
    """A whole page: its header, links to its sections, and these; each has a name, a title and a body of HTML."""
    styles = read_asset("page.css") + (script.styles if script else "")
    return "\n".join(
        [
            f'<!DOCTYPE html>\n<html lang="en"{script.attributes if script else ""}>\n<head>\n<meta charset="utf-8">',
            *([script.policy] if script else []),
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            # An empty icon: else a browser asks the server for one.
            '<link rel="icon" href="data:,">',
            f"<title>{escape(clean(title))}</title>\n<style>\n{styles}</style>\n</head>\n<body>",
            header,
            f"{navigation(sections)}\n<main>",
            *(body for _, body in sections.values()),
            f"</main>\n<footer><p>{footer}</p></footer>",
            *([script.elements] if script else []),
            "</body>\n</html>\n",
        ]
    )


def navigation(sections: Mapping[str, tuple[str, str]]) -> str:
    """Links to the sections that have a title."""
    links = "".join(
        f'<li><a href="#{name}">{escape(heading)}</a></li>'
        for name, (heading, _) in sections.items()
        if heading
    )
    return f'<nav id="sections" aria-label="Sections"><ul>{links}</ul></nav>'


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


def table(head: Iterable[str], rows: Iterable[str], css: str = "", label: str = "Table") -> str:
    """A table that scrolls sideways where it does not fit; rows are HTML, the head is text."""
    cells = "".join(f'<th scope="col">{escape(text)}</th>' for text in head)
    opening = f'<table class="{css}">' if css else "<table>"
    body = "\n".join(rows)
    return (
        # What scrolls must be reachable by keyboard.
        f'<div class="scroll" tabindex="0" role="group" aria-label="{escape(label)}">'
        f"{opening}<thead><tr>{cells}</tr></thead><tbody>\n{body}\n</tbody></table></div>"
    )


def row(line: str, look: Look | None, cells: str, small: str = "") -> str:
    """A row of a group; the script finds it by the group's name."""
    return f'<tr data-line="{escape(line)}"><th scope="row">{named(line, look)}{small}</th>{cells}</tr>'


def value_cell(text: str, value: float | None, css: str = "", style: str = "") -> str:
    """A cell that can be sorted by the number behind its text; the text is HTML."""
    attributes = f' class="{css}"' if css else ""
    attributes += "" if value is None else f' data-value="{value:.7g}"'
    attributes += f' style="{style}"' if style else ""
    return f"<td{attributes}>{text}</td>"


def static(*parts: str) -> str:
    """What is shown where no script runs, and on paper."""
    return '<div class="static">\n' + "\n".join(part for part in parts if part) + "\n</div>"


def drawn_by_script(part: str) -> str:
    """A place that the script fills."""
    return f'<div class="active" data-part="{part}" hidden></div>'


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
