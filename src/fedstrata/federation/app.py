"""The entry points that Flower starts: ``server_app`` on the server, ``client_app`` on every node."""

from __future__ import annotations

import json
import secrets
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from fedstrata.clients.faults import Faults
from fedstrata.core.errors import FedstrataError
from fedstrata.core.files import write_atomically
from fedstrata.experiments.build import Experiment, plan_of, schema_of
from fedstrata.experiments.config import Config, parse
from fedstrata.federation.experiment import check_config, error_file, import_modules, tables_for_nodes
from fedstrata.federation.node.answer import Answers
from fedstrata.federation.records import MOST_BYTES, from_records, to_records
from fedstrata.federation.secure import exclusions
from fedstrata.federation.server.data import Say, data_of_nodes
from fedstrata.federation.server.engine import Federated
from fedstrata.federation.server.evaluation import FederatedEvaluation
from fedstrata.federation.server.nodes import Nodes, Roster
from fedstrata.federation.server.state import ServerState
from fedstrata.federation.server.tables import ask_tables
from fedstrata.federation.transport import FlowerTransport, Transport
from fedstrata.training.callbacks import Callback, ShowProgress
from fedstrata.training.run import Run
from fedstrata.training.train import train

server_app = ServerApp()
client_app = ClientApp()


@client_app.query()
def query(message: Message, context: Context) -> Message:
    """Answer one message from the server, on a stock SuperNode."""
    packet = from_records(message.content, MOST_BYTES)
    answer = Answers(context.node_config).answer(packet, str(context.run_config["experiment"]))
    return Message(to_records(answer), reply_to=message)


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the experiment of the run configuration, or describe the nodes' tables."""
    settings = context.run_config
    if "describe" in settings:
        write_description(grid, settings)
        return
    out = Path(str(settings["out"])).expanduser()
    if not out.is_absolute():
        raise FedstrataError(f"The run directory must be an absolute path: --run-config 'out=\"/...\"'. Got '{out}'.")
    error_file(out).unlink(missing_ok=True)
    try:
        import_modules(settings.get("import", ""))
        config = parse(tomllib.loads(str(settings["experiment"])), "the experiment of the federation")
        run = serve(
            config,
            Roster.read(str(settings["nodes"])),
            FlowerTransport(grid, (config.faults or Faults()).timeout + 60.0),
            out,
            resume=bool(settings.get("resume", False)),
            server_data=Path(str(settings["server-data"])) if settings.get("server-data") else None,
            callbacks=[ShowProgress()],
            say=say,
        )
    except FedstrataError as error:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(error_file(out), str(error).encode())
        raise
    print(run, flush=True)


def write_description(grid: Grid, settings: Mapping[str, Any]) -> None:
    """Write what the nodes tell of their tables, or why they do not, to the file that the settings name."""
    out = Path(str(settings["out"]))
    try:
        config = parse(tomllib.loads(str(settings["experiment"])), "the experiment of the federation")
        policy = config.faults or Faults()
        transport = FlowerTransport(grid, policy.timeout + 60.0)
        nodes = Nodes(transport, Roster.read(str(settings["nodes"])), secrets.token_hex(16), policy)
        told = ask_tables(nodes, schema_of(config), int(settings["describe"]), say)
    except FedstrataError as error:
        write_atomically(out, json.dumps({"error": str(error), "exit_code": error.exit_code}).encode())
        raise
    write_atomically(out, json.dumps(told).encode())


def say(line: str) -> None:
    """Write a line to the log of the run."""
    print(line, file=sys.stderr, flush=True)


def serve(
    config: Config,
    roster: Roster,
    transport: Transport,
    out: Path,
    resume: bool,
    server_data: Path | None = None,
    callbacks: Sequence[Callback] = (),
    say: Say = lambda _: None,
) -> Run:
    """Run an experiment on the server, with a client on each node; ``out`` is an ordinary run directory."""
    check_config(config, len(roster))
    policy = config.faults or Faults()
    state = ServerState.of(out, resume)
    nodes = Nodes(transport, roster, state.run, policy)
    data = replace(data_of_nodes(nodes, state, server_data, say, config), plan=plan_of(config))
    experiment = Experiment(config, data)
    if config.federation.secure:
        exclusions.check_problem(experiment.problem)
    tables = tables_for_nodes(config)
    own = {"federation": tables.get("federation", {}) | {"nodes": list(roster.names)}}
    return train(
        experiment.problem,
        experiment.data,
        experiment.algorithm,
        settings=config.settings.replace(faults=policy),
        evaluate=FederatedEvaluation(config, nodes, experiment.data, state, say),
        out=out,
        resume=resume,
        callbacks=callbacks,
        config=tables | own | {"algorithm": experiment.algorithm.to_table()},
        engine=lambda side, channel, _: Federated(side, channel, policy, nodes, state, config.federation),
    )
