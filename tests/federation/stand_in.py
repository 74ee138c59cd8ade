"""A federation without a network: messages become Flower's records and go to nodes in this process.

Everything that a node's worker does with a message is done here too; only the network and the processes are missing.
"""

from __future__ import annotations

import dataclasses
import json
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Metadata
from flwr.app.message import make_message
from flwr.supercore.date import now
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents

import fedstrata as fs
from fedstrata.experiments.build import Experiment
from fedstrata.experiments.config import Config, parse
from fedstrata.experiments.overlay import merge
from fedstrata.federation import keys, wire
from fedstrata.federation.app import serve
from fedstrata.federation.deploy import write_app, write_node_data
from fedstrata.federation.node.answer import Answers
from fedstrata.federation.packet import Packet
from fedstrata.federation.records import MOST_BYTES, from_records, to_records
from fedstrata.federation.server.nodes import Roster
from fedstrata.federation.transport import FLOWER
from fedstrata.federation.wire import Reply
from fedstrata.training.callbacks import Callback

Tables = dict[str, Any]

DIGITS: Tables = {
    "data": {
        "name": "digits",
        "subset": 240,
        "clients": 3,
        "partition": {"name": "dirichlet", "alpha": 1.0, "min_samples": 10},
    },
    "model": {"name": "logreg"},
    "train": {"rounds": 3, "batch_size": 8, "threads": 1},
}
CANCER: Tables = {**DIGITS, "data": {**DIGITS["data"], "name": "breast_cancer"}}
AUC: Tables = {"problem": {"name": "auc", "score": "none"}}
FEDAVG: Tables = {"algorithm": {"name": "fedavg", "steps": 2}, "train": {"rounds": 2}, "faults": {"timeout": 0.3}}
SCAFFOLD: Tables = {**FEDAVG, "algorithm": {"name": "scaffold", "steps": 2}}
HELD_OUT: Tables = {"algorithm": {"name": "fedavg", "lr": 0.1}, "data": {"holdout": 0.3}, "train": {"rounds": 2}}


def made(base: Tables, *overrides: Tables) -> Config:
    """Build a configuration from tables merged in order."""
    for tables in overrides:
        base = merge(base, tables)
    return parse(base, "a test")


def simulated(config: Config, callbacks: Sequence[Callback] = (), faults: fs.Faults | None = None) -> fs.Run:
    """Run an experiment with clients in this process."""
    built = Experiment(config)
    settings = config.settings if faults is None else config.settings.replace(faults=faults)
    return fs.train(
        built.problem, built.data, built.algorithm, settings=settings, evaluate=built.evaluation, callbacks=callbacks
    )


@dataclass
class Sent:
    """A message to a node: the text of its header, and its arrays."""

    node: int
    text: str
    arrays: list[np.ndarray]

    @property
    def header(self) -> dict[str, Any]:
        table: dict[str, Any] = json.loads(self.text)
        return table

    def is_work(self, round: int) -> bool:
        """Whether it asks for work in a round, counted from 0."""
        return self.header["kind"] == "work" and self.header["round"] == round


Change = Callable[["Site", Sent, Reply], Reply | None]


@dataclass
class Site:
    """The nodes of a federation, each with its own folder, and the transport to them.

    change:    replaces the reply of a node by another, or by none.
    offline:   the nodes that are not connected.
    scrambled: whether the node that was asked last answers first.
    files:     the tables of the nodes, where they are files.
    settings:  further settings of every node.
    """

    folder: Path
    config: Config
    names: list[str]
    public: list[str]
    experiment: str
    change: Change | None = None
    offline: set[int] = field(default_factory=set)
    scrambled: bool = False
    files: Sequence[Path] = ()
    settings: dict[str, str] = field(default_factory=dict)
    sent: list[Sent] = field(default_factory=list)
    replies: list[Reply] = field(default_factory=list)
    waiting: dict[str, Reply | None] = field(default_factory=dict)
    workers: dict[int, Answers] = field(default_factory=dict)

    def here(self, node: int) -> dict[str, str]:
        """The configuration of a node."""
        own = self.folder / "nodes" / self.names[node]
        data = self.files[node] if self.files else own / "data"
        return {"data": str(data), "key": str(own / "node.key"), "state": str(own / "state"), **self.settings}

    def again(self, **changes: Any) -> Site:
        """The same nodes after a restart, with only what is on their disks."""
        return dataclasses.replace(self, sent=[], replies=[], waiting={}, workers={}, **changes)

    # --- the transport ---

    def nodes(self) -> Mapping[str, int]:
        return {key: 100 + k for k, key in enumerate(self.public) if k not in self.offline}

    def send(self, node: int, text: str, arrays: Sequence[np.ndarray]) -> str:
        sent = Sent(node - 100, text, list(arrays))
        self.sent.append(sent)
        reply = self.answered(sent)
        self.replies.append(reply)
        message_id = f"message {len(self.sent)}"
        self.waiting[message_id] = reply if self.change is None else self.change(self, sent, reply)
        return message_id

    def fetch(self, message_id: str, node: int, limit: int) -> Reply | None:
        if self.scrambled and message_id != next(reversed(self.waiting)):
            return None
        return self.waiting.pop(message_id) if self.waiting[message_id] is not None else None

    # --- a node ---

    def answered(self, sent: Sent) -> Reply:
        """The node's answer, as Flower would deliver it; a node keeps its worker from message to message."""
        packet = through_flower(Reply(sent.text, b"", tuple(sent.arrays)).packet(), sent.node)
        if sent.node not in self.workers:
            self.workers[sent.node] = Answers(self.here(sent.node))
        try:
            return Reply.of(through_flower(self.workers[sent.node].answer(packet, self.experiment), sent.node))
        except Exception as error:
            return Reply(error=f"failed ({type(error)}:<'{error}'>)")

    def signed(self, node: int, header: Any, arrays: Sequence[np.ndarray] = ()) -> Reply:
        """A reply with any header, text or table, signed with the node's true key."""
        text = header if isinstance(header, str) else json.dumps(header)
        content = wire.digest(text, arrays)
        return Reply(text, keys.sign(Path(self.here(node)["key"]), content), tuple(arrays))

    # --- a run ---

    @property
    def roster(self) -> Roster:
        """Names and public keys of the nodes."""
        return Roster.read(json.dumps(dict(zip(self.names, self.public, strict=True))))

    def serve(
        self,
        out: Path | None = None,
        resume: bool = False,
        callbacks: Sequence[Callback] = (),
        pooled: bool = True,
        say: Callable[[str], None] = lambda _: None,
    ) -> fs.Run:
        """Run the experiment with these nodes."""
        return serve(
            parse(tomllib.loads(self.experiment), "the experiment"),
            self.roster,
            self,
            self.folder / "run" if out is None else out,
            resume,
            self.folder / "server" / "data" if pooled else None,
            callbacks,
            say,
        )

    def faults(self, out: Path | None = None) -> list[dict[str, Any]]:
        """The clients that were left out, according to the run directory."""
        file = (self.folder / "run" if out is None else out) / "faults.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def through_flower(packet: Packet, node: int) -> Packet:
    """A packet as it arrives after it was a message of Flower's."""
    about = Metadata(1, "a message", FLOWER, 100 + node, "", "0", now().timestamp(), 100.0, "query")
    message = make_message(metadata=about, content=to_records(packet))
    parts = {name: part.deflate() for name, part in get_all_nested_objects(message).items()}
    arrived: Any = inflate_object_from_contents(message.object_id, parts)
    return from_records(arrived.content, MOST_BYTES)


def headed(reply: Reply, **changes: Any) -> dict[str, Any]:
    """The header of a reply with some entries changed; None removes one."""
    table = json.loads(reply.text) | changes
    return {k: v for k, v in table.items() if v is not None}


def site(folder: Path, config: Config, data: fs.FederatedData | None = None) -> Site:
    """Write the data and keys of the nodes of an experiment."""
    data = Experiment(config).data if data is None else data
    names = [f"node{k}" for k in range(data.clients)]
    write_node_data(data, folder, names)
    return _site(folder, config, names)


def site_of_files(folder: Path, config: Config, files: Sequence[Path], **settings: str) -> Site:
    """Write the keys of nodes whose data are tables in files; the nodes are named like these."""
    nodes = _site(folder, config, [file.stem for file in files])
    return dataclasses.replace(nodes, files=files, settings=settings)


def _site(folder: Path, config: Config, names: list[str]) -> Site:
    public = [keys.make_key(folder / "nodes" / name / "node.key") for name in names]
    plain = config.data.replace(holdout=0.0, support=0.0)
    ready = config.replace(data=plain)
    write_app(ready, folder / "app", dict(zip(names, public, strict=True)), folder / "run")
    project = tomllib.loads((folder / "app" / "pyproject.toml").read_text())
    return Site(folder, config, names, public, project["tool"]["flwr"]["app"]["config"]["experiment"])
