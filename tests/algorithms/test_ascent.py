"""The saddle algorithms where they reduce to something simpler, in ways that are not rows of a table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import fedstrata as fs
from algorithms.examples import DUAL, RATE, alone, apart, example, vectors
from cases import product
from fedstrata.training.states import tensors_of
from saddle_worlds import SADDLES, SIZES, N, Saddle
from support import drawn, make_clients, make_setting, started
from worlds import Vector

pytestmark = pytest.mark.untraced

SEED = 7
LOCAL: dict[str, Any] = {"lr": RATE, "dual_lr": DUAL, "steps": 4}
ONE: dict[str, Any] = {"lr": RATE, "dual_lr": DUAL, "steps": 1}
SCRIPT: dict[str, Any] = {"lr": RATE, "steps": 4, "gamma": 1.5, "clip": 0.2, "weight_decay": 0.1}


def pesg(world: Saddle, rounds: int, batch_size: int | None, server_lr: float = 1.0) -> tuple[Vector, Vector]:
    """Rounds of PESG's steps on every client, then averages: by hand, on gradients by hand."""
    x, y, centre = world.x0, world.y0, world.x0
    assert world.project is not None
    for r in range(rounds):
        ends = []
        for k in range(N):
            x_k, y_k = x, y
            for t in range(SCRIPT["steps"]):
                batch = drawn(world.data, k, (SEED, r, 0, 0, 0), t, batch_size=batch_size)
                g_x, g_y = world.gradient(batch, k, x_k, y_k)
                clipped = np.clip(g_x, -SCRIPT["clip"], SCRIPT["clip"])
                down = clipped + (x_k - centre) / SCRIPT["gamma"] + SCRIPT["weight_decay"] * x_k
                x_k, y_k = x_k - SCRIPT["lr"] * down, world.project(y_k + SCRIPT["lr"] * g_y)
            ends.append((x_k, y_k))
        x = x + server_lr * (np.mean([end[0] for end in ends], axis=0) - x)
        y = world.project(y + server_lr * (np.mean([end[1] for end in ends], axis=0) - y))
    return x, y


@product("world, batch_size, server_lr", ["auc, margin", "ball"], [3, None], [1.0, 0.7])
def test_codasca_without_control_variates_takes_the_steps_of_pesg(
    world: str, batch_size: int | None, server_lr: float
) -> None:
    """And so does its first round, with all variates at zero."""
    w = SADDLES[world]()

    def end(rounds: int, **options: Any) -> dict[str, torch.Tensor]:
        algorithm = fs.CODASCA(server_lr=server_lr, **SCRIPT, **options)
        return vectors(algorithm, w.problem, w.data, rounds, batch_size=batch_size)

    for rounds, control in ((3, False), (1, True)):
        found = end(rounds, control=control)
        for key, expected in zip(("x", "y"), pesg(w, rounds, batch_size, server_lr), strict=True):
            np.testing.assert_allclose(found[key].numpy(), expected, atol=1e-12)
    assert np.abs(end(2)["x"].numpy() - pesg(w, 2, batch_size, server_lr)[0]).max() > 1e-4


def rounds_from(algorithm: fs.Algorithm, change: Callable[[Any], Any], rounds: int = 3) -> dict[str, torch.Tensor]:
    """Rounds before each of which the server's state is changed."""
    world = SADDLES["ball"]()
    clients = make_clients(make_setting(world.problem, world.data, batch_size=3, seed=SEED), rounds=rounds, chunk=3)
    with torch.no_grad():
        state = started(algorithm, clients)
        for r in range(rounds):
            clients.begin(r)
            state = algorithm.round(change(state), clients)
    return tensors_of(algorithm, state)


def test_momenta_that_start_every_round_at_zero_are_those_of_the_method_with_snapshots() -> None:
    """Momentum-Local-SGDA with d = 0 before each round, and the other method with a snapshot at every step."""
    momentum = {**LOCAL, "alpha": 0.8, "beta": 0.7}

    def end(algorithm: fs.Algorithm) -> dict[str, torch.Tensor]:
        return vectors(algorithm, *example("ball"), 3, batch_size=3)

    def forgotten(s: Any) -> Any:
        return s._replace(d_x=torch.zeros_like(s.d_x), d_y=torch.zeros_like(s.d_y))

    ours = end(fs.LocalSGDAMPlus(snapshot_every=1, **momentum))
    assert apart(ours, rounds_from(fs.LocalSGDAM(**momentum), forgotten)) < 1e-12
    assert apart(ours, end(fs.LocalSGDAM(**momentum))) > 1e-3
    assert apart(ours, end(fs.LocalSGDAMPlus(snapshot_every=4, **momentum))) > 1e-4


def test_a_step_of_cdma_is_one_step_of_the_server() -> None:
    """Whatever the second cohort draws: its corrections cancel in the first step; cohorts are weighted by samples."""
    free = SADDLES["free"]()
    run: dict[str, Any] = {"participation": 2, "weighting": "samples"}
    found = [vectors(fs.CDMA(**ONE), free.problem, free.data, 1, batch_size=size, **run) for size in (1, 5)]
    assert apart(*found) < 1e-12
    cohort = make_clients(make_setting(free.problem, free.data, seed=SEED), participation=2).cohort.tolist()
    everything = [tuple(a.numpy() for a in free.data.train.of_client(k)) for k in cohort]
    parts = [free.gradient(batch, k, free.x0, free.y0) for k, batch in zip(cohort, everything, strict=True)]
    sizes = [SIZES[k] for k in cohort]
    g_x, g_y = (np.average([part[i] for part in parts], axis=0, weights=sizes) for i in (0, 1))
    np.testing.assert_allclose(found[0]["x"], free.x0 - RATE * g_x, atol=1e-12)
    np.testing.assert_allclose(found[0]["y"], free.y0 + DUAL * g_y, atol=1e-12)
    assert sizes[0] != sizes[1]


@product("adaptive, steps", [False, True], [1, 3])
def test_for_one_client_both_synchronisations_agree(adaptive: bool, steps: int) -> None:
    """From estimates that are no gradients, so that their weights count; of all data, since batches differ."""
    problem, data = example("ball")
    one, rng = alone(data), np.random.default_rng(1)
    w, v = (torch.from_numpy(rng.normal(size=len(z))) for z in (problem.x0, problem.y0))

    def end(synchronisation: str, alpha: float) -> dict[str, torch.Tensor]:
        options: dict[str, Any] = {"steps": steps, "synchronisation": synchronisation, "eta": 0.8, "beta": 0.6}
        algorithm = (fs.AdaFGDA if adaptive else fs.FGDA)(gamma=RATE, lam=DUAL, alpha=alpha, **options)
        setting = make_setting(problem, one)
        clients = make_clients(setting, rounds=4)
        with torch.no_grad():
            state = started(algorithm, clients)._replace(w=w, v=v)
            setting.state.keep(np.zeros(1, dtype=np.int64), {"w": w[None], "v": v[None]})
            for r in range(4):
                clients.begin(r)
                state = algorithm.round(state, clients)
        return tensors_of(algorithm, state)

    assert apart(end("two_phase", 0.2), end("single", 0.2)) < 1e-12
    assert apart(end("two_phase", 0.2), end("two_phase", 0.3)) > 1e-3


def test_options_of_the_other_form_of_cdma_are_refused() -> None:
    for options in ({"weight": 0.5}, {"exponent": 0.3}):
        with pytest.raises(fs.InputError, match="of cdma applies only with ada = True"):
            fs.CDMA(**options)
        fs.CDMA(ada=True, **options)
