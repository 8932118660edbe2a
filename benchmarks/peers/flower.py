"""Flower's Ray simulation: a ClientApp and a ServerApp with the stock FedAvg strategy (Message API)."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from torch.nn.functional import cross_entropy

from benchmarks.peers.common import Job, Shards, Stopwatch, read_job, say_done
from benchmarks.peers.torch_net import accuracy, build, logits

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import nn

client = ClientApp()


@cache
def shards_in(folder: str) -> Shards:
    """Open the arrays once in each worker."""
    return Shards(folder)


@cache
def net_of(job: str) -> nn.Module:
    """Make the net once in each worker; its weights arrive with each message."""
    made = Job.load(job)
    return build(made, shards_in(made.data).initial)


@client.train()
def train(message: Message, context: Context) -> Message:
    """One device's local round."""
    config = message.content.config_records["config"]
    job = Job.load(str(config["job"]))
    torch.set_num_threads(job.options["cpus"])
    shards = shards_in(job.data)
    device = int(context.node_config["partition-id"])
    inputs, labels = (torch.from_numpy(array) for array in shards.shard(device))
    net = net_of(str(config["job"]))
    net.load_state_dict(message.content.array_records["arrays"].to_torch_state_dict())
    net.train()
    optimizer = torch.optim.SGD(net.parameters(), lr=job.lr)
    rng = np.random.default_rng((job.seed, int(str(config["server-round"])), device))
    steps = 0
    for _ in range(job.epochs):
        for rows in torch.split(torch.from_numpy(rng.permutation(len(labels))), job.batch):
            optimizer.zero_grad()
            cross_entropy(logits(net, inputs[rows]), labels[rows]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            steps += 1
    content = RecordDict(
        {
            "arrays": ArrayRecord(net.state_dict()),
            "metrics": MetricRecord({"num-examples": len(labels), "steps": steps}),
        }
    )
    return Message(content=content, reply_to=message)


class TimedFedAvg(FedAvg):
    """Flower's FedAvg; a round is what lies between the beginnings of two, with nothing left out."""

    def __init__(self, job: Job) -> None:
        # The cohort is the minimum: a fraction of the nodes would be rounded down.
        super().__init__(fraction_train=1e-9, fraction_evaluate=0.0, min_train_nodes=job.cohort)
        self.job = job
        self.watch = Stopwatch(job.warmup)
        self.steps: list[int] = []

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Who trains: a round begins, and the last one has ended."""
        if server_round == 1:
            self.watch.restart()
        else:
            self.watch.lap()
        messages: Iterable[Message] = super().configure_train(server_round, arrays, config, grid)
        return messages

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> tuple[Any, Any]:
        """The mean, by Flower; a failed client would only look fast."""
        replies = list(replies)
        if any(reply.has_error() for reply in replies):
            raise RuntimeError(next(reply.error.reason for reply in replies if reply.has_error()))
        self.steps.append(
            sum(int(str(reply.content.metric_records["metrics"]["steps"])) for reply in replies)
        )
        result: tuple[Any, Any] = super().aggregate_train(server_round, replies)
        return result


def main() -> None:
    """Start the simulation and wait for its end."""
    job = read_job()
    server = ServerApp()

    @server.main()
    def serve(grid: Grid, context: Context) -> None:
        torch.set_num_threads(job.options["cpus"])
        shards = Shards(job.data)
        net = build(job, shards.initial)
        strategy = TimedFedAvg(job)
        result = strategy.start(
            grid=grid,
            initial_arrays=ArrayRecord(net.state_dict()),
            train_config=ConfigRecord({"job": job.dump()}),
            num_rounds=job.rounds,
        )
        strategy.watch.lap()
        net.load_state_dict(result.arrays.to_torch_state_dict())
        say_done(
            steps=sum(strategy.steps) / job.rounds,
            accuracy=accuracy(net, *shards.test()),
            packages=["flwr", "ray", "torch", "numpy"],
        )

    run_simulation(
        server_app=server,
        client_app=client,
        num_supernodes=Shards(job.data).devices,
        backend_config={"client_resources": {"num_cpus": job.options["cpus"], "num_gpus": 0.0}},
    )


if __name__ == "__main__":
    # By its name, not as __main__: the workers import it, and keep what it caches.
    from benchmarks.peers.flower import main as named_main

    named_main()
