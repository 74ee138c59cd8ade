"""Samples on the server: which rows the clients lose, classes in the place of clients, and weights by class."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedstrata as fs
from fedstrata.data.batch import Batch
from fedstrata.data.federated import Part
from fedstrata.experiments import build, config
from fedstrata.models.flat import Flat
from fedstrata.training.fingerprint import digest_of
from support import make_client, make_clients, make_setting, sized_data, softmax_problem


def dataset(rows: int = 40, classes: int = 4, tests: int = 6) -> fs.Dataset:
    """Distinct rows: input i is i, its class i modulo the number of classes."""
    numbers = torch.arange(rows + tests)
    inputs, targets = numbers[:, None].float(), numbers % classes
    return fs.Dataset("numbers", inputs[:rows], targets[:rows], inputs[rows:], targets[rows:], classes)


def numbers(part: Part | None) -> list[list[int]]:
    """The rows of each client, or class, of a part."""
    assert part is not None
    return [sorted(int(v) for v in part.of_client(k)[0].ravel()) for k in range(len(part.sizes))]


# --- a split ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("per_class", "partition"),
    [(1, "iid"), (9, "iid"), (3, fs.partition.dirichlet(1.0))],
    ids=["one", "all but one", "dirichlet"],
)
def test_rows_of_each_class_go_to_the_server(per_class: int, partition: Any) -> None:
    data = dataset().split(partition, clients=3, auxiliary=per_class, seed=2)
    own = numbers(data.auxiliary)
    assert [len(rows) for rows in own] == [per_class] * 4
    assert [{i % 4 for i in rows} for rows in own] == [{0}, {1}, {2}, {3}]
    theirs = [i for rows in numbers(data.train) for i in rows]
    assert sorted(theirs + [i for rows in own for i in rows]) == list(range(40)), "no row twice, none lost"
    assert data.auxiliary is not None
    for c in range(4):
        assert data.auxiliary.of_client(c)[1].tolist() == [c] * per_class
    assert data.test is not None and data.test[0].ravel().tolist() == list(range(40, 46))
    assert (data.clients, data.classes, data.name) == (3, 4, "numbers")


def test_the_other_rows_are_split_as_if_these_did_not_exist() -> None:
    source = dataset()
    options: dict[str, Any] = {"clients": 3, "seed": 5, "holdout": 0.2, "support": 0.4}
    data = source.split(fs.partition.dirichlet(1.0), auxiliary=2, **options)
    taken = {i for rows in numbers(data.auxiliary) for i in rows}
    rest = torch.tensor([i for i in range(40) if i not in taken])
    tests = (source.test_inputs, source.test_targets)
    without = fs.Dataset.from_arrays(source.inputs[rest], source.targets[rest], test=tests, classes=4)
    expected = without.split(fs.partition.dirichlet(1.0), **options)
    assert expected.auxiliary is None
    for name in ("train", "support", "client_test"):
        assert numbers(getattr(data, name)) == numbers(getattr(expected, name))


def test_the_seed_decides_which_rows() -> None:
    first, again, other = (dataset().split("iid", clients=3, auxiliary=3, seed=s) for s in (0, 0, 1))
    assert numbers(first.auxiliary) == numbers(again.auxiliary) != numbers(other.auxiliary)
    none = dataset().split("iid", clients=3)
    assert none.auxiliary is None
    assert numbers(dataset().split("iid", clients=3, auxiliary=0).train) == numbers(none.train)


def test_keys_and_original_classes_stay_with_their_rows() -> None:
    source = fs.Dataset.from_arrays(
        np.arange(40.0)[:, None], np.arange(40) % 4, keys=np.array(["abcde"[i // 8] for i in range(40)])
    )
    data = source.split(fs.partition.by_key(), clients=5, auxiliary=1)
    assert sorted({i // 8 for i in rows}.pop() for rows in numbers(data.train)) == [0, 1, 2, 3, 4]
    assert all(len({i // 8 for i in rows}) == 1 for rows in numbers(data.train))
    halves = dataset(80).imbalance(0.5)
    data = halves.split(fs.partition.class_groups(), clients=2, auxiliary=4)
    assert data.auxiliary is not None and data.auxiliary.sizes.tolist() == [4, 4]
    assert sum(map(len, numbers(data.train))) == len(halves) - 8


@pytest.mark.parametrize(
    ("auxiliary", "message"),
    [
        (10, r"The auxiliary must be fewer rows per class than the smallest class has, 10\. Got 10\."),
        (99, r"The auxiliary must be fewer rows per class than the smallest class has, 10\. Got 99\."),
        (-1, r"The auxiliary of the split must be .*\. Got -1\."),
        (True, r"The auxiliary of the split must be .*\. Got True\."),
        (2.5, r"The auxiliary of the split must be .*\. Got 2\.5\."),
        ("all", r"The auxiliary of the split must be .*\. Got 'all'\."),
    ],
)
def test_a_wrong_number_of_rows_is_refused(auxiliary: Any, message: str) -> None:
    with pytest.raises(fs.InputError, match=message):
        dataset().split("iid", clients=2, auxiliary=auxiliary)


def test_every_class_needs_more_rows_than_the_server_takes() -> None:
    source = fs.Dataset.from_arrays(np.ones((6, 1)), np.array([0, 0, 0, 1, 1, 1]), classes=3, name="two of three")
    with pytest.raises(fs.InputError, match=r"fewer rows per class than the smallest class has, 0\. Got 1\."):
        source.split("iid", clients=2, auxiliary=1)
    regression = fs.Dataset.from_arrays(np.ones((6, 1)), np.linspace(0, 1, 6), name="heights")
    with pytest.raises(fs.InputError, match="needs classes, but the data set heights has none"):
        regression.split("iid", clients=2, auxiliary=1)


# --- your own samples ------------------------------------------------------------------------------------------------

X = np.arange(12.0).reshape(6, 2)
T = np.array([1, 0, 2, 0, 1, 1])
CLIENTS = fs.FederatedData.from_arrays([(X, T), (X[:4], T[:4])], name="mine")


def test_your_own_samples_are_grouped_by_class() -> None:
    data = CLIENTS.with_auxiliary(X + 100, T)
    assert data.auxiliary is not None
    assert data.auxiliary.sizes.tolist() == [2, 3, 1]
    for c in range(3):
        inputs, targets = data.auxiliary.of_client(c)
        assert np.array_equal(inputs.numpy(), X[c == T] + 100) and targets.tolist() == [c] * len(inputs)
    assert CLIENTS.auxiliary is None
    assert data.train is CLIENTS.train and data.sizes.tolist() == [6, 4]
    again = data.with_auxiliary(X[:3], T[:3])
    assert again.auxiliary is not None and again.auxiliary.sizes.tolist() == [1, 1, 1], "the last call wins"


@pytest.mark.parametrize(
    ("inputs", "targets", "message"),
    [
        (
            X[:2],
            T[:2],
            r"auxiliary set must be samples of every class, 0 to 2, and of no other\. Got 'none of class 2'",
        ),
        (X[:0], T[:0], r"The auxiliary set must be samples of every class, .* Got 'none of class 0'\."),
        (X, T + (T == 2), r"The auxiliary set must be samples of every class, .* Got 'none of class 2'\."),
        (
            X,
            np.array([0, 1, 2, 3, 0, 0]),
            r"samples of every class, 0 to 2, and of no other\. Got 'labels from 0 to 3'\.",
        ),
        (X, np.array([0, 1, 2, -1, 0, 0]), r"samples of every class, 0 to 2, and of no other\."),
        (X, T[:4], r"The number of targets of the auxiliary set must be 6, as many as inputs\. Got 4\."),
        (X[:, :1], T, r"The shape of an input of the auxiliary set must be \(2,\), as for client 0\. Got \(1,\)\."),
        (X, T[:, None], r"The shape of a target of the auxiliary set must be \(\), as for client 0\. Got \(1,\)\."),
        (X * np.nan, T, r"The inputs of the auxiliary set contain NaN or infinity\."),
        (["a"], [0], r"The inputs of the auxiliary set must be numbers in an array"),
    ],
    ids=["too few", "empty", "a gap", "label 3", "label -1", "lengths", "inputs", "targets", "NaN", "texts"],
)
def test_samples_that_do_not_fit_are_refused(inputs: Any, targets: Any, message: str) -> None:
    with pytest.raises(fs.InputError, match=message):
        CLIENTS.with_auxiliary(inputs, targets)


def test_regression_has_no_auxiliary_set() -> None:
    data = fs.FederatedData.from_arrays([(X, T.astype(float))], name="heights")
    with pytest.raises(fs.InputError, match=r"needs classes, but the data 'heights' have none\."):
        data.with_auxiliary(X, T)


# --- runs and changes of the data ------------------------------------------------------------------------------------


def test_other_samples_on_the_server_are_another_run() -> None:
    problem = fs.erm(nn.Linear(2, 3))
    sets = [
        CLIENTS,
        CLIENTS.with_auxiliary(X, T),
        CLIENTS.with_auxiliary(X + 1, T),
        CLIENTS.with_auxiliary(X, T[::-1].copy()),
    ]
    digests = [digest_of(problem, data) for data in sets]
    assert len({d["data"] for d in digests}) == 4
    assert digest_of(problem, CLIENTS.with_auxiliary(X.copy(), T.copy())) == digests[1]


def test_changes_to_the_clients_data_keep_it() -> None:
    data = dataset().split("iid", clients=3, auxiliary=2)
    expected = numbers(data.auxiliary)
    for other in (data.validation(0.3), data.with_holdout(0.3), data.with_support(0.3)):
        assert numbers(other.auxiliary) == expected
    moved = data.to(torch.device("cpu"), torch.float64)
    assert moved.auxiliary is not None
    assert (moved.auxiliary.arrays[0].dtype, moved.auxiliary.arrays[1].dtype) == (torch.float64, torch.int64)
    assert numbers(moved.auxiliary) == expected


# --- from a file -----------------------------------------------------------------------------------------------------


def test_the_key_of_a_file() -> None:
    tables = {"data": {"clients": 3, "subset": 300, "auxiliary": 4, "seed": 6}, "model": {"name": "logreg"}}
    parsed = config.parse(tables, "here")
    data = build.build_data(parsed)
    assert data.auxiliary is not None and data.auxiliary.sizes.tolist() == [4] * 10
    assert data.sizes.sum() == 300 - 40
    expected = fs.data.digits().subset(300, 6).split("iid", clients=3, seed=6, auxiliary=4)
    assert numbers_of(data) == numbers_of(expected)
    assert config.parse(parsed.to_toml(), "again").data == parsed.data
    assert build.build_data(config.parse({"data": {"clients": 3}}, "here")).auxiliary is None
    for wrong in (-1, 1.5, "all"):
        with pytest.raises(fs.InputError, match=r"The key data\.auxiliary must be"):
            config.parse({"data": {"auxiliary": wrong}}, "here")


def numbers_of(data: fs.FederatedData) -> list[list[float]]:
    """The sums of the inputs, class by class on the server."""
    assert data.auxiliary is not None
    return [data.auxiliary.of_client(c)[0].flatten(1).sum(1).tolist() for c in range(data.classes)]


def test_data_from_a_folder_have_no_auxiliary_set(tmp_path: Path) -> None:
    for name in ("a", "b"):
        np.savez(tmp_path / f"{name}.npz", inputs=X, targets=T)
    tables: dict[str, Any] = {"data": {"folder": str(tmp_path)}}
    assert build.build_data(config.parse(tables, "here")).clients == 2
    tables["data"]["auxiliary"] = 1
    with pytest.raises(fs.InputError, match=r"data\.folder has one file per client: leave out data\.auxiliary\."):
        build.build_data(config.parse(tables, "here"))


def test_a_run_from_a_file_uses_it_and_runs_again(
    fedstrata: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedstrata.training.plots.plot", lambda *_, **__: None)
    monkeypatch.setattr("fedstrata.problems.runner.Runner.tracing", False)
    path = tmp_path / "experiment.toml"
    path.write_text(
        "[data]\nclients = 3\nsubset = 200\nauxiliary = 4\n[model]\nname = 'logreg'\n"
        "[algorithm]\nname = 'local_sgdm_rl'\nsteps = 1\n[train]\nrounds = 2\nbatch_size = 8\n"
    )
    code, _, err = fedstrata("run", path, "--out", tmp_path / "a", "--quiet")
    assert code == 0, err
    assert tomllib.loads((tmp_path / "a" / "config.toml").read_text())["data"]["auxiliary"] == 4
    code, _, err = fedstrata("run", tmp_path / "a" / "config.toml", "--out", tmp_path / "b", "--quiet")
    assert code == 0, err
    assert (tmp_path / "a/model.safetensors").read_bytes() == (tmp_path / "b/model.safetensors").read_bytes()
    code, _, err = fedstrata("run", path, "--set", "data.auxiliary=0", "--quiet")
    assert code == 2
    assert "split with auxiliary=8 (data.auxiliary in a configuration file)" in " ".join(err.split())


# --- weights by class ------------------------------------------------------------------------------------------------


def test_weights_by_class_in_one_part() -> None:
    targets = torch.tensor([[0, 2, 1], [1, 1, 0]])
    inputs = torch.arange(6.0).reshape(2, 3, 1)
    weights = torch.tensor([[1.0, 2.0, 3.0], [10.0, 20.0, 30.0]])
    batch = Batch(((inputs, targets),)).weighted_by_class(weights)
    ((same, also, found),) = batch.parts
    assert same is inputs and also is targets
    assert found.tolist() == [[1, 3, 2], [20, 20, 10]]
    assert batch.where is None and batch.traced and batch.clients == 2
    had = torch.tensor([[1.0, 0.5, 2.0], [0.0, 1.0, 3.0]])
    ((_, _, found),) = Batch(((inputs, targets, had),), traced=False).weighted_by_class(weights).parts
    assert found.tolist() == [[1, 1.5, 4], [0, 20, 30]]
    assert not Batch(((inputs, targets),), traced=False).weighted_by_class(weights).traced


def test_weights_by_class_of_ragged_batches() -> None:
    """The parts list clients in another order; each client's weights go to its own samples."""
    data = sized_data([9, 4, 9, 6], classes=3)
    client = make_client(make_setting(softmax_problem(classes=3), data), [0, 2, 3, 1])
    weights = torch.arange(1.0, 13).reshape(4, 3).double() ** 2
    batch = client.draw()
    assert batch.where is not None and len(batch.parts) == 3
    found = batch.weighted_by_class(weights)
    assert found.where is batch.where and found.clients == 4
    seen = set()
    for (_, targets, own), where in zip(found.parts, found.where, strict=True):
        for i, c in enumerate(where.tolist()):
            seen.add(c)
            assert own[i].tolist() == [float(weights[c, t]) for t in targets[i].tolist()]
    assert seen == {0, 1, 2, 3}


def test_weights_by_class_come_on_top_of_balanced_ones() -> None:
    data = sized_data([9, 4], classes=3)
    setting = make_setting(softmax_problem(classes=3), data, batch_size=6, sampling="balanced")
    weights = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]).double()
    batch = make_client(setting, [0, 1]).draw()
    ((_, targets, before),) = batch.parts
    ((_, _, after),) = batch.weighted_by_class(weights).parts
    assert before.std() > 0
    torch.testing.assert_close(after, before * weights.gather(1, targets), atol=0, rtol=0)


# --- work on the server ----------------------------------------------------------------------------------------------

PROBLEM = softmax_problem(classes=3)


def with_server(rows: int = 15) -> fs.FederatedData:
    source = sized_data([rows], classes=3, seed=9).train.of_client(0)
    return sized_data([9, 4, 7, 5], classes=3).with_auxiliary(*source)


def gradient(client: fs.Client, x: torch.Tensor) -> torch.Tensor:
    return client.grads(x, client.draw())


@pytest.mark.parametrize("batch_size", [None, 2])
def test_classes_stand_in_the_place_of_clients(batch_size: int | None) -> None:
    data = with_server()
    clients = make_clients(make_setting(PROBLEM, data, batch_size=batch_size), participation=2)
    sizes: list[list[int]] = []

    def work(client: fs.Client, x: torch.Tensor) -> torch.Tensor:
        sizes.append(client.sizes.tolist())
        batch = client.draw()
        ((_, targets),) = batch.parts
        assert (targets == torch.from_numpy(client.ids)[:, None]).all(), "a single class"
        return client.grads(x, batch)

    found = clients.on_server(work, PROBLEM.x0)
    assert found.shape == (3, len(PROBLEM.x0)), "every class, whatever the participation"
    assert [size for each in sizes for size in each] == [5, 5, 5]
    assert (clients.usage.bytes_up, clients.usage.bytes_down, clients.usage.steps) == (0, 0, 0)
    assert clients.usage.samples == (15 if batch_size is None else 6)
    assert (clients.total, len(clients), clients.classes) == (4, 2, 3), "the clients are as before"
    if batch_size is None:
        assert data.auxiliary is not None
        for c in range(3):
            leaf = PROBLEM.x0.clone().requires_grad_()
            (expected,) = torch.autograd.grad(PROBLEM.outer(leaf, data.auxiliary.of_client(c)), leaf)
            torch.testing.assert_close(found[c], expected, atol=1e-12, rtol=0)


def test_on_the_server_levels_draw_from_the_same_samples() -> None:
    """Also if the clients have support rows."""
    assert PROBLEM.flat is not None
    problem, data = fs.maml(PROBLEM.flat.module, 0.3), with_server().with_support(0.4)
    clients = make_clients(make_setting(problem, data))

    def targets(client: fs.Client) -> torch.Tensor:
        inner, outer = (batch.parts[0][1] for batch in client.draw_all())
        return torch.cat([inner, outer], dim=1)

    assert clients.on_server(targets).tolist() == [[c] * 10 for c in range(3)]


def test_work_on_the_server_does_not_advance_the_clock() -> None:
    """Its steps begin at the same iteration as the clients' and are not counted; its batches are its own."""
    data = with_server()
    clients = make_clients(make_setting(PROBLEM, data, batch_size=4))
    seen: list[tuple[int, int, int]] = []

    def work(client: fs.Client, x: torch.Tensor) -> torch.Tensor:
        k = client.variables(x=x)
        for _ in client.loop(2, k):
            seen.append((client.clock.round, client.clock.step, client.clock.iteration))
            k.x = k.x - 0.1 * client.grads(k.x, client.draw())
        return k.x

    with torch.no_grad():
        clients.begin(0)
        clients.mean(work, PROBLEM.x0)
        before = (clients.usage.steps, clients.usage.bytes_up, clients.usage.bytes_down)
        clients.begin(1)
        seen.clear()
        first = clients.on_server(work, PROBLEM.x0)
        assert seen[:2] == [(1, 0, 2), (1, 1, 3)]
        assert (clients.usage.steps, clients.usage.bytes_up, clients.usage.bytes_down) == before
        assert clients.progress.iteration == 2, "the clock does not advance"
        assert clients.usage.samples == 4 * 4 * 2 + 3 * 4 * 2
        second = clients.on_server(work, PROBLEM.x0)
        assert not torch.equal(first, second), "another exchange draws other batches"
        clients.begin(1)
        assert torch.equal(clients.on_server(work, PROBLEM.x0), first), "the same exchange draws the same batches"


def test_work_on_the_server_does_not_touch_kept_state() -> None:
    data = with_server()
    clients = make_clients(make_setting(PROBLEM, data))

    def keep(client: fs.Client, x: torch.Tensor) -> torch.Tensor:
        before = client.kept("v", torch.zeros_like(x))
        client.keep(v=x)
        return before

    ones = torch.ones_like(PROBLEM.x0)
    clients.gather(keep, ones)
    assert clients.on_server(keep, 5 * ones).abs().max() == 0
    assert torch.equal(clients.gather(keep, ones), ones.expand(4, -1))


def test_an_error_in_work_on_the_server_names_the_classes() -> None:
    """Not clients: there may be fewer of these."""
    data = replace(with_server(), client_names=("north", "south"))
    data = replace(data, train=sized_data([9, 4], classes=3).train)
    clients = make_clients(make_setting(PROBLEM, data))

    def fail(client: fs.Client) -> torch.Tensor:
        raise ValueError("no")

    with pytest.raises(
        fs.FedstrataError, match=r"^ValueError in fail, round 1, clients class 0, class 1, class 2: no$"
    ):
        clients.on_server(fail)


def test_without_samples_on_the_server_the_remedy_is_named() -> None:
    clients = make_clients(make_setting(PROBLEM, sized_data([9, 4], classes=3)))
    with pytest.raises(fs.InputError, match=r"There are no samples on the server \(data 'sized'\): split with"):
        clients.on_server(gradient, PROBLEM.x0)
    message = (
        r"local_sgdm_rl needs samples on the server, some of every class \(data 'sized' have none there\): split with "
        r"auxiliary=8 \(data\.auxiliary in a configuration file\), .*, or add others with "
        r"with_auxiliary\(inputs, targets\)\."
    )
    with pytest.raises(fs.InputError, match=message):
        fs.train(PROBLEM, sized_data([9, 4], classes=3), fs.LocalSGDMRL(steps=1), rounds=1)


# --- the last layer's matrix -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "shape", "matrix"),
    [
        ("logreg", (5,), (3, 5)),
        ("mlp", (5,), (3, 200)),
        ("lenet5", (1, 12, 12), (3, 84)),
        ("cnn4", (1, 8, 8), (3, 128)),
    ],
)
def test_the_position_of_the_last_matrix(name: str, shape: tuple[int, ...], matrix: tuple[int, int]) -> None:
    model = fs.models.model(name, shape, 3)
    flat = Flat(model)
    weights = list(model.parameters())[-2]
    place = flat.last_matrix()
    assert tuple(weights.shape) == matrix and place.stop - place.start == weights.numel()
    marked = flat.initial.clone()
    marked[place] = torch.arange(weights.numel()).float()
    found = list(flat.to_module(marked).parameters())[-2]
    assert torch.equal(found.ravel(), torch.arange(weights.numel()).float())
    assert place.stop == flat.size - 3, "the bias follows it"


def test_a_matrix_without_a_bias_and_a_model_without_a_matrix() -> None:
    bare = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2, bias=False))
    assert Flat(bare).last_matrix() == slice(15, 21)

    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.scale

    with pytest.raises(fs.InputError, match=r"The model Scale has no layer with a matrix\."):
        Flat(Scale()).last_matrix()
