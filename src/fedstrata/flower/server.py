"""The server of a federation: the same training loop, with clients on nodes elsewhere."""

from __future__ import annotations

import dataclasses
import json
import math
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils._pytree import tree_leaves

from fedstrata.callbacks import Callback
from fedstrata.channels import Changes, Channel, entries, unpacked
from fedstrata.checkpoint import write_atomically
from fedstrata.clients.base import Answer, Clients, Weighting, Work, for_each
from fedstrata.clients.client import Setting
from fedstrata.clients.questions import QUESTIONS
from fedstrata.config import Config, Experiment
from fedstrata.data import intake
from fedstrata.data.federated import FederatedData, Part
from fedstrata.errors import FedstrataError, InputError, invalid
from fedstrata.faults import Faults, QuorumError
from fedstrata.flower import keys, wire
from fedstrata.flower.node import Call
from fedstrata.flower.wire import Refused
from fedstrata.identity import describe
from fedstrata.metrics import Evaluation, Measures
from fedstrata.problem import Problem
from fedstrata.schedules import Clock
from fedstrata.train import Run, train

POLL = 0.2
"""Seconds between two looks for replies."""

SERVER = 1
"""The number under which Flower itself answers for a node that cannot."""


@dataclass(frozen=True)
class Reply:
    """What came back from a node: a header and arrays, or an error in words."""

    text: str = ""
    signature: bytes = b""
    arrays: tuple[np.ndarray, ...] = ()
    error: str = ""


class Post(Protocol):
    """How messages reach nodes: Flower's, or a stand-in for tests."""

    def nodes(self) -> Mapping[str, int]:
        """Return the number under which each connected node can be reached, by its public key."""

    def send(self, node: int, text: str, arrays: Sequence[np.ndarray]) -> str:
        """Send a message to a node; return what to ask for its reply with, nothing when it cannot be sent."""

    def fetch(self, ticket: str, node: int) -> Reply | None:
        """Return the reply to a message, if it is there; only one from that node."""


@dataclass(frozen=True)
class Nodes:
    """Who may take part: names and public keys, in the clients' order."""

    names: tuple[str, ...]
    public: tuple[str, ...]

    @staticmethod
    def read(text: str) -> Nodes:
        """Build from JSON, ``{"name": "public key", ...}``."""
        try:
            table = json.loads(text)
        except json.JSONDecodeError as error:
            raise InputError(f"The nodes of the federation must be JSON, names and public keys: {error}") from None
        if not isinstance(table, dict) or not table:
            raise invalid("nodes of the federation", table, "names with public keys, at least one")
        public = tuple(keys.same_form(str(key)) for key in table.values())
        if len(set(public)) < len(public):
            raise InputError("Two nodes of the federation have the same public key. Each needs its own.")
        return Nodes(tuple(table), public)


class FlowerClients(Clients):
    """Asks nodes, one client on each; what cannot be used of their replies is left out and named."""

    def __init__(
        self,
        setting: Setting,
        rounds: int,
        participation: int | float,
        weighting: Weighting,
        channel: Channel,
        faults: Faults | None,
        *,
        post: Post,
        nodes: Nodes,
        run: str,
    ) -> None:
        super().__init__(setting, rounds, participation, weighting, channel, faults or Faults())
        self._desk = Desk(post, nodes, run, self._policy or Faults())
        self._saved = -1

    def saved(self, round: int) -> None:
        """Tell the nodes, with the next message, that nobody will go back behind this round."""
        self._saved = round

    def _answers(
        self, work: Work, message: tuple[Any, ...], clock: Clock, exchange: int, places: np.ndarray, attempt: int
    ) -> Iterator[Answer]:
        name = getattr(work, "__name__", "")
        question = QUESTIONS.get(name) is work
        base = Call(
            kind="work",
            run=self._desk.run,
            nonce="",
            clients=self.total,
            classes=self.classes,
            round=self._round,
            exchange=exchange,
            attempt=attempt,
            iteration=clock.iteration,
            saved=self._saved,
            work=f"question:{name}" if question else name,
            learned=None if self.learned is None else self.learned.tolist(),
        )
        asked = {int(self.cohort[place]): int(place) for place in places.tolist()}  # a client drawn twice is asked once
        form, arrays = wire.taken_apart(message)
        size = sum(a.nbytes for a in arrays) + self.problem.x0.nbytes
        limit = 16 * size + (1 << 20) if self._desk.faults.max_bytes is None else self._desk.faults.max_bytes
        replies, refused = self._desk.ask(base, form, arrays, sorted(asked), limit)
        for client, (kind, detail) in refused.items():
            self._fault(client, exchange, attempt, kind, detail)
        found: dict[int, Answer] = {}
        forms: dict[int, str] = {}
        for client, (header, received) in replies.items():
            try:
                value, sent, form_of = self._opened(work, message, header, received)
            except Refused as error:
                self._fault(client, exchange, attempt, error.kind, error.detail)
                continue
            where = np.flatnonzero(self.cohort == client)
            found[client] = Answer(where, _repeated(value, len(where)), *_counted(header), sent * len(where))
            forms[client] = form_of
        usual = max(sorted(set(forms.values())), key=list(forms.values()).count, default="")
        for client, answer in found.items():
            if forms[client] != usual:
                self._fault(client, exchange, attempt, "shape", "answered with another shape than most")
            else:
                yield answer

    def _opened(
        self, work: Work, message: tuple[Any, ...], header: dict[str, Any], arrays: Sequence[np.ndarray]
    ) -> tuple[Any, int, str]:
        """Return a client's answer [1, ...], the bytes that were sent, and its form."""
        value = wire.put_together(header.get("form"), arrays)
        sent = sum(a.nbytes for a in arrays)
        form = header.get("form")
        device = self.problem.x0.device
        if self.channel.on_clients and self._passes(work):
            if not header.get("packed"):
                raise Refused("type", "answered around the channel")
            form = header.get("like")
            like = _zeros(form)
            changes = Changes(work, for_each(message, 1), like)
            n = changes.matrix.shape[1]
            value = changes.answers(_unpacked(self.channel, header.get("names"), value, n, changes.matrix.dtype))
        leaves = tree_leaves(value)
        for leaf in leaves:
            if not isinstance(leaf, torch.Tensor) or leaf.dim() == 0 or len(leaf) != 1:
                raise Refused("shape", "answered with something that is not one client's")
        value = _to(value, device)
        return value, sent, json.dumps(wire.forms_only(form), sort_keys=True)

    def _noise_names(self) -> tuple[int, ...] | None:
        return None  # nobody may foretell the noise of a real federation


class Desk:
    """Sends calls to nodes, and takes their replies in: who they are from, whether they answer what was asked."""

    def __init__(self, post: Post, nodes: Nodes, run: str, faults: Faults) -> None:
        self.post, self.nodes, self.run, self.faults = post, nodes, run, faults

    def ask(
        self, base: Call, form: Any, arrays: Sequence[np.ndarray], clients: Sequence[int], limit: int
    ) -> tuple[dict[int, tuple[dict[str, Any], tuple[np.ndarray, ...]]], dict[int, tuple[str, str]]]:
        """Ask these clients; return their replies, and of the others what was wrong: (kind, detail)."""
        connected = self.post.nodes()
        waiting: dict[int, tuple[str, int, Call]] = {}
        refused: dict[int, tuple[str, str]] = {}
        for client in clients:
            number = connected.get(self.nodes.public[client])
            call = replace(base, client=client, nonce=secrets.token_hex(32))
            text = json.dumps({**dataclasses.asdict(call), "form": form})
            ticket = "" if number is None else self.post.send(number, text, arrays)
            if number is None or not ticket:
                refused[client] = ("silent", "is not connected")
            else:
                waiting[client] = (ticket, number, call)
        replies: dict[int, tuple[dict[str, Any], tuple[np.ndarray, ...]]] = {}
        end = time.monotonic() + self.faults.timeout
        while waiting:
            for client, (ticket, number, call) in list(waiting.items()):
                reply = self.post.fetch(ticket, number)
                if reply is None:
                    continue
                del waiting[client]
                try:
                    replies[client] = self._checked(reply, client, call, limit)
                except Refused as error:
                    refused[client] = (error.kind, error.detail)
            if waiting and time.monotonic() >= end:
                break
            if waiting:
                time.sleep(POLL)
        for client in waiting:
            refused[client] = ("silent", f"did not answer within {self.faults.timeout:g} s")
        return replies, refused

    def _checked(
        self, reply: Reply, client: int, call: Call, limit: int
    ) -> tuple[dict[str, Any], tuple[np.ndarray, ...]]:
        """Return a reply that is the node's own, and to this call; raise :class:`Refused` otherwise."""
        if reply.error:
            forged = reply.error.startswith("forged")
            raise Refused("forged" if forged else "error", reply.error)
        size = sum(a.nbytes for a in reply.arrays) + len(reply.text)
        if size > limit:
            raise Refused("size", f"answered with {size:,} bytes, more than {limit:,}")
        content = wire.digest(reply.text, reply.arrays)
        if not keys.signed(self.nodes.public[client], reply.signature, content):
            raise Refused("forged", "answered without its signature")
        try:
            header = json.loads(reply.text)
        except json.JSONDecodeError:
            raise Refused("type", "answered with a header that is not JSON") from None
        if not isinstance(header, dict):
            raise Refused("type", "answered with a header that is not a table")
        if header.get("nonce") != call.nonce:
            raise Refused("stale", "answered something that was asked before")
        return header, reply.arrays


# --- a run ------------------------------------------------------------------------------------------------------------


def serve(
    config: Config,
    nodes: Nodes,
    post: Post,
    out: Path,
    resume: bool,
    server_data: Path | None = None,
    callbacks: Sequence[Callback] = (),
    say: Callable[[str], None] = lambda _: None,
) -> Run:
    """Run an experiment with clients on nodes; the run directory ``out`` is like that of any other run."""
    check_config(config)
    settings = config.settings()
    faults = settings["faults"] or Faults()
    run = _run_name(out, resume)
    desk = Desk(post, nodes, run, faults)
    data = _met(desk, config, server_data, say)
    experiment = Experiment(config, data)
    tables = config.to_toml("compare", "data", "plot", "pretrain", "tune", "variants")
    tables |= {"algorithm": describe(experiment.algorithm), "federation": {"nodes": list(nodes.names)}}
    evaluation = NodesEvaluation(desk, config, data) if data.test is None else PooledEvaluation(config)

    def engine(
        setting: Setting,
        rounds: int,
        participation: int | float,
        weighting: Weighting,
        channel: Channel,
        faults: Faults | None,
    ) -> Clients:
        how = setting, rounds, participation, weighting, channel, faults
        return FlowerClients(*how, post=post, nodes=nodes, run=run)

    return train(
        experiment.problem,
        experiment.data,
        experiment.algorithm,
        **{**settings, "faults": faults},
        evaluate=evaluation,
        out=out,
        resume=resume,
        callbacks=callbacks,
        config=tables,
        engine=engine,
    )


def check_config(config: Config) -> None:
    """Refuse what a federation cannot do."""
    if config.brings_data:
        raise InputError(f"The problem {config.problem.name} brings its own data: a federation has the nodes'.")
    if config.pretrain.rounds:
        raise InputError("A federation does not pre-train: leave out [pretrain].")


def _run_name(out: Path, resume: bool) -> str:
    """Return the name under which nodes keep what belongs to this run; a resumed run has the same."""
    path = out.with_name(out.name + ".federation.json")
    if resume and path.exists():
        return str(json.loads(path.read_text())["run"])
    run = secrets.token_hex(16)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps({"run": run}).encode())
    return run


def _met(desk: Desk, config: Config, server_data: Path | None, say: Callable[[str], None]) -> FederatedData:
    """Wait for the nodes, ask what their data look like, and return data of that look for the server to build from."""
    names = desk.nodes.names
    end = time.monotonic() + desk.faults.timeout
    said: set[str] = set()
    while missing := [n for n, key in zip(names, desk.nodes.public, strict=True) if key not in desk.post.nodes()]:
        if set(missing) != said:
            say(f"Waiting for {', '.join(missing)}")
            said = set(missing)
        if time.monotonic() > end:
            raise QuorumError(
                f"Not connected within {desk.faults.timeout:g} s: {', '.join(missing)}. Every node must be there at "
                "the start: see whether it runs, with the key that was registered."
            )
        time.sleep(1.0)
    base = Call(kind="hello", run=desk.run, nonce="", clients=len(names))
    replies, refused = desk.ask(base, [], [], range(len(names)), 1 << 20)
    if refused:
        why = "; ".join(f"{names[k]}: {detail}" for k, (_, detail) in sorted(refused.items()))
        raise FedstrataError(f"Not every node could say what its data look like. {why}")
    told = [replies[k][0] for k in range(len(names))]
    for name, other in zip(names, told, strict=True):
        if (other["shapes"], other["dtypes"]) != (told[0]["shapes"], told[0]["dtypes"]):
            got = f"{other['shapes']} of {other['dtypes']}"
            raise invalid(
                f"data of {name}", got, f"like those of {names[0]}, {told[0]['shapes']} of {told[0]['dtypes']}"
            )
    pairs = zip(told[0]["shapes"], told[0]["dtypes"], strict=True)
    row: Any = tuple(torch.zeros(1, *shape, dtype=wire.DTYPES[dtype]) for shape, dtype in pairs)
    sizes = [max(1, int(other["rows"])) for other in told]
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    rows = torch.zeros(int(offsets[-1]), dtype=torch.int64)  # of one row that stands for all, so sizes cost nothing
    test = None if server_data is None else _pair_in(server_data / "test.npz", row)
    classes = max(int(other["classes"]) for other in told)
    if test is not None and classes:
        classes = max(classes, int(test[1].max()) + 1)
    data = FederatedData(Part(row, rows, offsets), None, test, None, classes, "federation", names)
    auxiliary = None if server_data is None else _pair_in(server_data / "auxiliary.npz", row)
    return data if auxiliary is None else data.with_auxiliary(*auxiliary)


def _pair_in(file: Path, like: intake.Pair) -> intake.Pair | None:
    return intake.pair(*intake.named(intake.read_npz(file), file), str(file), like) if file.exists() else None


class PooledEvaluation:
    """Measures on the server's own test data."""

    measured_on = {"pooled": "test data of the server", "clients": "nothing"}  # noqa: RUF012

    def __init__(self, config: Config) -> None:
        table = config.evaluate
        self._evaluation = Evaluation(
            "none", adapt_steps=0, attack_radius=table.attack_radius, attack_steps=table.attack_steps
        )

    def __call__(self, problem: Problem, data: FederatedData, x: torch.Tensor, y: torch.Tensor | None) -> Measures:
        """Return the measures at x (and y)."""
        return self._evaluation(problem, data, x, y)


class NodesEvaluation:
    """Asks every node for the measures on its own test data; the means are weighted by samples."""

    measured_on = {"pooled": "test data of the nodes, each on its own", "clients": "test data"}  # noqa: RUF012

    def __init__(self, desk: Desk, config: Config, data: FederatedData) -> None:
        self._desk, self._config, self._data = desk, config, data

    def __call__(self, problem: Problem, data: FederatedData, x: torch.Tensor, y: torch.Tensor | None) -> Measures:
        """Return the mean and the worst of the nodes' measures at x (and y)."""
        clients = range(len(self._desk.nodes.names))
        base = Call("measure", self._desk.run, "", clients=len(clients), classes=self._data.classes)
        form, arrays = wire.taken_apart((x, y))
        replies, _ = self._desk.ask(base, form, arrays, clients, 1 << 20)
        found = [(h.get("rows", 0), h.get("measures", {})) for h, _ in replies.values()]
        found = [(rows, each) for rows, each in found if rows]
        names = sorted({name for _, each in found for name in each})
        measures: Measures = {}
        for name in names:
            pairs = [(rows, float(each[name])) for rows, each in found if name in each]
            values = [value for _, value in pairs]
            measures[name] = sum(rows * value for rows, value in pairs) / sum(rows for rows, _ in pairs)
            if name in ("loss", "accuracy", "auc"):
                measures[f"{name}_worst"] = max(values) if name == "loss" else min(values)
        return measures


def _counted(header: dict[str, Any]) -> tuple[int, int]:
    counts = header.get("samples"), header.get("steps")
    if any(isinstance(n, bool) or not isinstance(n, int) or n < 0 for n in counts):
        return 0, 0
    return counts  # type: ignore[return-value]


def _repeated(value: Any, times: int) -> Any:
    """Return a client's answer as often as it stands in the cohort."""
    if isinstance(value, torch.Tensor):
        return value if times == 1 else value.expand(times, *value.shape[1:])
    return tuple(_repeated(child, times) for child in value)


def _to(tree: Any, device: torch.device) -> Any:
    return tree.to(device) if isinstance(tree, torch.Tensor) else tuple(_to(child, device) for child in tree)


def _zeros(form: Any) -> Any:
    """Return zeros of a form that a client announced."""
    if isinstance(form, list):
        return tuple(_zeros(child) for child in form)
    good = isinstance(form, dict) and set(form) == {"array", "shape", "dtype"} and form["dtype"] in DTYPES_OF_ANSWERS
    shape = form["shape"] if good else None
    if not isinstance(shape, list) or not all(isinstance(n, int) and 0 <= n < 1 << 31 for n in shape) or not shape:
        raise Refused("type", "announced an answer that is not one")
    if math.prod(shape) > 1 << 31:
        raise Refused("size", "announced an answer that is too large")
    return torch.zeros(shape, dtype=wire.DTYPES[form["dtype"]])


DTYPES_OF_ANSWERS = ("float32", "float64", "int64")


def _unpacked(channel: Channel, names: Any, value: Any, n: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the changes [1, n] that a parcel holds, after a look at every part of it."""
    parts = value if isinstance(value, tuple) else (value,)
    kept = entries(channel, n)
    wanted: dict[str, tuple[tuple[int, int], torch.dtype]] = {"values": ((1, n), dtype)}
    if channel.compress == "top_k" and n:
        wanted = {"values": ((1, kept), dtype), "places": ((1, kept), torch.int32)}
    elif channel.compress == "quantise" and n:
        wanted = {"levels": ((1, n), torch.int8), "scale": ((1, 1), dtype)}
    if not isinstance(names, list) or names != list(wanted) or len(parts) != len(names):
        raise Refused("type", "answered with another channel than the run's")
    parcel = dict(zip(names, parts, strict=True))
    for name, (shape, kind) in wanted.items():
        part = parcel[name]
        if not isinstance(part, torch.Tensor) or part.dtype != kind:
            raise Refused("type", f"sent {name} of the wrong kind")
        if tuple(part.shape) != shape:
            raise Refused("shape", f"sent {name} of shape {tuple(part.shape)} instead of {shape}")
    places = parcel.get("places")
    if places is not None and (int(places.min()) < 0 or int(places.max()) >= n):
        raise Refused("shape", "sent entries at places that do not exist")
    return unpacked(channel, parcel, n)
