"""What a run on two classes learns of its scores in the end: a calibration, and the counts behind thresholds."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load

from fedstrata.clients.clients import Clients
from fedstrata.core.errors import InputError, Unsolvable, invalid
from fedstrata.training.checkpoint import to_safetensors
from fedstrata.training.risk.calibration import Calibration, Method, calibrate
from fedstrata.training.risk.score_counts import ScoreCounts, count_scores

SCORES = "scores.safetensors"
"""The file in a run directory with the counts of held-out scores."""


@dataclass(frozen=True)
class Risks:
    """What a run knows of its scores.

    calibration: what turns a score into a risk; None if scores are not probabilities.
    held_out:    counts of the scores of held-out rows; None if there are none.
    why:         why there is no calibration, or no counts.
    nbytes:      the bytes that clients sent for it.
    """

    calibration: Calibration | None
    held_out: ScoreCounts | None
    why: str = ""
    nbytes: int = 0


def learn_risks(clients: Clients, x: torch.Tensor, method: Literal["auto"] | Method) -> Risks:
    """Ask the clients for counts of their scores; calibrate on training rows, and count held-out rows.

    method: how to calibrate; "auto" is Platt's curve if the model only ranks, and none if its outputs are logits.
    """
    data, before = clients.engine.side.data, clients.usage.bytes_up
    ranks_only = clients.problem.ranks_only
    chosen: Method = ("platt" if ranks_only else "none") if method == "auto" else method
    calibration: Calibration | None = None
    held_out: ScoreCounts | None = None
    reasons: list[str] = []
    try:
        if chosen != "none":
            calibration = calibrate(count_scores(clients, x, held_out=False), chosen)
        elif not ranks_only:
            calibration = Calibration("none")
    except Unsolvable as error:
        reasons.append(f"Scores are not calibrated: {error}")
    try:
        if data.client_test is not None or clients.engine.elsewhere:
            held_out = count_scores(clients, x, held_out=True)
    except Unsolvable as error:
        reasons.append(f"Held-out scores are not counted: {error}")
    return Risks(calibration, held_out, " ".join(reasons), clients.usage.bytes_up - before)


def counts_as_bytes(counts: ScoreCounts) -> bytes:
    """Return the content of the file with counts."""
    arrays = {"edges": counts.edges, "counts": counts.counts}
    return to_safetensors({name: torch.from_numpy(np.ascontiguousarray(a)) for name, a in arrays.items()})


def read_counts(folder: Path) -> ScoreCounts:
    """Read the counts of held-out scores in a run directory."""
    path = folder / SCORES
    if not path.exists():
        raise InputError(
            f"The run in {folder} has no counts of held-out scores. Only runs on tables of two classes with held-out "
            "rows have them: set data.holdout."
        )
    try:
        tensors = load(path.read_bytes())
        edges, counts = tensors["edges"].double().numpy(), tensors["counts"].double().numpy()
    except (OSError, KeyError, ValueError, SafetensorError) as error:
        raise InputError(f"The file {path} cannot be read: {error}") from None
    right = edges.ndim == 1 and counts.ndim == 3 and counts.shape[1:] == (2, len(edges) + 1)
    if not right or not np.isfinite(edges).all() or not (counts >= 0).all() or not (np.diff(edges) > 0).all():
        raise invalid(str(path), f"{edges.shape} and {counts.shape}", "increasing edges, and counts of their cells")
    return ScoreCounts(edges, counts)
