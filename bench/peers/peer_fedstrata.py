"""fedstrata of this checkout: bare rounds, without evaluation or checkpoints. ``--compile``: with ``compile=True``."""

from __future__ import annotations

import sys

import numpy as np
import torch

import fedstrata as fs
from fedstrata.clients.clients import Clients
from fedstrata.core.options import options_of
from fedstrata.training.settings import Settings
from fedstrata.training.train import make_clients
from jobs import LEARNING_RATE, Work
from protocol import Skip, serve
from torch_models import started, tensors


def problem_of(work: Work) -> fs.Problem:
    """Return the problem of a job."""
    if work.job.model == "trivial":
        start = torch.from_numpy(work.start["weight"].copy()).reshape(1)
        return fs.Problem(lambda x, batch: (batch[0] * x).mean(), start, name="trivial")
    return fs.erm(started(work), prior=False)


def clients_of(work: Work, problem: fs.Problem) -> Clients:
    """Return the clients of a job."""
    options = {"compile": True} if "--compile" in sys.argv else {}
    if options and "compile" not in options_of(Settings):
        raise Skip("this checkout has no option compile")
    pairs = list(zip(*tensors(work), strict=True))
    data = fs.FederatedData.from_arrays(pairs, name=work.job.name, classes=10)
    return make_clients(problem, data, Settings(rounds=10**6, batch_size=work.job.batch, **options))


class Fedstrata:
    """Rounds of ``fs.FedAvg``."""

    def __init__(self, work: Work) -> None:
        self.work, self.done = work, 0
        problem = problem_of(work)
        self.clients = clients_of(work, problem)
        self.algorithm = fs.FedAvg(lr=LEARNING_RATE, steps=work.job.steps)
        self.clients.begin(-1)
        self.state = self.algorithm.start(problem.x0.clone(), problem.x0[:0], self.clients)

    @torch.no_grad()
    def run(self, rounds: int) -> None:
        """Run rounds."""
        job = self.work.job
        for _ in range(rounds):
            self.clients.begin(self.done)
            cohort = self.clients
            if job.cohort < job.clients:
                cohort = cohort.with_cohort(np.array(self.work.cohort(self.done)))
            self.state = self.algorithm.round(self.state, cohort)
            self.done += 1

    def weights(self) -> list[np.ndarray]:
        """Return the server's weights."""
        return [self.algorithm.solution(self.state)[0].numpy()]


if __name__ == "__main__":
    serve(Fedstrata, "torch")
