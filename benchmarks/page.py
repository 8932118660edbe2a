"""The results as Markdown tables, and docs/benchmarks.md, which shows them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from benchmarks.summary import FEDAVG, Row, best_peak, fastest_peer, partial, rows

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from benchmarks.results import Results

NAMES = {
    "ours": "fedpmt",
    "plain": "plain PyTorch loop",
    "flower": "Flower, Ray simulation",
    "pfl": "pfl",
    "fedjax": "fedjax",
    "blazefl": "BlazeFL",
    "appfl": "APPFL, serial simulation",
}
COLUMNS = (
    "simulator", "version", "cores used as", "a round", "ours is faster", "SGD steps", "accuracy", "share of peak",
)  # fmt: skip
MOST_ABOVE_PRICE = 0.1
"""How far FedPMT's time over FedAvg's may lie above the price with one local epoch."""

MOST_WITH_FIVE = 0.5
"""What FedPMT's round may take of FedAvg's with five local epochs."""

PACKAGES = {"ours": "torch", "plain": "torch", "flower": "flwr"}
PACKAGES |= {name: name for name in ("pfl", "fedjax", "blazefl", "appfl")}


def table(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """Make a Markdown table.

    >>> print(table(["a", "b"], [["1", "2"]]))
    | a | b |
    |---|---|
    | 1 | 2 |
    """
    lines = [head, *body]
    shown = ["| " + " | ".join(line) + " |" for line in lines]
    return "\n".join([shown[0], "|" + "---|" * len(head), *shown[1:]])


def machine_text(results: Results) -> str:
    """Describe the machine in a paragraph."""
    machine = results.machine
    peak = best_peak(results.peaks)
    found = "" if peak is None else f" Best fp32 matrix product on all cores in this run: {peak:.0f} GFLOP/s."
    return (
        f"{machine.cpu}, {machine.cores} cores, {machine.memory_gib:.0f} GiB, {machine.system}, "
        f"Python {machine.python}, torch {machine.torch}.{found}"
    )


def setting_table(results: Results, name: str) -> str:
    """Compare ours and the peers on one setting."""
    found = [row for row in rows(results, name) if row.variant == FEDAVG]
    versions = {
        run.peer: run.versions.get(PACKAGES[run.peer], "")
        for run in results.measurements
        if run.setting == name and run.versions
    }
    return table(COLUMNS, [_cells(row, versions.get(row.peer, ""), results.limit_seconds) for row in found])


def _cells(row: Row, version: str, limit: float) -> list[str]:
    package = PACKAGES[row.peer]
    if row.seconds is None:
        why = f"over {limit:.0f} s, cut off" if row.note == "cut off" else row.note or "not measured"
        return [NAMES[row.peer], version, row.threads, why, "", "", "", ""]
    accuracy = "" if row.accuracy is None else f"{row.accuracy:.1%}"
    steps = "" if row.steps is None else f"{row.steps:.0f}"
    return [
        NAMES[row.peer],
        f"{package} {version}".strip(),
        row.threads + (f", {row.path}" if row.path else ""),
        str(row.seconds),
        "" if row.ratio is None or row.peer == "ours" else f"{row.ratio:.1f} x",
        steps + ("" if row.same_steps else " (not the same)"),
        accuracy + (" (not the same)" if row.same_accuracy is False else ""),
        "" if row.share_of_peak is None else f"{row.share_of_peak:.0%}",
    ]


def partial_table(results: Results) -> str:
    """Compare FedPMT's round with our own FedAvg round."""
    body = [
        [name, str(one.epochs), f"{one.time:.2f}", f"{one.operations:.2f}", f"{one.apart:+.0%}"]
        for name in results.settings
        for one in partial(results, name)
    ]
    head = ("setting", "E", "FedPMT's time over FedAvg's", "its `exact` operations over FedAvg's", "apart")
    return table(head, body) if body else ""


def aims_table(results: Results) -> str:
    """Show what was aimed at with users' own modules, and what was reached."""
    body = [line for name in results.settings if (line := _aims(results, name))]
    head = (
        "setting", "our path", "fastest peer", "ours is faster", "aim",
        "FedPMT over FedAvg, E = 1", "at most", "E = 5", "at most",
    )  # fmt: skip
    return table(head, body) if body else ""


def _aims(results: Results, name: str) -> list[str]:
    compared = [row for row in rows(results, name) if row.variant == FEDAVG]
    aim, best = results.settings[name].get("aim"), fastest_peer(compared)
    if aim is None or best is None or best.ratio is None:
        return []
    path = next((row.path for row in compared if row.peer == "ours"), None) or ""
    cells = [name, path, NAMES[best.peer], _judged(best.ratio, best.ratio >= aim, " x"), f"{aim:.1f} x"]
    found = {one.epochs: one for one in partial(results, name)}
    for epochs in (1, 5):
        if epochs not in found:
            cells += ["", ""]
            continue
        one = found[epochs]
        most = MOST_WITH_FIVE if epochs > 1 else one.operations * (1 + MOST_ABOVE_PRICE)
        cells += [_judged(one.time, one.time <= most), f"{most:.2f}"]
    return cells


def _judged(value: float, reached: bool, unit: str = "") -> str:
    return f"{value:.2f}{unit}" + ("" if reached else ": missed")


def threads_table(results: Results) -> str:
    """List the ways of using the cores that were tried."""
    body = [
        [
            tried.setting,
            NAMES[tried.peer],
            "; ".join(
                f"{name}: {'failed or cut off' if seconds is None else f'{seconds:.3f} s'}"
                for name, seconds in tried.seconds.items()
            ),
            tried.chosen,
        ]
        for tried in results.threads
    ]
    return table(("setting", "simulator", "tried", "used"), body) if body else ""


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def page(results: Results) -> str:
    """Show everything that a run has measured."""
    parts = [machine_text(results)]
    if aims := aims_table(results):
        parts += ["### What was aimed at", aims]
    for name, setting in results.settings.items():
        after = max((run.rounds for run in results.measurements if run.setting == name), default=0)
        parts.append(
            f"### {name}\n\n{_capital(setting['about'])}: {setting['devices']} devices, "
            f"{setting['cohort']} a round, {setting['samples']} samples each, batch {setting['batch']}, "
            f"learning rate {setting['lr']}, E = 1. Accuracy is on the test set after {after} rounds."
        )
        parts.append(setting_table(results, name))
    for title, made in (
        ("### FedPMT's round against our own FedAvg round", partial_table(results)),
        ("### How each simulator used the cores", threads_table(results)),
    ):
        if made:
            parts += [title, made]
    return "\n\n".join(parts) + "\n"


def fill(text: str, blocks: Mapping[str, str]) -> str:
    """Put tables into a page, each between the marks of its name; what has no marks is left out.

    >>> print(fill("before\\n<!-- scale -->\\n<!-- /scale -->\\nafter", {"scale": "a table"}))
    before
    <!-- scale -->
    <BLANKLINE>
    a table
    <BLANKLINE>
    <!-- /scale -->
    after
    """

    def filled(found: re.Match[str]) -> str:
        name = found[1]
        return (
            f"<!-- {name} -->\n\n{blocks[name].strip()}\n\n<!-- /{name} -->" if name in blocks else found[0]
        )

    return re.sub(r"<!-- ([\w-]+) -->\n.*?<!-- /\1 -->", filled, text, flags=re.DOTALL)
