"""SCAFFOLD, FedLALR, FGDA and ComFedL against the same algorithms written by hand: a module and a loop over clients.

    python bench/loops.py [--threads 1] [--repeats 10] [--only comfedl]

Prints processor time relative to the loop by hand (lower is better): ten steps of batch 32, on LeNet-5 with 5 clients
and on logistic regression with 100; ComFedL, on `robust`, also with 10. First each pair is compared on clients whose
rows are all equal, where it does not matter which rows a batch holds. The two sides take turns in one run, and the
shortest time of each counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

import fedstrata as fs
from common import best_of_each, parser, random_images, rounds_of, start
from saddles import ByHand, P, binary_data

Tensors = list[torch.Tensor]

LR, STEPS, BATCH = 0.01, 10, 32
GAMMA, SHIFT = 0.5, 2.3


class Clients:
    """Every client's rows, and the leaves (parameters) that all of them compute with."""

    def __init__(self, data: fs.FederatedData, leaves: Tensors, loss: Callable[..., torch.Tensor]) -> None:
        self.inputs, self.targets = data.train.arrays
        self.rows = list(torch.arange(len(self.targets)).split(len(self.targets) // data.clients))
        self.leaves, self.loss = leaves, loss
        self.server = [leaf.detach().clone() for leaf in leaves]

    def batch(self, client: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw a batch of a client."""
        rows = self.rows[client]
        chosen = rows[torch.randint(0, len(rows), (BATCH,))]
        return self.inputs[chosen], self.targets[chosen]

    def gradients(self, batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Return the gradients of all leaves, where they are."""
        return torch.autograd.grad(self.loss(*batch), self.leaves)

    @torch.no_grad()
    def go_to(self, values: Tensors) -> None:
        """Set the leaves."""
        for leaf, value in zip(self.leaves, values, strict=True):
            leaf.copy_(value)

    def zeros(self) -> Tensors:
        """Return zeros in the form of the leaves."""
        return [torch.zeros_like(value) for value in self.server]


class Scaffold(Clients):
    """SCAFFOLD, option II."""

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)
        self.c, self.own = self.zeros(), [self.zeros() for _ in self.rows]

    def round(self) -> None:
        """Do one round."""
        total, change = self.zeros(), self.zeros()
        for client, own in enumerate(self.own):
            self.go_to(self.server)
            for _ in range(STEPS):
                gradients = self.gradients(self.batch(client))
                with torch.no_grad():
                    for leaf, g, c_k, c in zip(self.leaves, gradients, own, self.c, strict=True):
                        leaf.sub_(g - c_k + c, alpha=LR)
            with torch.no_grad():
                for i, (leaf, x) in enumerate(zip(self.leaves, self.server, strict=True)):
                    new = own[i] - self.c[i] + (x - leaf) / (STEPS * LR)
                    change[i] += (new - own[i]) / len(self.rows)
                    total[i] += leaf / len(self.rows)
                    own[i] = new
        self.server = total
        self.c = [c + d for c, d in zip(self.c, change, strict=True)]


class FedLALR(Clients):
    """FedLALR: AMSGrad on every client; model and moments averaged."""

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)
        self.m, self.vhat = self.zeros(), [torch.full_like(x, 1e-16) for x in self.server]

    def round(self) -> None:
        """Do one round."""
        totals = self.zeros(), self.zeros(), self.zeros()
        for client in range(len(self.rows)):
            self.go_to(self.server)
            m, v, vhat = ([t.clone() for t in values] for values in (self.m, self.vhat, self.vhat))
            for _ in range(STEPS):
                gradients = self.gradients(self.batch(client))
                with torch.no_grad():
                    for i, (leaf, g) in enumerate(zip(self.leaves, gradients, strict=True)):
                        m[i].lerp_(g, 0.1)
                        v[i].mul_(0.995).addcmul_(g, g, value=0.005)
                        torch.maximum(vhat[i], v[i], out=vhat[i])
                        leaf.addcdiv_(m[i], vhat[i].sqrt(), value=-LR)
            with torch.no_grad():
                for total, values in zip(totals, (self.leaves, m, vhat), strict=True):
                    for mean, value in zip(total, values, strict=True):
                        mean.add_(value, alpha=1 / len(self.rows))
        self.server, self.m, self.vhat = totals


class FGDA(Clients):
    """FGDA with two exchanges; the last leaf is the dual."""

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)
        firsts = [self.first(client) for client in range(len(self.rows))]
        self.w = self.mean(firsts)

    def first(self, client: int) -> Tensors:
        """Return the gradients of a client, on as many batches as there are steps."""
        return self.mean([self.gradients(self.batch(client)) for _ in range(STEPS)])

    def mean(self, values: list[Tensors]) -> Tensors:
        """Return the mean of several lists of tensors."""
        return [torch.stack(column).mean(0) for column in zip(*values, strict=True)]

    def moved(self, x: Tensors, w: Tensors) -> Tensors:
        """Descend in all leaves but the last."""
        return [a - LR * g for a, g in zip(x[:-1], w[:-1], strict=True)] + [x[-1] + LR * w[-1]]

    def follow(self, client: int, old: Tensors, new: Tensors, w: Tensors) -> Tensors:
        """Return the estimates at the new point."""
        batch = self.batch(client)
        self.go_to(new)
        at_new = self.gradients(batch)
        self.go_to(old)
        at_old = self.gradients(batch)
        with torch.no_grad():
            return [a + 0.5 * (v - b) for a, b, v in zip(at_new, at_old, w, strict=True)]

    def round(self) -> None:
        """Do one round."""
        points, estimates = [], []
        for client in range(len(self.rows)):
            x, w = self.server, self.w
            for _ in range(STEPS - 1):
                new = self.moved(x, w)
                x, w = new, self.follow(client, x, new, w)
            points.append(x)
            estimates.append(w)
        self.server = self.moved(self.mean(points), self.mean(estimates))
        fresh = [self.follow(k, points[k], self.server, estimates[k]) for k in range(len(self.rows))]
        self.w = self.mean(fresh)


class ComFedL(Clients):
    """ComFedL on robust learning, with normalised weights."""

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)
        with torch.no_grad():
            first = [self.weight(self.loss(*self.batch(client))) for client in range(len(self.rows))]
        self.scale = torch.stack(first).mean()

    def weight(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the derivative of the outer function."""
        return ((loss - SHIFT) / GAMMA).exp()

    def round(self) -> None:
        """Do one round."""
        total, weights = self.zeros(), torch.zeros(())
        for client in range(len(self.rows)):
            self.go_to(self.server)
            for _ in range(STEPS):
                loss = self.loss(*self.batch(client))
                gradients = torch.autograd.grad(loss, self.leaves)
                with torch.no_grad():
                    v = self.weight(loss)
                    factor = torch.minimum(v / self.scale, torch.tensor(float(len(self.rows))))
                    for leaf, g in zip(self.leaves, gradients, strict=True):
                        leaf.addcmul_(g, factor, value=-LR)
                    weights += v / (STEPS * len(self.rows))
            with torch.no_grad():
                for mean, leaf in zip(total, self.leaves, strict=True):
                    mean.add_(leaf, alpha=1 / len(self.rows))
        self.server, self.scale = total, weights


def sides(name: str, model: str, data: fs.FederatedData) -> tuple[fs.Algorithm, fs.Problem, Clients]:
    """Return the algorithm and problem of fedstrata, and the loop by hand."""
    if name == "fgda":
        module = fs.models.model(model, (1, 28, 28), 1)
        problem, hand = fs.auc(module, p=P), ByHand(fs.models.model(model, (1, 28, 28), 1))
        return fs.FGDA(gamma=LR, lam=LR, steps=STEPS), problem, FGDA(data, hand.leaves, hand.loss)
    module = fs.models.model(model, (1, 28, 28), 10)
    problem = fs.robust(module, GAMMA, shift=SHIFT, prior=False) if name == "comfedl" else fs.erm(module, prior=False)
    cross_entropy = torch.nn.CrossEntropyLoss()
    loops = {
        "scaffold": (fs.Scaffold(lr=LR, steps=STEPS), Scaffold),
        "fedlalr": (fs.FedLALR(lr=LR, steps=STEPS), FedLALR),
        "comfedl": (fs.ComFedL(lr=LR, steps=STEPS), ComFedL),
    }
    algorithm, kind = loops[name]
    return algorithm, problem, kind(data, list(module.parameters()), lambda x, y: cross_entropy(module(x), y))


def compare(name: str, model: str, clients: int, repeats: int) -> float:
    """Print and return the cost of a round relative to the loop by hand."""
    data = binary_data(clients) if name == "fgda" else random_images(clients)
    check(name, model)
    algorithm, problem, hand = sides(name, model, data)
    ours = rounds_of(problem, data, algorithm, batch_size=BATCH)
    ours(2)
    hand.round()
    one, other = best_of_each(repeats, hand.round, lambda: ours(1), clock=time.process_time)
    milli = 1e3 / (clients * STEPS)
    times = f"by hand {one * milli:.3f}, fedstrata {other * milli:.3f} ms per client-step"
    print(f"{name}, {model}, {clients} clients: {times}, ratio {other / one:.2f} (target <= 1.0)")
    return other / one


def check(name: str, model: str) -> None:
    """Raise unless both sides compute the same, on two clients whose rows are all equal."""
    data = binary_data(2) if name == "fgda" else random_images(2)
    inputs, targets = (array.clone() for array in data.train.arrays)
    pairs = []
    for rows in torch.arange(len(targets)).split(len(targets) // 2):
        inputs[rows], targets[rows] = inputs[rows[0]].clone(), targets[rows[0]].clone()
        pairs.append((inputs[rows], targets[rows]))
    data = fs.FederatedData.from_arrays(pairs, name="equal rows", classes=2 if name == "fgda" else 10)
    algorithm, problem, hand = sides(name, model, data)
    run = fs.train(problem, data, algorithm, rounds=2, batch_size=BATCH, evaluate=fs.Evaluation("none"), threads=1)
    hand.round()
    hand.round()
    theirs = torch.cat([value.reshape(-1) for value in hand.server])
    mine = run.x if run.y is None else torch.cat([run.x, run.y])
    torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-5)


def main() -> None:
    """Run and print every comparison."""
    options = parser(__doc__)
    options.add_argument("--repeats", type=int, default=10)
    names = ("scaffold", "fedlalr", "fgda", "comfedl")
    options.add_argument("--only", choices=names, help="one of the algorithms")
    arguments = start(options)
    for name in names if arguments.only is None else (arguments.only,):
        compare(name, "lenet5", 5, arguments.repeats)
        if name == "comfedl":
            compare(name, "logreg", 10, arguments.repeats)
        compare(name, "logreg", 100, arguments.repeats)


if __name__ == "__main__":
    main()
