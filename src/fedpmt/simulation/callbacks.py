"""Things to do after each round: any function of a `RoundEnd` will do, and one that only reads a `RoundRecord`, too."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from pydantic import PrivateAttr

from fedpmt.records import ACCURACY, RoundRecord, read_config
from fedpmt.types import SettingError, Stop

if TYPE_CHECKING:
    from torch import Tensor

    Weights = Callable[[], dict[str, Tensor]]


class RoundEnd(RoundRecord):
    """A round's record as callbacks get it, with the run's folder and the weights after the round.

    A callback may raise `fedpmt.Stop` to end the run after this round.
    """

    _folder: Path = PrivateAttr(Path())
    _weights: Any = PrivateAttr(None)

    @classmethod
    def of(cls, record: RoundRecord, folder: Path, weights: Weights) -> RoundEnd:
        """Add the folder, and a function that copies the weights, to a record."""
        end = cls.model_construct(record.model_fields_set, **dict(record))
        end._folder, end._weights = folder, weights
        return end

    @property
    def folder(self) -> Path:
        """The folder of the run's records."""
        return self._folder

    @property
    def weights(self) -> dict[str, Tensor]:
        """A copy of what the run would save as its model now, by name; only available inside the callback."""
        if self._weights is None:
            raise SettingError("weights are only available inside a callback, while it is called")
        copied: dict[str, Tensor] = self._weights()
        return copied

    def close(self) -> None:
        """Let go of the weights: whoever keeps this record does not keep them."""
        self._weights = None


OnRound = Callable[[RoundEnd], object]


def call_each(callbacks: Sequence[OnRound]) -> OnRound:
    """Call one after another. All of them see the round in which one raises `Stop`."""

    def on_round(record: RoundEnd) -> None:
        stops = []
        for callback in callbacks:
            try:
                callback(record)
            except Stop as stop:
                stops.append(stop)
        if stops:
            raise stops[0]

    return on_round


class Tracker(ABC):
    """Writes the numbers of each round for a tool that shows them; each run folder is a run there.

    Leave it as a context manager to have everything written: `with TensorBoard() as board: ...`.
    """

    _run: Path | None = None

    def __call__(self, record: RoundEnd) -> None:
        """Write one round."""
        if record.folder != self._run:
            self.close()
            self.begin(record.folder, read_config(record.folder) or {})
            self._run = record.folder
        self.write(scalars(record), record.round)

    @abstractmethod
    def begin(self, folder: Path, settings: Mapping[str, Any]) -> None:
        """Begin to write a run."""

    @abstractmethod
    def write(self, values: Mapping[str, float], number: int) -> None:
        """Write the numbers of a round."""

    @abstractmethod
    def end(self) -> None:
        """End the run that was begun."""

    def close(self) -> None:
        """End the run that is being written, if any."""
        if self._run is not None:
            self._run = None
            self.end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def scalars(record: RoundRecord) -> dict[str, float]:
    """The numbers of a round by name."""
    late = [device.staleness for device in record.devices if device.staleness is not None]
    values = {
        ACCURACY if record.score_name == ACCURACY else f"score/{record.score_name}": record.score,
        **{f"score/{name}": value for name, value in record.scores.items()},
        "loss": record.loss,
        "virtual_seconds": record.virtual_seconds,
        "bytes_up": record.bytes_up,
        "operations": record.operations,
        "joules": record.joules,
        "replies": sum(device.outcome == "arrived" for device in record.devices),
        "staleness": sum(late) / len(late) if late else None,
        **record.metrics,
        **{f"coverage/{layer}": count for layer, count in record.layers.items()},
    }
    return {name: value for name, value in values.items() if value is not None}


class TensorBoard(Tracker):
    """Writes each round for TensorBoard (`pip install fedpmt[tensorboard]`).

    with fedpmt.TensorBoard("board") as board:
        fedpmt.run("fedpmt", on_round=board)

    Args:
        folder: Each run gets a folder of its own in it; default: the folder `tensorboard` of the run itself.
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise SettingError("TensorBoard is not installed: pip install 'fedpmt[tensorboard]'") from error
        self._open: Any = SummaryWriter
        self._folder = None if folder is None else Path(folder)

    def begin(self, folder: Path, settings: Mapping[str, Any]) -> None:
        """Open the files of a run."""
        self._writer = self._open(str(self._folder / folder.name if self._folder else folder / "tensorboard"))

    def write(self, values: Mapping[str, float], number: int) -> None:
        """Write the numbers of a round."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, number)

    def end(self) -> None:
        """Close the files."""
        self._writer.close()


class WandB(Tracker):
    """Logs each round to Weights & Biases (`pip install fedpmt[tracking]`).

    with fedpmt.WandB(project="phones", mode="offline") as tracker:
        fedpmt.compare(["fedpmt", "fedavg"], on_round=tracker)

    Args:
        project: The project of the runs.
        **arguments: What else `wandb.init` takes.
    """

    def __init__(self, project: str = "fedpmt", **arguments: Any) -> None:
        try:
            import wandb
        except ImportError as error:
            raise SettingError("W&B is not installed: pip install 'fedpmt[tracking]'") from error
        self._init, self._arguments = wandb.init, {"project": project, **arguments}

    def begin(self, folder: Path, settings: Mapping[str, Any]) -> None:
        """Start a run with the settings as its config."""
        given = {"name": folder.name, "config": dict(settings), "reinit": "finish_previous"}
        self._logged = self._init(**{**given, **self._arguments})

    def write(self, values: Mapping[str, float], number: int) -> None:
        """Log the numbers of a round."""
        self._logged.log(dict(values), step=number)

    def end(self) -> None:
        """Finish the run."""
        self._logged.finish()


class MLflow(Tracker):
    """Logs each round to MLflow (`pip install fedpmt[tracking]`), where `mlflow.set_tracking_uri` or its default says.

    with fedpmt.MLflow(experiment="phones") as tracker:
        fedpmt.compare(["fedpmt", "fedavg"], on_round=tracker)

    Args:
        experiment: The experiment of the runs.
    """

    def __init__(self, experiment: str = "fedpmt") -> None:
        try:
            from mlflow import MlflowClient
        except ImportError as error:
            raise SettingError("MLflow is not installed: pip install 'fedpmt[tracking]'") from error
        self._client, self._experiment = MlflowClient(), experiment

    def begin(self, folder: Path, settings: Mapping[str, Any]) -> None:
        """Start a run with the settings as its parameters."""
        found = self._client.get_experiment_by_name(self._experiment)
        experiment = found.experiment_id if found else self._client.create_experiment(self._experiment)
        self._id = self._client.create_run(experiment, run_name=folder.name).info.run_id
        for name, value in settings.items():
            self._client.log_param(self._id, name, value)

    def write(self, values: Mapping[str, float], number: int) -> None:
        """Log the numbers of a round."""
        for name, value in values.items():
            self._client.log_metric(self._id, name, value, step=number)

    def end(self) -> None:
        """Mark the run as finished."""
        self._client.set_terminated(self._id)


TRACKERS: dict[str, Callable[[], Tracker]] = {"tensorboard": TensorBoard, "wandb": WandB, "mlflow": MLflow}
"""The trackers of the command line, by name."""
