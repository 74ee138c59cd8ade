"""What is counted is what the "Sent" rows of the algorithms' docstrings say, for every row and every option.

The row that applies is the one with the most options that fit; without a row, nothing is sent before the first round.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import sys
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch

import fedstrata as fs
from algorithms.examples import quick
from cases import product, table
from fedstrata.algorithms import ALGORITHMS
from fedstrata.algorithms.sent import Sent, sent, sent_by
from fedstrata.clients import Clients
from fedstrata.core.options import options_of
from fedstrata.training.testing import counted, sizes_of
from saddle_worlds import SADDLES, Saddle
from support import example_for, smooth_example

pytestmark = pytest.mark.untraced

# --- rows ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("module", sorted({kind.__module__ for kind in ALGORITHMS.values()}))
def test_every_line_of_a_table_is_a_row_of_an_algorithm_of_the_file(module: str) -> None:
    """Any other line would be read as if it were not there."""
    kinds = {name: kind for name, kind in ALGORITHMS.items() if kind.__module__ == module}
    block = re.search(r"^Sent, per client and round.*:\n((?: {4}.+\n)+)", sys.modules[module].__doc__ or "", re.M)
    for line in block[1].splitlines() if block else ():
        row = re.fullmatch(r" {4}(.+?) {2,}up .+? {2,}down .+", line)
        assert row, f"{module}: write {line!r} as '    name, option = value    up 2*d    down d'."
        name = re.split(r" \(|, ", row[1])[0]
        assert name in kinds or row[1] == "before the first round", (
            f"{module}: {line!r} begins with no name of the file."
        )
        for option in re.findall(r"(\w+) =", row[1]):
            assert option in options_of(kinds[name]), f"{module}: {name} has no hyperparameter {option}."


# --- counting --------------------------------------------------------------------------------------------------------


@cache
def example(name: str, variant: str, dtype: torch.dtype) -> tuple[fs.Problem, fs.FederatedData]:
    """A problem of the algorithm's class, or of a variant's, in which no two of d, r, R, p and C are the same."""
    if variant == "f weights losses":
        plain, data = smooth_example(dtype)
        assert plain.flat is not None
        return fs.robust(plain.flat.module, shift=0.0, prior=False), data
    return fs.testing.sized_example(ALGORITHMS[name], dtype, 1 if variant == "compositional" else None)


def check(algorithm: fs.Algorithm, variant: str, dtype: torch.dtype, share: int | float) -> None:
    """Compare what is counted in two rounds, and before them, with the rows that apply."""
    fs.testing.check_sent(algorithm, *example(algorithm.name, variant, dtype), variant, share)


def written_rows() -> Iterator[tuple[str, Sent]]:
    for name, kind in sorted(ALGORITHMS.items()):
        with contextlib.suppress(fs.FedstrataError):  # what is missing is said by test_conformance.py
            yield from ((name, row) for row in sent(kind) if not row.first)


def place(name: str, row: Sent, dtype: torch.dtype, share: int | float) -> list[Any]:
    shown = [f"{key}={value}" for key, value in row.options.items()]
    return [", ".join(part for part in (name, row.variant, *shown) if part), dtype, share]


ROWS = [
    (*row, dtype, share) for row in written_rows() for dtype in (torch.float32, torch.float64) for share in (1.0, 3)
]


@table("name, row, dtype, share", ROWS, key=place)
def test_a_row_is_what_is_counted(name: str, row: Sent, dtype: torch.dtype, share: int | float) -> None:
    algorithm = quick(ALGORITHMS[name], **row.options)
    assert sent_by(algorithm, row.variant) == row
    check(algorithm, row.variant, dtype, share)


def choices() -> Iterator[tuple[str, str, Any]]:
    """Every choice of every option that is not a number, and not the default."""
    for name, kind in sorted(ALGORITHMS.items()):
        for option in options_of(kind).values():
            values = (True, False) if isinstance(option.default, bool) else option.limits.choices
            yield from ((name, option.name, value) for value in values if value != option.default)


@table("name, option, value", choices(), key=lambda *row: row[:2], name=lambda *row: row)
def test_every_choice_of_an_option_sends_what_its_row_says(name: str, option: str, value: Any) -> None:
    for variant in {row.variant for row in sent(ALGORITHMS[name])}:
        check(quick(ALGORITHMS[name], **{option: value}), variant, torch.float64, 1.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "algorithm",
    [
        fs.FedAMS(option=2),
        fs.LaFedOPT(correction="none", server="adam", optimizer="yogi"),
        fs.FedNest(inner_rounds=4),
        fs.AdaFGDA(synchronisation="single", first_matrix="identity"),
        fs.AdaMFCGD(matrix="amsgrad", jacobian="product", first_matrix="accumulator"),
    ],
    ids=str,
)
def test_several_options_send_what_the_closest_row_says(algorithm: fs.Algorithm) -> None:
    for variant in {row.variant for row in sent(type(algorithm))}:
        check(algorithm, variant, torch.float64, 1.0)


# --- what is no row --------------------------------------------------------------------------------------------------


SADDLE = sorted(name for name, kind in ALGORITHMS.items() if kind.dual and not kind.mixture)
ASKING = {"auc, prepared, scaled": 2, "fair, classes": 3}


@product("name, world", SADDLE, ASKING)
def test_what_a_problem_asks_comes_on_top(name: str, world: str) -> None:
    """The clients' class counts, one number for each class, before the first round."""
    w = SADDLES[world]()
    for row in sent(ALGORITHMS[name]):
        if not row.first:
            algorithm = ALGORITHMS[name](**row.options)
            before, _, clients = counted(algorithm, w.problem, w.data, 0)
            first, sizes = sent_by(algorithm, row.variant or "minimax", first=True), sizes_of(algorithm, clients)
            unit = 8 * w.data.clients
            if row.variant != "compositional":
                assert before.bytes_up == unit * (ASKING[world] + first.numbers(**sizes)[0])
                assert before.bytes_down == unit * first.numbers(**sizes)[1]
            assert before.steps == 0


@pytest.mark.slow
@product("variant, inner_rounds", ["minimax", "compositional"], [1, 2, 5])
def test_fednest_makes_2t_plus_2_exchanges_or_3(variant: str, inner_rounds: int) -> None:
    algorithm = fs.FedNest(inner_rounds=inner_rounds)
    _, usage, clients = counted(algorithm, *example("fednest", variant, torch.float64), rounds=1)
    assert clients.progress.exchanges == 2 * inner_rounds + (2 if variant == "minimax" else 3)
    assert usage.steps == (inner_rounds + 1) * algorithm.steps


def sent_each_round(algorithm: fs.Algorithm, world: Saddle, rounds: int) -> list[tuple[int, int]]:
    """Numbers that a client sent and got in each round."""
    found = [counted(algorithm, world.problem, world.data, r)[1] for r in range(rounds + 1)]
    unit = 8 * world.data.clients
    return [((b.bytes_up - a.bytes_up) // unit, (b.bytes_down - a.bytes_down) // unit) for a, b in pairwise(found)]


@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize(("world", "best"), [("auc", True), ("free", False)])
def test_coda_sends_more_at_the_end_of_a_stage(world: str, best: bool, average: bool) -> None:
    """The stage's mean up, unless the next stage starts at the last point; x down and the best y up, if it is known.

    The stages are 3 and 6 steps: two rounds, then three.
    """
    w = SADDLES[world]()
    d, p = len(w.x0), len(w.y0)
    assert (w.problem.best_y is not None) == best and d != p
    found = sent_each_round(fs.CoDA(lr=0.01, steps=2, stage_steps=3, factor=2.0, average=average), w, 5)
    usual = (d + p, d + p)
    last = (d + p + average * d + best * p, d + p + best * d)
    assert found == [usual, last, usual, usual, last]


@pytest.mark.parametrize("control", [True, False])
def test_codasca_sends_more_at_the_end_of_a_stage(control: bool) -> None:
    """The stage's mean up, and the new centre down."""
    w = SADDLES["free"]()
    d, p = len(w.x0), len(w.y0)
    found = sent_each_round(fs.CODASCA(lr=0.01, steps=2, stage_rounds=2, control=control), w, 5)
    usual = (1 + control) * (d + p)
    assert found == [(usual, usual), (usual + d, usual + d)] * 2 + [(usual, usual)]


def test_drfa_makes_two_exchanges_of_their_own_cohorts(monkeypatch: pytest.MonkeyPatch) -> None:
    """d down and 2d up, then d down and one number up."""
    problem, data = example_for(fs.DRFA)
    seen: list[tuple[int, int, int]] = []

    def noted(method: Any) -> Any:
        def call(clients: Clients, *args: Any, **options: Any) -> Any:
            before = dataclasses.replace(clients.usage)
            out = method(clients, *args, **options)
            up, down = clients.usage.bytes_up - before.bytes_up, clients.usage.bytes_down - before.bytes_down
            seen.append((len(clients), up // 8, down // 8))
            return out

        return call

    for verb in ("mean", "gather"):
        monkeypatch.setattr(Clients, verb, noted(getattr(Clients, verb)))
    counted(fs.DRFA(), problem, data, rounds=1, participation=3)
    d = len(problem.x0)
    assert seen == [(3, 3 * 2 * d, 3 * d), (3, 3, 3 * d)]


@product("normalise, shift", [True, False], [None, 0.0])
def test_robust_asks_for_losses_besides_what_comfedl_asks_for(normalise: bool, shift: float | None) -> None:
    plain, data = smooth_example()
    assert plain.flat is not None
    algorithm, problem = fs.ComFedL(normalise=normalise), fs.robust(plain.flat.module, shift=shift, prior=False)
    before, _, clients = counted(algorithm, problem, data)
    d, unit, asks = len(plain.x0), 8 * data.clients, shift is None
    row = sent_by(algorithm, "f weights losses", first=True)
    assert before.bytes_up == unit * (asks + row.numbers(d=d)[0])
    assert before.bytes_down == unit * (asks * d + row.numbers(d=d)[1])
    assert clients.inner_sizes == (1,)


def test_a_number_that_is_no_loss_is_not_normalised() -> None:
    """Only where the outer function weights losses, not wherever the inner one gives a single number."""
    problem, data = example_for(fs.ComFedL)
    single = dataclasses.replace(problem, levels=(lambda u, batch: (u**2).sum().reshape(1) * batch[0].mean(),))
    single = dataclasses.replace(single, outer=lambda u, batch: (u**2).sum())
    before, during, clients = counted(fs.ComFedL(lr=1e-3), single, data)
    assert clients.inner_sizes == (1,)
    assert before.bytes_down == 0
    assert during.bytes_up == 2 * 8 * data.clients * len(problem.x0)
