"""Channels: what is sent of an answer, and what the server makes of it."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._pytree import tree_flatten, tree_leaves

import fedstrata as fs
from cases import label, one_per
from clients.every import CASES, MEANS, SINGLE, exchanges, plainly, play
from clients.small import setting
from clients.squares import LR, STEPS, D, Recording, engine, own_change, sparse, squares, train
from fedstrata.algorithms import ALGORITHMS
from fedstrata.clients import Answer, Client, Clients, Simulated, Usage
from fedstrata.clients.channel.channel import FlatAnswer
from fedstrata.clients.channel.parcels import PARCELS
from fedstrata.clients.engine import Reduced
from fedstrata.clients.queries import QUERIES
from fedstrata.clients.reduce import robust
from fedstrata.core import rng
from support import make_setting, mixture_of, smooth_example, without_seconds

pytestmark = pytest.mark.usefixtures("no_pictures")


# --- one algorithm in NumPy ------------------------------------------------------------------------------------------


def shortened(change: np.ndarray, norm: float | None) -> np.ndarray:
    length = np.sqrt(np.sum(change**2))
    return change if norm is None or length <= norm else change * (norm / length)


def compressed(channel: fs.Channel, change: np.ndarray) -> np.ndarray:
    """Return what arrives of an update: the largest entries, or 255 levels from -max to max."""
    if channel.compress == "top_k":
        number = math.ceil(channel.top * len(change) - 1e-9)
        largest = sorted(range(len(change)), key=lambda i: -abs(change[i]))[:number]
        return np.array([c if i in largest else 0.0 for i, c in enumerate(change)])
    if channel.compress == "quantise":
        step = max(abs(change)) / 127
        return np.array([round(c / step) * step for c in change])
    return change


def reduced(channel: fs.Channel, rows: list[np.ndarray], sizes: np.ndarray, weighting: str) -> np.ndarray:
    """Return the mean, or the median or trimmed mean of every coordinate, which are not weighted."""
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


@pytest.mark.parametrize(
    ("clients", "sampled", "weighting"), [(5, 5, "uniform"), (6, 4, "uniform"), (6, 6, "samples"), (6, 3, "samples")]
)
@pytest.mark.parametrize("channel", CHANNELS, ids=label)
def test_three_rounds_are_those_of_numpy(channel: fs.Channel, clients: int, sampled: int, weighting: str) -> None:
    expected = reference(channel, 3, clients, weighting, sampled)
    plain = reference(fs.Channel(), 3, clients, weighting, sampled)
    found = train(channel, clients=clients, weighting=weighting, participation=sampled, chunk=2)
    np.testing.assert_allclose(found.x.numpy(), expected, atol=1e-9, rtol=0)
    assert np.abs(expected - plain).max() > 1e-4  # the channel does something


@pytest.mark.parametrize("clients", [5, 6])
def test_some_clients_are_clipped_and_some_are_not(clients: int) -> None:
    """Otherwise the test above would prove little."""
    lengths = [np.linalg.norm(own_change(k, clients, squares(clients)[0].x0.numpy())) for k in range(clients)]
    assert min(lengths) < 1.5 and max(lengths) > 2.0


def test_what_compression_dropped_is_sent_later() -> None:
    """A client whose updates are zero from now on sends the rest, the largest entries first."""
    channel = fs.Channel(compress="top_k", top=0.4)
    problem, data = squares(5)
    clients = engine(problem, data, channel)
    x, change = problem.x0, fs.FedAvg(lr=LR, steps=1)
    total = torch.zeros(D, dtype=torch.float64)
    with torch.no_grad():
        first = clients.mean(change.local, x)
        for r in range(1, 4):
            clients.begin(r)
            # The rate has fallen to next to nothing: what comes now was left out before.
            total += clients.mean(fs.FedAvg(lr=1e-300, steps=1).local, x)
        clients.begin(4)
        again = clients.mean(fs.FedAvg(lr=1e-300, steps=1).local, x)
    wanted = np.mean([-LR * gradient(k, x.numpy()) for k in range(5)], axis=0)
    np.testing.assert_allclose((first + total).numpy(), wanted, atol=1e-12)
    assert float((first - torch.from_numpy(wanted)).abs().max()) > 1e-2
    assert float(again.abs().max()) < 1e-14


def gradient(client: int, x: np.ndarray) -> np.ndarray:
    a, b = (t.numpy() for t in squares(5)[1].train.of_client(client))
    return a.T @ (a @ x - b) / len(b)


def test_two_answers_of_a_method_have_one_norm() -> None:
    """SCAFFOLD's clients answer with two updates; a norm is taken over both."""
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


@pytest.mark.parametrize("sampled", [1.0, 3], ids=["all", "some"])
@pytest.mark.parametrize("other", [torch.ones(1, 3).double(), torch.ones(1, 2).float()], ids=["size", "dtype"])
def test_a_method_that_answers_in_two_sizes_is_named_if_its_errors_are_kept(
    other: torch.Tensor, sampled: float | int
) -> None:
    """Some clients may have an error to add and others none."""

    def local(client: Client, first: bool) -> torch.Tensor:
        return (torch.ones(1, 2).double() if first else other).expand(len(client), -1)

    clients = engine(*squares(5), fs.Channel(compress="quantise"), participation=sampled)
    clients.mean(local, True)
    everyone = clients.with_cohort(np.arange(5))
    message = (
        r"\. Got shape \(5, [23]\) and .*: all answers of local must have one size .*\(in local, round 1, clients "
    )
    with pytest.raises(fs.FedstrataError, match=message):
        everyone.mean(local, False)


def test_an_update_of_zero_can_be_sent() -> None:
    for channel in (fs.Channel(compress="quantise", clip=1.0), fs.Channel(compress="top_k", bound=1.0)):
        problem, data = squares(5)
        clients = engine(problem, data, channel)
        with torch.no_grad():
            still = clients.mean(fs.FedAvg(lr=1e-320, steps=1).local, problem.x0)
        assert float(still.abs().max()) < 1e-14


def test_a_coordinate_is_trimmed_by_the_share_in_decimals() -> None:
    """0.29 of 100 clients are 29, although 0.29 * 100 < 29 in floating point."""
    rows = torch.arange(100.0, dtype=torch.float64)[:, None] ** 3
    answers = Reduced([rows], tree_flatten(rows)[1], ("mean",), Usage(), np.ones(100, dtype=bool))
    trimmed = robust(fs.Channel(reduce="trimmed_mean", trim=0.29), answers).tree
    assert float(trimmed) == pytest.approx(float(rows[29:71].mean()), abs=1e-9)


# --- every algorithm -------------------------------------------------------------------------------------------------


def close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for vector, value in expected.items():
        assert value.dtype == torch.float64
        torch.testing.assert_close(found[vector], value, atol=1e-9, rtol=1e-9, msg=lambda m, v=vector: f"{v}: {m}")


def x_of(state: dict[str, torch.Tensor]) -> torch.Tensor:
    """The model; the state of layered algorithms begins with it."""
    return state["x"] if "x" in state else state["h.0"]


def moved(found: dict[str, torch.Tensor], name: str) -> float:
    """How far x is from that of a run without a channel."""
    return float((x_of(found) - x_of(plainly(name)[0])).abs().max())


def problem_class(name: str) -> tuple[Any, ...]:
    """Return what kind of problem the algorithm of a case solves."""
    kind = ALGORITHMS[CASES[name].name]
    return kind.levels, kind.dual, kind.inner_mean, kind.mixture


def method(name: str) -> str:
    """Return the algorithm of a case."""
    return CASES[name].name


def test_all_algorithms_are_here() -> None:
    assert {c.name for c in CASES.values()} == set(ALGORITHMS)
    assert {CASES[i].name for i in MEANS} == set(ALGORITHMS) - set(SINGLE)


EVERY = [
    fs.Channel(clip=1e-3),
    fs.Channel(bound=1e-3),
    fs.Channel(compress="top_k", top=0.3),
    fs.Channel(compress="quantise"),
    fs.Channel(compress="quantise", clip=1e-2, bound=1e-3, reduce="median"),
    fs.Channel(reduce="median"),
    fs.Channel(reduce="trimmed_mean", trim=0.25),
    fs.Channel(clip=1e-3, noise=0.5),
]


@one_per(method, "name, channel", MEANS, EVERY)
def test_every_channel_works_with_every_algorithm_that_takes_means(name: str, channel: fs.Channel) -> None:
    expected, plain = plainly(name)
    if channel.noise and CASES[name].build()[0].query is not None:
        with pytest.raises(fs.InputError, match=r"cannot protect (class_counts|first_loss), which shows the server"):
            play(CASES[name], channel)
        return
    found, clients = play(CASES[name], channel)
    assert {k: v.shape for k, v in found.items()} == {k: v.shape for k, v in expected.items()}
    assert all(bool(torch.isfinite(v).all()) for v in found.values())
    assert moved(found, name) > 1e-6, "the channel does something"
    asked = [(r.name, r.exchange, r.cohort.tolist()) for r, _ in exchanges(plain)]
    assert [(r.name, r.exchange, r.cohort.tolist()) for r, _ in exchanges(clients)] == asked
    assert clients.usage.bytes_up == plain.usage.bytes_up + sum(saved(channel, a) for _, a in exchanges(plain))
    released = sum(int(kind.split()[0]) * n for kind, n in clients.engine.ledger.releases.items())
    assert released == (sum(updates_of(answer).size > 0 for _, answer in exchanges(plain)) if channel.noise else 0)


def saved(channel: fs.Channel, answer: Answer) -> int:
    """How many bytes more a channel sends of an answer in float64; below zero where it compresses."""
    clients, n = updates_of(answer).shape
    if channel.compress == "top_k":
        return clients * (math.ceil(channel.top * n - 1e-9) * 12 - 8 * n)
    return clients * (n + 8 * min(n, 1) - 8 * n) if channel.compress == "quantise" else 0


@one_per(problem_class, "name", CASES)
def test_a_channel_that_drops_nothing_changes_nothing(name: str) -> None:
    expected, _ = plainly(name)
    for channel in (fs.Channel(clip=1e9, bound=1e9), fs.Channel(compress="top_k", top=1.0)):
        close(play(CASES[name], channel)[0], expected)


@one_per(problem_class, "name", MEANS)
def test_every_mean_may_be_a_median(name: str) -> None:
    """Of seven clients three are trimmed at either end, of five two: that is the median. It is not the mean."""
    channels = fs.Channel(reduce="median"), fs.Channel(reduce="trimmed_mean", trim=0.45)
    found, same = (play(CASES[name], channel)[0] for channel in channels)
    close(same, found)
    assert moved(found, name) > 1e-4


def updates_of(answer: Answer) -> np.ndarray:
    """Every client's answer as one row: [clients, numbers]."""
    leaves = tree_leaves(answer.value)
    return np.concatenate([leaf.numpy().reshape(len(answer.places), -1) for leaf in leaves], axis=1)


@pytest.mark.parametrize(
    "channel", [{"compress": "top_k"}, {"clip": 1.0}, {"bound": 1.0}, {"reduce": "median"}], ids=str
)
def test_an_answer_without_tensors_passes_any_channel(channel: dict[str, Any]) -> None:
    clients = fs.Clients(Simulated(setting(), 5, fs.Channel(**channel)), 10)
    assert clients.mean(lambda client: ()) == () and clients.usage.bytes_up == 0


@one_per(problem_class, "name", CASES)
def test_no_update_is_longer_than_the_clip(name: str) -> None:
    clip = 1e-3

    def lengths(clients: Recording) -> list[float]:
        return [np.linalg.norm(updates_of(answer), axis=1).max() for _, answer in exchanges(clients)]

    plain = lengths(plainly(name)[1])
    assert max(plain) > 10 * clip  # there is something to clip
    for channel in (fs.Channel(clip=clip, compress="quantise"), fs.Channel(bound=clip)):
        found = lengths(play(CASES[name], channel)[1])
        assert len(found) == len(plain)
        assert clip * (1 - 1e-6) < max(found) < clip * (1 + 1e-6)


DIVIDE = ("qfedavg", "lafedopt:")
"""Algorithms that divide one answer by another: what clips both changes nothing."""


@one_per(problem_class, "name", [i for i in CASES if not i.startswith(DIVIDE)])
def test_a_clip_of_next_to_nothing_holds_the_server_where_it_is(name: str) -> None:
    """So no client answers with a point: clipping it would pull the server to zero."""
    problem, _ = CASES[name].build()
    (free, _), (held, _) = plainly(name), play(CASES[name], fs.Channel(clip=1e-9))
    assert float((x_of(held) - problem.x0).abs().max()) < 1e-4 < 1e-3 < float((x_of(free) - problem.x0).abs().max())
    if problem.y0 is not None:
        assert float((held["y"] - problem.y0).abs().max()) < 1e-4 < 1e-3 < float((free["y"] - problem.y0).abs().max())


@one_per(problem_class, "name", CASES)
def test_what_is_dropped_does_not_depend_on_the_chunk(name: str) -> None:
    channel = fs.Channel(compress="top_k", top=0.05)
    few, many = (play(CASES[name], channel, chunk)[0] for chunk in (2, 7))
    close(many, few)
    assert moved(few, name) > 1e-4


@pytest.mark.parametrize("reduce", ["median", "trimmed_mean"])
def test_a_median_does_not_protect_single_answers_or_a_maximum(reduce: str) -> None:
    problem, data = smooth_example()
    mixture, channel = mixture_of(problem, data.clients), fs.Channel(reduce=reduce)
    for algorithm, wanted in ((fs.AFL(), "gradient of afl"), (fs.DRFA(), "loss of drfa")):
        with pytest.raises(
            fs.InputError,
            match=rf"^A {reduce} cannot protect {wanted}, which shows the server the answer of every single client\.",
        ):
            fs.train(mixture, data, algorithm, rounds=1, channel=channel)
    message = rf"^The {reduce} cannot protect the elementwise maximum of what local of fedlalr returns\."
    with pytest.raises(fs.InputError, match=message):
        fs.train(problem, data, fs.FedLALR(aggregate="max"), rounds=1, channel=channel)


def test_a_trimmed_mean_of_no_clients_is_refused() -> None:
    with pytest.raises(fs.InputError, match="drops 1 of the clients at each end, but only 2 answered"):
        train(fs.Channel(reduce="trimmed_mean"), participation=2)


def test_answers_of_any_work_go_through_a_channel() -> None:
    """They are updates whatever the method is."""
    problem, data = squares(5)

    def work(client: Client, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return 3 * torch.ones_like(x[:, :1]), 4 * torch.ones_like(x[:, :1])

    for channel in (fs.Channel(clip=1.0), fs.Channel(bound=1.0)):
        three, four = engine(problem, data, channel).mean(work, problem.x0)
        assert (float(three), float(four)) == (pytest.approx(0.6), pytest.approx(0.8))


@pytest.mark.parametrize(
    ("channel", "expected"),
    [
        (fs.Channel(clip=6.0), [3.6, 4.8]),
        (fs.Channel(bound=6.0), [3.6, 4.8]),
        (fs.Channel(compress="top_k", top=0.5), [0, 8]),
        (fs.Channel(compress="quantise"), [95 * 8 / 127, 8]),
    ],
    ids=label,
)
def test_whole_numbers_go_through_a_channel_too(channel: fs.Channel, expected: list[float]) -> None:
    """They become floats: rounded ones would be biased."""

    def work(client: Client) -> torch.Tensor:
        return torch.tensor([[6, 8]]).expand(len(client), 2)

    found = engine(*squares(5), channel).gather(work)
    assert found.dtype == torch.float64
    assert found.tolist() == [pytest.approx(expected)] * 5


def test_answers_to_queries_do_not_go_through_a_channel() -> None:
    """The problem needs the exact numbers."""
    problem, data = smooth_example()
    counts = engine(problem, data, fs.Channel(clip=1e-3, bound=1e-3)).gather(QUERIES["class_counts"])
    assert counts.sum(1).tolist() == data.sizes.tolist()


# --- parcels ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("top", [0.01, 0.3, 1.0])
@pytest.mark.parametrize("compress", PARCELS)
@pytest.mark.parametrize("n", [0, 1, 7])
def test_a_parcel_has_the_layout_that_is_checked_where_it_arrives(
    n: int, compress: str, top: float, dtype: torch.dtype
) -> None:
    channel = fs.Channel(**sparse(compress, top))
    updates = torch.randn(3, n, dtype=dtype, generator=torch.Generator().manual_seed(1))
    parcel = PARCELS[compress].pack(updates, channel)
    layout = PARCELS[compress].layout(n, dtype, channel)
    assert {name: (tuple(t.shape[1:]), t.dtype) for name, t in parcel.tensors.items()} == layout
    assert list(parcel.tensors) == list(layout)
    assert all(len(t) == 3 for t in parcel.tensors.values())
    assert parcel.nbytes == 3 * sum(math.prod(shape) * kind.itemsize for shape, kind in layout.values())
    arrived = parcel.unpack()
    assert (arrived.shape, arrived.dtype) == (updates.shape, dtype)
    for row, found in zip(updates.numpy(), arrived.numpy(), strict=True):
        wanted = compressed(channel, row) if n else row
        np.testing.assert_allclose(found, wanted, atol=1e-6 if dtype == torch.float32 else 1e-12)
    for factors in (0.5, torch.tensor([[0.5], [2.0], [0.0]], dtype=dtype)):
        scaled = parcel.scaled(factors)
        torch.testing.assert_close(scaled.unpack(), arrived * factors)
        assert {name: (tuple(t.shape[1:]), t.dtype) for name, t in scaled.tensors.items()} == layout
    torch.testing.assert_close(parcel.unpack(), arrived, rtol=0, atol=0)  # scaling makes another parcel


def test_an_answer_is_flattened_and_restored() -> None:
    single, double = torch.arange(6.0).reshape(2, 3), torch.arange(8.0, dtype=torch.float64).reshape(2, 2, 2)
    answer = single, (double, torch.tensor([7, -7])), double[:, 0, :0]
    flat = FlatAnswer(answer)
    assert flat.updates.dtype == torch.float64
    assert flat.updates.tolist() == [[0, 1, 2, 0, 1, 2, 3, 7], [3, 4, 5, 4, 5, 6, 7, -7]]
    first, (second, third), nothing = flat.restore(2 * flat.updates)
    assert torch.equal(first, 2 * single) and first.dtype == torch.float32
    assert torch.equal(second, 2 * double) and torch.equal(third, torch.tensor([14.0, -14.0]).double())
    assert nothing.shape == (2, 0)
    assert FlatAnswer(single).updates.dtype == torch.float32
    assert FlatAnswer(torch.tensor([[True], [False]])).updates.tolist() == [[1.0], [0.0]]
    assert torch.equal(FlatAnswer(single).restore(single), single)


@pytest.mark.parametrize("channel", [fs.Channel(clip=2.5), fs.Channel(bound=2.5)], ids=["clip", "bound"])
def test_whole_numbers_are_not_truncated(channel: fs.Channel) -> None:
    problem, data = squares(3)
    clients = Clients(Simulated(make_setting(problem, data), 1, channel), 1)
    assert clients.mean(lambda client: torch.full((len(client), 1), 3)).tolist() == [2.5]


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
def test_a_channel_with_wrong_settings_is_refused(options: dict[str, Any], wanted: str) -> None:
    with pytest.raises(fs.InputError) as refused:
        fs.Channel(**options)
    assert str(refused.value) == f"The {wanted}"


def test_noise_needs_a_clip_and_a_mean() -> None:
    with pytest.raises(fs.InputError, match=r"^The noise of the channel is in units of its clip: set clip too"):
        fs.Channel(noise=1.0)
    with pytest.raises(fs.InputError, match=r"^The reduce of the channel must be 'mean' if there is noise"):
        fs.Channel(noise=1.0, clip=1.0, reduce="median")


@pytest.mark.parametrize("wrong", ["clip", None, {"clip": 1.0}, 1.0])
def test_a_value_that_is_not_a_channel_is_refused(wrong: Any) -> None:
    with pytest.raises(
        fs.InputError, match=r"^The channel of the run must be a Channel, e\.g\. fs\.Channel\(clip=1\.0\)\. Got "
    ):
        train(wrong)


# --- against bad clients ---------------------------------------------------------------------------------------------


@cache
def roots() -> tuple[fs.Problem, fs.FederatedData]:
    """A problem on which the gradient of client 1 is NaN at zero, and finite above 1."""

    def outer(x: torch.Tensor, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return (x + batch[0]).sqrt().sum(1).mean()

    pairs = [(np.full((3, 2), start), np.zeros(3)) for start in (1.0, -1.0, 2.0)]
    return fs.Problem(outer, torch.zeros(2, dtype=torch.float64), name="roots"), fs.FederatedData.from_arrays(pairs)


@pytest.mark.parametrize("compress", ["none", "top_k", "quantise"])
def test_a_client_that_answered_with_nan_once_comes_back(compress: str) -> None:
    """What is not finite is not kept for the next update."""
    problem, data = roots()
    clients = engine(problem, data, fs.Channel(**sparse(compress, 0.5)), faults=fs.Faults())
    algorithm = fs.FedAvg(lr=LR, steps=1)
    with torch.no_grad():
        clients.mean(algorithm.local, problem.x0)
        assert [f.client for f in clients.faults] == [1]
        clients.mean(algorithm.local, problem.x0 + 3)
    assert [f.client for f in clients.faults] == [1]
    assert clients.usage.failed == 1


@pytest.mark.parametrize("compress", ["none", "top_k", "quantise"])
def test_a_client_that_answered_with_nan_comes_back_even_if_a_median_hides_it(compress: str) -> None:
    """Without a policy for faults, all clients keep what they kept."""
    problem, data = roots()
    clients = engine(problem, data, fs.Channel(**sparse(compress, 0.5), reduce="median"))
    local = fs.FedAvg(lr=LR, steps=1).local
    with torch.no_grad():
        medians = [clients.mean(local, x) for x in (problem.x0, problem.x0 + 3)]
    finite = [np.isfinite(updates_of(answer)).all(1) for _, answer in exchanges(clients)]
    assert finite[0].tolist() == [True, False, True] and finite[1].all()
    assert all(bool(torch.isfinite(median).all()) for median in medians)


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize("compress", ["top_k", "quantise"])
def test_what_compression_dropped_survives_a_resume(compress: str, tmp_path: Path) -> None:
    problem, data = smooth_example()
    channel = fs.Channel(**sparse(compress, 0.2), clip=2.0)
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
        (fs.Channel(clip=2.0), r"channel.clip was 1.0 and is now 2.0"),
        (fs.Channel(), r"channel.clip was 1.0 and is now None"),
        (fs.Channel(clip=1.0, reduce="median"), r"channel.reduce was 'mean' and is now 'median'"),
    ],
)
def test_a_run_is_not_resumed_with_another_channel(other: fs.Channel, wanted: str, tmp_path: Path) -> None:
    train(fs.Channel(clip=1.0), 1, out=tmp_path / "run")
    with pytest.raises(fs.InputError, match=wanted):
        train(other, 2, out=tmp_path / "run", resume=True)
    train(fs.Channel(clip=1.0), 2, out=tmp_path / "run", resume=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top": 0.5}, r"^The top of the channel applies only with compress = 'top_k'\. Got 0\.5 with"),
        ({"top": 0.5, "compress": "quantise"}, r"^The top of the channel applies only with compress = 'top_k'\."),
        ({"trim": 0.3}, r"^The trim of the channel applies only with reduce = 'trimmed_mean'\. Got 0\.3 with"),
        ({"trim": 0.3, "reduce": "median"}, r"^The trim of the channel applies only with reduce = 'trimmed_mean'\."),
        ({"delta": 1e-6, "clip": 1.0}, r"^The delta of the channel applies only with noise above 0: .* Got 1e-06 with"),
    ],
)
def test_options_that_would_do_nothing_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(fs.InputError, match=message):
        fs.Channel(**options)
