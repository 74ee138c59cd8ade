"""FedJAX: ``fed_avg.federated_averaging`` with its default (``jax.jit``) backend.

FedJAX shuffles a client's rows instead of drawing them, and computes the norm of every client's update.
"""

from __future__ import annotations

import fedjax
import jax
import numpy as np
from fedjax.algorithms import fed_avg

from jax_models import Weights, from_torch, loss, to_torch
from jobs import LEARNING_RATE, Work
from protocol import serve


class FedJax:
    """Rounds of FedJAX's FedAvg."""

    def __init__(self, work: Work) -> None:
        job = work.job
        inputs = np.moveaxis(work.inputs, 2, -1).copy() if len(job.shape) == 3 else work.inputs
        targets = work.targets.astype(np.int32)
        self.work, self.done = work, 0
        self.data = [fedjax.ClientDataset({"x": x, "y": y}) for x, y in zip(inputs, targets, strict=True)]
        self.keys = list(jax.random.split(jax.random.PRNGKey(0), job.cohort))

        def objective(weights: Weights, batch: dict[str, jax.Array], key: jax.Array) -> jax.Array:
            return loss(job.model, weights, batch["x"], batch["y"])

        batches = fedjax.ShuffleRepeatBatchHParams(batch_size=job.batch, num_epochs=None, num_steps=job.steps)
        self.algorithm = fed_avg.federated_averaging(
            jax.grad(objective), fedjax.optimizers.sgd(LEARNING_RATE), fedjax.optimizers.sgd(1.0), batches
        )
        self.state = self.algorithm.init(from_torch(list(work.start.values())))

    def run(self, rounds: int) -> None:
        """Run rounds."""
        for _ in range(rounds):
            cohort = self.work.cohort(self.done)
            clients = [(k, self.data[k], key) for k, key in zip(cohort, self.keys, strict=True)]
            self.state, _ = self.algorithm.apply(self.state, clients)
            self.done += 1
        jax.block_until_ready(self.state.params)

    def weights(self) -> list[np.ndarray]:
        """Return the server's weights."""
        return to_torch(self.state.params)


if __name__ == "__main__":
    serve(FedJax, "fedjax", "jax")
