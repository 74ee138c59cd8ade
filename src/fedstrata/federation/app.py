"""What Flower starts: ``server_app`` on the server, ``client_app`` on every node."""

from __future__ import annotations

import json
import sys
import tomllib
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from fedstrata.clients.faults import Faults
from fedstrata.core.errors import FedstrataError
from fedstrata.core.files import write_atomically
from fedstrata.experiments.config import import_file, parse
from fedstrata.federation import keys, node
from fedstrata.federation.server import SERVER, Nodes, Reply, serve
from fedstrata.training.callbacks import ShowProgress

server_app = ServerApp()
client_app = ClientApp()


class FlowerPost:
    """Flower's messages as the server wants them."""

    def __init__(self, grid: Grid, patience: float) -> None:
        self.grid, self.patience = grid, patience

    def nodes(self) -> Mapping[str, int]:
        """Return the number under which each connected node can be reached, by its public key."""
        online = set(self.grid.get_node_ids())
        found: dict[str, int] = {}
        for info in self.grid.get_nodes():
            if info.public_key and info.node_id in online:
                with suppress(FedstrataError):  # a key of another kind is none of ours
                    found[keys.same_form(info.public_key)] = info.node_id
        return found

    def send(self, node: int, text: str, arrays: Sequence[np.ndarray]) -> str:
        """Send a message to a node; return what to ask for its reply with, nothing when it cannot be sent."""
        message = Message(_records(text, b"", arrays), dst_node_id=node, message_type="query", ttl=self.patience)
        return str(next(iter(self.grid.push_messages([message])), "") or "")

    def fetch(self, ticket: str, node: int) -> Reply | None:
        """Return the reply to a message, if it is there; only one from that node.

        Asked for one at a time: what a reply says about itself is written by the node.
        """
        for message in self.grid.pull_messages([ticket]):
            if message.has_error():
                return Reply(error=f"failed ({message.error.reason or message.error.code})")
            said = message.metadata.src_node_id, message.metadata.reply_to_message_id
            if said != (node, ticket) and said[0] != SERVER:
                return Reply(error="forged: the reply claims to be from another node, or to another message")
            try:
                return _reply(message.content)
            except Exception as error:  # whatever a node sends
                return Reply(error=f"sent something that is not an answer ({type(error).__name__})")
        return None


def _records(text: str, signature: bytes, arrays: Sequence[np.ndarray]) -> RecordDict:
    named = {f"{i:06d}": Array(a) for i, a in enumerate(arrays)}
    header = ConfigRecord({"text": text, "signature": signature})
    return RecordDict({"header": header, "arrays": ArrayRecord(named)})


def _reply(content: RecordDict) -> Reply:
    text, signature, arrays = _opened(content)
    return Reply(text, signature, tuple(arrays))


def _opened(content: RecordDict) -> tuple[str, bytes, list[np.ndarray]]:
    header: Any = content["header"]
    records: Any = content["arrays"]
    text, signature = header["text"], header["signature"]
    if not isinstance(text, str) or not isinstance(signature, bytes):
        raise TypeError("a header holds a text and a signature")
    arrays = [records[name].numpy() for name in sorted(records)]
    if any(type(array) is not np.ndarray for array in arrays):
        raise TypeError("a record holds plain arrays")
    return text, signature, arrays


@client_app.query()
def query(message: Message, context: Context) -> Message:
    """Do one thing that the server asks of this node's client, and reply with arrays and JSON."""
    text, _, arrays = _opened(message.content)
    table: dict[str, Any] = json.loads(text)
    known = {f.name for f in fields(node.Call)}
    call = node.Call(**{k: v for k, v in table.items() if k in known})
    here = context.node_config
    for module in filter(None, str(here.get("import", "")).split(":")):
        import_file(Path(module))
    try:
        header, out = node.answer(call, table.get("form"), arrays, str(context.run_config["experiment"]), here)
    except Exception as error:
        traceback.print_exc()  # all of it to the node's log; to the server only words of our own, or the error's kind
        told = str(error) if isinstance(error, FedstrataError) else type(error).__name__
        header, out = {"error": told}, []
    header |= {"nonce": call.nonce}
    said, signature = node.signed_reply(header, out, here)
    return Message(_records(said, signature, out), reply_to=message)


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the experiment of the run configuration."""
    settings = context.run_config
    out = Path(str(settings["out"])).expanduser()
    if not out.is_absolute():
        raise FedstrataError(f"The run directory must be a full path, --run-config 'out=\"/...\"'. Got {str(out)!r}.")
    failed = out.with_name(out.name + ".error.txt")
    failed.unlink(missing_ok=True)
    for module in filter(None, str(settings.get("import", "")).split(":")):
        import_file(Path(module))
    try:
        config = parse(tomllib.loads(str(settings["experiment"])), "the experiment of the federation")
        server_data = Path(str(settings["server-data"])) if settings.get("server-data") else None
        run = serve(
            config,
            Nodes.read(str(settings["nodes"])),
            FlowerPost(grid, (config.faults or Faults()).timeout + 60.0),
            out,
            bool(settings.get("resume", False)),
            server_data,
            [ShowProgress()],
            lambda line: print(line, file=sys.stderr, flush=True),
        )
    except FedstrataError as error:
        failed.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(failed, str(error).encode())
        raise
    print(run, flush=True)
