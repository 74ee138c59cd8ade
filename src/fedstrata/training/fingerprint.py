"""The identity of a run: its settings, and digests of its data and starting point. A run resumes only if they match."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from hashlib import blake2b
from pathlib import Path
from types import CellType, CodeType, FunctionType
from typing import Any

import numpy as np
import torch

from fedstrata.algorithms.algorithm import Algorithm
from fedstrata.clients.channel import PLAIN
from fedstrata.core.errors import InputError
from fedstrata.core.files import flatten
from fedstrata.core.options import Options, plain
from fedstrata.data.federated import FederatedData
from fedstrata.problems.problem import Problem
from fedstrata.training.metrics.evaluation import Evaluate, Evaluation
from fedstrata.training.settings import Settings

DEEPEST = 8
"""How deep functions and containers inside a function are looked into."""


def settings_of(
    problem: Problem, data: FederatedData, algorithm: Algorithm, settings: Settings, evaluate: Evaluate | None = None
) -> dict[str, Any]:
    """Return the settings of a run as the tables of a configuration file."""
    optional = {"channel": settings.channel, "faults": settings.faults}
    return {
        **{k: v.to_table() for k, v in optional.items() if v is not None and v != PLAIN},
        "train": settings.to_table(),
        "algorithm": algorithm.to_table(),
        "problem": {"name": problem.name, "size": len(problem.x0), **_plain(problem.options)},
        "data": {"name": data.name, "clients": data.clients},
        "evaluate": identity_of(Evaluation() if evaluate is None else evaluate),
    }


def identity_of(computation: Any, depth: int = 0) -> dict[str, Any]:
    """Return the options of an evaluation, or the name of a function and a digest of what it computes."""
    if isinstance(computation, Options):
        return computation.to_table()
    bound = isinstance(computation, partial)
    function: Any = computation.func if bound else computation
    given = (computation.args, computation.keywords) if bound else getattr(computation, "__dict__", {})
    function = function if hasattr(function, "__qualname__") else type(function).__call__
    name = f"{getattr(function, '__module__', '')}.{function.__qualname__}"
    code = getattr(function, "__code__", None)
    if code is None:
        return {"function": name}
    cells = [_content(cell) for cell in getattr(function, "__closure__", None) or ()]
    digest = _instructions(code)
    digest.update(_text((given, function.__defaults__, function.__kwdefaults__, cells), depth).encode())
    return {"function": name, "digest": digest.hexdigest()}


def _content(cell: CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None


def _instructions(code: CodeType) -> blake2b:
    """Return a digest of what a function does, wherever it stands in its file."""
    digest = blake2b(repr((code.co_code, code.co_names)).encode(), digest_size=8)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            digest.update(_instructions(constant).digest())
        else:
            digest.update(_text(constant).encode())
    return digest


def _text(value: object, depth: int = 0) -> str:
    """Return values as a text that is the same in every process; of other objects only the type.

    depth: how many functions and containers the value is inside of; a function may refer to itself.
    """
    if isinstance(value, str | int | float | complex | bytes | None):
        return repr(value)
    if depth > DEEPEST:
        return type(value).__qualname__
    if isinstance(value, Mapping):
        return repr(sorted((str(k), _text(v, depth + 1)) for k, v in value.items()))
    if isinstance(value, tuple | list):
        return repr([_text(v, depth + 1) for v in value])
    if isinstance(value, set | frozenset):
        return repr(sorted(_text(v, depth + 1) for v in value))
    if isinstance(value, np.ndarray | torch.Tensor):
        numbers = np.ascontiguousarray(torch.as_tensor(value).detach().cpu().numpy())
        return blake2b(numbers.tobytes() + repr((numbers.shape, numbers.dtype)).encode(), digest_size=8).hexdigest()
    if isinstance(value, FunctionType | partial):
        return repr(sorted(identity_of(value, depth + 1).items()))
    return type(value).__qualname__


def _plain(options: Mapping[str, object]) -> dict[str, object]:
    """Return options as a configuration file stores them: functions by name, None omitted."""
    values = {k: v if isinstance(v, Options) or not callable(v) else _name(v) for k, v in options.items()}
    return {k: plain(v) for k, v in values.items() if v is not None}


def _name(function: object) -> str:
    """Return the name of a function, with a digest of what it computes if it is written in Python."""
    name = str(getattr(function, "__name__", repr(function)))
    digest = identity_of(function).get("digest") if callable(function) else None
    return name if digest is None else f"{name} {digest}"


def digest_of(problem: Problem, data: FederatedData) -> dict[str, str]:
    """Return digests of the data and the starting point."""
    start = [problem.x0] if problem.y0 is None else [problem.x0, problem.y0]
    parts = [p for p in (data.train, data.support, data.client_test, data.auxiliary) if p is not None]
    arrays = {id(a): a for p in parts for a in (*p.arrays, p.stored_rows)}
    tensors = {"start": start, "data": [*arrays.values(), *(data.test or ())]}
    out = {}
    for name, group in tensors.items():
        digest = blake2b(b"".join(p.sizes.tobytes() for p in parts), digest_size=8)
        for tensor in group:
            digest.update(tensor.detach().cpu().contiguous().numpy().data)
        out[name] = digest.hexdigest()
    if data.plan is not None:
        prepared = repr(sorted(data.plan.how.to_table().items()))
        out["tables"] = blake2b(f"{data.plan.schema.digest} {prepared}".encode(), digest_size=8).hexdigest()
    return out


FREE_TO_CHANGE = {
    *("train.max_seconds", "train.max_samples", "train.max_bytes"),
    *(
        "train.rounds",
        "train.divide",
        "train.threads",
        "train.checkpoint_every",
        "train.state_memory",
        "data.directory",
    ),
    *("faults.quorum", "faults.retries", "faults.timeout", "faults.max_bytes"),
}
"""Settings that may change when a run is resumed."""

_START = "digest.start"


def refuse_other_settings(old: dict[str, Any], new: dict[str, Any], path: Path) -> None:
    """Raise if the run in ``path``, which has the settings ``old``, cannot be resumed with the settings ``new``."""
    old, new = flatten(old), flatten(new)
    free = set(FREE_TO_CHANGE)
    if _START not in old or _START not in new:  # pre-training has not produced the starting point yet
        free.add(_START)
    for key in sorted(old.keys() | new.keys(), key=lambda k: (k.startswith("digest."), not k.endswith(".name"), k)):
        if key.startswith(("diagnostics.", "written_by.")):  # not part of the run itself
            continue
        if key not in free and old.get(key) != new.get(key):
            raise InputError(
                f"The run in {path} cannot be resumed with other settings: {key} was {_shown(old, key)} and is now "
                f"{_shown(new, key)}. Choose another directory for a new run."
            )


def _shown(settings: dict[str, Any], key: str) -> str:
    """Return a setting for a message; the other run may have a table where this one has a value."""
    if key in settings:
        return repr(settings[key])
    table = {k[len(key) + 1 :]: v for k, v in settings.items() if k.startswith(f"{key}.")}
    parent = next((f"{k} = {v!r}" for k, v in settings.items() if key.startswith(f"{k}.")), None)
    return str(table) if table else f"missing ({parent})" if parent else "None"
