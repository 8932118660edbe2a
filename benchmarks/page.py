"""The results as Markdown tables, ready for docs/benchmarks.md."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.summary import FEDAVG, Row, best_peak, partial, rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.results import Results

NAMES = {
    "ours": "fedpmt",
    "plain": "plain PyTorch loop",
    "flower": "Flower, Ray simulation",
    "pfl": "pfl",
    "fedjax": "fedjax",
}
COLUMNS = (
    "simulator", "version", "cores used as", "a round", "ours is faster", "SGD steps", "accuracy", "share of peak",
)  # fmt: skip
PACKAGES = {"ours": "torch", "plain": "torch", "flower": "flwr", "pfl": "pfl", "fedjax": "fedjax"}


def table(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """A Markdown table.

    >>> print(table(["a", "b"], [["1", "2"]]))
    | a | b |
    |---|---|
    | 1 | 2 |
    """
    lines = [head, *body]
    shown = ["| " + " | ".join(line) + " |" for line in lines]
    return "\n".join([shown[0], "|" + "---|" * len(head), *shown[1:]])


def machine_text(results: Results) -> str:
    """One paragraph on the machine."""
    machine = results.machine
    peak = best_peak(results.peaks)
    found = "" if peak is None else f" Best fp32 matrix product on all cores in this run: {peak:.0f} GFLOP/s."
    return (
        f"{machine.cpu}, {machine.cores} cores, {machine.memory_gib:.0f} GiB, {machine.system}, "
        f"Python {machine.python}, torch {machine.torch}.{found}"
    )


def setting_table(results: Results, name: str) -> str:
    """Ours and the peers on one setting."""
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
        row.threads,
        str(row.seconds),
        "" if row.ratio is None or row.peer == "ours" else f"{row.ratio:.1f} x",
        steps + ("" if row.same_steps else " (not the same)"),
        accuracy + (" (not the same)" if row.same_accuracy is False else ""),
        "" if row.share_of_peak is None else f"{row.share_of_peak:.0%}",
    ]


def partial_table(results: Results) -> str:
    """FedPMT's round over our own FedAvg round."""
    body = [
        [name, str(one.epochs), f"{one.time:.2f}", f"{one.operations:.2f}"]
        for name in results.settings
        for one in partial(rows(results, name))
    ]
    return (
        table(("setting", "E", "time of a FedPMT round over FedAvg's", "`exact` operations"), body)
        if body
        else ""
    )


def threads_table(results: Results) -> str:
    """The ways of using the cores that were tried."""
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
    """All tables."""
    parts = [machine_text(results)]
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
        ("### How each simulator was told to use the cores", threads_table(results)),
    ):
        if made:
            parts += [title, made]
    return "\n\n".join(parts) + "\n"
