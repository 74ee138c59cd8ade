"""Samplings: a batch depends only on its names, and each sampling has the promised distribution."""

from __future__ import annotations

from itertools import chain

import numpy as np
import pytest
import torch

import fedstrata as fs
from fedstrata.clients.client import Client
from fedstrata.data.sampling import (
    SAMPLINGS,
    Balanced,
    Everything,
    Sampling,
    ShuffledEpochs,
    Stratified,
    Uniform,
    steps_per_epoch,
)
from support import make_client, make_setting, play, sized_data, softmax_problem

NAMES = (0, "batch", 0, 0, 0, 0)
CLIENTS = np.array([4, 0, 7, 2])
SIZES = np.array([23, 12, 12, 5])


def draw(kind: type[Sampling], batch_size: int, steps: int, places: list[int] | None = None) -> list[list[list[int]]]:
    """Return the positions of each step and client; ``places`` picks clients out of the four."""
    chosen = np.arange(4) if places is None else np.array(places)
    sampler = kind(NAMES, CLIENTS[chosen], SIZES[chosen], batch_size)
    out = []
    for step in range(steps):
        positions, lengths = sampler.positions(step, len(chosen))
        counts = np.full(len(chosen), positions.shape[1]) if lengths is None else lengths
        out.append([row[:n].tolist() for row, n in zip(positions, counts, strict=True)])
    return out


@pytest.mark.parametrize("kind", [*SAMPLINGS.values(), Everything], ids=lambda k: k.__name__)
def test_a_batch_does_not_depend_on_the_chunk(kind: type[Sampling]) -> None:
    together = draw(kind, 5, 40)
    for place in range(4):
        alone = draw(kind, 5, 40, [place])
        assert [step[place] for step in together] == [step[0] for step in alone]
    turned = draw(kind, 5, 40, [3, 1, 0, 2])
    assert [step[3] for step in together] == [step[0] for step in turned]


@pytest.mark.parametrize("kind", SAMPLINGS.values(), ids=lambda k: k.__name__)
def test_a_batch_does_not_depend_on_what_was_drawn_before(kind: type[Sampling]) -> None:
    in_order = draw(kind, 5, 40)
    for step in (39, 17, 16, 15, 3, 20, 0):
        positions, lengths = kind(NAMES, CLIENTS, SIZES, 5).positions(step, 4)
        fresh = [row[: (len(row) if lengths is None else lengths[c])].tolist() for c, row in enumerate(positions)]
        assert fresh == in_order[step]
    backwards = kind(NAMES, CLIENTS, SIZES, 5)
    for step in reversed(range(40)):
        positions, lengths = backwards.positions(step, 4)
        again = [row[: (len(row) if lengths is None else lengths[c])].tolist() for c, row in enumerate(positions)]
        assert again == in_order[step]


@pytest.mark.parametrize("kind", SAMPLINGS.values(), ids=lambda k: k.__name__)
def test_a_batch_does_not_depend_on_clients_that_finished(kind: type[Sampling]) -> None:
    in_order = draw(kind, 5, 30)
    sampler = kind(NAMES, CLIENTS, SIZES, 5)
    for step, active in [(0, 4), (1, 4), (2, 3), (18, 3), (19, 1), (20, 1), (20, 4), (29, 2)]:
        positions, lengths = sampler.positions(step, active)
        rows = [row[: (len(row) if lengths is None else lengths[c])].tolist() for c, row in enumerate(positions)]
        assert rows == in_order[step][:active]


@pytest.mark.parametrize("kind", SAMPLINGS.values(), ids=lambda k: k.__name__)
@pytest.mark.parametrize("first", [0, 3])
def test_steps_drawn_together_are_those_drawn_one_by_one(kind: type[Sampling], first: int) -> None:
    sampler, alone = kind(NAMES, CLIENTS, SIZES, 5), kind(NAMES, CLIENTS, SIZES, 5)
    for steps in (range(first, 20), range(20, 22), range(1, 2)):
        together = sampler.draw(steps, 3, torch.device("cpu"))
        assert together.positions.shape == (len(steps), 3, 5)
        assert (together.positions < torch.from_numpy(SIZES[:3, None])).all()
        for i, step in enumerate(steps):
            positions, lengths = alone.positions(step, 3)
            width = positions.shape[1] if lengths is None else lengths
            if together.lengths is not None:
                assert (together.lengths[i] == width).all()
            for client, length in enumerate(np.broadcast_to(width, 3)):
                assert (together.positions[i, client, :length].numpy() == positions[client, :length]).all()


@pytest.mark.parametrize("kind", SAMPLINGS.values(), ids=lambda k: k.__name__)
def test_batches_differ_between_steps_clients_and_names(kind: type[Sampling]) -> None:
    steps = draw(kind, 4, 3)
    assert steps[0][0] != steps[1][0]
    assert steps[0][1] != steps[0][2]  # two clients of the same size
    other = kind((0, "batch", 1, 0, 0, 0), CLIENTS, SIZES, 4).positions(0, 4)[0]
    assert other[0].tolist() != steps[0][0]


@pytest.mark.slow
def test_uniform_draws_every_sample_equally_often() -> None:
    counts = np.bincount(np.concatenate([row[1] for row in draw(Uniform, 8, 3000)]), minlength=12)
    assert np.abs(counts / 24_000 - 1 / 12).max() < 4 * (1 / 12 / 24_000) ** 0.5
    assert any(len(set(row[1])) < 8 for row in draw(Uniform, 8, 20)), "drawn with replacement"


@pytest.mark.parametrize("batch_size", [1, 4, 5, 12, 50])
def test_an_epoch_draws_every_sample_once_in_a_new_order(batch_size: int) -> None:
    for place, size in enumerate(SIZES):
        per_epoch = -(-size // batch_size)
        rows = [step[0] for step in draw(ShuffledEpochs, batch_size, 3 * per_epoch, [place])]
        epochs = [rows[e * per_epoch : (e + 1) * per_epoch] for e in range(3)]
        for epoch in epochs:
            assert sorted(chain(*epoch)) == list(range(size))
            assert [len(batch) for batch in epoch[:-1]] == [batch_size] * (per_epoch - 1)
            assert len(epoch[-1]) == size - (per_epoch - 1) * batch_size
        if size > 5:  # the orders of few samples may repeat
            assert len({tuple(chain(*epoch)) for epoch in epochs}) == 3


@pytest.mark.parametrize("batch_size", [1, 3, 8, 20, 40])
@pytest.mark.parametrize("sizes", [[5, 15], [2, 8, 10]], ids=str)
def test_stratified_batches_hold_the_classes_in_proportion(sizes: list[int], batch_size: int) -> None:
    labels = np.repeat(np.arange(len(sizes)), sizes)  # the client's rows are in class order
    sampler = Stratified(NAMES, np.array([0]), np.array([20]), batch_size)
    for step in range(100):
        counts = np.bincount(labels[sampler.positions(step, 1)[0][0]], minlength=len(sizes))
        assert counts.sum() == batch_size
        ends = np.array([1, *[2] * (len(sizes) - 2), 1])  # a class in the middle may be off at both ends
        assert (np.abs(counts - batch_size * np.array(sizes) / 20) < ends).all()


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [3, 7])
def test_stratified_sampling_is_unbiased(batch_size: int) -> None:
    size, steps = 11, 6000
    sampler = Stratified(NAMES, np.array([5]), np.array([size]), batch_size)
    drawn = np.concatenate([sampler.positions(step, 1)[0][0] for step in range(steps)])
    share = np.bincount(drawn, minlength=size) / drawn.size
    assert np.abs(share - 1 / size).max() < 4 * (1 / size / drawn.size) ** 0.5


COUNTS = np.array([[7, 3, 0, 13], [1, 1, 1, 9], [0, 12, 0, 0], [0, 2, 3, 0]])  # of four classes, as in SIZES
LABELS = [np.repeat(np.arange(4), counts) for counts in COUNTS]


def balanced(batch_size: int, places: list[int] | None = None) -> Balanced:
    chosen = np.arange(4) if places is None else np.array(places)
    return Balanced(NAMES, CLIENTS[chosen], SIZES[chosen], batch_size, COUNTS[chosen])


@pytest.mark.parametrize("batch_size", [4, 5, 7, 8, 30])
def test_balanced_batches_hold_every_class_equally_often(batch_size: int) -> None:
    sampler = balanced(batch_size)
    for step in range(50):
        positions, lengths = sampler.positions(step, 4)
        assert positions.shape == (4, batch_size)
        assert lengths is None
        for counts, labels, row in zip(COUNTS, LABELS, positions, strict=True):
            slots = np.bincount(labels[row], minlength=4)
            assert (slots[counts == 0] == 0).all()
            assert np.ptp(slots[counts > 0]) <= 1
            assert slots[counts > 0].min() >= 1


@pytest.mark.parametrize("batch_size", [4, 5, 7, 8, 30])
def test_the_weights_of_balanced_batches_make_means_unbiased(batch_size: int) -> None:
    sampler = balanced(batch_size)
    assert sampler.weights is not None
    for place, labels in enumerate(LABELS):
        losses = np.random.default_rng(place).normal(size=len(labels))
        slot_classes = {tuple(labels[sampler.positions(step, 4)[0][place]]) for step in range(40)}
        assert len(slot_classes) == 1, "the class of each sample is fixed"
        expected = [losses[labels == c].mean() for c in slot_classes.pop()]  # each is drawn uniformly from its class
        weights = sampler.weights[place]
        assert (weights * expected).mean() == pytest.approx(losses.mean(), rel=1e-12)
        assert weights.mean() == pytest.approx(1.0, rel=1e-12)


@pytest.mark.slow
def test_balanced_batches_draw_every_row_of_a_class_equally_often() -> None:
    sampler, steps = balanced(7), 6000
    drawn = np.concatenate([sampler.positions(step, 4)[0][0] for step in range(steps)])
    counts, labels = np.bincount(drawn, minlength=SIZES[0]), LABELS[0]
    for c in np.unique(labels):
        share = counts[labels == c] / counts[labels == c].sum()
        size = (labels == c).sum()
        assert np.abs(share - 1 / size).max() < 4 * (1 / size / counts[labels == c].sum()) ** 0.5
    assert any(len(set(sampler.positions(step, 4)[0][3])) < 5 for step in range(5)), "drawn with replacement"


def test_balanced_batches_of_one_class_are_uniform() -> None:
    for sampler in (balanced(6, [2]), Balanced(NAMES, CLIENTS[[2]], SIZES[[2]], 6)):
        uniform = Uniform(NAMES, CLIENTS[[2]], SIZES[[2]], 6)
        assert sampler.weights is not None
        assert (sampler.weights == 1).all()
        assert all((sampler.positions(t, 1)[0] == uniform.positions(t, 1)[0]).all() for t in range(20))
    assert Uniform(NAMES, CLIENTS, SIZES, 6).weights is None


def test_balanced_batches_depend_neither_on_the_chunk_nor_on_clients_that_finished() -> None:
    together, turned = balanced(6), balanced(6, [3, 1, 0, 2])
    for step in (0, 1, 17, 40, 16):
        positions = together.positions(step, 4)[0]
        assert (turned.positions(step, 4)[0] == positions[[3, 1, 0, 2]]).all()
        assert (balanced(6).positions(step, 2)[0] == positions[:2]).all()
        for place in range(4):
            alone = balanced(6, [place])
            assert (alone.positions(step, 1)[0][0] == positions[place]).all()
            assert (alone.weights == together.weights[[place]]).all()  # type: ignore[index]


def test_a_smaller_balanced_batch_is_the_beginning_of_a_larger_one() -> None:
    assert (balanced(11).positions(3, 4)[0][:, :5] == balanced(5).positions(3, 4)[0]).all()


def test_a_balanced_batch_must_hold_every_class() -> None:
    with pytest.raises(
        fs.InputError,
        match=r"The batch_size must be at least 4, the number of classes of client 0\. Got 3\. \(sampling 'bal",
    ):
        balanced(3)
    assert balanced(3, [0, 2, 3]).positions(0, 3)[0].shape == (3, 3)


def test_everything_draws_all_rows_in_order() -> None:
    assert draw(Everything, 0, 2)[1] == [list(range(n)) for n in SIZES]


@pytest.mark.parametrize(("batch_size", "expected"), [(None, [1, 1, 1]), (4, [1, 1, 3]), (1, [1, 4, 9])])
def test_steps_per_epoch(batch_size: int | None, expected: list[int]) -> None:
    assert steps_per_epoch(np.array([1, 4, 9]), batch_size).tolist() == expected


def test_an_unknown_sampling_is_refused() -> None:
    with pytest.raises(fs.InputError, match=r"Unknown sampling 'stratifed'\. Did you mean 'stratified'"):
        SAMPLINGS.find("stratifed")


# --- batches as clients draw them ------------------------------------------------------------------------------------


def test_ragged_batches_hold_each_clients_own_samples() -> None:
    data = sized_data([9, 6, 6, 2], classes=3)
    setting = make_setting(softmax_problem(classes=3), data, batch_size=None)
    batch = make_client(setting, [0, 1, 2, 3]).draw()
    assert batch.clients == 4
    assert batch.where is not None
    assert [w.tolist() for w in batch.where] == [[3], [1, 2], [0]]
    assert [tuple(part[0].shape) for part in batch.parts] == [(1, 2, 3), (2, 6, 3), (1, 9, 3)]
    assert not batch.traced
    for where, (inputs, targets) in zip(batch.where, batch.parts, strict=True):
        for row, client in enumerate(where.tolist()):
            own_inputs, own_targets = setting.data.train.of_client(client)
            assert torch.equal(inputs[row], own_inputs)
            assert torch.equal(targets[row], own_targets)


def test_a_batch_of_equal_sizes_is_one_tensor() -> None:
    setting = make_setting(softmax_problem(), sized_data([9, 6, 6]), batch_size=4)
    batch = make_client(setting, [0, 2]).draw()
    assert batch.where is None
    assert [tuple(a.shape) for a in batch.parts[0]] == [(2, 4, 3), (2, 4)]
    assert batch.parts[0][1].dtype == torch.int64
    own = setting.data.train.of_client(2)[0]
    assert all((row == own).all(1).any() for row in batch.parts[0][0][1])


def test_draws_are_named_by_level_stream_round_and_exchange() -> None:
    setting = make_setting(softmax_problem(), sized_data([50, 40]), batch_size=8)
    client = make_client(setting, [0, 1])

    def inputs(batch: object) -> torch.Tensor:
        return batch.parts[0][0]  # type: ignore[attr-defined]

    first = inputs(client.draw())
    assert torch.equal(inputs(client.draw()), first)
    assert torch.equal(inputs(make_client(setting, [1]).draw())[0], first[1])
    others = [
        client.draw(stream=1),
        client.draw(level=1),
        make_client(setting, [0, 1], round=1).draw(),
        make_client(setting, [0, 1], exchange=1).draw(),
    ]
    assert len({tuple(inputs(b).ravel().tolist()) for b in others} | {tuple(first.ravel().tolist())}) == 5
    assert inputs(client.draw(batch_size=3)).shape == (2, 3, 3)


def test_levels_draw_from_the_support_set_and_the_outer_function_from_the_rest() -> None:
    inputs = torch.arange(40.0)[:, None]
    whole = fs.Dataset("numbers", inputs, torch.zeros(40), inputs[:1], torch.zeros(1), classes=0)
    data = whole.split(fs.partition.iid(), clients=2, support=0.5)
    x0 = torch.zeros(1)
    problem = fs.Problem(lambda u, batch: u.sum(), x0, levels=(lambda u, batch: u,))
    client = make_client(make_setting(problem, data), [0, 1])
    outer, inner = (set(client.draw(level).parts[0][0].ravel().tolist()) for level in (0, 1))
    assert len(outer) == len(inner) == 20
    assert outer.isdisjoint(inner)


# --- weights in batches ----------------------------------------------------------------------------------------------


def uneven(dtype: torch.dtype = torch.float64) -> fs.FederatedData:
    """Four clients with rows of three classes, of two, of one, and with one row of each."""
    generator = np.random.default_rng(0)
    labels = [np.repeat([0, 1, 2], [2, 9, 4]), np.repeat([0, 2], [11, 1]), np.full(6, 1), np.arange(3)]
    pairs = [(torch.from_numpy(generator.normal(size=(len(t), 3))).to(dtype), generator.permutation(t)) for t in labels]
    return fs.FederatedData.from_arrays(pairs, classes=3)


def test_clients_know_their_class_counts() -> None:
    part = uneven().train
    assert part.class_counts.tolist() == [[2, 9, 4], [11, 0, 1], [0, 6, 0], [1, 1, 1]]
    assert part.class_counts is part.class_counts
    regression = fs.FederatedData.from_arrays([(np.ones((3, 1)), np.arange(3) / 2)])
    with pytest.raises(fs.InputError, match=r"targets must be class numbers, one per row\. Got 'torch\.float64 of"):
        _ = regression.train.class_counts


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_weights_are_the_last_array_of_a_balanced_batch(dtype: torch.dtype) -> None:
    setting = make_setting(softmax_problem(classes=3, dtype=dtype), uneven(dtype), batch_size=5, sampling="balanced")
    client = make_client(setting, [0, 1, 2, 3])
    for size in (5, 8):
        batch = client.draw(batch_size=size)
        inputs, targets, weights = batch.parts[0]
        assert batch.traced and batch.where is None
        assert [tuple(a.shape) for a in (inputs, targets, weights)] == [(4, size, 3), (4, size), (4, size)]
        assert weights.dtype == dtype
        counts = setting.data.train.class_counts
        for k in range(4):
            for c, weight in zip(targets[k].tolist(), weights[k].tolist(), strict=True):
                share = float((targets[k] == c).double().mean())
                assert weight == pytest.approx(counts[k, c] / counts[k].sum() / share, rel=1e-6)
        assert all(
            torch.equal(a, b) for a, b in zip(client.draw(batch_size=size).parts[0], batch.parts[0], strict=True)
        )
        alone = make_client(setting, [1]).draw(batch_size=size).parts[0]
        assert all(torch.equal(a[0], b[1]) for a, b in zip(alone, batch.parts[0], strict=True))
    assert {len(part) for part in client.all_data().parts} == {2}
    everything = make_setting(softmax_problem(classes=3, dtype=dtype), uneven(dtype), sampling="balanced")
    assert {len(part) for part in make_client(everything, [0, 1]).draw().parts} == {2}
    for other in ("uniform", "epochs", "stratified"):
        plain = make_setting(softmax_problem(classes=3, dtype=dtype), uneven(dtype), batch_size=5, sampling=other)
        assert {len(part) for part in make_client(plain, [0, 1]).draw().parts} == {2}


def test_levels_have_the_weights_of_the_data_that_they_draw_from() -> None:
    generator = np.random.default_rng(1)
    targets = np.repeat([0, 1], [30, 10])
    whole = fs.Dataset.from_arrays(generator.normal(size=(40, 3)), targets)
    data = whole.split("iid", clients=2, support=0.3)
    assert data.support is not None
    assert (data.train.class_counts != data.support.class_counts).any(1).all()
    setting = make_setting(fs.maml(softmax_problem().flat.module), data, batch_size=6, sampling="balanced")  # type: ignore[union-attr]
    client = make_client(setting, [0, 1])
    for level, part in ((0, data.train), (1, data.support)):
        _, labels, weights = client.draw(level).parts[0]
        shares = part.class_counts / part.class_counts.sum(1, keepdims=True)
        expected = 2 * np.take_along_axis(shares, labels.numpy(), axis=1)
        np.testing.assert_allclose(weights.numpy(), expected, rtol=1e-12)


def test_weights_come_before_the_clients_number_and_every_problem_uses_them() -> None:
    data, plain = uneven(), softmax_problem(classes=3)
    assert plain.flat is not None
    module = plain.flat.module
    x = plain.x0.expand(4, -1)

    def mean_loss(u: torch.Tensor, batch: tuple[torch.Tensor, ...], k: int) -> torch.Tensor:
        losses = torch.nn.functional.cross_entropy(plain.flat(u, batch[0][k]), batch[1][k], reduction="none")  # type: ignore[misc]
        return (losses * batch[2][k]).mean()

    def client_of(problem: fs.Problem) -> Client:
        assert problem.takes_weights
        return make_client(make_setting(problem, data, batch_size=4, sampling="balanced"), [0, 1, 2, 3])

    client = client_of(plain)
    batch = client.draw()
    expected = torch.stack([mean_loss(x[k], batch.parts[0], k) for k in range(4)])
    torch.testing.assert_close(client.loss(x, batch), expected, atol=1e-12, rtol=0)
    assert (
        plain.losses(plain.predict(x[0], batch.parts[0][0][0]), batch.parts[0][1][0]).mean() - expected[0]
    ).abs() > 0.01  # type: ignore[misc]

    client = client_of(fs.agnostic(module, 4))
    batch = client.draw()
    assert torch.equal(batch.parts[0][3], torch.arange(4))
    y = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
    torch.testing.assert_close(client.loss(x, batch, y.expand(4, -1)), 4 * y * expected, atol=1e-12, rtol=0)

    client = client_of(fs.robust(module))
    batch = client.draw(1)
    expected = torch.stack([mean_loss(x[k], batch.parts[0], k) for k in range(4)])
    torch.testing.assert_close(client.g(1, x, batch).squeeze(1), expected, atol=1e-12, rtol=0)
    assert client.draw().parts == ((),)

    for problem in (fs.maml(module, 0.1), fs.damaml(module, 0.1)):
        client = client_of(problem)
        batch = client.draw(1)
        grads = [torch.func.grad(mean_loss)(x[k], batch.parts[0], k) for k in range(4)]
        torch.testing.assert_close(client.g(1, x, batch), x - 0.1 * torch.stack(grads), atol=1e-12, rtol=0)


@pytest.mark.slow
def test_balanced_rounds_do_not_depend_on_the_chunk() -> None:
    for problem, algorithm in (
        (softmax_problem(classes=3), fs.FedAvg(lr=0.3, steps=fs.Epochs(2))),
        (fs.agnostic(softmax_problem(classes=3).flat.module, 4), fs.AFL(lr=0.3)),  # type: ignore[union-attr]
    ):
        options = {"batch_size": 4, "sampling": "balanced"}
        states = [play(algorithm, problem, uneven(), 3, chunk=chunk, **options)[0] for chunk in (1, 3, 4)]
        for other in states[1:]:
            torch.testing.assert_close(other.x, states[0].x, atol=1e-12, rtol=0)
