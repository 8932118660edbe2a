"""Ours and other simulators of federated learning, measured side by side: `python -m benchmarks --help`."""
