"""The sections of the page that are words: what was run, with which settings, and how it was computed."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from fedpmt.records import EXECUTION, plural, step_word
from fedpmt.report.groups import SEEDS, clean, common_settings, differing_settings, flatten, run_labels
from fedpmt.report.headline import headline
from fedpmt.report.markup import details, section, table
from fedpmt.report.quantities import show, time_unit

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fedpmt.records import RunRecord
    from fedpmt.report.markup import Material

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
    """What was run and found, in a line each, and the main settings that all runs share."""
    common = common_settings(material.runs)
    facts = {
        name: common[key].replace(",", ", ")
        for key, name in FACTS.items()
        if common.get(key, "none") not in ("none", "")
    }
    facts |= _origin(material.runs)
    listed = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(text)}</dd></div>" for name, text in facts.items()
    )
    sentences = headline(material.runs, material.targets)
    parts = [
        f'<header id="top">\n<h1>{escape(clean(title))}</h1>',
        *(f'<p class="headline">{escape(sentence)}</p>' for sentence in sentences),
        f'<p class="lead">{escape(counts(material))}</p>',
        f'<dl class="facts">{listed}</dl>' if listed else "",
        _progress(material),
        "</header>",
    ]
    return "\n".join(part for part in parts if part)


def _origin(runs: Sequence[RunRecord]) -> dict[str, str]:
    """How, when and by which version the runs were computed, and how long that took, as far as it is recorded."""
    facts: dict[str, str] = {}
    paths = {run.result.path for run in runs if run.result}
    if len(paths) == 1 and (path := paths.pop()):
        facts[COMPUTED] = path
    sessions = [run.session for run in runs if run.session is not None]
    if sessions:
        days = sorted({session.started[:10] for session in sessions})
        facts["run on"] = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
        seconds = sum(session.seconds for session in sessions)
        facts |= {"real time": show(seconds, time_unit)} if seconds else {}
        facts["version"] = ", ".join(sorted({f"fedpmt {session.version}" for session in sessions}))
    return {name: clean(text) for name, text in facts.items()}


def _progress(material: Material) -> str:
    """Which runs are not finished; on a live page, how far they are."""
    labelled = zip(run_labels(material.runs), material.runs, strict=True)
    unfinished = [(label, run) for label, run in labelled if run.result is None]
    if not unfinished:
        return ""
    if not material.live:
        words = _unfinished([label for label, _ in unfinished], len(material.runs))
        return f'<p class="warning">{words}</p>'
    lines = []
    for label, run in unfinished:
        rounds, total = len(run.rounds), run.settings.get("rounds")
        most = total if isinstance(total, int) and total > 0 else max(rounds, 1)
        word = step_word(run.settings.get("clock"))
        bar = f'<progress max="{most}" value="{rounds}" aria-label="{escape(label)}"></progress>'
        lines.append(f"<li><span>{escape(label)}</span> {bar} <span>{word} {rounds} of {most}</span></li>")
    return f'<ul class="progress">{"".join(lines)}</ul>'


def counts(material: Material) -> str:
    """How many runs, of what."""
    if not material.runs:
        return "No run has begun yet."
    settings = [flatten(run.settings) for run in material.runs]
    names = {"method": "method", "task": "task", "data": "data set", "partition": "partition", "seed": "seed"}
    found = {word: len({one.get(key) for one in settings}) for key, word in names.items()}
    several = [plural(count, word) for word, count in found.items() if count > 1]
    return ", ".join([plural(len(material.runs), "run"), *several])


def _unfinished(labels: Sequence[str], total: int) -> str:
    shown = "; ".join(labels[:6]) + (f"; and {len(labels) - 6} more" if len(labels) > 6 else "")
    verb = "is" if len(labels) == 1 else "are"
    words = f"{len(labels)} of {plural(total, 'run')} {verb} not finished"
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
        played = plural(len(run.rounds), step_word(run.settings.get("clock")))
        state = f"finished ({run.result.stopped})" if run.result else f"not finished, {played}"
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
        details(
            f"Shared by all runs ({len(common)})",
            table(["setting", "value"], shared, "left pair", "Shared settings"),
        ),
        details(
            f"Run by run ({len(body)})",
            table(["run", "folder", "state", *computed, *own], body, "left", "Settings run by run"),
        ),
        _commands(material),
    )


def _commands(material: Material) -> str:
    """The command that makes each run again, as far as it is recorded."""
    entries, known = [], 0
    for label, run in zip(run_labels(material.runs), material.runs, strict=True):
        if run.session is None:
            continue
        known += 1
        command = run.session.command
        shown = (
            f'<pre class="command" tabindex="0"><code>{escape(clean(command))}</code></pre>'
            if command
            else "<p>Started from Python: its model, its data or its method has no name on the command line.</p>"
        )
        entries.append(f"<dt>{escape(label)}</dt><dd>{shown}</dd>")
    return (
        details(f"Commands that repeat the runs ({known})", f"<dl>{''.join(entries)}</dl>") if known else ""
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
