"""What happens inside local steps: reports reach listeners, and cost nothing without them."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedstrata as fs
from fedstrata.algorithms import ALGORITHMS
from fedstrata.clients import Client
from fedstrata.core.clock import Clock
from fedstrata.training.callbacks import Callback, Reports, Titled
from support import sized_data, smooth_example, softmax_problem

LALR: dict[str, Any] = {"lr": 0.05, "beta2": 0.9, "eps": 1e-3}


class Watcher(Callback):
    """Keeps what every local step reports, as it is: (round, step, client) -> vectors by name; rounds from 1."""

    def __init__(self) -> None:
        self.seen: dict[tuple[int, int, int], dict[str, torch.Tensor]] = {}

    def on_local_step(self, clock: Clock, ids: np.ndarray, reports: Reports) -> None:
        values = {name: value().clone() for name, value in reports.items()}
        for c, k in enumerate(ids):
            key = (clock.round + 1, clock.step + 1, int(k))
            assert key not in self.seen
            self.seen[key] = {name: value[c] for name, value in values.items()}


def watched(
    algorithm: fs.Algorithm, *callbacks: Callback, rounds: int = 3, example: Any = None, **options: Any
) -> tuple[fs.Run, Watcher]:
    """A short run, with a watcher besides the callbacks."""
    problem, data = smooth_example() if example is None else example
    watcher = Watcher()
    options = {"batch_size": 4, "chunk": 3, "evaluate": lambda *_: {"loss": 0.0}, **options}
    run = fs.train(problem, data, algorithm, rounds=rounds, callbacks=[watcher, *callbacks], **options)
    return run, watcher


def of_rounds(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [r for r in rows if "step" not in r]


def of_steps(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [r for r in rows if "step" in r]


def expected_norms(watcher: Watcher, name: str, clients: list[int], rounds: list[int]) -> list[dict[str, Any]]:
    keys = sorted((r, k, step) for r, step, k in watcher.seen if k in clients and r in rounds)
    return [
        {"round": r, "client": k, "step": t, name: float((watcher.seen[r, t, k][name].numpy() ** 2).sum())}
        for r, k, t in keys
    ]


def assert_same_rows(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> None:
    assert len(ours) == len(theirs)
    for mine, other in zip(ours, theirs, strict=True):
        assert mine == pytest.approx(other, rel=1e-10)


# --- norms -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [3, fs.Epochs(1), fs.Interval(2, 2.0)], ids=str)
def test_squared_norms_of_listed_clients_in_every_local_step(steps: int | fs.Epochs | fs.Interval) -> None:
    diagnostics = fs.Diagnostics(norms=["vhat"], clients=[0, 5, 6])
    _, watcher = watched(fs.FedLALR(steps=steps, **LALR), diagnostics)
    expected = expected_norms(watcher, "vhat", [0, 5, 6], [1, 2, 3])
    assert len(expected) > 3 * 3 and len({r["vhat"] for r in expected}) > 9
    assert_same_rows(of_steps(diagnostics.rows), expected)
    assert all(list(r) == ["round", "client", "step", "vhat"] for r in of_steps(diagnostics.rows))


def test_clients_with_more_data_take_more_rows_of_epochs() -> None:
    diagnostics = fs.Diagnostics(norms=["vhat"], clients=[0, 6])
    watched(fs.FedLALR(steps=fs.Epochs(1), **LALR), diagnostics, rounds=1, sampling="epochs")
    own = {k: [r["step"] for r in of_steps(diagnostics.rows) if r["client"] == k] for k in (0, 6)}
    assert own == {0: [1, 2], 6: [1, 2, 3, 4, 5, 6]}, "5 and 23 samples in batches of 4"
    assert [r["local_steps"] for r in of_rounds(diagnostics.rows)] == [6]


def test_a_number_of_clients_is_the_lowest_that_take_part() -> None:
    diagnostics = fs.Diagnostics(norms=["vhat"], clients=2)
    _, watcher = watched(fs.FedLALR(steps=2, **LALR), diagnostics, rounds=5, participation=3, chunk=1)
    followed = []
    for r in range(1, 6):
        there = sorted({k for number, _, k in watcher.seen if number == r})
        assert len(there) == 3
        mine = [row for row in of_steps(diagnostics.rows) if row["round"] == r]
        assert_same_rows(mine, expected_norms(watcher, "vhat", there[:2], [r]))
        followed.append(there[:2])
    assert len({tuple(f) for f in followed}) > 1, "the cohorts differ"


def test_a_listed_client_has_rows_only_where_it_takes_part() -> None:
    diagnostics = fs.Diagnostics(norms=["vhat"], clients=[2])
    _, watcher = watched(fs.FedLALR(steps=2, **LALR), diagnostics, rounds=6, participation=3)
    rounds = {r for r, _, k in watcher.seen if k == 2}
    assert 0 < len(rounds) < 6
    assert {row["round"] for row in of_steps(diagnostics.rows)} == rounds
    assert [row["round"] for row in of_rounds(diagnostics.rows)] == [1, 2, 3, 4, 5, 6]


def test_rounds_can_be_chosen() -> None:
    diagnostics = fs.Diagnostics(norms=["vhat"], clients=[1], rounds=[2, 4], rates=True)
    _, watcher = watched(fs.FedLALR(steps=2, **LALR), diagnostics, rounds=5)
    assert_same_rows(of_steps(diagnostics.rows), expected_norms(watcher, "vhat", [1], [2, 4]))
    assert [r["round"] for r in of_rounds(diagnostics.rows) if "rate" in r] == [2, 4]
    assert [r["local_steps"] for r in of_rounds(diagnostics.rows)] == [2] * 5


def test_norms_are_those_of_a_hand_written_amsgrad() -> None:
    problem, data = softmax_problem(), sized_data([9])
    batch = data.train.of_client(0)
    x, m = problem.x0.clone(), torch.zeros_like(problem.x0)
    vhat = torch.full_like(x, LALR["eps"] ** 2)
    expected = []
    for r in (1, 2):
        v = vhat
        for k in range(1, 5):
            x = x.detach().requires_grad_()
            (g,) = torch.autograd.grad(problem.outer(x, batch), x)
            m, v = 0.9 * m + 0.1 * g, 0.9 * v + 0.1 * g * g
            vhat = torch.maximum(vhat, v)
            x = x.detach() - 0.05 * m / vhat.sqrt()
            expected.append({"round": r, "client": 0, "step": k, "vhat": float(vhat @ vhat)})
    diagnostics = fs.Diagnostics(norms=["vhat"], clients=1)
    watched(fs.FedLALR(steps=4, **LALR), diagnostics, rounds=2, example=(problem, data), batch_size=None)
    assert_same_rows(of_steps(diagnostics.rows), expected)


def test_several_vectors_can_be_followed() -> None:
    diagnostics = fs.Diagnostics(norms=["v", "rate"], clients=[3])
    _, watcher = watched(fs.LaFedOPT(lr=0.01, steps=2), diagnostics, rounds=2)
    both = zip(*(expected_norms(watcher, name, [3], [1, 2]) for name in ("v", "rate")), strict=True)
    assert_same_rows(of_steps(diagnostics.rows), [{**a, **b} for a, b in both])


@pytest.mark.parametrize("algorithm", [fs.FedLALR(steps=2), fs.LocalAMSGrad(steps=2), fs.LaFedOPT(steps=2)], ids=str)
def test_chunks_of_any_size_report_the_same(algorithm: fs.Algorithm) -> None:
    name = "vhat" if isinstance(algorithm, fs.FedLALR) else "v"
    found = []
    for chunk in (1, 2, 7):
        diagnostics = fs.Diagnostics(norms=[name], clients=[0, 4], rates=True)
        watched(algorithm, diagnostics, chunk=chunk, participation=6)
        found.append(diagnostics.rows)
    assert len(found[0]) > 3
    for other in found[1:]:
        assert_same_rows(other, found[0])


# --- local steps and rates -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", [fs.FedLALR, fs.FedAvg, fs.LocalAdaAlter])
def test_local_steps_follow_an_interval(algorithm: Any) -> None:
    """Also of an algorithm that reports nothing."""
    diagnostics = fs.Diagnostics()
    watched(algorithm(steps=fs.Interval(2, 2.0)), diagnostics, rounds=9, batch_size=2, chunk=7)
    assert diagnostics.rows == [
        {"round": r, "local_steps": k} for r, k in enumerate([2, 3, 3, 4, 4, 4, 4, 5, 5], start=1)
    ]


def test_rates_are_medians_over_coordinates_in_the_last_step() -> None:
    diagnostics = fs.Diagnostics(rates=True)
    _, watcher = watched(fs.FedLALR(steps=3, **LALR), diagnostics, participation=5)
    for row in of_rounds(diagnostics.rows):
        last = [v["vhat"].numpy() for (r, t, _), v in watcher.seen.items() if r == row["round"] and t == 3]
        assert len(last) == 5
        rates = np.array([np.sort(LALR["lr"] / np.sqrt(vhat))[(vhat.size - 1) // 2] for vhat in last])
        expected = {"rate": rates.mean(), "rate_least": rates.min(), "rate_most": rates.max()}
        expected["rate_spread"] = np.sqrt(((rates - rates.mean()) ** 2).mean()) / rates.mean()
        assert row == pytest.approx({"round": row["round"], "local_steps": 3, **expected}, rel=1e-10)
        assert row["rate_least"] < row["rate"] < row["rate_most"]


def test_the_last_step_is_each_clients_own() -> None:
    """With epochs clients stop at different steps; the rate of each is that of its own last one."""
    diagnostics = fs.Diagnostics(rates=True)
    _, watcher = watched(fs.FedLALR(steps=fs.Epochs(1), **LALR), diagnostics, rounds=1, chunk=7, sampling="epochs")
    last: dict[int, float] = {}
    for (_, _, k), v in sorted(watcher.seen.items()):
        last[k] = float(np.sort(v["rate"].numpy())[(v["rate"].numel() - 1) // 2])
    assert len(last) == 7 and len({t for _, t, _ in watcher.seen}) == 6
    (row,) = diagnostics.rows
    assert row["rate"] == pytest.approx(np.mean(list(last.values())), rel=1e-10)
    assert row["rate_least"] == pytest.approx(min(last.values()), rel=1e-10)


def spread(data: fs.FederatedData, **options: Any) -> list[float]:
    diagnostics = fs.Diagnostics(rates=True)
    example = softmax_problem(), data
    watched(fs.FedLALR(steps=2, **LALR), diagnostics, example=example, batch_size=None, **options)
    return [row["rate_spread"] for row in of_rounds(diagnostics.rows)]


@pytest.mark.parametrize("chunk", [1, 2, 4])
def test_clients_that_are_the_same_have_no_spread(chunk: int) -> None:
    one = sized_data([8])
    pair = tuple(a.numpy() for a in one.train.of_client(0))
    assert spread(one) == [0.0, 0.0, 0.0]
    assert spread(fs.FederatedData.from_arrays([pair] * 4, classes=2), chunk=chunk) == pytest.approx([0] * 3, abs=1e-12)
    assert min(spread(sized_data([8, 8, 8, 8]), chunk=chunk)) > 0.01


@pytest.mark.parametrize("aggregate", ["mean", "max"])
def test_local_amsgrad_has_one_rate_for_all_and_fedlalr_has_not(aggregate: str) -> None:
    shared, own = fs.Diagnostics(rates=True), fs.Diagnostics(rates=True)
    watched(fs.LocalAMSGrad(steps=2), shared)
    watched(fs.FedLALR(steps=2, aggregate=aggregate, **LALR), own)
    assert [r["rate_spread"] for r in of_rounds(shared.rows)] == pytest.approx([0] * 3, abs=1e-12)
    assert min(r["rate_spread"] for r in of_rounds(own.rows)) > 1e-3


# --- who listens, and who does not -----------------------------------------------------------------------------------


def test_nothing_is_reported_when_nobody_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    """A function that is reported is called when its value is wanted, and the results are the same bits."""
    called: list[int] = []
    plain = Client.report

    def report(client: Client, **values: Any) -> None:
        plain(client, **values, probe=lambda: called.append(client.clock.step) or values["vhat"])

    class Heard(Callback):
        names: tuple[str, ...] = ()

        def on_local_step(self, clock: Clock, ids: np.ndarray, reports: Reports) -> None:
            self.names = tuple(reports)

    monkeypatch.setattr(Client, "report", report)
    problem, data = smooth_example()
    found, heard = [], Heard()
    for callbacks in ([], [Callback()], [heard], [fs.Diagnostics()], [fs.Diagnostics(norms=["vhat"], rates=True)]):
        found.append(fs.train(problem, data, fs.FedLALR(steps=2, **LALR), rounds=2, batch_size=4, callbacks=callbacks))
        assert called == []
    assert heard.names == ("vhat", "rate", "probe")
    diagnostics = fs.Diagnostics(norms=["probe"])
    found.append(fs.train(problem, data, fs.FedLALR(steps=2, **LALR), rounds=2, batch_size=4, callbacks=[diagnostics]))
    assert sorted(set(called)) == [0, 1]
    for run in found[1:]:
        assert torch.equal(run.x, found[0].x)


def test_only_callbacks_that_override_it_want_local_steps() -> None:
    wanting = [Watcher(), fs.Diagnostics(), Titled(Watcher(), "a"), Titled(Titled(fs.Diagnostics(), "a"), "b")]
    others = [Callback(), fs.ShowProgress(), Titled(Callback(), "a"), Titled(fs.ShowProgress(), "a")]
    assert [c.wants_local_steps for c in wanting] == [True] * 4
    assert [c.wants_local_steps for c in others] == [False] * 4


def test_a_title_passes_local_steps_on() -> None:
    inside = Watcher()
    _, outside = watched(fs.FedLALR(steps=2, **LALR), Titled(Titled(inside, "run 1"), "all runs"), rounds=2)
    assert inside.seen.keys() == outside.seen.keys() and len(inside.seen) == 2 * 2 * 7
    for key, vectors in outside.seen.items():
        assert all(torch.equal(inside.seen[key][name], value) for name, value in vectors.items())


@pytest.mark.parametrize(
    ("algorithm", "options", "message"),
    [
        (fs.FedLALR(), {"norms": ["vhat", "v"]}, "The local steps of fedlalr do not report 'v'. Reported: "),
        (fs.FedLALR(), {"norms": ["nothing"]}, "Reported: vhat, rate."),
        (fs.LocalAMSGrad(), {"norms": ["vhat"]}, "Reported: v, rate."),
        (fs.FedAvg(), {"norms": ["vhat"]}, "Reported: rate."),
        (fs.FedProx(), {"rates": True}, "The local steps of fedprox do not report 'rate'. Reported: nothing."),
    ],
)
def test_a_name_that_is_not_reported_is_refused(algorithm: fs.Algorithm, options: dict[str, Any], message: str) -> None:
    with pytest.raises(fs.InputError) as refused:
        watched(algorithm, fs.Diagnostics(**options), rounds=1)
    assert message in str(refused.value)


@pytest.mark.parametrize("clients", [0, -1, [0, -2]])
def test_invalid_clients_are_refused(clients: int | list[int]) -> None:
    with pytest.raises(fs.InputError, match="clients of the diagnostics must be a whole number of at least"):
        fs.Diagnostics(clients=clients)


def test_rows_are_those_of_the_last_run() -> None:
    diagnostics = fs.Diagnostics(norms=["vhat"])
    watched(fs.FedLALR(steps=2, **LALR), diagnostics, rounds=3)
    first = list(diagnostics.rows)
    watched(fs.FedLALR(steps=2, **LALR), diagnostics, rounds=3)
    assert diagnostics.rows == first


class Warm(fs.Algorithm):
    """Takes steps before the first round, then none."""

    name = "warm"

    def start(self, x: torch.Tensor, y: torch.Tensor, clients: fs.Clients) -> fs.State:
        return fs.State(x + clients.mean(self.local, x, 5), y)

    def round(self, s: fs.State, clients: fs.Clients) -> fs.State:
        return s._replace(x=s.x + clients.mean(self.local, s.x, 3))

    @fs.remote
    def local(self, client: fs.Client, x: torch.Tensor, steps: int) -> torch.Tensor:
        k = client.variables(x=x)
        for _ in client.loop(steps, k):
            client.report(vhat=k.x, rate=k.x)
            k.x = 0.9 * k.x
        return k.x - x


ALGORITHMS.pop("warm")


def test_steps_before_the_first_round_are_not_counted() -> None:
    """An algorithm may have its clients take steps to prepare itself, in round 0 of the watcher's."""
    diagnostics = fs.Diagnostics(norms=["vhat"], clients=[1], rates=True)
    _, watcher = watched(Warm(), diagnostics, rounds=2)
    assert {t for r, t, _ in watcher.seen if r == 0} == {1, 2, 3, 4, 5}
    assert [r["local_steps"] for r in of_rounds(diagnostics.rows)] == [3, 3]
    assert_same_rows(of_steps(diagnostics.rows), expected_norms(watcher, "vhat", [1], [1, 2]))


# --- files -----------------------------------------------------------------------------------------------------------


CONFIG = """
[data]
clients = 4
partition = { name = "dirichlet", alpha = 1.0, min_samples = 10 }
[model]
name = "logreg"
[algorithm]
name = "fedlalr"
lr = 0.01
steps = { initial = 2, base = 2.0 }
[train]
rounds = 4
batch_size = 8
participation = 3
[diagnostics]
norms = ["vhat"]
clients = [0, 2]
rates = true
"""


@pytest.fixture
def experiment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("fedstrata.training.plots.plot", lambda *_, **__: None)
    path = tmp_path / "experiment.toml"
    path.write_text(CONFIG)
    return path


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing costs more than these runs."""
    monkeypatch.setattr("fedstrata.training.plots.plot_diagnostics", lambda *_: None)


def rows_in(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "diagnostics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_a_run_from_a_file_has_rows_and_a_picture(fedstrata, experiment: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    code, _, err = fedstrata("run", experiment, "--out", out, "--quiet")
    assert code == 0, err
    rows = rows_in(out)
    assert [r["round"] for r in of_rounds(rows)] == [1, 2, 3, 4]
    assert [r["local_steps"] for r in of_rounds(rows)] == [2, 3, 3, 4]
    assert all(r["rate_spread"] > 0 for r in of_rounds(rows))
    assert of_steps(rows) and {r["client"] for r in of_steps(rows)} <= {0, 2}
    assert (out / "diagnostics.png").read_bytes().startswith(b"\x89PNG")
    kept = tomllib.loads((out / "config.toml").read_text())["diagnostics"]
    assert kept == {"norms": ["vhat"], "clients": [0, 2], "rates": True}


def test_a_run_without_the_table_has_neither(fedstrata, experiment: Path, tmp_path: Path) -> None:
    experiment.write_text(CONFIG[: CONFIG.index("[diagnostics]")])
    out = tmp_path / "run"
    assert fedstrata("run", experiment, "--out", out, "--quiet")[0] == 0
    assert not [p.name for p in out.iterdir() if "diagnostics" in p.name]
    assert "diagnostics" not in (out / "config.toml").read_text()


@pytest.mark.usefixtures("undrawn")
def test_a_resumed_run_has_the_rows_of_one_that_was_never_interrupted(
    fedstrata, experiment: Path, tmp_path: Path
) -> None:
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    assert fedstrata("run", experiment, "--out", straight, "--quiet")[0] == 0
    assert fedstrata("run", experiment, "--out", resumed, "--quiet", "--set", "train.rounds=2")[0] == 0
    assert len(rows_in(resumed)) < len(rows_in(straight))
    with (resumed / "diagnostics.jsonl").open("a") as file:  # what a kill in the third round may leave behind
        file.write('{"round": 3, "local_steps": 99}\n{"round": 3, "cli')
    code, _, err = fedstrata("run", experiment, "--out", resumed, "--quiet", "--resume")
    assert code == 0, err
    assert (resumed / "diagnostics.jsonl").read_bytes() == (straight / "diagnostics.jsonl").read_bytes()


def test_a_wrong_name_in_a_file_is_a_readable_error(fedstrata, experiment: Path, tmp_path: Path) -> None:
    out = ("--out", tmp_path / "run")
    code, _, err = fedstrata("run", experiment, "--quiet", "--set", "diagnostics.norms=['m']", *out)
    assert code == 2 and "do not report 'm'" in err and "Reported: vhat, rate." in err
    code, _, err = fedstrata("run", experiment, "--quiet", "--set", "diagnostics.client=3")
    assert code == 2 and "diagnostics.client" in err and "diagnostics.clients" in err


@pytest.mark.usefixtures("undrawn")
def test_every_run_of_a_comparison_has_rows_of_its_own(fedstrata, experiment: Path, tmp_path: Path) -> None:
    out = tmp_path / "compare"
    words = ("compare", experiment, "--algorithms", "fedlalr", "--seeds", 2, "--out", out, "--quiet")
    code, _, err = fedstrata(*words, "--set", "train.rounds=2", "--set", "diagnostics.rounds=[1]")
    assert code == 0, err
    found = [rows_in(out / f"fedlalr-seed{seed}") for seed in (0, 1)]
    assert [[r["round"] for r in of_rounds(rows)] for rows in found] == [[1, 2], [1, 2]]
    assert found[0] != found[1]


@pytest.mark.slow
def test_the_picture_of_many_rounds_and_of_none_followed(tmp_path: Path) -> None:
    """Up to four rounds are drawn; without norms the local steps alone."""
    for number, options in enumerate(({"norms": ["vhat"], "rates": True}, {}, {"rounds": [99], "norms": ["vhat"]})):
        diagnostics = fs.Diagnostics(folder=tmp_path / str(number), **options)
        watched(fs.FedLALR(steps=2, **LALR), diagnostics, rounds=6)
        assert (tmp_path / str(number) / "diagnostics.png").stat().st_size > 1000
        assert rows_in(tmp_path / str(number)) == diagnostics.rows


def test_a_run_that_fails_leaves_no_picture(tmp_path: Path) -> None:
    diagnostics = fs.Diagnostics(norms=["nothing"], rounds=[2], folder=tmp_path)
    with pytest.raises(fs.InputError):
        watched(fs.FedLALR(steps=2), diagnostics, rounds=3)
    assert [p.name for p in tmp_path.iterdir()] == ["diagnostics.jsonl"]
    assert rows_in(tmp_path) == [{"round": 1, "local_steps": 2}]


NUMBERS = "a whole number of at least 1, or a list of whole numbers of at least 0"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rounds": 5}, "rounds of the diagnostics must be a list of whole numbers of at least 1, or left out. Got 5."),
        (
            {"rounds": [0]},
            "rounds of the diagnostics must be a list of whole numbers of at least 1, or left out. Got [0].",
        ),
        ({"clients": "a"}, f"clients of the diagnostics must be {NUMBERS}. Got 'a'."),
        ({"clients": [True]}, f"clients of the diagnostics must be {NUMBERS}. Got [True]."),
        ({"norms": "vhat"}, "norms of the diagnostics must be a list of names. Got 'vhat'."),
    ],
)
def test_invalid_diagnostics_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(fs.InputError) as refused:
        fs.Diagnostics(**options)
    assert str(refused.value) == f"The {message}"


def test_what_is_not_a_tensor_with_a_row_for_each_client_is_refused() -> None:
    class Odd(fs.Callback):
        def on_local_step(self, clock: Any, ids: Any, reports: Any) -> None:
            reports["rate"] = lambda: 0.1
            reports["vhat"] = lambda: torch.ones(len(ids))

    odd, message = Odd(), "must be a tensor \\[clients, numbers\\]"
    for options in ({"rates": True}, {"norms": ["vhat"]}):
        diagnostics = fs.Diagnostics(**options)
        with pytest.raises(fs.InputError, match=message):
            watched(fs.FedLALR(steps=2, **LALR), odd, diagnostics, rounds=1)


def test_in_a_comparison_what_an_algorithm_does_not_report_is_left_out() -> None:
    diagnostics = fs.Diagnostics(norms=["vhat"], rates=True, strict=False)
    watched(fs.FedProx(steps=2), diagnostics, rounds=2)
    assert diagnostics.rows == [{"round": 1, "local_steps": 2}, {"round": 2, "local_steps": 2}]
