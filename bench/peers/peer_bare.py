"""FedAvg by hand, as in bench/speed.py: a module, ``torch.optim.SGD`` and a loop over clients."""

from __future__ import annotations

import numpy as np
import torch

from jobs import LEARNING_RATE, Work
from protocol import serve
from torch_models import loss_of, started, tensors


class Bare:
    """A loop over clients."""

    def __init__(self, work: Work) -> None:
        self.work, self.done = work, 0
        self.model, self.loss = started(work), loss_of(work.job.model)
        self.inputs, self.targets = tensors(work)
        self.server = {name: value.clone() for name, value in self.model.state_dict().items()}

    def run(self, rounds: int) -> None:
        """Run rounds."""
        job = self.work.job
        for _ in range(rounds):
            total = {name: torch.zeros_like(value) for name, value in self.server.items()}
            for client in self.work.cohort(self.done):
                inputs, targets = self.inputs[client], self.targets[client]
                self.model.load_state_dict(self.server)
                optimiser = torch.optim.SGD(self.model.parameters(), lr=LEARNING_RATE)
                for _ in range(job.steps):
                    batch = torch.randint(0, job.rows, (job.batch,))
                    optimiser.zero_grad()
                    self.loss(self.model(inputs[batch]), targets[batch]).backward()
                    optimiser.step()
                for name, value in self.model.state_dict().items():
                    total[name] += value / job.cohort
            self.server = total
            self.done += 1

    def weights(self) -> list[np.ndarray]:
        """Return the server's weights."""
        return [value.numpy() for value in self.server.values()]


if __name__ == "__main__":
    serve(Bare, "torch", "numpy")
