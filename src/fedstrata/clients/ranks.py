"""Ranks: the processes that work on one run together, as ``torchrun`` starts them.

Every rank runs the same program. What crosses between them is tensors and JSON, never code.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from fedstrata.core.errors import FedstrataError, InputError

Tensors = dict[str, torch.Tensor]

TIMEOUT = timedelta(hours=2)
"""How long a rank waits for the others: an evaluation, which only the first one makes, may take a while."""


class Ranks:
    """The processes of a run: ``rank`` is this one's number, ``size`` how many there are.

    Alone (``size`` is 1) nothing is ever sent. Otherwise the calls below are made by all ranks in the same order.
    """

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank, self.size = rank, size

    @property
    def first(self) -> bool:
        """Whether this is the rank that evaluates, writes, and shows progress."""
        return self.rank == 0

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum of a vector over the ranks, the same bits on all of them; ``values`` is changed."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def max(self, values: torch.Tensor) -> torch.Tensor:
        """Return the elementwise maximum over the ranks; ``values`` is changed."""
        if self.size > 1:
            dist.all_reduce(values, op=dist.ReduceOp.MAX)
        return values

    def all(self, value: Any) -> list[Any]:
        """Return what every rank gave: anything that JSON can hold."""
        if self.size == 1:
            return [value]
        mine = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        lengths = torch.zeros(self.size, dtype=torch.int64)
        lengths[self.rank] = len(mine)
        dist.all_reduce(lengths)
        padded = torch.zeros(int(lengths.max()), dtype=torch.uint8)
        padded[: len(mine)] = mine
        parts = [torch.empty_like(padded) for _ in range(self.size)]
        dist.all_gather(parts, padded)
        return [json.loads(bytes(p[:n].numpy())) for p, n in zip(parts, lengths.tolist(), strict=True)]

    def told(self, value: Any) -> Any:
        """Return what the first rank gave."""
        return self.all(value if self.first else None)[0]

    def tensors(self, tensors: Tensors | None) -> Tensors:
        """Return the tensors that the first rank gave, by name."""
        if self.size == 1:
            return tensors or {}
        out = _empty(self.told(_forms(tensors or {})))
        for name, value in out.items():
            if self.first and tensors:
                value.copy_(tensors[name])
            dist.broadcast(value, 0)
        return out

    def stream(self, pieces: Iterable[Tensors]) -> Iterator[Tensors]:
        """Yield, on every rank, the tensors that the first rank has piece by piece."""
        if self.size == 1:
            yield from pieces
            return
        source = iter(pieces)
        while True:
            piece = next(source, None) if self.first else None
            if not self.told(piece is not None):
                return
            yield self.tensors(piece)

    def collected(self, pieces: Iterable[Tensors]) -> Iterator[Tensors]:
        """Yield, on the first rank, every rank's pieces; the others give theirs, and get nothing.

        All ranks must go through to the end.
        """
        if self.size == 1:
            yield from pieces
            return
        source = iter(pieces)
        while True:
            piece = next(source, None)
            forms = self.all(None if piece is None else _forms(piece))
            if all(form is None for form in forms):
                return
            if not self.first:
                for value in (piece or {}).values():
                    dist.send(value.cpu().contiguous(), 0)
                continue
            if piece is not None:
                yield piece
            for rank, form in enumerate(forms[1:], start=1):
                if form is not None:
                    received = _empty(form)
                    for value in received.values():
                        dist.recv(value, rank)
                    yield received


def _forms(tensors: Tensors) -> dict[str, Any]:
    return {k: (list(v.shape), str(v.dtype)) for k, v in tensors.items()}


def _empty(forms: dict[str, Any]) -> Tensors:
    return {k: torch.empty(shape, dtype=dtype_named(dtype)) for k, (shape, dtype) in forms.items()}


def dtype_named(name: str) -> torch.dtype:
    """Return the dtype that prints as ``name``."""
    found = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise InputError(f"There is no dtype {name!r}.")
    return found


ALONE = Ranks()


def ranks_here() -> Ranks:
    """Return the ranks of the process group there is, or a rank alone."""
    if dist.is_available() and dist.is_initialized():
        return Ranks(dist.get_rank(), dist.get_world_size())
    return ALONE


@contextmanager
def joined() -> Iterator[Ranks]:
    """Join the ranks that ``torchrun`` started, if it did, and leave them at the end."""
    if not launched() or dist.is_initialized():
        yield ranks_here()
        return
    store, rank, size = next(rendezvous("env://", timeout=TIMEOUT))
    # After a restart the store still has the addresses of the ranks before: each start looks under a name of its own.
    store = PrefixStore(f"start {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=TIMEOUT)
    try:
        yield ranks_here()
    except RuntimeError as error:
        if "gloo/transport" not in str(error):
            raise
        told = str(error).partition("] ")[2].partition(". ")[0]
        raise FedstrataError(
            f"Another rank stopped, or cannot be reached ({told}). If it printed an error, that is the reason; if not, "
            "it was killed, for example for want of memory."
        ) from error
    finally:
        dist.destroy_process_group()


def launched() -> bool:
    """Whether ``torchrun`` started this process as one of several."""
    return int(os.environ.get("WORLD_SIZE") or 1) > 1 and "RANK" in os.environ


def restarted() -> bool:
    """Whether ``torchrun`` started this process again, after a rank died."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
