"""Autocast: models in lower precision, vectors and updates in their own."""

from __future__ import annotations

import pytest
import torch

import fedstrata as fs
from fedstrata.data.batch import Batch
from fedstrata.problems.oracles import Oracles


def run(algorithm: fs.Algorithm, problem: fs.Problem, binary: bool = False, **options: object) -> fs.Run:
    digits = fs.data.digits().imbalance(0.1) if binary else fs.data.digits()
    data = digits.split(fs.partition.iid(), clients=4, seed=0)
    return fs.train(problem, data, algorithm, rounds=5, batch_size=16, threads=1, **options)


def model(outputs: int = 10) -> torch.nn.Module:
    return fs.models.model("mlp", (1, 8, 8), outputs, hidden=[16], seed=0)


@pytest.mark.parametrize("chunk", [1, 4])
def test_a_run_with_autocast_is_close_to_one_without(chunk: int) -> None:
    plain, cast = (run(fs.FedAvg(lr=0.2), fs.erm(model()), chunk=chunk, autocast=name) for name in ("none", "bfloat16"))
    assert cast.x.dtype == torch.float32
    change = (plain.x - fs.erm(model()).x0).norm()
    assert 1e-5 * change < (cast.x - plain.x).norm() < 0.1 * change
    assert abs(cast.summary["accuracy"] - plain.summary["accuracy"]) < 0.05


@pytest.mark.parametrize("name", ["maml", "auc"])
def test_layered_problems_take_autocast(name: str) -> None:
    if name == "maml":
        algorithm, problem = fs.ComFedL(lr=0.1), fs.maml(model(), inner_lr=0.1)
    else:
        algorithm, problem = fs.LocalSGDA(lr=0.1, dual_lr=0.1), fs.auc(model(1))
    plain, cast = (run(algorithm, problem, name == "auc", autocast=precision) for precision in ("none", "bfloat16"))
    assert 0 < (cast.x - plain.x).norm() < 0.2 * (plain.x - problem.x0).norm()


def test_gradients_are_computed_in_lower_precision_and_have_their_own() -> None:
    problem = fs.erm(model())
    batch = Batch(((torch.randn(2, 8, 1, 8, 8), torch.randint(0, 10, (2, 8))),))
    x = problem.x0.expand(2, -1).contiguous()
    with torch.no_grad():
        (plain,) = Oracles(problem).outer_grads(x, None, batch)
        (cast,) = Oracles(problem, autocast=torch.bfloat16).outer_grads(x, None, batch)
    assert cast.dtype == torch.float32
    assert 1e-5 < (cast - plain).norm() / plain.norm() < 0.15


def test_an_unknown_precision_is_refused() -> None:
    with pytest.raises(fs.InputError, match="autocast"):
        run(fs.FedAvg(), fs.erm(model()), autocast="float8")
