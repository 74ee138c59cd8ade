"""Channels: what is sent of an answer, what the server makes of it, and what its noise is worth."""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
import torch

import fedstrata as fs
from distributed_worker import VARIANTS, Case
from fedstrata.algorithms import ALGORITHMS
from fedstrata.clients.clients import Answer, Terms
from fedstrata.clients.privacy import epsilon
from fedstrata.clients.simulated import SimulatedClients
from fedstrata.core import rng
from fedstrata.problems.queries import QUESTIONS
from support import make_setting, mixture_of, shared_oracles, sized_data, smooth_example, started, without_seconds

D, LR, STEPS = 15, 0.1, 3
SIZES = [5, 8, 4, 11, 6, 9]
FEDAVG = fs.FedAvg(lr=LR, steps=STEPS, server_lr=0.8)


pytestmark = pytest.mark.usefixtures("no_pictures")


# --- one algorithm in NumPy ------------------------------------------------------------------------------------------


@cache
def squares(clients: int) -> tuple[fs.Problem, fs.FederatedData]:
    """Least squares whose clients disagree: some go far in a round and some do not."""
    draw = np.random.default_rng(0)
    pairs = [
        (draw.normal(size=(n, D)), draw.normal(size=n) + 2 * k * draw.normal()) for k, n in enumerate(SIZES[:clients])
    ]

    def outer(x: torch.Tensor, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return 0.5 * ((batch[0] @ x - batch[1]) ** 2).mean()

    x0 = torch.from_numpy(draw.normal(size=D))
    return fs.Problem(outer, x0, name="squares"), fs.FederatedData.from_arrays(pairs, name="squares")


def train(channel: fs.Channel, rounds: int = 3, clients: int = 5, **options: Any) -> fs.Run:
    problem, data = squares(clients)
    how = {"algorithm": FEDAVG, "evaluate": lambda *_: {}, "seed": 3, **options}
    return fs.train(problem, data, rounds=rounds, channel=channel, **how)


def own_change(client: int, clients: int, x: np.ndarray) -> np.ndarray:
    """What a client's steps add to x."""
    a, b = (t.numpy().astype(np.float64) for t in squares(clients)[1].train.of_client(client))
    point = x.copy()
    for _ in range(STEPS):
        point = point - LR * a.T @ (a @ point - b) / len(b)
    return point - x


def shortened(change: np.ndarray, norm: float | None) -> np.ndarray:
    length = np.sqrt(np.sum(change**2))
    return change if norm is None or length <= norm else change * (norm / length)


def compressed(channel: fs.Channel, change: np.ndarray) -> np.ndarray:
    """What arrives of a change: the share of entries that are the largest, or 255 levels from -max to max."""
    if channel.compress == "top_k":
        number = math.ceil(channel.top * len(change) - 1e-9)
        largest = sorted(range(len(change)), key=lambda i: -abs(change[i]))[:number]
        return np.array([c if i in largest else 0.0 for i, c in enumerate(change)])
    if channel.compress == "quantise":
        step = max(abs(change)) / 127
        return np.array([round(c / step) * step for c in change])
    return change


def reduced(channel: fs.Channel, rows: list[np.ndarray], sizes: np.ndarray, weighting: str) -> np.ndarray:
    """The mean, or of every coordinate the median or trimmed mean, in which no client weighs more than another."""
    if channel.reduce == "mean":
        return np.average(rows, axis=0, weights=sizes if weighting == "samples" else None)
    if channel.reduce == "median":
        return np.median(rows, axis=0)
    cut = max(1, int(channel.trim * len(rows) + 1e-9))
    return np.array([np.mean(sorted(column)[cut : len(rows) - cut]) for column in np.array(rows).T])


def reference(channel: fs.Channel, rounds: int, clients: int, weighting: str, sampled: int) -> np.ndarray:
    problem, data = squares(clients)
    x, unsent = problem.x0.numpy(), {k: np.zeros(D) for k in range(clients)}
    for r in range(rounds):
        cohort = rng.choose(rng.key_of(3, "cohort", r), clients, sampled) if sampled < clients else range(clients)
        arrived = []
        for k in cohort:
            wanted = own_change(k, clients, x) + unsent[k]
            sent = compressed(channel, wanted)
            unsent[k] = wanted - sent
            arrived.append(shortened(shortened(sent, channel.clip), channel.bound))
        x = x + 0.8 * reduced(channel, arrived, data.sizes[list(cohort)], weighting)
    return x


CHANNELS = [
    fs.Channel(clip=1.6),
    fs.Channel(bound=1.5),
    fs.Channel(clip=2.0, bound=1.5),
    fs.Channel(compress="top_k", top=0.2),
    fs.Channel(compress="top_k", top=0.25),  # 3.75 entries are 4
    fs.Channel(compress="top_k", top=0.01),  # and a part of one is one
    fs.Channel(compress="top_k", top=0.4, clip=1.5),
    fs.Channel(compress="quantise"),
    fs.Channel(compress="quantise", clip=2.0, bound=1.5),
    fs.Channel(reduce="median"),
    fs.Channel(reduce="trimmed_mean", trim=0.01),  # at least one client
    fs.Channel(reduce="trimmed_mean", trim=0.34),
    fs.Channel(reduce="trimmed_mean", trim=0.45),
    fs.Channel(reduce="median", compress="top_k", top=0.4, clip=2.0),
]


def told(channel: fs.Channel) -> str:
    """The settings of a channel that are not the default ones."""
    return " ".join(f"{k}={v}" for k, v in vars(channel).items() if v != getattr(fs.Channel(), k))


@pytest.mark.parametrize(
    ("clients", "sampled", "weighting"), [(5, 5, "uniform"), (6, 4, "uniform"), (6, 6, "samples"), (6, 3, "samples")]
)
@pytest.mark.parametrize("channel", CHANNELS, ids=told)
def test_three_rounds_are_those_of_numpy(channel: fs.Channel, clients: int, sampled: int, weighting: str) -> None:
    expected = reference(channel, 3, clients, weighting, sampled)
    plain = reference(fs.Channel(), 3, clients, weighting, sampled)
    found = train(channel, clients=clients, weighting=weighting, participation=sampled, chunk=2)
    np.testing.assert_allclose(found.x.numpy(), expected, atol=1e-9, rtol=0)
    assert np.abs(expected - plain).max() > 1e-4  # the channel does something


@pytest.mark.parametrize("clients", [5, 6])
def test_some_clients_are_clipped_and_some_are_not(clients: int) -> None:
    """Or the test above would tell little."""
    lengths = [np.linalg.norm(own_change(k, clients, squares(clients)[0].x0.numpy())) for k in range(clients)]
    assert min(lengths) < 1.5 and max(lengths) > 2.0


def test_what_compression_left_out_is_sent_later() -> None:
    """A client that changes nothing more sends the rest, the largest entries first."""
    channel = fs.Channel(compress="top_k", top=0.4)
    problem, data = squares(5)
    clients = engine(problem, data, channel)
    x, change = problem.x0, fs.FedAvg(lr=LR, steps=1)
    total = torch.zeros(D, dtype=torch.float64)
    with torch.no_grad():
        first = clients.mean(change.local, x) - x
        for r in range(1, 4):
            clients.begin(r)
            # The rate has fallen to next to nothing: what comes now was left out before.
            total += clients.mean(fs.FedAvg(lr=1e-300, steps=1).local, x) - x
        clients.begin(4)
        again = clients.mean(fs.FedAvg(lr=1e-300, steps=1).local, x) - x
    wanted = np.mean([-LR * gradient(k, x.numpy()) for k in range(5)], axis=0)
    np.testing.assert_allclose((first + total).numpy(), wanted, atol=1e-12)
    assert float((first - torch.from_numpy(wanted)).abs().max()) > 1e-2
    assert float(again.abs().max()) < 1e-14


def gradient(client: int, x: np.ndarray) -> np.ndarray:
    a, b = (t.numpy() for t in squares(5)[1].train.of_client(client))
    return a.T @ (a @ x - b) / len(b)


def test_two_answers_of_a_method_have_one_norm() -> None:
    """SCAFFOLD's clients answer with two changes; 8 bits and a norm are for both together."""
    problem, data = squares(5)
    for channel in (fs.Channel(clip=0.5), fs.Channel(bound=0.5)):
        clients = engine(problem, data, channel)
        with torch.no_grad():
            dx, dc = clients.gather(fs.Scaffold(lr=LR, steps=STEPS).local, problem.x0, torch.zeros_like(problem.x0), LR)
        np.testing.assert_allclose(torch.cat([dx, dc], 1).norm(dim=1).numpy(), 0.5, rtol=1e-9)
        own = np.array([own_change(k, 5, problem.x0.numpy()) for k in range(5)])
        # c_k is the mean gradient, -dx / (steps lr): the same direction, longer by 1 / (steps lr).
        longer = np.sqrt(1 + (1 / (STEPS * LR)) ** 2) * np.linalg.norm(own, axis=1, keepdims=True)
        np.testing.assert_allclose(dx.numpy(), own * 0.5 / longer, atol=1e-12)


def test_a_change_of_nothing_can_be_sent() -> None:
    for channel in (fs.Channel(compress="quantise", clip=1.0), fs.Channel(compress="top_k", bound=1.0)):
        problem, data = squares(5)
        clients = engine(problem, data, channel)
        with torch.no_grad():
            still = clients.mean(fs.FedAvg(lr=1e-320, steps=1).local, problem.x0)
        torch.testing.assert_close(still, problem.x0, atol=1e-14, rtol=0)


def test_a_coordinate_is_trimmed_by_the_share_in_decimals() -> None:
    """0.29 of 100 clients are 29, although 0.29 * 100 is less."""
    from fedstrata.clients.channel import robust

    rows = torch.arange(100.0, dtype=torch.float64)[:, None] ** 3
    trimmed = robust(fs.Channel(reduce="trimmed_mean", trim=0.29), rows)
    assert float(trimmed) == pytest.approx(float(rows[29:71].mean()), abs=1e-9)


# --- every algorithm -------------------------------------------------------------------------------------------------


class Recording(SimulatedClients):
    """Clients whose exchanges are written down: the method, the message, and the answers as they arrive."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.seen: list[tuple[Any, tuple[Any, ...], Answer]] = []

    def _send(self, work: Any, message: tuple[Any, ...]) -> Iterator[Answer]:
        for answer in super()._send(work, message):
            self.seen.append((work, message, answer))
            yield answer


def engine(problem: fs.Problem, data: fs.FederatedData, channel: fs.Channel, **options: Any) -> Recording:
    """Clients that stand at the start of round 0."""
    how = {"rounds": 10, "participation": 1.0, "weighting": "uniform", "chunk": 7, "batch_size": None, "seed": 0}
    rounds, participation, weighting, chunk, batch_size, seed = (options.pop(k, v) for k, v in how.items())
    setting = make_setting(problem, data, batch_size=batch_size, seed=seed, oracles=shared_oracles(problem))
    clients = Recording(setting, Terms(rounds, participation, weighting, channel, **options), chunk)
    clients.begin(0)
    return clients


MORE = [
    Case("fednest", {}, "composition"),
    Case("comfedl", {}, "robust"),
    Case("mfcgd", {}, "robust"),
    Case("coda", {"stage_steps": 4, "average": False}, "auc, prepared, scaled", clients=5),
    Case("codasca", {"stage_rounds": 2}, "auc, prepared, scaled", clients=5),
]
"""Where algorithms ask for more."""
CASES = {c.id: c for c in [*(Case(n, o) for n, o in VARIANTS), *MORE]}


def has_points(case: Case) -> bool:
    return any("point" in words.split() for words in case.algorithm.answers.values())


MOVING = [i for i, c in CASES.items() if not has_points(c)]
POINTS = [i for i, c in CASES.items() if has_points(c)]


def play(case: Case, channel: fs.Channel, chunk: int = 7) -> tuple[dict[str, torch.Tensor], Recording]:
    """Three rounds: the server's vectors, and the clients with all exchanges."""
    problem, data = case.build()
    share = 1.0 if ALGORITHMS[case.name].full_participation else 5
    clients = engine(problem, data, channel, batch_size=4, participation=share, chunk=chunk, rounds=3)
    with torch.no_grad():
        state = started(case.algorithm, clients)
        for r in range(3):
            clients.begin(r)
            state = case.algorithm.round(state, clients)
    return dict(state), clients


@cache
def plainly(name: str) -> tuple[dict[str, torch.Tensor], Recording]:
    return play(CASES[name], fs.Channel())


def close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for vector, value in expected.items():
        assert value.dtype == torch.float64
        torch.testing.assert_close(found[vector], value, atol=1e-9, rtol=1e-9, msg=lambda m, v=vector: f"{v}: {m}")


def test_all_algorithms_are_here() -> None:
    assert {c.name for c in CASES.values()} == set(ALGORITHMS)
    assert {CASES[i].name for i in POINTS} == {"adafgda", "coda", "codasca", "fgda"}
    assert {"adafgda", "coda", "fgda"} < {CASES[i].name for i in MOVING}


@pytest.mark.parametrize("name", MOVING)
def test_a_channel_that_leaves_nothing_out_changes_nothing(name: str) -> None:
    expected, _ = plainly(name)
    for channel in (fs.Channel(clip=1e9, bound=1e9), fs.Channel(compress="top_k", top=1.0)):
        close(play(CASES[name], channel)[0], expected)


@pytest.mark.parametrize("name", POINTS)
def test_points_do_not_go_through_a_channel_of_changes(name: str) -> None:
    case = CASES[name]
    problem, data = case.build()
    method = next(m for m, words in case.algorithm.answers.items() if "point" in words.split())
    wanted = rf"^A channel of changes \(.*\) cannot go through {method} of {case.name}: "
    changing = [{"clip": 1.0}, {"bound": 1.0}, {"compress": "top_k"}, {"compress": "quantise"}]
    for options in [*changing, {"clip": 1.0, "noise": 1.0}]:
        with pytest.raises(fs.InputError, match=wanted):
            fs.train(problem, data, case.algorithm, rounds=1, channel=fs.Channel(**options))


@pytest.mark.parametrize("name", POINTS)
def test_points_have_medians(name: str) -> None:
    """Of seven clients three are trimmed at either end: that is the median. It is not the mean."""
    found, same = (play(CASES[name], fs.Channel(reduce=r, trim=0.45))[0] for r in ("median", "trimmed_mean"))
    close(same, found)
    assert float((found["x"] - plainly(name)[0]["x"]).abs().max()) > 1e-4


@pytest.mark.parametrize("name", CASES)
def test_every_exchange_is_declared(name: str) -> None:
    case = CASES[name]
    table = case.algorithm.answers
    for method, words in table.items():
        known = list(inspect.signature(getattr(case.algorithm, method)).parameters)[1:]
        assert words.split() and set(words.split()) <= {*known, "zero", "point"}, method
    asked = {work.__name__ for work, *_ in exchanges(plainly(name)[1])}
    assert asked and asked <= set(table)


def exchanges(clients: Recording) -> list[tuple[Any, tuple[Any, ...], Answer]]:
    """Those of the algorithm; a problem's questions are none."""
    return [seen for seen in clients.seen if QUESTIONS.get(seen[0].__name__) is not seen[0]]


def changes_of(work: Any, message: tuple[Any, ...], answer: Answer) -> np.ndarray:
    """Every client's answer less the arguments that it is near, as one row: [clients, numbers]."""
    named = inspect.signature(work).bind(None, *message).arguments
    starts: list[Any] = []
    for word in work.__self__.answers[work.__name__].split():
        value = None if word == "zero" else named.get(word, ())
        kind = inspect.signature(work).parameters[word].kind if word != "zero" else None
        starts += list(value) if kind is inspect.Parameter.VAR_POSITIONAL else [value]
    things = answer.value if isinstance(answer.value, tuple) else (answer.value,)
    columns: list[np.ndarray] = []
    assert len(things) <= len(starts)
    for thing, start in zip(things, starts, strict=False):  # with some options an algorithm answers with less
        leaves = leaves_of(thing)
        bases = [0.0] * len(leaves) if start is None else [t.numpy().reshape(1, -1) for t in leaves_of(start)]
        columns += [t.numpy().reshape(len(answer.places), -1) - base for t, base in zip(leaves, bases, strict=True)]
    return np.concatenate(columns, axis=1)


def leaves_of(thing: Any) -> list[torch.Tensor]:
    return [thing] if isinstance(thing, torch.Tensor) else [leaf for part in thing for leaf in leaves_of(part)]


@pytest.mark.parametrize("name", MOVING)
def test_no_change_is_longer_than_the_clip(name: str) -> None:
    clip = 1e-3

    def lengths(clients: Recording) -> list[float]:
        return [np.linalg.norm(changes_of(*exchange), axis=1).max() for exchange in exchanges(clients)]

    plain = lengths(plainly(name)[1])
    assert max(plain) > 10 * clip  # there is something to clip
    for channel in (fs.Channel(clip=clip, compress="quantise"), fs.Channel(bound=clip)):
        found = lengths(play(CASES[name], channel)[1])
        assert len(found) == len(plain)
        assert clip * (1 - 1e-6) < max(found) < clip * (1 + 1e-6)


DIVIDE, ANEW = ("qfedavg", "lafedopt:"), "coda stage_steps=4 average=False on auc"
"""Algorithms that divide one answer by another, and one whose clients answer with a new y."""


@pytest.mark.parametrize("name", [i for i in MOVING if not i.startswith((*DIVIDE, ANEW))])
def test_a_clip_of_next_to_nothing_holds_the_server_where_it_is(name: str) -> None:
    """So what an answer is said to be near to is what it is near to."""
    problem, _ = CASES[name].build()
    (free, _), (held, _) = plainly(name), play(CASES[name], fs.Channel(clip=1e-9))
    for vector, start in (("x", problem.x0), ("y", problem.y0)):
        if start is not None:
            assert float((held[vector] - start).abs().max()) < 1e-4 < 1e-3 < float((free[vector] - start).abs().max())


@pytest.mark.parametrize("name", MOVING)
def test_what_is_left_out_does_not_depend_on_the_chunk(name: str) -> None:
    channel = fs.Channel(compress="top_k", top=0.05)
    few, many = (play(CASES[name], channel, chunk)[0] for chunk in (2, 7))
    close(many, few)
    assert float((few["x"] - plainly(name)[0]["x"]).abs().max()) > 1e-4


@pytest.mark.parametrize("reduce", ["median", "trimmed_mean"])
def test_a_median_does_not_protect_single_answers_or_a_maximum(reduce: str) -> None:
    problem, data = smooth_example()
    mixture, channel = mixture_of(problem, data.clients), fs.Channel(reduce=reduce)
    for algorithm, wanted in ((fs.AFL(), "gradient of afl"), (fs.DRFA(), "loss of drfa")):
        with pytest.raises(
            fs.InputError, match=rf"^A {reduce} cannot protect {wanted}, which tells the server what each"
        ):
            fs.train(mixture, data, algorithm, rounds=1, channel=channel)
    with pytest.raises(
        fs.InputError, match=rf"^A {reduce} cannot protect the elementwise maximum that local of fedlalr"
    ):
        fs.train(problem, data, fs.FedLALR(aggregate="max"), rounds=1, channel=channel)


def test_a_trimmed_mean_of_nobody_is_refused() -> None:
    with pytest.raises(fs.InputError, match="leaves out 1 clients at either end, and only 2 answered"):
        train(fs.Channel(reduce="trimmed_mean"), participation=2)


def test_an_answer_that_nobody_declared_is_refused_before_it_is_asked_for() -> None:
    problem, data = squares(5)
    clients = engine(problem, data, fs.Channel(clip=1.0))

    def work(client: Any, x: torch.Tensor) -> torch.Tensor:
        raise AssertionError("nobody may ask this")

    with pytest.raises(fs.InputError, match=r"must know what work answers with. .*answers = {'work': 'x'}"):
        clients.mean(work, problem.x0)


# --- what is sent ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "parts", "dtype", "size"), [(fs.FedAvg, 1, torch.float32, 4), (fs.Scaffold, 2, torch.float64, 8)]
)
def test_bytes_are_counted_as_they_are_sent(
    kind: type[fs.Algorithm], parts: int, dtype: torch.dtype, size: int
) -> None:
    problem, data = smooth_example(dtype)
    n, rounds, cohort = parts * len(problem.x0), 2, 4
    how: dict[str, Any] = {"rounds": rounds, "participation": cohort, "chunk": 3, "evaluate": lambda *_: {}}

    def sent(channel: fs.Channel) -> tuple[int, int]:
        run = fs.train(problem, data, kind(steps=2), channel=channel, **how)  # type: ignore[call-arg]
        return run.summary["bytes_up"], run.summary["bytes_down"]

    plain = rounds * cohort * n * size
    assert sent(fs.Channel()) == (plain, plain)
    assert sent(fs.Channel(clip=0.1, bound=0.1, noise=0.1)) == (plain, plain)
    for top, clip in ((0.34, None), (0.2, 0.1), (1.0, None)):
        entries = math.ceil(top * n - 1e-9)
        found = sent(fs.Channel(compress="top_k", top=top, clip=clip))
        assert found == (rounds * cohort * entries * (size + 4), plain)
    assert sent(fs.Channel(compress="quantise")) == (rounds * cohort * (n + size), plain)
    assert sent(fs.Channel(reduce="median")) == (plain, plain)


# --- noise -----------------------------------------------------------------------------------------------------------

WIDE = 4000


@cache
def wide() -> tuple[fs.Problem, fs.FederatedData]:
    """A problem of many numbers, so that noise has a mean and a variance."""

    def outer(x: torch.Tensor, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return 0.5 * ((x - batch[0]) ** 2).mean(0).sum()

    draw = np.random.default_rng(1)
    pairs = [(draw.normal(size=(n, WIDE)), np.zeros(n)) for n in SIZES]
    return fs.Problem(outer, torch.zeros(WIDE, dtype=torch.float64), name="wide"), fs.FederatedData.from_arrays(pairs)


def noise_of(channel: fs.Channel, rounds: int = 1, **options: Any) -> list[torch.Tensor]:
    """What noise adds to the mean of each round."""
    problem, data = wide()
    algorithm = fs.FedAvg(lr=LR, steps=2)
    means = []
    for noise in (channel.noise, 0.0):
        clients = engine(problem, data, fs.Channel(clip=channel.clip, noise=noise), **options)
        with torch.no_grad():
            found = []
            for r in range(rounds):
                clients.begin(r)
                found.append(clients.mean(algorithm.local, problem.x0))
        means.append(found)
    return [noisy - quiet for noisy, quiet in zip(*means, strict=True)]


def looks_normal(noise: torch.Tensor, deviation: float) -> None:
    """Mean, variance and fourth moment within five standard errors."""
    z = noise.numpy() / deviation
    assert abs(z.mean()) < 5 / math.sqrt(len(z))
    assert abs((z**2).mean() - 1) < 5 * math.sqrt(2 / len(z))
    assert abs((z**4).mean() - 3) < 5 * math.sqrt(96 / len(z))


@pytest.mark.parametrize("sampled", [6, 4])
def test_noise_is_normal_with_a_deviation_of_one_client(sampled: int) -> None:
    for noise in noise_of(fs.Channel(clip=0.7, noise=1.3), 2, participation=sampled):
        looks_normal(noise, 1.3 * 0.7 / sampled)


def test_noise_is_in_units_of_the_heaviest_client() -> None:
    """Where an engine weighs clients, which a run with noise does not."""
    problem, data = wide()
    noisy, quiet = (engine(problem, data, fs.Channel(clip=0.7, noise=noise)) for noise in (1.3, 0.0))
    weights = torch.tensor(SIZES, dtype=torch.float64) / sum(SIZES)
    with torch.no_grad():
        work, message = fs.FedAvg(lr=LR, steps=2).local, (problem.x0,)
        found = [clients._reduce(work, message, weights, ("mean",)) for clients in (noisy, quiet)]
    looks_normal(found[0] - found[1], 1.3 * 0.7 * max(SIZES) / sum(SIZES))


def test_noise_does_not_go_with_weights_by_samples() -> None:
    with pytest.raises(fs.InputError, match=r"^The weighting must be 'uniform' where the channel has noise"):
        train(fs.Channel(clip=1.0, noise=1.0), weighting="samples")
    train(fs.Channel(clip=1.0), rounds=1, weighting="samples")


def test_noise_is_of_its_seed_and_round_and_of_nothing_else() -> None:
    channel = fs.Channel(clip=0.7, noise=1.3)
    first, second = noise_of(channel, 2)
    for chunk in (1, 4):
        again = noise_of(channel, 2, chunk=chunk)
        torch.testing.assert_close(again, [first, second], atol=1e-12, rtol=0)
    (other,) = noise_of(channel, seed=1)
    for one, two in ((first, second), (first, other)):
        assert abs(np.corrcoef(one.numpy(), two.numpy())[0, 1]) < 5 / math.sqrt(WIDE)


def test_noise_of_two_exchanges_of_a_round_differs() -> None:
    problem, data = wide()
    clients, quiet = (engine(problem, data, fs.Channel(clip=0.7, noise=noise)) for noise in (1.0, 0.0))
    with torch.no_grad():
        algorithm = fs.FedAvg(lr=LR, steps=1)
        base = quiet.mean(algorithm.local, problem.x0)
        one, two = (clients.mean(algorithm.local, problem.x0) - base for _ in range(2))
    assert abs(np.corrcoef(one.numpy(), two.numpy())[0, 1]) < 5 / math.sqrt(WIDE)
    assert clients.counts.releases == {"2 of 6": 1}


def test_runs_with_one_seed_have_the_same_bits() -> None:
    channel = fs.Channel(clip=1.0, noise=0.5)
    one, two, other = (train(channel, seed=seed) for seed in (3, 3, 4))
    assert torch.equal(one.x, two.x)
    assert not torch.equal(one.x, other.x)


def test_a_maximum_has_no_noise() -> None:
    problem, data = smooth_example()
    channel = fs.Channel(clip=1.0, noise=1.0)
    with pytest.raises(fs.InputError, match=r"cannot cover the elementwise maximum that local of fedlalr goes into"):
        fs.train(problem, data, fs.FedLALR(aggregate="max"), rounds=1, channel=channel)
    assert fs.train(problem, data, fs.FedLALR(aggregate="mean"), rounds=1, channel=channel).summary["epsilon"] > 0


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [
        (fs.AFL, "cannot cover gradient of afl, which tells the server what each single client answers"),
        (fs.DRFA, "cannot cover local of drfa: its clients are drawn by weights"),
    ],
)
def test_what_single_clients_answer_has_no_noise(kind: type[fs.Algorithm], wanted: str) -> None:
    problem, data = smooth_example()
    channel = fs.Channel(clip=1.0, noise=1.0)
    with pytest.raises(fs.InputError, match=wanted):
        fs.train(mixture_of(problem, data.clients), data, kind(), rounds=1, channel=channel)


def test_a_problem_that_asks_single_clients_is_refused_under_noise() -> None:
    data = sized_data([6, 7, 8], classes=2)
    model = torch.nn.Linear(3, 1, dtype=torch.float64)
    channel = fs.Channel(clip=1.0, noise=1.0)
    with pytest.raises(fs.InputError, match=r"cannot cover class_counts, which tells .*give the problem what it would"):
        fs.train(fs.auc(model), data, fs.LocalSGDA(), rounds=1, channel=channel)
    assert fs.train(fs.auc(model, p=0.5), data, fs.LocalSGDA(), rounds=1, channel=channel).summary["epsilon"] > 0
    softmax = torch.nn.Linear(3, 2, dtype=torch.float64)
    with pytest.raises(fs.InputError, match="cannot cover first_loss"):
        fs.train(fs.robust(softmax), data, fs.ComFedL(), rounds=1, channel=channel)


def test_noise_does_not_cover_a_pretraining() -> None:
    before = train(fs.Channel())
    with pytest.raises(fs.InputError, match="does not cover a pre-training"):
        train(fs.Channel(clip=1.0, noise=1.0), pretrain=before)


def test_noise_and_a_pretraining_are_refused_before_either(fedstrata: Any, tmp_path: Path) -> None:
    file = tmp_path / "e.toml"
    file.write_text(
        '[data]\nclients = 4\n[model]\nname = "logreg"\n[train]\nrounds = 1\n[pretrain]\nrounds = 1\n'
        "[channel]\nclip = 1.0\nnoise = 1.0\n"
    )
    code, _, err = fedstrata("run", file, "--out", tmp_path / "run")
    assert code == 2 and "does not cover a pre-training" in err
    assert "round" not in err and not (tmp_path / "run").exists()


def test_noise_without_an_accountant_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(fs.InputError, match=r"^Noise needs an accountant: pip install 'fedstrata\[privacy\]'\.$"):
        train(fs.Channel(clip=1.0, noise=1.0))
    train(fs.Channel(clip=1.0), rounds=1)


# --- settings --------------------------------------------------------------------------------------------------------

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"compress": "8bit"}, "compress of the channel must be 'none', 'top_k' or 'quantise'. Got '8bit'."),
    ({"reduce": "max"}, "reduce of the channel must be 'mean', 'median' or 'trimmed_mean'. Got 'max'."),
    *(({name: value}, f"{name} of the channel must be a number above 0, or left out. Got {value!r}.")
      for name in ("clip", "bound") for value in (0.0, -1.0, math.inf, math.nan, "1", True)),
    *(({"top": value}, f"top of the channel must be a number above 0 and at most 1. Got {value!r}.")
      for value in (0.0, 1.1, math.nan, "1", None)),
    *(({"trim": value}, f"trim of the channel must be a number above 0 and below 0.5. Got {value!r}.")
      for value in (0.0, 0.5, "0.1")),
    *(({"delta": value}, f"delta of the channel must be a number above 0 and below 1. Got {value!r}.")
      for value in (0.0, 1.0, None)),
    *(({"noise": value, "clip": 1.0}, f"noise of the channel must be a number of at least 0. Got {value!r}.")
      for value in (-1.0, math.inf, math.nan, "1", None)),
]  # fmt: skip


@pytest.mark.parametrize(("options", "wanted"), REFUSED, ids=[str(options) for options, _ in REFUSED])
def test_a_channel_of_wrong_settings_is_refused(options: dict[str, Any], wanted: str) -> None:
    with pytest.raises(fs.InputError) as refused:
        fs.Channel(**options)
    assert str(refused.value) == f"The {wanted}"


def test_noise_needs_a_clip_and_a_mean() -> None:
    with pytest.raises(fs.InputError, match=r"^The noise of the channel is in units of its clip: set clip too"):
        fs.Channel(noise=1.0)
    with pytest.raises(fs.InputError, match=r"^The reduce of the channel must be 'mean' where there is noise"):
        fs.Channel(noise=1.0, clip=1.0, reduce="median")


@pytest.mark.parametrize("wrong", ["clip", None, {"clip": 1.0}, 1.0])
def test_another_thing_is_no_channel(wrong: Any) -> None:
    with pytest.raises(
        fs.InputError, match=r"^The channel of the run must be a Channel, e\.g\. fs\.Channel\(clip=1\.0\)\. Got "
    ):
        train(wrong)


# --- what noise is worth ---------------------------------------------------------------------------------------------


WORTH = [
    # By dp_accounting 0.6.0's RdpAccountant with REPLACE_ONE, called by hand, multipliers halved.
    (fs.Channel(clip=1.0, noise=4.0), {"1 of 10": 1}, 10, 2.165715659029443),
    (fs.Channel(clip=9.0, noise=6.0), {"1 of 10": 100}, 100, 3.2174992613767284),
    (fs.Channel(clip=1.0, noise=6.0), {"2 of 7": 5}, 7, 5.023949750348651),
    (fs.Channel(clip=1.0, noise=8.0, delta=1e-4), {"4 of 7": 3}, 7, 3.5297387000351286),
    (fs.Channel(clip=1.0, noise=8.0), {"3 of 5": 20}, 50, 1.84649598232127),
]


@pytest.mark.parametrize(("channel", "releases", "clients", "expected"), WORTH)
def test_epsilon_is_that_of_the_library(
    channel: fs.Channel, releases: dict[str, int], clients: int, expected: float
) -> None:
    assert epsilon(channel, releases, clients) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(("noise", "exchanges"), [(4.0, 1), (6.0, 10), (2.0, 3)])
def test_epsilon_is_no_less_than_that_of_the_gaussian_mechanism(noise: float, exchanges: int) -> None:
    """Balle and Wang (2018), Theorem 8: delta = Phi(1 / 2s - e s) - exp(e) Phi(-1 / 2s - e s), for a shift of 1."""
    s, phi = noise / 2 / math.sqrt(exchanges), NormalDist().cdf
    claimed = epsilon(fs.Channel(clip=1.0, noise=noise), {f"{exchanges} of 9": 1}, 9)

    def delta(e: float) -> float:
        return phi(0.5 / s - e * s) - math.exp(e) * phi(-0.5 / s - e * s)

    assert delta(claimed) < 1e-5 < delta(0.85 * claimed)  # sound, and not far from the best that can be said


def test_epsilon_falls_with_noise_and_grows_with_what_is_released() -> None:
    def worth(noise: float, releases: dict[str, int], clients: int = 5, delta: float = 1e-5) -> float:
        return epsilon(fs.Channel(clip=1.0, noise=noise, delta=delta), releases, clients)

    assert worth(4.0, {}) == 0.0
    assert 0 < worth(5.0, {"1 of 5": 10}) < worth(5.0, {"1 of 5": 11}) < worth(5.0, {"2 of 5": 11})
    assert worth(5.0, {"1 of 5": 10}) < worth(4.0, {"1 of 5": 10})
    assert worth(5.0, {"1 of 5": 10}) < worth(5.0, {"1 of 5": 10}, delta=1e-6)
    assert worth(5.0, {"1 of 5": 10}, 50) < worth(5.0, {"1 of 5": 10, "1 of 50": 1}, 50) < worth(5.0, {"1 of 5": 10})
    assert worth(5.0, {"2 of 5": 3}) == pytest.approx(worth(5.0, {"1 of 5": 6}))


def test_a_run_of_sampled_clients_tells_its_epsilon(tmp_path: Path) -> None:
    data = sized_data([2] * 100, features=2)
    problem = fs.erm(torch.nn.Linear(2, 2, dtype=torch.float64))
    channel = fs.Channel(clip=0.1, noise=6.0, delta=1e-5)
    how: dict[str, Any] = {"participation": 10, "evaluate": lambda *_: {}, "eval_every": 100, "checkpoint_every": 100}
    run = fs.train(problem, data, fs.FedAvg(steps=1), rounds=100, channel=channel, out=tmp_path / "run", **how)
    assert [row["epsilon"] for row in run.history] == [0.0, pytest.approx(3.2174992613767284, rel=1e-6)]
    assert run.summary["epsilon"] == run.history[-1]["epsilon"]
    assert run.summary["delta"] == 1e-5


def test_epsilon_grows_and_survives_a_stop(tmp_path: Path) -> None:
    channel = fs.Channel(clip=1.0, noise=4.0)
    straight = train(channel, 4, eval_every=1)
    found = [row["epsilon"] for row in straight.history]
    assert found[:2] == [0.0, pytest.approx(2.165715659029443, rel=1e-6)]
    assert found == sorted(set(found))
    train(channel, 2, eval_every=1, out=tmp_path / "run")
    resumed = train(channel, 4, eval_every=1, out=tmp_path / "run", resume=True)
    assert torch.equal(resumed.x, straight.x)
    assert without_seconds(resumed.history) == without_seconds(straight.history)
    assert without_seconds([resumed.summary]) == without_seconds([straight.summary])


def test_without_noise_there_is_no_epsilon() -> None:
    run = train(fs.Channel(clip=1.0))
    assert not {"epsilon", "delta"} & {*run.summary, *run.history[-1]}


EXCHANGES = [
    ("fedavg", {}, "example", {"1 of 7": 3}),
    ("fednest", {}, "example", {"4 of 7": 3}),
    ("fednest", {"inner_rounds": 3}, "example", {"8 of 7": 3}),
    ("fgda", {"synchronisation": "single"}, "example", {"1 of 7": 4}),  # before the first round there is one more
    ("local_sgdam", {}, "example", {"1 of 7": 4}),
    ("cdma", {}, "example", {"1 of 7": 6}),  # of two cohorts
    ("mfcgd", {}, "example", {"1 of 7": 3}),  # what is asked for before the first round is not sent
]


@pytest.mark.parametrize(
    ("name", "options", "problem", "releases"), EXCHANGES, ids=[f"{n} {o}" for n, o, *_ in EXCHANGES]
)
def test_exchanges_of_a_cohort_are_counted_together(
    name: str, options: dict[str, Any], problem: str, releases: dict[str, int]
) -> None:
    channel = fs.Channel(clip=1.0, noise=8.0, delta=1e-4)
    case = Case(name, options, problem)
    built, data = case.build()
    run = fs.train(built, data, case.algorithm, rounds=3, batch_size=4, channel=channel, evaluate=lambda *_: {})
    assert run.summary["epsilon"] == pytest.approx(epsilon(channel, releases, 7), rel=1e-12)
    if releases == {"4 of 7": 3}:
        assert run.summary["epsilon"] == pytest.approx(3.5297387000351286, rel=1e-6)


def test_epsilon_is_printed(fedstrata: Any, tmp_path: Path) -> None:
    file = tmp_path / "e.toml"
    file.write_text(
        '[data]\nclients = 4\n[model]\nname = "logreg"\n[train]\nrounds = 1\n[channel]\nclip = 1.0\nnoise = 4.0\n'
    )
    code, out, err = fedstrata("run", file)
    assert code == 0, err
    assert "epsilon" in out and "2.16" in out
    assert "epsilon" in err.splitlines()[-1]


# --- against bad clients ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compress", ["none", "top_k", "quantise"])
def test_a_client_that_answered_with_nan_once_comes_back(compress: str) -> None:
    """What is not finite is not kept for the next time."""
    pairs = [(np.full((3, 2), start), np.zeros(3)) for start in (1.0, -1.0, 2.0)]

    def outer(x: torch.Tensor, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return (x + batch[0]).sqrt().sum(1).mean()

    problem = fs.Problem(outer, torch.zeros(2, dtype=torch.float64), name="roots")
    channel = fs.Channel(compress=compress, top=0.5)
    clients = engine(problem, fs.FederatedData.from_arrays(pairs), channel, faults=fs.Faults())
    algorithm = fs.FedAvg(lr=LR, steps=1)
    with torch.no_grad():
        clients.mean(algorithm.local, problem.x0)
        assert [f.client for f in clients.faults] == [1]
        clients.mean(algorithm.local, problem.x0 + 3)
    assert [f.client for f in clients.faults] == [1]
    assert clients.counts.failed == 1


def test_one_client_that_sends_a_thousandfold_spoils_the_mean_and_nothing_else() -> None:
    data = fs.data.digits().split(fs.partition.dirichlet(1.0), clients=10, seed=0)
    problem = fs.erm(fs.models.model("logreg", (1, 8, 8), 10))
    bad = fs.Faults(inject=fs.Inject(scale=1.0, clients=(3,)))

    def accuracy(faults: fs.Faults | None, **options: Any) -> float:
        channel = fs.Channel(**options)
        how: dict[str, Any] = {"rounds": 20, "batch_size": 16, "eval_every": 20, "channel": channel, "faults": faults}
        found: float = fs.train(problem, data, fs.FedAvg(lr=0.2, steps=5), **how).summary["accuracy"]
        return found

    clean = accuracy(None)
    assert clean > 0.88
    assert accuracy(bad) < clean - 0.1
    assert accuracy(bad, clip=0.5) < clean - 0.1  # a bad client does not clip
    for options in ({"reduce": "median"}, {"reduce": "trimmed_mean", "trim": 0.1}, {"bound": 0.5}):
        assert accuracy(bad, **options) > clean - 0.05, options


# --- resume ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compress", ["top_k", "quantise"])
def test_what_was_left_out_is_remembered_when_a_run_goes_on(compress: str, tmp_path: Path) -> None:
    problem, data = smooth_example()
    channel = fs.Channel(compress=compress, top=0.2, clip=2.0)
    how: dict[str, Any] = {"participation": 3, "batch_size": 4, "channel": channel, "eval_every": 1}
    algorithm = fs.Scaffold(lr=0.2, steps=3)
    straight, alone, many = (fs.train(problem, data, algorithm, rounds=6, chunk=chunk, **how) for chunk in (2, 1, 5))
    for rounds in (2, 3, 6):
        out = {"out": tmp_path / "run", "resume": True}
        resumed = fs.train(problem, data, algorithm, rounds=rounds, chunk=2, **how, **out)
    assert torch.equal(resumed.x, straight.x)
    assert without_seconds(resumed.history) == without_seconds(straight.history)
    for other in (alone, many):
        torch.testing.assert_close(other.x, straight.x, atol=1e-10, rtol=0)


@pytest.mark.parametrize(
    ("other", "wanted"),
    [
        (fs.Channel(clip=2.0), r"channel.clip was 1.0 there and is 2.0 now"),
        (fs.Channel(), r"channel.clip was 1.0 there and is None now"),
        (fs.Channel(clip=1.0, reduce="median"), r"channel.reduce was 'mean' there and is 'median' now"),
    ],
)
def test_a_run_does_not_go_on_with_another_channel(other: fs.Channel, wanted: str, tmp_path: Path) -> None:
    train(fs.Channel(clip=1.0), 1, out=tmp_path / "run")
    with pytest.raises(fs.InputError, match=wanted):
        train(other, 2, out=tmp_path / "run", resume=True)
    train(fs.Channel(clip=1.0), 2, out=tmp_path / "run", resume=True)
