"""What training one block costs, by its place in the net: CoCoFL's measurements against our `exact` price."""

from __future__ import annotations

import math
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


def convolution(inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1) -> list[nn.Module]:
    """A convolution that keeps the image's size, but for its stride, and the norm after it."""
    return [
        nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False),
        nn.BatchNorm2d(outputs),
    ]


def classifier(inputs: int) -> nn.Sequential:
    """The mean over an image's pixels, and ten logits."""
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 10))


def image() -> Tensor:
    """An example of 32 x 32 pixels."""
    return torch.zeros(2, 3, 32, 32)


class Block(nn.Module):
    """Layers that are trained as one, perhaps with a way around them."""

    def __init__(
        self,
        *body: nn.Module,
        around: nn.Module | None = None,
        join: Callable[[Tensor, Tensor], Tensor] = torch.add,
    ) -> None:
        super().__init__()
        self.body = nn.Sequential(*body)
        self.around = around
        self.join = join

    def forward(self, inputs: Tensor) -> Tensor:
        """Join what went around the layers to their outputs."""
        outputs: Tensor = self.body(inputs)
        return outputs if self.around is None else self.join(self.around(inputs), outputs)


def shortcut(inputs: int, outputs: int, stride: int = 1) -> nn.Module:
    """A way around layers, with a convolution where they change the shape."""
    same = inputs == outputs and stride == 1
    return nn.Identity() if same else nn.Sequential(*convolution(inputs, outputs, 1, stride))


def side_by_side(inputs: Tensor, outputs: Tensor) -> Tensor:
    """Append the channels of `outputs` to those of `inputs`."""
    return torch.cat((inputs, outputs), 1)


def resnet(counts: Sequence[int], *, narrow: bool) -> tuple[nn.Module, Tensor]:
    """A ResNet whose blocks have two convolutions, or three of which the middle one is narrow."""
    blocks: list[nn.Module] = []
    channels = 64
    for stage, count in enumerate(counts):
        width = 64 * 2**stage
        outputs = 4 * width if narrow else width
        for place in range(count):
            stride = 2 if stage and place == 0 else 1
            first = [*convolution(channels, width, 1), nn.ReLU()] if narrow else []
            residual = Block(
                *first,
                *convolution(width if narrow else channels, width, 3, stride),
                nn.ReLU(),
                *convolution(width, outputs, 1 if narrow else 3),
                around=shortcut(channels, outputs, stride),
            )
            blocks.append(Block(residual, nn.ReLU()))
            channels = outputs
    stem = Block(*convolution(3, 64, 3), nn.ReLU())
    return nn.Sequential(stem, *blocks, classifier(channels)), image()


STAGES = (
    (1, 16, 1, 1),
    (6, 24, 2, 1),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)
"""MobileNetV2's blocks for small images: how much wider inside, channels, how many, stride of the first."""


def mobilenet() -> tuple[nn.Module, Tensor]:
    """MobileNetV2 in 20 blocks: a convolution, 17 blocks that are wide inside, a convolution, the classifier."""
    blocks: list[nn.Module] = [Block(*convolution(3, 32, 3), nn.ReLU())]
    channels = 32
    for expansion, outputs, count, stage_stride in STAGES:
        for place in range(count):
            stride = stage_stride if place == 0 else 1
            inside = expansion * channels
            # A block that shrinks the image has no way around it.
            around = shortcut(channels, outputs) if stride == 1 else None
            block_of_three = Block(
                *convolution(channels, inside, 1),
                nn.ReLU(),
                *convolution(inside, inside, 3, stride, groups=inside),
                nn.ReLU(),
                *convolution(inside, outputs, 1),
                around=around,
            )
            blocks.append(block_of_three)
            channels = outputs
    last = Block(*convolution(channels, 1280, 1), nn.ReLU())
    return nn.Sequential(*blocks, last, classifier(1280)), image()


def densenet(growth: int = 12, expansion: int = 4) -> tuple[nn.Module, Tensor]:
    """DenseNet40 in 22 blocks: a convolution, three times six bottlenecks with transitions between, the classifier."""
    channels = 2 * growth
    blocks: list[nn.Module] = [nn.Conv2d(3, channels, 3, padding=1, bias=False)]
    for stage in range(3):
        if stage:
            halving = nn.Conv2d(channels, channels // 2, 1, bias=False)
            blocks.append(Block(nn.BatchNorm2d(channels), nn.ReLU(), halving, nn.AvgPool2d(2)))
            channels //= 2
        for _ in range(6):
            bottleneck = Block(
                nn.BatchNorm2d(channels),
                nn.ReLU(),
                *convolution(channels, expansion * growth, 1),
                nn.ReLU(),
                nn.Conv2d(expansion * growth, growth, 3, padding=1, bias=False),
                around=nn.Identity(),
                join=side_by_side,
            )
            blocks.append(bottleneck)
            channels += growth
    head = Block(nn.BatchNorm2d(channels), nn.ReLU(), classifier(channels))
    return nn.Sequential(*blocks, head), image()


DROPOUT = 0.05


class Attention(nn.Module):
    """Attention that holds all scores in memory, as CoCoFL's does, unlike torch's own."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.queries, self.keys, self.values, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, inputs: Tensor) -> Tensor:
        """Mix the tokens, head by head."""
        queries, keys, values = (
            layer(inputs).unflatten(2, (self.heads, -1)).transpose(1, 2)
            for layer in (self.queries, self.keys, self.values)
        )
        scores = queries @ keys.transpose(2, 3) / math.sqrt(queries.shape[-1])
        mixed: Tensor = self.out((scores.softmax(-1) @ values).transpose(1, 2).flatten(2))
        return mixed


class EncoderLayer(nn.Module):
    """Attention, and two linear layers no wider than the tokens, each with a norm after the sum."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention = nn.Sequential(Attention(width, heads), nn.Dropout(DROPOUT))
        self.norm = nn.LayerNorm(width)
        self.feed_forward = nn.Sequential(
            nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.Dropout(DROPOUT)
        )
        self.last_norm = nn.LayerNorm(width)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return tokens that have seen each other."""
        seen = self.norm(inputs + self.attention(inputs))
        outputs: Tensor = self.last_norm(seen + self.feed_forward(seen))
        return outputs


class Encoder(nn.Module):
    """An embedding, six layers of attention, and a head: eight blocks."""

    def __init__(self, words: int, tokens: int, width: int, heads: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.register_buffer("places", torch.zeros(tokens, width))  # sines there; zeros cost as much
        self.layers = nn.ModuleList(EncoderLayer(width, heads) for _ in range(6))
        self.head = nn.Linear(width, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        """Logits of the maximum over tokens."""
        hidden = self.embedding(inputs) + self.places
        for layer in self.layers:
            hidden = layer(hidden)
        logits: Tensor = self.head(hidden.amax(1))
        return logits


def encoder(tokens: int = 512) -> tuple[nn.Module, Tensor]:
    """The transformer, with an example of 512 tokens."""
    return Encoder(16_000, tokens, width=128, heads=2), torch.zeros(2, tokens, dtype=torch.int64)


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
        ((0.25, 0.22), (0.39, 0.44), (0.72, 0.61), (0.65, 0.56), (0.43, 0.37)),
    ),
    Net(
        "ResNet50, x64",
        lambda: resnet((3, 4, 6, 3), narrow=True),
        ((0.20, 0.12), (0.24, 0.17), (0.53, 0.45), (0.82, 0.59), (0.40, 0.24)),
    ),
    Net("DenseNet40, ARM", densenet, ((0.28, 0.26), (0.29, 0.30), (0.42, 0.36), (0.57, 0.96), (0.34, 0.36))),
    Net("MobileNet, x64", mobilenet, ((0.09, 0.10), (0.10, 0.11), (0.36, 0.31), (0.49, 0.65), (0.23, 0.26))),
    Net("Transformer, x64", encoder, ((0.26, 0.16), (0.36, 0.27), (0.62, 0.57), (0.83, 0.95), (0.55, 0.55))),
)


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
            # Memory is the same with 8 bits: what is largest is held while the trained block runs.
            for kind, filled in (("fp32", False), ("int8", True))[: 1 if suffix else 2]:
                axes.scatter(
                    [row[f"measured{suffix}"] for row in here],
                    [row[f"{kind}{suffix}"] for row in here],
                    color=PALETTE[number],
                    facecolors=PALETTE[number] if filled else "none",
                    label="" if filled else net,
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
    """Priced, not trained: it takes half a minute."""
    rows = [row for net in NETS for row in rows_of(net)]
    cells = [
        [
            f"{row['net']}, {row['place']}",
            *(f"{row[key]:.2f}" for key in ("measured", "fp32", "int8")),
            *(f"{row[key]:.2f}" for key in ("measured_memory", "fp32_memory")),
        ]
        for row in rows
    ]
    columns = ("net, trained block", "time, measured", "fp32", "int8", "memory, measured", "priced")
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
                "Priced against measured; on the line they agree. Hollow: all layers in fp32; filled: frozen layers "
                "before the block in 8 bits.",
            )
        ],
        {"rows": rows},
    )


def _text(rows: Sequence[dict[str, Any]]) -> str:
    suffixes = [row for row in rows if row["place"].startswith("last")]
    others = [row for row in rows if row not in suffixes]
    return (
        "CoCoFL's authors measured what it takes to train one block of a net while the others are frozen and run in 8 "
        "bits, relative to training everything. Next to it stands our `exact` price, with frozen layers in fp32, and "
        "with those before the trained block in 8 bits at half of fp32's time (`--frozen-precision int8 "
        f"--precision-seconds {INT8}`). Nothing is trained. Our nets have the blocks and shapes of the authors' code "
        f"(github.com/k1l1/CoCoFL), with batches of {BATCH}, and inputs of 32 x 32 pixels or 512 tokens. The authors "
        "timed forward and backward passes on four threads; memory is how much the process grew at its peak.\n\n"
        f"For the last blocks, which FedPMT trains, the mean gap in time is {_gap(suffixes, 'fp32')} points in fp32 "
        f"and {_gap(suffixes, 'int8')} with 8 bits. Training the last block alone is a forward pass and little more, "
        "so its measured time shows how long an operation in 8 bits would have to take, relative to fp32: "
        f"{_each(rows, PLACES[0], _implied)}. No single factor explains all five nets. Half is too optimistic for "
        "four of them. MobileNet would need about a quarter, probably because CoCoFL also folds the norms of frozen "
        "layers into their convolutions: in a net of small convolutions norms take much of the time, and our price, "
        "which counts multiply-adds, does not have them. Over all places, the mean gap in fp32 and with 8 bits is "
        f"{_by_net(rows)} points.\n\n"
        f"For one block at the input or in the middle the gap is {_gap(others, 'fp32')} points in fp32 and "
        f"{_gap(others, 'int8')} with 8 bits. There the error signal passes the later layers, which CoCoFL also runs "
        "in 8 bits, and our price does not. Before the first block there is no frozen layer, so 8 bits act on the "
        f"later ones alone; its measured time divided by its price is {_each(rows, PLACES[3], _ratio)}. So 8 bits help "
        "MobileNet most here, too, and ResNet50 takes longer than its price in fp32.\n\n"
        f"The mean gap in memory is {_gap(rows, 'fp32', '_memory')} points. With 8 bits our price of memory is the "
        "same, since the peak is reached while the trained block runs. Neither price explains what is no multiply-add: "
        "norms, activations, memory traffic, and what a process holds besides tensors."
    )


def _by_net(rows: Sequence[dict[str, Any]]) -> str:
    gaps = []
    for net in dict.fromkeys(row["net"] for row in rows):
        own = [row for row in rows if row["net"] == net]
        gaps.append(f"{_gap(own, 'fp32')} and {_gap(own, 'int8')} ({net})")
    return ", ".join(gaps)


def _each(rows: Sequence[dict[str, Any]], place: str, number: Callable[[dict[str, Any]], float]) -> str:
    """A number of each net's row for this place."""
    return ", ".join(f"{number(row):.2f} ({row['net']})" for row in rows if row["place"] == place)


def _implied(row: dict[str, Any]) -> float:
    """What an operation of the frozen layers must take, relative to fp32, for the price to be what was measured."""
    frozen = 2 * (row["fp32"] - row["int8"])  # the frozen layers' share, since int8 was priced at half
    return float(1 - (row["fp32"] - row["measured"]) / frozen)


def _ratio(row: dict[str, Any]) -> float:
    return float(row["measured"] / row["fp32"])


def _gap(rows: Sequence[dict[str, Any]], kind: str, suffix: str = "") -> str:
    """The mean distance of the priced time (or memory) from the measured one, in points."""
    gaps = [abs(row[f"{kind}{suffix}"] - row[f"measured{suffix}"]) for row in rows]
    return f"{100 * sum(gaps) / len(gaps):.0f}"


BLOCKS = Experiment("blocks", "What a block costs, by its place", lambda _: [], page)
