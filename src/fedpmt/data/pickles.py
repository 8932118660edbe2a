"""Read pickles from elsewhere without letting them run code: only names that are known are admitted."""

from __future__ import annotations

import io
import pickle
from typing import TYPE_CHECKING, Any

import numpy as np

from fedpmt.data.folders import read_content
from fedpmt.types import SettingError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

Admitted = dict[tuple[str, str], Any]
"""What stands for each name, written as module and name, that a pickle may hold."""


def _latin1(text: str, encoding: str) -> bytes:
    """How newer protocols spell bytes in an old pickle; other codecs stay out of reach."""
    if encoding not in ("latin1", "latin-1"):
        raise pickle.UnpicklingError(f"the codec {encoding!r} is not admitted")
    return text.encode("latin1")


_RECONSTRUCT = np.empty(0).__reduce__()[0]
ARRAYS: Admitted = {
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    ("numpy.core.multiarray", "_reconstruct"): _RECONSTRUCT,
    ("numpy._core.multiarray", "_reconstruct"): _RECONSTRUCT,
    ("_codecs", "encode"): _latin1,
}
"""The names in a pickle of arrays and plain containers."""


class _Unpickler(pickle.Unpickler):
    def __init__(self, content: bytes, admitted: Mapping[tuple[str, str], Any], encoding: str) -> None:
        super().__init__(io.BytesIO(content), encoding=encoding)
        self._admitted = admitted

    def find_class(self, module: str, name: str) -> Any:
        """What stands for a name."""
        try:
            return self._admitted[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"{module}.{name} is not admitted") from None


def read_pickle(path: Path, admitted: Admitted = ARRAYS, encoding: str = "ASCII") -> Any:
    """Read a pickle of Python 2 or 3.

    Args:
        path: The file.
        admitted: What stands for each name the pickle may hold; any other name is refused.
        encoding: How to read the strings of Python 2; "bytes" leaves them as they are.

    Raises:
        SettingError: The file cannot be read, is damaged, or holds a name that is not admitted.
    """
    content = read_content(path)
    try:
        return _Unpickler(content, admitted, encoding).load()
    except Exception as error:  # a damaged pickle can raise anything
        reason = " ".join(str(error).split()) or type(error).__name__
        raise SettingError(f"{path} is damaged: it cannot be unpickled ({reason})") from error
