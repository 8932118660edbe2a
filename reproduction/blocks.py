"""What training one block costs, by its place in the net: CoCoFL's measurements against our `exact` price."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from matplotlib.ticker import PercentFormatter
from torch import nn

from fedpmt import prices
from fedpmt.parts.depth import block, full
from fedpmt.report.theme import MUTED, PALETTE, new_figure, themed
from fedpmt.simulation.assemble import make_price
from reproduction.artefact import Artefact, Picture, Table
from reproduction.paper import Experiment

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from matplotlib.figure import Figure
    from torch import Tensor

    from fedpmt.pricing.price import Price
    from reproduction.library import Library
    from reproduction.paper import Scope

BATCH = 32
INT8 = "int8=1/2"
"""What an operation of frozen layers takes in 8 bits, relative to fp32: an assumption."""

PLACES = ("last block", "last 2", "last half", "first block only", "a middle one")


class Residual(nn.Module):
    """A block of a ResNet: two convolutions, or three of which the middle one is narrow."""

    def __init__(self, inputs: int, width: int, stride: int, *, narrow: bool) -> None:
        super().__init__()
        outputs = 4 * width if narrow else width
        sizes = [(inputs, width, 1), (width, width, 3), (width, outputs, 1)]
        if not narrow:
            sizes = [(inputs, width, 3), (width, outputs, 3)]
        layers: list[nn.Module] = []
        for place, (before, after, kernel) in enumerate(sizes):
            step = stride if place == (1 if narrow else 0) else 1
            layers += [
                nn.Conv2d(before, after, kernel, step, kernel // 2, bias=False),
                nn.BatchNorm2d(after),
                nn.ReLU(),
            ]
        self.body = nn.Sequential(*layers[:-1])
        same = inputs == outputs and stride == 1
        self.skip = (
            nn.Identity()
            if same
            else nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))
        )

    def forward(self, inputs: Tensor) -> Tensor:
        """The body's outputs on top of what goes around it."""
        return nn.functional.relu(self.body(inputs) + self.skip(inputs))


def resnet(counts: Sequence[int], *, narrow: bool) -> tuple[nn.Module, Tensor]:
    """A ResNet for images of 32 x 32 pixels, with an example."""
    blocks: list[nn.Module] = []
    channels = 64
    for stage, count in enumerate(counts):
        width = 64 * 2**stage
        for place in range(count):
            blocks.append(Residual(channels, width, 2 if stage and place == 0 else 1, narrow=narrow))
            channels = 4 * width if narrow else width
    stem = nn.Sequential(nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU())
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10))
    return nn.Sequential(stem, *blocks, head), torch.zeros(2, 3, 32, 32)


class Encoder(nn.Module):
    """An embedding, six layers of attention, and a head: eight blocks."""

    def __init__(self, width: int = 128, tokens: int = 1000) -> None:
        super().__init__()
        self.embedding = nn.Embedding(tokens, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True) for _ in range(6)
        )
        self.head = nn.Linear(width, 10)

    def forward(self, inputs: Tensor) -> Tensor:
        """Logits of the mean over tokens."""
        hidden = self.embedding(inputs)
        for layer in self.layers:
            hidden = layer(hidden)
        logits: Tensor = self.head(hidden.mean(1))
        return logits


def encoder() -> tuple[nn.Module, Tensor]:
    """The transformer, with an example of 64 tokens."""
    return Encoder(), torch.zeros(2, 64, dtype=torch.int64)


@dataclass(frozen=True)
class Net:
    """A net of CoCoFL's and what its authors measured, as time and memory relative to training everything."""

    title: str
    make: Callable[[], tuple[nn.Module, Tensor]]
    measured: tuple[tuple[float, float], ...]  # for each of PLACES


NETS = (
    Net(
        "ResNet18, ARM",
        lambda: resnet((2, 2, 2, 2), narrow=False),
        ((0.25, 0.22), (0.39, 0.44), (0.72, 0.61), (0.65, 0.56), (0.48, 0.36)),
    ),
    Net(
        "ResNet50, x64",
        lambda: resnet((3, 4, 6, 3), narrow=True),
        ((0.20, 0.12), (0.24, 0.17), (0.53, 0.45), (0.82, 0.59), (0.43, 0.35)),
    ),
    Net("Transformer, x64", encoder, ((0.26, 0.16), (0.36, 0.27), (0.62, 0.57), (0.83, 0.95), (0.55, 0.55))),
)
"""Its DenseNet40 and MobileNet are left out: how they are cut into 22 and 20 blocks is not known here."""


def spans(count: int) -> tuple[tuple[int, int], ...]:
    """The blocks of PLACES in a net of this many, as first and one past the last.

    >>> spans(10)
    ((9, 10), (8, 10), (5, 10), (0, 1), (5, 6))
    """
    half = count // 2
    return (count - 1, count), (count - 2, count), (half, count), (0, 1), (half, half + 1)


def price_of(net: Net, **settings: Any) -> Price:
    """The `exact` price of a net, for batches of 32."""
    module, example = net.make()
    given = {"batch": BATCH, "samples": BATCH, "prefix": "recompute", **settings}
    _, resolved, problem = prices.priced(module, example, None, given)
    return make_price(resolved, problem)


def rows_of(net: Net) -> list[dict[str, Any]]:
    """Measured and priced, in fp32 and with frozen layers in 8 bits."""
    plain, eight = price_of(net), price_of(net, frozen_precision="int8", precision_seconds=INT8)
    rows = []
    for place, span, (time, memory) in zip(
        PLACES, spans(len(plain.structure.layers)), net.measured, strict=True
    ):
        row: dict[str, Any] = {"net": net.title, "place": place, "measured": time, "measured_memory": memory}
        for name, price in (("fp32", plain), ("int8", eight)):
            part = block(price.structure, *span, place)
            whole = full(price.structure)
            times = [price.load(price(one), samples=BATCH, epochs=1) for one in (part, whole)]
            row[name] = times[0] / times[1]
            row[f"{name}_memory"] = price(part).memory_bytes / price(whole).memory_bytes
        rows.append(row)
    return rows


@themed
def draw(rows: Sequence[dict[str, Any]]) -> Figure:
    """Priced against measured: on the line they agree."""
    figure = new_figure(10, 4.6)
    left, right = figure.subplots(1, 2)
    nets = list(dict.fromkeys(row["net"] for row in rows))
    for axes, suffix, title in ((left, "", "time"), (right, "_memory", "memory")):
        axes.plot([0, 1], [0, 1], color=MUTED, linewidth=0.8)
        for number, net in enumerate(nets):
            here = [row for row in rows if row["net"] == net]
            for kind, filled in (("fp32", False), ("int8", True)):
                axes.scatter(
                    [row[f"measured{suffix}"] for row in here],
                    [row[f"{kind}{suffix}"] for row in here],
                    color=PALETTE[number],
                    facecolors=PALETTE[number] if filled else "none",
                    label=f"{net}, {kind}",
                    s=28,
                )
        axes.set(
            xlabel="measured by CoCoFL's authors", ylabel="priced by us", title=f"{title}, of training all"
        )
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    left.legend(fontsize="small")
    return figure


def page(library: Library, scope: Scope) -> Artefact:
    """Priced, not trained: it takes a minute."""
    rows = [row for net in NETS for row in rows_of(net)]
    cells = [
        [
            f"{row['net']}, {row['place']}",
            *(f"{row[key]:.2f}" for key in ("measured", "fp32", "int8")),
            *(f"{row[key]:.2f}" for key in ("measured_memory", "fp32_memory", "int8_memory")),
        ]
        for row in rows
    ]
    columns = ("net, trained block", "time, measured", "fp32", "int8", "memory, measured", "fp32", "int8")
    return Artefact(
        "blocks",
        "What a block costs, by its place",
        f"python -m reproduction blocks{scope.suffix}",
        _text(rows),
        [Table("Time and memory, relative to training everything", columns, cells)],
        [
            Picture(
                "blocks",
                draw(rows),
                "Priced against measured; on the line they agree. Filled: frozen layers in 8 bits.",
            )
        ],
        {"rows": rows},
    )


def _text(rows: Sequence[dict[str, Any]]) -> str:
    suffixes = [row for row in rows if row["place"].startswith("last")]
    others = [row for row in rows if row not in suffixes]
    implied = [f"{_implied(row):.2f} ({row['net']})" for row in rows if row["place"] == "last block"]
    return (
        "CoCoFL's authors measured what it takes to train one block of a net while the others are frozen and run in 8 "
        "bits, relative to training everything. Next to it stands our `exact` price, with frozen layers in fp32, and "
        "with those before the trained block in 8 bits at half of fp32's time (`--frozen-precision int8 "
        f"--precision-seconds {INT8}`). Nothing is trained; the nets have as many blocks, and inputs of 32 x 32 pixels "
        "or 64 tokens.\n\n"
        f"For the last blocks, which FedPMT trains, the mean gap of time is {_gap(suffixes, 'fp32')} points in fp32 "
        f"and {_gap(suffixes, 'int8')} with 8 bits. Training the last block is a forward pass and little more: what "
        f"was measured there is explained if an operation in 8 bits takes {', '.join(implied)} of fp32's time, so half "
        f"is too good for these machines. For one block at the input or in the middle the gap is "
        f"{_gap(others, 'fp32')} points: there the error signal passes the later layers, which CoCoFL runs in 8 bits, "
        "too, and our price does not. What neither explains is no multiply-add: norms, activations, memory traffic."
    )


def _implied(row: dict[str, Any]) -> float:
    """What an operation of the frozen layers must take, relative to fp32, for the price to be what was measured."""
    frozen = 2 * (row["fp32"] - row["int8"])  # the frozen layers' share, since int8 was priced at half
    return float(1 - (row["fp32"] - row["measured"]) / frozen)


def _gap(rows: Sequence[dict[str, Any]], kind: str) -> str:
    """The mean distance of the priced time from the measured one, in points."""
    return f"{100 * sum(abs(row[kind] - row['measured']) for row in rows) / len(rows):.0f}"


BLOCKS = Experiment("blocks", "What a block costs, by its place", lambda _: [], page)
