"""Clients on nodes do what simulated clients do: every algorithm, cohorts, weights, channels, injected faults."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import fedstrata as fs
from augmented import register_shade
from cases import one_per
from federation.stand_in import CANCER, DIGITS, Sent, Site, Tables, made, simulated, site
from fedstrata.algorithms import ALGORITHMS
from fedstrata.clients.faults import Fault
from fedstrata.core.options import options as with_options
from fedstrata.federation.node import faults
from fedstrata.federation.wire import Reply
from fedstrata.models.zoo import MODELS
from masked import Masked, rows

USED = ("steps", "samples", "bytes_up", "bytes_down")
SMALL: Tables = {"model": {"name": "mlp", "hidden": [5]}}
AUGMENTED: Tables = {
    "model": {
        **{"name": "mlp", "hidden": [5], "dropout": 0.3},
        "augment": ["flip", {"name": "crop", "padding": 1}, "jitter", {"name": "shade_", "strength": 0.8}],
    }
}
AUC: Tables = {"problem": {"name": "auc", "score": "none"}}
AUC_P: Tables = {"problem": {"name": "auc", "score": "none", "p": 0.6}}
FAIR: Tables = {"problem": {"name": "fair"}}
ADVERSARIAL: Tables = {"problem": {"name": "adversarial", "radius": 1.0}}
ROBUST: Tables = {"problem": {"name": "robust", "gamma": 1.0}}
MAML: Tables = {"problem": {"name": "maml", "inner_lr": 0.05}, "data": {"support": 0.4}}
ONE: Tables = {"problem": {"name": "compositional_auc", "levels": 1, "inner_lr": 0.1}}
TWO: Tables = {"problem": {"name": "compositional_auc", "levels": 2, "inner_lr": 0.1}}
FALLING: Tables = {
    "problem": {"name": "compositional_auc", "levels": 2, "inner_lr": {"schedule": "step", "value": 0.1, "factor": 0.1}}
}
TWO_OF_THREE: Tables = {"train": {"participation": 2}}
BY_SAMPLES: Tables = {"train": {"weighting": "samples"}}


@dataclass(frozen=True)
class Case:
    """An experiment: an algorithm with options on some data, with more tables merged into it."""

    name: str
    base: Tables
    over: tuple[Tables, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def id(self) -> str:
        words = [f"{k}={v}" for k, v in self.options.items()]
        for tables in self.over:
            for table, options in tables.items():
                words += [str(v) if k == "name" else f"{k}={v}" for k, v in options.items() if table != "model"]
        return " ".join([self.name, *words])

    def config(self) -> fs.Config:
        short = {} if "steps" in self.options or self.name == "afl" else {"steps": 2}
        return made(self.base, {"algorithm": {"name": self.name, **short, **self.options}}, *self.over)


CASES = [
    *(Case(n, DIGITS) for n in ("fedavg", "fedadagrad", "fedadam", "fedyogi", "fedams", "lafedopt", "local_adaalter")),
    Case("fedprox", DIGITS, (SMALL, TWO_OF_THREE)),
    Case("fedavg", DIGITS, (BY_SAMPLES, {"train": {"sampling": "epochs"}}), {"steps": {"epochs": 1.5}}),
    Case("fedavg", DIGITS, ({"train": {"batch_size": None}},), {"lr": {"schedule": "cube_root", "k": 0.5, "n": 2.0}}),
    Case("fedlalr", DIGITS, (TWO_OF_THREE,), {"aggregate": "max"}),
    Case("fedlalr", DIGITS, (BY_SAMPLES,), {"steps": {"initial": 1, "base": 1.5}}),
    Case("local_amsgrad", DIGITS, (TWO_OF_THREE,)),
    Case("qfedavg", DIGITS, (TWO_OF_THREE, BY_SAMPLES)),
    Case("scaffold", DIGITS, (SMALL, {"train": {"participation": 0.7}})),
    Case("scaffold", DIGITS, (BY_SAMPLES, {"train": {"sampling": "stratified"}})),
    Case("local_sgdm_rl", DIGITS, ({"data": {"auxiliary": 5}},)),
    Case("comfedl", DIGITS, (ROBUST, TWO_OF_THREE)),
    Case("comfedl", DIGITS, ({"problem": {"name": "damaml", "inner_lr": 0.05}, "data": {"support": 0.4}},)),
    Case("mfcgd", DIGITS, (ROBUST, BY_SAMPLES)),
    Case("mfcgd", DIGITS, (MAML,)),
    Case("adamfcgd", DIGITS, (ROBUST,), {"matrix": "belief"}),
    Case("local_scgd", DIGITS, (ROBUST,)),
    Case("local_scgdm", DIGITS, (ROBUST, TWO_OF_THREE)),
    Case("local_moml", DIGITS, (MAML, BY_SAMPLES)),
    Case("afl", DIGITS, ({"problem": {"name": "agnostic"}},)),
    Case("drfa", DIGITS, ({"problem": {"name": "agnostic"}}, {"train": {"rounds": 4}})),
    Case("drfa", DIGITS, ({"problem": {"name": "agnostic"}}, TWO_OF_THREE)),
    Case("local_sgda", DIGITS, (FAIR, TWO_OF_THREE)),
    Case("local_sgda", CANCER, (AUC_P, BY_SAMPLES, {"train": {"sampling": "balanced"}})),
    Case("local_sgda_plus", DIGITS, ({"problem": {"name": "fair", "over": "clients"}},)),
    Case("local_sgdam", CANCER, (AUC,)),
    Case("local_sgdam", CANCER, (AUC_P, TWO_OF_THREE), {"average_momentum": False}),
    Case("local_sgdam_plus", DIGITS, (ADVERSARIAL,)),
    Case("cdma", CANCER, (AUC,), {"ada": True}),
    Case("coda", CANCER, (AUC, BY_SAMPLES), {"stage_steps": 4, "factor": 1.5}),
    Case("codasca", CANCER, (AUC,), {"stage_rounds": 2}),
    Case("fgda", CANCER, (AUC, SMALL)),
    Case("fgda", CANCER, (AUC_P, BY_SAMPLES), {"synchronisation": "single"}),
    Case("adafgda", CANCER, (AUC, BY_SAMPLES)),
    Case("sagda", CANCER, (AUC_P, TWO_OF_THREE)),
    Case("fednest", CANCER, (AUC,), {"inner_rounds": 2}),
    Case("local_scgdam", CANCER, (ONE, TWO_OF_THREE)),
    Case("local_smcgdam", CANCER, (ONE, BY_SAMPLES)),
    Case("local_smcgdam", CANCER, (TWO,)),
    Case("local_smcgdam", CANCER, (FALLING,)),
    Case("local_smcgdam", DIGITS, ({"problem": {"name": "risk_averse"}}, TWO_OF_THREE)),
]


def usual_case(name: str) -> Case:
    """Return a case for an algorithm that has none above: a problem of the class that it solves."""
    kind = ALGORITHMS[name]
    if kind.mixture:
        return Case(name, DIGITS, ({"problem": {"name": "agnostic"}},))
    if 0 not in kind.levels:
        return Case(name, CANCER, (ONE,)) if kind.inner_mean == "global" else Case(name, DIGITS, (ROBUST,))
    return Case(name, CANCER, (AUC,)) if kind.dual else Case(name, DIGITS)


CASES += [usual_case(name) for name in ALGORITHMS if name not in {case.name for case in CASES}]

CHANNELS = [
    Case("fedavg", DIGITS, ({"channel": {"clip": 0.01}},)),
    Case("fedavg", DIGITS, ({"channel": {"bound": 0.01}}, TWO_OF_THREE)),
    # From a bias at the prior, the largest entries would all be those of the control variates.
    Case(
        "scaffold", DIGITS, ({"channel": {"compress": "top_k", "top": 0.05}, "problem": {"prior": False}}, TWO_OF_THREE)
    ),
    Case("fedlalr", DIGITS, ({"channel": {"compress": "top_k", "top": 0.1, "clip": 0.05, "bound": 0.03}},)),
    Case("fedadam", DIGITS, ({"channel": {"compress": "quantise", "clip": 0.05}}, BY_SAMPLES)),
    Case("local_sgda", CANCER, (AUC, {"channel": {"compress": "quantise"}})),
    Case("local_smcgdam", CANCER, (TWO, {"channel": {"compress": "top_k", "top": 0.2}})),
    Case("drfa", DIGITS, ({"problem": {"name": "agnostic"}, "channel": {"clip": 0.02}},)),
    Case("fedavg", DIGITS, ({"channel": {"reduce": "median"}},)),
    Case("fgda", CANCER, (AUC, {"channel": {"reduce": "median"}})),
    Case("fgda", CANCER, (AUC, {"channel": {"clip": 0.05}})),
    Case("fgda", CANCER, (AUC, {"channel": {"compress": "top_k", "top": 0.3, "clip": 0.1}})),
    Case("adafgda", CANCER, (AUC, BY_SAMPLES, {"channel": {"compress": "quantise"}})),
    Case("codasca", CANCER, (AUC, {"channel": {"compress": "quantise"}}), {"stage_rounds": 2}),
    Case("comfedl", DIGITS, (ROBUST, {"channel": {"reduce": "trimmed_mean", "trim": 0.4}})),
]


def used(run: fs.Run) -> dict[str, int]:
    return {k: run.history[-1][k] for k in USED}


def assert_same(run: fs.Run, expected: fs.Run, tolerance: float = 1e-5) -> None:
    for ours, theirs in ((run.x, expected.x), (run.y, expected.y)):
        if theirs is None:
            assert ours is None
            continue
        assert ours is not None and ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
    assert used(run) == used(expected)


@one_per(lambda case: case.name, "case", [*CASES, *CHANNELS])
def test_nodes_do_what_simulated_clients_do(case: Case, tmp_path: Path) -> None:
    config = case.config()
    nodes = site(tmp_path, config)
    run = nodes.serve()
    expected = simulated(config)
    assert not nodes.faults()
    assert bool((run.x != run.problem.x0.to(run.x)).any())
    assert_same(run, expected)


@pytest.mark.parametrize("inner", [{}, {"support": 0.4, "holdout": 0.2}], ids=["plain", "support and holdout"])
def test_nodes_take_samples_with_several_inputs(inner: Tables, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @with_options("the masked model")
    def masked(shape: Sequence[int], outputs: int) -> Masked:
        return Masked(outputs, dtype=torch.float32)

    monkeypatch.setitem(MODELS, "masked", masked)
    (tmp_path / "sites").mkdir()
    for k, size in enumerate((20, 31, 24)):
        named = dict(zip(("inputs", "inputs_1", "targets"), rows(size, 3, k), strict=True))
        np.savez(tmp_path / "sites" / f"{k}.npz", **named)
    tables: Tables = {
        "data": {"folder": str(tmp_path / "sites"), **inner},
        "model": {"name": "masked"},
        "problem": {"name": "maml", "inner_lr": 0.1},
        "algorithm": {"name": "comfedl", "steps": 2, "lr": 0.1},
        "train": {"rounds": 3, "batch_size": 8, "threads": 1, "weighting": "samples"},
    }
    config = made({}, tables)
    nodes = site(tmp_path, config)
    run = nodes.serve()
    expected = simulated(config)
    assert not nodes.faults()
    assert_same(run, expected)
    if inner:  # the server has no test data of its own
        assert run.summary["loss"] == pytest.approx(expected.summary["loss"], rel=1e-5)


@pytest.mark.slow
@pytest.mark.usefixtures("registries")
@pytest.mark.parametrize(
    "case",
    [
        Case("scaffold", DIGITS, (AUGMENTED,)),
        Case("fgda", DIGITS, (AUGMENTED, FAIR)),
        Case("mfcgd", DIGITS, (AUGMENTED, MAML)),
    ],
    ids=lambda case: case.id,
)
def test_random_layers_draw_the_same_on_nodes(case: Case, tmp_path: Path) -> None:
    register_shade()
    run, expected = site(tmp_path, case.config()).serve(), simulated(case.config())
    assert_same(run, expected)
    plain = simulated(replace(case, over=(*case.over, {"problem": {"dropout": "off"}})).config())
    assert not torch.allclose(plain.x, expected.x, rtol=1e-3, atol=1e-3), "dropout matters"


def test_the_order_in_which_nodes_answer_changes_no_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedstrata.federation.server.nodes.POLL", 0.0)
    nodes = site(tmp_path, made(DIGITS, {"algorithm": {"name": "scaffold", "steps": 2}}))
    run = nodes.serve(tmp_path / "a")
    other = nodes.again(scrambled=True).serve(tmp_path / "b")
    assert torch.equal(run.x, other.x)


# --- injected faults ------------------------------------------------------------------------------------------------


class Listener(fs.Callback):
    """Records who was left out, and when."""

    def __init__(self) -> None:
        self.faults: list[tuple[int, int, int, int]] = []

    def on_faults(self, faults: Sequence[Fault], names: Sequence[str]) -> None:
        self.faults += [(f.round, f.exchange, f.attempt, f.client) for f in faults]


PLAIN: Tables = {}
CLIPPED: Tables = {"channel": {"compress": "top_k", "top": 0.3, "clip": 0.05}}
QUANTISED: Tables = {"channel": {"compress": "quantise"}}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "name", "over"),
    [
        *(("drop", name, PLAIN) for name in ("fedavg", "scaffold")),
        *(("nan", name, PLAIN) for name in ("fedavg", "scaffold")),
        *(("garbage", name, PLAIN) for name in ("fedavg", "scaffold")),
        *(("scale", name, PLAIN) for name in ("fedavg", "scaffold")),
        *((kind, "scaffold", CLIPPED) for kind in ("drop", "nan", "garbage", "scale")),
        *((kind, "fedavg", QUANTISED) for kind in ("nan", "scale")),
        ("scale", "fedavg", {"channel": {"clip": 0.05, "reduce": "median"}}),
        ("crash", "scaffold", PLAIN),
        ("delay", "fedavg", PLAIN),
    ],
    ids=lambda v: v if isinstance(v, str) else " ".join(v.get("channel", {"plain": 0})),
)
def test_injected_faults_hit_the_same_clients_as_in_a_simulation(
    kind: str, name: str, over: Tables, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = kind in ("nan", "garbage")  # such clients are not asked again
    how = {"quorum": 1 if bad else 2, "retries": 6, "timeout": 0.2}
    inject = {kind: 0.35, "seed": 5 if bad else 10, "factor": 3.0}
    late: list[float] = []
    monkeypatch.setattr(faults, "time", SimpleNamespace(sleep=late.append))
    monkeypatch.setattr(faults.os, "_exit", lambda code: (_ for _ in ()).throw(RuntimeError("the process died")))

    def in_time(_: Site, __: Sent, reply: Reply) -> Reply | None:
        return None if late and late.pop() > 0.2 else reply

    config = made(DIGITS, {"algorithm": {"name": name, "steps": 2}, "faults": {**how, "inject": inject}}, over)
    nodes = site(tmp_path, config)
    nodes.change = in_time
    ours, theirs = Listener(), Listener()
    run = nodes.serve(callbacks=[ours])
    expected = simulated(config, [theirs])
    assert sorted(ours.faults) == sorted(theirs.faults)
    assert bool(ours.faults) == (kind != "scale")
    torch.testing.assert_close(run.x, expected.x, rtol=1e-5, atol=1e-5)
    if kind == "scale":
        honest = simulated(config.replace(faults=None))
        assert float((run.x - honest.x).norm()) > 1e-3
    assert run.history[-1]["failed"] == expected.history[-1]["failed"]
    theirs_by_name = {name.replace("client ", "node"): n for name, n in expected.summary["left_out"].items()}
    assert run.summary["left_out"] == theirs_by_name


def test_a_quorum_that_is_not_reached_names_the_nodes(tmp_path: Path) -> None:
    config = made(
        DIGITS,
        {
            "algorithm": {"name": "fedavg"},
            "faults": {"quorum": 3, "retries": 1, "inject": {"drop": 1.0, "clients": [1]}},
        },
    )
    with pytest.raises(fs.QuorumError, match=r"Only 2 of 3 clients .* 2 times.*node1 .*did not answer"):
        site(tmp_path, config).serve()
