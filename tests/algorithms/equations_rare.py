"""Equations of LocalSGDM-RL, the method for rare classes, whose server has samples of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

import fedstrata as fs
from algorithms.equations import PARTIAL, Case, Method, Options, Row, Rows, Vectors
from algorithms.paper import Paper
from plain_worlds import LABELLED
from reference import local_sgdm_rl
from worlds import Arrays, Vector, World


def keep_class_weights(world: World, case: Case, server: Vectors, rng: np.random.Generator) -> Rows:
    server["w"] = rng.uniform(0.5, 3.0, size=len(server["w"]))
    return {}


class RareClasses:
    """The gradients of LocalSGDM-RL: the server draws in the first exchange, the clients in the second one."""

    def __init__(self, paper: Paper) -> None:
        self.paper, self.world = paper, paper.world

    def of_client(self, c: int, r: int, t: int, x: Vector, w: Vector) -> Vector:
        k = self.paper.copies[c]
        batch = self.paper.batch(k, r, t, self.paper.tweak("exchange", 1))[:2]
        weights = self.sample_weights(batch, k, w)
        found = self.world.gradient(batch, x, weights)
        return found * len(weights) / weights.sum() if self.paper.tweak("mean over weights", False) else found

    def sample_weights(self, batch: Arrays, k: int, w: Vector) -> Vector:
        """Of each sample: its class's, times what makes up for a batch of equally many of each class."""
        targets, classes = batch[1], self.world.data.classes
        if self.paper.case.sampling != "balanced":
            return w[targets]
        own_targets = self.world.data.train.of_client(k)[1].numpy()
        of_client, of_batch = (np.bincount(t, minlength=classes) / len(t) for t in (own_targets, targets))
        return (w * of_client / np.maximum(of_batch, 1e-300))[targets]

    def of_class(self, c: int, r: int, t: int, x: Vector) -> Vector:
        batch = self.paper.batch(c, r, t, data=self.world.server)[:2]
        return self.world.gradient(batch, x, np.ones(len(batch[1])))

    def last_layer(self, x: Vector) -> Vector:
        matrix = self.world.matrix
        return x[matrix.start :] if self.paper.tweak("bias too", False) else x[matrix]


def rare_classes(paper: Paper) -> Vectors:
    """A call for each round. With epochs clients take different numbers of steps, and so do the server's classes."""
    options, classes, gradients = paper.options, paper.world.data.classes, RareClasses(paper)
    rule = {key: options[key] for key in ("momentum", "weight_decay")}
    state: dict[str, Any] = paper.ours.server or {"x": paper.world.x0, "w": np.ones(classes)}
    momenta: Any = None
    for r, cohort in paper.rounds():
        if isinstance(options["steps"], fs.Epochs):
            state = round_from_parts(paper, gradients, r, cohort, state, rule)
            continue
        out = paper.call(
            local_sgdm_rl.local_sgdm_rl,
            state["x"],
            [cohort],
            gradients.of_client,
            gradients.of_class,
            gradients.last_layer,
            options["steps"],
            classes=classes,
            lr=paper.rate("lr"),
            share=options["share"],
            slope=options["slope"],
            loss_weights=state["w"],
            first_round=r,
            buffer=momenta,
            **rule,
        )
        state, momenta = {"x": out["x"], "w": out["loss_weights"]}, out["buffer"]
    return state


def round_from_parts(
    paper: Paper, gradients: RareClasses, r: int, cohort: list[int], state: Vectors, rule: Options
) -> Vectors:
    world, x, w = paper.world, state["x"], state["w"]

    def trained(gradient: Callable[[int, Vector], Vector], steps: int) -> Vector:
        return local_sgdm_rl.sgdm(x, gradient, steps, lr=lambda t: paper.rate("lr")(r, t), **rule)[0]

    changes = []
    for c in range(world.data.classes):
        end = trained(lambda t, z, c=c: gradients.of_class(c, r, t, z), paper.steps_of(c, r, world.server.train.sizes))
        changes.append(gradients.last_layer(end - x))
    ends = []
    for c in cohort:
        steps = paper.steps_of(paper.copies[c], r)
        ends.append(trained(lambda t, z, c=c: gradients.of_client(c, r, t, z, w), steps))
    ratios = local_sgdm_rl.ratios(np.array(changes), share=paper.options["share"])
    return {"x": np.mean(ends, axis=0), "w": 1 + paper.options["slope"] * ratios}


RARE = Method(
    "local_sgdm_rl",
    "rare classes",
    LABELLED,
    fs.LocalSGDMRL,
    rare_classes,
    {"lr": 0.2, "steps": 3, "momentum": 0.7, "slope": 0.15, "share": 0.8, "weight_decay": 0.0},
    keep_class_weights,
    home="hidden layer",
    least={"x": 1e-2},
    wrong_in={"share": None},  # most changes of it change no owner; another share is in the table
)
METHODS = {RARE.name: RARE}
CASES = {
    "minibatches": Case(),
    "three rounds": Case(rounds=3),
    "one at a time": Case(chunk=1),
    "two at a time": Case(chunk=2),
    "full batches": Case(batch_size=None),
    "epochs": Case(sampling="epochs", batch_size=4),
    "weighted": Case(weighting="samples", chunk=2),
    "given state": Case(given=True, first_round=3),
    "one step": Case(options={"steps": 1}, rounds=3),
    **{label: replace(case, rounds=3) for label, case in PARTIAL.items()},
    "passes": Case(options={"steps": fs.Epochs(1.5)}, sampling="epochs", batch_size=4, rounds=3),
    "passes, partial": Case(options={"steps": fs.Epochs(0.7), "lr": fs.CubeRoot(0.4, 2.0)}, participation=4, rounds=3),
    "passes, full batches": Case(options={"steps": fs.Epochs(2)}, batch_size=None),
    "weight decay": Case(options={"weight_decay": 0.2}),
    "no momentum": Case(options={"momentum": 0.0}),
    "cube root": Case(options={"lr": fs.CubeRoot(0.4, 2.0)}, rounds=3),
    "step": Case(options={"lr": fs.StepDecay(0.3, (0.3, 2), 0.6)}, rounds=3),
    "another share": Case(options={"share": 0.3}, rounds=3),
    "a share above 1": Case(options={"share": 1.5}, rounds=3),
    "another slope": Case(options={"slope": 0.6}),
    "balanced": Case(sampling="balanced", batch_size=4, rounds=3),
}
EVERYWHERE = [
    *("three rounds", "one at a time", "full batches", "given state", "passes, partial", "balanced"),
    *("another share", "a share above 1"),
]


def right_rows() -> Iterator[Row]:
    for label, case in CASES.items():
        for world in LABELLED if label in EVERYWHERE else [RARE.home]:
            yield RARE.row(label, case, world)


AS_CLIENTS = """            lr=lambda t: _at(lr, r, t),
            momentum=momentum,
            weight_decay=weight_decay,"""
WITHOUT_DECAY = AS_CLIENTS.replace("=weight_decay", "=0.0")


def wrong_rows() -> Iterator[Row]:
    def off(label: str, case: str, **options: Any) -> Row:
        return RARE.wrong(label, CASES[case], options=options)

    rows = [
        *RARE.usual_mistakes(CASES["weight decay"]),
        off("cube root", "cube root", lr=fs.CubeRoot(0.4, 2.02)),
        off("step", "step", lr=fs.StepDecay(0.3, (0.3, 1), 0.6)),
        off("passes", "passes", steps=fs.Epochs(1.2)),
        off("another share", "another share", share=0.8),
        RARE.wrong("weights at once", arguments={"delay": False}),
        RARE.wrong("dampened", arguments={"dampening": 0.3}),
        RARE.wrong("more steps on the server", arguments={"auxiliary_steps": 4}),
        RARE.wrong("another rate on the server", arguments={"auxiliary_lr": 0.22}),
        RARE.wrong("a mean over weights", tweaks={"mean over weights": True}),
        RARE.wrong("kept momenta", arguments={"momentum_state": "keep"}),
        RARE.wrong("averaged momenta", arguments={"momentum_state": "average"}),
        RARE.wrong("another base", arguments={"base": 1.01}),
        RARE.wrong("no decay on the server", CASES["weight decay"], lines=((AS_CLIENTS, WITHOUT_DECAY),)),
        RARE.wrong("the bias too", CASES["a share above 1"], tweaks={"bias too": True}),
        RARE.wrong("the first exchange's batches", tweaks={"exchange": 0}),
    ]
    for world in LABELLED:
        yield from (replace(row, world=world) for row in rows)
