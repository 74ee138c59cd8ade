"""The cost of layers: robust learning against FedAvg, and a MAML step against the same three calls by hand.

    python bench/layers.py [--threads 1] [--repeats 20]

Prints ratios of times (lower is better). The two sides take turns in one run, and the shortest time of each counts.
"""

from __future__ import annotations

import numpy as np
import torch

import fedstrata as fs
from common import best_of_each, parser, random_images, rounds_of, start
from fedstrata.data.batch import Batch
from fedstrata.problems.oracles import Oracles


def robust_against_fedavg(clients: int, repeats: int) -> None:
    """Print the cost of a gradient of ``robust`` over one of ``erm``: logistic regression, 10 steps of batch 32."""
    data, model = random_images(clients), fs.models.model("logreg", (1, 28, 28), 10)
    plain = rounds_of(fs.erm(model), data, fs.FedAvg(lr=0.01, steps=10), batch_size=32)
    for normalise in (True, False):
        problem = fs.robust(model, gamma=0.5, shift=2.3)
        layered = rounds_of(problem, data, fs.ComFedL(lr=0.01, steps=10, normalise=normalise), batch_size=32)
        plain(2)
        layered(2)
        one, other = best_of_each(repeats, lambda: plain(1), lambda run=layered: run(1))
        times = f"FedAvg {one * 1e5 / clients:.1f}, ComFedL {other * 1e5 / clients:.1f} microseconds per client-step"
        print(f"robust, {clients} clients, normalise={normalise}: {times}, ratio {other / one:.2f} (target <= 1.3)")


def maml_by_hand(model: torch.nn.Module, lr: float, inner: Batch, outer: Batch) -> tuple[torch.Tensor, ...]:
    """Return one client's MAML gradient by hand: inner gradient, outer gradient, Hessian-vector product."""
    loss = torch.nn.functional.cross_entropy
    weights = dict(model.named_parameters())
    (x1, y1), (x0, y0) = ([a[0] for a in b.parts[0]] for b in (inner, outer))
    first = torch.autograd.grad(
        loss(torch.func.functional_call(model, weights, (x1,)), y1), list(weights.values()), create_graph=True
    )
    adapted = {k: w - lr * g for (k, w), g in zip(weights.items(), first, strict=True)}
    leaves = {k: a.detach().requires_grad_() for k, a in adapted.items()}
    v = torch.autograd.grad(loss(torch.func.functional_call(model, leaves, (x0,)), y0), list(leaves.values()))
    return torch.autograd.grad(list(adapted.values()), list(weights.values()), v)


def maml_against_hand(name: str, clients: int, repeats: int) -> None:
    """Print the cost of one MAML step of ``clients`` clients through the oracles, over the loop written by hand."""
    model, lr = fs.models.model(name, (1, 28, 28), 10), 0.05
    oracles = Oracles(fs.maml(model, inner_lr=lr))
    part = random_images(clients).train
    chunk = clients if name != "lenet5" else 1
    ids = np.arange(clients)
    positions = np.tile(np.arange(32), (clients, 1))
    chunks = np.split(ids, clients // chunk)
    batches = [[part.gather(c, positions[c] + s, None, True) for s in (0, 20)] for c in chunks]
    alone = [[part.gather(np.array([k]), positions[:1] + s, None, True) for s in (0, 20)] for k in ids]
    x = torch.cat([p.detach().reshape(-1) for p in model.parameters()]).expand(chunk, -1).contiguous()

    def ours() -> list[torch.Tensor]:
        with torch.no_grad():
            return [oracles.chain(x, None, b).gradient for b in batches]

    def hand() -> list[tuple[torch.Tensor, ...]]:
        return [maml_by_hand(model, lr, *b) for b in alone]

    mine, theirs = ours(), hand()
    flat = torch.stack([torch.cat([t.reshape(-1) for t in g]) for g in theirs])
    torch.testing.assert_close(torch.cat(mine), flat, rtol=1e-3, atol=1e-5)
    one, other = best_of_each(repeats, hand, ours)
    times = f"by hand {one * 1e3 / clients:.2f}, fedstrata {other * 1e3 / clients:.2f} ms per step"
    print(
        f"MAML step, {name}, {clients} clients ({chunk} at a time): {times}, ratio {other / one:.2f} (target <= 1.15)"
    )


def main() -> None:
    """Run and print every comparison."""
    options = parser(__doc__)
    options.add_argument("--repeats", type=int, default=20)
    arguments = start(options)
    for clients in (10, 100):
        robust_against_fedavg(clients, arguments.repeats)
    for name, clients in (("logreg", 1), ("logreg", 20), ("mlp", 1), ("mlp", 5), ("lenet5", 5)):
        maml_against_hand(name, clients, arguments.repeats)


if __name__ == "__main__":
    main()
