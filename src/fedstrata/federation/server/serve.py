"""A run of a federation, on the server."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fedstrata.clients.faults import Faults
from fedstrata.experiments.build import Experiment
from fedstrata.experiments.config import Config
from fedstrata.federation.experiment import check_config, split_of_nodes
from fedstrata.federation.messages import Post
from fedstrata.federation.server.desk import Desk
from fedstrata.federation.server.engine import Federated
from fedstrata.federation.server.evaluation import FederatedEvaluation
from fedstrata.federation.server.meeting import Say, meet
from fedstrata.federation.server.notes import Notes
from fedstrata.federation.server.roster import Roster
from fedstrata.training.callbacks import Callback
from fedstrata.training.run import Run
from fedstrata.training.train import train


def serve(
    config: Config,
    roster: Roster,
    post: Post,
    out: Path,
    resume: bool,
    server_data: Path | None = None,
    callbacks: Sequence[Callback] = (),
    say: Say = lambda _: None,
) -> Run:
    """Run an experiment with a client on each node; the run directory ``out`` is like that of any other run."""
    check_config(config, len(roster))
    policy = config.faults or Faults()
    notes = Notes.of(out, resume)
    desk = Desk(post, roster, notes.run, policy)
    experiment = Experiment(config, meet(desk, notes, server_data, say))
    tables = config.to_toml("compare", "data", "plot", "pretrain", "tune", "variants")
    tables |= {"algorithm": experiment.algorithm.to_table(), "federation": {"nodes": list(roster.names)}}
    tables |= {"data": split_of_nodes(config)}
    return train(
        experiment.problem,
        experiment.data,
        experiment.algorithm,
        settings=config.settings.replace(faults=policy),
        evaluate=FederatedEvaluation(config, desk, experiment.data, notes, say),
        out=out,
        resume=resume,
        callbacks=callbacks,
        config=tables,
        engine=lambda setting, channel, _: Federated(setting, channel, policy, desk, notes),
    )
