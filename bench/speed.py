"""Speed against a bare PyTorch FedAvg loop, on the same work, in one run, with the same threads.

    python bench/speed.py [--threads 1] [--repeats 20]

Prints how many times as fast fedstrata is (higher is better). The two sides take turns, and the shortest time of each
counts, since other work on the machine can only add to it.
"""

from __future__ import annotations

import time

import torch

import fedstrata as fs
from common import best_of_each, parser, random_images, rounds_of, start


def bare_fedavg(
    model: torch.nn.Module, inputs: torch.Tensor, targets: torch.Tensor, owned: list, rounds: int, steps: int
) -> torch.Tensor:
    """Run FedAvg written by hand: a model, an optimiser, a loop over clients."""
    loss = torch.nn.CrossEntropyLoss()
    server = {k: v.clone() for k, v in model.state_dict().items()}
    for _ in range(rounds):
        total = {k: torch.zeros_like(v) for k, v in server.items()}
        for rows in owned:
            model.load_state_dict(server)
            optimiser = torch.optim.SGD(model.parameters(), lr=0.01)
            for _ in range(steps):
                batch = rows[torch.randint(0, len(rows), (32,))]
                optimiser.zero_grad()
                loss(model(inputs[batch]), targets[batch]).backward()
                optimiser.step()
            for k, v in model.state_dict().items():
                total[k] += v / len(owned)
        server = total
    return torch.cat([v.reshape(-1) for v in server.values()])


def versus_bare(name: str, clients: int, rounds: int, repeats: int) -> float:
    """Return the speed of fedstrata's FedAvg relative to the bare loop."""
    data = random_images(clients)
    inputs, targets = data.train.arrays
    owned = list(torch.arange(60 * clients).split(60))
    model = fs.models.model(name, (1, 28, 28), 10)
    ours = rounds_of(fs.erm(model), data, fs.FedAvg(lr=0.01, steps=10), batch_size=32)
    ours(1)
    bare_fedavg(model, inputs, targets, owned[:2], 1, 10)
    mine, bare = best_of_each(
        repeats, lambda: ours(rounds), lambda: bare_fedavg(model, inputs, targets, owned, rounds, 10)
    )
    per_step = 1e3 / (rounds * clients * 10)
    times = f"bare {bare * per_step:.3f} ms, fedstrata {mine * per_step:.3f} ms per client-step"
    print(f"{name:8} {clients} clients: {times}, {bare / mine:.2f} times as fast")
    return bare / mine


def trivial(clients: int) -> tuple[fs.Problem, fs.FederatedData]:
    """Return a problem whose steps take no time, and clients with one sample each."""
    pairs = [(torch.ones(1, 1), torch.zeros(1, 1)) for _ in range(clients)]
    data = fs.FederatedData.from_arrays(pairs, name="trivial")
    return fs.Problem(lambda x, batch: (batch[0] * x).sum(), torch.zeros(1), name="trivial"), data


def overhead(clients: int, repeats: int) -> float:
    """Return the microseconds that a round of trivial work costs per client."""
    run = rounds_of(*trivial(clients), fs.FedAvg(lr=0.01, steps=1), batch_size=1)
    run(3)
    (best,) = best_of_each(repeats, lambda: run(20))
    micro = best / 20 / clients * 1e6
    print(f"overhead {clients} clients, one trivial step: {micro:.2f} microseconds per client and round")
    return micro


class Silent(fs.Algorithm):
    """Asks the clients for nothing but zeros."""

    name = "silent"

    def round(self, s: fs.State, clients: fs.Clients) -> fs.State:
        """Do one exchange."""
        return fs.State(s.x + clients.mean(self.local, s.x), s.y)

    @fs.remote
    def local(self, client: fs.Client, x: torch.Tensor) -> torch.Tensor:
        """Answer."""
        return torch.zeros_like(x)


def exchange(repeats: int) -> float:
    """Return the milliseconds that a round with one exchange costs, with a single client and a trivial step."""
    runs = [rounds_of(*trivial(1), a, batch_size=1) for a in (fs.FedAvg(lr=0.01, steps=1), Silent())]
    for run in runs:
        run(3)
    step, alone = (
        10 * best
        for best in best_of_each(repeats, *(lambda run=run: run(100) for run in runs), clock=time.process_time)
    )
    print(f"exchange with one client and a trivial step: {step:.3f} ms (target < 0.3), {alone:.3f} without the step")
    return step


def main() -> None:
    """Run and print every comparison."""
    options = parser(__doc__)
    options.add_argument("--repeats", type=int, default=20)
    arguments = start(options)
    versus_bare("logreg", 100, 1, arguments.repeats)
    versus_bare("lenet5", 10, 1, arguments.repeats)
    overhead(1000, arguments.repeats)
    exchange(arguments.repeats)


if __name__ == "__main__":
    main()
