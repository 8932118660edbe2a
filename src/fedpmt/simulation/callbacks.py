"""Things to do after each round: any function of a `RoundRecord` will do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from fedpmt.records import ACCURACY
from fedpmt.types import SettingError

if TYPE_CHECKING:
    from pathlib import Path

    from fedpmt.records import RoundRecord


class TensorBoard:
    """Writes each round for TensorBoard (`pip install fedpmt[tensorboard]`).

    with TensorBoard(folder) as board:
        fedpmt.run("fedpmt", on_round=board)
    """

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise SettingError("TensorBoard is not installed: pip install 'fedpmt[tensorboard]'") from error
        self._writer = SummaryWriter(str(folder))

    def __call__(self, record: RoundRecord) -> None:
        """Write one round."""
        values = {
            ACCURACY if record.score_name == ACCURACY else f"score/{record.score_name}": record.score,
            **{f"score/{name}": value for name, value in record.scores.items()},
            "loss": record.loss,
            "virtual_seconds": record.virtual_seconds,
            "bytes_up": record.bytes_up,
            "operations": record.operations,
            "replies": sum(device.outcome == "arrived" for device in record.devices),
            **record.metrics,
        }
        for name, value in values.items():
            if value is not None:
                self._writer.add_scalar(name, value, record.round)
        for layer, count in record.layers.items():
            self._writer.add_scalar(f"coverage/{layer}", count, record.round)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._writer.close()
