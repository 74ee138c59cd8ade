"""Class counts that leave a site: none below the minimum is exact, and together they are right on average."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedstrata as fs
from federation.stand_in import made, simulated, site
from fedstrata.clients.queries import QUERIES
from fedstrata.data.federated import Part
from fedstrata.data.tables.statistics import class_counts
from fedstrata.experiments.build import Experiment
from fedstrata.problems.auc import positives as auc_share
from fedstrata.problems.queries import class_shares
from fedstrata.training.rounds import prepare_tables
from fedstrata.training.train import make_clients

SCHEMA = {
    "version": 1,
    "site": "site",
    "target": {"name": "died"},
    "columns": [{"name": "age", "kind": "numeric", "missing": "mean"}],
}
SITES = [(40, 12), (40, 3), (3, 40), (12, 0), (6, 2), (1, 0), (0, 1), (10, 10), (53, 1)]
"""Rows of class 0 and 1."""


def rows(key: int) -> np.ndarray:
    return np.random.default_rng(key).normal(size=7)


@pytest.mark.parametrize("counts", [*SITES, (5, 0, 7), (100, 3, 0, 60, 9), (0, 0)])
@pytest.mark.parametrize("minimum", [1, 2, 10])
def test_no_small_count_is_told(counts: tuple[int, ...], minimum: int) -> None:
    exact = np.array(counts)
    small = ((exact > 0) & (exact < minimum)).any()
    told = np.array([class_counts(exact, minimum, rows(key)) for key in range(400)])
    assert np.array_equal(told[0], class_counts(exact, minimum, rows(0))), "the same question, the same answer"
    assert ((told == 0) | (told >= minimum)).all(), "not as a count, nor as the difference of the sum"
    if not small:
        assert (told == exact).all()
    else:
        spread = np.sqrt(told.var(0) / 400) + 1e-9
        assert np.all(np.abs(told.mean(0) - exact) < 4.5 * spread + 1e-6), "right on average"
    if exact.sum() >= minimum:
        assert (told.sum(1) == exact.sum()).all()


@pytest.mark.parametrize(
    ("one", "other"), [((40, 3), (39, 4)), ((12, 1), (12, 1)), ((8, 1), (7, 2)), ((59, 1), (51, 9))]
)
def test_what_is_told_fits_other_counts_too(one: tuple[int, int], other: tuple[int, int]) -> None:
    """Who sees the answer, and knows the number of rows, cannot tell how many are of the rare class."""
    seen = [{tuple(class_counts(np.array(c), 10, rows(key))) for key in range(300)} for c in (one, other)]
    assert seen[0] == seen[1] and len(seen[0]) > 1


def test_shares_are_right_on_average() -> None:
    generator = np.random.default_rng(0)
    positives, total = generator.integers(0, 4, 3000), generator.integers(10, 16, 3000)
    told = np.array(
        [class_counts(np.array([n - p, p]), 10, rows(k)) for k, (p, n) in enumerate(zip(positives, total, strict=True))]
    )
    weights = torch.full((3000,), 1 / 3000, dtype=torch.float64)
    shares = class_shares(torch.from_numpy(told), weights)
    assert float(shares[1]) == pytest.approx((positives / total).mean(), rel=0.06)


def test_sites_that_tell_nothing_are_left_out_of_the_shares() -> None:
    counts = torch.tensor([[30.0, 10.0], [0.0, 0.0], [10.0, 10.0]])
    assert class_shares(counts, torch.tensor([0.25, 0.5, 0.25])).tolist() == [0.625, 0.375]
    assert class_shares(torch.zeros(2, 4), torch.tensor([0.5, 0.5])).tolist() == [0.25] * 4
    with pytest.raises(fs.InputError, match=r"'none, on all clients'.* prepare\.minimum may tell of none: then pass p"):
        auc_share(torch.zeros(2, 2), torch.tensor([0.5, 0.5]))


def test_runs_with_other_seeds_tell_the_same() -> None:
    """Otherwise their mean would be the number of rows that is hidden."""
    rng = np.random.default_rng(0)
    x, y = torch.from_numpy(rng.normal(size=(60, 3))), torch.from_numpy(np.repeat([0, 1], [53, 7]))
    data = fs.FederatedData(Part.of((x, y), [np.arange(60)]), classes=2)
    seeds = [data.with_holdout(0.3, seed) for seed in range(30)]
    assert len({tuple(one.train.of_client(0)[0][:, 0].tolist()) for one in seeds}) == 30
    assert len({tuple(one.class_counts(0, 10)) for one in seeds}) == 1


def write_sites(file: Path) -> None:
    rng = np.random.default_rng(0)
    lines = [
        f"{name},{rng.normal(50 + 10 * died, 10):.3f},{died}"
        for name, counts in zip("abcdefghi", SITES, strict=True)
        for died in np.repeat([0, 1], counts)
    ]
    file.write_text("site,age,died\n" + "\n".join(lines) + "\n")


def config_of(file: Path, minimum: int) -> Any:
    return made(
        {
            "data": {"tables": str(file), "schema": SCHEMA},
            "prepare": {"minimum": minimum},
            "model": {"name": "logreg"},
            "problem": {"name": "auc", "score": "none"},
            "algorithm": {"name": "local_sgda", "lr": 0.01, "steps": 2},
            "train": {"rounds": 1, "batch_size": 8, "threads": 1, "calibrate": "none"},
        }
    )


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("minimum", [1, 10])
def test_answers_are_the_same_in_every_engine_and_tell_no_small_class(tmp_path: Path, minimum: int) -> None:
    write_sites(tmp_path / "all.csv")
    config = config_of(tmp_path / "all.csv", minimum)
    alone = simulated(config)
    nodes = site(tmp_path / "federation", config)
    here = nodes.here
    nodes.here = lambda node: {**here(node), "minimum": str(minimum)}  # type: ignore[method-assign]
    run = nodes.serve(tmp_path / "run")
    answers = [
        reply.arrays[0].ravel()
        for sent, reply in zip(nodes.sent, nodes.replies, strict=True)
        if sent.header.get("work") == "query:class_counts"
    ]
    assert len(answers) == len(SITES)
    for counts, told in zip(SITES, answers, strict=True):
        if minimum == 1 or not any(0 < n < 10 for n in counts):
            assert told.tolist() == list(counts)
        else:
            assert ((told == 0) | (told >= 10)).all() and told.tolist() != list(counts)
    torch.testing.assert_close(run.x, alone.x, atol=1e-6, rtol=1e-5)
    clients = make_clients(alone.problem, Experiment(config).data, config.settings)
    clients.begin(-1)
    prepare_tables(clients)
    np.testing.assert_array_equal(clients.gather(QUERIES["class_counts"]).numpy(), np.stack(answers))
