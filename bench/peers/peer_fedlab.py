"""FedLab: its standalone pipeline with the synchronous server and the serial SGD trainer, without evaluation."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

for _name in ("nms", "qnms"):  # FedLab imports torchvision for its data sets; a build for CUDA lacks these on a CPU
    torch.library.define(f"torchvision::{_name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

from fedlab.contrib.algorithm.basic_client import SGDSerialClientTrainer  # noqa: E402
from fedlab.contrib.algorithm.basic_server import SyncServerHandler  # noqa: E402
from fedlab.contrib.dataset.basic_dataset import FedDataset  # noqa: E402
from fedlab.core.standalone import StandalonePipeline  # noqa: E402

from jobs import LEARNING_RATE, Work  # noqa: E402
from protocol import serve  # noqa: E402
from torch_models import loss_of, started, tensors  # noqa: E402


class Drawn(FedDataset):
    """The rows of all clients; a loader draws as many batches as a round has steps."""

    def __init__(self, work: Work) -> None:
        super().__init__()
        self.num, self.job = work.job.clients, work.job
        self.inputs, self.targets = tensors(work)

    def get_dataloader(self, id: int, batch_size: int, type: str = "train") -> Iterator[tuple[torch.Tensor, ...]]:
        """Draw the batches of a round."""
        inputs, targets = self.inputs[id], self.targets[id]
        for _ in range(self.job.steps):
            batch = torch.randint(0, self.job.rows, (batch_size,))
            yield inputs[batch], targets[batch]


class Server(SyncServerHandler):
    """A server that samples the cohorts of the job."""

    work: Work

    def sample_clients(self) -> list[int]:
        """Return the cohort of this round."""
        return self.work.cohort(self.round)


class Pipeline(StandalonePipeline):
    """The pipeline without evaluation."""

    def evaluate(self) -> None:
        """Do nothing."""


class FedLab:
    """Rounds of the pipeline."""

    def __init__(self, work: Work) -> None:
        job, model = work.job, started(work)
        trainer = SGDSerialClientTrainer(model, job.clients)
        trainer.setup_dataset(Drawn(work))
        trainer.setup_optim(epochs=1, batch_size=job.batch, lr=LEARNING_RATE)
        trainer.criterion = loss_of(job.model)
        self.server = Server(model, global_round=0, sample_ratio=job.cohort / job.clients)
        self.server.work = work
        self.pipeline = Pipeline(self.server, trainer)

    def run(self, rounds: int) -> None:
        """Run rounds."""
        self.server.global_round += rounds
        self.pipeline.main()

    def weights(self) -> list[np.ndarray]:
        """Return the server's weights."""
        return [self.server.model_parameters.numpy()]


if __name__ == "__main__":
    serve(FedLab, "fedlab", "torch")
