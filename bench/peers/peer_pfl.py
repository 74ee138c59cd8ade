"""pfl-research (PyPI ``pfl``): ``FederatedAveraging`` on a ``SimulatedBackend``, without evaluation.

pfl's own ``Dataset`` cuts the rows into the same batches every time; this one draws them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.hyperparam import NNTrainHyperParams
from pfl.model.pytorch import PyTorchModel

from jobs import LEARNING_RATE, Work
from protocol import serve
from torch_models import loss_of, started, tensors


class Drawn(Dataset):
    """A client's rows; a pass draws as many batches as a round has steps."""

    def iter(self, batch_size: int) -> Iterator[list[torch.Tensor]]:
        """Draw the batches of a round."""
        rows = len(self)
        for _ in range(rows // batch_size):
            batch = torch.randint(0, rows, (batch_size,))
            yield [array[batch] for array in self.raw_data]


class Pfl:
    """Central iterations of pfl."""

    def __init__(self, work: Work) -> None:
        job, loss = work.job, loss_of(work.job.model)
        module = started(work)
        module.loss = lambda inputs, targets: loss(module(inputs), targets)
        module.metrics = lambda inputs, targets: {}
        data = [Drawn(pair, user_id=str(k)) for k, pair in enumerate(zip(*tensors(work), strict=True))]
        order = itertools.cycle(work.cohorts.ravel().tolist())
        users = FederatedDataset(data.__getitem__, lambda: next(order))
        self.module, self.done, self.cohort = module, 0, job.cohort
        self.backend = SimulatedBackend(training_data=users, val_data=users)
        self.algorithm = FederatedAveraging()
        self.model = PyTorchModel(module, torch.optim.SGD, torch.optim.SGD(module.parameters(), lr=1.0))
        self.local = NNTrainHyperParams(
            local_batch_size=job.batch,
            local_num_epochs=None,
            local_learning_rate=LEARNING_RATE,
            local_num_steps=job.steps,
        )

    def run(self, rounds: int) -> None:
        """Run central iterations; the algorithm counts on from the last call."""
        self.done += rounds
        plan = NNAlgorithmParams(
            central_num_iterations=self.done,
            evaluation_frequency=10**9,
            train_cohort_size=self.cohort,
            val_cohort_size=0,
        )
        self.algorithm.run(plan, self.backend, self.model, self.local, send_metrics_to_platform=False)

    def weights(self) -> list[np.ndarray]:
        """Return the server's weights."""
        return [value.detach().numpy() for value in self.module.parameters()]


if __name__ == "__main__":
    serve(Pfl, "pfl", "torch")
