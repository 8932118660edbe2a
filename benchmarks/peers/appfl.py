"""APPFL: its trainer, synchronous scheduler and FedAvg aggregator, one client after another, its serial way.

Its agents import torchvision, which does not load next to every build of PyTorch, so the parts they consist of are put
together here. Its simulation with several processes needs an MPI installation and is not measured.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from appfl.algorithm.aggregator.fedavg_aggregator import FedAvgAggregator
from appfl.algorithm.scheduler.sync_scheduler import SyncScheduler
from appfl.algorithm.trainer.vanilla_trainer import VanillaTrainer
from omegaconf import DictConfig
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from benchmarks.peers.common import Shards, Stopwatch, read_job, say_done
from benchmarks.peers.torch_net import accuracy, build, logits


class Learner(nn.Module):
    """A net whose output is the logits, and which counts the SGD steps: a forward pass in training is one."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self.steps = 0

    def forward(self, inputs: Tensor) -> Tensor:
        """Compute the logits."""
        self.steps += 1
        return logits(self.net, inputs)


class Silent:
    """A logger that writes nothing, which saves APPFL some work."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


def no_metric(labels: np.ndarray, outputs: np.ndarray) -> float:
    """Required by APPFL; evaluation is no part of a round here."""
    return 0.0


def main() -> None:
    """Federated averaging by APPFL's own parts."""
    job = read_job()
    torch.set_num_threads(job.options["threads"])
    torch.manual_seed(job.seed)
    rng = np.random.default_rng(job.seed)
    shards = Shards(job.data)
    learner = Learner(build(job, shards.initial))
    configs = DictConfig(
        {
            "mode": "epoch",
            "num_local_epochs": job.epochs,
            "train_batch_size": job.batch,
            "optim": "SGD",
            "optim_args": {"lr": job.lr},
            "device": "cpu",
            "optimize_memory": False,  # it collects garbage after every client, which takes time
        }
    )
    # One net for all: parameters are loaded before each client's training.
    trainers = [
        VanillaTrainer(
            model=learner,
            loss_fn=nn.CrossEntropyLoss(),
            metric=no_metric,
            train_dataset=TensorDataset(*(torch.from_numpy(array) for array in shards.shard(device))),
            train_configs=configs,
            logger=Silent(),
        )
        for device in range(shards.devices)
    ]
    shared = {"optimize_memory": False}
    server = build(job, shards.initial)
    aggregator = FedAvgAggregator(Learner(server), DictConfig(shared), Silent())
    scheduler = SyncScheduler(DictConfig({"num_clients": job.cohort, **shared}), aggregator, Silent())
    watch = Stopwatch(job.warmup)
    for _ in range(job.rounds):
        current = aggregator.get_parameters()
        learner.train()
        for device in rng.choice(shards.devices, job.cohort, replace=False):
            trainer = trainers[device]
            trainer.load_parameters(current)
            trainer.train()
            reply = trainer.get_parameters()
            # With results of training it is a pair, of which the scheduler takes the parameters.
            scheduler.schedule(int(device), reply[0] if isinstance(reply, tuple) else reply)
        watch.lap()
    steps = learner.steps
    learner.load_state_dict(aggregator.get_parameters())
    say_done(
        steps=steps / job.rounds,
        accuracy=accuracy(learner.net, *shards.test()),
        packages=["appfl", "torch", "numpy"],
    )


if __name__ == "__main__":
    main()
