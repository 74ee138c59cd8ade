"""What Flower starts: ``server_app`` on the server, ``client_app`` on every node."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from fedstrata.clients.faults import Faults
from fedstrata.core.errors import FedstrataError
from fedstrata.core.files import write_atomically
from fedstrata.experiments.config import import_file, parse
from fedstrata.federation.node.answer import reply_to
from fedstrata.federation.post import FlowerPost, from_records, to_records
from fedstrata.federation.server.roster import Roster
from fedstrata.federation.server.serve import serve
from fedstrata.training.callbacks import ShowProgress

server_app = ServerApp()
client_app = ClientApp()


@client_app.query()
def query(message: Message, context: Context) -> Message:
    """Do one thing that the server asks of this node's client."""
    asked = from_records(message.content)
    reply = reply_to(asked.text, list(asked.arrays), str(context.run_config["experiment"]), context.node_config)
    return Message(to_records(reply), reply_to=message)


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the experiment of the run configuration."""
    settings = context.run_config
    out = Path(str(settings["out"])).expanduser()
    if not out.is_absolute():
        raise FedstrataError(f"The run directory must be an absolute path: --run-config 'out=\"/...\"'. Got '{out}'.")
    failure = out.with_name(out.name + ".error.txt")
    failure.unlink(missing_ok=True)
    try:
        for module in filter(None, str(settings.get("import", "")).split(":")):
            import_file(Path(module))
        config = parse(tomllib.loads(str(settings["experiment"])), "the experiment of the federation")
        server_data = Path(str(settings["server-data"])) if settings.get("server-data") else None
        run = serve(
            config,
            Roster.read(str(settings["nodes"])),
            FlowerPost(grid, (config.faults or Faults()).timeout + 60.0),
            out,
            bool(settings.get("resume", False)),
            server_data,
            [ShowProgress()],
            lambda line: print(line, file=sys.stderr, flush=True),
        )
    except FedstrataError as error:
        failure.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(failure, str(error).encode())
        raise
    print(run, flush=True)
