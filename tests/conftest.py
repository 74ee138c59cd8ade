"""One thread for every test: small tensors are fastest that way, and sums always run in the same order."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
