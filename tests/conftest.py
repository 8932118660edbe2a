"""What all tests share."""

import pytest
from hypothesis import HealthCheck, settings

# A busy machine is no defect: no random input has a time limit.
settings.register_profile("unhurried", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("unhurried")


@pytest.fixture
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let data sets be read from files made by a test, which are smaller than their own."""
    monkeypatch.setattr("fedpmt.data.datasets.check_sizes", lambda dataset, folder: None)
