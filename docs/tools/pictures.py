"""Draw the pictures of README.md and docs/how-it-works.md.

python -m docs.tools.pictures        write docs/pictures/*.svg
"""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

DOCS = Path(__file__).parents[1]
FOLDER = DOCS / "pictures"

INK, FAINT, FROZEN, PAPER = "#1f2933", "#52606d", "#d9dee3", "#ffffff"
TRAINED, OURS, RIVAL = "#0f766e", "#0f766e", "#9aa5b1"

LAYERS = ("input layer", "layer 2", "layer 3", "layer 4", "classifier")
FLEET = (("sensor", "speed 1/5", 1), ("phone", "speed 1/2", 3), ("laptop", "speed 1", 5))
"""Name, speed and depth of the devices in the picture."""

SIMULATORS = {
    "ours": "fedpmt",
    "pfl": "pfl",
    "fedjax": "fedjax",
    "flower": "Flower (Ray)",
    "plain": "plain PyTorch",
    "blazefl": "BlazeFL",
    "appfl": "APPFL",
}


def main() -> None:
    """Write all pictures."""
    FOLDER.mkdir(exist_ok=True)
    for name, text in pictures().items():
        (FOLDER / name).write_text(text)


def pictures() -> dict[str, str]:
    """Return each picture's name and its SVG."""
    return {
        "what-devices-train.svg": what_devices_train(),
        "deadline.svg": deadline(),
        "time-and-speed.svg": time_and_speed(),
    }


def what_devices_train() -> str:
    """Draw which layers each device trains, and over whom the server averages them."""
    parts = [
        _text(
            20,
            28,
            "Every device runs the whole model. It trains the last layers it can afford.",
            16,
            bold=True,
        )
    ]
    top, height, gap = 92, 34, 8
    for column, (name, speed, depth) in enumerate(FLEET):
        left = 130 + column * 165
        parts += [_text(left + 65, 62, name, 15, anchor="middle", bold=True)]
        parts += [_text(left + 65, 80, speed, 12, anchor="middle", color=FAINT)]
        for row in range(len(LAYERS)):
            trained = row >= len(LAYERS) - depth
            y = top + row * (height + gap)
            parts.append(_box(left, y, 130, height, TRAINED if trained else FROZEN))
            label, color = ("train", PAPER) if trained else ("forward only", FAINT)
            parts.append(_text(left + 65, y + 22, label, 13, anchor="middle", color=color))
    parts.append(_text(715, 62, "server", 15, anchor="middle", bold=True))
    parts.append(_text(715, 80, "averages each layer", 12, anchor="middle", color=FAINT))
    for row, layer in enumerate(LAYERS):
        y = top + row * (height + gap)
        parts.append(_text(20, y + 22, layer, 13))
        count = sum(depth >= len(LAYERS) - row for *_, depth in FLEET)
        words = f"over {count} devices" if count > 1 else "from 1 device"
        parts += [_box(640, y, 150, height, PAPER, TRAINED), _text(715, y + 22, words, 13, anchor="middle")]
    return _svg(810, top + len(LAYERS) * (height + gap) + 12, parts, "What each device trains")


def deadline() -> str:
    """Draw the time of a round: FedAvg waits for or drops the slow device, FedPMT fits it in."""
    # The times that `fedpmt.plan` prints in docs/how-it-works.md.
    seconds = {"FedAvg": (50.0, 20.0, 10.0), "FedPMT": (26.9, 20.0, 10.0)}
    scale, left, limit = 9, 170, 30
    parts = [_text(20, 28, "One round, deadline 30 s: full training takes 10 s at speed 1", 16, bold=True)]
    for block, (method, times) in enumerate(seconds.items()):
        top = 62 + block * 122
        parts.append(_text(20, top + 50, method, 15, bold=True))
        for row, ((name, *_), time) in enumerate(zip(FLEET, times, strict=True)):
            y = top + row * 32
            parts.append(_text(left - 10, y + 17, name, 13, anchor="end"))
            late = time > limit
            parts.append(_box(left, y, time * scale, 24, RIVAL if late else TRAINED))
            words = f"{time:.0f} s, too late: its data is lost" if late else f"{time:.0f} s"
            parts.append(_text(left + 8, y + 17, words, 12, color=INK if late else PAPER))
    x, bottom = left + limit * scale, 62 + 2 * 122
    parts.append(f'<line x1="{x}" y1="50" x2="{x}" y2="{bottom}" stroke="{INK}" stroke-dasharray="4 4"/>')
    parts.append(_text(x + 6, 52, "deadline", 12, color=FAINT))
    return _svg(700, bottom + 8, parts, "What a deadline does to a slow device")


SOONEST = 8
"""Methods with rounds and within the budget whose time to accuracy is drawn."""


def time_and_speed() -> str:
    """Draw time to accuracy and real time per round, from the published results."""
    tuned = _read("results/tuned-embedded.json")["two-classes"]["rows"]
    # Of one global model each: the accuracy of devices' own nets on their own classes is another thing.
    comparable = [
        row for row in tuned if row["global"] and row["clock"] == "rounds" and row["reached"]["0.8"]
    ]
    within = [row for row in comparable if not row["over_budget"]]
    soonest = sorted(within, key=lambda row: row["reached"]["0.8"])[:SOONEST]
    shown = [row for row in tuned if row in soonest or row["title"] in ("FedPMT, traded", "FedAvg")]
    reached = [(row["title"], row["reached"]["0.8"], row["accuracy"]) for row in shown]
    bars = [
        (title, seconds / 60, f"{seconds / 60:.1f} min, ends at {accuracy:.1%}", title.startswith("FedPMT"))
        for title, seconds, accuracy in sorted(reached, key=lambda row: row[1])
    ]
    left = _bars(20, "Virtual time to 80 % accuracy", "50 devices, speeds 1/5 to 1, two classes each", bars)
    rounds = _round_seconds("cnn-cifar10")
    speeds = [(SIMULATORS[peer], time, f"{time:.2f} s", peer == "ours") for peer, time in rounds.items()]
    title, note = "Real time of one FedAvg round", "CNN on CIFAR-10, 10 devices, 2 CPU cores"
    right = _bars(500, title, note, sorted(speeds, key=lambda bar: bar[1]))
    height = 82 + 30 * max(len(bars), len(speeds))
    return _svg(940, height, [*left, *right], "Time to accuracy, and simulation speed")


def _round_seconds(setting: str) -> dict[str, float]:
    """Return the median over repetitions of each simulator's median round."""
    times: dict[str, list[float]] = defaultdict(list)
    for one in _read("benchmarks/compare.json")["measurements"]:
        if one["setting"] == setting and one["variant"] == "fedavg E=1":
            times[one["peer"]].append(statistics.median(one["seconds"]))
    return {peer: statistics.median(all_times) for peer, all_times in times.items()}


def _bars(left: int, title: str, note: str, bars: list[tuple[str, float, str, bool]]) -> list[str]:
    parts = [_text(left, 28, title, 16, bold=True), _text(left, 48, note, 12, color=FAINT)]
    longest = max(value for _, value, _, _ in bars)
    for row, (name, value, words, ours) in enumerate(bars):
        y, width = 66 + row * 30, value / longest * 130
        parts.append(_text(left + 112, y + 16, name, 13, anchor="end", bold=ours))
        parts.append(_box(left + 120, y, width, 22, OURS if ours else RIVAL))
        parts.append(_text(left + 126 + width, y + 16, words, 12, color=FAINT))
    return parts


def _read(path: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((DOCS / path).read_text())
    return found


def _text(
    x: float, y: float, words: str, size: int, *, anchor: str = "start", bold: bool = False, color: str = INK
) -> str:
    weight = ' font-weight="600"' if bold else ""
    start = f'<text x="{x:.0f}" y="{y:.0f}" font-size="{size}" text-anchor="{anchor}" fill="{color}"{weight}>'
    return f"{start}{escape(words)}</text>"


def _box(x: float, y: float, width: float, height: float, fill: str, edge: str = "none") -> str:
    place = f'x="{x:.0f}" y="{y:.0f}" width="{width:.0f}" height="{height:.0f}"'
    return f'<rect {place} rx="4" fill="{fill}" stroke="{edge}"/>'


def _svg(width: int, height: int, parts: list[str], title: str) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" role="img"'
    )
    font = 'font-family="system-ui, -apple-system, Segoe UI, Roboto, sans-serif"'
    paper = f'<rect width="{width}" height="{height}" rx="8" fill="{PAPER}"/>'
    return "\n".join([f"{head} {font}>", f"<title>{escape(title)}</title>", paper, *parts, "</svg>", ""])


if __name__ == "__main__":
    main()
