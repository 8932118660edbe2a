"""What tests of data sets share."""

import pytest


@pytest.fixture
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let data sets be read from files made here, which are smaller than their own."""
    monkeypatch.setattr("fedpmt.data.datasets.check_sizes", lambda dataset, folder: None)
