"""BlazeFL: its FedAvg handler and trainers, with a pool of processes, a pool of threads, or one client at a time."""

from __future__ import annotations

import multiprocessing
import tempfile
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from blazefl.contrib import (
    FedAvgBaseClientTrainer,
    FedAvgBaseServerHandler,
    FedAvgProcessPoolClientTrainer,
    FedAvgThreadPoolClientTrainer,
)
from blazefl.core import IPCMode
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

from benchmarks.peers.common import Job, Shards, Stopwatch, read_job, say_done
from benchmarks.peers.torch_net import accuracy, build, logits

if TYPE_CHECKING:
    from collections.abc import Iterator

STEPS = multiprocessing.Value("q", 0)
"""Batches drawn in this process and in those forked from it: each is one SGD step."""


class Name(StrEnum):
    """BlazeFL chooses models by a name; there is only one here."""

    NET = "net"


@cache
def shards_in(folder: str) -> Shards:
    """Open the arrays once; processes of the pool are forked and find them open."""
    return Shards(folder)


@cache
def samples_of(folder: str, device: int) -> TensorDataset:
    """Make the data set of one device, once."""
    return TensorDataset(*(torch.from_numpy(array) for array in shards_in(folder).shard(device)))


class Learner(nn.Module):
    """A net whose output is the logits, which BlazeFL's loss expects."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, inputs: Tensor) -> Tensor:
        """Compute the logits."""
        return logits(self.net, inputs)


class Selector:
    """Makes the net of a job."""

    def __init__(self, job: Job) -> None:
        self.job = job

    def select_model(self, model_name: Name) -> nn.Module:
        """Make the net with the weights that everybody begins with."""
        return Learner(build(self.job, shards_in(self.job.data).initial))


class Batches(DataLoader[tuple[Tensor, ...]]):
    """Whole batches by one index operation, which is faster than putting samples together one by one."""

    def __init__(self, dataset: TensorDataset, batch: int, generator: torch.Generator | None) -> None:
        order = BatchSampler(RandomSampler(dataset, generator=generator), batch, drop_last=False)
        super().__init__(dataset, sampler=order, batch_size=None)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """Count what is drawn."""
        for batch in super().__iter__():
            with STEPS.get_lock():
                STEPS.value += 1
            yield batch


class Partitions:
    """The devices' samples. It holds nothing but a folder, since it is sent to the processes with every client."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def get_dataset(self, type_: StrEnum, cid: int | None) -> TensorDataset:
        """Find the samples of a device."""
        return samples_of(self.folder, cid or 0)

    def set_dataset(self, type_: StrEnum, cid: int | None, dataset: object) -> None:
        """Keep nothing: training does not change the samples."""

    def get_dataloader(
        self, type_: StrEnum, cid: int | None, batch_size: int | None, generator: torch.Generator | None
    ) -> Batches:
        """Find the shuffled batches of a device."""
        dataset = self.get_dataset(type_, cid)
        return Batches(dataset, batch_size or len(dataset), generator)


def trainer_of(job: Job, partitions: Partitions, folder: Path) -> Any:
    """Make BlazeFL's trainer for the way of using the cores that the job names."""
    shared = {
        "model_selector": Selector(job),
        "model_name": Name.NET,
        "dataset": partitions,
        "device": "cpu",
        "num_clients": shards_in(job.data).devices,
        "epochs": job.epochs,
        "batch_size": job.batch,
        "lr": job.lr,
        "seed": job.seed,
    }
    mode, parallel = job.options["mode"], job.options["parallel"]
    if mode == "processes":
        return FedAvgProcessPoolClientTrainer(
            **shared,
            share_dir=folder / "share",
            state_dir=folder / "state",
            num_parallels=parallel,
            ipc_mode=IPCMode.SHARED_MEMORY,
        )
    if mode == "threads":
        return FedAvgThreadPoolClientTrainer(**shared, num_parallels=parallel)
    return FedAvgBaseClientTrainer(**shared)


def main() -> None:
    """Federated averaging by BlazeFL's own handler and trainer, in the loop of its examples."""
    job = read_job()
    torch.set_num_threads(job.options["threads"])
    shards = shards_in(job.data)
    for device in range(shards.devices):
        samples_of(job.data, device)
    partitions = Partitions(job.data)
    handler = FedAvgBaseServerHandler(
        model_selector=Selector(job),
        model_name=Name.NET,
        dataset=partitions,
        global_round=job.rounds,
        num_clients=shards.devices,
        # A little more than the share, which is rounded down.
        sample_ratio=(job.cohort + 0.5) / shards.devices,
        device="cpu",
        batch_size=job.batch,
        seed=job.seed,
    )
    with tempfile.TemporaryDirectory(prefix="fedpmt-bench-") as folder:
        trainer = trainer_of(job, partitions, Path(folder))
        watch = Stopwatch(job.warmup)
        while not handler.if_stop():
            chosen = handler.sample_clients()
            trainer.local_process(handler.downlink_package(), chosen)
            for package in trainer.uplink_package():
                handler.load(package)
            watch.lap()
    say_done(
        steps=STEPS.value / job.rounds,
        accuracy=accuracy(handler.model, *shards.test()),
        packages=["blazefl", "torch", "numpy"],
    )


if __name__ == "__main__":
    # By its name, not as __main__: what is sent to the processes of the pool must be found there.
    from benchmarks.peers.blazefl import main as named_main

    named_main()
