"""The cost of levels: a step of LocalSMCGDAM against one by hand, its memory, and Hessian-vector products.

    python bench/levels.py [--threads 1] [--seconds 1.5] [--only speed memory products]

The problem is ``compositional_auc``, with one client. The two sides take turns in one run, and the shortest processor
time of each counts, because steps are long and other processes interrupt them on a busy machine. The results of both
sides are compared. Memory is that of tensors: the highest running sum of the allocations and releases that
torch.profiler records. K is the number of levels, a "vector" has the length of x, and a "graph" is the peak of one
vector-Jacobian product of a level.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import torch

import fedstrata as fs
from common import best_of_each, parser, start, timed
from fedstrata.algorithms.layered import State
from fedstrata.clients import Client
from fedstrata.core.clock import Clock
from fedstrata.problems.graphs.trace import trace
from fedstrata.training.settings import Settings
from fedstrata.training.train import make_clients
from levels_by_hand import LR, ByHand, Case, P, Point, Tensors

DIGITS, PICTURES = (1, 28, 28), (3, 32, 32)

ALLOWED = 2.05
"""Vectors in addition to K + 2 vectors, the batches and a graph: the old x, which the loop over steps holds until the
end of the step, the input of a product, and 0.05 for the dual and other small tensors."""


class Ours:
    """One client of a run of LocalSMCGDAM after its first round; without ``begun`` that round is skipped."""

    @torch.no_grad()
    def __init__(
        self, case: Case, levels: int, steps: int = 5, forward_mode: bool | None = None, begun: bool = True
    ) -> None:
        generator = torch.Generator().manual_seed(0)
        images = torch.randn(200, *case.shape, generator=generator)
        labels = torch.cat([torch.ones(10), torch.zeros(190)]).long()
        self.data = fs.FederatedData.from_arrays([(images, labels)], name="random")
        self.algorithm = fs.LocalSMCGDAM(steps=steps)
        settings = Settings(rounds=1000, chunk=1, batch_size=case.batch)
        problem = fs.compositional_auc(case.model(), levels=levels, inner_lr=LR, p=P)
        if forward_mode is not None:
            problem = replace(problem, levels=tuple(replace(g, forward=forward_mode) for g in problem.levels))
        self.clients = make_clients(problem, self.data, settings)
        self.clients.begin(-1)
        self.start = self.algorithm.start(problem.x0, problem.y0, self.clients)
        self.clients.begin(0)
        self.state = self.algorithm.round(self.start, self.clients) if begun else self.start
        self.clients.progress.iteration = steps
        self.clients.begin(1)

    def client(self) -> Client:
        """Return the client at the start of this round."""
        return Client(self.clients.engine.side, np.zeros(1, dtype=np.int64), self.clients.clock, 0)

    def point(self) -> Point:
        """Return the server's vectors."""
        return point_of(self.state).copy()

    @torch.no_grad()
    def round(self) -> Point:
        """Run the second round, always from the same state and with the same batches."""
        self.clients.begin(1)
        return point_of(self.algorithm.round(self.state, self.clients))

    @torch.no_grad()
    def local(self) -> object:
        """Do the client's work of the second round, given the server's vectors."""
        client = self.client()
        return self.algorithm.local(client, *client.receive(tuple(self.state)))

    @torch.no_grad()
    def first_local(self) -> object:
        """Do the client's work of the first round."""
        client = Client(self.clients.engine.side, np.zeros(1, dtype=np.int64), Clock(0, 1000), 0)
        return self.algorithm.local(client, *client.receive(tuple(self.start)))


def point_of(state: State) -> Point:
    """Return a server's state as a point."""
    x, *h = state.h
    return Point(x, state.y, tuple(h), state.p, state.q)


def drawn_by(client: Client) -> list[Tensors]:
    """Return the batches of a client's next step, in the form that the hand-written version takes."""
    parts = [batch.parts[0] for batch in client.draw_all()]
    return [(inputs[0], targets[0].float()) for inputs, targets in parts]


def same_numbers(ours: Ours, hand: ByHand) -> float:
    """Check that both sides end a round with the same numbers, given the same state and batches.

    Returns the largest difference between two vectors, relative to how far the round moved them.
    """
    batches: list[list[Tensors]] = []

    client = ours.client()
    for _ in client.loop(hand.steps, client.variables()):
        batches.append(drawn_by(client))
    start, one = ours.point(), ours.round()
    worst = 0.0
    for step in (hand.step, hand.graph_holding_step):
        other = start.copy()
        for b in batches:
            step(other, b)
        for mine, theirs, before in zip(one.vectors(), other.vectors(), start.vectors(), strict=True):
            worst = max(worst, float((mine - theirs).norm() / (theirs - before).norm()))
    # In float32 max pooling may pick another entry; in float64 the two agree to 2e-7.
    assert worst < 1e-2, f"The two sides differ by {worst:.1e}, relative to how far the round moved."
    return worst


def in_turns(seconds: float, *works: Callable[[], object]) -> list[float]:
    """Return the shortest processor time of each work; they take turns for about ``seconds``, at least 3 times."""
    first = [timed(work, time.process_time) for work in works]
    repeats = max(2, round(seconds / sum(first)) - 1)
    return [min(pair) for pair in zip(first, best_of_each(repeats, *works, clock=time.process_time), strict=True)]


def step_against_hand(case: Case, levels: int, seconds: float) -> None:
    """Print the cost of a local step (a fifth of five steps) relative to one by hand."""
    ours = Ours(case, levels)
    hand, at = ByHand(case, ours.data, ours.algorithm), ours.point()
    off = same_numbers(ours, hand)
    steps = range(hand.steps)
    mine, plain, hoarding = (
        total / hand.steps
        for total in in_turns(
            seconds,
            ours.local,
            lambda: [hand.step(at, hand.draw(levels)) for _ in steps],
            lambda: [hand.graph_holding_step(at, hand.draw(levels)) for _ in steps],
        )
    )
    print(
        f"step, {case}, K = {levels}: by hand {plain * 1e3:.2f}, fedstrata {mine * 1e3:.2f} ms, ratio "
        f"{mine / plain:.2f} (target <= 1.1); by hand with K graphs held {hoarding * 1e3:.2f} ms, ratio "
        f"{mine / hoarding:.2f}; same numbers to {off:.0e}"
    )


def round_against_hand(case: Case, levels: int, seconds: float) -> None:
    """Print the cost of a round of 5 steps relative to one by hand."""
    ours = Ours(case, levels)
    hand, server = ByHand(case, ours.data, ours.algorithm), ours.point()
    mine, plain = in_turns(seconds, ours.round, lambda: hand.round(server))
    times = f"by hand {plain * 1e3:.1f}, fedstrata {mine * 1e3:.1f} ms, ratio {mine / plain:.2f} (target <= 1.1)"
    print(f"round of {hand.steps} steps, {case}, K = {levels}: {times}")


def peak_of(work: Callable[[], object]) -> int:
    """Return the peak bytes of tensors that one call allocates, not counting those that existed before."""
    os.environ["KINETO_LOG_LEVEL"] = "99"
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    events.sort(key=lambda e: e.start_ns())
    return int(np.cumsum([0] + [e.nbytes() for e in events]).max())


def memory(case: Case) -> None:
    """Print the peak of a client's local steps for K = 1 to 5, and that of autograd on the whole composition.

    Two steps: from the second on, x and p are the client's own and no longer the server's.
    """
    peaks, wholes, every = [], [], range(1, 6)
    for levels in every:
        ours = Ours(case, levels, steps=2, begun=False)
        client, at = ours.client(), ours.point()
        batches, drawn = client.draw_all(), drawn_by(client)
        vector, batch = at.x.nbytes, sum(a.nbytes for a in batches[0].parts[0])
        with torch.no_grad():
            product = partial(client.g_vjp, 1, at.x[None], at.p[None], batches[0])
            product()  # trace it
            graph = peak_of(product)
        ours.local()
        peaks.append(peak_of(ours.local))
        wholes.append(peak_of(partial(ByHand(case, ours.data, ours.algorithm).all_at_once, at, drawn)))
        rest = peaks[-1] - (levels + 2) * vector - (levels + 1) * batch
        over = (rest - graph) / vector
        print(
            f"memory, {case}, K = {levels}: peak {peaks[-1]:,} bytes; less {levels + 2} vectors and {levels + 1} "
            f"batches {rest:,}, {rest / graph:.2f} graphs (by autograd at once {wholes[-1]:,}, "
            f"{wholes[-1] / graph:.2f}). At most (K+2) vectors plus one level's graph: "
            f"{'yes' if over <= ALLOWED else 'NO'}, {over:.2f} vectors above (allowed {ALLOWED})"
        )
    growth, other = (np.polyfit(every, column, 1)[0] for column in (peaks, wholes))
    own = (growth - batch) / vector
    print(
        f"memory, {case}: vector {vector:,}, batch {batch:,}, graph {graph:,} bytes; growth per level a batch and "
        f"{own:.2f} vectors, about one: {'yes' if own < 1.1 else 'NO'}; by autograd at once {other / graph:.2f} graphs"
    )


def first_memory(case: Case) -> None:
    """Print by how much the peak of a client's first round, with its first estimates, grows per level."""
    every = range(1, 4)
    runs = [Ours(case, levels, steps=2, begun=False) for levels in every]
    for ours in runs:
        ours.first_local()  # trace it
    peaks = [(peak_of(ours.first_local), peak_of(ours.local)) for ours in runs]
    vector, batch = runs[0].state.x.nbytes, sum(a.nbytes for a in runs[0].client().draw(1).parts[0])
    first, later = ((np.polyfit(every, column, 1)[0] - batch) / vector for column in zip(*peaks, strict=True))
    print(f"memory, {case}: growth per level {first:.2f} vectors in the run's first round, {later:.2f} in the others")


def products(case: Case, seconds: float) -> None:
    """Print the cost of a Hessian-vector product and of a step with K = 3, in reverse mode and in forward mode."""
    problem = fs.erm(case.model(), "binary_cross_entropy")
    gradient = torch.func.grad(problem.outer)
    generator = torch.Generator().manual_seed(0)
    x, v = problem.x0, torch.randn(len(problem.x0), generator=generator)
    inputs = torch.randn(case.batch, *case.shape, generator=generator)
    batch = inputs, (torch.rand(case.batch, generator=generator) < P).long()

    def reverse(x: torch.Tensor, v: torch.Tensor, *batch: torch.Tensor) -> torch.Tensor:
        return torch.func.vjp(lambda z: gradient(z, batch), x)[1](v)[0]

    def forward(x: torch.Tensor, v: torch.Tensor, *batch: torch.Tensor) -> torch.Tensor:
        return torch.func.jvp(lambda z: gradient(z, batch), (x,), (v,))[1]

    with torch.no_grad():
        alone = trace(lambda x, v, *batch: gradient(x, batch), x, v, *batch)
        back, ahead = trace(reverse, x, v, *batch), trace(forward, x, v, *batch)
        one, other = back(x, v, *batch), ahead(x, v, *batch)
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4 * float(one.abs().max()))
        g, r, f = (1e3 * t for t in in_turns(seconds, *(partial(w, x, v, *batch) for w in (alone, back, ahead))))
        steppers = [Ours(case, 3, 1, mode, begun=False).local for mode in (False, True)]
        backs, aheads = (1e3 * t for t in in_turns(seconds, *steppers))
    print(
        f"Hessian-vector product, {case}: gradient {g:.2f}, reverse {r:.2f}, forward {f:.2f} ms, forward / reverse "
        f"{f / r:.2f}; a step with K = 3: {backs:.1f} and {aheads:.1f} ms, {aheads / backs:.2f}"
    )


def main() -> None:
    """Run and print every comparison."""
    options = parser(__doc__)
    options.add_argument("--seconds", type=float, default=1.5, help="for each comparison")
    options.add_argument("--only", nargs="+", choices=("speed", "memory", "products"))
    arguments = start(options)
    wanted = arguments.only or ("speed", "memory", "products")
    cnn7 = {"width": 16}
    if "speed" in wanted:
        for name, batch, levels in (
            *(("lenet5", 16, k) for k in (1, 3, 5)),
            ("lenet5", 32, 3),
            *(("mlp", 16, k) for k in (1, 3, 5)),
            ("mlp", 32, 3),
        ):
            step_against_hand(Case(name, DIGITS, batch), levels, arguments.seconds)
        round_against_hand(Case("lenet5", DIGITS, 16), 3, arguments.seconds)
        round_against_hand(Case("mlp", DIGITS, 16), 3, arguments.seconds)
    if "memory" in wanted:
        memory(Case("lenet5", DIGITS, 16))
        memory(Case("mlp", DIGITS, 16, {"hidden": [1000, 1000]}))
        memory(Case("cnn7", PICTURES, 32, cnn7))
        first_memory(Case("lenet5", DIGITS, 16))
    if "products" in wanted:
        products(Case("logreg", DIGITS, 16), arguments.seconds)
        products(Case("mlp", DIGITS, 16), arguments.seconds)
        products(Case("lenet5", DIGITS, 16), arguments.seconds)
        products(Case("cnn7", PICTURES, 16, cnn7), arguments.seconds)
        products(Case("resnet20", PICTURES, 16), arguments.seconds)


if __name__ == "__main__":
    main()
