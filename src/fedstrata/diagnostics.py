"""Diagnostics: what goes on inside local steps, written down by a callback.

An algorithm's local step feeds them with ``client.report(vhat=v, rate=lambda: lr / v.sqrt())``; nobody listening, that
costs nothing. ``rate`` is the learning rate of every coordinate, other names are vectors whose norms one may want.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedstrata.callbacks import Callback, Reports
from fedstrata.checkpoint import write_atomically
from fedstrata.errors import InputError, invalid
from fedstrata.schedules import Clock

Row = dict[str, Any]


class Diagnostics(Callback):
    """Writes down what local steps report: one row for a round, and one for every step of chosen clients.

    norms:    names of reported vectors whose squared norms are wanted, e.g. ``["vhat"]``: a row for each local step
              {round, client, step, vhat}.
    clients:  whose: a list of their numbers, or how many of those that take part in a round, lowest numbers first.
    rounds:   in which rounds, from 1; None for all.
    rates:    whether to measure the effective learning rates too. A client's is the geometric mean over coordinates of
              what it reports as ``rate``, in its last step of the round; a round's row tells their mean over clients
              (``rate``), their smallest and largest, and their standard deviation over their mean (``rate_spread``; 0
              says that nothing is specific to a client).
    folder:   where ``diagnostics.jsonl`` and ``diagnostics.png`` go, usually the run directory; None keeps the rows in
              memory only.

    Every round's row has ``local_steps``, those of the busiest client. The rows are in ``rows``.
    """

    def __init__(
        self,
        norms: Sequence[str] = (),
        clients: int | Sequence[int] = 2,
        rounds: Sequence[int] | None = None,
        rates: bool = False,
        folder: str | Path | None = None,
    ) -> None:
        if (clients < 1) if isinstance(clients, int) else any(k < 0 for k in clients):
            raise invalid("clients of the diagnostics", clients, "a number of at least 1, or a list of client numbers")
        self.norms, self.clients, self.rates = tuple(norms), clients, rates
        self.rounds = None if rounds is None else frozenset(rounds)
        self.path = None if folder is None else Path(folder) / "diagnostics.jsonl"
        self.rows: list[Row] = []
        self._begin()

    def _begin(self) -> None:
        self._steps = 0
        self._norms: dict[int, list[Row]] = {}
        self._rates: dict[int, float] = {}

    def on_start(self, title: str, done: int, rounds: int, note: str) -> None:
        """Take up the rows of the rounds that are done already."""
        self.rows = []
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.rows = [r for r in read_rows(self.path) if r["round"] <= done]
            write_atomically(self.path, _lines(self.rows).encode())
        self._begin()

    def on_local_step(self, clock: Clock, ids: np.ndarray, reports: Reports) -> None:
        """Take down what this step of these clients reports."""
        self._steps = max(self._steps, clock.step + 1)
        number = clock.round + 1
        if clock.round < 0 or (self.rounds is not None and number not in self.rounds):
            return
        for name in self.norms:
            if name not in reports:
                raise InputError(f"No {name!r} is reported by the local steps of this algorithm. {_there(reports)}")
        chosen = [c for c, k in enumerate(ids) if isinstance(self.clients, int) or k in self.clients]
        if chosen and self.norms:
            squares = {name: reports[name]()[chosen].double().square().sum(1).tolist() for name in self.norms}
            for place, c in enumerate(chosen):
                row = {"round": number, "client": int(ids[c]), "step": clock.step + 1}
                row |= {name: values[place] for name, values in squares.items()}
                self._norms.setdefault(int(ids[c]), []).append(row)
        if self.rates:
            if "rate" not in reports:
                raise InputError(f"No 'rate' is reported by the local steps of this algorithm. {_there(reports)}")
            values = reports["rate"]().double().log().mean(1).exp()
            self._rates.update(zip(map(int, ids), values.tolist(), strict=True))

    def on_round(self, round: int, state: Any) -> None:
        """Write the round's rows."""
        row: Row = {"round": round, "local_steps": self._steps}
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
            from fedstrata.plots import plot_inside

            plot_inside(self.rows, self.path.with_suffix(".png"))


def read_rows(path: Path) -> list[Row]:
    """Return the rows of a diagnostics.jsonl; a line cut off by a kill is left out."""
    rows: list[Row] = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return rows


def _lines(rows: Sequence[Row]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def _there(reports: Reports) -> str:
    return f"Reported: {', '.join(reports) or 'nothing'}."
