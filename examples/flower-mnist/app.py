"""A model of your own on Flower. Every device trains as many of its last layers as it can afford (FedPMT).

flwr run .                                          Flower's simulation, one process per core
flwr run . YOUR-SUPERLINK                           real devices: SuperNodes with `partition-id` in their node config
flwr run . --run-config "method='fedavg' rounds=3"  any setting that pyproject.toml lists can be changed
"""

import torch
from torch import nn

from fedpmt.data.datasets import load
from fedpmt.flower import apps, node_problem


class Net(nn.Module):
    """Two convolutions and two linear layers; fedpmt finds the layers by itself."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(1, 8, 5)
        self.second = nn.Conv2d(8, 16, 5)
        self.hidden = nn.Linear(16 * 4 * 4, 64)
        self.classes = nn.Linear(64, 10)

    def forward(self, images):
        images = torch.max_pool2d(torch.relu(self.first(images)), 2)
        images = torch.max_pool2d(torch.relu(self.second(images)), 2)
        return self.classes(torch.relu(self.hidden(images.flatten(1))))


def problem(settings):
    """Is called on the server and on every node; `shard` only on the node whose data it loads."""
    digits = load("embedded", None)  # 5,000 images of MNIST; a real node would read its own files

    def shard(device):
        mine = digits.train.take(slice(device, None, settings.devices))
        return mine.inputs, mine.targets

    torch.manual_seed(settings.seed)
    return node_problem(settings, Net(), test=(digits.test.inputs, digits.test.targets), shard=shard)


both = apps(problem)
server = both.server
client = both.client
