"""LocalSGDM-RL (ratio loss), slow references of its pieces in float64 NumPy.

L. Wang, S. Xu, X. Wang, Q. Zhu, "Addressing Class Imbalance in Federated Learning", AAAI 2021.
Follows a description of the method [A], not the paper's own text, and was checked against the
authors' code [code] (repository balanced-fl/Addressing-Class-Imbalance-FL, folder
FEMNIST-4-Losses). [2024] is the paper of LocalSMCGDAM, which uses the method as a baseline.

FedAvg with momentum SGD on the weighted cross-entropy, one weight per class. Every round the
server trains the global model on each class c of a small auxiliary set alone, with
weights 1, by the clients' own procedure [code]; D_c is the change of the last layer's matrix.

    position (i, j) belongs to class c if D_c(i, j) is the largest of D_1 .. D_C there and no other
        class exceeds ``share`` = 0.8 of it in magnitude                       [A, code]
    R_c = |sum D_c| / |sum mean_{c' != c} D_{c'}|, the sums over the positions of c;
        ``empty`` = 10 if the denominator is 0; at most ``cap`` = 5000          [A, code]
    weight_c = ``base`` + ``slope`` R_c = 1 + 0.1 R_c                           [A, code]

What had to be decided:

* "Exceeds" is strict: another class at exactly 0.8 of the largest does not take the position away.
  "Largest" is signed, not in magnitude; a negative largest never gets a position, every other
  class being larger in magnitude. Ties are never assigned (for share < 1). [code]
* A largest change of exactly 0 (the others negative) has no 80 %. ``zero='assign'`` (default): its
  class gets the position if no other class is 0 there too [code, a special case in it]. 'skip'
  (the wording of [A]): nobody gets it.
* A class without positions has denominator 0, hence R = ``empty``. [code]
* The changes of the weight matrix only, no bias [code]; what is given here is up to the caller.
  With one output for two classes the matrix has one row. R does not depend on the scale of D.
* When the weights are used. ``delay=True`` (default): those of round r are made from the model at
  the START of round r and used in round r + 1; the first round has weights 1 [code].
  ``delay=False``: made before the round's broadcast and used in the same round (the other reading of
  "each round trains the global model ... broadcast C weights" [A]).
* The weighted loss of a batch is sum_i w_{y_i} l_i / B, divided by the size of the batch [code];
  ``reduction='weights'`` divides by sum_i w_{y_i} instead (what torch's weighted mean does).
* Momentum: b <- g in the first step of a buffer, then b <- momentum b + (1 - dampening) g, and
  x <- x - lr b, where g contains weight_decay x: torch's SGD [code: momentum 0.9, weight decay
  5e-4, lr 0.001]. Table 2 of [2024] has "momentum coefficient 0.1" without a formula; as the weight
  of the new gradient in a moving average that is momentum = dampening = 0.9.
* The buffer. ``momentum_state='reset'`` (default): a new one every round, for clients and
  auxiliary runs [code]. 'keep': with its client.
  'average': averaged like x and sent back (Local SGD with momentum; not what "up d" says).
  Auxiliary runs always start from a new buffer.
* The mean over the cohort is uniform [code]; ``weights`` of clients can be given.
* The numbers of local and auxiliary steps are arguments, also the auxiliary rate.
"""

import numpy as np


def _at(value, r, t):
    """A rate is a float, or a callable of the round and the local step."""
    return value(r, t) if callable(value) else value


def _array(value):
    return np.array(value, dtype=np.float64)


def positions(last_layer_changes, *, share=0.8, zero="assign"):
    """The class to which each position belongs, -1 for none.

    ``last_layer_changes`` is [C, ...], D_c for each class; the result has the shape [...].
    """
    if zero not in ("assign", "skip"):
        raise ValueError(f"zero must be 'assign' or 'skip', got {zero!r}")
    changes = _array(last_layer_changes)
    classes = changes.shape[0]
    if classes < 2:
        raise ValueError("a ratio needs at least two classes")
    flat = changes.reshape(classes, -1)
    owner = np.full(flat.shape[1], -1, dtype=np.int64)
    for i in range(flat.shape[1]):
        column = flat[:, i]
        best = 0
        for c in range(1, classes):
            if column[c] > column[best]:
                best = c
        free = True
        for c in range(classes):
            if c == best:
                continue
            if column[best] == 0.0:
                free = free and zero == "assign" and column[c] != 0.0
            else:
                free = free and not abs(column[c]) / abs(column[best]) > share
        if free:
            owner[i] = best
    return owner.reshape(changes.shape[1:])


def ratios(last_layer_changes, *, share=0.8, empty=10.0, cap=5000.0, zero="assign"):
    """R_c for each class, [C]."""
    changes = _array(last_layer_changes)
    owner = positions(changes, share=share, zero=zero).reshape(-1)
    classes = changes.shape[0]
    flat = changes.reshape(classes, -1)
    result = np.zeros(classes)
    for c in range(classes):
        own, others = 0.0, 0.0
        for i in range(flat.shape[1]):
            if owner[i] == c:
                own += flat[c, i]
                others += sum(flat[d, i] for d in range(classes) if d != c) / (classes - 1)
        result[c] = min(abs(own) / abs(others) if others != 0.0 else empty, cap)
    return result


def class_weights(values, *, base=1.0, slope=0.1):
    """The weights that are broadcast, from the ratios."""
    return base + slope * _array(values)


def weighted_cross_entropy(logits, labels, weights, *, reduction="batch"):
    """Loss of a batch and its gradient in the logits; logits [B, C], labels [B], weights [C]."""
    if reduction not in ("batch", "weights"):
        raise ValueError(f"reduction must be 'batch' or 'weights', got {reduction!r}")
    logits, weights = _array(logits), _array(weights)
    loss, total = 0.0, 0.0
    gradient = np.zeros_like(logits)
    for i, label in enumerate(labels):
        shifted = logits[i] - np.max(logits[i])
        log_p = shifted - np.log(np.sum(np.exp(shifted)))
        loss += -weights[label] * log_p[label]
        gradient[i] = weights[label] * np.exp(log_p)
        gradient[i, label] -= weights[label]
        total += weights[label] if reduction == "weights" else 1.0
    return loss / total, gradient / total


def sgdm(x, gradient, steps, *, lr, momentum, weight_decay=0.0, dampening=0.0, buffer=None):
    """Momentum SGD; returns (x, buffer). ``gradient(t, x)``; ``lr`` is a float or a callable of t."""
    x = _array(x)
    buffer = None if buffer is None else _array(buffer)
    for t in range(steps):
        g = _array(gradient(t, x.copy())) + weight_decay * x
        buffer = g if buffer is None else momentum * buffer + (1.0 - dampening) * g
        x = x - (lr(t) if callable(lr) else lr) * buffer
    return x, buffer


def local_sgdm(
    x,
    cohorts,
    gradient,
    steps,
    *,
    lr,
    momentum,
    weight_decay=0.0,
    dampening=0.0,
    momentum_state="reset",
    weights=None,
    buffer=None,
    first_round=0,
):
    """FedAvg with momentum SGD; one round per entry of ``cohorts``; returns ``{'x', 'buffer'}``.

    ``gradient(k, r, t, x)`` is on the batch (k, r, t); ``lr`` is a float or a callable of (r, t);
    ``weights`` are the clients' (None: uniform). ``buffer`` is what to start from and is returned:
    None for 'reset', a dict by client for 'keep' (a client that has not taken part yet is
    missing), the average for 'average' (None at a start).
    """
    if momentum_state not in ("reset", "keep", "average"):
        raise ValueError(f"momentum_state must be 'reset', 'keep' or 'average', got {momentum_state!r}")
    x = _array(x)
    if momentum_state == "keep":
        buffer = {} if buffer is None else {k: _array(row) for k, row in buffer.items()}
    for index, cohort in enumerate(cohorts):
        r = first_round + index
        if len(cohort) == 0:
            raise ValueError(f"round {r} has no clients")
        total, new_x, new_buffer = 0.0, 0.0, 0.0
        for k in cohort:
            given = None
            if momentum_state == "average":
                given = buffer
            elif momentum_state == "keep":
                given = buffer.get(k)
            x_k, b_k = sgdm(
                x,
                lambda t, z, k=k, r=r: gradient(k, r, t, z),
                steps,
                lr=lambda t, r=r: _at(lr, r, t),
                momentum=momentum,
                weight_decay=weight_decay,
                dampening=dampening,
                buffer=given,
            )
            share = 1.0 if weights is None else float(weights[k])
            total += share
            new_x = new_x + share * x_k
            new_buffer = new_buffer + share * b_k
            if momentum_state == "keep":
                buffer[k] = b_k
        x = new_x / total
        if momentum_state == "average":
            buffer = new_buffer / total
    return {"x": x, "buffer": buffer if momentum_state != "reset" else None}


def last_layer_changes(x, auxiliary, last_layer, steps, r, *, classes, lr, momentum, weight_decay=0.0, dampening=0.0):
    """D_c for each class, [classes, ...]: the model x trained on each class alone, in round r.

    ``auxiliary(c, r, t, x)`` is the gradient of the plain cross-entropy on the batch (r, t) of the
    auxiliary set of class c; ``last_layer(x)`` takes the last layer's matrix out of x.
    """
    x = _array(x)
    rows = []
    for c in range(classes):
        trained, _ = sgdm(
            x,
            lambda t, z, c=c: auxiliary(c, r, t, z),
            steps,
            lr=lambda t: _at(lr, r, t),
            momentum=momentum,
            weight_decay=weight_decay,
            dampening=dampening,
        )
        rows.append(_array(last_layer(trained)) - _array(last_layer(x)))
    return np.array(rows)


def local_sgdm_rl(
    x,
    cohorts,
    gradient,
    auxiliary,
    last_layer,
    steps,
    *,
    classes,
    lr,
    momentum,
    weight_decay=0.0,
    dampening=0.0,
    momentum_state="reset",
    auxiliary_steps=None,
    auxiliary_lr=None,
    delay=True,
    share=0.8,
    empty=10.0,
    cap=5000.0,
    zero="assign",
    base=1.0,
    slope=0.1,
    weights=None,
    loss_weights=None,
    buffer=None,
    first_round=0,
):
    """The whole method; returns ``{'x', 'loss_weights', 'buffer'}``.

    ``gradient(k, r, t, x, loss_weights)`` is the gradient of client k's weighted cross-entropy on the
    batch (k, r, t); ``auxiliary`` and ``last_layer`` as for ``last_layer_changes``;
    ``auxiliary_steps`` and ``auxiliary_lr`` are ``steps`` and ``lr`` if None. ``loss_weights`` [classes] are
    those to start from (None: 1) and those returned: with ``delay`` the ones of the next round,
    otherwise the ones last used.
    """
    x = _array(x)
    loss_weights = np.ones(classes) if loss_weights is None else _array(loss_weights)

    def fresh_weights(model, r):
        changes = last_layer_changes(
            model,
            auxiliary,
            last_layer,
            steps if auxiliary_steps is None else auxiliary_steps,
            r,
            classes=classes,
            lr=lr if auxiliary_lr is None else auxiliary_lr,
            momentum=momentum,
            weight_decay=weight_decay,
            dampening=dampening,
        )
        return class_weights(ratios(changes, share=share, empty=empty, cap=cap, zero=zero), base=base, slope=slope)

    for index, cohort in enumerate(cohorts):
        r = first_round + index
        made = fresh_weights(x, r)
        if not delay:
            loss_weights = made
        result = local_sgdm(
            x,
            [cohort],
            lambda k, r, t, z, w=loss_weights: gradient(k, r, t, z, w.copy()),
            steps,
            lr=lr,
            momentum=momentum,
            weight_decay=weight_decay,
            dampening=dampening,
            momentum_state=momentum_state,
            weights=weights,
            buffer=buffer,
            first_round=r,
        )
        x, buffer = result["x"], result["buffer"]
        loss_weights = made
    return {"x": x, "loss_weights": loss_weights, "buffer": buffer}
