"""Samples with several inputs: a model of (tokens, mask) gives the numbers of a model that takes both as one array."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import fedstrata as fs
from fedstrata.problems.runner import Runner
from fedstrata.training.metrics.catalogue import TIMES
from masked import Arrays, Masked, Packed, packed, rows, sites

Build = Callable[[nn.Module], fs.Problem]
Measures = dict[str, Any]

PROBLEMS: dict[str, tuple[int, Build, fs.Algorithm]] = {
    "erm": (3, fs.erm, fs.Scaffold(lr=0.1, steps=3)),
    "robust": (3, fs.robust, fs.MFCGD(gamma=0.1, steps=3)),
    "maml": (3, lambda m: fs.maml(m, inner_lr=0.1, steps=2), fs.ComFedL(lr=0.1, steps=3)),
    "damaml": (3, lambda m: fs.damaml(m, inner_lr=0.1), fs.ComFedL(lr=0.1, steps=3)),
    "agnostic": (3, lambda m: fs.agnostic(m, clients=5), fs.DRFA(lr=0.1, steps=3)),
    "fair classes": (3, lambda m: fs.fair(m, classes=3), fs.LocalSGDA(lr=0.1, steps=3)),
    "fair clients": (
        3,
        lambda m: fs.fair(m, over="clients", clients=5, regularise=0.1),
        fs.LocalSGDA(lr=0.1, steps=3),
    ),
    "risk_averse": (3, fs.risk_averse, fs.LocalSMCGDAM(gamma_x=0.1, steps=3)),
    "auc": (2, fs.auc, fs.CoDA(lr=0.1, steps=3)),
    "compositional_auc": (2, lambda m: fs.compositional_auc(m, levels=2), fs.LocalSMCGDAM(gamma_x=0.1, steps=3)),
}


def outputs_of(name: str) -> int:
    return 1 if "auc" in name else 3


def trained(problem: fs.Problem, data: fs.FederatedData, algorithm: fs.Algorithm, **how: Any) -> fs.Run:
    return fs.train(problem, data, algorithm, **{"rounds": 3, "batch_size": 4, "threads": 1, **how})


def assert_same(run: fs.Run, other: fs.Run, tolerance: float = 1e-12) -> None:
    for ours, theirs in ((run.x, other.x), (run.y, other.y)):
        if theirs is None:
            assert ours is None
        else:
            torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
    first, last = (run.history[-1], other.history[-1])
    assert first.keys() == last.keys()
    for name in first.keys() - set(TIMES):
        assert first[name] == pytest.approx(last[name], rel=1e-9, abs=1e-9, nan_ok=True), name
    assert bool((run.x != run.problem.x0).any())


@pytest.mark.parametrize("sampling", ["uniform", "balanced"])
@pytest.mark.parametrize("name", PROBLEMS)
def test_a_problem_with_two_inputs_gives_the_numbers_of_one_input(name: str, sampling: str) -> None:
    classes, build, algorithm = PROBLEMS[name]
    two, one = sites(classes)
    model = Masked(outputs_of(name))
    how = {"sampling": sampling, "chunk": 3, "evaluate": fs.Evaluation(adapt_steps=1, adapt_lr=0.1, stationarity=True)}
    run = trained(build(model), two, algorithm, **how)
    assert_same(run, trained(build(Packed(model)), one, algorithm, **how))


@pytest.mark.parametrize("tracing", [False, True], ids=["plain", "traced"])
@pytest.mark.parametrize("name", ["erm", "maml", "auc"])
def test_chunks_change_nothing(name: str, tracing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Runner, "tracing", tracing)
    classes, build, algorithm = PROBLEMS[name]
    problem, (data, _) = build(Masked(outputs_of(name))), sites(classes)
    alone, three, together = (trained(problem, data, algorithm, chunk=chunk) for chunk in (1, 3, 5))
    assert_same(three, alone)
    assert_same(together, alone)


@pytest.mark.parametrize("how", [{"sampling": "epochs"}, {"batch_size": None}], ids=["epochs", "full batches"])
def test_batches_of_unequal_length(how: dict[str, Any]) -> None:
    model, (two, one) = Masked(3), sites()
    algorithm = fs.FedAvg(lr=0.1, steps=4)
    assert_same(trained(fs.erm(model), two, algorithm, **how), trained(fs.erm(Packed(model)), one, algorithm, **how))


def test_dropout_and_several_inputs() -> None:
    model, (two, one) = Masked(3, dropout=0.3), sites()
    algorithm = fs.FedAvg(lr=0.1, steps=4)
    runs = [trained(fs.erm(model), two, algorithm, chunk=chunk) for chunk in (1, 3)]
    expected = trained(fs.erm(Packed(model)), one, algorithm)
    for run in runs:
        assert_same(run, expected)
    assert not torch.equal(expected.x, trained(fs.erm(Masked(3)), two, algorithm).x)


def test_samples_on_the_server_and_weights_by_class() -> None:
    """Local-SGDM-RL weights each sample by its class, after the targets of a batch."""
    model, arrays = Masked(3), rows(80, 3, 0)
    algorithm = fs.LocalSGDMRL(lr=0.1, steps=3)
    two, one = (fs.Dataset.from_arrays(*a).split("iid", clients=4, auxiliary=4) for a in (arrays, packed(arrays)))
    assert two.auxiliary is not None and len(two.auxiliary.arrays) == 3
    assert_same(trained(fs.erm(model), two, algorithm), trained(fs.erm(Packed(model)), one, algorithm))


def test_resuming_is_exact(tmp_path: Path) -> None:
    problem, (data, _) = fs.erm(Masked(3)), sites()
    how: dict[str, Any] = {"batch_size": 4, "threads": 1, "checkpoint_every": 1}
    whole = fs.train(problem, data, fs.Scaffold(lr=0.1, steps=3), rounds=4, out=tmp_path / "whole", **how)
    fs.train(problem, data, fs.Scaffold(lr=0.1, steps=3), rounds=2, out=tmp_path / "run", **how)
    run = fs.train(problem, data, fs.Scaffold(lr=0.1, steps=3), rounds=4, out=tmp_path / "run", resume=True, **how)
    assert torch.equal(run.x, whole.x)
    tokens, mask, targets = data.train.arrays
    part = replace(data.train, arrays=(tokens, ~mask, targets))
    with pytest.raises(fs.InputError, match=r"digest\.data"):
        fs.train(
            problem,
            replace(data, train=part),
            fs.Scaffold(lr=0.1, steps=3),
            rounds=5,
            out=tmp_path / "run",
            resume=True,
            **how,
        )


# --- functions of a user ---------------------------------------------------------------------------------------------


def weighted_error(x: torch.Tensor, batch: Arrays) -> torch.Tensor:
    tokens, mask, factors, targets = batch
    assert mask.dtype == torch.bool and targets.dtype == torch.int64
    error = (tokens * mask.unsqueeze(-1)).sum(-2) @ x - targets
    return (factors * error * error).mean()


@pytest.mark.parametrize("chunk", [1, 3, 5])
def test_a_function_gets_all_arrays_of_a_batch(chunk: int) -> None:
    clients = []
    for seed, size in enumerate((6, 12, 7, 18, 8)):
        tokens, mask, targets = rows(size, 3, seed)
        clients.append((tokens, mask, np.linspace(0.5, 2, size), targets))
    data = fs.FederatedData.from_arrays(clients)
    problem = fs.Problem(weighted_error, x0=torch.zeros(3, dtype=torch.float64))
    run = fs.train(problem, data, fs.FedAvg(lr=0.1, steps=1), rounds=1, batch_size=None, chunk=chunk)
    gradients = []
    for tokens, mask, factors, targets in clients:
        sums = (tokens * mask[..., None]).sum(1)
        gradients.append(-2 * (factors * targets) @ sums / len(sums))
    np.testing.assert_allclose(run.x.numpy(), -0.1 * np.mean(gradients, axis=0), rtol=1e-12)
    losses = [((c[2] * ((c[0] * c[1][..., None]).sum(1) @ run.x.numpy() - c[3]) ** 2).mean()) for c in clients]
    assert run.summary["loss"] == pytest.approx(np.mean(losses), rel=1e-12)


def test_a_function_that_does_not_take_all_arrays_is_named() -> None:
    def pair(x: torch.Tensor, batch: Arrays) -> torch.Tensor:
        inputs, targets = batch
        return (inputs.sum((-1, -2)) * x - targets).mean()

    problem = fs.Problem(pair, x0=torch.zeros(1, dtype=torch.float64), name="pair")
    shapes = r"\(2, 5, 3\), \(2, 5\), \(2,\)"
    with pytest.raises(
        fs.InputError, match=rf"outer function of the problem pair fails, .* a batch of shapes {shapes}"
    ):
        trained(problem, sites()[0], fs.FedAvg(lr=0.1))


# --- what is refused -------------------------------------------------------------------------------------------------


def test_a_model_of_one_input_is_refused() -> None:
    data, one = sites()
    with pytest.raises(
        fs.InputError,
        match=r"The model Packed cannot take 2 inputs of shapes \(5, 3\) and \(5,\) .*positional argument",
    ):
        trained(fs.erm(Packed(Masked(3))), data, fs.FedAvg(lr=0.1))
    with pytest.raises(fs.InputError, match=r"The model Masked cannot take inputs of shape \(5, 4\) .*'mask'"):
        trained(fs.erm(Masked(3)), one, fs.FedAvg(lr=0.1))


def test_several_inputs_cannot_be_perturbed() -> None:
    data, _ = sites()
    problem = fs.adversarial(Masked(3), shape=(5, 3))
    with pytest.raises(fs.InputError, match=r"adversarial problem perturbs the one input .* arrays have 2 inputs"):
        trained(problem, data, fs.LocalSGDA(lr=0.1))
    with pytest.raises(fs.InputError, match="several inputs cannot be perturbed: leave out attack_radius"):
        trained(fs.erm(Masked(3)), data, fs.FedAvg(lr=0.1), evaluate=fs.Evaluation(attack_radius=0.1))


# --- where the arrays come from --------------------------------------------------------------------------------------


def assert_same_data(data: fs.FederatedData, other: fs.FederatedData) -> None:
    for part, like in ((data.train, other.train), (data.client_test, other.client_test)):
        assert (part is None) == (like is None)
        if part is not None and like is not None:
            assert np.array_equal(part.offsets, like.offsets)
            for a, b in zip(part.arrays, like.arrays, strict=True):
                assert torch.equal(a, b) and a.dtype == b.dtype
    assert data.classes == other.classes and data.test is not None and other.test is not None
    assert all(map(torch.equal, data.test, other.test))


def test_a_folder_with_several_inputs(tmp_path: Path) -> None:
    parts = [(rows(9, 3, 0), rows(4, 3, 1)), (rows(7, 3, 2), None)]
    for name, (train, test) in zip("ab", parts, strict=True):
        arrays = dict(zip(("inputs", "inputs_1", "targets"), train, strict=True))
        if test is not None:
            arrays |= dict(zip(("test_inputs", "test_inputs_1", "test_targets"), test, strict=True))
        np.savez(tmp_path / f"{name}.npz", **arrays)
    np.savez(tmp_path / "test.npz", **dict(zip(("x_1", "y", "x"), (rows(5, 3, 3)[i] for i in (1, 2, 0)), strict=True)))
    data = fs.FederatedData.from_folder(tmp_path)
    clients, tests = zip(*parts, strict=True)
    assert_same_data(data, fs.FederatedData.from_arrays(clients, test=rows(5, 3, 3), client_tests=tests))
    assert data.client_test is not None and data.client_test.sizes.tolist() == [4, 0]


@pytest.mark.parametrize("names", [("inputs", "inputs_2"), ("inputs", "inputs_mask"), ("x", "x_0")])
def test_other_names_of_further_inputs_are_refused(names: tuple[str, str], tmp_path: Path) -> None:
    tokens, mask, targets = rows(5, 3, 0)
    np.savez(tmp_path / "a.npz", **{names[0]: tokens, names[1]: mask, "targets": targets})
    message = (
        rf"Further inputs in the file .*a\.npz must be named {names[0]}_1\. It holds: {names[0]}, {names[1]}, targets"
    )
    with pytest.raises(fs.InputError, match=message):
        fs.FederatedData.from_folder(tmp_path)


def test_data_sets_with_several_inputs() -> None:
    arrays = [rows(9, 3, 0), rows(7, 3, 2), rows(5, 3, 3)]
    *clients, test = (TensorDataset(*map(torch.from_numpy, a)) for a in arrays)
    data = fs.FederatedData.from_datasets(clients, test=test)
    assert_same_data(data, fs.FederatedData.from_arrays(arrays[:2], test=arrays[2]))


def test_rows_of_a_data_set_keep_all_their_inputs() -> None:
    arrays, test = rows(200, 4, 0), rows(20, 4, 1)
    whole = fs.Dataset.from_arrays(*arrays, test=test)
    assert len(whole) == 200 and whole.classes == 4 and whole.more_inputs[0].dtype == torch.bool
    task = whole.subset(150).imbalance(0.3, positives=[2])
    data = task.split("iid", clients=3, holdout=0.2, support=0.3, auxiliary=5)
    marks = {tuple(t.ravel()): (tuple(m), y == 2) for t, m, y in zip(*arrays, strict=True)}
    count = 0
    assert data.support is not None and data.client_test is not None and data.auxiliary is not None
    for part in (data.train, data.support, data.client_test, data.auxiliary):
        for tokens, mask, target in zip(*(a[part.rows].numpy() for a in part.arrays), strict=True):
            assert marks[tuple(tokens.ravel())] == (tuple(mask), target == 1)
            count += 1
    assert count == len(task)
    assert data.test is not None and np.array_equal(data.test[1].numpy(), test[1])


def test_client_tests_may_be_none() -> None:
    test = rows(4, 3, 5)
    data = fs.FederatedData.from_arrays([rows(9, 3, 0), rows(7, 3, 1)], client_tests=[None, test])
    assert data.client_test is not None and data.client_test.sizes.tolist() == [0, 4]
    assert data.test is not None and np.array_equal(data.test[0].numpy(), test[0])
