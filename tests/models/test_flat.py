"""A module as a pure function of a flat vector, and back."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fedstrata as fs
from fedstrata.models.flat import Flat
from fedstrata.models.zoo import MODELS, model
from fedstrata.problems import PROBLEMS


class Tied(nn.Module):
    """Two layers that share one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second = nn.Linear(3, 3)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))


def frozen() -> nn.Module:
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    net[0].weight.requires_grad_(False)
    net.register_buffer("constant", torch.ones(2))
    return net


def normed(norm: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 12, 3), norm, nn.ReLU(), nn.Flatten(), nn.Linear(12 * 16, 2))


SHAPE = (1, 12, 12)
OF_IMAGES = [name for name in MODELS if name != "lstm"]  # which takes tokens and has its own tests
CASES: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    **{name: (model(name, SHAPE, 3, seed=1), SHAPE) for name in OF_IMAGES},
    "tied": (Tied(), (3,)),
    "frozen": (frozen(), (3,)),
    "group norm": (normed(nn.GroupNorm(4, 12)), (1, 6, 6)),
}


def some_inputs(shape: tuple[int, ...], rows: int = 5) -> torch.Tensor:
    return torch.randn(rows, *shape, generator=torch.Generator().manual_seed(0))


def other_point(flat: Flat) -> torch.Tensor:
    return flat.initial + 0.1 * torch.randn(flat.size, generator=torch.Generator().manual_seed(1))


def assert_close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_the_function_is_the_module(name: str) -> None:
    module, shape = CASES[name]
    flat = Flat(module)
    assert flat.size == len(flat.initial) == sum(p.numel() for p in module.parameters() if p.requires_grad)
    inputs = some_inputs(shape)
    assert_close(flat(flat.initial, inputs), module(inputs))
    x = other_point(flat)
    assert not torch.allclose(flat(x, inputs), module(inputs))
    assert_close(flat(x, inputs), flat.to_module(x)(inputs))


@pytest.mark.parametrize("name", CASES)
def test_a_vector_survives_a_round_trip_through_a_state_dict(name: str) -> None:
    module, shape = CASES[name]
    flat = Flat(module)
    x = other_point(flat)
    assert torch.equal(flat.to_vector(flat.state_dict(x)), x)
    theirs = copy.deepcopy(module)
    theirs.load_state_dict(flat.state_dict(x))
    assert_close(theirs(some_inputs(shape)), flat(x, some_inputs(shape)))
    assert torch.equal(flat.to_vector(module.state_dict()), flat.initial)


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_the_module(name: str) -> None:
    module, shape = CASES[name]
    flat = Flat(module)
    leaf = flat.initial.clone().requires_grad_()
    (ours,) = torch.autograd.grad(flat(leaf, some_inputs(shape)).square().sum(), leaf)
    own = copy.deepcopy(module)
    own(some_inputs(shape)).square().sum().backward()
    theirs = torch.cat([p.grad.reshape(-1) for p in own.parameters() if p.requires_grad])
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def test_views_are_views() -> None:
    flat = Flat(nn.Linear(3, 2))
    x = flat.initial.clone()
    views = flat.views(x)
    assert {n: tuple(v.shape) for n, v in views.items()} == {"weight": (2, 3), "bias": (2,)}
    x[0], x[-1] = 7.0, 9.0
    assert views["weight"][0, 0] == 7.0
    assert views["bias"][1] == 9.0
    assert all(v.untyped_storage().data_ptr() == x.untyped_storage().data_ptr() for v in views.values())


def test_a_state_dict_is_a_copy() -> None:
    flat = Flat(nn.Linear(3, 2))
    x = flat.initial.clone()
    state = flat.state_dict(x)
    x.zero_()
    assert state["weight"].abs().sum() > 0


def test_the_original_module_does_not_change() -> None:
    module = nn.Linear(3, 2)
    before = copy.deepcopy(module.state_dict())
    flat = Flat(module)
    flat(other_point(flat), torch.ones(1, 3))
    flat.to_module(other_point(flat))
    assert all(torch.equal(v, before[k]) for k, v in module.state_dict().items())
    with torch.no_grad():
        module.weight.zero_()
    assert flat.initial.abs().sum() > 0.1


def test_tied_weights_are_one_part_of_the_vector() -> None:
    flat = Flat(Tied())
    assert flat.size == 9 + 3 + 3
    trained = flat.to_module(other_point(flat))
    assert trained.first.weight is trained.second.weight
    assert torch.equal(
        trained.first.weight.detach().reshape(-1), flat.views(other_point(flat))["first.weight"].reshape(-1)
    )


def test_frozen_weights_stay_out_of_the_vector() -> None:
    module = frozen()
    flat = Flat(module)
    assert flat.size == 4 + 8 + 2
    trained = flat.to_module(other_point(flat))
    assert torch.equal(trained[0].weight, module[0].weight)
    assert not torch.equal(trained[0].bias, module[0].bias)


def test_a_state_dict_with_missing_names_is_refused() -> None:
    with pytest.raises(fs.InputError, match=r"The state_dict lacks bias\."):
        Flat(nn.Linear(3, 2)).to_vector({"weight": torch.zeros(2, 3)})


def test_models_that_cannot_be_trained_are_refused() -> None:
    with pytest.raises(fs.InputError, match="ReLU has no trainable parameters"):
        Flat(nn.ReLU())
    mixed = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double())
    with pytest.raises(fs.InputError, match="dtype of the model's parameters must be the same for all"):
        Flat(mixed)


# --- what is not a pure function -------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", [nn.BatchNorm2d(12), nn.InstanceNorm2d(12, track_running_stats=True)])
def test_running_statistics_are_refused_with_a_remedy(norm: nn.Module) -> None:
    with pytest.raises(fs.InputError, match=r"The layer '1' .*batchnorm='group'.*batchnorm='batch'"):
        Flat(normed(norm))
    assert Flat(normed(nn.BatchNorm2d(12, track_running_stats=False))).size > 0


def test_group_norm_takes_the_place_of_batch_norm() -> None:
    module = normed(nn.BatchNorm2d(12, eps=1e-3))
    with torch.no_grad():
        module[1].weight.uniform_(0.5, 2.0)
        module[1].bias.uniform_(-1.0, 1.0)
    flat = Flat(module, batchnorm="group")
    norm = flat.module[1]
    assert isinstance(norm, nn.GroupNorm)
    assert (norm.num_groups, norm.num_channels, norm.eps) == (4, 12, 1e-3)
    assert torch.equal(norm.weight, module[1].weight)
    assert torch.equal(norm.bias, module[1].bias)
    assert isinstance(module[1], nn.BatchNorm2d)
    inputs = some_inputs((1, 6, 6))
    assert_close(flat(flat.initial, inputs)[:1], flat(flat.initial, inputs[:1]))  # rows do not affect each other


def test_group_norm_in_place_of_the_whole_model_and_deep_inside() -> None:
    assert isinstance(Flat(nn.BatchNorm1d(6), batchnorm="group").module, nn.GroupNorm)
    deep = Flat(model("resnet20", (3, 8, 8), 2, norm="batch", width=4), batchnorm="group")
    kinds = [type(m) for m in deep.module.modules()]
    assert nn.BatchNorm2d not in kinds
    assert kinds.count(nn.GroupNorm) == 19
    assert deep.initial.dtype == torch.float32
    double = Flat(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).double(), batchnorm="group")
    assert double.initial.dtype == torch.float64


def test_batch_always_uses_the_statistics_of_the_batch() -> None:
    module = normed(nn.BatchNorm2d(12)).train()
    flat = Flat(module, batchnorm="batch")
    inputs = some_inputs((1, 6, 6))
    first = flat(flat.initial, inputs)
    assert torch.equal(flat(flat.initial, inputs), first)
    assert_close(first, copy.deepcopy(module)(inputs))
    trained = flat.to_module(flat.initial)
    assert_close(trained(inputs), first)
    assert_close(trained.eval()(inputs), first)


def test_an_unknown_rule_is_refused() -> None:
    with pytest.raises(fs.InputError, match="batchnorm must be 'refuse', 'group' or 'batch'"):
        Flat(nn.Linear(2, 2), batchnorm="instance")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "layer",
    [nn.AlphaDropout(0.2), nn.LSTM(2, 2, num_layers=2, dropout=0.4), nn.MultiheadAttention(2, 1, dropout=0.1)],
    ids=["AlphaDropout", "LSTM", "MultiheadAttention"],
)
def test_dropout_that_cannot_be_drawn_by_names_is_refused(layer: nn.Module) -> None:
    with pytest.raises(
        fs.InputError, match=r"The layer '1' .* draws random numbers that cannot be reproduced. Use.*dropout='off'"
    ):
        Flat(nn.Sequential(nn.Linear(2, 2), layer))
    original = copy.deepcopy(layer)
    Flat(nn.Sequential(nn.Linear(2, 2), layer), dropout="off")
    assert repr(layer) == repr(original) and vars(layer).keys() == vars(original).keys(), "the user's own is unchanged"


@pytest.mark.parametrize("model", [None, nn.Linear, lambda x: x, "mlp"], ids=["None", "class", "function", "name"])
def test_a_model_that_is_not_a_module_is_refused(model: Any) -> None:
    with pytest.raises(fs.InputError, match=r"The model must be a torch.nn.Module"):
        fs.erm(model)


@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_lazy_layers_and_half_precision_are_refused() -> None:
    with pytest.raises(fs.InputError, match="lazy layers that have no weights yet: call it once"):
        Flat(nn.Sequential(nn.LazyLinear(2)))
    with pytest.raises(fs.InputError, match=r"parameters must be torch.float32 or torch.float64. Got torch.bfloat16"):
        Flat(nn.Linear(2, 2).bfloat16())


class Functional(nn.Module):
    """Drops in its forward: in training mode only, or always."""

    def __init__(self, always: bool = False) -> None:
        super().__init__()
        self.linear, self.always, self.dropout = nn.Linear(6, 6), always, 0.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(self.linear(x), 0.5, self.always or self.training)


class Attention(nn.Module):
    """Attends to itself, with dropout on the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.MultiheadAttention(6, 2, dropout=0.3, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x, x, x)[0]


class Recurrent(nn.Module):
    """Two recurrent layers, with dropout between them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.LSTM(6, 6, num_layers=2, dropout=0.5, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)[0]


@pytest.mark.parametrize(
    "layer",
    [
        *(nn.Dropout(0.5), nn.Dropout1d(0.5), nn.AlphaDropout(0.2), nn.FeatureAlphaDropout(0.2)),
        *(Functional(), Attention(), Recurrent()),
        nn.TransformerEncoderLayer(6, 2, 8, dropout=0.2, batch_first=True),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_all_dropout_can_be_switched_off(layer: nn.Module) -> None:
    module = nn.Sequential(nn.Linear(6, 6), layer).train()
    inputs, expected = torch.randn(5, 3, 6), copy.deepcopy(module).eval()
    flat = Flat(module, dropout="off")
    assert not flat.random and module.training
    outputs = flat.pure(inputs)
    torch.testing.assert_close(outputs, expected(inputs))
    torch.testing.assert_close(flat(flat.initial, inputs), outputs)
    torch.testing.assert_close(flat.to_module(flat.initial)(inputs), outputs)


def test_dropout_that_does_not_ask_for_the_mode_is_refused_even_if_off() -> None:
    with pytest.raises(fs.InputError, match="draws random numbers, so it is not a pure function"):
        Flat(Functional(always=True), dropout="off").pure(torch.randn(2, 6))
    with pytest.raises(fs.InputError, match=r"dropout must be 'on' or 'off'\. Got 'no'"):
        Flat(nn.Linear(2, 2), dropout="no")  # type: ignore[arg-type]


def test_augmentation_stays_if_dropout_is_off() -> None:
    flat = Flat(nn.Sequential(fs.models.RandomJitter(), nn.Dropout(0.5), nn.Conv2d(1, 1, 1)), dropout="off")
    assert [type(layer).__name__ for layer in flat.module.children()] == ["RandomJitter", "Dropout", "Conv2d"]
    images = torch.rand(3, 1, 2, 2)
    with flat.drawing_from(torch.tensor([1, 2])):
        assert not torch.allclose(flat(flat.initial, images), flat(flat.initial, images))


DROPPING = [name for name, kind in PROBLEMS.items() if kind.takes_model]


@pytest.mark.parametrize("name", DROPPING)
def test_every_problem_on_a_model_can_switch_dropout_off(name: str) -> None:
    data = fs.FederatedData.from_arrays([(torch.randn(6, 3), torch.arange(6) % 2)] * 2)
    net = nn.Sequential(nn.Dropout(0.5), nn.Linear(3, PROBLEMS[name].outputs or 2))
    problems = [PROBLEMS[name].on(net, data, dropout=rule) for rule in ("on", "off")]
    assert [problem.flat is not None and problem.flat.random for problem in problems] == [True, False]
    assert [problem.options["dropout"] for problem in problems] == ["on", "off"]


def test_a_run_without_dropout_is_that_of_a_model_that_has_none() -> None:
    data = fs.FederatedData.from_arrays([(torch.randn(20, 3), torch.arange(20) % 2) for _ in range(3)])
    torch.manual_seed(1)
    linear = nn.Linear(3, 2)
    plain, with_dropout = linear, nn.Sequential(nn.Dropout(0.5), linear)
    runs = [
        fs.train(problem, data, fs.FedAvg(lr=0.1), rounds=2, batch_size=5)
        for problem in (fs.erm(plain), fs.erm(with_dropout, dropout="off"), fs.erm(with_dropout))
    ]
    assert torch.equal(runs[0].x, runs[1].x) and not torch.equal(runs[0].x, runs[2].x)


def test_dropout_of_zero_is_allowed() -> None:
    assert Flat(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.0))).size == 6


# --- models by name --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("module", "kind"),
    [
        (nn.Linear(2, 2), "dense"),
        (nn.Sequential(nn.Flatten(), nn.Linear(2, 2)), "dense"),
        (nn.Sequential(nn.Conv1d(1, 1, 2), nn.Linear(2, 2)), "convolutional"),
        (nn.Sequential(nn.Conv1d(1, 1, 2), nn.GRU(2, 2)), "recurrent"),
        (nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0), "attention"),
    ],
)
def test_the_kind_of_layers(module: nn.Module, kind: str) -> None:
    assert Flat(module).layers() == kind


@pytest.mark.parametrize("name", MODELS)
def test_initial_weights_follow_the_seed_and_leave_torchs_random_state_alone(name: str) -> None:
    torch.manual_seed(3)
    before = torch.random.get_rng_state()
    shape = SHAPE if name in OF_IMAGES else (6,)
    one, same, other = (Flat(model(name, shape, 3, seed=s)).initial for s in (1, 1, 2))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(one, same)
    assert torch.equal(one, other) == (name == "logreg")  # which starts at zero


@pytest.mark.parametrize(
    ("name", "shape", "size"),
    [
        ("logreg", (784,), 784 * 10 + 10),
        ("mlp", (784,), 785 * 200 + 201 * 200 + 201 * 10),
        ("lenet5", (1, 28, 28), 61_706),
        ("lenet5", (3, 32, 32), 62_006),
        ("cnn4", (1, 28, 28), 320 + 18_496 + 64 * 49 * 128 + 128 + 1290),
        ("patchnet", (3, 32, 32), 48 * 32 + 32 + 128 * 64 + 64 + 64 * 16 * 10 + 10),
        ("patchnet", (1, 28, 28), 16 * 32 + 32 + 128 * 64 + 64 + 64 * 16 * 10 + 10),
        ("patchnet", (1, 8, 4), 16 * 32 + 32 + 128 * 64 + 64 + 64 * 10 + 10),
        ("cnn7", (3, 32, 32), 896 + 9248 + 18_496 + 36_928 + 73_856 + 147_584 + 128 * 16 * 10 + 10),
        ("cnn7", (1, 28, 28), 320 + 9248 + 18_496 + 36_928 + 73_856 + 147_584 + 128 * 9 * 10 + 10),
        ("resnet20", (3, 32, 32), 269_722),
    ],
)
def test_models_have_their_published_sizes(name: str, shape: tuple[int, ...], size: int) -> None:
    flat = Flat(model(name, shape, 10))
    assert flat.size == size
    assert flat(flat.initial, torch.zeros(2, *shape)).shape == (2, 10)


@pytest.mark.parametrize("shape", [(3, 32, 32), (2, 28, 20), (1, 8, 8)])
def test_a_patchnet_is_two_convolutions_whose_stride_is_their_size(shape: tuple[int, int, int]) -> None:
    net = model("patchnet", shape, 3, width=5).double()
    first, second, last = (m for m in net if isinstance(m, nn.Linear))
    x = torch.randn(2, *shape, dtype=torch.float64)
    padded = nn.functional.pad(x, (0, -shape[2] % 4, 0, -shape[1] % 4))
    kernel = first.weight.reshape(5, 4, 4, shape[0]).permute(0, 3, 1, 2)
    y = nn.functional.conv2d(padded, kernel, first.bias, stride=4).relu()
    y = nn.functional.pad(y, (0, -y.shape[3] % 2, 0, -y.shape[2] % 2))
    kernel = second.weight.reshape(10, 2, 2, 5).permute(0, 3, 1, 2)
    y = nn.functional.conv2d(y, kernel, second.bias, stride=2).relu()
    torch.testing.assert_close(net(x), last(y.permute(0, 2, 3, 1).flatten(1)))


def test_cnn7_has_six_convolutions_and_a_linear_layer() -> None:
    layers = list(model("cnn7", (3, 8, 8), 4, width=5))
    widths = [m.out_channels for m in layers if isinstance(m, nn.Conv2d)]
    assert widths == [5, 5, 10, 10, 20, 20]
    pair = ["Conv2d", "ReLU", "Conv2d", "ReLU", "MaxPool2d"]
    assert [type(m).__name__ for m in layers] == [*pair * 3, "Flatten", "Linear"]
    assert layers[-1].in_features == 20


@pytest.mark.parametrize(
    ("name", "shape", "options", "message"),
    [
        ("lenet", (1, 28, 28), {}, r"Unknown model 'lenet'\. Did you mean 'lenet5'"),
        ("mlp", (4,), {"width": 3}, r"Unknown option of the mlp model 'width'\. Known: dropout, hidden"),
        ("mlp", (4,), {"hidden": ()}, "hidden of the mlp model must be"),
        ("mlp", (4,), {"hidden": (3, 0)}, "hidden of the mlp model must be"),
        (
            "lenet5",
            (784,),
            {},
            r"The model lenet5 needs images \[channels, height, width\] of at least 12x12\. Got \(784,\)",
        ),
        ("cnn4", (1, 3, 3), {}, "The model cnn4 needs images"),
        ("cnn7", (3, 8, 7), {}, "The model cnn7 needs images .* of at least 8x8"),
        ("cnn7", (3, 8, 8), {"depth": 2}, r"Unknown option of the cnn7 model 'depth'\..* Known: width"),
        ("resnet20", (1, 8, 8), {"norm": "layer"}, "norm of the resnet20 model must be 'group' or 'batch'"),
    ],
)
def test_a_bad_model_is_refused(name: str, shape: tuple[int, ...], options: dict[str, object], message: str) -> None:
    with pytest.raises(fs.InputError, match=message):
        model(name, shape, 10, **options)


# --- what a model returns --------------------------------------------------------------------------------------------


class Several(nn.Module):
    """A model that returns more than its logits, as language models and recurrent layers do."""

    def __init__(self, wrap: Callable[[torch.Tensor], object]) -> None:
        super().__init__()
        self.linear, self.wrap = nn.Linear(3, 2), wrap

    def forward(self, x: torch.Tensor) -> object:
        return self.wrap(self.linear(x))


@pytest.mark.parametrize(
    ("wrap", "got"),
    [
        (lambda logits: {"logits": logits}, "dict of 1 entries"),
        (lambda logits: (logits, logits.mean()), "tuple of 2 entries"),
        (lambda logits: None, "NoneType"),
    ],
    ids=["dict", "tuple", "none"],
)
@pytest.mark.parametrize("build", [fs.erm, fs.auc, fs.maml, lambda m: fs.agnostic(m, 2)])
def test_a_model_that_returns_no_tensor_is_refused(wrap: Any, got: str, build: Callable[..., fs.Problem]) -> None:
    data = fs.FederatedData.from_arrays([(torch.ones(4, 3), torch.arange(4) % 2)] * 2)
    problem = build(Several(wrap))
    message = rf"^The output of the model Several must be one tensor: wrap the model .* Got '{got}'\."
    with pytest.raises(fs.InputError, match=message):
        fs.train(problem, data, fs.FGDA() if problem.dual else fs.FedAvg(), rounds=1)


# --- devices ---------------------------------------------------------------------------------------------------------


class Frozen(nn.Module):
    """A model with all kinds of tensors: trained, frozen and tied weights, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 2)
        self.second.weight = self.first.weight
        self.first.weight.requires_grad_(False)
        self.register_buffer("shift", torch.ones(3), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.second(self.first(x)) + self.shift))


def devices(module: nn.Module) -> set[str]:
    return {t.device.type for t in (*module.parameters(), *module.buffers())}


@pytest.mark.parametrize("build", [fs.erm, fs.maml, lambda m: fs.auc(m, p=0.3)], ids=["erm", "maml", "auc"])
def test_moving_a_problem_does_not_move_its_model_or_other_problems(build: Callable[..., fs.Problem]) -> None:
    module = Frozen()
    problem = build(module)
    other = replace(problem, name="other")
    batch = (some_inputs((3,)), torch.arange(5) % 2)
    dual = () if problem.y0 is None else (problem.y0,)
    before = problem.outer(problem.x0, *dual, batch)
    moved = problem.to(torch.device("meta"))
    assert problem.flat is not None
    assert devices(module) == devices(problem.flat.module) == {"cpu"}
    assert problem.x0.device.type == other.x0.device.type == "cpu"
    assert torch.equal(problem.outer(problem.x0, *dual, batch), before)
    assert torch.equal(other.outer(other.x0, *dual, batch), before)
    there = tuple(a.to("meta") for a in batch)
    dual = () if moved.y0 is None else (moved.y0,)
    assert moved.outer(moved.x0, *dual, there).device.type == "meta"
    assert moved.predict is not None and moved.predict(moved.x0, there[0]).shape == (5, 2)


def test_a_moved_problem_gives_its_model_on_its_own_device() -> None:
    problem = fs.erm(Frozen())
    moved = problem.to(torch.device("meta"))
    assert devices(moved.model(moved.x0)) == {"meta"}
    assert devices(problem.model(problem.x0)) == {"cpu"}
    assert moved.flat is not None
    assert {v.device.type for v in moved.flat.state_dict(moved.x0).values()} == {"meta"}


def test_every_model_can_be_built_by_its_function() -> None:
    assert all(getattr(fs.models, name) is build for name, build in MODELS.items())


class Checkpointed(nn.Module):
    """Runs its first layer again in the backward pass, where a functional call has put the old weights back."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.second(checkpoint(lambda z: torch.tanh(self.first(z)), inputs, use_reentrant=False))


class Shifting(nn.Linear):
    """Changes its inputs in place."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(inputs.sub_(0.5))


class Clamping(nn.Linear):
    """Changes its weights in forward."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.weight.clamp_(-0.01, 0.01)
        return super().forward(inputs)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Checkpointed(), "is wrong: a part of it runs again in the backward pass, with other weights"),
        (Shifting(4, 2), "changes its inputs in place"),
        (Clamping(4, 2), "changes its weights in forward"),
    ],
    ids=["checkpointing", "inputs", "weights"],
)
def test_a_model_that_is_not_a_function_of_weights_and_inputs_is_refused(model: nn.Module, message: str) -> None:
    inputs = torch.randn(6, 4)
    before = inputs.clone()
    data = fs.FederatedData.from_arrays([(inputs, torch.arange(6) % 2)] * 2)
    problem = fs.erm(model)
    start = problem.x0.clone()
    with pytest.raises(fs.InputError, match=message):
        fs.train(problem, data, fs.FedAvg(), rounds=1)
    assert torch.equal(inputs, before) and torch.equal(problem.x0, start)
