"""One HTML file that holds a whole comparison: no script, no request, the same bytes for the same records.

Its sections that are words are here: what was run, with which settings, and how it was computed.
"""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING
from urllib.parse import quote

from fedpmt.records import EXECUTION
from fedpmt.report.groups import (
    SEEDS,
    clean,
    common_settings,
    differing_settings,
    flatten,
    require_runs,
    run_labels,
)
from fedpmt.report.markup import Material, details, document, section, table
from fedpmt.report.pictures import breakdown_section, busy_section, layers_section, score_section
from fedpmt.report.results import budget_section, clients_section, summary_section, targets_section
from fedpmt.report.tables import write_csv, write_file
from fedpmt.types import SettingError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from fedpmt.records import RunRecord


FACTS = {
    "method": "method",
    "task": "task",
    "data": "data",
    "partition": "partition",
    "devices": "devices",
    "cohort": "asked per round",
    "samples": "samples per device",
    "levels": "speeds",
    "deadline": "deadline in seconds",
    "budget": "budget",
    "rounds": "rounds",
    "epochs": "local epochs",
    "batch": "batch",
    "lr": "learning rate",
    "mode": "cost mode",
    "seed": "seed",
}
"""Settings that a reader asks for first, in this order, and what to call them."""

COMPUTED = "local training"
"""What the path that computed local rounds is called."""

MODES = {
    "exact": "multiply-adds of the forward pass, of the weight gradients and of the error signal (none into the"
    " input of the first trained layer), and one operation per trained parameter and step; activations,"
    " pooling and biases are not counted",
    "paper": "the complexity table of the FedPMT paper as printed, whose ratios the clock rounds up to 0.01",
}

EVALUATES = {
    "global": "the server's one model on the test set",
    "split": "a device's and the server's halves together on the test set, the mean over devices that took part",
    "personal": "each device's own model on test samples of the classes it holds, the mean over devices that took part",
}

TIME = (
    "A device takes its operations per sample, times samples and epochs, over its speed; plus bytes over its"
    " link's rate where links are modelled. A round lasts until its slowest device replies or, with a deadline,"
    " no longer than that. No real clock enters."
)
REPLIES = (
    "A reply counts when it arrives by the deadline and, where more devices are asked than needed, among the"
    " first. Late, failed and surplus devices were asked but are not in the average."
)
BYTES = "What travels, summed over devices and rounds. A kB, MB or GB is a power of 1000 bytes."
CURVES = "Curves average the seeds of a group round by round, as long as half of them go on."


def header(material: Material, title: str) -> str:
    """What was run, in one line, and the main settings that all runs share."""
    common = common_settings(material.runs)
    facts = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(common[key].replace(',', ', '))}</dd></div>"
        for key, name in FACTS.items()
        if key in common
    )
    paths = {run.result.path for run in material.runs if run.result}
    if len(paths) == 1 and (path := paths.pop()):
        facts += f"<div><dt>{COMPUTED}</dt><dd>{escape(path)}</dd></div>"
    labelled = zip(run_labels(material.runs), material.runs, strict=True)
    unfinished = [label for label, run in labelled if run.result is None]
    parts = [
        f'<header>\n<h1>{escape(clean(title))}</h1>\n<p class="lead">{escape(counts(material))}</p>',
        f'<dl class="facts">{facts}</dl>' if facts else "",
        f'<p class="warning">{_unfinished(unfinished, len(material.runs))}</p>' if unfinished else "",
        "</header>",
    ]
    return "\n".join(part for part in parts if part)


def counts(material: Material) -> str:
    """How many runs, of what."""
    settings = [flatten(run.settings) for run in material.runs]
    names = {"method": "method", "task": "task", "data": "data set", "partition": "partition", "seed": "seed"}
    found = {word: len({one.get(key) for one in settings}) for key, word in names.items()}
    several = [_plural(count, word) for word, count in found.items() if count > 1]
    return ", ".join([_plural(len(material.runs), "run"), *several])


def _plural(count: int, word: str) -> str:
    return f"{count} {word}" if count == 1 else f"{count} {word}s"


def _unfinished(labels: Sequence[str], total: int) -> str:
    shown = "; ".join(labels[:6]) + (f"; and {len(labels) - 6} more" if len(labels) > 6 else "")
    verb = "is" if len(labels) == 1 else "are"
    words = f"{len(labels)} of {_plural(total, 'run')} {verb} not finished"
    return f"<strong>{words}</strong> and shown with the rounds so far: {escape(shown)}."


def settings_section(material: Material) -> str:
    """All settings: what all runs share, then what differs, run by run."""
    common = common_settings(material.runs)
    shared = [
        f'<tr><th scope="row">{escape(key)}</th><td><code>{escape(text)}</code></td></tr>'
        for key, text in common.items()
    ]
    execution = [key for key in sorted(EXECUTION) if any(key in run.settings for run in material.runs)]
    own = [*differing_settings(material.runs), *execution]
    paths = [run.result.path if run.result else None for run in material.runs]
    computed = [COMPUTED] if any(paths) else []
    body = []
    for label, run, path in zip(run_labels(material.runs), material.runs, paths, strict=True):
        flat = flatten(run.settings)
        state = (
            f"finished ({run.result.stopped})" if run.result else f"not finished, {len(run.rounds)} rounds"
        )
        texts = [
            run.folder.name,
            state,
            *([path or ""] if computed else []),
            *(flat.get(key, "") for key in own),
        ]
        cells = "".join(f"<td>{escape(clean(text))}</td>" for text in texts)
        body.append(f'<tr><th scope="row">{escape(label)}</th>{cells}</tr>')
    return section(
        "settings",
        "Settings",
        details(f"Shared by all runs ({len(common)})", table(["setting", "value"], shared, "left pair")),
        details(
            f"Run by run ({len(body)})", table(["run", "folder", "state", *computed, *own], body, "left")
        ),
    )


def how_section(material: Material) -> str:
    """How the numbers came about; the cost mode is named."""
    modes = sorted({flatten(run.settings).get("mode", "") for run in material.runs})
    kinds = sorted({run.result.evaluates for run in material.runs if run.result})
    differing = differing_settings(material.runs)
    seeds = " and ".join(word for key, word in SEEDS.items() if key in differing) or "seed"
    evaluated = "; ".join(f"{kind}: {EVALUATES[kind]}" for kind in kinds)
    entries = {
        "Operations": " ".join(_mode(mode) for mode in modes),
        "Virtual time": escape(TIME),
        "Replies": escape(REPLIES),
        "Bytes": escape(BYTES),
        escape(material.score_title): escape(
            (f"What is evaluated is {evaluated}. " if evaluated else "") + CURVES
        ),
        "Spread": escape(
            f"Runs that differ only in {seeds} form one group. Tables give the mean and the sample standard"
            " deviation, figures the mean and the range."
        ),
    }
    body = "".join(f"<dt>{escape(key)}</dt><dd>{text}</dd>" for key, text in entries.items())
    return section("how", "How it was computed", f'<dl class="how">{body}</dl>')


def _mode(mode: str) -> str:
    if not mode:
        return "Some runs do not record their cost mode."
    return f"Cost mode <code>{escape(mode)}</code>: {escape(MODES.get(mode, 'as recorded'))}."


TITLE = "Federated learning on unequal devices"

SECTIONS = {
    "summary": "Summary",
    "score": "Score",
    "targets": "Time to target",
    "clients": "Clients",
    "budget": "Budget",
    "busy": "Who was busy",
    "layers": "Layers",
    "breakdown": "Levels and classes",
    "settings": "Settings",
    "how": "How it was computed",
}


def write_page(
    runs: Sequence[RunRecord],
    path: Path,
    targets: Sequence[float] | None = None,
    title: str = TITLE,
) -> tuple[Path, Path]:
    """Write the page, and beside it the CSV that it links to; returns both paths.

    Without `targets`, those of `default_targets` are taken for runs whose score is an accuracy.
    """
    table = path.with_suffix(".csv")
    if path.suffix.lower() not in (".html", ".htm") or path.is_dir():
        raise SettingError(f"page = '{path}' is refused: a file name that ends in .html is needed")
    text = page(runs, quote(table.name), targets, title)
    # The table first: a page never links to what is not there.
    write_csv(runs, table)
    write_file(path, text)
    return path, table


def page(
    runs: Sequence[RunRecord], table: str, targets: Sequence[float] | None = None, title: str = TITLE
) -> str:
    """The page as text; `table` is the address of the CSV."""
    require_runs(runs)
    material = Material.of(runs, targets)
    sections = [
        summary_section(material, table),
        score_section(material),
        targets_section(material),
        clients_section(material),
        budget_section(material),
        busy_section(material),
        layers_section(material),
        breakdown_section(material),
        settings_section(material),
        how_section(material),
    ]
    titles = {**SECTIONS, "score": material.score_title}
    shown = {name: (titles[name], body) for name, body in zip(titles, sections, strict=True) if body}
    return document(title, header(material, title), shown, "Drawn by fedpmt from the records of its runs.")
