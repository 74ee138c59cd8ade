"""Random layers draw by names: the same numbers whatever the chunk, the order and the moment of a kill."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedstrata as fs
from fedstrata.core import rng
from fedstrata.data.batch import Batch
from fedstrata.models.flat import Flat
from fedstrata.problems.oracles import Oracles
from support import make_clients, make_setting, without_seconds

WORDS = torch.tensor([123456789, 4000000000])


@pytest.mark.parametrize("count", [1, 4, 10, 33])
def test_words_of_tensors_are_those_of_numpy(count: int) -> None:
    blocks = np.arange((count + 3) // 4)
    expected = rng.philox((blocks, np.array(7), np.array(2), np.array(0)), tuple(WORDS.tolist())).reshape(-1)[:count]
    assert rng.words_of_tensors(WORDS, (7, 2), count).tolist() == expected.tolist()


def test_words_of_tensors_can_be_mapped_over_clients() -> None:
    keys = torch.stack([WORDS, WORDS + 1])
    both = torch.func.vmap(lambda key: rng.words_of_tensors(key, (0, 1), 9))(keys)
    assert torch.equal(both, torch.stack([rng.words_of_tensors(key, (0, 1), 9) for key in keys]))


def dropped(flat: Flat, inputs: torch.Tensor, words: torch.Tensor | None = WORDS) -> torch.Tensor:
    with flat.drawing_from(words):
        return flat(flat.initial, inputs)


def identity(*layers: nn.Module) -> Flat:
    linear = nn.Linear(4, 4, bias=False)
    nn.init.eye_(linear.weight)
    return Flat(nn.Sequential(*layers, linear))


def test_dropout_keeps_its_share_and_scales_it() -> None:
    outputs = dropped(identity(nn.Dropout(0.3)), torch.ones(20_000, 4))
    kept = outputs != 0
    torch.testing.assert_close(outputs[kept], torch.full_like(outputs[kept], 1 / 0.7))
    assert abs(float(kept.double().mean()) - 0.7) < 0.01
    torch.testing.assert_close(kept.double().mean(0), torch.full((4,), 0.7).double(), atol=0.02, rtol=0)


def test_every_word_layer_and_call_has_numbers_of_its_own() -> None:
    flat, inputs = identity(nn.Dropout(0.5), nn.Dropout(0.5)), torch.ones(50, 4)
    once = identity(nn.Dropout(0.5))
    assert torch.equal(dropped(once, inputs), dropped(once, inputs))
    assert not torch.equal(dropped(once, inputs), dropped(once, inputs, WORDS + 1))
    assert abs(float((dropped(flat, inputs) != 0).double().mean()) - 0.25) < 0.1  # two layers, two masks
    with once.drawing_from(WORDS):
        first, second = once(once.initial, inputs), once(once.initial, inputs)
    assert not torch.equal(first, second)


def test_channels_are_dropped_whole() -> None:
    flat = Flat(nn.Sequential(nn.Dropout2d(0.5), nn.Conv2d(3, 3, 1, groups=3, bias=False)))
    images = torch.ones(40, 3, 5, 5)
    kept = (dropped(flat, images) != 0).flatten(2)
    assert torch.equal(kept.all(2), kept.any(2)) and 0.3 < float(kept.double().mean()) < 0.7


def test_dropout_of_everything_is_zero() -> None:
    assert not dropped(identity(nn.Dropout(1.0)), torch.ones(3, 4)).any()


def test_without_words_nothing_is_dropped_and_a_run_returns_the_users_layers() -> None:
    flat, inputs = identity(nn.Dropout(0.5)), torch.randn(5, 4)
    assert torch.equal(flat(flat.initial, inputs), inputs)
    module = flat.to_module(flat.initial)
    assert [type(layer) for layer in module.children()] == [nn.Dropout, nn.Linear]
    assert torch.equal(module.eval()(inputs), inputs)


def test_images_are_flipped_and_shifted_and_otherwise_unchanged() -> None:
    images = torch.randn(60, 1, 4, 4)
    flip, crop = (
        Flat(nn.Sequential(layer, nn.Conv2d(1, 1, 1))) for layer in (fs.models.RandomFlip(), fs.models.RandomCrop(1))
    )
    for flat in (flip, crop):
        with torch.no_grad():
            flat.initial.copy_(torch.tensor([1.0, 0.0]))  # the convolution changes nothing
    out = dropped(flip, images)
    mirrored = torch.tensor([torch.equal(a, b.flip(-1)) for a, b in zip(out, images, strict=True)])
    assert 15 < int(mirrored.sum()) < 45 and torch.equal(out[~mirrored], images[~mirrored])
    shifted = dropped(crop, images)
    padded = nn.functional.pad(images, [1] * 4)
    shifts = set()
    for image, wide in zip(shifted, padded, strict=True):
        matches = [(i, j) for i in range(3) for j in range(3) if torch.equal(image, wide[:, i : i + 4, j : j + 4])]
        assert len(matches) == 1
        shifts.add(matches[0])
    assert len(shifts) == 9
    assert torch.equal(flip(flip.initial, images), images) and torch.equal(crop(crop.initial, images), images)


def test_random_layers_in_a_module_of_ones_own_use_torchs_generator() -> None:
    images = torch.randn(30, 1, 4, 4)
    layer = fs.models.RandomFlip()
    assert not torch.equal(layer(images), images)
    assert torch.equal(layer.eval()(images), images)
    with pytest.raises(fs.InputError, match="padding of RandomCrop must be a whole number"):
        fs.models.RandomCrop(0)


# --- runs ------------------------------------------------------------------------------------------------------------


def run(algorithm: fs.Algorithm, problem: str = "erm", out: Path | None = None, **options: Any) -> fs.Run:
    data = fs.data.digits().split(fs.partition.dirichlet(0.5), clients=5, seed=0, holdout=0.2)
    net = fs.models.model("mlp", (1, 8, 8), 10, hidden=[8], dropout=0.4, seed=0).double()
    how = {"rounds": 3, "batch_size": 8, "seed": 1, **options}
    return fs.train(getattr(fs, problem)(net), data, algorithm, out=out, **how)


@pytest.mark.slow
@pytest.mark.parametrize("problem", ["erm", "maml"])
@pytest.mark.parametrize("batch_size", [8, None])
def test_a_run_with_dropout_does_not_depend_on_the_chunk(problem: str, batch_size: int | None) -> None:
    algorithm = fs.Scaffold(lr=0.1, steps=3) if problem == "erm" else fs.ComFedL(lr=0.1, steps=2)
    one, three = (run(algorithm, problem, chunk=chunk, batch_size=batch_size) for chunk in (1, 3))
    torch.testing.assert_close(one.x, three.x, atol=1e-12, rtol=1e-12)


@pytest.mark.slow
def test_a_resumed_run_with_dropout_ends_with_the_same_bits(tmp_path: Path) -> None:
    algorithm = fs.FedAvg(lr=0.1, steps=fs.Epochs(1))
    straight = run(algorithm, out=tmp_path / "straight")
    run(algorithm, out=tmp_path / "run", rounds=1)
    resumed = run(algorithm, out=tmp_path / "run", resume=True)
    assert torch.equal(resumed.x, straight.x)
    assert without_seconds(resumed.history) == without_seconds(straight.history)


@pytest.mark.slow
def test_dropout_changes_training_and_not_the_measures() -> None:
    with_dropout, again = run(fs.FedAvg(lr=0.1, steps=3)), run(fs.FedAvg(lr=0.1, steps=3), seed=2)
    assert not torch.equal(with_dropout.x, again.x)
    model = with_dropout.model()
    assert not model.training
    assert any(isinstance(layer, nn.Dropout) for layer in model.modules())
    assert with_dropout.problem.predict is not None
    inputs = torch.randn(20, 1, 8, 8, dtype=torch.float64)
    torch.testing.assert_close(model(inputs), with_dropout.problem.predict(with_dropout.x, inputs))


def test_two_gradients_on_one_batch_have_one_mask_and_steps_have_their_own() -> None:
    net = nn.Sequential(nn.Dropout(0.5), nn.Linear(6, 1, bias=False))
    problem = fs.erm(net, "squared")
    oracles = Oracles(problem)
    inputs, targets = torch.randn(2, 7, 6), torch.randn(2, 7, 1)
    batch = Batch(((inputs, targets),)).randomised(torch.tensor([[1, 2], [3, 4]]))
    x = problem.x0.expand(2, -1)
    first, second = (oracles.outer_grads(x, None, batch)[0] for _ in range(2))
    assert torch.equal(first, second)
    other = Batch(((inputs, targets),)).randomised(torch.tensor([[1, 2], [3, 5]]))
    changed = oracles.outer_grads(x, None, other)[0]
    torch.testing.assert_close(changed[0], first[0])
    assert not torch.allclose(changed[1], first[1])
    assert problem.flat is not None
    with problem.flat.drawing_from(torch.tensor([1, 2])):
        leaf = problem.x0.clone().requires_grad_()
        (expected,) = torch.autograd.grad(problem.outer(leaf, (inputs[0], targets[0])), leaf)
    torch.testing.assert_close(first[0], expected)


@pytest.mark.parametrize("batch_size", [4, None])
def test_every_step_client_level_and_stream_has_words_of_its_own(batch_size: int | None) -> None:
    data = fs.FederatedData.from_arrays([(torch.randn(4, 3), torch.zeros(4).long()) for _ in range(3)])
    problem = fs.maml(nn.Sequential(nn.Dropout(0.5), nn.Linear(3, 2)))
    clients = make_clients(make_setting(problem, data, batch_size=batch_size))
    drawn: list[list[int]] = []

    def words(client: fs.Client, x: torch.Tensor) -> torch.Tensor:
        k = client.variables(x=x)
        for _ in client.loop(3, k):
            for level, stream in ((0, 0), (1, 0), (0, 1)):
                drawn.extend(client.draw(level, stream).parts[0][-1].tolist())
        return k.x - x

    for round in (0, 1):
        clients.begin(round)
        clients.mean(words, problem.x0)
    assert len(drawn) == len({tuple(pair) for pair in drawn}) == 2 * 3 * 3 * 3
