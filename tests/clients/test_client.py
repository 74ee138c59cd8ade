"""The client side: what a client draws, which oracles it has, and what it keeps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import fedstrata as fs
from clients.small import DECREASING, SIZES, STEPS, column, ids_of, setting
from fedstrata.clients import Simulated
from fedstrata.clients.client import Client
from fedstrata.clients.state import LostState
from fedstrata.data.batch import NO_DATA
from fedstrata.problems.oracles import Oracles
from saddle_worlds import SADDLES
from support import make_client, make_clients, make_setting, mixture_of, sized_data, softmax_problem

# --- draws -----------------------------------------------------------------------------------------------------------


def test_samples_are_counted() -> None:
    client = make_client(setting(), DECREASING)
    client.draw()
    client.draw(stream=1)
    client.draw(batch_size=3)
    assert client.samples == 5 * 2 + 5 * 2 + 5 * 3
    client.all_data()
    client.all_data()
    assert client.samples == 35 + 2 * sum(SIZES)


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
    assert clients.usage.samples == clients.usage.bytes_up == 0
    assert make_clients(setting()).inner_sizes == ()


def test_a_level_that_gives_no_vector_is_named() -> None:
    problem = fs.Problem(blind, LAYERED.x0, levels=(short, lambda u, batch: u.sum()), name="scalar")
    clients = make_clients(make_setting(problem, sized_data(SIZES)))
    with pytest.raises(
        fs.InputError, match=r"The value of level 2 of the problem scalar must be a vector \(1-d\)\. Got 'shape \(\)'"
    ):
        _ = clients.inner_sizes


def test_a_draw_for_every_layer_comes_in_the_order_of_the_layers() -> None:
    client = make_client(make_setting(softmax_problem(), sized_data(SIZES), batch_size=3), [0, 2])
    assert [torch.equal(b.parts[0][0], client.draw().parts[0][0]) for b in client.draw_all()] == [True]
    layered = fs.Problem(softmax_problem().outer, LAYERED.x0, levels=(short, short))
    client = make_client(make_setting(layered, sized_data(SIZES), batch_size=3), [0, 2])
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

    for _ in client.loop(fs.Epochs(1), client.variables(x=column(0, 0, 0, 0, 0))):
        widths.append(len(client))
        assert numbers(client) == client.ids[: len(client)].tolist()
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


# --- what clients keep -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("deferred", [False, True])
def test_what_is_kept_is_recalled_by_name(deferred: bool) -> None:
    s = replace(setting(), deferred=deferred)
    client = make_client(s, DECREASING)
    k = client.variables(x=ids_of(client), w=ids_of(client) ** 2)
    client.keep(k, y=-ids_of(client))
    client.commit(np.ones(5, dtype=bool))
    later = make_client(s, [3, 0], round=1)
    k = later.recall("y", "x", w=column(7, 8), steps=3)
    assert vars(k).keys() == {"x", "y", "w", "steps"}
    assert torch.equal(k.x, column(3, 0)) and torch.equal(k.y, column(-3, 0))
    assert torch.equal(k.w, column(7, 8)) and k.steps == 3, "the others are as given"
    assert torch.equal(later.recall("w").w, column(9, 0))


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("deferred", [False, True])
def test_recalling_what_a_client_has_not_kept_is_an_error_that_names_it(deferred: bool, named: bool) -> None:
    s = replace(setting(), deferred=deferred)
    if named:
        s = replace(s, data=replace(s.data, client_names=tuple(f"hospital {c}" for c in "abcde")))
    first = make_client(s, [0, 2, 4])
    first.keep(x=ids_of(first))
    first.commit(np.array([True, True, False]) if deferred else np.ones(3, dtype=bool))
    client = make_client(s, DECREASING, round=1)
    lost = [1, 4, 3] if deferred else [1, 3]
    who = ", ".join(f"hospital {'abcde'[k]}" if named else f"client {k}" for k in lost)
    message = rf"^{who} must have kept 'x' in an earlier exchange, but have not, or have lost it\.$"
    with pytest.raises(fs.FedstrataError, match=message):
        client.recall("x")
    with pytest.raises(fs.FedstrataError, match="must have kept 'never' in an earlier exchange"):
        client.recall("never", "x")
    assert torch.equal(make_client(s, [0, 2]).recall("x").x, column(0, 2)), "those who kept it have it"


def test_a_long_list_of_clients_that_have_lost_something_is_cut_short() -> None:
    client = make_client(make_setting(softmax_problem(), sized_data([2] * 12)), list(range(12)))
    with pytest.raises(fs.FedstrataError, match=r"^client 0, client 1, .*, client 7 and 4 more must have kept 'x'"):
        client.recall("x")


@pytest.mark.parametrize("deferred", [False, True])
def test_where_clients_may_have_kept_nothing_yet_there_is_a_default(deferred: bool) -> None:
    s = replace(setting(), deferred=deferred)
    client = make_client(s, DECREASING)
    default = column(1, 2, 3, 4, 5)
    assert torch.equal(client.kept("c", default), default)
    some = make_client(s, [2, 3])
    some.keep(c=column(-2, -3))
    some.commit(np.ones(2, dtype=bool))
    assert torch.equal(client.kept("c", default), column(1, -2, 3, 4, -3))
    with pytest.raises(fs.FedstrataError, match=r"variable c that clients keep .* as before\. Got shape \(5, 2\) and"):
        client.kept("c", default.expand(-1, 2))
    assert torch.equal(default, column(1, 2, 3, 4, 5)), "the default is not written to"


@pytest.mark.parametrize("deferred", [False, True])
def test_what_is_kept_in_a_loop_is_the_latest_of_every_client(deferred: bool) -> None:
    """Also within the exchange, and where some clients had left when the others kept theirs."""
    s = replace(setting(), deferred=deferred)
    client = make_client(s, DECREASING)
    client.keep(a=-ids_of(client))
    k = client.variables(n=0 * ids_of(client))
    for _ in client.loop(fs.Epochs(1), k):
        k.n = k.n + 1
        assert torch.equal(client.recall("a").a, -ids_of(client) if k.n[0] == 1 else k.n - 1)
        client.keep(a=k.n, b=k.n)
    assert client.recall("a").a.ravel().tolist() == STEPS
    assert client.kept("b", k.n).ravel().tolist() == STEPS
    client.commit(np.array([True, False, True, True, True]))
    kept = make_client(s, DECREASING, round=1).kept("a", column(-9, -9, -9, -9, -9))
    assert kept.ravel().tolist() == ([5, -9, 2, 2, 1] if deferred else STEPS)


@pytest.mark.parametrize("deferred", [False, True])
def test_what_only_those_still_in_the_loop_keep_is_missing_of_the_others(deferred: bool) -> None:
    client = make_client(replace(setting(), deferred=deferred), DECREASING)
    for t in client.loop(fs.Epochs(1), client.variables()):
        if t == 3:
            client.keep(late=ids_of(client))
    default = column(1, 2, 3, 4, 5)
    assert torch.equal(client.kept("late", default), column(0, 2, 3, 4, 5))
    assert torch.equal(default, column(1, 2, 3, 4, 5))
    with pytest.raises(fs.FedstrataError, match=r"^client 1, client 4, client 3 must have kept 'late'"):
        client.recall("late")


@pytest.mark.parametrize("deferred", [False, True])
def test_what_is_kept_is_a_copy(deferred: bool) -> None:
    s = replace(setting(), deferred=deferred)
    client = make_client(s, [0, 2])
    x = column(1, 2)
    client.keep(x=x)
    x.zero_()
    client.recall("x").x.mul_(0)
    assert torch.equal(client.recall("x").x, column(1, 2))
    client.commit(np.ones(2, dtype=bool))
    assert torch.equal(make_client(s, [2, 0], round=1).recall("x").x, column(2, 1))


KEPT_WRONGLY: dict[str, tuple[Any, str]] = {
    "one row": (torch.zeros(1, 2).double(), r"one row for each of 5 clients\. Got shape \(1, 2\)"),
    "more rows": (torch.zeros(7, 2).double(), r"one row for each of 5 clients\. Got shape \(7, 2\)"),
    "no rows": (torch.tensor(1.0), r"one row for each of 5 clients\. Got shape \(\)"),
    "a number": (3.0, r"one row for each of 5 clients\. Got float"),
    "a list": ([torch.zeros(5, 2)], r"one row for each of 5 clients\. Got list"),
    "narrower": (
        torch.zeros(5, 1).double(),
        r"of shape \(5, 2\) and torch.float64, as before\. Got shape \(5, 1\) and",
    ),
    "wider": (torch.zeros(5, 3).double(), r"of shape \(5, 2\) and torch.float64, as before\. Got shape \(5, 3\) and"),
    "single": (torch.zeros(5, 2), r"of shape \(5, 2\) and torch.float64, as before\. Got .* and torch.float32"),
}


@pytest.mark.parametrize("policy", [None, fs.Faults()], ids=["at once", "deferred"])
@pytest.mark.parametrize("case", KEPT_WRONGLY)
def test_what_is_kept_has_a_row_for_each_client_and_keeps_its_form(case: str, policy: fs.Faults | None) -> None:
    wrong, message = KEPT_WRONGLY[case]
    clients = fs.Clients(Simulated(setting(), 5, policy=policy), 10)

    def work(client: Client) -> torch.Tensor:
        client.keep(z=wrong if client.clock.round else torch.ones(5, 2).double())
        return ids_of(client)

    clients.begin(0)
    clients.mean(work)
    clients.begin(1)
    with pytest.raises(fs.FedstrataError, match=rf"The variable z that clients keep .*{message}.*\(in work, round 2, "):
        clients.mean(work)


def test_what_is_kept_twice_in_an_exchange_keeps_its_form() -> None:
    clients = fs.Clients(Simulated(setting(), 5, policy=fs.Faults()), 10)

    def work(client: Client) -> torch.Tensor:
        client.keep(z=torch.ones(5, 2))
        client.keep(z=torch.ones(5, 1))
        return ids_of(client)

    with pytest.raises(fs.FedstrataError, match=r"The variable z that clients keep must have the same shape and dtype"):
        clients.mean(work)


def test_state_that_a_node_has_lost_does_not_start_at_a_gradient() -> None:
    """FGDA's clients keep the server's last point; one that was left out of the first exchange has none."""
    world = SADDLES["auc, prepared, scaled"]()
    faults = fs.Faults(quorum=1, retries=0, inject=fs.Inject(drop=1.0, clients=(1,)))
    with only_before_the_first_round():
        run = fs.train(world.problem, world.data, fs.FGDA(steps=2), rounds=2, batch_size=4, faults=faults)
    assert run.summary["left_out"] == {"client 1": 4}, (
        "the query, the first estimates, two exchanges of the first round"
    )


@contextmanager
def only_before_the_first_round() -> Iterator[None]:
    """Let injected faults stop with the first round."""
    real = fs.Inject.kinds

    def kinds(self: fs.Inject, clients: np.ndarray, round: int, *when: int) -> list[str | None]:
        return real(self, clients, round, *when) if round < 0 else [None] * len(clients)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fs.Inject, "kinds", kinds)
        yield


def test_a_stamp_does_not_clash_with_a_variable_of_the_same_name() -> None:
    client = make_client(setting(), DECREASING)
    client.keep(x=ids_of(client))
    client.stamp(x=3)
    assert torch.equal(client.recall("x").x, ids_of(client))
    client.require(x=3)
    for stale in ({"x": 4}, {"y": 3}):
        with pytest.raises(LostState, match=rf"must have kept the state of {next(iter(stale))} \d in an earlier"):
            client.require(**stale)


@pytest.mark.usefixtures("registries")
@pytest.mark.parametrize("chunk", [1, 3])
def test_a_step_in_place_of_the_servers_vector_is_refused(chunk: int) -> None:
    class Careless(fs.Algorithm):
        """Moves the server's vector."""

        name = "careless"

        def round(self, s: fs.State, clients: fs.Clients) -> fs.State:
            return s._replace(x=s.x + clients.mean(self.local, s.x))

        @fs.remote
        def local(self, client: Client, x: torch.Tensor) -> torch.Tensor:
            return client.descend(x[:, :], client.draw(), 0.1) - x

    example = fs.quadratic(clients=3)
    with pytest.raises(fs.FedstrataError, match=r"must not be the server's. Begin with x.clone\(\)"):
        fs.train(example.problem, example.data, Careless(), rounds=1, batch_size=2, chunk=chunk)
