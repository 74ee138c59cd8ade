"""Generated data."""

from __future__ import annotations

import numpy as np
import torch

from fedstrata.core.options import param
from fedstrata.data.dataset import Dataset
from fedstrata.data.sets.common import data_set


@data_set
def sinusoid(
    tasks: int = param(25, "number of tasks; task i does not depend on it", least=1),
    samples: int = param(100, "training rows of each task, and as many test rows", least=1),
    noise: float = param(0.0, "standard deviation of the noise on training and test targets", least=0),
    seed: int = param(0, "seed of tasks, inputs and noise", least=0),
) -> Dataset:
    """Generate sinusoids, the regression tasks of MAML: 2,500 training and 2,500 test rows by default, one input.

    Task i is y = A_i sin(x - phi_i), with A_i uniform in [0.1, 5], phi_i in [0, pi] and x in [-5, 5]. ``keys`` are task
    numbers: the partition ``by_key`` with as many clients as tasks gives each client one task, in random order. With
    fewer clients it drops tasks, but their test rows stay in the pooled test set. Noise is drawn last, so it changes
    neither tasks nor inputs.

    Finn, Abbeel and Levine, "Model-Agnostic Meta-Learning for Fast Adaptation of Deep Networks", ICML 2017, section
    5.1.
    """
    inputs = np.empty((tasks, 2 * samples), np.float32)
    targets = np.empty_like(inputs)
    for task in range(tasks):
        rng = np.random.default_rng([seed, task])
        amplitude, phase = rng.uniform(0.1, 5), rng.uniform(0, np.pi)
        inputs[task] = rng.uniform(-5, 5, 2 * samples)
        # Computed in double precision from the rounded inputs, so that targets are exact up to one rounding.
        curve = amplitude * np.sin(inputs[task].astype(np.float64) - phase)
        targets[task] = curve + noise * rng.standard_normal(2 * samples)
    (x, test_x), (y, test_y) = (
        [torch.from_numpy(half.reshape(shape)) for half in np.hsplit(array, 2)]
        for array, shape in ((inputs, (-1, 1)), (targets, (-1,)))
    )
    return Dataset("sinusoid", x, y, test_x, test_y, 0, np.repeat(np.arange(tasks), samples))
