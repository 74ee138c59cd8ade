"""Where one minimax algorithm is another: special values of hyperparameters, one client, one step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import fedstrata as fs
from fedstrata.algorithms import adafgda
from fedstrata.algorithms.matrices import MATRICES
from saddle_worlds import SADDLES, SIZES, N, SaddleWorld, Vector
from support import drawn, make_clients, make_setting, play, started

RATE, DUAL = 0.15, 0.25
HUGE = 1e300
SEED = 7
SETTINGS: dict[str, dict[str, Any]] = {
    "minibatches": {"batch_size": 3},
    "full batches": {"batch_size": None},
    "weighted": {"batch_size": 3, "weighting": "samples"},
    "epochs": {"batch_size": 4, "sampling": "epochs"},
}
PARTIAL = {"partial": {"batch_size": 3, "participation": 3}}
FREE, BALL = SADDLES["free"](), SADDLES["ball"]()


def solve(algorithm: fs.Algorithm, rounds: int = 3, world: SaddleWorld = BALL, **options: Any) -> fs.State:
    return play(algorithm, world.problem, world.data, rounds, chunk=3, seed=SEED, **options)[0]


def apart(one: fs.State, other: fs.State) -> float:
    """How far two solutions are apart, in x or in y."""
    return max(float((one[key] - other[key]).abs().max()) for key in ("x", "y"))


# --- matrices --------------------------------------------------------------------------------------------------------


STORM: dict[str, Any] = {"eta": 0.8, "steps": 3, "alpha": 0.4, "beta": 0.6}


@pytest.mark.parametrize("synchronisation", ["two_phase", "single"])
@pytest.mark.parametrize("setting", SETTINGS)
def test_adafgda_without_matrices_is_fgda(setting: str, synchronisation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The matrices replaced by the identity; with them it is another method."""
    more = {**STORM, "synchronisation": synchronisation}
    plain = solve(fs.FGDA(gamma=RATE, lam=DUAL, **more), **SETTINGS[setting])
    ours = fs.AdaFGDA(gamma=RATE, lam=DUAL, **more)
    assert apart(solve(ours, **SETTINGS[setting]), plain) > 1e-2
    monkeypatch.setattr(adafgda, "diagonal", lambda kind, memory, rho: torch.ones_like(memory[0]))
    assert apart(solve(ours, **SETTINGS[setting]), plain) == 0


@pytest.mark.parametrize("matrix", MATRICES)
@pytest.mark.parametrize("first_matrix", ["average", "accumulator"])
def test_adafgda_with_a_huge_rho_is_fgda(matrix: str, first_matrix: str) -> None:
    """A / rho and B / rho are the identity, up to 1e-12."""
    rho = 1e12
    more: dict[str, Any] = {**STORM, "matrix": matrix, "first_matrix": first_matrix, "rho": rho}
    ours = solve(fs.AdaFGDA(gamma=RATE * rho, lam=DUAL * rho, **more), batch_size=3)
    assert apart(ours, solve(fs.FGDA(gamma=RATE, lam=DUAL, **STORM), batch_size=3)) < 1e-10


# --- control variates ------------------------------------------------------------------------------------------------


LOCAL: dict[str, Any] = {"lr": RATE, "dual_lr": DUAL, "steps": 4}


@pytest.mark.parametrize("setting", {**SETTINGS, **PARTIAL})
def test_sagda_without_control_variates_is_local_sgda(setting: str) -> None:
    """And its first round is, with all variates at zero; the second is not."""
    options = {**SETTINGS, **PARTIAL}[setting]
    plain = fs.LocalSGDA(**LOCAL)
    assert apart(solve(fs.SAGDA(control=False, **LOCAL), **options), solve(plain, **options)) < 1e-12
    assert apart(solve(fs.SAGDA(**LOCAL), 1, **options), solve(plain, 1, **options)) < 1e-12
    assert apart(solve(fs.SAGDA(**LOCAL), 2, **options), solve(plain, 2, **options)) > 1e-3


def pesg(world: SaddleWorld, rounds: int, batch_size: int | None, server_lr: float = 1.0) -> tuple[Vector, Vector]:
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


SCRIPT: dict[str, Any] = {"lr": RATE, "steps": 4, "gamma": 1.5, "clip": 0.2, "weight_decay": 0.1}


@pytest.mark.parametrize("batch_size", [3, None])
@pytest.mark.parametrize("world", ["auc, margin", "ball"])
@pytest.mark.parametrize("server_lr", [1.0, 0.7])
def test_codasca_without_control_variates_takes_the_steps_of_pesg(
    server_lr: float, world: str, batch_size: int | None
) -> None:
    """And so does its first round, with all variates at zero."""
    w = SADDLES[world]()
    for rounds, control in ((3, False), (1, True)):
        found = solve(fs.CODASCA(control=control, server_lr=server_lr, **SCRIPT), rounds, w, batch_size=batch_size)
        for key, expected in zip(("x", "y"), pesg(w, rounds, batch_size, server_lr), strict=True):
            np.testing.assert_allclose(found[key].numpy(), expected, atol=1e-12)
    corrected = solve(fs.CODASCA(server_lr=server_lr, **SCRIPT), 2, w, batch_size=batch_size)
    assert np.abs(corrected.x.numpy() - pesg(w, 2, batch_size, server_lr)[0]).max() > 1e-4


@pytest.mark.parametrize("setting", SETTINGS)
def test_codasca_without_its_terms_is_sagda(setting: str) -> None:
    """Not clipped, not held back, not decayed: one rate for x and y, and c the mean of the clients' c_k."""
    ours = fs.CODASCA(lr=RATE, steps=4, clip=0.0, weight_decay=0.0, gamma=HUGE)
    plain = fs.SAGDA(lr=RATE, dual_lr=RATE, steps=4)
    assert apart(solve(ours, **SETTINGS[setting]), solve(plain, **SETTINGS[setting])) < 1e-12


@pytest.mark.parametrize("setting", SETTINGS)
def test_coda_in_one_long_stage_without_a_centre_is_local_sgda(setting: str) -> None:
    ours = fs.CoDA(lr=RATE, steps=4, stage_steps=1000, gamma=HUGE)
    plain = fs.LocalSGDA(lr=RATE, dual_lr=RATE, steps=4)
    assert apart(solve(ours, **SETTINGS[setting]), solve(plain, **SETTINGS[setting])) < 1e-12


def test_a_stage_of_coda_that_is_one_step_ends_where_it_went() -> None:
    """Its average is its only point, so averaging or not is one; the estimate of y is left out without a best y."""
    ends = [solve(fs.CoDA(lr=RATE, steps=4, stage_steps=1, factor=1.0, average=average)) for average in (True, False)]
    assert apart(*ends) < 1e-12


# --- snapshots -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_snapshot_at_every_step_is_none(setting: str) -> None:
    """And a rarer one, even in every round, is another method."""
    options = {**SETTINGS[setting], "world": FREE}
    plain = solve(fs.LocalSGDA(**LOCAL), **options)
    assert apart(solve(fs.LocalSGDAPlus(snapshot_every=1, **LOCAL), **options), plain) == 0
    others = [solve(fs.LocalSGDAPlus(snapshot_every=every, **LOCAL), **options) for every in (4, 8, 0)]
    assert min(apart(other, plain) for other in others) > 1e-4
    assert apart(others[0], others[1]) > 1e-4
    assert apart(others[1], others[2]) > 1e-4
    assert apart(others[2], solve(fs.LocalSGDAPlus(snapshot_every=16, **LOCAL), **options)) == 0


@pytest.mark.parametrize("setting", SETTINGS)
def test_one_step_from_the_snapshot_sees_what_local_sgda_sees(setting: str) -> None:
    """With one step a round and a snapshot in every round, the snapshot is the point itself."""
    options = {**LOCAL, "steps": 1}
    ours = solve(fs.LocalSGDAPlus(snapshot_every=1, **options), 4, **SETTINGS[setting])
    assert apart(ours, solve(fs.LocalSGDA(**options), 4, **SETTINGS[setting])) == 0


def rounds_from(algorithm: fs.Algorithm, change: Any, rounds: int = 3, batch_size: int | None = 3) -> fs.State:
    """Rounds before each of which the server's state is changed."""
    setting = make_setting(BALL.problem, BALL.data, batch_size=batch_size, oracles=BALL.oracles, seed=SEED)
    clients = make_clients(setting, rounds=rounds, chunk=3)
    with torch.no_grad():
        state = started(algorithm, clients)
        for r in range(rounds):
            clients.begin(r)
            state = algorithm.round(change(state), clients)
    return state


MOMENTUM: dict[str, Any] = {**LOCAL, "alpha": 0.8, "beta": 0.7}


def test_momenta_that_start_every_round_at_zero_are_those_of_the_method_with_snapshots() -> None:
    """Momentum-Local-SGDA with d = 0 before each round, and the other method with a snapshot at every step."""
    ours = solve(fs.LocalSGDAMPlus(snapshot_every=1, **MOMENTUM), batch_size=3)

    def forgotten(s: fs.State) -> fs.State:
        return s.replace(d_x=torch.zeros_like(s.d_x), d_y=torch.zeros_like(s.d_y))

    assert apart(ours, rounds_from(fs.LocalSGDAM(**MOMENTUM), forgotten)) < 1e-12
    assert apart(ours, solve(fs.LocalSGDAM(**MOMENTUM), batch_size=3)) > 1e-3
    assert apart(ours, solve(fs.LocalSGDAMPlus(snapshot_every=4, **MOMENTUM), batch_size=3)) > 1e-4


# --- momenta ---------------------------------------------------------------------------------------------------------


WITHOUT: dict[str, Any] = {"alpha": 0.5, "beta": 2.0}
"""beta alpha = 1: a momentum is the last gradient."""


@pytest.mark.parametrize("average", [True, False])
def test_momenta_of_one_gradient_are_local_sgda_for_one_client(average: bool) -> None:
    """The rates are alpha lr, and a step has the gradient of the step before: of the same data, with full batches."""
    one = alone(BALL)
    ours = fs.LocalSGDAM(lr=2 * RATE, dual_lr=2 * DUAL, steps=4, average_momentum=average, **WITHOUT)
    assert apart(solve(ours, world=one), solve(fs.LocalSGDA(**LOCAL), world=one)) < 1e-12


@pytest.mark.parametrize("weighting", ["uniform", "samples"])
def test_averaged_momenta_of_one_gradient_and_one_step_are_local_sgda(weighting: str) -> None:
    """All clients step alike, to one point, and average their gradients there (the dual is free, so its mean is too).

    With more steps, or momenta of their own, the first step of a round has gradients from before the averaging.
    """
    options: dict[str, Any] = {"lr": 2 * RATE, "dual_lr": 2 * DUAL, **WITHOUT}
    setting: dict[str, Any] = {"world": FREE, "weighting": weighting}
    plain = {steps: solve(fs.LocalSGDA(**{**LOCAL, "steps": steps}), **setting) for steps in (1, 4)}
    assert apart(solve(fs.LocalSGDAM(steps=1, **options), **setting), plain[1]) < 1e-12
    assert apart(solve(fs.LocalSGDAM(steps=4, **options), **setting), plain[4]) > 1e-3
    own = fs.LocalSGDAM(steps=1, average_momentum=False, **options)
    assert apart(solve(own, **setting), plain[1]) > 1e-3


# --- one client, one step, all its data ------------------------------------------------------------------------------


def alone(world: SaddleWorld, k: int = 1) -> SaddleWorld:
    """One of the clients, by itself."""
    return replace(world, data=fs.FederatedData.from_arrays([world.data.train.of_client(k)]))


def descent_ascent(world: SaddleWorld, steps: int, alternating: bool = False, dual: float = DUAL) -> fs.State:
    """Gradient descent ascent on the mean over clients, by hand; ``alternating``: y first."""
    x, y = world.x0, world.y0

    def gradients(x: Vector, y: Vector) -> tuple[Vector, Vector]:
        number = world.data.clients
        parts = [
            world.gradient(tuple(a.numpy() for a in world.data.train.of_client(k)), k, x, y) for k in range(number)
        ]
        return np.mean([part[0] for part in parts], axis=0), np.mean([part[1] for part in parts], axis=0)

    for _ in range(steps):
        risen = y + dual * gradients(x, y)[1]
        risen = risen if world.project is None else world.project(risen)
        x, y = x - RATE * gradients(x, risen if alternating else y)[0], risen
    return fs.State(x=torch.from_numpy(x), y=torch.from_numpy(y))


ONE: dict[str, Any] = {"lr": RATE, "dual_lr": DUAL, "steps": 1}
PLAIN: dict[str, fs.Algorithm] = {
    "fgda": fs.FGDA(gamma=RATE, lam=DUAL, steps=1, alpha=1.0, beta=1.0),
    "fgda, any weights": fs.FGDA(gamma=2 * RATE, lam=2 * DUAL, eta=0.5, steps=1, alpha=0.3, beta=0.0),
    "fgda, single": fs.FGDA(gamma=RATE, lam=DUAL, steps=1, alpha=0.2, beta=0.6, synchronisation="single"),
    "local_sgda": fs.LocalSGDA(**ONE),
    "local_sgda_plus": fs.LocalSGDAPlus(**ONE),
    "local_sgdam": fs.LocalSGDAM(lr=2 * RATE, dual_lr=2 * DUAL, steps=1, **WITHOUT),
    "sagda": fs.SAGDA(**ONE),
    "cdma": fs.CDMA(**ONE),
    "cdma, ada": fs.CDMA(ada=True, weight=0.4, **ONE),
    "fednest": fs.FedNest(alpha=RATE, beta=DUAL, steps=1),
}
LONG: dict[str, fs.Algorithm] = {
    "fgda": fs.FGDA(gamma=RATE, lam=DUAL, steps=3, alpha=0.3, beta=0.6),
    "local_sgda": fs.LocalSGDA(**{**ONE, "steps": 3}),
    "local_sgdam": fs.LocalSGDAM(lr=2 * RATE, dual_lr=2 * DUAL, steps=3, **WITHOUT),
    "sagda": fs.SAGDA(**{**ONE, "steps": 3}),
    "cdma": fs.CDMA(**{**ONE, "steps": 3}),
}
STAGED: dict[str, fs.Algorithm] = {
    "coda": fs.CoDA(lr=RATE, steps=1, stage_steps=1000, gamma=HUGE),
    "codasca": fs.CODASCA(lr=RATE, steps=1, clip=0.0, weight_decay=0.0, gamma=HUGE),
    "codasca, no control": fs.CODASCA(lr=RATE, steps=1, clip=0.0, weight_decay=0.0, gamma=HUGE, control=False),
}


@pytest.mark.parametrize("world", [FREE, BALL], ids=["free", "ball"])
@pytest.mark.parametrize("name", [*PLAIN, *STAGED])
def test_one_step_of_one_client_is_gradient_descent_ascent(name: str, world: SaddleWorld) -> None:
    """FedNest's is alternating, y first; CoDA and CODASCA have one rate."""
    one = alone(world)
    dual = RATE if name in STAGED else DUAL
    found = solve({**PLAIN, **STAGED}[name], 4, one)
    assert apart(found, descent_ascent(one, 4, alternating=name == "fednest", dual=dual)) < 1e-12


@pytest.mark.parametrize("world", [FREE, BALL], ids=["free", "ball"])
@pytest.mark.parametrize("name", LONG)
def test_several_steps_of_one_client_are_gradient_descent_ascent(name: str, world: SaddleWorld) -> None:
    one = alone(world)
    assert apart(solve(LONG[name], 3, one), descent_ascent(one, 9)) < 1e-12


@pytest.mark.parametrize("name", [*PLAIN, *STAGED])
def test_one_step_of_all_clients_is_gradient_descent_ascent_on_the_mean(name: str) -> None:
    dual = RATE if name in STAGED else DUAL
    found = solve({**PLAIN, **STAGED}[name], 4, FREE)
    assert apart(found, descent_ascent(FREE, 4, alternating=name == "fednest", dual=dual)) < 1e-12


def test_a_step_of_cdma_is_one_step_of_the_server() -> None:
    """Whatever the second cohort draws: its corrections cancel in the first step; cohorts weigh by samples."""
    options: dict[str, Any] = {"participation": 2, "weighting": "samples", "world": FREE}
    found = [solve(fs.CDMA(**ONE), 1, batch_size=size, **options) for size in (1, 5)]
    assert apart(*found) < 1e-12
    clients = make_clients(make_setting(FREE.problem, FREE.data, seed=SEED), participation=2)
    parts = []
    for k in clients.cohort:
        parts.append(
            FREE.gradient(tuple(a.numpy() for a in FREE.data.train.of_client(int(k))), int(k), FREE.x0, FREE.y0)
        )
    sizes = [SIZES[k] for k in clients.cohort]
    g_x, g_y = (np.average([part[i] for part in parts], axis=0, weights=sizes) for i in (0, 1))
    np.testing.assert_allclose(found[0].x, FREE.x0 - RATE * g_x, atol=1e-12)
    np.testing.assert_allclose(found[0].y, FREE.y0 + DUAL * g_y, atol=1e-12)
    assert SIZES[clients.cohort[0]] != SIZES[clients.cohort[1]]


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("steps", [1, 3])
def test_for_one_client_both_synchronisations_are_one(steps: int, adaptive: bool) -> None:
    """From estimates that are no gradients, so that their weights count; of all data, since batches differ."""
    one = alone(BALL)
    rng = np.random.default_rng(1)
    w, v = (torch.from_numpy(rng.normal(size=size)) for size in (len(one.x0), len(one.y0)))
    ends = []
    for synchronisation in ("two_phase", "single", "two_phase"):
        more: dict[str, Any] = {"steps": steps, "synchronisation": synchronisation, "eta": 0.8, "beta": 0.6}
        more["alpha"] = 0.2 if len(ends) < 2 else 0.3
        algorithm = (fs.AdaFGDA if adaptive else fs.FGDA)(gamma=RATE, lam=DUAL, **more)
        setting = make_setting(one.problem, one.data, oracles=one.oracles)
        clients = make_clients(setting, rounds=4)
        with torch.no_grad():
            state = started(algorithm, clients).replace(w=w, v=v)
            setting.state.keep(np.zeros(1, dtype=np.int64), {"w": w[None], "v": v[None]})
            for r in range(4):
                clients.begin(r)
                state = algorithm.round(state, clients)
        ends.append(state)
    assert apart(ends[0], ends[1]) < 1e-12
    assert apart(ends[0], ends[2]) > 1e-3


@pytest.mark.parametrize("setting", ["full batches", "weighted"])
def test_with_one_step_both_synchronisations_have_the_same_means(setting: str) -> None:
    """For any number of clients: x and y see the means of the estimates only. Again of all data."""
    options = {**SETTINGS[setting], "batch_size": None}
    more: dict[str, Any] = {"gamma": RATE, "lam": DUAL, "steps": 1, "alpha": 0.3, "beta": 0.6}
    ends = [solve(fs.FGDA(synchronisation=s, **more), 4, **options) for s in ("two_phase", "single")]
    assert apart(*ends) < 1e-12
    longer = [solve(fs.FGDA(synchronisation=s, **{**more, "steps": 3}), 4, **options) for s in ("two_phase", "single")]
    assert apart(*longer) > 1e-4


@pytest.mark.parametrize("weighting", ["uniform", "samples"])
def test_fgda_that_never_averages_its_estimates_is_local_sgda_without_noise(weighting: str) -> None:
    """Estimates from all data are the clients' own gradients; the server's step is the mean of the clients' last ones.

    The dual is free: otherwise the mean would be projected, not what it is a mean of.
    """
    setting: dict[str, Any] = {"world": FREE, "weighting": weighting}
    more: dict[str, Any] = {"gamma": 2 * RATE, "lam": 2 * DUAL, "eta": 0.5, "steps": 4, "alpha": 0.3, "beta": 0.6}
    plain = solve(fs.LocalSGDA(**LOCAL), **setting)
    assert apart(solve(fs.FGDA(synchronisation="single", **more), **setting), plain) < 1e-12
    assert apart(solve(fs.FGDA(**more), **setting), plain) > 1e-4


def test_options_of_the_other_form_of_cdma_are_refused() -> None:
    for options in ({"weight": 0.5}, {"exponent": 0.3}):
        with pytest.raises(fs.InputError, match="belong to CDMA-ADA"):
            fs.CDMA(**options)
        fs.CDMA(ada=True, **options)
