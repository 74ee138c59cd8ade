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
from typing import Any, Protocol, TypeGuard

import numpy as np
import torch
from torch.utils._pytree import tree_leaves, tree_map

from fedstrata.clients.channel import Changes, Channel, entries, unpacked
from fedstrata.clients.client import Setting
from fedstrata.clients.clients import Answer, Clients, Terms, Work, cohort_size, for_each
from fedstrata.clients.faults import Faults, QuorumError
from fedstrata.core.errors import FedstrataError, InputError, invalid, is_number
from fedstrata.core.options import check
from fedstrata.core.schedules import Clock
from fedstrata.data import intake
from fedstrata.data.federated import FederatedData, Part
from fedstrata.experiments.build import Experiment, build_algorithm, named_problem
from fedstrata.experiments.config import Config
from fedstrata.federation import keys, wire
from fedstrata.federation.node import Call, NoAnswer, as_it_is
from fedstrata.federation.wire import Refused
from fedstrata.models.zoo import MODELS
from fedstrata.problems.problem import Problem
from fedstrata.problems.queries import is_question
from fedstrata.training.callbacks import Callback
from fedstrata.training.checkpoint import DURABLE_SECONDS, write_atomically
from fedstrata.training.metrics.evaluation import PER_CLIENT, POOLED, Evaluation, Measures, over_clients
from fedstrata.training.train import Run, check_passage, train

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


@dataclass
class Notes:
    """What the server must remember of a run besides its checkpoints, in a file beside the run directory.

    run:      the name under which nodes keep what belongs to the run.
    hello:    what the nodes said of their data at the start.
    releases: what noise has to cover, rounds that were done twice included.
    missed:   how often each node was missing when all were asked for measures.
    """

    path: Path
    run: str
    hello: list[dict[str, Any]] | None = None
    releases: dict[str, int] = dataclasses.field(default_factory=dict)
    missed: dict[str, int] = dataclasses.field(default_factory=dict)

    @staticmethod
    def of(out: Path) -> Notes:
        """Return the notes of the run in ``out``, if there is one, else new ones."""
        path = out.with_name(out.name + ".federation.json")
        if path.exists() and out.is_dir() and any(out.iterdir()):
            return Notes(path, **json.loads(path.read_text()))
        notes = Notes(path, secrets.token_hex(16))
        path.parent.mkdir(parents=True, exist_ok=True)
        notes.write()
        return notes

    def write(self, **changes: Any) -> None:
        """Change something, and write all of it down."""
        for name, value in changes.items():
            setattr(self, name, value)
        table = {k: v for k, v in dataclasses.asdict(self).items() if k != "path"}
        write_atomically(self.path, json.dumps(table).encode())


class FlowerClients(Clients):
    """Asks nodes, one client on each; what cannot be used of their replies is left out and named."""

    def __init__(self, setting: Setting, terms: Terms, desk: Desk, notes: Notes) -> None:
        super().__init__(setting, terms)
        self._desk = desk
        self._notes = notes
        self._saved = -1
        self._forms: dict[str, str] = {}
        self._heard: dict[int, list[int]] = {}
        self._checkpoints: list[tuple[float, int]] = []

    def saved(self, round: int) -> None:
        """Tell the nodes, with the next message, the oldest round that the run may go back to.

        That is the checkpoint before this one, or the last that is surely on the disk (see ``training.checkpoint``).
        """
        if self._notes.releases:  # rounds that are done again have been released before
            self.counts.releases = dict(self._notes.releases)
        now = time.monotonic()
        old = [i for i, (when, _) in enumerate(self._checkpoints) if now - when >= DURABLE_SECONDS]
        self._checkpoints = [*self._checkpoints[old[-1] if old else 0 :], (now, round)]
        self._saved = self._checkpoints[0][1] if old else self._saved

    def _answers(
        self, work: Work, message: tuple[Any, ...], clock: Clock, exchange: int, places: np.ndarray, attempt: int
    ) -> Iterator[Answer]:
        name = getattr(work, "__name__", "")
        question = is_question(work)
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
        usual = 16 * (sum(a.nbytes for a in arrays) + self.problem.x0.nbytes) + (1 << 20)
        limit = usual if self._desk.faults.max_bytes is None else self._desk.faults.max_bytes
        replies, refused = self._desk.ask(base, form, arrays, sorted(asked), limit, self._heard)
        for client, (kind, detail) in refused.items():
            self._fault(client, exchange, attempt, kind, detail)
        found: dict[int, Answer] = {}
        forms: dict[int, str] = {}
        for client in sorted(replies):  # not as they came: sums go in one order
            header, received = replies[client]
            try:
                value, sent, form_of = self._opened(work, message, header, received, usual)
                samples, steps = _counted(header)
            except Refused as error:
                self._fault(client, exchange, attempt, error.kind, error.detail)
                continue
            where = np.flatnonzero(self.cohort == client)
            times = len(where)
            value = tree_map(lambda t, n=times: t.expand(n, *t.shape[1:]), value)
            found[client] = Answer(where, value, samples * times, steps, sent * times)
            forms[client] = form_of
        most = max(sorted(set(forms.values())), key=list(forms.values()).count, default="")
        most = self._forms.get(base.work, most)  # what all answered before, if there was such an exchange
        if set(forms.values()) == {most}:
            self._forms[base.work] = most
        for client, answer in found.items():
            if forms[client] != most:
                self._fault(client, exchange, attempt, "shape", "answered with another shape than most")
            else:
                yield answer

    def _opened(
        self, work: Work, message: tuple[Any, ...], header: dict[str, Any], arrays: Sequence[np.ndarray], largest: int
    ) -> tuple[Any, int, str]:
        """Return a client's answer [1, ...], the bytes that were sent, and its form."""
        value = wire.put_together(header.get("form"), arrays)
        sent = sum(a.nbytes for a in arrays)
        form = header.get("form")
        if wire.used(form) != list(range(len(arrays))):
            raise Refused("type", "sent arrays that belong nowhere, or in two places")
        device = self.problem.x0.device
        if self.channel.on_clients and self._passes(work):
            if not header.get("packed"):
                raise Refused("type", "answered around the channel")
            form = header.get("like")
            like = _zeros(form, largest)
            if sum(leaf.nbytes for leaf in tree_leaves(like)) > largest:
                raise Refused("size", "announced an answer that is too large")
            changes = _changes(work, message, like)
            n = changes.matrix.shape[1]
            value = changes.answers(_unpacked(self.channel, header.get("names"), value, n, changes.matrix.dtype))
        leaves = tree_leaves(value)
        if not leaves:
            raise Refused("shape", "answered with nothing")
        for leaf in leaves:
            if not isinstance(leaf, torch.Tensor) or leaf.dim() == 0 or len(leaf) != 1:
                raise Refused("shape", "answered with something that is not one client's")
        value = tree_map(lambda t: t.to(device), value)
        if not is_question(work):
            _changes(work, message, value)
        return value, sent, json.dumps(wire.forms_only(form), sort_keys=True)

    def _commit(self) -> None:
        exchange = self._exchange[0] - 1
        for client in self.cohort[self._answered].tolist():
            self._heard[client] = [self._round + 1, exchange]

    def note(self, chunk: int | str) -> str:
        """Say how the clients of a cohort advance."""
        return "each on its node"

    def extra(self) -> dict[str, Any]:
        """Return what a checkpoint must hold: also which exchange of each client was the last that was taken."""
        return {**super().extra(), "heard": {str(k): v for k, v in self._heard.items()}}

    def restore(self, extra: dict[str, Any]) -> None:
        """Go on with what :meth:`extra` returned."""
        super().restore(extra)
        self._heard = {int(k): v for k, v in extra.get("heard", {}).items()}

    def _release(self) -> None:
        super()._release()
        self._notes.write(releases=dict(self.counts.releases))

    def _noise_names(self) -> tuple[int, ...] | None:
        return None  # nobody may foretell the noise of a real federation


class Desk:
    """Sends calls to nodes, and takes their replies in: who they are from, whether they answer what was asked."""

    def __init__(self, post: Post, nodes: Nodes, run: str, faults: Faults) -> None:
        self.post, self.nodes, self.run, self.faults = post, nodes, run, faults

    def ask(
        self,
        base: Call,
        form: Any,
        arrays: Sequence[np.ndarray],
        clients: Sequence[int],
        limit: int,
        heard: Mapping[int, list[int]] | None = None,
    ) -> tuple[dict[int, tuple[dict[str, Any], tuple[np.ndarray, ...]]], dict[int, tuple[str, str]]]:
        """Ask these clients; return their replies, and of the others what was wrong: (kind, detail)."""
        connected = self.post.nodes()
        waiting: dict[int, tuple[str, int, Call]] = {}
        refused: dict[int, tuple[str, str]] = {}
        for client in clients:
            number = connected.get(self.nodes.public[client])
            last = None if heard is None else heard.get(client, [-1, 0])
            call = replace(base, client=client, heard=last, nonce=secrets.token_hex(32))
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
        except (ValueError, RecursionError):
            raise Refused("type", "answered with a header that is not JSON") from None
        if not isinstance(header, dict):
            raise Refused("type", "answered with a header that is not a table")
        if header.get("nonce") != call.nonce:
            raise Refused("stale", "answered something that was asked before")
        if header.get("error") == NoAnswer.__name__:
            raise Refused("silent", "did not answer")
        if "error" in header:
            raise Refused("error", f"failed: {header['error']} (more in the node's log)")
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
    check_config(config, len(nodes.names))
    faults = config.faults or Faults()
    notes = Notes.of(out)
    desk = Desk(post, nodes, notes.run, faults)
    data = _met(desk, config, notes, server_data, say)
    experiment = Experiment(config, data)
    tables = config.to_toml("compare", "data", "plot", "pretrain", "tune", "variants")
    tables |= {"algorithm": experiment.algorithm.to_table(), "federation": {"nodes": list(nodes.names)}}
    tables |= {"data": nodes_split(config)}
    return train(
        experiment.problem,
        experiment.data,
        experiment.algorithm,
        settings=config.settings.replace(faults=faults),
        evaluate=FederationEvaluation(config, desk, data, notes, say),
        out=out,
        resume=resume,
        callbacks=callbacks,
        config=tables,
        engine=lambda setting, terms: FlowerClients(setting, terms, desk, notes),
    )


def nodes_split(config: Config) -> dict[str, Any]:
    """Return what nodes go by when they split their own data: all of ``[data]`` that has a meaning in a federation."""
    table = config.data
    seed = {} if table.seed is None else {"seed": table.seed}
    return {**{k: getattr(table, k) for k in ("holdout", "support") if getattr(table, k)}, **seed}


def check_config(config: Config, nodes: int) -> None:
    """Refuse what a federation of so many nodes cannot do, as far as that can be told without their data."""
    named_problem(config)
    check_passage(config.settings, build_algorithm(config), nodes)
    check(MODELS.find(config.model.name), config.model.options)
    cohort_size(config.train.participation, nodes)
    if config.brings_data:
        raise InputError(f"The problem {config.problem.name} brings its own data: a federation has the nodes'.")
    if config.pretrain.rounds:
        raise InputError("A federation does not pre-train: leave out [pretrain].")
    usual = Evaluation()
    if config.evaluate.clients == "train":
        raise invalid("key evaluate.clients", "train", "'auto', 'test' or 'none': a federation measures on test data")
    for name in ("adapt_steps", "adapt_lr", "adapt_rows", "stationarity"):
        if getattr(config.evaluate, name) != getattr(usual, name):
            raise InputError(f"A federation does not measure what evaluate.{name} asks for: leave it out.")


def _wait(desk: Desk, needed: int, say: Callable[[str], None]) -> None:
    """Wait until so many nodes are connected."""
    names = desk.nodes.names
    end = time.monotonic() + desk.faults.timeout
    said: set[str] = set()
    while True:
        there = desk.post.nodes()
        missing = [n for n, key in zip(names, desk.nodes.public, strict=True) if key not in there]
        if len(names) - len(missing) >= needed:
            return
        if set(missing) != said:
            say(f"Waiting for {', '.join(missing)}")
            said = set(missing)
        if time.monotonic() > end:
            wanted = "Every node must be there at the start" if needed == len(names) else f"{needed} must be there"
            raise QuorumError(
                f"Not connected within {desk.faults.timeout:g} s: {', '.join(missing)}. {wanted}: see whether it runs, "
                "with the key that was registered."
            )
        time.sleep(1.0)


def _told(desk: Desk, notes: Notes, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Return what every node says of its data; a run that goes on knows it from its start."""
    names = desk.nodes.names
    if notes.hello is not None and len(notes.hello) == len(names):
        _wait(desk, desk.faults.needed(len(names)), say)
        return notes.hello
    _wait(desk, len(names), say)
    base = Call(kind="hello", run=desk.run, nonce="", clients=len(names))
    replies, refused = desk.ask(base, [], [], range(len(names)), 1 << 20)
    if refused:
        why = "; ".join(f"{names[k]}: {detail}" for k, (_, detail) in sorted(refused.items()))
        raise FedstrataError(f"Not every node could say what its data look like. {why}")
    found = [_hello(replies[k][0], name) for k, name in enumerate(names)]
    notes.write(hello=found)
    return found


def _met(
    desk: Desk, config: Config, notes: Notes, server_data: Path | None, say: Callable[[str], None]
) -> FederatedData:
    """Ask what the nodes' data look like, and return data of that look for the server to build from."""
    names = desk.nodes.names
    told = _told(desk, notes, say)
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
    rows = torch.zeros(1, dtype=torch.int64).expand(int(offsets[-1]))  # one row stands for all
    test = None if server_data is None else _pair_in(server_data / "test.npz", row)
    classes = max(int(other["classes"]) for other in told)
    if test is not None and classes:
        classes = max(classes, int(test[1].max()) + 1)
    data = FederatedData(Part(row, rows, offsets), None, test, None, classes, "federation", names)
    auxiliary = None if server_data is None else _pair_in(server_data / "auxiliary.npz", row)
    return data if auxiliary is None else data.with_auxiliary(*auxiliary)


def _pair_in(file: Path, like: intake.Pair) -> intake.Pair | None:
    return intake.pair(*intake.named(intake.read_npz(file), file), str(file), like) if file.exists() else None


class FederationEvaluation:
    """Measures on the server's test data, if it has any; otherwise, or when asked for, at the nodes.

    Every node measures on its own test data. Of loss, accuracy and AUC there are the mean, worst and spread over nodes,
    as in a simulation; where the server has no test data, the mean weighted by samples stands for the pooled measure.
    """

    def __init__(
        self, config: Config, desk: Desk, data: FederatedData, notes: Notes, say: Callable[[str], None]
    ) -> None:
        clients = config.evaluate.clients
        self._pooled = None if data.test is None else as_it_is(config)
        self._asks = clients == "test" or (clients == "auto" and self._pooled is None)
        self._desk, self._data, self._notes, self._say = desk, data, notes, say
        self._each: list[dict[str, float]] | None = None

    def __call__(self, problem: Problem, data: FederatedData, x: torch.Tensor, y: torch.Tensor | None) -> Measures:
        """Return the measures at x (and y)."""
        measures: Measures = {}
        if self._asks:
            rows, self._each = self._ask(x, y)
            for name in sorted({name for each in self._each for name in each}):
                values = np.array([each.get(name, math.nan) for each in self._each])
                there = ~np.isnan(values)
                measures[name] = float(np.average(values[there], weights=rows[there]))
                if name in PER_CLIENT:
                    measures |= over_clients(name, values[there])
            measures["measured_clients"] = float(sum(map(bool, self._each)))
        return measures if self._pooled is None else measures | self._pooled(problem, data, x, y)

    def _ask(self, x: torch.Tensor, y: torch.Tensor | None) -> tuple[np.ndarray, list[dict[str, float]]]:
        """Return on how many samples each node measured, and what; nothing where it did not."""
        names = self._desk.nodes.names
        base = Call("measure", self._desk.run, "", clients=len(names), classes=self._data.classes)
        form, arrays = wire.taken_apart((x, y))
        replies, refused = self._desk.ask(base, form, arrays, range(len(names)), 1 << 20)
        if refused:
            who = (f"{names[k]} ({detail})" for k, (_, detail) in sorted(refused.items()))
            self._say(f"Not measured: {', '.join(who)}")
            missed = {names[k]: self._notes.missed.get(names[k], 0) + 1 for k in sorted(refused)}
            self._notes.write(missed=self._notes.missed | missed)
        found = [_measured(replies[k][0]) if k in replies else (0, {}) for k in range(len(names))]
        if not any(each for _, each in found):
            self._say(
                "Nothing was measured: no node that answered has test data. Set data.holdout, or add a test part."
            )
        return np.array([rows for rows, _ in found]), [each for _, each in found]

    def about(self, x: torch.Tensor, y: torch.Tensor | None) -> dict[str, Any]:
        """Return what a summary says of the measures at x (and y): on what they were taken, and every node's own."""
        if self._asks and self._each is None:  # a run that had nothing left to do
            _, self._each = self._ask(x, y)
        each = self._each or []
        told = sorted({name for found in each for name in found} & set(PER_CLIENT))
        return {
            "measured_on": {
                "pooled": "test data of the server" if self._pooled else "nothing",
                "clients": "test data" if self._asks else "nothing",
            },
            "per_client": {name: [found.get(name) for found in each] for name in told},
            **({"not_measured": self._notes.missed} if self._notes.missed else {}),
        }


def _counted(header: dict[str, Any]) -> tuple[int, int]:
    samples, steps = header.get("samples"), header.get("steps")
    if not _whole(samples) or not _whole(steps):
        raise Refused("type", "did not say how many samples and steps it took")
    return samples, steps


def _hello(header: dict[str, Any], name: str) -> dict[str, Any]:
    """Return what a node said of its data, looked at; its name is for the error."""
    shapes: Any = header.get("shapes")
    dtypes: Any = header.get("dtypes")
    good = isinstance(shapes, list) and isinstance(dtypes, list) and len(shapes) == len(dtypes) == 2
    good = good and all(isinstance(shape, list) and all(map(_whole, shape)) for shape in shapes)
    good = good and all(isinstance(dtype, str) and dtype in wire.DTYPES for dtype in dtypes)
    counts = header.get("classes"), header.get("rows")
    good = good and all(_whole(n) and n <= most for n, most in zip(counts, (MOST_CLASSES, MOST_ROWS), strict=True))
    if not good:
        raise InputError(f"{name} did not say what its data look like. Got {str(header)[:300]}.")
    return header


def _measured(header: dict[str, Any]) -> tuple[int, dict[str, float]]:
    """Return on how many rows a node measured, and what, without anything that is not a measure."""
    rows, measures = header.get("rows"), header.get("measures")
    if not _whole(rows) or not rows or not isinstance(measures, dict):
        return 0, {}
    known = {k: v for k, v in measures.items() if k in POOLED and is_number(v)}
    return rows, {k: float(v) for k, v in known.items() if abs(v) <= LARGEST}


MOST_CLASSES, MOST_ROWS = 1 << 16, 10**8
"""A node that says it has more than that is not believed."""

LARGEST = 1e30
"""Above this a node's measure is left out."""


def _whole(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 31


def _changes(work: Work, message: tuple[Any, ...], value: Any) -> Changes:
    """Return a client's answer as a change; refuse one whose shapes are not those of what it is a change of."""
    try:
        return Changes(work, for_each(message, 1), value)
    except (InputError, ValueError, IndexError) as error:
        raise Refused("shape", f"answered with the wrong shape: {error}") from None


def _zeros(form: Any, largest: int, depth: int = 0) -> Any:
    """Return zeros of a form that a client announced, each of at most so many entries; they take no memory."""
    if isinstance(form, list) and depth <= 8 and len(form) <= 4096:
        return tuple(_zeros(child, largest, depth + 1) for child in form)
    good = isinstance(form, dict) and set(form) == {"array", "shape", "dtype"} and form["dtype"] in DTYPES_OF_ANSWERS
    shape = form["shape"] if good else None
    if not isinstance(shape, list) or not all(map(_whole, shape)) or shape[:1] != [1]:
        raise Refused("type", "announced an answer that is not one")
    if math.prod(shape) > largest:
        raise Refused("size", "announced an answer that is too large")
    return torch.zeros((), dtype=wire.DTYPES[form["dtype"]]).expand(shape)


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
    return unpacked(parcel, n)
