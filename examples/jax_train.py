"""A small convolutional network, trained with JAX: `python jax_train.py SOURCE`

SOURCE is a daemon's address, or a configuration's file. JAX takes each batch by DLPack, without a copy: on the CPU from
NumPy arrays, so that no torch is needed; with `--device cuda` from torch tensors on that GPU.

Shapes must not vary, or JAX would compile again: `last_batch="drop"` leaves out what does not fill a batch, and with
`on_bad_sample="mask"` a bad picture is a black row that is not `valid`, and has no weight in the loss.
"""

from __future__ import annotations

import argparse
from collections import deque
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from headrace import Loader

CHANNELS = (3, 16, 32, 64)
Parameters = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source")
    parser.add_argument("--stream")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--device", help="a GPU, as torch names it")
    args = parser.parse_args()
    with Loader(
        args.source,
        stream=args.stream,
        batch_size=args.batch_size,
        last_batch="drop",
        on_bad_sample="mask",
        dtype="float32",
        layout="NHWC",
        output="torch" if args.device else "numpy",
        device=args.device,
    ) as loader:
        assert loader.classes is not None
        # On a GPU nobody tells torch when JAX is done with the memory of a batch: it is kept until the step is.
        under_way: deque[tuple[Any, Any]] = deque(maxlen=2)
        parameters = network(len(loader.classes))
        for epoch in range(args.epochs):
            losses: list[Any] = []
            for batch in loader:
                taken = [jnp.from_dlpack(part) for part in batch]
                parameters, loss = step(parameters, *taken, batch.valid)
                losses.append(loss)
                if len(under_way) == 2:
                    under_way[0][1].block_until_ready()
                under_way.append((taken, loss))  # of which the oldest goes
            print(f"epoch {epoch + 1}: {len(losses)} batches, loss {np.mean(losses):.3f}", flush=True)


def network(classes: int) -> Parameters:
    """Filters of convolutions, and the weights of a linear layer behind them."""
    random = np.random.default_rng(0)

    def normal(scale: float, *shape: int) -> Any:
        return random.normal(0, scale, shape).astype(np.float32)

    filters = [normal((2 / (9 * a)) ** 0.5, 3, 3, a, b) for a, b in pairwise(CHANNELS)]
    return {"filters": filters, "weights": normal(0.1, CHANNELS[-1], classes)}


@jax.jit
def step(parameters: Parameters, images: Any, labels: Any, valid: Any) -> tuple[Parameters, Any]:
    """One step of gradient descent; the parameters after it, and the loss before."""
    loss, slopes = jax.value_and_grad(loss_of)(parameters, images, labels, valid)
    return jax.tree.map(lambda value, slope: value - 0.1 * slope, parameters, slopes), loss


def loss_of(parameters: Parameters, images: Any, labels: Any, valid: Any) -> Any:
    """Cross entropy, the mean over the rows that count.

    Args:
        images: float32 (n, H, W, 3).
        labels: int (n,).
        valid: bool (n,).
    """
    x = images
    for weights in parameters["filters"]:
        x = jax.lax.conv_general_dilated(x, weights, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        x = jax.nn.relu(x)
    scores = jax.nn.log_softmax(x.mean(axis=(1, 2)) @ parameters["weights"])
    losses = -(scores * jax.nn.one_hot(labels, scores.shape[1])).sum(axis=1)
    return losses.sum(where=valid) / jnp.maximum(valid.sum(), 1)


if __name__ == "__main__":
    main()
