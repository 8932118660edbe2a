"""Google's fedjax: its federated averaging on its `for_each_client`, compiled by jit.

Images are channels-last, which is what XLA is fast with; the shared initial weights are laid out accordingly.
"""

from __future__ import annotations

from typing import Any

import fedjax
import jax
import jax.numpy as jnp
import numpy as np
from fedjax.algorithms import fed_avg

from benchmarks.peers.common import Job, Shards, Stopwatch, read_job, say_done

# fedjax 0.0.17 calls it by a name that jax has since dropped; it is the same function.
jax.tree_map = jax.tree_util.tree_map

Params = list[tuple[Any, Any]]
LAYOUT = ("NHWC", "HWIO", "NHWC")


def initial_params(job: Job, arrays: list[np.ndarray], side: int) -> Params:
    """PyTorch's layout turned into that of channels-last convolutions and x @ w."""
    params: Params = []
    for number, (weight, bias) in enumerate(zip(arrays[::2], arrays[1::2], strict=True)):
        if number < len(job.filters):
            weight = weight.transpose(2, 3, 1, 0)  # noqa: PLW2901
            side = (side - 4) // 2
        elif number == len(job.filters) and job.filters:
            # The rows that meet the flattened image: channels come last in it.
            out = len(weight)
            weight = weight.reshape(out, job.filters[-1], side, side).transpose(2, 3, 1, 0).reshape(-1, out)  # noqa: PLW2901
        else:
            weight = weight.T  # noqa: PLW2901
        params.append((jnp.asarray(weight), jnp.asarray(bias)))
    return params


def logits(job: Job, params: Params, images: Any) -> Any:
    """The net: convolutions with ReLU and 2x2 max-pool, then fully connected layers."""
    convolutions, linears = params[: len(job.filters)], params[len(job.filters) :]
    for weight, bias in convolutions:
        images = jax.nn.relu(
            jax.lax.conv_general_dilated(images, weight, (1, 1), "VALID", dimension_numbers=LAYOUT) + bias
        )
        images = jax.lax.reduce_window(images, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    hidden = images.reshape(len(images), -1)
    for weight, bias in linears[:-1]:
        hidden = jax.nn.relu(hidden @ weight + bias)
    weight, bias = linears[-1]
    return hidden @ weight + bias


def main() -> None:
    """Federated averaging by fedjax's own algorithm."""
    job = read_job()
    fedjax.set_for_each_client_backend("jit")
    shards = Shards(job.data)
    steps = 0

    class Counted(fedjax.ClientDataset):
        """A client's data set that counts the batches drawn from it: each is one SGD step."""

        def shuffle_repeat_batch(self, hparams: Any = None, **kwargs: Any) -> Any:
            nonlocal steps
            for batch in super().shuffle_repeat_batch(hparams, **kwargs):
                steps += 1
                yield batch

    clients = [
        Counted({"x": np.ascontiguousarray(images.transpose(0, 2, 3, 1)), "y": labels.astype(np.int32)})
        for images, labels in map(shards.shard, range(shards.devices))
    ]

    def loss(params: Params, batch: dict[str, Any], _: Any) -> Any:
        outputs = jax.nn.log_softmax(logits(job, params, batch["x"]))
        return -jnp.take_along_axis(outputs, batch["y"][:, None], 1).mean()

    algorithm = fed_avg.federated_averaging(
        jax.grad(loss),
        fedjax.optimizers.sgd(job.lr),
        fedjax.optimizers.sgd(1.0),
        fedjax.ShuffleRepeatBatchHParams(batch_size=job.batch, num_epochs=job.epochs),
    )
    test_images, test_labels = shards.test()
    state = algorithm.init(initial_params(job, shards.initial, test_images.shape[-1]))
    rng = np.random.default_rng(job.seed)
    keys = jax.random.split(jax.random.PRNGKey(job.seed), job.cohort)
    watch = Stopwatch(job.warmup)
    for _ in range(job.rounds):
        chosen = rng.choice(len(clients), job.cohort, replace=False)
        state, _ = algorithm.apply(
            state, [(int(k), clients[k], key) for k, key in zip(chosen, keys, strict=True)]
        )
        jax.block_until_ready(state.params)
        watch.lap()

    guess = jax.jit(lambda params, images: logits(job, params, images).argmax(1))
    right = sum(
        int(
            (
                guess(state.params, test_images[at : at + 1000].transpose(0, 2, 3, 1))
                == test_labels[at : at + 1000]
            ).sum()
        )
        for at in range(0, len(test_labels), 1000)
    )
    say_done(
        steps=steps / job.rounds,
        accuracy=right / len(test_labels),
        packages=["fedjax", "jax", "jaxlib", "numpy"],
    )


if __name__ == "__main__":
    main()
