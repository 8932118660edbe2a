"""Apple's pfl: SimulatedBackend and FederatedAveraging.

Several processes are started by torchrun, as its documentation says; the first one reports. Its user data
sets are not shuffled, which saves pfl a little work that the others do.
"""

from __future__ import annotations

import os

import numpy as np
import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam.base import NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from benchmarks.peers.common import Shards, Stopwatch, read_job, say_done
from benchmarks.peers.torch_net import accuracy, build, logits


class Learner(nn.Module):
    """A net with the two functions that pfl asks for."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self.steps = 0

    def loss(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """Called once for each SGD step."""
        self.steps += 1
        self.train()
        return cross_entropy(logits(self.net, inputs), labels)

    def metrics(self, inputs: Tensor, labels: Tensor) -> dict[str, Weighted]:
        """Required by pfl, not called: evaluation is no part of a round here."""
        loss = cross_entropy(logits(self.net, inputs), labels, reduction="sum")
        return {"loss": Weighted(float(loss), len(labels))}


class Laps(TrainingProcessCallback):
    """Tells when a round has ended."""

    def __init__(self, watch: Stopwatch) -> None:
        self.watch = watch

    def on_train_begin(self, *, model: PyTorchModel) -> Metrics:
        """The first round begins."""
        self.watch.restart()
        return Metrics()

    def after_central_iteration(
        self, aggregate_metrics: Metrics, model: PyTorchModel, *, central_iteration: int
    ) -> tuple[bool, Metrics]:
        """A round has ended."""
        self.watch.lap()
        return False, Metrics()


def main() -> None:
    """Federated averaging by pfl's own algorithm and backend."""
    job = read_job()
    torch.set_num_threads(job.options["threads"])
    np.random.seed(job.seed)
    first = int(os.environ.get("RANK", "0")) == 0
    shards = Shards(job.data)
    users = {
        str(k): PyTorchTensorDataset(
            tuple(torch.from_numpy(array) for array in shards.shard(k)), user_id=str(k)
        )
        for k in range(shards.devices)
    }
    data = FederatedDataset(users.__getitem__, get_user_sampler("random", list(users)))
    learner = Learner(build(job, shards.initial))
    model = PyTorchModel(
        learner,
        local_optimizer_create=torch.optim.SGD,
        central_optimizer=torch.optim.SGD(learner.parameters(), lr=1.0),
    )
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=job.rounds,
            # Round 0 is always "evaluated", on the cohort's own data; it is one of the warm-up.
            evaluation_frequency=job.rounds + 1,
            train_cohort_size=job.cohort,
            val_cohort_size=0,
        ),
        backend=SimulatedBackend(training_data=data, val_data=data),
        model=model,
        model_train_params=NNTrainHyperParams(
            local_batch_size=job.batch, local_num_epochs=job.epochs, local_learning_rate=job.lr
        ),
        callbacks=[Laps(Stopwatch(job.warmup))] if first else [],
        send_metrics_to_platform=False,
    )
    steps = torch.tensor([learner.steps])
    if torch.distributed.is_initialized():
        torch.distributed.all_reduce(steps)
    if first:
        say_done(
            steps=int(steps) / job.rounds,
            accuracy=accuracy(learner.net, *shards.test()),
            packages=["pfl", "torch", "numpy"],
        )


if __name__ == "__main__":
    main()
