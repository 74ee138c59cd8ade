"""A node: one client with its own data, asked by name to do one thing at a time.

Every message starts a process of its own, so nothing is remembered but what is on the node's disk. What a client keeps
is written there after each exchange, under the exchange's number, in one step: a node that is killed, or asked again,
or whose server goes back to its last checkpoint, starts from what was there before that exchange.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
import time
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch.utils._pytree import tree_map

from fedstrata.clients.channel import Changes, send
from fedstrata.clients.client import Client, Setting
from fedstrata.clients.clients import for_each
from fedstrata.clients.state import ClientState
from fedstrata.core.errors import InputError, invalid
from fedstrata.core.files import write_atomically
from fedstrata.core.machine import prepared
from fedstrata.core.schedules import Clock
from fedstrata.data import formats, intake
from fedstrata.data.federated import FederatedData, Part
from fedstrata.data.sampling import SAMPLINGS
from fedstrata.experiments.build import Experiment
from fedstrata.experiments.config import Config, parse
from fedstrata.federation import keys, wire
from fedstrata.problems.oracles import Oracles
from fedstrata.problems.queries import QUESTIONS
from fedstrata.training.metrics.evaluation import Evaluation

RUNS_KEPT = 3
"""How many runs' state stays on a node's disk, at least; older ones go after ``OLD`` seconds."""

OLD = 30 * 24 * 3600.0
_RUN = r"[0-9a-f]{32}"


class NoAnswer(Exception):
    """A fault made on purpose: the client does not answer."""


@dataclass(frozen=True)
class Call:
    """What the server asks: ``kind`` is "hello", "work" or "measure"; the rest says when, who, and about what."""

    kind: str
    run: str
    nonce: str
    client: int = 0
    clients: int = 1
    classes: int = 0
    round: int = 0
    exchange: int = 0
    attempt: int = 0
    iteration: int = 0
    saved: int = 0
    heard: list[int] | None = None
    work: str = ""
    learned: list[float] | None = None


Reply = tuple[dict[str, Any], list[np.ndarray]]


def answer(call: Call, form: Any, arrays: list[np.ndarray], experiment: str, node: Mapping[str, Any]) -> Reply:
    """Do what is asked; return the reply's header and its arrays."""
    config = parse(tomllib.loads(experiment), "the experiment of the federation")
    own = _own_data(node)
    if config.data.holdout and own.test is not None:
        raise InputError(
            f"The data of this node have a test part, and the experiment holds {config.data.holdout:g} of the rest out "
            "for tests too. Leave out one of the two: data.holdout in the experiment, or the node's test data."
        )
    if call.kind == "hello":
        return _hello(config, own), []
    data = _placed(own, call, config)
    if call.kind == "measure":
        return _measured(config, data, wire.put_together(form, arrays)), []
    if call.kind != "work":
        raise invalid("kind of call", call.kind, "hello, work or measure")
    return _work(config, data, call, wire.put_together(form, arrays), node)


def signed_reply(header: dict[str, Any], arrays: list[np.ndarray], node: Mapping[str, Any]) -> tuple[str, bytes]:
    """Return the header as text, and the node's signature of it and of the arrays."""
    text = json.dumps(header)
    if "key" not in node:
        raise InputError("The node configuration must name the node's private key: key = '/path/to/key'.")
    return text, keys.sign(Path(str(node["key"])), wire.digest(text, arrays))


# --- data -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Own:
    """What is on this node: (inputs, targets) to learn from, for the inner levels, and to test on."""

    train: intake.Pair
    support: intake.Pair | None
    test: intake.Pair | None


def _own_data(node: Mapping[str, Any]) -> _Own:
    """Read the node's data: a file, or a folder with train.npz and optionally support.npz and test.npz."""
    if "data" not in node:
        raise InputError("The node configuration must name the node's data: data = '/path/to/file.npz'.")
    path = Path(str(node["data"])).expanduser()
    if not path.exists():
        raise InputError(f"There is no {path}, which the node configuration names as its data.")
    found: dict[str, intake.Pair | None] = {"train": None, "support": None, "test": None}
    if path.is_dir():
        for part in found:
            file = path / f"{part}.npz"
            if file.exists():
                found[part] = intake.pair(intake.named(formats.npz(file), file), str(file))
    else:
        arrays = formats.npz(path)
        found["train"] = intake.pair(intake.named(arrays, path), str(path))
        for part in ("support", "test"):
            if any(name.startswith(f"{part}_") for name in arrays):
                found[part] = intake.pair(intake.named(arrays, path, f"{part}_"), f"{part} of {path}")
    if found["train"] is None:
        raise InputError(f"The folder {path} must hold train.npz, with inputs and targets.")
    if len(found["train"][0]) == 0:
        raise InputError(f"There are no samples in {path}.")
    return _Own(found["train"], found["support"], found["test"])


def _hello(config: Config, own: _Own) -> dict[str, Any]:
    """Return what the server must know of a node's data to build the model: shapes, and how many classes there are.

    The number of samples is told only where the run weights clients by it.
    """
    inputs, targets = own.train
    pairs = [p for p in (own.train, own.support, own.test) if p is not None]
    rows = len(inputs) + (0 if own.support is None else len(own.support[0]))
    return {
        "shapes": [list(inputs.shape[1:]), list(targets.shape[1:])],
        "dtypes": [str(t.dtype).removeprefix("torch.") for t in (inputs, targets)],
        "classes": intake.count_classes(*(p[1] for p in pairs), partial=True),
        "rows": rows if config.train.weighting == "samples" else 1,
    }


def _placed(own: _Own, call: Call, config: Config) -> FederatedData:
    """Return the data of all clients as this node sees them: its own at its place, nothing at the others'."""

    def part(pair: intake.Pair | None) -> Part | None:
        if pair is None:
            return None
        nothing = np.empty(0, dtype=np.int64)
        owned = [np.arange(len(pair[0])) if k == call.client else nothing for k in range(call.clients)]
        return Part.of(pair, owned, may_be_empty=True)

    train = part(own.train)
    assert train is not None
    data = FederatedData(train, part(own.support), own.test, part(own.test), call.classes, "federation")
    seed = config.train.seed if config.data.seed is None else config.data.seed
    if config.data.holdout:
        data = _held_out(data, call, config.data.holdout, seed)
    if config.data.support and own.support is None:
        alone = _alone(data).with_support(config.data.support, seed)
        assert alone.support is not None
        data = replace(data, train=_among(alone.train, call), support=_among(alone.support, call))
    return data


def _held_out(data: FederatedData, call: Call, share: float, seed: int) -> FederatedData:
    alone = _alone(data).with_holdout(share, seed)
    assert alone.client_test is not None
    test = alone.client_test.of_client(0)
    return replace(data, train=_among(alone.train, call), client_test=_among(alone.client_test, call), test=test)


def _alone(data: FederatedData) -> FederatedData:
    part = data.train
    return FederatedData(replace(part, offsets=np.array([0, len(part.rows)])), classes=data.classes, name=data.name)


def _among(part: Part, call: Call) -> Part:
    return replace(part, offsets=np.where(np.arange(call.clients + 1) > call.client, len(part.rows), 0))


# --- work -------------------------------------------------------------------------------------------------------------


def _work(config: Config, data: FederatedData, call: Call, message: Any, node: Mapping[str, Any]) -> Reply:
    """Run the named method of the algorithm, or answer a problem's question."""
    settings = config.settings
    inject = None if settings.faults is None else settings.faults.inject
    clients = np.array([call.client])
    fault = None
    if inject is not None:
        fault = inject.kinds(clients, call.round, call.exchange, call.attempt)[0]
    if fault == "drop":
        raise NoAnswer("no answer, on purpose")
    experiment = Experiment(config, data)
    device = torch.device(settings.device)
    problem = experiment.problem.to(device)
    if call.learned is not None and problem.given is not None:
        problem = problem.given(problem, torch.tensor(call.learned, dtype=torch.float64))
    if problem.at is not None:
        number = max(0, call.round)
        problem = problem.at(problem, Clock(number, settings.rounds, 0, number))
    algorithm = experiment.algorithm
    question = QUESTIONS.get(call.work.removeprefix("question:")) if call.work.startswith("question:") else None
    if question is None and call.work not in algorithm.answers:
        raise invalid("work", call.work, f"one of {', '.join(algorithm.answers)}")
    work = getattr(algorithm, call.work) if question is None else question
    folder = _folder(node, call.run)
    if question is None:
        state, memory = _recalled(folder, call)
    else:  # nothing is kept, and nothing forgotten
        state, memory = ClientState(call.clients, 4 << 30), ""
    setting = Setting(
        oracles=Oracles(problem),
        data=data.to(device, problem.x0.dtype),
        sampling=SAMPLINGS[settings.sampling],
        batch_size=settings.batch_size,
        seed=settings.seed,
        state=state,
    )
    client = Client(setting, clients, Clock(call.round, settings.rounds, 0, call.iteration), call.exchange)
    there = for_each(tree_map(lambda t: t.to(device) if isinstance(t, torch.Tensor) else t, message), 1)
    with torch.no_grad(), prepared(settings.threads):
        value = work(client, *there)
        channel = settings.channel
        header: dict[str, Any] = {"samples": client.samples, "steps": client.steps, "packed": False}
        if channel.on_clients and question is None:
            changes = Changes(work, there, value)
            parcel = send(channel, client, work, changes.matrix)
            header |= {"packed": True, "like": wire.taken_apart(value)[0], "names": list(parcel)}
            value = _spoilt_parcel(fault, inject, parcel)
        else:
            value = _spoilt(fault, inject, work, there, value)
    if fault == "delay" and inject is not None:
        time.sleep(inject.seconds)
    if fault == "crash":
        os._exit(1)
    if question is None:
        _kept(folder, call, state, memory)
    form, arrays = wire.taken_apart(value)
    return {**header, "form": form}, arrays


def _spoilt(fault: str | None, inject: Any, work: Any, there: tuple[Any, ...], value: Any) -> Any:
    """Return the answer as a fault made on purpose leaves it."""
    if fault == "scale":
        changes = Changes(work, there, value)
        return changes.answers(inject.factor * changes.matrix)
    if fault == "nan":
        return tree_map(lambda t: torch.full_like(t if t.is_floating_point() else t.double(), math.nan), value)
    if fault == "garbage":
        return _garbage(value)
    return value


def _spoilt_parcel(fault: str | None, inject: Any, parcel: dict[str, torch.Tensor]) -> Any:
    """Return what a parcel holds as a fault made on purpose leaves it: the change that arrives is the spoilt one."""
    if fault in ("scale", "nan"):
        of = "scale" if "scale" in parcel else "values"
        parcel = {**parcel, of: parcel[of] * (inject.factor if fault == "scale" else math.nan)}
    value = tuple(parcel.values())
    return _garbage(value) if fault == "garbage" else value


def _garbage(value: Any) -> Any:
    """Return something of the wrong shape."""
    return tree_map(lambda t: torch.zeros(1, 3, dtype=t.dtype), value)


def _measured(config: Config, data: FederatedData, point: Any) -> dict[str, Any]:
    """Return the measures of the model on the node's own test data, and how many samples these are."""
    if data.test is None or len(data.test[0]) == 0:
        return {"rows": 0, "measures": {}}
    experiment = Experiment(config, data)
    problem = experiment.problem
    x, y = point
    here = data.to(problem.x0.device, problem.x0.dtype)
    with torch.no_grad(), prepared(config.train.threads):
        found = as_it_is(config)(problem, here, x, y)
    return {"rows": len(data.test[0]), "measures": {k: float(v) for k, v in found.items() if math.isfinite(v)}}


def as_it_is(config: Config) -> Evaluation:
    """Return what measures a model as it is, on one set of samples."""
    table = config.evaluate
    return Evaluation("none", adapt_steps=0, attack_radius=table.attack_radius, attack_steps=table.attack_steps)


# --- what a client keeps, on disk -------------------------------------------------------------------------------------

_VERSION = re.compile(r"state-(\d{8})-(\d{4})\.safetensors")


def _folder(node: Mapping[str, Any], run: str) -> Path:
    if "state" not in node:
        raise InputError("The node configuration must name a folder for what the node keeps: state = '/path'.")
    if not re.fullmatch(_RUN, run):
        raise invalid("name of the run", run, "32 letters a to f and digits")
    base = Path(str(node["state"])).expanduser()
    folder = base / run
    if not folder.exists():
        folder.mkdir(parents=True, mode=0o700)
        runs = [p for p in base.iterdir() if p.is_dir() and p != folder and re.fullmatch(_RUN, p.name)]
        runs = sorted((p for p in runs if time.time() - p.stat().st_mtime > OLD), key=lambda p: p.stat().st_mtime)
        for old in runs[: max(0, len(runs) - RUNS_KEPT + 1)]:
            shutil.rmtree(old, ignore_errors=True)
    return folder


def _versions(folder: Path) -> list[tuple[tuple[int, int], Path]]:
    found = ((match, path) for path in folder.iterdir() if (match := _VERSION.fullmatch(path.name)))
    return sorted(((int(m[1]), int(m[2])), path) for m, path in found)


def _recalled(folder: Path, call: Call) -> tuple[ClientState, str]:
    """Return what the client kept before this exchange, and a digest of it; forget what came after."""
    now = (call.round + 1, call.exchange)
    state = ClientState(call.clients, 4 << 30)
    earlier = []
    for left in folder.glob(".*.tmp"):  # a kill came between
        left.unlink(missing_ok=True)
    for when, path in _versions(folder):
        if when >= now or (call.heard is not None and when > tuple(call.heard)):
            path.unlink(missing_ok=True)  # to be done again, or never taken by the server
        else:
            earlier.append(path)
    if earlier:
        try:
            rows = load_file(earlier[-1])
        except (SafetensorError, OSError) as error:
            raise InputError(f"What the node kept in {earlier[-1]} cannot be read: {error}") from None
        owners = {k: torch.tensor([call.client]) for k in (f"{name}.clients" for name in rows)}
        state.load({**rows, **owners})
    return state, _digest(state)


def _kept(folder: Path, call: Call, state: ClientState, before: str) -> None:
    """Write down what the client keeps, if it has changed; drop what no checkpoint of the server needs any more."""
    if _digest(state) != before:
        name = f"state-{call.round + 1:08d}-{call.exchange:04d}.safetensors"
        write_atomically(folder / name, save(_rows(state)))
    versions = _versions(folder)
    needless = [path for when, path in versions if when < (call.saved + 1, 0)][:-1]
    for path in needless:
        path.unlink(missing_ok=True)


def _rows(state: ClientState) -> dict[str, torch.Tensor]:
    pieces = {k: v for piece in state.take_all() for k, v in piece.items()}
    return {k: v.contiguous() for k, v in pieces.items() if not k.endswith(".clients")}


def _digest(state: ClientState) -> str:
    total = hashlib.sha256()
    for name, value in sorted(_rows(state).items()):
        total.update(name.encode())
        total.update(value.cpu().numpy().tobytes())
    return total.hexdigest()
