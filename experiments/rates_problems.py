"""Problems that meet the theorems' assumptions, with exact gradients: smooth, noise and heterogeneity bounded.

Samples are finite and their noise is uniform, so every bound in the assumptions is a number; ``constants`` has them.
Where a study varies the number of clients N, a seed's problem is the same for every N: its samples are in ``MOST``
groups that differ, and a client has MOST / N of them.
"""

from __future__ import annotations

import math

import torch

import fedstrata as fs
from rates import Known

MOST, SAMPLES = 32, 64
"""Groups of samples that differ, and the samples of each; N clients, at most ``MOST``, have equally many groups."""

DIMENSION = 10
START = 3.0
"""The norm of the starting point."""

Batch = tuple[torch.Tensor, ...]


class Random:
    """Draws numbers from one seed, in double precision."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int) -> torch.Tensor:
        """Return standard normal numbers."""
        return torch.randn(*shape, generator=self._generator, dtype=torch.float64)

    def noise(self, deviation: float, *shape: int) -> torch.Tensor:
        """Return uniform numbers with this standard deviation, [clients, samples, ...], centred for each client."""
        numbers = torch.rand(*shape, generator=self._generator, dtype=torch.float64)
        numbers = math.sqrt(12) * deviation * (numbers - 0.5)
        return numbers - numbers.mean(1, keepdim=True)

    def groups(self, spread: float, noise: float) -> torch.Tensor:
        """Return samples around points that differ between groups: [MOST, SAMPLES, DIMENSION]."""
        return spread * self.normal(MOST, 1, DIMENSION) + self.noise(noise, MOST, SAMPLES, DIMENSION)

    def sphere(self, radius: float, dimension: int) -> torch.Tensor:
        """Return a point at this distance from 0."""
        direction = self.normal(dimension)
        return radius * direction / direction.norm()


def merged(groups: torch.Tensor, clients: int) -> torch.Tensor:
    """Return the samples of so many clients, [clients, samples, ...]; together they are the same for every number."""
    return groups.reshape(clients, -1, *groups.shape[2:])


def bell(z: torch.Tensor) -> torch.Tensor:
    """Return z^2 / (1 + z^2): not convex, its derivatives are at most 0.65 and 2."""
    return z**2 / (1 + z**2)


def bell_slope(z: torch.Tensor) -> torch.Tensor:
    """Return the derivative of ``bell``."""
    return 2 * z / (1 + z**2) ** 2


STEEPEST = 3 * math.sqrt(3) / 8 * math.sqrt(DIMENSION)
"""The largest norm of the gradient of a sum of bells."""


def cone(z: torch.Tensor) -> torch.Tensor:
    """Return sqrt(1 + z^2) - 1: convex, its first two derivatives are at most 1."""
    return (1 + z**2).sqrt() - 1


def cone_slope(z: torch.Tensor) -> torch.Tensor:
    """Return the derivative of ``cone``."""
    return z / (1 + z**2).sqrt()


def composition(
    clients: int, seed: int, spread: float = 0.5, noise: float = 1.0, *, equal: bool = False, same_outer: bool = False
) -> Known:
    """Build f_k(g_k(x)): g_k(x) = x + H sin x + a_k sin x and f_k(u) = sum of cone(u - b_k).

    a_k and b_k are means over a client's samples, so value and Jacobian of g share their noise. ``spread`` is the
    standard deviation of a_k over the clients, and half of that of b_k. H is common to all. ``equal``: all clients have
    the samples of the first. ``same_outer``: all have one b, without noise.
    """
    random = Random(seed)
    common = 0.5 * random.normal(DIMENSION, DIMENSION) / math.sqrt(DIMENSION)
    a, b = random.groups(spread, noise), random.groups(2 * spread, noise)
    a, b = (rows[:1].expand(clients, -1, -1) if equal else rows[:clients] for rows in (a, b))
    b = b[:1, :1].expand_as(b) if same_outer else b
    means = a.mean(1)

    def level(x: torch.Tensor, batch: Batch) -> torch.Tensor:
        return x + common @ x.sin() + batch[0].mean(0) * x.sin()

    def outer(u: torch.Tensor, batch: Batch) -> torch.Tensor:
        return cone(u - batch[1]).sum(1).mean()

    def norm(x: torch.Tensor) -> float:
        u = x + common @ x.sin() + means * x.sin()
        v = cone_slope(u[:, None] - b).mean(1)
        return float((v + x.cos() * (v @ common + means * v)).mean(0).norm())

    largest = float(torch.linalg.matrix_norm(common, 2) + a.abs().max())
    c_g, l_g, c_f, l_f = 1 + largest, largest, math.sqrt(DIMENSION), 1.0
    constants = {
        "C_g": c_g,
        "L_g": l_g,
        "C_f": c_f,
        "L_f": l_f,
        "L": math.sqrt(2 * c_f**2 * l_g**2 + 2 * c_g**4 * l_f**2),
        "sigma": max(_deviation(a), _deviation(b)),
        "delta_g": _farthest(means),
        "delta_f": _farthest(b.mean(1)),
    }
    x0 = random.sphere(START, DIMENSION)
    problem = fs.Problem(outer, x0, levels=(level,), inner_mean="local", name="bounded composition")
    return Known(problem, fs.FederatedData.from_arrays(list(zip(a, b, strict=True))), norm, constants)


RISE, COUPLING, MU = 2.0, 1.0, 0.5


def saddle(clients: int, seed: int, spread: float = 1.0, noise: float = 1.0) -> Known:
    """Build f_k(x, y) = 2 sum bell(x - a_k) + x.y - ||y||^2 / 4 - sum cone(y - b_k), whose maximum over y is exact.

    a_k and b_k are drawn for each client with standard deviation ``spread``, and again for each sample around them.
    F(x) = max_y M_k[f_k(x, y)] is not convex; the norm is that of its gradient, with y found by Newton's method.
    """
    random = Random(seed)
    a = merged(random.groups(spread, noise), clients)
    b = merged(random.groups(spread, noise), clients)

    def outer(x: torch.Tensor, y: torch.Tensor, batch: Batch) -> torch.Tensor:
        rise = RISE * bell(x - batch[0]).sum(1).mean() + COUPLING * (x @ y)
        return rise - MU / 2 * (y @ y) - cone(y - batch[1]).sum(1).mean()

    def best(x: torch.Tensor) -> torch.Tensor:
        y = COUPLING * x / (MU + 1)
        for _ in range(30):
            z = y - b
            residual = COUPLING * x - MU * y - cone_slope(z).mean((0, 1))
            if float(residual.abs().max()) < 1e-8:
                break
            y = y + residual / (MU + ((1 + z**2) ** -1.5).mean((0, 1)))
            y = torch.minimum(torch.maximum(y, (COUPLING * x - 1) / MU), (COUPLING * x + 1) / MU)
        return y

    def norm(x: torch.Tensor) -> float:
        return float((RISE * bell_slope(x - a).mean((0, 1)) + COUPLING * best(x)).norm())

    constants = {
        "L_f": max(2 * RISE, MU + 1) + COUPLING,
        "mu": MU,
        "kappa": (max(2 * RISE, MU + 1) + COUPLING) / MU,
        "sigma": max(min(2 * RISE * _deviation(a), RISE * STEEPEST), _deviation(b)),
        "delta_x": min(2 * RISE * _farthest(a.mean(1)), 2 * RISE * STEEPEST),
        "delta_y": _farthest(b.mean(1)),
    }
    x0 = random.sphere(START, DIMENSION)
    problem = fs.Problem(outer, x0, y0=torch.zeros_like(x0), name="bounded saddle")
    return Known(problem, fs.FederatedData.from_arrays(list(zip(a, b, strict=True))), norm, constants)


def wells(clients: int, seed: int, spread: float = 0.5, noise: float = 1.0) -> Known:
    """Build f_k(x) = sum of bell(x - b_k): every sample's gradient is bounded, with several stationary points."""
    random = Random(seed)
    b = merged(random.groups(spread, noise), clients)

    def outer(x: torch.Tensor, batch: Batch) -> torch.Tensor:
        return bell(x - batch[0]).sum(1).mean()

    def norm(x: torch.Tensor) -> float:
        return float(bell_slope(x - b).mean((0, 1)).norm())

    x0 = 1.0 + 0.3 * random.normal(DIMENSION)
    problem = fs.Problem(outer, x0, name="wells")
    data = fs.FederatedData.from_arrays([(rows, torch.zeros(len(rows))) for rows in b])
    constants = {
        "L": 2.0,
        "G_inf": STEEPEST / math.sqrt(DIMENSION),
        "sigma": min(2 * _deviation(b), STEEPEST),
        "sigma_G": min(2 * _farthest(b.mean(1)), 2 * STEEPEST),
    }
    return Known(problem, data, norm, constants)


def _deviation(rows: torch.Tensor) -> float:
    """Return the largest standard deviation of a client's samples [clients, samples, d], in norm."""
    return float((rows - rows.mean(1, keepdim=True)).square().sum(-1).mean(1).max().sqrt())


def _farthest(points: torch.Tensor) -> float:
    """Return the largest distance between two clients' points."""
    return float(torch.cdist(points, points).max())
