"""The jobs of the comparison: what every simulator computes, and the files that hold it.

    python bench/peers/jobs.py            # write all files; needs torch, for the starting weights

A file has the rows of every client, the cohort of every round and the starting weights, so all peers get the same ones.
A client has as many rows as a round uses, ``steps * batch``: for a peer that can only pass over its data, an epoch is
the same amount of work. The *check* of a job is a small version whose result does not depend on how batches are drawn:
all rows of a client are equal.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

FOLDER = Path(__file__).parent / ".jobs"
LEARNING_RATE = 0.01
COHORTS = 500  # then they repeat
SEED = 0


@dataclass(frozen=True)
class Job:
    """FedAvg with plain SGD: ``cohort`` of ``clients`` take ``steps`` steps with ``batch`` rows in every round."""

    name: str
    model: str
    clients: int
    cohort: int
    steps: int
    batch: int
    shape: tuple[int, ...] = (1, 28, 28)
    check: bool = False

    @property
    def rows(self) -> int:
        """The number of rows of a client."""
        return self.steps * self.batch

    @property
    def path(self) -> Path:
        """The file of this job."""
        return FOLDER / f"{self.name}{'-check' if self.check else ''}.npz"

    def small(self) -> Job:
        """Return the check of this job."""
        whole = self.cohort == self.clients
        clients = min(4, self.clients)
        return replace(self, clients=clients, cohort=clients if whole else 3, check=True)


JOBS = {
    job.name: job
    for job in (
        Job("logreg", "logreg", 1000, 10, 6, 10),
        Job("trivial-10", "trivial", 10, 10, 1, 1, (1,)),
        Job("trivial-100", "trivial", 100, 100, 1, 1, (1,)),
        Job("trivial-1000", "trivial", 1000, 1000, 1, 1, (1,)),
        Job("lenet5", "lenet5", 10, 10, 10, 32),
        Job("cnn", "cnn", 50, 50, 5, 10),
        Job("resnet20", "resnet20", 2, 2, 2, 32, (3, 32, 32)),
    )
}


@dataclass(frozen=True)
class Work:
    """What a job's file holds.

    inputs:  the rows of every client, [clients, rows, ...]
    targets: their classes, [clients, rows]
    cohorts: the clients that take part in each round, [rounds, cohort]
    start:   the starting weights, by their names in the torch module
    """

    job: Job
    inputs: np.ndarray
    targets: np.ndarray
    cohorts: np.ndarray
    start: dict[str, np.ndarray]

    def cohort(self, number: int) -> list[int]:
        """Return the clients that take part in a round, counted from 0."""
        return self.cohorts[number % len(self.cohorts)].tolist()


def write(job: Job) -> Path:
    """Write the file of a job, unless it exists; return its path."""
    if not job.path.exists():
        from torch_models import build

        random = np.random.default_rng(SEED)
        rows = 1 if job.check else job.rows
        inputs = random.standard_normal((job.clients, rows, *job.shape), dtype=np.float32)
        targets = random.integers(0, 10, (job.clients, rows))
        if job.check:
            inputs, targets = inputs.repeat(job.rows, 1), targets.repeat(job.rows, 1)
        cohorts = np.stack([random.permutation(job.clients)[: job.cohort] for _ in range(COHORTS)])
        start = {f"start.{name}": value.numpy() for name, value in build(job.model, seed=SEED).state_dict().items()}
        arrays = {"inputs": inputs, "targets": targets, "cohorts": cohorts, **start}
        FOLDER.mkdir(exist_ok=True)
        partial = job.path.with_suffix(".tmp.npz")
        np.savez(partial, job=np.array(json.dumps(asdict(job))), **arrays)
        partial.rename(job.path)
    return job.path


def read(path: Path) -> Work:
    """Read the file of a job."""
    with np.load(path) as file:
        fields = json.loads(str(file["job"]))
        job = Job(**{**fields, "shape": tuple(fields["shape"])})
        start = {name.removeprefix("start."): file[name] for name in file.files if name.startswith("start.")}
        return Work(job, file["inputs"], file["targets"], file["cohorts"], start)


def main() -> None:
    """Write the files of all jobs and of their checks."""
    for job in JOBS.values():
        print(write(job))
        print(write(job.small()))


if __name__ == "__main__":
    main()
