"""Diagnostics: what goes on inside local steps, written down by a callback.

An algorithm's local step feeds them with ``client.report(vhat=v, rate=lambda: lr / v.sqrt())``; nobody listening, that
costs nothing. ``rate`` is the learning rate of every coordinate, other names are vectors whose norms one may want.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch

from fedstrata.core.errors import InputError, invalid
from fedstrata.core.files import Row, read_rows, write_atomically
from fedstrata.core.kinds import Limits
from fedstrata.core.options import options, param
from fedstrata.core.schedules import Clock
from fedstrata.training.callbacks import Callback, Reports


class Diagnostics(Callback):
    """Writes down what local steps report: one row for a round, and one for every step of chosen clients.

    Every round's row has ``local_steps``, those of the busiest client. With ``norms`` every local step of the chosen
    clients has a row of its own: {round, client, step, vhat}. With ``rates`` a round's row has the effective learning
    rates of its clients: their mean (``rate``), smallest and largest, and standard deviation over mean
    (``rate_spread``; 0 says that nothing is specific to a client). A client's is the median over coordinates of what it
    reports as ``rate`` in its last step of the round, because coordinates whose gradient is always 0 would dominate a
    mean. The rows are in ``rows``, and with a ``folder``, usually the run directory, also in ``diagnostics.jsonl`` and
    ``diagnostics.png`` there.
    """

    @options("the diagnostics")
    def __init__(
        self,
        norms: Sequence[str] = param(
            (), "vectors that the algorithm reports whose squared norms to record after every local step"
        ),
        clients: Annotated[int, Limits(least=1)] | Sequence[Annotated[int, Limits(least=0)]] = param(
            2,
            "clients whose norms to record: a list of numbers, or how many of a round's clients, lowest numbers first",
        ),
        rounds: Sequence[int] | None = param(None, "rounds to record, counted from 1; by default all", least=1),
        rates: bool = param(False, "whether to record the clients' effective learning rates"),
        strict: bool = param(True, "whether a vector that the algorithm does not report is an error", in_file=False),
        folder: str | Path | None = None,
    ) -> None:
        self.norms, self.clients, self.rates, self.strict = norms, clients, rates, strict
        self.rounds = None if rounds is None else frozenset(rounds)
        self.path = None if folder is None else Path(folder) / "diagnostics.jsonl"
        self.rows: list[Row] = []
        self.title = "this algorithm"
        self._begin()

    def _begin(self) -> None:
        self._steps: Counter[int] = Counter()
        self._norms: dict[int, list[Row]] = {}
        self._rates: dict[int, float] = {}

    def on_start(self, title: str, done: int, rounds: int, note: str) -> None:
        """Take up the rows of the rounds that are done already."""
        self.rows, self.title = [], title
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.rows = [r for r in read_rows(self.path) if r["round"] <= done]
            write_atomically(self.path, _lines(self.rows).encode())
        self._begin()

    def on_local_step(self, clock: Clock, ids: np.ndarray, reports: Reports) -> None:
        """Take down what this step of these clients reports."""
        self._steps.update(ids.tolist())
        number = clock.round + 1
        if clock.round < 0 or (self.rounds is not None and number not in self.rounds):
            return
        names = [name for name in self.norms if self._there(name, reports)]
        chosen = [c for c, k in enumerate(ids) if isinstance(self.clients, int) or k in self.clients]
        if chosen and names:
            squares = {name: _rows(name, reports, ids)[chosen].square().sum(1).tolist() for name in names}
            for place, c in enumerate(chosen):
                row = {"round": number, "client": int(ids[c]), "step": clock.step + 1}
                row |= {name: values[place] for name, values in squares.items()}
                self._norms.setdefault(int(ids[c]), []).append(row)
        if self.rates and self._there("rate", reports):
            values = _rows("rate", reports, ids).median(1).values
            self._rates.update(zip(map(int, ids), values.tolist(), strict=True))

    def _there(self, name: str, reports: Reports) -> bool:
        if name in reports or not self.strict:
            return name in reports
        told = ", ".join(reports) or "nothing"
        raise InputError(f"No {name!r} is reported by the local steps of {self.title}. Reported: {told}.")

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
        if self.path is not None:
            with self.path.open("a") as file:
                file.write(_lines(new))
        self._begin()

    def on_end(self, run: Any) -> None:
        """Draw the picture."""
        if run is not None and self.path is not None and self.rows:
            from fedstrata.training.plots import plot_diagnostics

            plot_diagnostics(self.rows, self.path.with_suffix(".png"))


def _lines(rows: Sequence[Row]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def _rows(name: str, reports: Reports, ids: np.ndarray) -> torch.Tensor:
    value = reports[name]()
    if not isinstance(value, torch.Tensor) or value.dim() != 2 or len(value) != len(ids):
        got = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
        raise invalid(f"{name!r} that a local step reports", got, f"a tensor [clients, numbers], {len(ids)} rows here")
    return value.double()
