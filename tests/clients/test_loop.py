"""Local loops: who takes which steps, what happens to the variables, and where the clock is afterwards."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fedstrata as fs
from clients.small import DECREASING, STEPS, column, ids_of, setting
from fedstrata.clients import Client, Variables
from fedstrata.core.clock import Clock
from support import make_client, make_clients, make_setting, sized_data, softmax_problem

EPOCH = fs.Epochs(1)


# --- unequal steps ---------------------------------------------------------------------------------------------------


def test_each_client_takes_its_own_number_of_steps() -> None:
    client = make_client(setting(), DECREASING)
    assert client.step_counts(EPOCH).tolist() == STEPS
    widths, times = [], []
    k = client.variables(count=column(0, 0, 0, 0, 0))
    for t in client.loop(EPOCH, k):
        widths.append(len(client))
        times.append(t)
        assert len(k.count) == len(client) == len(client.sizes)
        k.count = k.count + 1
    assert k.count.ravel().tolist() == STEPS
    assert widths == [5, 4, 2, 2, 1]
    assert times == [0, 1, 2, 3, 4]
    assert len(client) == 5
    assert client.steps == 5
    assert client.clock.step == 0


def test_rows_leave_and_return_in_the_order_of_the_clients() -> None:
    client = make_client(setting(), DECREASING)
    k = client.variables(total=column(0, 0, 0, 0, 0), own=10 * ids_of(client))
    for _ in client.loop(EPOCH, k):
        assert torch.equal(k.own, 10 * ids_of(client)), "a variable that is not set follows its client too"
        k.total = k.total + k.own
    assert k.total.ravel().tolist() == [0 * 5, 20 * 4, 10 * 2, 40 * 2, 30 * 1]
    assert torch.equal(k.own, 10 * ids_of(client))


def test_several_clients_that_leave_together_return_together() -> None:
    """Three with four steps, two with two: rows of one departure keep their order."""
    client = make_client(make_setting(softmax_problem(), sized_data([8, 8, 8, 4, 3]), batch_size=2), [2, 0, 1, 4, 3])
    k = client.variables(who=ids_of(client), count=column(0, 0, 0, 0, 0))
    for _ in client.loop(EPOCH, k):
        k.count = k.count + 1
    assert k.who.ravel().tolist() == [2, 0, 1, 4, 3]
    assert k.count.ravel().tolist() == [4, 4, 4, 2, 2]


@pytest.mark.parametrize("kind", [tuple, list])
def test_variables_may_be_lists(kind: type) -> None:
    client = make_client(setting(), DECREASING)
    zeros = column(0, 0, 0, 0, 0)
    k = client.variables(a=zeros, pair=kind((zeros, zeros[:, [0, 0]])), c=column(1, 2, 3, 4, 5))
    assert type(k.pair) is list, "a tuple cannot be assigned to"
    for _ in client.loop(EPOCH, k):
        assert [len(part) for part in k.pair] == [len(client)] * 2
        k.a = k.a + 1
        k.pair[0] = k.pair[0] + k.c
        k.pair[1] = k.pair[1] - 1
    assert k.a.ravel().tolist() == STEPS
    assert k.pair[0].ravel().tolist() == [5, 8, 6, 8, 5]
    assert k.pair[1].tolist() == [[-5, -5], [-4, -4], [-2, -2], [-2, -2], [-1, -1]]


def test_variables_may_be_plain_numbers() -> None:
    client = make_client(setting(), DECREASING)
    k = client.variables(total=column(0, 0, 0, 0, 0), size=0.5)
    for _ in client.loop(EPOCH, k):
        k.total = k.total + k.size
    assert k.total.ravel().tolist() == [2.5, 2.0, 1.0, 1.0, 0.5]
    assert k.size == 0.5


def test_updates_in_place_stay_with_their_clients() -> None:
    """Rows that left are views of the same memory, and must not change any more."""
    client = make_client(setting(), DECREASING)
    k = client.variables(count=column(0, 0, 0, 0, 0), pair=(column(0, 0, 0, 0, 0),))
    for _ in client.loop(EPOCH, k):
        k.count.add_(1)
        k.pair[0].sub_(1)
    assert k.count.ravel().tolist() == STEPS
    assert (-k.pair[0]).ravel().tolist() == STEPS


def test_a_tensor_of_the_message_that_is_no_variable_is_an_error_once_somebody_has_left() -> None:
    client = make_client(setting(), DECREASING)
    start = column(1, 2, 3, 4, 5)
    k = client.variables(x=start)
    steps = []

    def loop() -> None:
        for t in client.loop(EPOCH, k):
            steps.append(t)
            k.moved = start

    message = (
        r"^The variable moved of a local loop must have one row for each client that is still in the loop, 4\. Got 5\. "
        r"Tensors of the message that a loop uses must be variables too: client\.variables\(moved=\.\.\., start=x\)\.$"
    )
    with pytest.raises(fs.FedstrataError, match=message):
        loop()
    assert steps == [0, 1], "the first step is everybody's"


def test_a_tensor_of_the_message_that_spreads_over_the_last_client_is_an_error() -> None:
    """One row and three give three: PyTorch would not object."""
    client = make_client(make_setting(softmax_problem(), sized_data([4, 2, 2]), batch_size=2), [0, 1, 2])
    start = column(1, 2, 3)
    k = client.variables(h=(start, start))

    def loop() -> None:
        for _ in client.loop(EPOCH, k):
            k.h[1] = k.h[1] - start

    with pytest.raises(fs.FedstrataError, match=r"^The variable h of a local loop .* still in the loop, 1\. Got 3\."):
        loop()


def test_with_equal_steps_a_loop_may_use_the_message_as_it_is() -> None:
    client = make_client(setting(), DECREASING)
    start = column(1, 2, 3, 4, 5)
    k = client.variables(x=start)
    for _ in client.loop(3, k):
        k.x = k.x + start
    assert torch.equal(k.x, 4 * start)


def test_an_engine_must_put_clients_in_order() -> None:
    client = make_client(setting(), [3, 0])
    with pytest.raises(AssertionError, match="by decreasing steps"):
        list(client.loop(EPOCH, client.variables(x=column(0, 0))))


def test_a_loop_without_steps_does_nothing() -> None:
    client = make_client(setting(), DECREASING)
    before = client.draw().parts[0][0]
    k = client.variables(x=column(0, 0, 0, 0, 0))
    for _ in client.loop(0, k):
        raise AssertionError("there is no step to take")
    assert k.x.ravel().tolist() == [0] * 5
    assert (client.steps, client.clock, len(client)) == (0, Clock(0, 10, 0, 0), 5)
    assert client.first
    assert torch.equal(client.draw().parts[0][0], before), "what follows is not a new phase"


def test_a_loop_inside_another_is_an_error() -> None:
    """They have one clock: the inner one would take other steps than it says, and the outer one never end."""
    client = make_client(setting(), DECREASING)

    def nested() -> None:
        k = client.variables(x=column(0, 0, 0, 0, 0))
        for _ in client.loop(3, k):
            for _ in client.loop(2, k):
                k.x = k.x + 1

    with pytest.raises(fs.FedstrataError, match=r"^A local loop cannot be inside another one"):
        nested()


@pytest.mark.parametrize("how", ["break", "return"])
def test_a_loop_that_is_left_early_is_an_error(how: str) -> None:
    """The clients that left would be missing, and the clock would stand still."""

    def work(client: Client) -> torch.Tensor:
        k = client.variables(x=ids_of(client))
        for t in client.loop(EPOCH, k):
            if t == 2 and how == "return":
                return ids_of(client)
            if t == 2:
                break
        return ids_of(client)

    message = r"^A local loop must run to its end: it cannot be left by break or return\. \(in work, round 1, "
    with pytest.raises(fs.FedstrataError, match=message):
        make_clients(setting()).mean(work)


def test_what_a_loop_sets_first_is_a_variable_afterwards() -> None:
    client = make_client(setting(), DECREASING)
    k = client.variables()
    for _ in client.loop(1, k):
        k.who = ids_of(client)
    assert torch.equal(k.who, ids_of(client))


# --- time ------------------------------------------------------------------------------------------------------------


def test_a_second_loop_continues_in_time() -> None:
    client = make_client(setting(), [0, 2])
    clocks: list[tuple[int, int]] = []
    k = client.variables(x=column(0, 0))
    for steps in (2, 3):
        for t in client.loop(steps, k):
            assert t == client.clock.step
            clocks.append((client.clock.step, client.clock.iteration))
    assert clocks == [(0, 0), (1, 1), (0, 2), (1, 3), (2, 4)]
    assert client.steps == 5
    assert client.clock == Clock(0, 10, 0, 5)


def test_an_interval_is_read_at_the_round_of_the_loop() -> None:
    interval = fs.Interval(2, 2.0)
    for round, steps in ((0, 2), (1, 3), (7, 5)):
        client = make_client(setting(), [0, 2], round=round)
        k = client.variables(n=column(0, 0))
        for _ in client.loop(interval, k):
            k.n = k.n + 1
        assert k.n.ravel().tolist() == [steps, steps] == [client.steps_now(interval)] * 2
        assert client.clock == Clock(round, 10, 0, steps)


def test_epochs_do_not_advance_what_follows_in_the_exchange() -> None:
    """A client's rates must not depend on how many steps the others of its chunk took."""
    client = make_client(setting(), DECREASING)
    iterations = []
    for _ in client.loop(EPOCH, client.variables()):
        iterations.append(client.clock.iteration)
    assert iterations == [0, 1, 2, 3, 4]
    assert (client.clock, client.steps) == (Clock(0, 10, 0, 0), 5)


@pytest.mark.parametrize("steps", [3, EPOCH], ids=["steps", "epochs"])
def test_what_comes_after_unequal_steps_does_not_depend_on_the_chunk(steps: fs.Epochs | int) -> None:
    """A client's draws and rates are its own, however long the others of its chunk went on."""
    decay = fs.CubeRoot(1.0, 2.0)

    def inputs(client: Client, stream: int = 0) -> torch.Tensor:
        return client.draw(stream=stream, batch_size=3).parts[0][0].mean((1, 2))

    def work(client: Client) -> torch.Tensor:
        k = client.variables(seen=0 * ids_of(client), again=0 * ids_of(client))
        for _ in client.loop(steps, k):
            k.seen = k.seen + client.rate(decay)
        after = [inputs(client), inputs(client, stream=1)]
        for _ in client.loop(steps, k):
            k.again = k.again + inputs(client)[:, None]
        rate = torch.full((len(client),), client.rate(decay), dtype=torch.float64)
        return torch.stack([k.seen[:, 0].double(), *after, k.again[:, 0].double(), rate], dim=1)

    answers = [make_clients(setting(), chunk=chunk).gather(work) for chunk in (1, 2, 5)]
    for other in answers[1:]:
        torch.testing.assert_close(other, answers[0], atol=1e-12, rtol=0)
    assert not torch.equal(answers[0][:, 1], answers[0][:, 2]), "streams are independent"


def test_every_loop_of_an_exchange_has_batches_of_its_own() -> None:
    """By name: phase after phase, whether or not the loop before drew anything."""

    def drawn(*loops: bool) -> list[torch.Tensor]:
        client = make_client(make_setting(softmax_problem(), sized_data([50, 40]), batch_size=8), [0, 1])
        found = []
        for draws in loops:
            for _ in client.loop(1, client.variables()):
                found += [client.draw().parts[0][0]] if draws else []
        return [*found, client.draw().parts[0][0]]

    first, second, after = drawn(True, True)
    assert not torch.equal(first, second) and not torch.equal(second, after)
    later, after_that = drawn(False, True)
    assert torch.equal(later, second) and torch.equal(after_that, after)


def test_batches_of_a_loop_belong_to_their_clients_and_steps() -> None:
    s = setting(sampling="epochs")
    client = make_client(s, DECREASING)
    seen: dict[int, list[float]] = {k: [] for k in range(5)}
    for _ in client.loop(EPOCH, client.variables()):
        batch = client.draw()
        groups = batch.where if batch.where is not None else (torch.arange(len(client)),)
        for where, part in zip(groups, batch.parts, strict=True):
            for row, place in enumerate(where.tolist()):
                seen[int(client.ids[place])] += part[0][row, :, 0].tolist()
    for k in range(5):
        assert sorted(seen[k]) == sorted(s.data.train.of_client(k)[0][:, 0].tolist())
    assert client.samples == 9 + 4 + 7 + 2 + 4


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


def test_nobody_has_taken_a_step_until_the_first_loop_of_the_run() -> None:
    clients = make_clients(setting())
    seen: list[bool] = []

    def ask(client: Client) -> torch.Tensor:
        seen.append(client.first)
        return ids_of(client)

    def step(client: Client) -> torch.Tensor:
        for _ in client.loop(2, client.variables()):
            seen.append(client.first)
        seen.append(client.first)
        return ids_of(client)

    clients.begin(-1)
    clients.mean(ask)
    clients.begin(0)
    clients.mean(ask)
    assert seen == [True, True], "an exchange without steps does not count"
    seen.clear()
    clients.mean(step)
    assert seen == [True, False, False]
    seen.clear()
    clients.mean(ask)
    clients.begin(1)
    clients.mean(ask)
    assert seen == [False, False]


# --- variables -------------------------------------------------------------------------------------------------------


def test_updates_are_differences_in_the_order_of_the_start_and_release_the_variables() -> None:
    start = {"y": column(1, 2), "h": (column(0, 1), column(5, 5)), "x": column(3, 4)}
    k = Variables(x=column(10, 20), h=(column(1, 1), column(6, 7)), y=column(1, 1), other=column(0, 0))
    parts: list[Any] = k.h
    y, h, x = k.updates(**start)
    assert torch.equal(y, column(0, -1))
    assert torch.equal(x, column(7, 16))
    assert type(h) is tuple and [part.ravel().tolist() for part in h] == [[1, 0], [1, 2]]
    assert set(vars(k)) == {"other"}, "what has been subtracted is not held any longer"
    assert parts == [], "nor are the tensors of a list"
    assert start["y"].ravel().tolist() == [1, 2] and len(start["h"]) == 2, "the start stays"


def test_updates_are_those_of_a_loop() -> None:
    client = make_client(setting(), DECREASING)
    x, h = ids_of(client), (ids_of(client), 2 * ids_of(client))
    k = client.variables(x=x, h=h)
    for _ in client.loop(EPOCH, k):
        k.x = k.x + 1
        k.h[1] = k.h[1] - 1
    dx, dh = k.updates(x=x, h=h)
    assert dx.ravel().tolist() == STEPS
    assert [part.ravel().tolist() for part in dh] == [[0] * 5, [-n for n in STEPS]]


def test_a_list_of_the_message_stays_as_it_is() -> None:
    h = [column(1, 2), column(3, 4)]
    k = Variables(h=h)
    k.h[0] = k.h[0] + 1
    (dh,) = k.updates(h=h)
    assert [part.ravel().tolist() for part in dh] == [[1, 1], [0, 0]]
    assert [part.ravel().tolist() for part in h] == [[1, 2], [3, 4]]


def test_a_single_update_comes_in_a_tuple() -> None:
    (dx,) = Variables(x=column(3)).updates(x=column(1))
    assert dx.item() == 2
    assert Variables(x=column(3)).updates() == ()


@pytest.mark.parametrize("steps", [-1, 2.5, True, "3"], ids=repr)
def test_a_number_of_steps_that_is_not_a_count_is_refused(steps: Any) -> None:
    client = make_client(setting(), DECREASING)
    k = client.variables(x=ids_of(client))
    message = r"^The number of local steps must be a whole number of at least 0, epochs or an interval\. Got "
    with pytest.raises(fs.InputError, match=message):
        list(client.loop(steps, k))
    assert client.clock == Clock(0, 10)
    assert list(client.loop(0, k)) == []


@pytest.mark.parametrize("name", ["updates", "_leave", "_since"])
def test_a_variable_cannot_have_the_name_of_a_method(name: str) -> None:
    with pytest.raises(fs.InputError, match=rf"^The name of a variable must be a different one: .* Got '{name}'\.$"):
        Variables(**{name: column(1)})
