"""Flower's ClientApp: local SGD by hand on the client that the message names.

A file of its own, so that Ray's workers import it instead of getting a copy with every message.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from jobs import LEARNING_RATE, Work, read
from torch_models import loss_of, started, tensors

JOB_FILE = "PEERS_JOB_FILE"
"""The environment variable with the path of the job's file."""

app = ClientApp()


@functools.cache
def loaded() -> tuple[Work, torch.nn.Module, torch.Tensor, torch.Tensor]:
    """Read the job and build its model, once per process."""
    torch.set_num_threads(1)
    work = read(Path(os.environ[JOB_FILE]))
    return work, started(work), *tensors(work)


@app.train()
def train(message: Message, context: Context) -> Message:
    """Take the steps of a round."""
    work, model, inputs, targets = loaded()
    client, job, loss = message.content["config"]["client"], work.job, loss_of(work.job.model)
    inputs, targets = inputs[client], targets[client]
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    optimiser = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    for _ in range(job.steps):
        batch = torch.randint(0, job.rows, (job.batch,))
        optimiser.zero_grad()
        loss(model(inputs[batch]), targets[batch]).backward()
        optimiser.step()
    records = {"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord({"num-examples": job.rows})}
    return Message(content=RecordDict(records), reply_to=message)
