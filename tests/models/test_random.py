"""Random layers draw by names: the same numbers whatever the chunk, the order and the moment of a kill."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedstrata as fs
from augmented import augmented, augmented_example, shade
from fedstrata.core import rng
from fedstrata.data.batch import Batch
from fedstrata.models.flat import Flat
from fedstrata.problems.oracles import Oracles
from support import make_client, make_clients, make_setting, started, without_seconds

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


class Twice(nn.Module):
    """Uses one layer twice, under one name or two."""

    def __init__(self, names: int) -> None:
        super().__init__()
        self.first = self.drop = nn.Dropout(0.5)
        if names == 2:
            self.second = self.first
        self.linear = nn.Linear(4, 4, bias=False)
        nn.init.eye_(self.linear.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.first(x)) + 10 * getattr(self, "second", self.drop)(x)


@pytest.mark.parametrize("names", [1, 2])
def test_a_layer_that_is_used_twice_draws_twice(names: int) -> None:
    flat = Flat(Twice(names))
    out = dropped(flat, torch.ones(500, 4))
    assert out.unique().tolist() == [0, 2, 20, 22], "all combinations of the two masks"
    assert torch.equal(out, dropped(flat, torch.ones(500, 4)))
    assert type(flat.to_module(flat.initial).get_submodule("first")) is nn.Dropout
    torch.testing.assert_close(flat(flat.initial, torch.ones(3, 4)), torch.full((3, 4), 11.0))


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


def changed(layer: nn.Module, images: torch.Tensor) -> torch.Tensor:
    """Return what a layer makes of images in training."""
    flat = Flat(nn.Sequential(layer, nn.Conv2d(images.shape[1], images.shape[1], 1, groups=images.shape[1])))
    flat.initial.copy_(torch.cat([torch.ones(images.shape[1]), torch.zeros(images.shape[1])]))
    assert torch.equal(flat(flat.initial, images), images), "inactive in evaluation"
    return dropped(flat, images)


@pytest.mark.parametrize("channels", [1, 2, 5])
def test_jitter_changes_brightness_and_contrast_by_uniform_factors(channels: int) -> None:
    """ColorJitter's convention: x * b, then the mean of the image + c times the distance from it."""
    images = 3 * torch.randn(4000, channels, 3, 3) - 1  # any range, any number of channels
    out = changed(fs.models.RandomJitter(brightness=0.3, contrast=0.1), images)
    mean, new_mean = images.mean((1, 2, 3)), out.mean((1, 2, 3))
    brightness = new_mean / mean
    spread = out.flatten(1).std(1) / images.flatten(1).std(1)
    contrast = spread / brightness
    expected = contrast.view(-1, 1, 1, 1) * brightness.view(-1, 1, 1, 1) * (images - mean.view(-1, 1, 1, 1))
    torch.testing.assert_close(out, expected + new_mean.view(-1, 1, 1, 1), atol=1e-4, rtol=1e-4)
    for factor, width in ((brightness, 0.3), (contrast, 0.1)):
        assert 1 - width - 1e-3 < factor.min() < 1 - 0.97 * width and 1 + 0.97 * width < factor.max() < 1 + width + 1e-3
        quarters = torch.histc((factor - 1) / width, 4, -1, 1) / len(factor)
        torch.testing.assert_close(quarters, torch.full((4,), 0.25), atol=0.03, rtol=0)
    assert abs(torch.corrcoef(torch.stack([brightness, contrast]))[0, 1]) < 0.05


def test_jitter_of_nothing_changes_nothing_and_factors_are_not_negative() -> None:
    images = torch.rand(2000, 1, 2, 2)
    assert torch.equal(changed(fs.models.RandomJitter(0, 0), images), images)
    wide = changed(fs.models.RandomJitter(3.0, 0), images) / images
    assert 0 <= wide.min() < 0.02 and 3.98 < wide.max() <= 4.001
    with pytest.raises(
        fs.InputError, match=r"The brightness of RandomJitter must be a number of at least 0\. Got -1\."
    ):
        fs.models.RandomJitter(-1)


@pytest.mark.parametrize("layer", [fs.models.RandomFlip, fs.models.RandomCrop, fs.models.RandomJitter])
def test_random_layers_in_a_module_of_ones_own_use_torchs_generator(layer: type[nn.Module]) -> None:
    images, own = torch.randn(30, 1, 4, 4), layer()
    assert not torch.equal(own(images), images)
    assert torch.equal(own.eval()(images), images)


def test_the_options_of_augmentations_are_checked() -> None:
    with pytest.raises(fs.InputError, match="padding of RandomCrop must be a whole number"):
        fs.models.RandomCrop(0)
    with pytest.raises(fs.InputError, match=r"Unknown option of RandomFlip 'p'"):
        fs.models.RandomFlip(p=0.1)  # type: ignore[call-arg]


# --- functions of the user --------------------------------------------------------------------------------------------


def test_a_function_gets_numbers_of_its_own_for_each_input() -> None:
    seen: list[torch.Tensor] = []

    def watch(inputs: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        seen.append(numbers)
        return inputs + numbers[:, :1]

    flat = identity(fs.models.RandomFunction(watch, 3))
    inputs = torch.randn(400, 4)
    out = dropped(flat, inputs)
    (numbers,) = seen
    assert numbers.shape == (400, 3) and 0 <= numbers.min() < 0.01 and 0.99 < numbers.max() < 1
    assert len(numbers.unique()) > 1190
    torch.testing.assert_close(out, inputs + numbers[:, :1])
    assert torch.equal(flat(flat.initial, inputs), inputs) and len(seen) == 1, "inactive in evaluation"


def test_a_function_may_change_integers() -> None:
    def mask(tokens: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        return torch.where(numbers < 0.5, 0, tokens)

    flat = Flat(nn.Sequential(fs.models.RandomFunction(mask, 4), nn.Embedding(9, 1)))
    tokens = torch.full((100, 4), 7)
    kept = dropped(flat, tokens) == flat.initial[7]
    assert 150 < int(kept.sum()) < 250


RANDOM = "draws numbers of its own, which cannot be reproduced: the function of an augmentation must use the numbers"


def in_place(inputs: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    inputs += numbers
    return inputs


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x, u: x + torch.rand(len(x), 1), RANDOM),
        (lambda x, u: x + torch.tensor(np.random.default_rng().normal(size=(len(x), 1))).to(x), RANDOM),
        (in_place, "changes its inputs in place"),
        (lambda x, u: x[:, :2], r"result of the augmentation <lambda> must be inputs as given: shape \(2, 4\)"),
        (lambda x, u: x.double(), r"torch.float32. Got 'shape \(2, 4\), torch.float64'"),
        (lambda x, u: None, "Got 'NoneType'"),
    ],
    ids=["torch", "numpy", "in place", "shape", "dtype", "nothing"],
)
def test_functions_that_cannot_be_used_are_refused_before_the_first_round(function: Any, message: str) -> None:
    data = fs.FederatedData.from_arrays([(torch.randn(4, 4), torch.arange(4) % 2)] * 2)
    net = nn.Sequential(fs.models.RandomFunction(function), nn.Linear(4, 2))
    before = torch.get_rng_state()
    with pytest.raises(fs.InputError, match=message):
        fs.train(fs.erm(net), data, fs.FedAvg(), rounds=1)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_function_that_reads_values_runs_one_client_at_a_time() -> None:
    def reads(inputs: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        return inputs * 2 if numbers.sum().item() > 2 else inputs + numbers

    data = fs.FederatedData.from_arrays([(torch.randn(8, 3).double(), torch.arange(8) % 2) for _ in range(4)])
    problem = fs.erm(nn.Sequential(fs.models.RandomFunction(reads), nn.Linear(3, 2)).double())
    how: dict[str, Any] = {"rounds": 2, "batch_size": 4}
    one = fs.train(problem, data, fs.FedAvg(lr=0.1), chunk=1, **how)
    with pytest.warns(UserWarning, match="runs one client at a time"):
        every = fs.train(problem, data, fs.FedAvg(lr=0.1), chunk=4, **how)
    torch.testing.assert_close(one.x, every.x, atol=1e-12, rtol=1e-12)


def test_what_is_not_a_function_is_refused() -> None:
    with pytest.raises(fs.InputError, match=r"The function of RandomFunction must be a function \(inputs, numbers\)"):
        fs.models.RandomFunction(3)  # type: ignore[arg-type]
    with pytest.raises(fs.InputError, match="The numbers of RandomFunction must be a whole number of at least 1"):
        fs.models.RandomFunction(shade, 0)


@pytest.mark.usefixtures("registries")
def test_a_registered_function_is_a_layer_with_options() -> None:
    @fs.models.augmentation
    def dim(images: torch.Tensor, numbers: torch.Tensor, by: float = fs.param(1.0, "share", least=0, most=1)) -> Any:
        """Make images darker."""
        return images * (1 - by * numbers[:, :, None, None])

    images = torch.rand(50, 1, 4, 4)
    out = changed(dim(by=0.5), images)
    assert bool((out <= images).all()) and bool((out >= 0.5 * images).all()) and not torch.equal(out, images)
    net = fs.models.model("logreg", (1, 4, 4), 2, augment=["flip", {"name": "dim", "by": 0.1}])
    assert [type(layer).__name__ for layer in net.children()] == ["RandomFlip", "RandomFunction", "Sequential"]
    for augment, message in (
        (["dim", "dimm"], r"Unknown augmentation 'dimm'. Did you mean 'dim'.*To add your own: fedstrata --import"),
        ([{"name": "dim", "by": 2}], "The by of the dim augmentation must be a number from 0 to 1. Got 2"),
        ([{"by": 2}], r"The augment must be a name, or a table with a name and options.* Got \{'by': 2\}"),
        ("flip", r"The augment must be a list of augmentations.*Got 'flip'"),
    ):
        with pytest.raises(fs.InputError, match=message):
            fs.models.model("logreg", (1, 4, 4), 2, augment=augment)
    with pytest.raises(fs.InputError, match=r"The augmentation flip needs images .* Got inputs of shape \(5,\)"):
        fs.models.model("logreg", (5,), 2, augment=["dim", "flip"])
    with pytest.raises(TypeError, match=r"The augmentation short must take \(inputs, numbers\)"):

        @fs.models.augmentation
        def short(images: torch.Tensor) -> torch.Tensor:
            return images


# --- runs ------------------------------------------------------------------------------------------------------------


def run(
    algorithm: fs.Algorithm,
    problem: str = "erm",
    out: Path | None = None,
    dtype: torch.dtype = torch.float64,
    **options: Any,
) -> fs.Run:
    """Train the model with every kind of random layer."""
    data = fs.data.digits().split(fs.partition.dirichlet(0.5), clients=5, seed=0, holdout=0.2)
    classes = {"classes": 10} if problem == "fair" else {}
    how = {"rounds": 3, "batch_size": 8, "seed": 1, **options}
    return fs.train(getattr(fs, problem)(augmented(dtype), **classes), data, algorithm, out=out, **how)


ALGORITHMS: dict[str, fs.Algorithm] = {
    "erm": fs.Scaffold(lr=0.1, steps=3),
    "maml": fs.ComFedL(lr=0.1, steps=2),
    "fair": fs.FGDA(gamma=0.1, lam=0.1, steps=3),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("error:The problem .* runs one client at a time")
@pytest.mark.parametrize("problem", ALGORITHMS)
@pytest.mark.parametrize("batch_size", [8, None])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_a_run_with_random_layers_does_not_depend_on_the_chunk(
    problem: str, batch_size: int | None, dtype: torch.dtype
) -> None:
    how: dict[str, Any] = {"batch_size": batch_size, "dtype": dtype}
    one, three, every = (run(ALGORITHMS[problem], problem, chunk=chunk, **how) for chunk in (1, 3, 5))
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    for other in (three, every):
        torch.testing.assert_close(one.x, other.x, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("clients", [1, 3])
def test_random_layers_are_recorded_in_graphs(clients: int) -> None:
    problem, data = augmented_example()
    oracles = Oracles(problem)
    side = make_setting(problem, data, batch_size=4, oracles=oracles)
    client = make_client(side, list(range(clients)))
    x = problem.x0.expand(clients, -1)
    batch = client.draw()
    traced = client.grads(x, batch)
    assert [graph for graph in oracles._runner.graphs.values() if graph is not None]
    plain = Oracles(problem)
    plain._runner.tracing = False
    torch.testing.assert_close(traced, plain.outer_grads(x, None, batch)[0], atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("weight", [0, 1])
def test_estimates_of_fgda_see_the_same_numbers_at_both_points(weight: float) -> None:
    """At the same point both gradients of STORM are equal: with weights 0, the first estimate stays as it is."""
    _, data = augmented_example()
    problem = fs.auc(augmented(torch.float64, 4, 1), p=0.4)
    clients = make_clients(make_setting(problem, data, batch_size=4))
    algorithm = fs.FGDA(gamma=1e-300, lam=1e-300, alpha=weight, beta=weight, steps=3)
    state = first = started(algorithm, clients)
    for number in (0, 1):
        clients.begin(number)
        state = algorithm.round(state, clients)
    assert (state.x - first.x).abs().max() < 1e-200 and first.w.norm() > 1e-3
    difference = float((state.w - first.w).norm() / first.w.norm())
    assert difference < 1e-12 if weight == 0 else difference > 0.1, "with weights 1, batches and numbers are others"


@pytest.mark.slow
def test_a_resumed_run_with_random_layers_ends_with_the_same_bits(tmp_path: Path) -> None:
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
