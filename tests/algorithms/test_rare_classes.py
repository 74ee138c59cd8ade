"""LocalSGDM-RL: the ratios of changes, and where it is FedAvg."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import fedstrata as fs
from cases import product
from fedstrata.algorithms.local_sgdm_rl import change_ratios
from reference import local_sgdm_rl
from support import make_clients, make_setting, shared_oracles, sized_data, softmax_problem, started
from worlds import SIZES, Vector

pytestmark = pytest.mark.untraced

PROBLEM = softmax_problem(classes=3)
RARE: dict[str, Any] = {"lr": 0.3, "weight_decay": 0.05}
SETTINGS: dict[str, dict[str, Any]] = {
    "minibatches": {"batch_size": 3},
    "full batches": {"batch_size": None},
    "weighted": {"batch_size": 3, "weighting": "samples"},
    "epochs": {"batch_size": 4, "sampling": "epochs"},
    "partial": {"batch_size": 3, "participation": 3},
}


def rare_data() -> fs.FederatedData:
    rng = np.random.default_rng(1)
    return sized_data(SIZES, classes=3).with_auxiliary(rng.normal(size=(9, 3)), np.arange(9) % 3)


def empty_exchange(clients: Any) -> None:
    """The clients are asked for nothing, in the exchange in which the server has its own work."""
    clients.mean(lambda client, x: x[:, :0], torch.zeros(1))


def solve(
    algorithm: fs.Algorithm,
    rounds: int = 3,
    before: Callable[[Any], None] = lambda clients: None,
    data: fs.FederatedData | None = None,
    weighting: str = "uniform",
    participation: int | float = 1.0,
    **drawing: Any,
) -> Any:
    setting = make_setting(PROBLEM, data or rare_data(), seed=7, oracles=shared_oracles(PROBLEM), **drawing)
    clients = make_clients(setting, rounds=rounds, chunk=3, weighting=weighting, participation=participation)
    with torch.no_grad():
        state = started(algorithm, clients)
        for r in range(rounds):
            clients.begin(r)
            before(clients)
            state = algorithm.round(state, clients)
    return state


def far(one: Any, other: Any) -> float:
    return float((one.x - other.x).abs().max())


@pytest.mark.slow
@pytest.mark.parametrize(("setting", "steps"), [*((s, 4) for s in SETTINGS), ("epochs", fs.Epochs(1.5))])
def test_equal_weights_without_momentum_are_fedavg(setting: str, steps: Any) -> None:
    """And so is the first round with any slope, in which all classes weigh 1; the second is not."""
    plain, run = fs.FedAvg(steps=steps, **RARE), SETTINGS[setting]
    for slope, rounds, same in ((0.0, 3, True), (0.5, 1, True), (0.5, 2, False)):
        expected = solve(plain, rounds, before=empty_exchange, **run)
        found = solve(fs.LocalSGDMRL(steps=steps, momentum=0.0, slope=slope, **RARE), rounds, **run)
        assert far(found, expected) < 1e-12 if same else far(found, expected) > 1e-4
        assert (found.w == 1).all() == (slope == 0)


def test_with_all_data_equal_weights_without_momentum_are_fedavg_as_it_is() -> None:
    found = solve(fs.LocalSGDMRL(steps=4, momentum=0.0, slope=0.0, **RARE))
    assert far(found, solve(fs.FedAvg(steps=4, **RARE))) < 1e-12
    assert far(found, solve(fs.LocalSGDMRL(steps=4, momentum=0.1, slope=0.0, **RARE))) > 1e-3


def test_the_servers_samples_do_not_matter_where_classes_weigh_the_same() -> None:
    data = rare_data()
    other = data.with_auxiliary(np.zeros((3, 3)), np.arange(3))
    ends = {
        slope: [solve(fs.LocalSGDMRL(slope=slope, steps=3), data=d, batch_size=4) for d in (data, other)]
        for slope in (0.0, 0.1)
    }
    assert all(torch.equal(*values) for values in zip(*ends[0.0], strict=True))
    assert far(*ends[0.1]) > 1e-3


# --- ratios ----------------------------------------------------------------------------------------------------------


def changes_of(kind: str, classes: int, positions: int, rng: np.random.Generator) -> Vector:
    """Changes of a matrix; all but normal ones are fractions whose sums and products with a share are exact."""
    shape = classes, positions
    if kind == "normal":
        return rng.normal(size=shape)
    if kind == "ties":
        return rng.integers(-4, 5, size=shape) / 8
    if kind == "zeros":
        return rng.integers(-1, 2, size=shape) * rng.choice([0.0, 0.0, 0.5, 1.0], size=positions)
    if kind == "one class alone":
        return np.where(np.arange(classes)[:, None] == rng.integers(classes), rng.integers(-4, 5, size=shape) / 4, 0.0)
    if kind == "not positive":
        return -rng.integers(0, 4, size=shape) / 4.0
    assert kind == "far apart"
    return np.where(rng.uniform(size=shape) < 0.5, 1.0, 2.0**-14) * rng.integers(-3, 4, size=shape)


KINDS = ["normal", "ties", "zeros", "one class alone", "not positive", "far apart"]


@product("kind, share", KINDS, [0.25, 0.5, 0.75, 1.0, 1.5])
def test_ratios_agree_with_the_reference(kind: str, share: float) -> None:
    """With shares that are not below 1 a tie is the first class's, and a largest change below 0 may be a class's."""
    rng = np.random.default_rng([3, KINDS.index(kind)])
    for classes in (2, 3, 5):
        for positions in (1, 4, 12):
            for _ in range(3):
                changes = changes_of(kind, classes, positions, rng)
                found = change_ratios(torch.from_numpy(changes), share).numpy()
                expected = local_sgdm_rl.ratios(changes, share=share)
                np.testing.assert_allclose(found, expected, rtol=1e-9, err_msg=str(changes))


def test_ratios_of_changes_that_cancel() -> None:
    """The others' changes add up to exactly 0, also where those of all classes round."""
    changes = torch.tensor([[0.8], [0.4], [-0.4]]).double()
    np.testing.assert_allclose(change_ratios(changes, 0.8), [10.0, 10.0, 10.0])
    np.testing.assert_allclose(change_ratios(torch.tensor([[1.0], [1e-3]]), 0.8), [1000.0, 10.0], rtol=1e-6)


def test_ratios_by_hand() -> None:
    """Positions: the first is class 0's; the second nobody's, -0.9 being more than 80 %; the third is class 1's.

    The fourth, largest at exactly 0, is class 2's if no other change is 0 there.
    """
    changes = torch.tensor([[2.0, 1.0, -0.5, -1.0], [0.5, 0.1, 1.0, -2.0], [-1.0, -0.9, 0.25, 0.0]]).double()
    found = change_ratios(changes, 0.8)
    np.testing.assert_allclose(found, [2.0 / 0.25, 1.0 / 0.125, 0.0])
    changes[0, 3] = 0.0
    np.testing.assert_allclose(change_ratios(changes, 0.8), [8.0, 8.0, 10.0])
    changes[1:, 0] = 0.0
    np.testing.assert_allclose(change_ratios(changes, 0.8), [10.0, 8.0, 10.0])
    changes[2, 0] = 2.0**-14
    np.testing.assert_allclose(change_ratios(changes, 0.8), [5000.0, 8.0, 10.0])
    np.testing.assert_allclose(change_ratios(changes, 0.8, empty=3.0, cap=7.0), [7.0, 7.0, 3.0])
