"""The cost of a minimax problem: an AUC step against the same forward, backward and dual gradient by hand.

    python bench/saddles.py [--threads 1] [--repeats 20]

Prints ratios of times (lower is better). The two sides take turns in one run, and the shortest time of each counts.
"""

from __future__ import annotations

import numpy as np
import torch

import fedstrata as fs
from common import best_of_each, parser, rounds_of, start
from fedstrata.problems.oracles import Oracles

P = 0.05


def binary_data(clients: int) -> fs.FederatedData:
    """Build random images, 60 for each client, 3 of them positive."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.cat([torch.ones(3), torch.zeros(57)]).long()
    pairs = [(torch.randn(60, 1, 28, 28, generator=generator), labels) for _ in range(clients)]
    return fs.FederatedData.from_arrays(pairs, name="random")


class ByHand:
    """The AUC loss written by hand: a module, two centres and alpha as parameters, one backward pass."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        self.a, self.b, self.alpha = (torch.zeros(1, requires_grad=True) for _ in range(3))
        self.leaves = [*model.parameters(), self.a, self.b, self.alpha]

    def loss(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return F on a batch."""
        s = torch.sigmoid(self.model(inputs).squeeze(1))
        positive, negative = (targets == 1).float(), (targets == 0).float()
        terms = (1 - P) * (s - self.a) ** 2 * positive + P * (s - self.b) ** 2 * negative
        terms = terms + 2 * (1 + self.alpha) * (P * s * negative - (1 - P) * s * positive)
        return terms.mean() - P * (1 - P) * self.alpha.squeeze() ** 2

    def gradients(self, inputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the gradients in all parameters, alpha's last."""
        return torch.autograd.grad(self.loss(inputs, targets), self.leaves)

    def local_sgda(self, inputs: torch.Tensor, targets: torch.Tensor, owned: list, steps: int) -> None:
        """Do one round of Local-SGDA: a loop over clients, descent in all but alpha, and the means."""
        server = [leaf.detach().clone() for leaf in self.leaves]
        total = [torch.zeros_like(leaf) for leaf in server]
        for rows in owned:
            with torch.no_grad():
                for leaf, value in zip(self.leaves, server, strict=True):
                    leaf.copy_(value)
            for _ in range(steps):
                batch = rows[torch.randint(0, len(rows), (32,))]
                gradients = self.gradients(inputs[batch], targets[batch])
                with torch.no_grad():
                    for leaf, g in zip(self.leaves[:-1], gradients[:-1], strict=True):
                        leaf.sub_(g, alpha=0.01)
                    self.alpha.add_(gradients[-1], alpha=0.01)
            with torch.no_grad():
                for mean, leaf in zip(total, self.leaves, strict=True):
                    mean.add_(leaf, alpha=1 / len(owned))
        with torch.no_grad():
            for leaf, mean in zip(self.leaves, total, strict=True):
                leaf.copy_(mean)


def one_step(name: str, repeats: int) -> None:
    """Print the cost of both gradients of one client, one batch of 32."""
    model = fs.models.model(name, (1, 28, 28), 1)
    oracles, hand = Oracles(fs.auc(model, p=P)), ByHand(model)
    batch = binary_data(1).train.gather(np.zeros(1, dtype=np.int64), np.arange(32)[None], None, True)
    inputs, targets = (a[0] for a in batch.parts[0])
    x, y = oracles.problem.x0[None].clone(), torch.zeros(1, 1)

    def ours() -> tuple[torch.Tensor, ...]:
        with torch.no_grad():
            return oracles.outer_grads(x, y, batch)

    mine = torch.cat([g[0] for g in ours()])
    theirs = torch.cat([g.reshape(-1) for g in hand.gradients(inputs, targets)])
    torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-6)
    ten = range(10)
    one, other = best_of_each(
        repeats, lambda: [hand.gradients(inputs, targets) for _ in ten], lambda: [ours() for _ in ten]
    )
    times = f"by hand {one * 100:.3f}, fedstrata {other * 100:.3f} ms"
    print(f"AUC gradients, {name}, one client: {times}, ratio {other / one:.2f} (target <= 1.05)")


def one_round(name: str, clients: int, repeats: int) -> None:
    """Print the cost of a round of Local-SGDA, 10 steps of batch 32, over the loop by hand."""
    model = fs.models.model(name, (1, 28, 28), 1)
    data = binary_data(clients)
    algorithm = fs.LocalSGDA(lr=0.01, dual_lr=0.01, steps=10)
    ours = rounds_of(fs.auc(model, p=P), data, algorithm, batch_size=32)
    hand = ByHand(fs.models.model(name, (1, 28, 28), 1))
    inputs, targets = data.train.arrays
    owned = list(torch.arange(60 * clients).split(60))
    ours(1)
    one, other = best_of_each(repeats, lambda: hand.local_sgda(inputs, targets, owned, 10), lambda: ours(1))
    times = f"by hand {one * 100 / clients:.3f}, fedstrata {other * 100 / clients:.3f} ms per client-step"
    print(f"Local-SGDA on AUC, {name}, {clients} clients: {times}, ratio {other / one:.2f} (target <= 1.05)")


def main() -> None:
    """Run and print every comparison."""
    options = parser(__doc__)
    options.add_argument("--repeats", type=int, default=20)
    arguments = start(options)
    one_step("lenet5", arguments.repeats)
    one_step("logreg", arguments.repeats)
    one_round("lenet5", 5, arguments.repeats)
    one_round("logreg", 100, arguments.repeats)


if __name__ == "__main__":
    main()
