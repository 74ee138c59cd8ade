"""Checks of the references of the adaptive methods, by hand and by reduction.

Hand-worked cases take gradients from a table, so that every number below can be followed
with pencil and paper; roots are left as roots.
"""

import math

import numpy as np
import pytest

from .fedams import fedams
from .fedavg import fedavg
from .fedlalr import fedlalr, interval
from .fedopt import fedadam
from .lafedopt import lafedopt
from .local_adaalter import local_adaalter
from .local_amsgrad import local_amsgrad

N, D = 4, 3
_rng = np.random.default_rng(1)
A = _rng.uniform(0.5, 2.0, size=(N, D))
B = _rng.normal(size=(N, D))
X0 = _rng.normal(size=D)
ONES = dict.fromkeys(range(N), 1.0)
WEIGHTS = {0: 1.0, 1: 2.0, 2: 5.0, 3: 0.5}
STEPS = {0: 1, 1: 4, 2: 2, 3: 3}
COHORTS = [[0, 1, 2], [3, 1], [2], [0, 1, 2, 3]]
EVERYONE = list(range(N))


def noisy_gradient(k, r, t, x):
    noise = np.random.default_rng([k, r, t]).normal(size=D)
    return A[k] * (x - B[k]) + 0.3 * noise


def uneven_steps(k, r):
    return 1 + (STEPS[k] + r) % 4


def one_step(k, r):
    return 1


def constant(rate):
    return lambda r, t: rate


def schedule(r, t):
    return 0.1 / (1 + r) * 0.9**t


def table(entries):
    """A gradient of one coordinate from a table: (client, round) -> its local steps."""
    return lambda k, r, t, x: np.array([float(entries[k, r][t])])


def lengths(entries):
    return lambda k, r: len(entries[k, r])


def close(left, right, tol=1e-12):
    np.testing.assert_allclose(left, right, rtol=tol, atol=tol)


# All five


ALL = {
    "fedlalr": (fedlalr, {"beta1": 0.8, "beta2": 0.9, "eps": 0.1}, ("m", "vhat")),
    "fedlalr restart": (fedlalr, {"beta1": 0.8, "beta2": 0.9, "eps": 0.1, "restart": True}, ("vhat",)),
    "fedlalr max": (fedlalr, {"beta1": 0.8, "beta2": 0.9, "eps": 0.1, "aggregate": "max"}, ("m", "vhat")),
    "fedams 1": (fedams, {"beta1": 0.8, "beta2": 0.9, "eps": 0.01, "server_lr": 0.5}, ("m", "v", "vhat")),
    "fedams 2": (
        fedams,
        {"beta1": 0.8, "beta2": 0.9, "eps": 0.01, "server_lr": 0.5, "option": 2},
        ("m", "v", "vhat"),
    ),
    "lafedopt": (lafedopt, {"eps": 0.1, "server": "adam"}, ("m", "v")),
    "lafedopt local": (lafedopt, {"eps": 0.1, "correction": "local", "client_optimizer": "yogi"}, ("m", "v")),
    "lafedopt none": (lafedopt, {"eps": 0.1, "correction": "none", "client_optimizer": "adagrad"}, ("m", "v")),
    "local_amsgrad": (local_amsgrad, {"beta1": 0.8, "beta2": 0.9, "eps": 0.1}, ("m", "v", "vhat")),
    "local_adaalter": (local_adaalter, {}, ("b2",)),
}


def assert_same(left, right):
    assert left.keys() == right.keys()
    for name in left:
        if isinstance(left[name], dict):
            assert_same(left[name], right[name])
        else:
            close(left[name], right[name])


@pytest.mark.parametrize("name", ALL)
def test_a_run_can_be_stopped_and_continued(name):
    method, options, state = ALL[name]
    common = {"weights": WEIGHTS, "weight_decay": 0.1, **options}
    whole = method(X0, COHORTS, noisy_gradient, uneven_steps, lr=schedule, **common)
    first = method(X0, COHORTS[:2], noisy_gradient, uneven_steps, lr=schedule, **common)
    second = method(
        first["x"],
        COHORTS[2:],
        lambda k, r, t, x: noisy_gradient(k, r + 2, t, x),
        lambda k, r: uneven_steps(k, r + 2),
        lr=lambda r, t: schedule(r + 2, t),
        **common,
        **{key: first[key] for key in state},
    )
    assert set(whole) == {"x", *state}
    assert_same(second, whole)


@pytest.mark.parametrize("name", ALL)
def test_weight_decay_is_an_l2_term_and_weights_are_relative(name):
    method, options, _ = ALL[name]
    run = {"lr": schedule, **options}
    decayed = method(X0, COHORTS, noisy_gradient, uneven_steps, weights=WEIGHTS, weight_decay=0.3, **run)
    by_hand = method(
        X0,
        COHORTS,
        lambda k, r, t, x: noisy_gradient(k, r, t, x) + 0.3 * x,
        uneven_steps,
        weights={k: 7.0 * w for k, w in WEIGHTS.items()},
        **run,
    )
    assert_same(decayed, by_hand)


@pytest.mark.parametrize("name", ALL)
def test_arguments_are_left_alone_and_gradients_asked_once_per_step(name):
    method, options, state = ALL[name]
    common = {"lr": schedule, "weights": WEIGHTS, **options}
    start = method(X0, COHORTS, noisy_gradient, uneven_steps, **common)
    kept = {key: start[key] for key in state}
    before = {
        key: {k: value.copy() for k, value in old.items()} if isinstance(old, dict) else old.copy()
        for key, old in kept.items()
    }
    calls = []

    def spiteful(k, r, t, x):
        calls.append((k, r, t))
        g = noisy_gradient(k, r, t, x)
        x[:] = np.nan
        return g

    x0 = X0.copy()
    out = method(x0, COHORTS, spiteful, uneven_steps, **common, **kept)
    assert np.all(np.isfinite(out["x"]))
    close(x0, X0)
    assert_same(kept, before)
    wanted = [(k, r, t) for r, cohort in enumerate(COHORTS) for k in cohort for t in range(uneven_steps(k, r))]
    assert calls == wanted


@pytest.mark.parametrize("name", ALL)
def test_a_round_without_clients_is_refused(name):
    method, options, _ = ALL[name]
    with pytest.raises(ValueError, match="no clients"):
        method(X0, [[]], noisy_gradient, one_step, lr=schedule, weights=ONES, **options)


# FedLALR


LALR = {(0, 0): [4, 2], (1, 0): [0], (1, 1): [1]}
# eps = 2, vhat_{-1} = 4, beta1 = 1/2, beta2 = 3/4, alpha = 1, weights 1 and 3.
# Round 0, client 0: m = 2, v = 3 + 4 = 7, vhat = 7, x = -2/sqrt 7;
#                    m = 1 + 1 = 2, v = 5.25 + 1 = 6.25, vhat = 7, x = -4/sqrt 7.
#          client 1: m = 0, v = 3, vhat = 4, x = 0.
# Server: x = -1/sqrt 7, m = 1/2, vhat = 7/4 + 3 = 4.75 (mean) or 7 (max).


def lalr(cohorts, entries=LALR, **options):
    return fedlalr(
        [0.0],
        cohorts,
        table(entries),
        lengths(entries),
        lr=constant(1.0),
        weights={0: 1.0, 1: 3.0},
        beta1=0.5,
        beta2=0.75,
        eps=2.0,
        **options,
    )


def test_fedlalr_first_round_by_hand():
    out = lalr([[0, 1]])
    close(out["x"], [-1 / math.sqrt(7)])
    close(out["m"], [0.5])
    close(out["vhat"], [4.75])


def test_fedlalr_second_round_starts_v_at_the_server_value():
    # Client 1: m = 1/4 + 1/2, v = 0.75 * 4.75 + 0.25 < 4.75.
    out = lalr([[0, 1], [1]])
    close(out["x"], [-1 / math.sqrt(7) - 0.75 / math.sqrt(4.75)])
    close(out["m"], [0.75])
    close(out["vhat"], [4.75])
    # With a gradient of 3 instead: m = 1/4 + 3/2, v = 3.5625 + 2.25 = 5.8125 > 4.75.
    out = lalr([[0, 1], [1]], {**LALR, (1, 1): [3]})
    close(out["vhat"], [5.8125])
    close(out["x"], [-1 / math.sqrt(7) - 1.75 / math.sqrt(5.8125)])


def test_fedlalr_restart_and_maximum_by_hand():
    out = lalr([[0, 1], [1]], restart=True)
    close(out["x"], [-1 / math.sqrt(7) - 0.5 / math.sqrt(4.75)])
    assert "m" not in out
    out = lalr([[0, 1], [1]], aggregate="max")
    close(out["vhat"], [7])
    close(out["x"], [-1.75 / math.sqrt(7)])
    out = lalr([[0, 1], [1]], aggregate="max", restart=True)
    close(out["x"], [-1.5 / math.sqrt(7)])
    with pytest.raises(ValueError, match="no server momentum"):
        lalr([[0, 1]], restart=True, m=[1.0])
    with pytest.raises(ValueError, match="aggregate"):
        lalr([[0, 1]], aggregate="median")


def test_fedlalr_one_client_one_round_is_amsgrad_without_bias_correction():
    beta1, beta2, eps = 0.9, 0.95, 0.2
    x, m, v, vhat = X0.copy(), np.zeros(D), np.full(D, eps**2), np.full(D, eps**2)
    for t in range(30):
        g = noisy_gradient(2, 0, t, x)
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g * g
        vhat = np.where(v > vhat, v, vhat)
        x = x - schedule(0, t) * m / np.sqrt(vhat)
    for aggregate in ("mean", "max"):
        out = fedlalr(
            X0,
            [[2]],
            noisy_gradient,
            lambda k, r: 30,
            lr=schedule,
            weights=WEIGHTS,
            beta1=beta1,
            beta2=beta2,
            eps=eps,
            aggregate=aggregate,
        )
        close(out["x"], x)
        close(out["m"], m)
        close(out["vhat"], vhat)


def test_fedlalr_without_memory_takes_steps_of_known_size():
    # beta1 = beta2 = 0: vhat = max(eps^2, g^2), so the step is lr g / max(eps, |g|).
    g = np.array([3.0, -0.5, 0.25])
    out = fedlalr(
        X0, [[0]], lambda k, r, t, x: g, one_step, lr=constant(0.1), weights=ONES, beta1=0.0, beta2=0.0, eps=0.5
    )
    close(X0 - out["x"], [0.1, -0.1, 0.05])
    # A second, smaller gradient still is divided by the larger first: lr 0.3 / 3.
    out = fedlalr(
        np.zeros(1),
        [[0]],
        table({(0, 0): [3.0, 0.3]}),
        lambda k, r: 2,
        lr=constant(0.1),
        weights=ONES,
        beta1=0.0,
        beta2=0.0,
        eps=0.5,
    )
    close(out["x"], [-0.1 - 0.01])


def test_fedlalr_vhat_never_falls_nor_below_eps_squared():
    options = {"lr": schedule, "weights": WEIGHTS, "beta1": 0.9, "beta2": 0.5, "eps": 0.3}
    last = {}
    for rounds in range(len(COHORTS) + 1):
        for aggregate in ("mean", "max"):
            out = fedlalr(X0, COHORTS[:rounds], noisy_gradient, uneven_steps, aggregate=aggregate, **options)
            # A mean of vhat_k that are all at least the server's old vhat.
            assert np.all(out["vhat"] >= last.get(aggregate, 0.3**2) - 1e-15)
            last[aggregate] = out["vhat"]
    assert np.all(last["max"] > 0.3**2)


def test_fedlalr_maximum_and_mean_agree_for_equal_clients():
    runs = [
        fedlalr(
            X0,
            [[0, 1], [2, 3]],
            lambda k, r, t, x: noisy_gradient(0, r, t, x),
            lambda k, r: 3,
            lr=schedule,
            weights=WEIGHTS,
            beta1=0.9,
            beta2=0.9,
            eps=0.1,
            aggregate=aggregate,
        )
        for aggregate in ("mean", "max")
    ]
    assert_same(*runs)


def test_interval_at_and_around_powers():
    assert [interval(t, 4, 2.0, "floor") for t in range(1, 10)] == [4, 5, 5, 6, 6, 6, 6, 7, 7]
    assert [interval(t, 4, 2.0, "ceil") for t in range(1, 10)] == [4, 5, 6, 6, 7, 7, 7, 7, 8]
    assert [interval(t, 4.0, 2.0, "floor") for t in (64, 65, 100)] == [10, 10, 10]
    assert [interval(t, 4.0, 2.0, "ceil") for t in (64, 65, 100)] == [10, 11, 11]
    for base in (2, 3, 4, 5, 7, 10):
        for e in range(1, 20):
            for b in (base, float(base)):
                assert interval(base**e, 3, b, "floor") == interval(base**e, 3, b, "ceil") == 3 + e
                assert interval(base**e - 1, 3, b, "floor") == 3 + e - 1
                assert interval(base**e + 1, 3, b, "ceil") == 3 + e + 1
    # 1.5^2 = 2.25 lies between 2 and 3.
    assert [interval(t, 0, 1.5, "floor") for t in (1, 2, 3, 4)] == [0, 1, 2, 3]
    assert [interval(t, 0, 1.5, "ceil") for t in (1, 2, 3, 4)] == [0, 2, 3, 4]


def test_interval_refuses_what_has_no_logarithm():
    for arguments in ((0, 4, 2.0, "ceil"), (1, 4, 1.0, "ceil"), (1, 4, 2.0, "nearest")):
        with pytest.raises(ValueError):
            interval(*arguments)


# FedAMS


AMS = {(0, 0): [-3], (0, 1): [0]}
# lr = 1: Delta = 3, then 0. beta1 = 1/2, beta2 = 3/4, server_lr = 2.
# Round 0: m = 1.5, v = 9/4. Round 1: m = 0.75, v = 27/16.


def ams(rounds, **options):
    return fedams(
        [0.0],
        [[0]] * rounds,
        table(AMS),
        one_step,
        lr=constant(1.0),
        weights=ONES,
        server_lr=2.0,
        beta1=0.5,
        beta2=0.75,
        **options,
    )


def test_fedams_option_1_by_hand():
    out = ams(1, eps=0.25)
    close([out["x"], out["m"], out["v"], out["vhat"]], [[2.0], [1.5], [2.25], [2.25]])
    out = ams(2, eps=0.25)
    close([out["x"], out["m"], out["v"], out["vhat"]], [[2 + 2 * 0.75 / 1.5], [0.75], [27 / 16], [2.25]])
    # eps bounds vhat, not its root: 1.5 / sqrt(4), then 0.75 / sqrt(4).
    out = ams(2, eps=4.0)
    close([out["x"], out["vhat"]], [[2 * (0.75 + 0.375)], [4.0]])


def test_fedams_option_2_by_hand():
    out = ams(2, eps=0.25, option=2)
    close([out["x"], out["vhat"]], [[2 * 1.5 / 1.75 + 2 * 0.75 / 1.75], [2.25]])
    out = ams(2, eps=4.0, option=2)
    close([out["x"], out["vhat"]], [[2 * 1.5 / 5.5 + 2 * 0.75 / 5.5], [2.25]])


def test_fedams_without_the_maximum_by_hand():
    root = math.sqrt(27 / 16)
    out = ams(2, eps=0.25, maximum=False)
    close([out["x"], out["vhat"]], [[2 + 1.5 / root], [27 / 16]])
    out = ams(2, eps=2.0, maximum=False)  # round 0: 2.25 > 2; round 1: 27/16 < 2
    close([out["x"], out["vhat"]], [[2 + 1.5 / math.sqrt(2)], [2.0]])
    out = ams(2, eps=0.25, option=2, maximum=False)
    close([out["x"], out["vhat"]], [[3 / 1.75 + 1.5 / (root + 0.25)], [27 / 16]])
    with pytest.raises(ValueError, match="option"):
        ams(1, eps=0.25, option=3)


def test_fedams_option_2_without_the_maximum_is_fedadam():
    tau = 0.05
    common = {"lr": schedule, "weights": WEIGHTS, "weight_decay": 0.1, "server_lr": 0.3, "beta1": 0.8, "beta2": 0.9}
    ours = fedams(
        X0,
        COHORTS,
        noisy_gradient,
        lambda k, r: STEPS[k],
        eps=tau,
        option=2,
        maximum=False,
        v=np.full(D, tau**2),
        **common,
    )
    adam = fedadam(X0, COHORTS, noisy_gradient, lambda k: STEPS[k], tau=tau, **common)
    for name in ("x", "m", "v"):
        close(ours[name], adam[name])


def test_fedams_vhat_never_falls():
    options = {"lr": schedule, "weights": WEIGHTS, "server_lr": 0.1, "beta1": 0.9, "beta2": 0.3, "eps": 0.004}
    for option, last in ((1, np.full(D, 0.004)), (2, np.zeros(D))):
        for rounds in range(1, len(COHORTS) + 1):
            out = fedams(X0, COHORTS[:rounds], noisy_gradient, uneven_steps, option=option, **options)
            assert np.all(out["vhat"] >= last)
            assert np.all(out["vhat"] >= out["v"])
            last = out["vhat"]


# LaFedOPT


LA = {(0, 0): [4, 1]}


def la(entries=LA, cohorts=((0,),), **options):
    options = {"beta1": 0.5, "beta2": 0.75, "eps": 1.0, "weights": ONES, **options}
    return lafedopt([0.0], cohorts, table(entries), lengths(entries), lr=constant(1.0), **options)


@pytest.mark.parametrize(
    ("optimizer", "m", "v"),
    [
        # beta1 = 1/2, beta2 = 3/4, g = 4 then 1: m and v after each step.
        ("adam", (2.0, 1.5), (4.0, 3.25)),
        ("yogi", (2.0, 1.5), (4.0, 3.75)),
        ("adagrad", (4.0, 1.0), (16.0, 17.0)),
    ],
)
def test_lafedopt_one_client_by_hand(optimizer, m, v):
    p = [1 / (math.sqrt(value) + 1) for value in v]
    change = -(m[0] * p[0] + m[1] * p[1])
    c = p[0] + p[1] if optimizer == "adagrad" else p[0] / 2 + (p[0] / 4 + p[1] / 2)
    # One client: the joint correction undoes the local one.
    close(la(client_optimizer=optimizer, correction="joint")["x"], [change])
    close(la(client_optimizer=optimizer, correction="none")["x"], [change])
    close(la(client_optimizer=optimizer, correction="local")["x"], [change / c])
    close(la(client_optimizer=optimizer, correction="local", server_lr=0.5)["x"], [0.5 * change / c])


def test_lafedopt_yogi_stands_still_where_v_equals_the_square():
    # g = 4 then 2: v = 0 + 16/4 = 4, and then sign(4 - 4) = 0. P = 1/3 both times,
    # m = 2 both times; S = 1/6, 1/4; C = 5/12.
    out = la({(0, 0): [4, 2]}, client_optimizer="yogi", correction="local")
    close(out["x"], [-(4 / 3) * (12 / 5)])


def test_lafedopt_two_clients_by_hand():
    # Adagrad, v0 = 9, eps = 1. Client 0: g = 4, v = 25, P = C = 1/6, change -4/6.
    # Client 1: g = 0 then sqrt 7: v = 9, 16; P = 1/4, 1/5; C = 9/20, change -sqrt 7 / 5.
    entries = {(0, 0): [4], (1, 0): [0, math.sqrt(7)]}
    options = {"client_optimizer": "adagrad", "v0": 9.0, "weights": {0: 1.0, 1: 3.0}}
    local = 0.25 * (-4 / 6) * 6 + 0.75 * (-math.sqrt(7) / 5) * (20 / 9)
    inverse = 0.25 * 6 + 0.75 * (20 / 9)
    none = 0.25 * (-4 / 6) + 0.75 * (-math.sqrt(7) / 5)
    close(la(entries, [[0, 1]], correction="local", **options)["x"], [local])
    close(la(entries, [[0, 1]], correction="joint", **options)["x"], [local / inverse])
    close(la(entries, [[0, 1]], correction="none", **options)["x"], [none])


def test_lafedopt_server_adam_by_hand():
    # Local Adagrad, one step of g = 1: P = 1/2, change -1/2. m = -1/4 and
    # v = 3/4 * 1/4 + 1/4 * 1/4 = 1/4 with tau = 1/2, so the step is -1/4 / (1/2 + 1/2).
    out = la({(0, 0): [1]}, client_optimizer="adagrad", server="adam", server_beta1=0.5, server_beta2=0.75, tau=0.5)
    close([out["x"], out["m"], out["v"]], [[-0.25], [-0.25], [0.25]])
    out = la(
        {(0, 0): [1]},
        client_optimizer="adagrad",
        server="adam",
        server_beta1=0.5,
        server_beta2=0.75,
        tau=0.5,
        m=[1.0],
        v=[4.0],
        server_lr=2.0,
    )
    close([out["m"], out["v"]], [[0.25], [3.0625]])
    close(out["x"], [2 * 0.25 / (1.75 + 0.5)])


def test_lafedopt_with_unit_preconditioner_is_fedavg_or_its_normalised_form():
    # beta2 = 1 freezes v at v0 = 9/16, and eps = 1/4: P = 1. With beta1 = 0 then C = K.
    options = {"lr": schedule, "weights": WEIGHTS, "weight_decay": 0.1}
    unit = {"beta1": 0.0, "beta2": 1.0, "v0": 9 / 16, "eps": 0.25, "server_lr": 0.8}

    def steps(k, r):
        return STEPS[k]

    for optimizer in ("adam", "yogi"):
        plain = lafedopt(
            X0,
            COHORTS,
            noisy_gradient,
            steps,
            correction="none",
            client_optimizer=optimizer,
            **unit,
            **options,
        )
        average = fedavg(X0, COHORTS, noisy_gradient, lambda k: STEPS[k], server_lr=0.8, **options)
        close(plain["x"], average["x"])

    change = {k: fedavg(X0, [[k]], noisy_gradient, lambda k: STEPS[k], **options)["x"] - X0 for k in EVERYONE}
    total = sum(WEIGHTS.values())
    per_step = sum(WEIGHTS[k] / total * change[k] / STEPS[k] for k in EVERYONE)
    inverse = sum(WEIGHTS[k] / total / STEPS[k] for k in EVERYONE)
    for correction, expected in (("local", per_step), ("joint", per_step / inverse)):
        out = lafedopt(X0, [EVERYONE], noisy_gradient, steps, correction=correction, **unit, **options)
        close(out["x"], X0 + 0.8 * expected)


def test_lafedopt_with_unit_preconditioner_and_momentum_counts_the_momentum_weight():
    # P = 1 and g constant: S_t = 1 - beta1^t and x_k - x = -lr g C, C = sum of the S_t.
    g = {0: 1.0, 1: -2.0, 2: 0.5, 3: 0.0}
    weight = {k: sum(1 - 0.7**t for t in range(1, STEPS[k] + 1)) for k in EVERYONE}
    common = {"lr": constant(0.1), "weights": ONES, "beta1": 0.7, "beta2": 1.0, "v0": 0.0, "eps": 1.0}
    run = ([0.0], [EVERYONE], lambda k, r, t, x: np.array([g[k]]), lambda k, r: STEPS[k])
    mean = sum(g.values()) / N
    close(lafedopt(*run, correction="local", **common)["x"], [-0.1 * mean])
    inverse = sum(1 / weight[k] for k in EVERYONE) / N
    close(lafedopt(*run, correction="joint", **common)["x"], [-0.1 * mean / inverse])
    raw = sum(g[k] * weight[k] for k in EVERYONE) / N
    close(lafedopt(*run, correction="none", **common)["x"], [-0.1 * raw])


def test_lafedopt_corrections_keep_a_point_of_zero_mean_gradient():
    # Constant gradients 3 and -1 with weights 1 and 3: the mean is 0.
    entries = {(0, 0): [3, 3], (1, 0): [-1, -1, -1]}
    options = {"client_optimizer": "adagrad", "weights": {0: 1.0, 1: 3.0}, "eps": 0.1}
    for correction in ("joint", "local"):
        close(la(entries, [[0, 1]], correction=correction, **options)["x"], [0.0])
    assert abs(la(entries, [[0, 1]], correction="none", **options)["x"][0]) > 0.1


def test_lafedopt_resets_the_client_every_round():
    entries = {(0, 0): [4, 1], (0, 1): [4, 1], (0, 2): [4, 1]}
    for optimizer in ("adagrad", "adam", "yogi"):
        once = la(entries, [[0]], client_optimizer=optimizer)["x"]
        close(la(entries, [[0]] * 3, client_optimizer=optimizer)["x"], 3 * once)
        # Nor does a client see the server's m and v: the change is still ``once``.
        out = la(entries, [[0]], client_optimizer=optimizer, server="adam", server_beta1=0.5, m=[1.0], v=[4.0])
        close(out["m"], 0.5 + 0.5 * once)


def test_lafedopt_refuses_unknown_options_and_idle_clients():
    for options in (
        {"client_optimizer": "sgd"},
        {"correction": "global"},
        {"server": "yogi"},
        {"eps": 0.0},
    ):
        with pytest.raises(ValueError):
            la(**options)
    with pytest.raises(ValueError, match="no step"):
        la({(0, 0): []})


# Local AMSGrad


def test_local_amsgrad_by_hand():
    # vhat = eps = 4, beta1 = 1/2, beta2 = 3/4, lr = 1. Client 0, g = 8: m = 4, v = 16,
    # x = -4/2 with the old vhat; g = 8: m = 6, v = 12 + 16 = 28. Client 1 stays at 0.
    # Mean of v: 14 > 4, and the last step uses it: x = (-2 - 6/sqrt 14 + 0) / 2.
    entries = {(0, 0): [8, 8], (1, 0): [0, 0], (1, 1): [2]}
    common = {"lr": constant(1.0), "weights": ONES, "beta1": 0.5, "beta2": 0.75, "eps": 4.0}
    one = local_amsgrad([0.0], [[0, 1]], table(entries), lengths(entries), **common)
    x = (-2 - 6 / math.sqrt(14)) / 2
    close([one["x"], one["vhat"]], [[x], [14.0]])
    close([one["m"][0], one["v"][0], one["m"][1], one["v"][1]], [[6.0], [28.0], [0.0], [0.0]])
    # Round 1, client 1 alone, g = 2: m = 1, v = 1 < vhat. Client 0 keeps its state.
    two = local_amsgrad([0.0], [[0, 1], [1]], table(entries), lengths(entries), **common)
    close([two["x"], two["vhat"]], [[x - 1 / math.sqrt(14)], [14.0]])
    close([two["m"][0], two["v"][0], two["m"][1], two["v"][1]], [[6.0], [28.0], [1.0], [1.0]])


def test_local_amsgrad_uneven_steps_and_weights_by_hand():
    # beta1 = beta2 = 0: m = g, v = g^2. Weights 1 and 3, vhat = 1, lr(0, t) = 1, 1/2.
    # Client 0: g = 2: x = -2; then g = 4 waits. Client 1: g = 2 waits.
    # v_mean = 16/4 + 3 * 4/4 = 7. x = (-2 - (1/2) 4/sqrt 7)/4 + 3 (-2/sqrt 7)/4.
    entries = {(0, 0): [2, 4], (1, 0): [2]}
    out = local_amsgrad(
        [0.0],
        [[0, 1]],
        table(entries),
        lengths(entries),
        lr=lambda r, t: 1 / (1 + t),
        weights={0: 1.0, 1: 3.0},
        beta1=0.0,
        beta2=0.0,
        eps=1.0,
    )
    close(out["vhat"], [7.0])
    close(out["x"], [-0.5 - 2 / math.sqrt(7)])


def test_local_amsgrad_of_one_client_with_one_step_is_amsgrad():
    beta1, beta2, eps = 0.9, 0.7, 0.2
    x, m, v, vhat = X0.copy(), np.zeros(D), np.zeros(D), np.full(D, eps)
    for r in range(12):
        g = noisy_gradient(1, r, 0, x)
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g * g
        vhat = np.where(v > vhat, v, vhat)
        x = x - schedule(r, 0) * m / np.sqrt(vhat)
    out = local_amsgrad(
        X0, [[1]] * 12, noisy_gradient, one_step, lr=schedule, weights=ONES, beta1=beta1, beta2=beta2, eps=eps
    )
    assert_same(out, {"x": x, "vhat": vhat, "m": {1: m}, "v": {1: v}})


def test_local_amsgrad_leaves_the_state_of_absent_clients_alone():
    rng = np.random.default_rng(5)
    m = {k: rng.normal(size=D) for k in (0, 1, 3)}
    v = {k: rng.uniform(0.0, 2.0, size=D) for k in (0, 1, 3)}
    common = {"lr": schedule, "weights": WEIGHTS, "beta1": 0.9, "beta2": 0.9, "eps": 0.1}
    out = local_amsgrad(X0, [[1, 2], [1]], noisy_gradient, uneven_steps, m=m, v=v, **common)
    assert set(out["m"]) == set(out["v"]) == {0, 1, 2, 3}
    for k in (0, 3):
        np.testing.assert_array_equal(out["m"][k], m[k])
        np.testing.assert_array_equal(out["v"][k], v[k])
    for k in (1, 2):
        assert not np.allclose(out["m"][k], m.get(k, 0.0))
    # Nor does the state of the absent have a say.
    other = local_amsgrad(X0, [[1, 2], [1]], noisy_gradient, uneven_steps, m={1: m[1]}, v={1: v[1]}, **common)
    close(out["x"], other["x"])
    close(out["vhat"], other["vhat"])


def test_local_amsgrad_initial_v_and_monotone_vhat():
    common = {"lr": schedule, "weights": WEIGHTS, "beta1": 0.9, "beta2": 0.4, "eps": 0.2}
    last = np.full(D, 0.2)
    for rounds in range(1, len(COHORTS) + 1):
        out = local_amsgrad(X0, COHORTS[:rounds], noisy_gradient, uneven_steps, **common)
        assert np.all(out["vhat"] >= last)
        last = out["vhat"]
    # v0 = 1, beta2 = 0.4, g = 0: v = 0.4 > eps.
    out = local_amsgrad(X0, [[0]], lambda k, r, t, x: np.zeros(D), one_step, v0=1.0, **common)
    close(out["vhat"], np.full(D, 0.4))
    with pytest.raises(ValueError, match="no step"):
        local_amsgrad(X0, [[0]], noisy_gradient, lambda k, r: 0, **common)


# Local AdaAlter


def test_local_adaalter_by_hand():
    # b0 = eps = 1, lr = 1, weights 1 and 3. Client 0: -1/sqrt(1 + 1) - 2/sqrt(1 + 2) and
    # A^2 = 1 + 1 + 4 = 6. Client 1: -3/sqrt 2 and A^2 = 10. B^2 = 6/4 + 30/4 = 9.
    entries = {(0, 0): [1, 2], (1, 0): [3], (0, 1): [5, 7]}
    common = {"lr": constant(1.0), "weights": {0: 1.0, 1: 3.0}}
    x = (-1 / math.sqrt(2) - 2 / math.sqrt(3)) / 4 - 9 / math.sqrt(2) / 4
    out = local_adaalter([0.0], [[0, 1]], table(entries), lengths(entries), **common)
    close([out["x"], out["b2"]], [[x], [9.0]])
    # Then client 0 alone: t' starts anew, -5/sqrt(9 + 1) - 7/sqrt(9 + 2), B^2 = 9 + 25 + 49.
    out = local_adaalter([0.0], [[0, 1], [0]], table(entries), lengths(entries), **common)
    close([out["x"], out["b2"]], [[x - 5 / math.sqrt(10) - 7 / math.sqrt(11)], [83.0]])


def test_local_adaalter_constants_by_hand():
    # eps = 2, b0 = 3: -6/sqrt(9 + 4) - 6/sqrt(9 + 8); b2 given takes the place of b0^2.
    entries = {(0, 0): [6, 6]}
    common = {"lr": constant(0.5), "weights": ONES, "eps": 2.0, "b0": 3.0}
    out = local_adaalter([0.0], [[0]], table(entries), lengths(entries), **common)
    close([out["x"], out["b2"]], [[-3 / math.sqrt(13) - 3 / math.sqrt(17)], [81.0]])
    out = local_adaalter([0.0], [[0]], table(entries), lengths(entries), b2=[21.0], **common)
    close([out["x"], out["b2"]], [[-3 / 5 - 3 / math.sqrt(29)], [93.0]])


def test_local_adaalter_with_one_step_is_synchronous_adaalter():
    # All clients share x and the denominator, so only the mean gradient moves x, while
    # the mean of the squares goes into B^2.
    p = np.array([WEIGHTS[k] for k in EVERYONE]) / sum(WEIGHTS.values())
    x, b2 = X0.copy(), np.full(D, 0.25)
    for r in range(6):
        g = np.array([noisy_gradient(k, r, 0, x) for k in EVERYONE])
        x = x - schedule(r, 0) * (p @ g) / np.sqrt(b2 + 0.09)
        b2 = b2 + p @ g**2
    out = local_adaalter(X0, [EVERYONE] * 6, noisy_gradient, one_step, lr=schedule, weights=WEIGHTS, eps=0.3, b0=0.5)
    close(out["x"], x)
    close(out["b2"], b2)


def test_local_adaalter_accumulator_grows():
    last = np.ones(D)
    for rounds in range(1, len(COHORTS) + 1):
        out = local_adaalter(X0, COHORTS[:rounds], noisy_gradient, uneven_steps, lr=schedule, weights=WEIGHTS)
        assert np.all(out["b2"] > last)
        last = out["b2"]
