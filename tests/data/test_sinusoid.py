"""The sinusoids of MAML: every task is one curve, which does not depend on the others."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from fedstrata.core.errors import InputError
from fedstrata.data import Dataset, load, sinusoid
from fedstrata.experiments import config
from fedstrata.experiments.runs import run_config


def curve(inputs: torch.Tensor, targets: torch.Tensor) -> tuple[float, float, float]:
    """Fit a sin x + b cos x; return amplitude, phase and the largest residual."""
    x, y = inputs[:, 0].double().numpy(), targets.double().numpy()
    columns = np.stack([np.sin(x), np.cos(x)], axis=1)
    a, b = np.linalg.lstsq(columns, y)[0]
    # A sin(x - phi) = A cos(phi) sin x - A sin(phi) cos x
    return float(np.hypot(a, b)), float(np.arctan2(-b, a)), float(np.abs(columns @ [a, b] - y).max())


def tensors(data: Dataset) -> list[torch.Tensor]:
    return [data.inputs, data.targets, data.test_inputs, data.test_targets]


def test_shapes_and_ranges():
    data = load("sinusoid", tasks=7, samples=30, seed=3)
    assert [t.shape for t in tensors(data)] == [(210, 1), (210,), (210, 1), (210,)]
    assert all(t.dtype == torch.float32 and t.is_contiguous() for t in tensors(data))
    assert data.classes == 0
    assert data.keys is not None
    assert data.keys.tolist() == [task for task in range(7) for _ in range(30)]
    for inputs, targets in ((data.inputs, data.targets), (data.test_inputs, data.test_targets)):
        assert -5 <= inputs.min() < -4.8
        assert 4.8 < inputs.max() <= 5
        assert targets.abs().max() <= 5
    assert len(torch.cat([data.inputs, data.test_inputs]).unique()) > 410  # test rows are rows of their own
    assert repr(sinusoid()) == "<Dataset sinusoid: 2500 training and 2500 test rows, regression>"


def test_the_rows_of_a_task_lie_on_one_sinusoid():
    tasks, samples = 200, 10
    data = sinusoid(tasks=tasks, samples=samples)
    train, test = (
        [curve(x[k : k + samples], y[k : k + samples]) for k in range(0, tasks * samples, samples)]
        for x, y in ((data.inputs, data.targets), (data.test_inputs, data.test_targets))
    )
    assert max(residual for _, _, residual in train + test) < 1e-5
    assert np.allclose(train, test, atol=1e-4)  # the same amplitude and phase
    amplitudes, phases, _ = np.array(train).T
    for found, low, high in ((amplitudes, 0.1, 5), (phases, 0, np.pi)):
        assert low - 1e-4 <= found.min() < low + 0.05 * (high - low)
        assert high - 0.05 * (high - low) < found.max() <= high + 1e-4
        # uniform: mean in the middle, five standard errors wide
        assert abs(found.mean() - (low + high) / 2) < 5 * (high - low) / np.sqrt(12 * tasks)


def test_the_seed_decides():
    first, again, other = (sinusoid(tasks=3, noise=0.1, seed=seed) for seed in (5, 5, 6))
    assert all(torch.equal(a, b) for a, b in zip(tensors(first), tensors(again), strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(tensors(first), tensors(other), strict=True))


def test_a_task_does_not_depend_on_the_number_of_tasks():
    few, many = sinusoid(tasks=3, samples=20, noise=0.5), sinusoid(tasks=11, samples=20, noise=0.5)
    assert all(torch.equal(a, b[:60]) for a, b in zip(tensors(few), tensors(many), strict=True))
    assert len(many.targets.unique()) == 220  # no two tasks share rows


def test_noise_is_added_to_train_and_test_targets_alike():
    plain, noisy = sinusoid(samples=400), sinusoid(samples=400, noise=0.3)
    assert torch.equal(plain.inputs, noisy.inputs)
    assert torch.equal(plain.test_inputs, noisy.test_inputs)
    added = [noisy.targets - plain.targets, noisy.test_targets - plain.test_targets]
    for noise in added:
        assert abs(float(noise.mean())) < 5 * 0.3 / 100  # five standard errors of 10,000 draws
        assert abs(float(noise.std()) - 0.3) < 5 * 0.3 / np.sqrt(2 * 10_000)
    assert abs(float(torch.corrcoef(torch.stack(added))[0, 1])) < 0.05


def test_one_task_per_client():
    data = sinusoid(tasks=12, samples=15)
    split = data.split("by_key", clients=12)
    fits = [curve(*split.train.of_client(client)) for client in range(12)]
    assert split.sizes.tolist() == [15] * 12
    assert max(residual for _, _, residual in fits) < 1e-5
    assert len({round(amplitude, 3) for amplitude, _, _ in fits}) == 12
    assert split.test is not None
    assert len(split.test[0]) == 180


def test_several_tasks_per_client_with_your_own_keys():
    data = sinusoid(tasks=25, samples=10)
    assert data.keys is not None
    split = replace(data, keys=data.keys // 5).split("by_key", clients=5)
    assert split.sizes.tolist() == [50] * 5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tasks": 0}, "tasks of the sinusoid data set must be a whole number of at least 1. Got 0."),
        ({"tasks": 2.0}, "tasks of the sinusoid data set must be a whole number of at least 1. Got 2.0."),
        ({"samples": True}, "samples of the sinusoid data set must be a whole number of at least 1. Got True."),
        ({"seed": -1}, "seed of the sinusoid data set must be a whole number of at least 0. Got -1."),
        ({"noise": -0.1}, "noise of the sinusoid data set must be a number of at least 0. Got -0.1."),
        ({"noise": float("nan")}, "noise of the sinusoid data set must be a number of at least 0. Got nan."),
        ({"noise": float("inf")}, "noise of the sinusoid data set must be a number of at least 0. Got inf."),
        ({"noise": "loud"}, "noise of the sinusoid data set must be a number of at least 0. Got 'loud'."),
    ],
)
def test_bad_options(options: dict, message: str):
    with pytest.raises(InputError) as caught:
        load("sinusoid", **options)
    assert str(caught.value) == f"The {message}"


def test_the_error_for_a_misspelt_option_suggests_the_nearest():
    with pytest.raises(InputError, match=r"Unknown option of the sinusoid data set 'task'. Did you mean 'tasks'"):
        load("sinusoid", task=3)


def test_from_a_file(tmp_path: Path):
    path = tmp_path / "sinusoid.toml"
    path.write_text("""
[data]
name = "sinusoid"
options = { tasks = 10 }
partition = "by_key"
[model]
name = "mlp"
hidden = [40, 40]
[problem]
loss = "squared"
[algorithm]
name = "fedavg"
lr = 0.01
steps = 10
[train]
rounds = 2
batch_size = 10
""")
    run = run_config(config.read(path), None, False, ())
    assert "accuracy" not in run.summary
    assert run.history[-1]["loss"] < run.history[0]["loss"]
    assert run.history[-1]["loss_worst"] > run.history[-1]["loss_mean"]
    data = sinusoid(tasks=10)
    with torch.no_grad():
        outputs = run.model()(data.test_inputs)
    assert outputs.shape == (1000, 1)
    assert run.summary["loss"] == pytest.approx(float(((outputs[:, 0] - data.test_targets) ** 2).mean()), rel=1e-5)
