"""What a run is: its settings as tables, and a digest of its data and its start, so that no other is ever resumed."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any

from fedstrata.algorithms.algorithm import Algorithm
from fedstrata.clients.channel import PLAIN
from fedstrata.core.errors import InputError
from fedstrata.core.files import flatten
from fedstrata.core.options import Options, plain
from fedstrata.data.federated import FederatedData
from fedstrata.problems.problem import Problem
from fedstrata.training.settings import Settings


def settings_of(problem: Problem, data: FederatedData, algorithm: Algorithm, settings: Settings) -> dict[str, Any]:
    """Return what is known of a run as the tables of a configuration file."""
    around = {"channel": settings.channel, "faults": settings.faults}
    return {
        **{k: v.to_table() for k, v in around.items() if v is not None and v != PLAIN},
        "train": settings.to_table(),
        "algorithm": algorithm.to_table(),
        "problem": {"name": problem.name, "size": len(problem.x0), **_plain(problem.options)},
        "data": {"name": data.name, "clients": data.clients},
    }


def _plain(options: Mapping[str, object]) -> dict[str, object]:
    """Return options as a file holds them: functions by their name, nothing for what was left out."""
    values = {k: v if isinstance(v, Options) or not callable(v) else _name(v) for k, v in options.items()}
    return {k: plain(v) for k, v in values.items() if v is not None}


def _name(function: object) -> str:
    return str(getattr(function, "__name__", repr(function)))


def digest_of(problem: Problem, data: FederatedData) -> dict[str, str]:
    """Return what tells other data or another start from these, so that nothing else is ever resumed."""
    start = [problem.x0] if problem.y0 is None else [problem.x0, problem.y0]
    parts = [p for p in (data.train, data.support, data.client_test, data.auxiliary) if p is not None]
    arrays = {id(a): a for p in parts for a in (*p.arrays, p.rows)}
    tensors = {"start": start, "data": [*arrays.values(), *(data.test or ())]}
    out = {}
    for name, group in tensors.items():
        digest = blake2b(b"".join(p.sizes.tobytes() for p in parts), digest_size=8)
        for tensor in group:
            digest.update(tensor.detach().cpu().contiguous().numpy().data)
        out[name] = digest.hexdigest()
    return out


FREE_TO_CHANGE = {
    *("train.rounds", "train.threads", "train.checkpoint_every", "train.state_memory", "data.directory"),
    *("faults.quorum", "faults.retries", "faults.timeout", "faults.max_bytes"),
}
"""Settings that a resumed run may change without becoming another run."""

_START = "digest.start"


def refuse_other_settings(old: dict[str, Any], new: dict[str, Any], path: Path) -> None:
    """Refuse to resume the run in ``path``, which has ``old`` settings, with ``new`` ones that make it another run."""
    before, now = flatten(old), flatten(new)
    free = set(FREE_TO_CHANGE)
    if _START not in before or _START not in now:  # pre-training is still to find the start
        free.add(_START)
    for key in sorted(before.keys() | now.keys(), key=lambda k: (k.startswith("digest."), k)):
        if key.startswith(("diagnostics.", "written_by.")):  # not part of the run itself
            continue
        if key not in free and before.get(key) != now.get(key):
            raise InputError(
                f"The run in {path} cannot be resumed with other settings: {key} was {_told(before, key)} there and is "
                f"{_told(now, key)} now. Choose another directory for a new run."
            )


def _told(settings: dict[str, Any], key: str) -> str:
    """Return a setting in words; one that is a table in the one run and none in the other as that table."""
    if key not in settings:
        inside = {k[len(key) + 1 :]: v for k, v in settings.items() if k.startswith(f"{key}.")}
        outside = next((f"{k} = {v!r}" for k, v in settings.items() if key.startswith(f"{k}.")), None)
        return str(inside) if inside else f"not there ({outside})" if outside else "None"
    return repr(settings[key])
