"""Work that clients do: what may be asked of them, and where an error in it came from."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

import fedstrata as fs
from cases import one_per
from clients.every import CASES, play
from clients.failing import Failing
from clients.small import column, ids_of, setting
from fedstrata.algorithms import ALGORITHMS
from fedstrata.clients import Client, Simulated, remote
from fedstrata.clients.engine import Request
from fedstrata.clients.queries import QUERIES
from fedstrata.clients.work import WorkError, is_pooled, is_remote
from fedstrata.training.states import state_of
from support import make_clients, make_setting, sized_data, smooth_example, softmax_problem

pytestmark = pytest.mark.untraced


# --- what may be asked -----------------------------------------------------------------------------------------------


@cache
def asked_by(name: str) -> list[Request]:
    """All requests that reach an engine in three rounds and if clients rejoin, also those to the server's samples."""
    requests: list[Request] = []
    real = Simulated.answers

    def answers(self: Simulated, request: Request) -> Any:
        requests.append(request)
        return real(self, request)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Simulated, "answers", answers)
        algorithm = CASES[name].algorithm
        tensors, clients = play(CASES[name], fs.Channel())
        with torch.no_grad():
            algorithm.rejoin(state_of(algorithm, tensors), clients)
    return requests


@one_per(lambda name: CASES[name].name, "name", CASES)
def test_every_method_that_clients_are_asked_for_is_remote(name: str) -> None:
    requests, kind = asked_by(name), ALGORITHMS[CASES[name].name]
    assert any(not request.query for request in requests)
    for request in requests:
        if request.query:
            assert QUERIES[request.name] is request.work
        else:
            assert is_remote(request.work), request.label
            assert getattr(kind, request.name) is request.work.__func__, "a node finds it by its name"
            assert request.label == f"{request.name} of {kind.name}"


@pytest.mark.slow
def test_every_remote_method_is_asked_for() -> None:
    """A node runs nothing that no algorithm needs."""
    asked = {r.work.__func__ for name in CASES for r in asked_by(name) if not r.query}
    marked = {m for kind in ALGORITHMS.values() for m in (getattr(kind, name) for name in dir(kind)) if is_remote(m)}
    assert asked == marked


def test_a_method_is_remote_only_if_it_is_marked() -> None:
    @remote
    def marked(client: Client) -> torch.Tensor:
        """Say so."""
        return ids_of(client)

    assert is_remote(marked) and marked.__name__ == "marked" and marked.__doc__ == "Say so."
    assert is_remote(fs.FedAvg().local) and is_remote(fs.FedAvg.local)
    for other in (fs.FedAvg().round, fs.FedAvg().check, fs.FGDA().move, lambda client: client, None, "local"):
        assert not is_remote(other)

    class Sly:
        remote = "yes"

    assert not is_remote(Sly()), "only the mark counts"


def test_a_mark_says_whether_a_method_returns_collections() -> None:
    def named() -> None: ...

    assert is_remote(remote(pool=True)(named)) and is_pooled(named) and named.__name__ == "named"
    assert is_remote(remote()(named)) and not is_pooled(named)
    assert is_remote(remote(named)) and not is_pooled(named) and not is_pooled(fs.FedAvg.local)


# --- errors ----------------------------------------------------------------------------------------------------------


X = torch.zeros(2, dtype=torch.float64)


def test_an_error_names_algorithm_method_round_and_client() -> None:
    clients = make_clients(setting(), chunk=1)
    clients.begin(6)
    cause = ZeroDivisionError("division by zero\nand a second line")
    with pytest.raises(WorkError) as failed:
        clients.mean(Failing(lambda: cause, 3).local, X)
    assert str(failed.value) == "ZeroDivisionError in local of failing, round 7, client 3: division by zero"
    assert failed.value.__cause__ is cause
    assert isinstance(failed.value, fs.FedstrataError) and failed.value.exit_code == 1


def test_an_error_of_several_clients_names_all_of_the_chunk() -> None:
    with pytest.raises(WorkError, match=r"^ValueError in local of failing, round 1, clients 1, 4: no$"):
        make_clients(setting(), chunk=2).mean(Failing(lambda: ValueError("no"), 4).local, X)
    s = make_setting(softmax_problem(), sized_data([2] * 12))
    with pytest.raises(WorkError, match=r"clients 0, 1, 2, 3, 4, 5, 6, 7 and 4 more: no$"):
        make_clients(s).mean(Failing(lambda: ValueError("no"), 4).local, X)


def test_clients_are_called_by_their_names() -> None:
    data = fs.FederatedData.from_arrays(
        [sized_data([n]).train.of_client(0) for n in (4, 3)], client_names=["north", "south"]
    )
    with pytest.raises(WorkError, match=r"clients north, south: no$"):
        make_clients(make_setting(softmax_problem(), data)).mean(Failing(lambda: ValueError("no"), 1).local, X)


@pytest.mark.parametrize("verb", ["mean", "max", "gather", "pool", "combine"])
def test_an_error_of_the_input_stays_one(verb: str) -> None:
    """A command that ends in it has another exit code."""
    clients = make_clients(setting(), chunk=5)
    cause = fs.InputError("The lr must be above 0. Got 0.")
    failing = Failing(lambda: cause, 0)
    work = failing.pooled if verb == "pool" else failing.local
    with pytest.raises(fs.InputError) as failed:
        clients.combine(("mean",), work, X) if verb == "combine" else getattr(clients, verb)(work, X)
    where = f"(in {work.__name__} of failing, round 1, clients 0, 2, 1, 4, 3)"
    assert str(failed.value) == f"The lr must be above 0. Got 0. {where}"
    assert failed.value.__cause__ is cause
    assert (type(failed.value), failed.value.exit_code) == (fs.InputError, 2)


@pytest.mark.parametrize("kind", [fs.FedstrataError, fs.Diverged, fs.MissingData, WorkError])
def test_an_error_of_the_library_keeps_its_kind(kind: type[fs.FedstrataError]) -> None:
    with pytest.raises(fs.FedstrataError, match=r"^what \(in local of failing, round 1, clients ") as failed:
        make_clients(setting()).mean(Failing(lambda: kind("what"), 0).local, X)
    assert type(failed.value) is kind


def test_an_error_before_the_first_round_says_so() -> None:
    clients = make_clients(setting(), chunk=1)
    clients.begin(-1)
    message = r"^ValueError in local of failing, the preparation before round 1, client 2: no$"
    with pytest.raises(WorkError, match=message):
        clients.mean(Failing(lambda: ValueError("no"), 2).local, X)


def test_an_error_in_a_loop_names_those_who_are_still_in_it() -> None:
    def work(client: Client) -> torch.Tensor:
        for t in client.loop(fs.Epochs(1), client.variables()):
            if t == 2:
                raise ValueError("no")
        return ids_of(client)

    with pytest.raises(WorkError, match=r"^ValueError in work, round 1, clients 0, 2: no\. Some clients have left "):
        make_clients(setting()).mean(work)


def test_a_tensor_of_the_message_that_does_not_fit_any_more_is_explained() -> None:
    """PyTorch's error does not say that some clients have left."""

    def work(client: Client, x: torch.Tensor) -> torch.Tensor:
        k = client.variables(x=x)
        for _ in client.loop(fs.Epochs(1), k):
            k.x = k.x - 0.1 * x
        return k.x - x

    message = (
        r"^RuntimeError in work, round 1, clients 0, 2, 1, 4: The size of tensor a \(4\) must match .*\. Some clients "
        r"have left the local loop: tensors of the message that it uses must be its variables$"
    )
    with pytest.raises(WorkError, match=message):
        make_clients(setting()).mean(work, column(1, 2)[:, 0])


@pytest.mark.untraced
@pytest.mark.parametrize("rounds", [1, 2])
def test_an_error_in_a_problem_names_the_run(rounds: int) -> None:
    """The check before the run only tries two and three samples."""
    done = []

    class Counts(fs.Callback):
        def on_round(self, round: int, state: Any) -> None:
            done.append(round)

    def outer(x: torch.Tensor, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
        if len(batch[0]) == 4 and len(done) == rounds - 1:
            raise KeyError("age")
        return (x * batch[0]).sum()

    problem = fs.Problem(outer, torch.zeros(4, dtype=torch.float64), name="mine")
    how: dict[str, Any] = {"rounds": 2, "batch_size": 4, "chunk": 7, "evaluate": lambda *_: {}, "callbacks": [Counts()]}
    with pytest.raises(WorkError, match=rf"^KeyError in local of fedavg, round {rounds}, clients 6, 5, .*, 0: 'age'$"):
        fs.train(problem, smooth_example()[1], fs.FedAvg(steps=1), **how)


def test_an_interruption_is_no_error_of_the_work() -> None:
    def work(client: Client) -> torch.Tensor:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_clients(setting()).mean(work)


@pytest.mark.parametrize("policy", [None, fs.Faults()], ids=["plain", "watched"])
def test_an_error_in_the_work_of_a_simulated_client_is_not_a_fault(policy: fs.Faults | None) -> None:
    """It is a bug in the method, not a client that fails."""
    clients = fs.Clients(Simulated(setting(), 1, policy=policy), 10)
    with pytest.raises(WorkError, match=r"client 3: no$"):
        clients.mean(Failing(lambda: ValueError("no"), 3).local, X)
    assert clients.faults == []


@pytest.mark.parametrize("batch_size", [2, None])
def test_a_problem_that_changes_its_batch_is_refused(batch_size: int | None) -> None:
    def outer(x: torch.Tensor, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return (x * batch[0].mul_(0.5)).sum()

    data = fs.FederatedData.from_arrays([(torch.ones(4, 3), torch.zeros(4))])
    problem = fs.Problem(outer, torch.zeros(3), name="mine")
    with pytest.raises(fs.InputError, match="outer function of the problem mine must not change its batch in place"):
        fs.train(problem, data, fs.FedAvg(), rounds=1, batch_size=batch_size)
