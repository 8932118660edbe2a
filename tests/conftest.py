"""What all tests share."""

from hypothesis import HealthCheck, settings

# A busy machine is no defect: no random input has a time limit.
settings.register_profile("unhurried", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("unhurried")
