"""ConvMixer and LSTM: their formulas, sizes and training."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fedstrata as fs
from fedstrata.clients.chunk import choose_chunk
from fedstrata.models.zoo import MODELS, model
from fedstrata.problems.oracles import Oracles
from fedstrata.training.callbacks import Callback
from support import make_client, make_setting, sized_data, smooth_example

CPU = torch.device("cpu")


def parameters(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


# --- ConvMixer -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", ["group", "batch"])
@pytest.mark.parametrize(
    ("shape", "width", "depth", "kernel", "patch"),
    [((3, 8, 8), 4, 1, 5, 2), ((1, 28, 28), 6, 2, 3, 4), ((3, 9, 7), 8, 3, 3, 1), ((2, 4, 4), 5, 1, 5, 4)],
)
def test_convmixer_has_the_layers_of_its_formula(
    shape: tuple[int, int, int], width: int, depth: int, kernel: int, patch: int, norm: str
) -> None:
    """Patches, then depth times a depthwise convolution and a pointwise one, each with a norm; then the outputs."""
    module = model("convmixer", shape, 7, width=width, depth=depth, kernel=kernel, patch=patch, norm=norm)
    patches = shape[0] * patch**2 * width + width
    depthwise = width * kernel**2 + width
    pointwise = width * width + width
    scale = 2 * width
    expected = patches + scale + depth * (depthwise + scale + pointwise + scale) + 7 * width + 7
    assert parameters(module) == expected
    assert module(torch.randn(5, *shape)).shape == (5, 7)


def test_convmixer_for_cifar_has_the_usual_size() -> None:
    """256 wide and 8 deep, with 5x5 kernels and 2x2 patches: 0.59 million weights for ten classes."""
    expected = 13 * 256 + 512 + 8 * (26 * 256 + 512 + 257 * 256 + 512) + 2570
    assert parameters(model("convmixer", (3, 32, 32), 10)) == expected
    assert 590_000 < expected < 600_000


SMALL, LARGE = (3, 9, 8), (3, 20, 17)
"""Images of 4x4 patches, which are convolved by products of matrices, and of 10x8, which are not."""


def by_convolutions(
    module: nn.Module, x: torch.Tensor, width: int, depth: int, kernel: int, patch: int
) -> torch.Tensor:
    """ConvMixer by its formula, with the weights of a module in their order."""
    weights = iter(module.parameters())

    def convolved(x: torch.Tensor, inside: int, size: int, **options: Any) -> torch.Tensor:
        """A convolution with its bias, GELU, and GroupNorm with its scale and shift."""
        x = F.gelu(F.conv2d(x, next(weights).reshape(width, inside, size, size), next(weights), **options))
        return F.group_norm(x, 4, next(weights), next(weights))

    x = convolved(x, x.shape[1], patch, stride=patch)
    for _ in range(depth):
        x = x + convolved(x, 1, kernel, padding=kernel // 2, groups=width)
        x = convolved(x, width, 1)
    out = F.linear(x.mean((2, 3)), next(weights), next(weights))
    assert not list(weights)
    return out


@pytest.mark.parametrize("shape", [SMALL, LARGE])
@pytest.mark.parametrize(("depth", "kernel", "patch"), [(1, 5, 2), (3, 3, 2), (2, 1, 2), (2, 7, 4)])
def test_convmixer_is_its_formula(shape: tuple[int, int, int], depth: int, kernel: int, patch: int) -> None:
    """Patches, GELU, norms, and depth times x + depthwise(x) and pointwise; columns beyond the last patch are cut."""
    options = {"width": 12, "depth": depth, "kernel": kernel, "patch": patch}
    module = model("convmixer", shape, 4, **options).double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in module.parameters():  # with scales of 1 and shifts of 0, a swap would go unnoticed
            weight += 0.1 * torch.randn(weight.shape, generator=generator, dtype=torch.float64)
        inputs = torch.randn(5, *shape, generator=generator, dtype=torch.float64)
        outputs = module(inputs)
        torch.testing.assert_close(outputs, by_convolutions(module, inputs, **options), atol=1e-11, rtol=1e-11)
    assert (outputs - outputs[:1]).abs().max() > 1e-2


@pytest.mark.parametrize("norm", ["group", "batch"])
@pytest.mark.parametrize("shape", [SMALL, LARGE])
def test_every_weight_of_convmixer_affects_its_output(shape: tuple[int, int, int], norm: str) -> None:
    module = model("convmixer", shape, 4, width=12, depth=2, norm=norm)
    inputs = torch.randn(4, *shape, generator=torch.Generator().manual_seed(0))
    module(inputs)[:, 0].exp().sum().backward()
    for name, weight in module.named_parameters():
        assert weight.grad is not None and float(weight.grad.abs().max()) > 1e-5, name


@pytest.mark.parametrize("width", [2, 3, 4, 8, 12, 16])
def test_a_convmixer_of_any_width_sees_its_input(width: int) -> None:
    """If each channel were normalised over the image, pooling would leave only its mean, 0."""
    inputs = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    outputs = model("convmixer", (3, 8, 8), 4, width=width, depth=1)(inputs).detach()
    assert (outputs - outputs[:1]).abs().max() > 1e-2


BAD_MIXERS: list[tuple[tuple[int, ...], dict[str, Any], str]] = [
    ((3, 8, 8), {"norm": "layer"}, "The norm of the convmixer model must be 'group' or 'batch'. Got 'layer'."),
    ((3, 8, 8), {"widht": 8}, "'width'"),
    ((3, 8, 8), {"layers": 8}, "option of the convmixer model"),
    ((3, 8, 8), {"width": 0}, "The width of the convmixer model must be a whole number of at least 1. Got 0."),
    ((3, 8, 8), {"width": 1}, "The width of the convmixer model must be at least 2, or norm='batch'"),
    ((3, 8, 8), {"width": -4}, "The width of the convmixer model"),
    ((3, 8, 8), {"width": 2.5}, "The width of the convmixer model"),
    ((3, 8, 8), {"kernel": 0}, "The kernel of the convmixer model"),
    ((3, 8, 8), {"patch": 0}, "The patch of the convmixer model"),
    ((3, 8, 8), {"depth": 1.5}, "The depth of the convmixer model"),
    ((3, 8, 8), {"depth": 0}, "The depth of the convmixer model"),
    ((3, 8, 8), {"kernel": 4}, "The kernel of the convmixer model must be an odd number. Got 4."),
    ((3, 8, 8), {"patch": 16}, "of at least 16x16. Got (3, 8, 8)."),
    ((64,), {}, "The model convmixer needs images [channels, height, width]"),
]


@pytest.mark.parametrize(("shape", "options", "message"), BAD_MIXERS, ids=[f"{s} {o}" for s, o, _ in BAD_MIXERS])
def test_a_bad_convmixer_is_refused(shape: tuple[int, ...], options: dict[str, Any], message: str) -> None:
    with pytest.raises(fs.InputError) as refused:
        model("convmixer", shape, 4, **{"depth": 1, **options})
    assert message in str(refused.value)


def images(dtype: torch.dtype) -> fs.FederatedData:
    generator = np.random.default_rng(0)
    sizes = [6, 9, 4]
    pairs = [(generator.normal(size=(n, 2, 8, 8)) + 0.3 * k, np.arange(n) % 3) for k, n in enumerate(sizes)]
    return fs.FederatedData.from_arrays(pairs, classes=3).to(CPU, dtype)


@cache
def mixer(dtype: torch.dtype) -> fs.Problem:
    return fs.erm(model("convmixer", (2, 8, 8), 3, width=12, depth=1, kernel=3).to(dtype), prior=False)


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-9)])
def test_convmixers_train_together_as_they_do_alone(dtype: torch.dtype, tolerance: float) -> None:
    algorithm = fs.FedLALR(lr=1e-2, steps=2, eps=1e-2)
    options: dict[str, Any] = {"rounds": 3, "batch_size": 4, "eval_every": 3}
    alone, three = (fs.train(mixer(dtype), images(dtype), algorithm, chunk=c, **options) for c in (1, 3))
    assert (alone.x - mixer(dtype).x0).abs().max() > 1e-3
    torch.testing.assert_close(three.x, alone.x, atol=tolerance, rtol=tolerance)
    assert (alone.summary["chunk"], three.summary["chunk"]) == (1, 3)


def test_a_convmixer_is_a_pure_function_of_its_weights() -> None:
    problem = mixer(torch.float64)
    assert problem.flat is not None
    inputs = images(torch.float64).train.arrays[0][:4]
    first = problem.flat.pure(inputs)
    assert torch.equal(problem.flat.pure(inputs), first)
    torch.testing.assert_close(problem.flat(problem.x0, inputs[:2]), first[:2])  # samples do not affect each other
    assert (first - first[:1]).abs().max() > 1e-2


@pytest.mark.parametrize(("shape", "layers"), [(SMALL, "dense"), (LARGE, "convolutional")])
def test_small_maps_need_no_convolution_so_that_clients_advance_together(shape: Any, layers: str) -> None:
    """Up to 64 patches, e.g. 32x32 images in patches of 4."""
    problem = fs.erm(model("convmixer", shape, 3, width=12, depth=1), prior=False)
    assert problem.flat is not None and problem.flat.layers() == layers
    data = fs.FederatedData.from_arrays([(np.zeros((2, *shape)), np.arange(2))] * 3, classes=3)
    assert (choose_chunk("auto", problem, data, 2, CPU) == 1) == (layers == "convolutional")


@pytest.mark.slow
def test_a_convmixer_with_running_statistics_needs_a_batchnorm_rule() -> None:
    module = model("convmixer", (2, 8, 8), 3, width=8, depth=1, norm="batch")
    with pytest.raises(fs.InputError, match="keeps running statistics"):
        fs.erm(module, prior=False)
    for rule in ("batch", "group"):
        run = fs.train(
            fs.erm(module, batchnorm=rule, prior=False),  # type: ignore[arg-type]
            images(torch.float32),
            fs.FedAvg(lr=0.1, steps=2),
            rounds=1,
            batch_size=4,
        )
        assert np.isfinite(run.summary["loss"])


# --- LSTM ------------------------------------------------------------------------------------------------------------


TOKENS, LENGTH = 11, 6


def text(sizes: tuple[int, ...] = (7, 12, 5, 9)) -> fs.FederatedData:
    """Sequences of character numbers, uint8 as files have them; the next one is the target."""
    generator = np.random.default_rng(3)
    pairs = []
    for k, n in enumerate(sizes):
        starts = generator.integers(TOKENS, size=(n, 1))
        sequences = (starts + (k + 1) * np.arange(LENGTH + 1)) % TOKENS
        pairs.append((sequences[:, :-1].astype(np.uint8), sequences[:, -1]))
    return fs.FederatedData.from_arrays(pairs, classes=TOKENS)


@cache
def lstm(dtype: torch.dtype = torch.float32) -> fs.Problem:
    return fs.erm(model("lstm", (LENGTH,), TOKENS, hidden=5, layers=2, embedding=3).to(dtype), prior=False)


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_lstm_has_the_weights_of_its_formula(layers: int) -> None:
    """An embedding, four gates in each layer with two biases each, and the outputs."""
    hidden, embedding = 5, 3
    module = model("lstm", (LENGTH,), TOKENS, hidden=hidden, layers=layers, embedding=embedding)
    first = 4 * hidden * (embedding + hidden + 2)
    others = 4 * hidden * (hidden + hidden + 2)
    assert parameters(module) == TOKENS * embedding + first + (layers - 1) * others + hidden * TOKENS + TOKENS
    for kind in (torch.uint8, torch.int64):
        assert module(torch.ones(4, LENGTH).to(kind)).shape == (4, TOKENS)


def test_lstm_for_shakespeare_has_the_size_that_leaf_has() -> None:
    expected = 80 * 8 + 1024 * (8 + 256 + 2) + 1024 * (256 + 256 + 2) + 256 * 80 + 80
    assert parameters(model("lstm", (80,), 80)) == expected


def test_lstm_reads_the_whole_sequence_in_order() -> None:
    module = model("lstm", (LENGTH,), TOKENS, hidden=5, embedding=3)
    tokens = torch.arange(LENGTH).unsqueeze(0)
    plain = module(tokens)
    for place in range(LENGTH):
        other = tokens.clone()
        other[0, place] = TOKENS - 1
        assert not torch.allclose(module(other), plain, atol=1e-7), place
    assert not torch.allclose(module(tokens.flip(1)), plain, atol=1e-7)


@pytest.mark.parametrize(
    ("shape", "options", "message"),
    [
        ((1, 28, 28), {}, "The model lstm needs inputs of shape [length]. Got (1, 28, 28)."),
        ((6,), {"hidden": 0}, "The hidden of the lstm model must be a whole number of at least 1. Got 0."),
        ((6,), {"layers": 0}, "The layers of the lstm model must be a whole number of at least 1. Got 0."),
        ((6,), {"hidden": [64]}, "The hidden of the lstm model must be a whole number of at least 1. Got [64]."),
        ((6,), {"width": 4}, "option of the lstm model"),
    ],
)
def test_a_bad_lstm_is_refused(shape: tuple[int, ...], options: dict[str, Any], message: str) -> None:
    with pytest.raises(fs.InputError) as refused:
        model("lstm", shape, 4, **options)
    assert message in str(refused.value)


class Note(Callback):
    note = ""

    def on_start(self, title: str, done: int, rounds: int, note: str) -> None:
        self.note = note


@pytest.mark.slow
@pytest.mark.parametrize("sampling", ["uniform", "epochs"])
@pytest.mark.parametrize(
    "algorithm", [fs.FedAvg(lr=0.5, steps=3), fs.FedLALR(lr=0.01, steps=fs.Epochs(1)), fs.Scaffold(lr=0.5, steps=2)]
)
def test_lstms_run_one_at_a_time_whatever_the_chunk(algorithm: fs.Algorithm, sampling: str) -> None:
    """The same bits, no warning, and the run says so."""
    runs = []
    for chunk in (1, 4, "auto"):
        note = Note()
        options: dict[str, Any] = {"rounds": 3, "batch_size": 4, "sampling": sampling, "eval_every": 1}
        runs.append(fs.train(lstm(), text(), algorithm, chunk=chunk, callbacks=[note], **options))
        assert runs[-1].summary["chunk"] == 1
        assert f"4 of 4 clients per round, 1 at a time (chunk = {chunk})" in note.note
    for other in runs[1:]:
        assert torch.equal(other.x, runs[0].x)
        assert [r["loss"] for r in other.history] == [r["loss"] for r in runs[0].history]
    assert runs[0].history[-1]["loss"] < runs[0].history[0]["loss"]


def test_only_recurrent_layers_overrule_the_chunk() -> None:
    for chunk in (1, 3, 50, "auto"):
        assert choose_chunk(chunk, lstm(), text(), 4, CPU) == 1
    dense, _ = smooth_example()
    assert choose_chunk(3, dense, sized_data([5, 6]), 4, CPU) == 3
    assert choose_chunk(3, mixer(torch.float32), images(torch.float32), 4, CPU) == 3


@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
def test_oracles_take_recurrent_clients_one_by_one(kind: type[nn.RNNBase]) -> None:
    """Several clients in one call give the same bits as one call for each."""

    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inside, self.out = kind(1, 4, batch_first=True), nn.Linear(4, TOKENS)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.out(self.inside(tokens.unsqueeze(-1).to(self.out.weight.dtype))[0][:, -1])

    torch.manual_seed(0)
    problem = fs.erm(Reader(), prior=False)
    setting = make_setting(problem, text(), batch_size=4, oracles=Oracles(problem))
    x = torch.randn(3, len(problem.x0))
    together = make_client(setting, [1, 3, 0])
    gradients = together.grads(x, together.draw())
    for row, k in enumerate((1, 3, 0)):
        alone = make_client(setting, [k])
        assert torch.equal(gradients[row : row + 1], alone.grads(x[row : row + 1], alone.draw()))
    assert gradients.abs().amax(1).min() > 1e-4


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_lstm_on_one_client_is_a_bare_loop_of_torch(dtype: torch.dtype) -> None:
    """Full batches and SGD, with torch's own module, optimiser and loss."""
    data = text((13,))
    problem = lstm(dtype)
    assert problem.flat is not None
    module = problem.flat.to_module(problem.x0)
    optimiser = torch.optim.SGD(module.parameters(), lr=0.5, weight_decay=0.01)
    inputs, targets = data.train.of_client(0)
    losses = []
    for _ in range(12):
        optimiser.zero_grad()
        loss = nn.functional.cross_entropy(module(inputs), targets)
        losses.append(float(loss.detach()))
        loss.backward()
        optimiser.step()
    run = fs.train(problem, data, fs.FedAvg(lr=0.5, steps=4, weight_decay=0.01), rounds=3, eval_every=1)
    expected = problem.flat.to_vector(module.state_dict())
    tolerance = 1e-5 if dtype == torch.float32 else 1e-12
    torch.testing.assert_close(run.x, expected, atol=tolerance, rtol=tolerance)
    assert [row["loss"] for row in run.history[:-1]] == pytest.approx(losses[::4], rel=1e-5)
    assert (run.x - problem.x0).abs().max() > 1e-2


def test_both_models_are_in_the_list() -> None:
    assert {"convmixer", "lstm"} <= set(MODELS)
