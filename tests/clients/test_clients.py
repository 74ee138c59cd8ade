"""Clients as an algorithm's round sees them: the verbs, the cohort, and the clock."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import fedstrata as fs
from clients.small import SIZES, column, ids_of, setting
from fedstrata.clients import Client, Clients, Simulated, Usage
from fedstrata.clients.chunk import CPU_BUDGET, choose_chunk
from fedstrata.clients.cohort import cohort_size
from fedstrata.core.clock import Clock
from support import make_clients, make_setting, shared_oracles, sized_data, softmax_problem

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
    x, pair = torch.arange(3.0).double(), (torch.ones(2).double(), torch.tensor(5.0).double())

    def work(client: Client, x: torch.Tensor, pair: tuple[torch.Tensor, ...], rate: float) -> torch.Tensor:
        assert x.shape == (len(client), 3)
        assert [tuple(p.shape) for p in pair] == [(len(client), 2), (len(client),)]
        assert rate == 0.5
        return rate * x + pair[1][:, None]

    assert clients.mean(work, x, pair, 0.5).tolist() == pytest.approx([5.0, 5.5, 6.0])
    assert clients.usage.bytes_down == 5 * (3 + 2 + 1) * 8
    assert clients.usage.bytes_up == 5 * 3 * 8


@pytest.mark.parametrize(
    ("answer", "got"),
    [
        (torch.zeros(3).double(), r"\(3,\)"),
        (torch.tensor(1.0).double(), r"\(\)"),
        (1.5, "float"),
        ((torch.zeros(2, 1).double(), torch.zeros(1, 2).double()), r"\(1, 2\)"),
        (None, "NoneType"),
    ],
    ids=["too long", "scalar", "number", "nested", "nothing"],
)
def test_an_answer_without_the_client_axis_is_an_error(answer: Any, got: str) -> None:
    clients = make_clients(setting(), participation=2, chunk=2)

    def work(client: Client) -> Any:
        return answer

    message = rf"^work must return tensors with a leading client axis of 2\. Got {got}\. \(in work, .*round 1, clients "
    packed = Clients(Simulated(setting(), 2, fs.Channel(clip=1.0)), 10, 2)
    for verb in (clients.mean, clients.max, clients.gather, packed.mean):
        with pytest.raises(fs.FedstrataError, match=message):
            verb(work)
    with pytest.raises(fs.FedstrataError, match=message):
        clients.pool(fs.remote(pool=True)(work))


def test_answers_of_different_forms_are_refused() -> None:
    """Two chunks' answers of different shapes would be broadcast to numbers that no client meant."""
    odd = {
        "shape": lambda: torch.ones(1, 1).double(),
        "dtype": lambda: torch.ones(1, 2).float(),
        "nesting": lambda: (torch.ones(1, 2).double(),),
    }
    for other in odd.values():

        def work(client: Client, other: Any = other) -> Any:
            return other() if client.ids[0] == 3 else torch.ones(1, 2).double()

        clients = make_clients(setting(), chunk=1)
        message = (
            r"^work must return tensors of the same shapes and dtypes for every client\. Got 1 tensor .* client 3, "
        )
        for verb in (clients.mean, clients.max, clients.gather):
            with pytest.raises(fs.FedstrataError, match=message):
                verb(work)


def test_answers_of_different_forms_are_left_out_under_a_policy() -> None:
    def work(client: Client) -> torch.Tensor:
        return torch.ones(1, 1 if client.ids[0] == 3 else 2).double() * float(client.ids[0])

    clients = Clients(Simulated(setting(), 1, policy=fs.Faults(quorum=0.5)), 10)
    clients.begin(0)
    assert clients.mean(work).tolist() == [pytest.approx((0 + 1 + 2 + 4) / 4)] * 2
    assert [(fault.client, fault.kind) for fault in clients.faults] == [(3, "shape")]


@pytest.mark.parametrize("message", [{"a": 1}, np.float32(2), (torch.ones(2), [np.ones(3)])], ids=str)
def test_messages_that_cannot_be_sent_are_refused_in_a_simulation_too(message: Any) -> None:
    def work(client: Client, message: Any) -> torch.Tensor:
        return ids_of(client)

    with pytest.raises(fs.FedstrataError, match=r"^The message to work must be made of tensors, .*\. Got a "):
        make_clients(setting()).mean(work, message)
    assert make_clients(setting()).mean(work, np.float64(2)).tolist() == [2.0]  # a float


# --- a mean and a maximum in one exchange ----------------------------------------------------------------------------


PROBLEM = softmax_problem()


def answers(client: Client, x: torch.Tensor, shift: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Two things of different shapes that differ between clients; the second may be negative."""
    g = client.grads(x, client.draw())
    return g, torch.stack([-g.norm(dim=1) - shift.sum(1), g[:, 0]], dim=1)


@pytest.mark.parametrize("weighting", ["uniform", "samples"])
@pytest.mark.parametrize("participation", [1.0, 4])
@pytest.mark.parametrize("chunk", [1, 2, 100])
def test_combine_gives_means_and_maxima_in_one_exchange(chunk: int, participation: int | float, weighting: str) -> None:
    problem, data = PROBLEM, sized_data([5, 9, 3, 14, 6, 7])
    message = problem.x0, torch.ones(3, dtype=torch.float64)

    def fresh() -> Clients:
        setting = make_setting(problem, data, batch_size=4, oracles=shared_oracles(problem))
        return make_clients(setting, participation=participation, weighting=weighting, chunk=chunk)

    mean, maximum, both, everything = fresh(), fresh(), fresh(), fresh()
    means, maxima = mean.mean(answers, *message), maximum.max(answers, *message)
    first, second = both.combine(("mean", "max"), answers, *message)
    assert torch.equal(first, means[0]) and torch.equal(second, maxima[1])
    assert (means[1] < maxima[1]).all(), "the two differ"
    other, another = fresh().combine(("max", "mean"), answers, *message)
    assert torch.equal(other, maxima[0]) and torch.equal(another, means[1])
    assert both.usage == mean.usage == maximum.usage
    cohort = len(both)
    d = len(problem.x0)
    assert both.usage.bytes_down == 8 * cohort * (d + 3)
    assert both.usage.bytes_up == 8 * cohort * (d + 2)
    assert both.usage.samples == 4 * cohort
    assert both.progress.exchanges == 1
    rows = everything.gather(answers, *message)
    share = everything.weights
    torch.testing.assert_close(first, share @ rows[0], rtol=1e-12, atol=1e-14)
    assert torch.equal(second, rows[1].amax(0))


def test_one_reduction_applies_to_all_tensors_and_a_wrong_number_is_an_error() -> None:
    problem, data = PROBLEM, sized_data([5, 9, 3])
    message = problem.x0, torch.ones(3, dtype=torch.float64)
    clients = make_clients(make_setting(problem, data), chunk=2)
    for how in ("mean", "max"):
        one = clients.combine((how,), answers, *message)
        two = clients.combine((how, how), answers, *message)
        assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
    for wrong in (("mean", "max", "mean"), ("mean", "sum"), "mean", ()):
        with pytest.raises(fs.InputError, match=r"^The how of combine must be .* that answers returns\. Got "):
            clients.combine(wrong, answers, *message)


# --- collections -----------------------------------------------------------------------------------------------------


@fs.remote(pool=True)
def scores(client: Client, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return n numbers, and n vectors of two, that say whose they are."""
    who = 10 * ids_of(client) + torch.arange(n)
    return who, torch.stack([who, -who], 2)


@pytest.mark.parametrize("participation", [1.0, 3])
@pytest.mark.parametrize("chunk", [1, 2, 5])
def test_collections_are_pooled_in_the_order_of_the_cohort(chunk: int, participation: int | float) -> None:
    clients = make_clients(setting(), chunk=chunk, participation=participation)
    numbers, vectors = clients.pool(scores, 3)
    expected = [10 * k + i for k in clients.cohort.tolist() for i in range(3)]
    assert numbers.tolist() == expected
    assert vectors.tolist() == [[n, -n] for n in expected]
    assert clients.usage.bytes_up == 8 * len(clients) * (3 + 6)
    assert clients.usage.bytes_down == 0
    assert clients.progress.exchanges == 1


def test_a_collection_is_no_larger_than_its_limit() -> None:
    clients = make_clients(setting(), chunk=2)
    assert len(clients.pool(scores, 3, limit=9)[0]) == 15
    message = r"^The size of the collections that scores returns to pool must be at most 8 numbers per client\. Got 9"
    with pytest.raises(fs.InputError, match=message):
        clients.pool(scores, 3, limit=8)
    with pytest.raises(fs.InputError, match=r"at most 1048576 numbers per client\. Got 1048578\."):
        clients.pool(scores, (1 << 20) // 3 + 1)


def test_a_single_number_is_no_collection() -> None:
    message = r"^The shape of the collections that .+ returns to pool must be \(n, \.\.\.\)\. Got \[\(1,\), \(\)\]\. "
    with pytest.raises(fs.InputError, match=message):
        make_clients(setting()).pool(fs.remote(pool=True)(lambda client: (ids_of(client), client.sizes)))


def test_only_methods_marked_for_it_are_pooled_and_nothing_else_asks_for_them() -> None:
    """Or a node could not tell by the method whether it is asked for a collection."""
    clients = make_clients(setting())
    for verb in (clients.mean, clients.max, clients.gather, clients.restore):
        with pytest.raises(fs.FedstrataError, match=r"^scores is marked @remote\(pool=True\): only clients\.pool may "):
            verb(scores, 3)
    for other in (ids_of, fs.remote(lambda client: ids_of(client)), fs.remote()(lambda client: ids_of(client))):
        with pytest.raises(
            fs.FedstrataError, match=r"returns collections to pool: mark it with @remote\(pool=True\)\.$"
        ):
            clients.pool(other)
    assert clients.usage == Usage() and clients.progress.exchanges == 0, "nobody was asked"


@pytest.mark.parametrize("kind", ["drop", "nan", "garbage"])
def test_a_client_that_is_left_out_adds_nothing_to_a_pool(kind: str) -> None:
    policy = fs.Faults(retries=0, inject=fs.Inject(clients=(1, 3), **{kind: 1.0}))
    clients = Clients(Simulated(setting(), 2, policy=policy), 10)
    clients.begin(0)
    numbers, vectors = clients.pool(scores, 2)
    assert numbers.tolist() == [0, 1, 20, 21, 40, 41]
    assert vectors.shape == (6, 2)
    assert clients.usage.failed == 2


@pytest.mark.parametrize(
    ("channel", "wanted"),
    [
        (fs.Channel(clip=1.0, noise=1.0), "The noise of the channel cannot protect scores, which shows the server the"),
        (fs.Channel(reduce="median"), "A median cannot protect scores, which shows the server the answer of every"),
        (fs.Channel(reduce="trimmed_mean"), "A trimmed_mean cannot protect scores, which shows the server the answer"),
        (
            fs.Channel(clip=1.0),
            "A channel with clip is for updates: it cannot be used for the collections that scores ",
        ),
        (fs.Channel(bound=1.0), "A channel with bound is for updates"),
        (fs.Channel(compress="top_k"), "A channel with compress is for updates"),
        (
            fs.Channel(compress="quantise", clip=1.0, bound=1.0),
            "A channel with compress and clip and bound is for upda",
        ),
    ],
    ids=["noise", "median", "trimmed mean", "clip", "bound", "top_k", "quantise"],
)
def test_a_pool_is_refused_by_a_channel_for_updates(channel: fs.Channel, wanted: str) -> None:
    clients = Clients(Simulated(setting(), 2, channel), 10)
    clients.begin(0)
    with pytest.raises(fs.InputError, match=f"^{wanted}"):
        clients.pool(scores, 2)
    assert clients.usage == Usage(), "nobody was asked"


# --- who takes part --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("participation", "size"), [(1.0, 10), (0.5, 5), (0.25, 2), (0.01, 1), (10, 10), (1, 1), (7, 7), (0.96, 10)]
)
def test_the_size_of_the_cohort(participation: int | float, size: int) -> None:
    assert cohort_size(participation, 10) == size


def test_a_cohort_of_more_than_all_clients_is_refused() -> None:
    with pytest.raises(
        fs.InputError, match=r"participation must be a fraction in \(0, 1\] or a whole number from 1 to 10"
    ):
        cohort_size(11, 10)


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
        return client.recall("row").row

    assert chosen.gather(work).ravel().tolist() == chosen.cohort.tolist()
    assert s.state.count() == 2


@pytest.mark.parametrize("policy", [None, fs.Faults()], ids=["plain", "watched"])
@pytest.mark.parametrize("chunk", [1, 2, 9])
def test_a_client_drawn_twice_does_the_same_twice(chunk: int, policy: fs.Faults | None) -> None:
    """It recalls what it kept in the next exchange, not in a later chunk of this one."""
    clients = Clients(Simulated(setting(), chunk, policy=policy), 10)
    clients.begin(0)
    chosen = clients.choose(9, probabilities=np.array([0, 0.75, 0, 0.25, 0]))

    def count(client: Client) -> torch.Tensor:
        before = client.kept("n", 0 * ids_of(client))
        client.keep(n=before + 1)
        return before

    for exchange in range(3):
        assert chosen.gather(count).ravel().tolist() == [exchange] * 9


@pytest.mark.parametrize(
    ("number", "probabilities", "message"),
    [
        (0, None, "number of clients to choose must be a whole number of at least 1 and at most 5"),
        (1.5, None, r"number of clients to choose must be a whole number .* Got 1\.5"),
        (2.0, [0.2] * 5, r"number of clients to choose must be a whole number of at least 1\. Got 2\.0"),
        (True, None, "number of clients to choose must be a whole number"),
        (6, None, "number of clients to choose must be"),
        (2, [0.5, 0.5], "probabilities must be"),
        (2, [0.5, 0.5, -0.5, 0.5, 0.0], "probabilities must be"),
        (2, [0.0] * 5, "probabilities must be"),
        (2, [0.2, 0.2, float("nan"), 0.2, 0.2], "probabilities must be"),
    ],
    ids=["none", "a fraction", "a float", "a bool", "more than there are", "too few", "negative", "all zero", "NaN"],
)
def test_a_bad_choice_is_refused(number: Any, probabilities: list[float] | None, message: str) -> None:
    clients = make_clients(setting())
    with pytest.raises(fs.InputError, match=message):
        clients.choose(number, None if probabilities is None else np.array(probabilities))


# --- time ------------------------------------------------------------------------------------------------------------


def test_steps_count_the_busiest_client_and_rates_follow_them() -> None:
    clients = make_clients(setting(), rounds=7, chunk=2)
    assert clients.clock == Clock(0, 7, 0, 0)

    def work(client: Client) -> torch.Tensor:
        k = client.variables(x=0 * ids_of(client))
        for _ in client.loop(fs.Epochs(1), k):
            k.x = k.x + client.rate(fs.CubeRoot(1.0, 8.0))
        return k.x

    sums = clients.gather(work).ravel().tolist()
    rates = [1 / (8 + t) ** (1 / 3) for t in range(5)]
    assert sums == [pytest.approx(sum(rates[:n])) for n in (5, 2, 4, 1, 2)]
    assert clients.usage.steps == 5
    assert clients.progress.iteration == 5
    clients.begin(1)
    assert clients.rate(fs.CubeRoot(1.0, 8.0)) == pytest.approx(1 / 13 ** (1 / 3))
    assert clients.rate(0.25) == 0.25
    assert clients.clock == Clock(1, 7, 0, 5)


def four_steps(client: Client) -> torch.Tensor:
    for _ in client.loop(4, client.variables()):
        pass
    return ids_of(client)


def test_rates_and_steps_before_the_first_round_are_those_of_the_first() -> None:
    clients, decay, seen = make_clients(setting()), fs.RoundDecay(1.0, 0.5), []
    clients.begin(-1)

    def work(client: Client) -> torch.Tensor:
        seen.append((client.rate(decay), client.steps_now(fs.Interval(4, 2.0))))
        return ids_of(client)

    clients.mean(work)
    assert seen == [(clients.rate(decay), clients.steps_now(fs.Interval(4, 2.0)))] == [(1.0, 4)]


def test_a_rate_at_the_start_of_a_round_stays_when_clients_have_worked() -> None:
    clients = make_clients(setting())
    before = clients.rate(fs.CubeRoot(1.0))
    clients.mean(four_steps)
    assert clients.rate(fs.CubeRoot(1.0)) == before
    assert clients.progress.iteration == 4


def test_a_rate_after_some_of_the_rounds_steps_and_some_iterations_ago() -> None:
    """What a server's step uses at the end of a round, and what a client uses for the step before."""
    clients = make_clients(setting(), rounds=9)
    for r in range(2):
        clients.begin(r)
        clients.mean(four_steps)
    clients.begin(2)
    decay = fs.CubeRoot(1.0, 1.0)
    assert clients.rate(decay) == pytest.approx(9 ** (-1 / 3))
    assert clients.rate(decay, after=3) == pytest.approx(12 ** (-1 / 3))
    assert clients.rate(fs.StepDecay(1.0, at=(2,)), after=3) == pytest.approx(0.1)
    assert clients.rate(0.25, after=3) == 0.25
    seen: list[tuple[float, float, float]] = []

    def work(client: Client) -> torch.Tensor:
        for _ in client.loop(2, client.variables()):
            seen.append((client.rate(decay), client.rate(decay, ago=1), client.rate(0.5, ago=1)))
        return ids_of(client)

    clients.mean(work)
    assert seen == [
        pytest.approx((9 ** (-1 / 3), 8 ** (-1 / 3), 0.5)),
        pytest.approx((10 ** (-1 / 3), 9 ** (-1 / 3), 0.5)),
    ]


def test_schedules_read_the_clock_and_not_what_was_used() -> None:
    """Changing the counters of a run does not change its rates."""
    decay = fs.CubeRoot(1.0, 1.0)
    seen: list[float] = []

    def work(client: Client) -> torch.Tensor:
        for _ in client.loop(3, client.variables()):
            seen.append(client.rate(decay))
        return ids_of(client)

    clients = make_clients(setting(), chunk=5)
    for r, steps in enumerate((0, 1000, 7)):
        clients.usage.steps = steps
        clients.begin(r)
        assert clients.rate(decay) == pytest.approx((1 + 3 * r) ** (-1 / 3))
        assert clients.clock == Clock(r, 10, 0, 3 * r)
        clients.mean(work)
        assert clients.usage.steps == steps + 3
        assert clients.progress.iteration == 3 * (r + 1)
    assert seen == pytest.approx([(1 + t) ** (-1 / 3) for t in range(9)])


def test_the_clock_can_be_set_without_touching_what_was_used() -> None:
    clients = make_clients(setting())
    clients.progress.iteration = 26
    clients.begin(4)
    assert clients.rate(fs.CubeRoot(1.0, 1.0)) == pytest.approx(1 / 3)
    assert clients.usage.steps == 0
    clients.mean(four_steps)
    assert (clients.progress.start, clients.progress.iteration, clients.usage.steps) == (26, 30, 4)


def test_a_choice_shares_the_clock_and_what_was_used() -> None:
    clients = make_clients(setting())
    chosen = clients.choose(2)
    chosen.mean(four_steps)
    clients.mean(four_steps)
    assert chosen.usage is clients.usage and chosen.progress is clients.progress
    assert (clients.usage.steps, clients.progress.iteration, clients.progress.exchanges) == (8, 8, 2)


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
    assert chosen.problem is clients.problem is first
    clients.engine.adopt(other)
    assert clients.problem is other
    assert chosen.problem is other, "all cohorts share one engine"
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


# --- chunks ----------------------------------------------------------------------------------------------------------


def test_chunks_hold_clients_of_similar_size_and_nearly_equal_numbers() -> None:
    clients = make_clients(setting(), chunk=2)
    seen: list[list[int]] = []

    def work(client: Client) -> torch.Tensor:
        seen.append(client.ids.tolist())
        return ids_of(client)

    clients.mean(work)
    assert seen == [[0, 2], [1, 4], [3]]
    seen.clear()
    make_clients(setting(), chunk=4).mean(work)
    assert [len(chunk) for chunk in seen] == [3, 2]


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
