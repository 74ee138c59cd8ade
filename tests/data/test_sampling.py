"""A batch is a function of names: each sampling keeps its promise, whatever the chunk and the way of drawing."""

from __future__ import annotations

from itertools import chain

import numpy as np
import pytest
import torch

import fedstrata as fs
from fedstrata.data import sampling as sampling_module
from fedstrata.data.sampling import (
    SAMPLINGS,
    Everything,
    Sampling,
    ShuffledEpochs,
    Stratified,
    Uniform,
    steps_per_epoch,
)
from support import make_client, make_setting, sized_data, softmax_problem

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


@pytest.mark.parametrize("kind", [Uniform, Stratified], ids=lambda k: k.__name__)
@pytest.mark.parametrize("limit", [1, 60, 1 << 18])
def test_a_batch_does_not_depend_on_how_many_are_drawn_ahead(
    kind: type[Sampling], limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = draw(kind, 5, 20)
    monkeypatch.setattr(sampling_module, "_AHEAD", 3)
    monkeypatch.setattr(sampling_module, "_AHEAD_POSITIONS", limit)
    assert draw(kind, 5, 20) == expected


@pytest.mark.parametrize("kind", SAMPLINGS.values(), ids=lambda k: k.__name__)
def test_steps_clients_and_names_have_batches_of_their_own(kind: type[Sampling]) -> None:
    steps = draw(kind, 4, 3)
    assert steps[0][0] != steps[1][0]
    assert steps[0][1] != steps[0][2]  # two clients of the same size
    other = kind((0, "batch", 1, 0, 0, 0), CLIENTS, SIZES, 4).positions(0, 4)[0]
    assert other[0].tolist() != steps[0][0]


def test_uniform_draws_every_sample_equally_often() -> None:
    counts = np.bincount(np.concatenate([row[1] for row in draw(Uniform, 8, 3000)]), minlength=12)
    assert np.abs(counts / 24_000 - 1 / 12).max() < 4 * (1 / 12 / 24_000) ** 0.5
    assert any(len(set(row[1])) < 8 for row in draw(Uniform, 8, 20)), "drawn with replacement"


@pytest.mark.parametrize("batch_size", [1, 4, 5, 12, 50])
def test_an_epoch_meets_every_sample_once_in_a_new_order(batch_size: int) -> None:
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
    labels = np.repeat(np.arange(len(sizes)), sizes)  # the client's rows stand in class order
    sampler = Stratified(NAMES, np.array([0]), np.array([20]), batch_size)
    for step in range(100):
        counts = np.bincount(labels[sampler.positions(step, 1)[0][0]], minlength=len(sizes))
        assert counts.sum() == batch_size
        ends = np.array([1, *[2] * (len(sizes) - 2), 1])  # a class in between has two ends to be off at
        assert (np.abs(counts - batch_size * np.array(sizes) / 20) < ends).all()


@pytest.mark.parametrize("batch_size", [3, 7])
def test_stratified_sampling_is_unbiased(batch_size: int) -> None:
    size, steps = 11, 6000
    sampler = Stratified(NAMES, np.array([5]), np.array([size]), batch_size)
    drawn = np.concatenate([sampler.positions(step, 1)[0][0] for step in range(steps)])
    share = np.bincount(drawn, minlength=size) / drawn.size
    assert np.abs(share - 1 / size).max() < 4 * (1 / size / drawn.size) ** 0.5


def test_everything_is_everything_in_order() -> None:
    assert draw(Everything, 0, 2)[1] == [list(range(n)) for n in SIZES]


@pytest.mark.parametrize(("batch_size", "expected"), [(None, [1, 1, 1]), (4, [1, 1, 3]), (1, [1, 4, 9])])
def test_steps_per_epoch(batch_size: int | None, expected: list[int]) -> None:
    assert steps_per_epoch(np.array([1, 4, 9]), batch_size).tolist() == expected


def test_an_unknown_sampling_is_refused() -> None:
    with pytest.raises(fs.InputError, match=r"Unknown sampling 'stratifed'\. Did you mean 'stratified'"):
        sampling_module.sampling("stratifed")


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
