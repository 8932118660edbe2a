"""A plain PyTorch loop: nn.Module, autograd, torch.optim.SGD, one device after another."""

from __future__ import annotations

import copy

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from benchmarks.peers.common import Shards, Stopwatch, read_job, say_done
from benchmarks.peers.torch_net import accuracy, build, logits


def main() -> None:
    """Federated averaging as it stands in a researcher's first script."""
    job = read_job()
    torch.set_num_threads(job.options["threads"])
    rng = np.random.default_rng(job.seed)
    shards = Shards(job.data)
    net = build(job, shards.initial)
    devices = [tuple(torch.from_numpy(array) for array in shards.shard(k)) for k in range(shards.devices)]
    steps = 0
    watch = Stopwatch(job.warmup)
    for _ in range(job.rounds):
        total, states = 0, []
        for device in rng.choice(shards.devices, job.cohort, replace=False):
            inputs, labels = devices[device]
            local = copy.deepcopy(net)
            optimizer = torch.optim.SGD(local.parameters(), lr=job.lr)
            local.train()
            for _ in range(job.epochs):
                for rows in torch.split(torch.from_numpy(rng.permutation(len(labels))), job.batch):
                    optimizer.zero_grad()
                    loss = cross_entropy(logits(local, inputs[rows]), labels[rows])
                    loss.backward()  # type: ignore[no-untyped-call]
                    optimizer.step()
                    steps += 1
            states.append((len(labels), local.state_dict()))
            total += len(labels)
        net.load_state_dict(
            {name: sum(count / total * state[name] for count, state in states) for name in net.state_dict()}
        )
        watch.lap()
    say_done(steps=steps / job.rounds, accuracy=accuracy(net, *shards.test()), packages=["torch", "numpy"])


if __name__ == "__main__":
    main()
