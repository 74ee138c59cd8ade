"""Flower's simulation engine on Ray, with one worker: ``FedAvg`` of the ServerApp, without evaluation.

Every ``run`` starts a simulation of its own, so that an idle one takes no time from the other peers. The processor time
is that of all its processes (the server, Ray's daemons, the worker), from the end of the first rounds to the end of the
last; starting up does not count.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

import flower_client
from jobs import Work
from protocol import WARM_UP, serve

TICK = os.sysconf("SC_CLK_TCK")


def tree_seconds() -> float:
    """Return the processor time of this process and of all below it, with those that have ended."""
    parents, spent = {}, {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has just ended
        process = int(path.parent.name)
        parents[process], spent[process] = int(fields[1]), sum(map(int, fields[11:15]))
    below = {os.getpid()}
    while more := {process for process, parent in parents.items() if parent in below} - below:
        below |= more
    return sum(spent[process] for process in below) / TICK


class Timed(FedAvg):
    """FedAvg on the cohorts of a job, which notes the processor time at the end of two rounds."""

    def __init__(self, work: Work, noted: tuple[int, int]) -> None:
        super().__init__(fraction_evaluate=0.0)
        self.work, self.noted = work, noted
        self.notes = [tree_seconds()] if 0 in noted else []

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Send the weights to the clients of the cohort, with their numbers."""
        nodes = sorted(grid.get_node_ids())
        for client in self.work.cohort(server_round - 1):
            content = RecordDict({"arrays": arrays, "config": ConfigRecord({"client": client})})
            yield Message(content=content, message_type=MessageType.TRAIN, dst_node_id=nodes[client])

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Average the replies; all clients must have answered."""
        replies = list(replies)
        if len(replies) != self.work.job.cohort or any(reply.has_error() for reply in replies):
            raise RuntimeError(f"Only some of {self.work.job.cohort} clients answered.")
        result = super().aggregate_train(server_round, replies)
        if server_round in self.noted:
            self.notes.append(tree_seconds())
        return result


class Flower:
    """Simulations of Flower."""

    def __init__(self, work: Work) -> None:
        os.environ[flower_client.JOB_FILE] = sys.argv[1]
        logging.getLogger("flwr").setLevel(logging.ERROR)
        self.work = work
        self.final: ArrayRecord | None = None

    def run(self, rounds: int) -> float:
        """Run a simulation; return the processor time of its last ``rounds`` rounds."""
        job = self.work.job
        skipped = 0 if job.check else WARM_UP
        strategy = Timed(self.work, (skipped, skipped + rounds))
        server = ServerApp()

        @server.main()
        def main(grid: Grid, context: Context) -> None:
            while len(list(grid.get_node_ids())) < job.clients:
                time.sleep(0.1)
            start = ArrayRecord({name: torch.from_numpy(value.copy()) for name, value in self.work.start.items()})
            self.final = strategy.start(grid, start, num_rounds=skipped + rounds).arrays

        resources = {"init_args": {"num_cpus": 1}, "client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
        run_simulation(server, flower_client.app, job.clients, backend_config=resources)
        begun, ended = strategy.notes
        return ended - begun

    def weights(self) -> list[np.ndarray]:
        """Return the server's weights."""
        return [value.numpy() for value in self.final.to_torch_state_dict().values()]


if __name__ == "__main__":
    serve(Flower, "flwr", "ray", "torch")
