"""What levels cost: a step of LocalSMCGDAM against the same by hand, its memory, and Hessian products in two modes.

    python bench/levels.py [--threads 1] [--seconds 1.5] [--only speed memory products]

The problem is ``compositional_auc``, with one client. The sides of a comparison take turns in one run, and the shortest
time of each counts, of the processor: steps are long enough for others to come in between on a busy machine. That both
sides do the same work is checked on their results. Memory is that of tensors: the running sum of all allocations and
releases that torch.profiler saw, at its highest. K counts the levels, a "vector" is one of the length of x, and a
"graph" is the peak of one vector-Jacobian product of a level.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch.func import functional_call
from torch.nn import functional as F

import fedstrata as fs
from fedstrata.algorithms.layered import State
from fedstrata.clients import Client
from fedstrata.clients.engine import for_each
from fedstrata.core.machine import keep_memory
from fedstrata.core.schedules import Clock
from fedstrata.problems.trace import trace
from fedstrata.training.settings import Settings
from fedstrata.training.train import make_clients

P, LR = 0.05, 0.1
Tensors = tuple[torch.Tensor, ...]
DIGITS, PICTURES = (1, 28, 28), (3, 32, 32)

ALLOWED = 2.05
"""Vectors above (K + 2), the batches and a graph: the old x, which the loop over steps holds until the step has ended,
and the vector that a product takes in; and 0.05 for the dual and other small things."""


class Case(NamedTuple):
    """A model, the shape of its inputs, and the number of samples in a batch."""

    name: str
    shape: tuple[int, ...]
    batch: int
    options: dict[str, object] = {}  # noqa: RUF012

    def model(self) -> torch.nn.Module:
        """Build the model, with one logit."""
        return fs.models.model(self.name, self.shape, 1, **self.options)

    def __str__(self) -> str:
        options = "".join(f" {k} {v}" for k, v in self.options.items())
        return f"{self.name}{options}, batch {self.batch}"


class Point(NamedTuple):
    """Where a client is: x, y, the estimates h of the levels, the momenta p and q; vectors without a client axis."""

    x: torch.Tensor
    y: torch.Tensor
    h: Tensors
    p: torch.Tensor
    q: torch.Tensor

    def copy(self) -> Point:
        """Return the same point in memory of its own."""
        return Point(self.x.clone(), self.y.clone(), tuple(v.clone() for v in self.h), self.p.clone(), self.q.clone())

    def vectors(self) -> Tensors:
        """Return everything in one row."""
        return (self.x, self.y, *self.h, self.p, self.q)


class Ours:
    """One client of a run of LocalSMCGDAM, after the run's first round; without ``begun`` that round did nothing."""

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
        return Client(self.clients.engine.setting, np.zeros(1, dtype=np.int64), self.clients.clock, 0)

    def point(self) -> Point:
        """Return the server's vectors."""
        return point_of(self.state).copy()

    @torch.no_grad()
    def round(self) -> Point:
        """Do the second round, always from the same state and with the same batches."""
        self.clients.begin(1)
        return point_of(self.algorithm.round(self.state, self.clients))

    @torch.no_grad()
    def local(self) -> object:
        """Do what a client does in the second round; the server's vectors are there already."""
        return self.algorithm.local(self.client(), *for_each(tuple(self.state), 1))

    @torch.no_grad()
    def first_local(self) -> object:
        """Do what a client does in the first round."""
        client = Client(self.clients.engine.setting, np.zeros(1, dtype=np.int64), Clock(0, 1000), 0)
        return self.algorithm.local(client, *for_each(tuple(self.start), 1))


def point_of(state: State) -> Point:
    """Return a server's state as a point."""
    x, *h = state.h
    return Point(x, state.y, tuple(h), state.p, state.q)


class ByHand:
    """Algorithm 1 as one writes it for speed: flat vectors, renewed in place.

    The model is the module itself, its parameters made views of the vector at hand. That is faster than
    ``functional_call`` on a flat vector, 1.1 times for a gradient of LeNet-5 and 1.6 times for one of the MLP: autograd
    has no vector to cut up, and no gradient to put together.
    """

    def __init__(self, ours: Ours, case: Case) -> None:
        self.model = case.model()
        self.parameters = list(self.model.parameters())
        self.names = [name for name, _ in self.model.named_parameters()]
        self.sizes = [p.numel() for p in self.parameters]
        self.size = sum(self.sizes)
        self.inputs, targets = ours.data.train.arrays
        self.targets = targets.float()
        self.batch, self.steps = case.batch, ours.algorithm.steps
        rates = ours.algorithm
        self.carried = 1 - min(1.0, rates.alpha * rates.eta**2)
        self.gamma_x, self.gamma_y = rates.gamma_x * rates.eta, rates.gamma_y * rates.eta
        self.rho_x, self.rho_y = min(1.0, rates.rho_x * rates.eta), min(1.0, rates.rho_y * rates.eta)

    def views(self, u: torch.Tensor) -> list[torch.Tensor]:
        """Cut the model's weights out of a vector."""
        return [v.view(p.shape) for v, p in zip(u[: self.size].split(self.sizes), self.parameters, strict=True)]

    def outputs(self, u: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
        """Run the model with the weights in a vector."""
        for p, v in zip(self.parameters, self.views(u), strict=True):
            p.data = v
        return self.model(inputs).squeeze(1)

    def gradient(self, u: torch.Tensor, batch: Tensors, create_graph: bool = False) -> Tensors:
        """Return the gradient of the cross-entropy."""
        loss = F.binary_cross_entropy_with_logits(self.outputs(u, batch[0]), batch[1])
        return torch.autograd.grad(loss, self.parameters, create_graph=create_graph)

    def product(self, u: torch.Tensor, v: torch.Tensor, batch: Tensors) -> Tensors:
        """Return the Hessian of the cross-entropy times v."""
        return torch.autograd.grad(self.gradient(u, batch, create_graph=True), self.parameters, self.views(v))

    def auc_gradients(self, u: torch.Tensor, alpha: torch.Tensor, batch: Tensors) -> Tensors:
        """Return the gradient of the AUC loss in (weights, a, b), and in alpha."""
        outputs = self.outputs(u, batch[0])
        a, b, alpha = (v.detach().requires_grad_() for v in (u[-2:-1], u[-1:], alpha))
        loss = auc_loss(outputs, a, b, alpha, batch[1])
        *gradients, slope = torch.autograd.grad(loss, [*self.parameters, a, b, alpha])
        return torch.cat([g.reshape(-1) for g in gradients]), slope

    def draw(self, levels: int) -> list[Tensors]:
        """Draw a batch for each level and one for the AUC loss."""
        rows = [torch.randint(0, len(self.inputs), (self.batch,)) for _ in range(levels + 1)]
        return [(self.inputs[r], self.targets[r]) for r in rows]

    def carry_and_move(self, at: Point, batches: Sequence[Tensors]) -> None:
        """Begin a step: what the estimates carry over, and the move of x and y. K gradients."""
        x, y, h, p, q = at
        for j in reversed(range(len(h))):
            below = h[j - 1] if j else x
            h[j].sub_(below)
            torch._foreach_add_(self.views(h[j]), self.gradient(below, batches[j]), alpha=LR)
            h[j].mul_(self.carried)
        x.sub_(p, alpha=self.gamma_x)
        y.add_(q, alpha=self.gamma_y)

    def step(self, at: Point, batches: Sequence[Tensors]) -> None:
        """Take one local step, in place: 2K + 1 gradients and K Hessian-vector products."""
        self.carry_and_move(at, batches)
        x, y, h, p, q = at
        for j in range(len(h)):
            below = h[j - 1] if j else x
            h[j].add_(below)
            torch._foreach_sub_(self.views(h[j]), self.gradient(below, batches[j]), alpha=LR)
        u, v = self.auc_gradients(h[-1], y, batches[-1])
        for j in reversed(range(len(h))):
            torch._foreach_sub_(self.views(u), self.product(h[j - 1] if j else x, u, batches[j]), alpha=LR)
        p.lerp_(u, self.rho_x)
        q.lerp_(v, self.rho_y)

    def hoarding_step(self, at: Point, batches: Sequence[Tensors]) -> None:
        """Take the same step, but hold every level's graph from its new gradient on: K gradients fewer."""
        self.carry_and_move(at, batches)
        x, y, h, p, q = at
        held = []
        for j in range(len(h)):
            below = h[j - 1] if j else x
            leaves = [v.detach().requires_grad_() for v in self.views(below)]
            held.append((self.differentiable(leaves, batches[j]), leaves))
            h[j].add_(below)
            torch._foreach_sub_(self.views(h[j]), [g.detach() for g in held[-1][0]], alpha=LR)
        u, v = self.auc_gradients(h[-1], y, batches[-1])
        while held:
            torch._foreach_sub_(self.views(u), torch.autograd.grad(*held.pop(), self.views(u)), alpha=LR)
        p.lerp_(u, self.rho_x)
        q.lerp_(v, self.rho_y)

    def differentiable(self, weights: Sequence[torch.Tensor], batch: Tensors) -> Tensors:
        """Return the gradient of the cross-entropy with its graph."""
        outputs = functional_call(self.model, dict(zip(self.names, weights, strict=True)), (batch[0],)).squeeze(1)
        loss = F.binary_cross_entropy_with_logits(outputs, batch[1])
        return torch.autograd.grad(loss, list(weights), create_graph=True)

    def all_at_once(self, at: Point, batches: Sequence[Tensors]) -> Tensors:
        """Return the gradient of the whole composition by one call of autograd, which holds every level's graph."""
        leaves = [v.detach().requires_grad_() for v in self.views(at.x)]
        weights: Sequence[torch.Tensor] = leaves
        for batch in batches[:-1]:
            gradient = self.differentiable(weights, batch)
            weights = [w - LR * g for w, g in zip(weights, gradient, strict=True)]
        inputs, targets = batches[-1]
        outputs = functional_call(self.model, dict(zip(self.names, weights, strict=True)), (inputs,)).squeeze(1)
        ends = [v.detach().requires_grad_() for v in (at.x[-2:-1], at.x[-1:], at.y)]
        return torch.autograd.grad(auc_loss(outputs, *ends, targets), [*leaves, *ends])

    def round(self, server: Point) -> Point:
        """Do a round of one client: copy the server's vectors, take the steps, and average."""
        at = server.copy()
        for _ in range(self.steps):
            self.step(at, self.draw(len(at.h)))
        total = [torch.zeros_like(v) for v in at.vectors()]
        torch._foreach_add_(total, at.vectors(), alpha=1.0)
        x, y, *h, p, q = total
        return Point(x, y, tuple(h), p, q)


def auc_loss(
    outputs: torch.Tensor, a: torch.Tensor, b: torch.Tensor, alpha: torch.Tensor, targets: torch.Tensor
) -> torch.Tensor:
    """Return F of ``fs.auc`` on a batch."""
    s = torch.sigmoid(outputs)
    terms = (1 - P) * (s - a) ** 2 * targets + P * (s - b) ** 2 * (1 - targets)
    terms = terms + 2 * (1 + alpha) * s * (P - targets)
    return terms.mean() - P * (1 - P) * alpha.squeeze() ** 2


def drawn_by(client: Client) -> list[Tensors]:
    """Return what a client draws in its next step, as the version by hand takes it."""
    parts = [batch.parts[0] for batch in client.draw_all()]
    return [(inputs[0], targets[0].float()) for inputs, targets in parts]


def same_numbers(ours: Ours, hand: ByHand) -> float:
    """Check that a round of either side, from one state on one client's batches, ends in the same numbers.

    Returns the largest difference of a vector from the other side's, relative to how far the round took it.
    """
    batches: list[list[Tensors]] = []

    client = ours.client()
    for _ in client.loop(hand.steps, client.variables()):
        batches.append(drawn_by(client))
    start, one = ours.point(), ours.round()
    worst = 0.0
    for step in (hand.step, hand.hoarding_step):
        other = start.copy()
        for b in batches:
            step(other, b)
        for mine, theirs, before in zip(one.vectors(), other.vectors(), start.vectors(), strict=True):
            worst = max(worst, float((mine - theirs).norm() / (theirs - before).norm()))
    # In float32 a maximum of the pooling may change sides; in float64 the two agree to 2e-7.
    assert worst < 1e-2, f"The two sides differ by {worst:.1e} of the way."
    return worst


def processor_time(work: Callable[[], object]) -> float:
    """Return the processor's seconds that one call takes."""
    start = time.process_time()
    work()
    return time.process_time() - start


def in_turns(seconds: float, *works: Callable[[], object]) -> list[float]:
    """Return the shortest time of each work, the works taking turns for so many seconds, 3 times at least."""
    times = [[processor_time(work) for work in works]]
    turns = max(3, round(seconds / sum(times[0])))
    times += [[processor_time(work) for work in works] for _ in range(turns - 1)]
    return [min(column) for column in zip(*times, strict=True)]


def step_against_hand(case: Case, levels: int, seconds: float) -> None:
    """Print the cost of a local step, a fifth of five, over that of the same by hand."""
    ours = Ours(case, levels)
    hand, at = ByHand(ours, case), ours.point()
    off = same_numbers(ours, hand)
    steps = range(hand.steps)
    mine, plain, hoarding = (
        total / hand.steps
        for total in in_turns(
            seconds,
            ours.local,
            lambda: [hand.step(at, hand.draw(levels)) for _ in steps],
            lambda: [hand.hoarding_step(at, hand.draw(levels)) for _ in steps],
        )
    )
    print(
        f"step, {case}, K = {levels}: by hand {plain * 1e3:.2f}, fedstrata {mine * 1e3:.2f} ms, ratio "
        f"{mine / plain:.2f} (wanted <= 1.1); by hand with K graphs held {hoarding * 1e3:.2f} ms, ratio "
        f"{mine / hoarding:.2f}; same numbers to {off:.0e}"
    )


def round_against_hand(case: Case, levels: int, seconds: float) -> None:
    """Print the cost of a round of 5 steps over that of the same by hand."""
    ours = Ours(case, levels)
    hand, server = ByHand(ours, case), ours.point()
    mine, plain = in_turns(seconds, ours.round, lambda: hand.round(server))
    times = f"by hand {plain * 1e3:.1f}, fedstrata {mine * 1e3:.1f} ms, ratio {mine / plain:.2f} (wanted <= 1.1)"
    print(f"round of {hand.steps} steps, {case}, K = {levels}: {times}")


def peak_of(work: Callable[[], object]) -> int:
    """Return how many bytes of tensors one call holds at most, beyond those that were there before."""
    os.environ["KINETO_LOG_LEVEL"] = "99"
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    events.sort(key=lambda e: e.start_ns())
    return int(np.cumsum([0] + [e.nbytes() for e in events]).max())


def memory(case: Case) -> None:
    """Print the peak of a client's local steps for K = 1 to 5, beside that of autograd on the whole composition.

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
            product()  # is traced
            graph = peak_of(product)
        ours.local()
        peaks.append(peak_of(ours.local))
        wholes.append(peak_of(partial(ByHand(ours, case).all_at_once, at, drawn)))
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
        ours.first_local()  # is traced
    peaks = [(peak_of(ours.first_local), peak_of(ours.local)) for ours in runs]
    vector, batch = runs[0].state.x.nbytes, sum(a.nbytes for a in runs[0].client().draw(1).parts[0])
    first, later = ((np.polyfit(every, column, 1)[0] - batch) / vector for column in zip(*peaks, strict=True))
    print(f"memory, {case}: growth per level {first:.2f} vectors in the run's first round, {later:.2f} in the others")


def products(case: Case, seconds: float) -> None:
    """Print what a Hessian-vector product and a step with K = 3 cost by reverse mode and by forward mode."""
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
        f"Hessian product, {case}: gradient {g:.2f}, reverse {r:.2f}, forward {f:.2f} ms, forward / reverse "
        f"{f / r:.2f}; a step with K = 3: {backs:.1f} and {aheads:.1f} ms, {aheads / backs:.2f}"
    )


def main() -> None:
    """Run all, print all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=1.5, help="for each comparison")
    parser.add_argument("--only", nargs="+", choices=("speed", "memory", "products"))
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    keep_memory()
    print(f"torch {torch.__version__}, {arguments.threads} thread(s)")
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
