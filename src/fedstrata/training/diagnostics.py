"""Diagnostics: a callback that records what happens inside local steps.

A local step reports values with ``client.report(vhat=v, rate=lambda: lr / v.sqrt())``, which costs nothing unless a
callback listens. ``rate`` is the learning rate of each coordinate; other names are vectors whose norms can be recorded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch

from fedstrata.core.clock import Clock
from fedstrata.core.errors import InputError, invalid
from fedstrata.core.files import Row, Rows
from fedstrata.core.kinds import Limits
from fedstrata.core.options import options, param
from fedstrata.training.callbacks import Callback, Reports


class Diagnostics(Callback):
    """Record what local steps report: one row per round, and one per step of selected clients.

    The row of a round has ``local_steps``, the most that any client took. With ``norms``, every local step of the
    selected clients has its own row: {round, client, step, vhat}. With ``rates``, the row of a round has the effective
    learning rates of its clients: mean (``rate``), minimum (``rate_least``), maximum (``rate_most``), and standard
    deviation over mean (``rate_spread``; 0 if all clients have the same rate). A client's effective rate is the median
    over coordinates of the ``rate`` it reports in its last step of the round, since coordinates whose gradient is
    always 0 would dominate a mean. The rows are in ``rows``, and if ``folder`` (usually the run directory) is given,
    also in its ``diagnostics.jsonl`` and ``diagnostics.png``.
    """

    @options("the diagnostics")
    def __init__(
        self,
        norms: Sequence[str] = param(
            (), "vectors reported by the algorithm whose squared norms to record after every local step"
        ),
        clients: Annotated[int, Limits(least=1)] | Sequence[Annotated[int, Limits(least=0)]] = param(
            2,
            "clients whose norms to record: their numbers, or how many of a round's clients, lowest numbers first",
        ),
        rounds: Sequence[int] | None = param(None, "rounds to record, counted from 1; by default all", least=1),
        rates: bool = param(False, "whether to record the clients' effective learning rates"),
        strict: bool = param(True, "whether a vector that the algorithm does not report is an error", in_file=False),
        folder: str | Path | None = None,
    ) -> None:
        self.norms, self.clients, self.rates, self.strict = norms, clients, rates, strict
        self.rounds = None if rounds is None else frozenset(rounds)
        path = None if folder is None else Path(folder) / "diagnostics.jsonl"
        self.log = None if path is None else Rows(path, "round", allow_nan=True)
        self.rows: list[Row] = []
        self.title = "this algorithm"
        self._begin()

    def _begin(self) -> None:
        self._steps: Counter[int] = Counter()
        self._norms: dict[int, list[Row]] = {}
        self._rates: dict[int, float] = {}

    def on_start(self, title: str, done: int, rounds: int, note: str) -> None:
        """Load the rows of the finished rounds."""
        self.rows, self.title = [], title
        if self.log is not None:
            self.log.path.parent.mkdir(parents=True, exist_ok=True)
            self.rows = self.log.keep(done)
        self._begin()

    def on_local_step(self, clock: Clock, ids: np.ndarray, reports: Reports) -> None:
        """Record the reports of this step."""
        self._steps.update(ids.tolist())
        number = clock.round + 1
        if clock.round < 0 or (self.rounds is not None and number not in self.rounds):
            return
        names = [name for name in self.norms if self._reported(name, reports)]
        chosen = [c for c, k in enumerate(ids) if isinstance(self.clients, int) or k in self.clients]
        if chosen and names:
            squares = {name: _rows(name, reports, ids)[chosen].square().sum(1).tolist() for name in names}
            for index, c in enumerate(chosen):
                row = {"round": number, "client": int(ids[c]), "step": clock.step + 1}
                row |= {name: values[index] for name, values in squares.items()}
                self._norms.setdefault(int(ids[c]), []).append(row)
        if self.rates and self._reported("rate", reports):
            values = _rows("rate", reports, ids).median(1).values
            self._rates.update(zip(map(int, ids), values.tolist(), strict=True))

    def _reported(self, name: str, reports: Reports) -> bool:
        if name in reports or not self.strict:
            return name in reports
        names = ", ".join(reports) or "nothing"
        raise InputError(f"The local steps of {self.title} do not report {name!r}. Reported: {names}.")

    def on_round(self, round: int, state: Any) -> None:
        """Write the round's rows."""
        row: Row = {"round": round, "local_steps": max(self._steps.values(), default=0)}
        if self._rates:
            rates = np.array(list(self._rates.values()))
            row |= {"rate": float(rates.mean()), "rate_least": float(rates.min()), "rate_most": float(rates.max())}
            row["rate_spread"] = float(rates.std() / rates.mean())
        kept = sorted(self._norms)
        kept = kept[: self.clients] if isinstance(self.clients, int) else kept
        new = [row, *(step for client in kept for step in self._norms[client])]
        self.rows += new
        if self.log is not None:
            self.log.append(*new)
        self._begin()

    def on_end(self, run: Any) -> None:
        """Plot the diagnostics."""
        if run is not None and self.log is not None and self.rows:
            from fedstrata.training.plots import plot_diagnostics

            plot_diagnostics(self.rows, self.log.path.with_suffix(".png"))


def _rows(name: str, reports: Reports, ids: np.ndarray) -> torch.Tensor:
    value = reports[name]()
    if not isinstance(value, torch.Tensor) or value.dim() != 2 or len(value) != len(ids):
        got = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
        raise invalid(f"{name!r} reported by a local step", got, f"a tensor [clients, numbers] with {len(ids)} rows")
    return value.double()
