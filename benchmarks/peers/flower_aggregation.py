"""Flower's own FedAvg aggregation of large updates, as its strategy calls it; prints seconds, one per repetition."""

from __future__ import annotations

import sys
import time

import numpy as np
from flwr.app import Array, ArrayRecord, MetricRecord, RecordDict
from flwr.serverapp.strategy.strategy_utils import aggregate_arrayrecords

TENSORS = 10


def main() -> None:
    """Arrays come as Flower's records hold them when a reply has arrived."""
    parameters, updates, repeat = map(int, sys.argv[1:])
    rng = np.random.default_rng(0)
    shape = (parameters // TENSORS // 1000, 1000)
    replies = [
        RecordDict(
            {
                "arrays": ArrayRecord(
                    {f"layer{n}": Array(rng.random(shape, dtype=np.float32)) for n in range(TENSORS)}
                ),
                "metrics": MetricRecord({"num-examples": 300}),
            }
        )
        for _ in range(updates)
    ]
    for _ in range(repeat):
        begun = time.perf_counter()
        aggregate_arrayrecords(replies, "num-examples")
        print(time.perf_counter() - begun, flush=True)


if __name__ == "__main__":
    main()
