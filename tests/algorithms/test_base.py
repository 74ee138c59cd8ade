"""Hyperparameters are checked when an algorithm is built, also one that a user wrote with plain fields."""

# No "from __future__ import annotations" here: a user's file may do without it.

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import fedstrata as fs
from fedstrata.algorithms import ALGORITHMS
from fedstrata.core.schedules import Rate, Steps
from support import make_clients, make_setting, started


@pytest.fixture(autouse=True)
def _leave_the_registry_alone() -> Iterator[None]:
    before = dict(ALGORITHMS)
    yield
    ALGORITHMS.clear()
    ALGORITHMS.update(before)


OR_STEPS = "epochs such as {epochs = 2}, or an interval such as {initial = 4, base = 2.0}"

BAD = [
    ("fedavg", {"lr": 0.0}, "The lr of fedavg must be a number above 0, or a schedule. Got 0.0."),
    ("fedavg", {"lr": "fast"}, "The lr of fedavg must be a number above 0, or a schedule. Got 'fast'."),
    ("fedavg", {"lr": float("nan")}, "The lr of fedavg must be a number above 0, or a schedule. Got nan."),
    ("fedavg", {"lr": float("inf")}, "The lr of fedavg must be a "),
    ("fedavg", {"lr": True}, "The lr of fedavg must be a number above 0, or a schedule. Got True."),
    (
        "fedavg",
        {"steps": 0},
        f"The steps of fedavg must be a whole number of at least 1, {OR_STEPS}. Got 0.",
    ),
    (
        "fedavg",
        {"steps": 2.5},
        f"The steps of fedavg must be a whole number of at least 1, {OR_STEPS}. Got 2.5.",
    ),
    ("fedavg", {"steps": {"epoch": 1}}, f"The steps of fedavg must be a whole number of at least 1, {OR_STEPS}. Got"),
    (
        "fgda",
        {"steps": {"epochs": 1}},
        "The steps of fgda must be a whole number of at least 1, or an interval such as {initial = 4, base = 2.0}. Got",
    ),
    (
        "fgda",
        {"steps": {"initial": 4, "base": 1}},
        "The base of an interval must be a number of at least 1.001.",
    ),
    ("fgda", {"steps": {"initial": 0, "base": 2.0}}, "The initial of an interval must be a whole number of at least 1"),
    (
        "fgda",
        {"steps": {"initial": 1, "base": 2.0, "rounding": "up"}},
        "The rounding of an interval ",
    ),
    (
        "fedavg",
        {"steps": {"epochs": 0}},
        "The epochs of the local work must be a number above 0 and below 1e6. Got 0.",
    ),
    ("fedavg", {"weight_decay": -1e-3}, "The weight_decay of fedavg must be a number of at least 0. Got -0.001."),
    ("fedadam", {"beta1": 1.0}, "The beta1 of fedadam must be a number of at least 0 and below 1. Got 1.0."),
    ("fedadam", {"tau": 0}, "The tau of fedadam must be a number above 0. Got 0."),
    ("fedprox", {"mu": -1}, "The mu of fedprox must be a number of at least 0. Got -1."),
    ("qfedavg", {"q": -0.1}, "The q of qfedavg must be a number of at least 0. Got -0.1."),
    ("scaffold", {"option": "III"}, "The option of scaffold must be 'I' or 'II'. Got 'III'."),
    ("fedavg", {"learning_rate": 1}, "Unknown option of fedavg 'learning_rate'."),
    ("fedavgg", {}, "Unknown algorithm 'fedavgg'. Did you mean 'fedavg'? Known: adafgda, "),
    ("fedavg", {"lr": {"schedule": "setp", "value": 1.0}}, "Unknown schedule 'setp'. Did you mean 'step'?"),
    ("fedavg", {"lr": {"schedule": "step", "vale": 1.0}}, "Unknown option of the step schedule 'vale'."),
    ("fedavg", {"lr": {"schedule": "step"}}, "The step schedule needs value. (lr of fedavg)"),
    ("fedavg", {"lr": {"schedule": "cube_root", "k": 1.0, "n": 0.0}}, "The n of the cube_root schedule must be "),
]


@pytest.mark.parametrize(("name", "options", "message"), BAD)
def test_a_bad_hyperparameter_is_refused(name: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(fs.InputError) as refused:
        fs.algorithm(name, **options)
    assert str(refused.value).startswith(message)


def test_tables_become_schedules_and_epochs() -> None:
    lr = {"schedule": "step", "value": 0.2, "at": [0.5, 0.9]}
    assert fs.algorithm("fedavg", lr=lr, steps={"epochs": 2}) == fs.FedAvg(
        lr=fs.StepDecay(0.2, at=(0.5, 0.9)), steps=fs.Epochs(2)
    )


def test_a_preset_is_an_algorithm_with_other_defaults() -> None:
    class Quick(fs.FedAvg):
        """FedAvg in a hurry."""

        name = "quick"
        defaults = {"lr": 0.5, "steps": 2}  # noqa: RUF012
        hidden = ("server_lr",)

    assert fs.algorithm("quick") == Quick() and (Quick().lr, Quick().steps, Quick().server_lr) == (0.5, 2, 1.0)
    assert Quick(lr=0.1).lr == 0.1
    with pytest.raises(fs.InputError, match="Unknown option of quick 'server_lr'"):
        fs.algorithm("quick", server_lr=0.5)
    assert fs.FedAvg().lr == 0.1


@pytest.mark.parametrize(
    "more",
    [
        {"round": lambda self, s, clients: s},
        {"local": lambda self, client, x: x},
        {"defaults": {"rate": 0.5}},
        {"hidden": ("rate",)},
        {"dual": True},
        {"__annotations__": {"rate": float}, "rate": 0.5},
    ],
    ids=["a round", "local work", "an unknown default", "an unknown option to hide", "another problem", "a field"],
)
def test_algorithms_do_not_inherit(more: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match="algorithms do not inherit"):
        type("Child", (fs.FedAvg,), {"name": "child", **more})
    assert "child" not in ALGORITHMS


def test_options_to_hide_are_a_tuple() -> None:
    with pytest.raises(TypeError, match=r"hidden of Child must be a tuple of names\. Got 'lr'\."):
        type("Child", (fs.FedAvg,), {"name": "child", "hidden": "lr"})
    assert "child" not in ALGORITHMS


def test_an_algorithm_with_plain_fields_works() -> None:
    class Plain(fs.Algorithm):
        name = "plain"
        lr: Rate = fs.StepDecay(0.1)
        rate: float = 0.5
        steps: Steps = fs.Epochs(1)
        times: int = 2
        flag: bool = True

        def round(self, s: fs.State, clients: fs.Clients) -> fs.State:
            return s

    built = Plain(rate=0.25, times=3, flag=False)
    assert (built.rate, built.times, built.flag) == (0.25, 3, False)
    for wrong in ({"times": 2.5}, {"rate": "x"}, {"flag": 1}, {"steps": 0}):
        with pytest.raises(fs.InputError, match=f"The {next(iter(wrong))} of plain must be "):
            Plain(**wrong)


def test_a_text_without_choices_may_be_any_text() -> None:
    class Texted(fs.Algorithm):
        name = "texted"
        kind: str = "a"

        def round(self, s: fs.State, clients: fs.Clients) -> fs.State:
            return s

    assert Texted(kind="b").kind == "b"


def everyone() -> type[fs.Algorithm]:
    class Everyone(fs.Algorithm):
        name = "everyone"
        full_participation = True

        def round(self, s: fs.State, clients: fs.Clients) -> fs.State:
            return s

    return Everyone


@pytest.mark.parametrize("participation", [1.0, 5])
def test_full_participation_is_every_client(participation: int | float) -> None:
    everyone()().check(fs.quadratic().problem, participation, 5)


@pytest.mark.parametrize("participation", [0.5, 4, 1])
def test_full_participation_is_not_less(participation: int | float) -> None:
    with pytest.raises(fs.InputError, match=r"The participation of everyone must be 1\.0"):
        everyone()().check(fs.quadratic().problem, participation, 5)


def test_full_participation_is_checked_by_train(tmp_path: Path) -> None:
    q = fs.quadratic(clients=3, dimension=2, samples=2)
    with pytest.raises(fs.InputError, match="participation of everyone"):
        fs.train(q.problem, q.data, everyone()(), rounds=1, participation=2, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_an_algorithm_starts_with_the_point_and_ends_with_it_unless_it_says_otherwise() -> None:
    x, y = torch.zeros(2), torch.ones(1)
    state = fs.FedAvg().start(x, y, None)
    assert type(state) is fs.State and state.x is x and state.y is y
    assert fs.FedAvg().solution(state) == (x, y)
    own = fs.algorithms.scaffold.State(x, x)
    assert fs.Scaffold().solution(own) == (x, None)


@pytest.mark.slow
def test_a_gradient_that_shares_memory_is_not_written_to() -> None:
    """The gradient of a sum is one number seen many times; adding to it in place would fail."""

    def outer(x: torch.Tensor, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return x.sum() * batch[0].mean()

    data = fs.FederatedData.from_arrays([([[2.0]], [[0.0]]), ([[4.0]], [[0.0]])])
    problem = fs.Problem(outer, torch.zeros(3, dtype=torch.float32))
    clients = make_clients(make_setting(problem, data), chunk=1)
    algorithm = fs.Scaffold(lr=0.5, steps=1)
    first = started(algorithm, clients)
    clients.begin(0)
    state = algorithm.round(first, clients)
    torch.testing.assert_close(state.x, torch.full((3,), -1.5))


def test_a_name_is_needed_and_can_be_taken_once() -> None:
    with pytest.raises(TypeError, match="must have a name"):

        class Nameless(fs.Algorithm):
            def round(self, s: fs.State, clients: fs.Clients) -> fs.State:
                return s

    with pytest.raises(
        TypeError, match=r"The name 'fedavg' of Second is taken by fedstrata\.algorithms\.fedavg\.FedAvg"
    ):

        class Second(fs.Algorithm):
            name = "fedavg"

            def round(self, s: fs.State, clients: fs.Clients) -> fs.State:
                return s

    assert ALGORITHMS["fedavg"] is fs.FedAvg
