"""The client side, and the three verbs: steps, what is kept, who takes part, and what comes back."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import fedstrata as fs
from fedstrata.clients.chunk import CPU_BUDGET, choose_chunk
from fedstrata.clients.client import Client, Setting
from fedstrata.clients.clients import cohort_size
from fedstrata.core.schedules import Clock
from fedstrata.data.batch import NO_DATA
from fedstrata.problems.oracles import Oracles
from support import make_client, make_clients, make_setting, mixture_of, sized_data, softmax_problem

SIZES = [9, 4, 7, 2, 4]
DECREASING = [0, 2, 1, 4, 3]  # clients in order of decreasing size, as a chunk has them


def setting(batch_size: int | None = 2, **options: Any) -> Setting:
    return make_setting(softmax_problem(), sized_data(SIZES), batch_size=batch_size, **options)


def column(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)[:, None]


def ids_of(client: Client) -> torch.Tensor:
    return torch.from_numpy(client.ids[: len(client)]).double()[:, None]


# --- repeat ----------------------------------------------------------------------------------------------------------


def test_each_client_takes_its_own_number_of_steps() -> None:
    client = make_client(setting(), DECREASING)
    assert client.step_counts(fs.Epochs(1)).tolist() == [5, 4, 2, 2, 1]
    widths = []

    def step(client: Client, count: torch.Tensor) -> torch.Tensor:
        widths.append(len(client))
        assert len(count) == len(client) == len(client.sizes)
        return count + 1

    counts = client.repeat(fs.Epochs(1), step, column(0, 0, 0, 0, 0))
    assert counts.ravel().tolist() == [5, 4, 2, 2, 1]
    assert widths == [5, 4, 2, 2, 1]
    assert len(client) == 5
    assert client.steps == 5
    assert client.clock.step == 0


def test_what_is_not_returned_stays_and_follows_its_client() -> None:
    client = make_client(setting(), DECREASING)

    def step(client: Client, total: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
        assert torch.equal(own, 10 * ids_of(client))
        return total + own

    totals = client.repeat(fs.Epochs(1), step, column(0, 0, 0, 0, 0), 10 * ids_of(client))
    assert totals.ravel().tolist() == [0 * 5, 20 * 4, 10 * 2, 40 * 2, 30 * 1]


def test_several_values_and_nested_ones_are_returned() -> None:
    client = make_client(setting(), DECREASING)

    def step(
        client: Client, a: torch.Tensor, pair: tuple[torch.Tensor, torch.Tensor], c: torch.Tensor
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        return a + 1, (pair[0] + c, pair[1] - 1)

    zeros = column(0, 0, 0, 0, 0)
    a, (b, d) = client.repeat(fs.Epochs(1), step, zeros, (zeros, zeros), column(1, 2, 3, 4, 5))
    assert a.ravel().tolist() == [5, 4, 2, 2, 1]
    assert b.ravel().tolist() == [5, 8, 6, 8, 5]
    assert d.ravel().tolist() == [-5, -4, -2, -2, -1]


def test_arguments_that_are_numbers_pass_through_unequal_steps() -> None:
    client = make_client(setting(), DECREASING)

    def step(client: Client, total: torch.Tensor, size: float) -> torch.Tensor:
        return total + size

    totals = client.repeat(fs.Epochs(1), step, column(0, 0, 0, 0, 0), 0.5)
    assert totals.ravel().tolist() == [2.5, 2.0, 1.0, 1.0, 0.5]


def test_repeating_twice_goes_on_in_time() -> None:
    client = make_client(setting(), [0, 2])
    clocks: list[tuple[int, int]] = []

    def step(client: Client, x: torch.Tensor) -> torch.Tensor:
        clocks.append((client.clock.step, client.clock.iteration))
        return x

    client.repeat(2, step, column(0, 0))
    client.repeat(3, step, column(0, 0))
    assert clocks == [(0, 0), (1, 1), (0, 2), (1, 3), (2, 4)]
    assert client.steps == 5


@pytest.mark.parametrize("steps", [3, fs.Epochs(1)], ids=["steps", "epochs"])
def test_what_comes_after_unequal_steps_does_not_depend_on_the_chunk(steps: fs.Epochs | int) -> None:
    """A client's draws and rates are its own, however long the others of its chunk went on."""

    def work(client: Client) -> torch.Tensor:
        zero = 0 * ids_of(client)
        seen = client.repeat(steps, lambda client, x: x + client.rate(fs.CubeRoot(1.0, 2.0)), zero)
        after = [
            p.mean((1, 2))
            for p in (client.draw(batch_size=3).parts[0][0], client.draw(stream=1, batch_size=3).parts[0][0])
        ]
        again = client.repeat(
            steps, lambda client, x: x + client.draw(batch_size=3).parts[0][0].mean((1, 2))[:, None], zero
        )
        rate = torch.full((len(client),), client.rate(fs.CubeRoot(1.0, 2.0)), dtype=torch.float64)
        return torch.stack([seen[:, 0].double(), *after, again[:, 0].double(), rate], dim=1)

    answers = [make_clients(setting(), chunk=chunk).gather(work) for chunk in (1, 2, 5)]
    for other in answers[1:]:
        torch.testing.assert_close(other, answers[0], atol=1e-12, rtol=0)
    assert not torch.equal(answers[0][:, 1], answers[0][:, 2]), "streams are independent"


def test_clients_out_of_order_are_refused() -> None:
    client = make_client(setting(), [3, 0])
    with pytest.raises(fs.InputError, match="order of decreasing steps"):
        client.repeat(fs.Epochs(1), lambda client, x: x, column(0, 0))


@pytest.mark.parametrize(
    ("epochs", "batch_size", "size", "steps"),
    [
        (1, 4, 9, 3),
        (2, 4, 9, 6),
        (0.5, 4, 9, 2),
        (0.01, 4, 9, 1),
        (3, None, 9, 3),
        (0.5, None, 9, 1),
        (1.1, 1, 10, 11),
        (0.7, 1, 10, 7),
        (2.2, 1, 100, 220),
    ],
)
def test_epochs_in_steps(epochs: float, batch_size: int | None, size: int, steps: int) -> None:
    s = make_setting(softmax_problem(), sized_data([size]), batch_size=batch_size)
    assert make_client(s, [0]).step_counts(fs.Epochs(epochs)).tolist() == [steps]


def test_batches_inside_repeat_belong_to_their_clients_and_steps() -> None:
    s = setting(sampling="epochs")
    client = make_client(s, DECREASING)
    seen: dict[int, list[float]] = {k: [] for k in range(5)}

    def step(client: Client, x: torch.Tensor) -> torch.Tensor:
        batch = client.draw()
        groups = batch.where if batch.where is not None else (torch.arange(len(client)),)
        for where, part in zip(groups, batch.parts, strict=True):
            for row, place in enumerate(where.tolist()):
                seen[int(client.ids[place])] += part[0][row, :, 0].tolist()
        return x

    client.repeat(fs.Epochs(1), step, column(0, 0, 0, 0, 0))
    for k in range(5):
        assert sorted(seen[k]) == sorted(s.data.train.of_client(k)[0][:, 0].tolist())
    assert client.samples == sum(SIZES)


def test_samples_are_counted() -> None:
    client = make_client(setting(), DECREASING)
    client.draw()
    client.draw(stream=1)
    client.draw(batch_size=3)
    assert client.samples == 5 * 2 + 5 * 2 + 5 * 3
    client.all_data()
    client.all_data()
    assert client.samples == 35 + 2 * sum(SIZES)


# --- the verbs -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [1, 2, 5])
def test_the_mean_is_uniform_or_by_samples(chunk: int) -> None:
    clients = make_clients(setting(), chunk=chunk)
    assert clients.mean(ids_of).tolist() == [pytest.approx(2.0)]
    weights = np.array(SIZES) / sum(SIZES)
    weighted = pytest.approx(float(weights @ np.arange(5)))
    assert clients.mean(ids_of, weighting="samples").tolist() == [weighted]
    assert make_clients(setting(), chunk=chunk, weighting="samples").mean(ids_of).tolist() == [weighted]
    by_samples = make_clients(setting(), chunk=chunk, weighting="samples")
    assert by_samples.mean(ids_of, weighting="uniform").tolist() == [pytest.approx(2.0)]
    with pytest.raises(fs.InputError, match="weighting must be 'uniform' or 'samples'"):
        clients.mean(ids_of, weighting="size")  # type: ignore[arg-type]


def test_the_mean_of_whole_numbers_is_their_mean() -> None:
    clients = make_clients(setting(), chunk=2)
    assert float(clients.mean(lambda client: client.sizes)) == pytest.approx(np.mean(SIZES))


@pytest.mark.parametrize("chunk", [1, 2, 5])
def test_the_maximum_is_elementwise(chunk: int) -> None:
    clients = make_clients(setting(), chunk=chunk)
    answer = clients.max(lambda client: torch.cat([ids_of(client), -((ids_of(client) - 2) ** 2)], 1))
    assert answer.tolist() == [4.0, 0.0]


@pytest.mark.parametrize("chunk", [1, 2, 5])
@pytest.mark.parametrize("participation", [1.0, 3])
def test_gathered_answers_stand_in_cohort_order(chunk: int, participation: int | float) -> None:
    clients = make_clients(setting(), chunk=chunk, participation=participation)
    ids, (squares,) = clients.gather(lambda client: (ids_of(client), (ids_of(client) ** 2,)))
    assert ids.ravel().tolist() == clients.cohort.tolist()
    assert squares.ravel().tolist() == (clients.cohort**2).tolist()


def test_messages_are_seen_by_every_client_with_a_leading_axis() -> None:
    clients = make_clients(setting(), chunk=2)
    x, pair = torch.arange(3.0), (torch.ones(2), torch.tensor(5.0))

    def work(client: Client, x: torch.Tensor, pair: tuple[torch.Tensor, ...], rate: float) -> torch.Tensor:
        assert x.shape == (len(client), 3)
        assert [tuple(p.shape) for p in pair] == [(len(client), 2), (len(client),)]
        assert rate == 0.5
        return rate * x + pair[1][:, None]

    assert clients.mean(work, x, pair, 0.5).tolist() == [5.0, 5.5, 6.0]
    counts = clients.counts
    assert counts.bytes_down == 5 * (3 + 2 + 1) * 4
    assert counts.bytes_up == 5 * 3 * 4


@pytest.mark.parametrize(
    ("answer", "got"),
    [
        (torch.zeros(3), r"\(3,\)"),
        (torch.tensor(1.0), r"\(\)"),
        (1.5, "float"),
        ((torch.zeros(2, 1), torch.zeros(1, 2)), r"\(1, 2\)"),
        (None, "NoneType"),
    ],
    ids=["too long", "scalar", "number", "nested", "nothing"],
)
def test_an_answer_without_the_client_axis_is_an_error(answer: Any, got: str) -> None:
    clients = make_clients(setting(), participation=2, chunk=2)

    def work(client: Client) -> Any:
        return answer

    message = rf"work must return tensors with a leading client axis of 2\. Got {got}\."
    for verb in (clients.mean, clients.max, clients.gather):
        with pytest.raises(fs.FedstrataError, match=message):
            verb(work)


# --- who takes part --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("participation", "size"), [(1.0, 10), (0.5, 5), (0.25, 2), (0.01, 1), (10, 10), (1, 1), (7, 7), (0.96, 10)]
)
def test_the_size_of_the_cohort(participation: int | float, size: int) -> None:
    assert cohort_size(participation, 10) == size


@pytest.mark.parametrize("participation", [0, 11, -1, 0.0, 1.01, -0.5, float("nan"), "all", None, True])
def test_a_bad_participation_is_refused(participation: Any) -> None:
    with pytest.raises(
        fs.InputError, match=r"participation must be a share in \(0, 1\] or a whole number from 1 to 10"
    ):
        cohort_size(participation, 10)


def test_cohorts_change_by_round_and_depend_on_nothing_else() -> None:
    clients = make_clients(setting(), participation=2)
    cohorts = []
    for r in range(30):
        clients.begin(r)
        cohorts.append(tuple(clients.cohort.tolist()))
        assert len(clients) == 2
        assert clients.total == 5
        assert clients.share == pytest.approx(2 / 5)
    assert len(set(cohorts)) > 5
    assert set().union(*cohorts) == set(range(5))
    clients.begin(7)
    assert tuple(clients.cohort.tolist()) == cohorts[7]
    other = make_clients(setting(seed=1), participation=2)
    assert any(tuple(other.cohort.tolist()) != cohorts[r] for r in range(30) if other.begin(r) is None)


def test_the_share_of_a_weighted_cohort_is_that_of_its_samples() -> None:
    clients = make_clients(setting(), participation=2, weighting="samples")
    assert clients.share == pytest.approx(sum(SIZES[k] for k in clients.cohort) / sum(SIZES))


def test_choosing_another_cohort_leaves_the_first_alone() -> None:
    clients = make_clients(setting(), participation=2)
    before = clients.cohort.tolist()
    one, two = clients.choose(3), clients.choose(3)
    assert clients.cohort.tolist() == before
    assert [len(one), len(two), len(clients.choose())] == [3, 3, 2]
    picks = [tuple(clients.choose(2).cohort.tolist()) for _ in range(20)]
    assert len(set(picks)) > 3, "every choice of a round is a new one"
    clients.begin(0)
    again = clients.choose(3)
    assert again.cohort.tolist() == one.cohort.tolist()
    assert again.mean(ids_of).item() == pytest.approx(np.mean(one.cohort))


def test_exchanges_of_a_round_have_batches_of_their_own() -> None:
    clients = make_clients(make_setting(softmax_problem(), sized_data([50, 40]), batch_size=8), chunk=2)

    def inputs(client: Client) -> torch.Tensor:
        return client.draw().parts[0][0]

    first, second = clients.gather(inputs), clients.gather(inputs)
    assert not torch.equal(first, second)
    assert not torch.equal(clients.choose().gather(inputs), second)
    clients.begin(0)
    assert torch.equal(clients.gather(inputs), first)


@pytest.mark.parametrize("chunk", [1, 2, 9])
def test_a_client_drawn_twice_counts_twice(chunk: int) -> None:
    clients = make_clients(setting(), chunk=chunk)
    chosen = clients.choose(9, probabilities=np.array([0, 0.75, 0, 0.25, 0]))
    assert set(chosen.cohort.tolist()) == {1, 3}
    assert chosen.mean(ids_of).item() == pytest.approx(np.mean(chosen.cohort))
    assert chosen.gather(ids_of).ravel().tolist() == chosen.cohort.tolist()
    assert torch.equal(
        clients.choose(4, probabilities=torch.tensor([0, 0, 1.0, 0, 0])).gather(ids_of), column(2, 2, 2, 2)
    )


@pytest.mark.parametrize("chunk", [1, 2, 9])
def test_a_client_drawn_twice_keeps_one_row(chunk: int) -> None:
    s = setting()
    chosen = make_clients(s, chunk=chunk).choose(9, probabilities=np.array([0, 0.75, 0, 0.25, 0]))

    def work(client: Client) -> torch.Tensor:
        client.keep(row=ids_of(client))
        return client.recall("row", torch.zeros(len(client), 1, dtype=torch.float64))

    assert chosen.gather(work).ravel().tolist() == chosen.cohort.tolist()
    assert s.state.count() == 2


@pytest.mark.parametrize(
    ("number", "probabilities", "message"),
    [
        (0, None, "number of clients to choose must be at least 1"),
        (6, None, "number of clients to choose must be"),
        (2, [0.5, 0.5], "probabilities must be"),
        (2, [0.5, 0.5, -0.5, 0.5, 0.0], "probabilities must be"),
        (2, [0.0] * 5, "probabilities must be"),
        (2, [0.2, 0.2, float("nan"), 0.2, 0.2], "probabilities must be"),
    ],
    ids=["none", "more than there are", "too few", "negative", "all zero", "NaN"],
)
def test_a_bad_choice_is_refused(number: int, probabilities: list[float] | None, message: str) -> None:
    clients = make_clients(setting())
    with pytest.raises(fs.InputError, match=message):
        clients.choose(number, None if probabilities is None else np.array(probabilities))


# --- time ------------------------------------------------------------------------------------------------------------


def test_steps_count_the_busiest_client_and_rates_follow_them() -> None:
    clients = make_clients(setting(), rounds=7, chunk=2)
    assert clients.clock == Clock(0, 7, 0, 0)

    def work(client: Client) -> torch.Tensor:
        return client.repeat(fs.Epochs(1), lambda client, x: x + client.rate(fs.CubeRoot(1.0, 8.0)), 0 * ids_of(client))

    sums = clients.gather(work).ravel().tolist()
    rates = [1 / (8 + t) ** (1 / 3) for t in range(5)]
    assert sums == [pytest.approx(sum(rates[:n])) for n in (5, 2, 4, 1, 2)]
    assert clients.counts.steps == 5
    clients.begin(1)
    assert clients.rate(fs.CubeRoot(1.0, 8.0)) == pytest.approx(1 / 13 ** (1 / 3))
    assert clients.rate(0.25) == 0.25
    assert clients.clock == Clock(1, 7, 0, 5)


def test_a_rate_at_the_start_of_a_round_stays_when_clients_have_worked() -> None:
    clients = make_clients(setting())
    before = clients.rate(fs.CubeRoot(1.0))
    clients.mean(lambda client: client.repeat(4, lambda client, x: x, ids_of(client)))
    assert clients.rate(fs.CubeRoot(1.0)) == before


def test_a_rate_after_some_of_the_rounds_steps_and_some_iterations_ago() -> None:
    """What a server's step uses at the end of a round, and what a client uses for the step before."""
    clients = make_clients(setting(), rounds=9)
    for r in range(2):
        clients.begin(r)
        clients.mean(lambda client: client.repeat(4, lambda client, x: x, ids_of(client)))
    clients.begin(2)
    decay = fs.CubeRoot(1.0, 1.0)
    assert clients.rate(decay) == pytest.approx(9 ** (-1 / 3))
    assert clients.rate(decay, after=3) == pytest.approx(12 ** (-1 / 3))
    assert clients.rate(fs.StepDecay(1.0, at=(2,)), after=3) == pytest.approx(0.1)
    assert clients.rate(0.25, after=3) == 0.25
    seen: list[tuple[float, float, float]] = []

    def step(client: Client, x: torch.Tensor) -> torch.Tensor:
        seen.append((client.rate(decay), client.rate(decay, ago=1), client.rate(0.5, ago=1)))
        return x

    clients.mean(lambda client: client.repeat(2, step, ids_of(client)))
    assert seen == [
        pytest.approx((9 ** (-1 / 3), 8 ** (-1 / 3), 0.5)),
        pytest.approx((10 ** (-1 / 3), 9 ** (-1 / 3), 0.5)),
    ]


# --- before the first round ------------------------------------------------------------------------------------------


def test_before_the_first_round_every_client_is_there() -> None:
    clients = make_clients(make_setting(softmax_problem(), sized_data([50, 40, 30]), batch_size=8), participation=1)
    clients.begin(-1)
    assert clients.cohort.tolist() == [0, 1, 2]
    assert clients.clock == Clock(-1, 10, 0, 0)

    def inputs(client: Client) -> torch.Tensor:
        return client.draw().parts[0][0]

    early = clients.gather(inputs)
    clients.begin(0)
    assert len(clients) == 1
    late = clients.gather(inputs)
    assert not torch.equal(early[clients.cohort.tolist()], late)


def test_a_prepared_problem_takes_the_place_of_the_first() -> None:
    clients = make_clients(setting())
    first = clients.problem
    other = softmax_problem(seed=1)
    chosen = clients.choose(2)
    clients.adopt(other)
    assert clients.problem is other
    assert chosen.problem is first
    losses = clients.gather(lambda client, x: client.loss(x, client.all_data()), other.x0)
    data = sized_data(SIZES).train
    expected = [float(other.outer(other.x0, data.of_client(k))) for k in range(5)]
    assert losses.tolist() == pytest.approx(expected, rel=1e-12)
    assert clients.mean(lambda client: ids_of(client) * (client.problem is other)).item() == pytest.approx(2.0)


def test_a_number_for_the_server_is_uniform_and_a_function_of_its_name() -> None:
    clients = make_clients(setting())
    numbers = []
    for r in range(300):
        clients.begin(r)
        numbers.append(clients.integer(2, 5))
    assert set(numbers) == {2, 3, 4, 5}
    assert all(45 < numbers.count(n) < 105 for n in set(numbers))
    clients.begin(7)
    assert clients.integer(2, 5) == numbers[7]
    assert len({clients.integer(0, 10**6) for _ in range(5)}) == 5, "a new one each time"
    assert {clients.integer(3, 3) for _ in range(5)} == {3}
    clients.begin(7)
    assert make_clients(setting(seed=1)).integer(0, 10**6) != clients.integer(0, 10**6)


# --- layers ----------------------------------------------------------------------------------------------------------


def short(u: torch.Tensor, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return torch.tanh(u[:3] * batch[0].mean())


def single(u: torch.Tensor, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return (u**2).sum().reshape(1) + batch[0].std()


def blind(u: torch.Tensor, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return u.exp().sum()


LAYERED = fs.Problem(blind, softmax_problem().x0, levels=(short, single), outer_draws=False, name="layered")


def test_the_sizes_of_the_levels() -> None:
    clients = make_clients(make_setting(LAYERED, sized_data(SIZES), batch_size=2))
    assert clients.inner_sizes == (3, 1)
    assert clients.counts.samples == clients.counts.bytes_up == 0
    assert make_clients(setting()).inner_sizes == ()


def test_a_level_that_gives_no_vector_is_named() -> None:
    problem = fs.Problem(blind, LAYERED.x0, levels=(short, lambda u, batch: u.sum()), name="scalar")
    clients = make_clients(make_setting(problem, sized_data(SIZES)))
    with pytest.raises(
        fs.InputError, match=r"The value of level 2 of scalar must be a vector \(1-d\)\. Got 'shape \(\)'"
    ):
        _ = clients.inner_sizes


def test_a_draw_for_every_layer_comes_in_the_order_of_the_layers() -> None:
    client = make_client(make_setting(softmax_problem(), sized_data(SIZES), batch_size=3), [0, 2])
    assert [torch.equal(b.parts[0][0], client.draw().parts[0][0]) for b in client.draw_all()] == [True]
    layered = fs.Problem(softmax_problem().outer, LAYERED.x0, levels=(short, short))
    client = make_client(make_setting(layered, sized_data(SIZES), batch_size=3), [0, 2])
    client.samples = 0
    for options in ({}, {"stream": 2}, {"batch_size": 5}):
        found = client.draw_all(**options)
        expected = [client.draw(k, **options) for k in (1, 2, 0)]
        for ours, theirs in zip(found, expected, strict=True):
            assert torch.equal(ours.parts[0][0], theirs.parts[0][0])
        inputs = [b.parts[0][0] for b in found]
        assert not torch.equal(inputs[0], inputs[1]) and not torch.equal(inputs[1], inputs[2])
    assert client.samples == 2 * (2 * 3 * 3 + 2 * 3 * 3 + 2 * 3 * 5)


def test_an_outer_function_without_data_draws_none() -> None:
    client = make_client(make_setting(LAYERED, sized_data(SIZES), batch_size=3), [0, 2])
    assert client.draw() is NO_DATA
    assert client.all_data() is NO_DATA
    assert client.samples == 0
    assert client.draw_all()[-1] is NO_DATA
    assert client.samples == 2 * 2 * 3
    assert client.worth(1) == 3 and client.worth(4) == 12
    assert client.problem is LAYERED


@pytest.mark.parametrize("outer_draws", [True, False])
@pytest.mark.parametrize("batch_size", [3, None])
def test_in_a_mixture_a_batch_ends_with_the_clients_numbers(batch_size: int | None, outer_draws: bool) -> None:
    problem = replace(mixture_of(softmax_problem(), 5), outer_draws=outer_draws)
    client = make_client(make_setting(problem, sized_data(SIZES), batch_size=batch_size), DECREASING)
    widths = []

    def numbers(client: Client) -> list[int]:
        batch = client.draw()
        found = [0] * len(client)
        for where, part in zip(batch.where or (torch.arange(len(client)),), batch.parts, strict=True):
            assert len(part) == (3 if outer_draws else 1)
            for place, number in zip(where.tolist(), part[-1].tolist(), strict=True):
                found[place] = number
        return found

    def step(client: Client, x: torch.Tensor) -> torch.Tensor:
        widths.append(len(client))
        assert numbers(client) == client.ids[: len(client)].tolist()
        return x

    client.repeat(fs.Epochs(1), step, column(0, 0, 0, 0, 0))
    assert numbers(client) == DECREASING
    assert widths[0] == 5
    if batch_size is not None:
        assert widths[-1] < 5
    inner = client.draw(1)
    assert all(len(part) == 2 for part in inner.parts), "levels see no number"


def test_the_oracles_of_a_client_are_those_of_the_problem() -> None:
    s = make_setting(LAYERED, sized_data(SIZES), batch_size=3)
    client, oracles = make_client(s, [0, 2]), Oracles(LAYERED)
    x = torch.stack([LAYERED.x0, LAYERED.x0 + 0.1])
    batches = client.draw_all()
    value, jacobian = client.g_jacobian(1, x, batches[0])
    torch.testing.assert_close((value, jacobian), oracles.level_jacobian(1, x, batches[0]))
    assert jacobian.shape == (2, 3, len(LAYERED.x0))
    offsets = [0.3 * torch.ones(2, 3, dtype=torch.float64), torch.ones(2, 1, dtype=torch.float64)]
    for options in ({}, {"offsets": offsets, "weight": 0.4}):
        ours, theirs = client.chain(x, batches, **options), oracles.chain(x, None, batches, **options)
        torch.testing.assert_close(ours, theirs)
    first = oracles.level(1, x, batches[0])
    torch.testing.assert_close(client.chain(x, batches).values, (first, oracles.level(2, first, batches[1])))


# --- chunks ----------------------------------------------------------------------------------------------------------


def test_chunks_hold_clients_of_similar_size_and_nearly_equal_numbers() -> None:
    clients = make_clients(setting(), chunk=2)
    chunks = [clients.cohort[places].tolist() for places in clients._chunks(np.arange(len(clients)))]
    assert chunks == [[0, 2], [1, 4], [3]]
    assert [len(c) for c in make_clients(setting(), chunk=4)._chunks(np.arange(5))] == [3, 2]


@pytest.mark.parametrize(
    ("model", "shape", "batch_size", "expected"),
    [
        (("lenet5", (1, 28, 28), 10), (1, 28, 28), 10, 1),
        (("logreg", (4,), 2), (4,), 8, 4096),
        (("mlp", (400,), 2), (400,), 10, CPU_BUDGET // (4 * (4 * 120_802 + 10 * 401))),
        (("mlp", (400,), 2), (400,), None, CPU_BUDGET // (4 * (4 * 120_802 + 6 * 401))),
    ],
)
def test_the_automatic_chunk_follows_its_rule(
    model: tuple[Any, ...], shape: tuple[int, ...], batch_size: int | None, expected: int
) -> None:
    problem = fs.erm(fs.models.model(*model))
    data = fs.FederatedData.from_arrays([(np.zeros((n, *shape), np.float32), np.arange(n) % 2) for n in (4, 8)])
    assert choose_chunk("auto", problem, data, batch_size, torch.device("cpu")) == expected
    assert choose_chunk(3, problem, data, batch_size, torch.device("cpu")) == 3
