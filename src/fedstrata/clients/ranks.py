"""Ranks: the processes of one run, as ``torchrun`` starts them.

Every rank runs the same program. Ranks exchange tensors and JSON, never code.
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

from fedstrata.core.errors import FedstrataError
from fedstrata.core.torchrun import end_with_launcher, launched, local_rank

Tensors = dict[str, torch.Tensor]

TIMEOUT = timedelta(hours=2)
"""How long a rank waits for the others; only the first one evaluates, which may take a long time."""


class Ranks:
    """The processes of a run: ``rank`` is the number of this one, ``size`` is how many there are.

    With ``size`` 1 nothing is sent. Otherwise all ranks must make the calls below in the same order.
    """

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank, self.size = rank, size

    @property
    def first(self) -> bool:
        """Whether this is the rank that evaluates, writes files and shows progress."""
        return self.rank == 0

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum over the ranks, bitwise the same on all of them; changes ``values`` in place."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def max(self, values: torch.Tensor) -> torch.Tensor:
        """Return the elementwise maximum over the ranks; changes ``values`` in place."""
        if self.size > 1:
            dist.all_reduce(values, op=dist.ReduceOp.MAX)
        return values

    def all(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in order; they must be JSON."""
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

    def from_first(self, value: Any) -> Any:
        """Return the value of the first rank."""
        return self.all(value if self.first else None)[0]

    def tensors(self, tensors: Tensors | None) -> Tensors:
        """Return the tensors of the first rank, by name."""
        if self.size == 1:
            return tensors or {}
        out: Tensors = empty(self.from_first(form_of(tensors or {})))
        for name, value in out.items():
            if self.first and tensors:
                value.copy_(tensors[name])
            dist.broadcast(value, 0)
        return out

    def stream(self, pieces: Iterable[Tensors]) -> Iterator[Tensors]:
        """Yield the pieces of the first rank on every rank."""
        if self.size == 1:
            yield from pieces
            return
        source = iter(pieces)
        while True:
            piece = next(source, None) if self.first else None
            if not self.from_first(piece is not None):
                return
            yield self.tensors(piece)

    def collected(self, pieces: Iterable[Tensors]) -> Iterator[Tensors]:
        """Yield the pieces of all ranks on the first rank, and nothing on the others.

        All ranks must iterate to the end.
        """
        if self.size == 1:
            yield from pieces
            return
        source = iter(pieces)
        while True:
            piece = next(source, None)
            forms = self.all(None if piece is None else form_of(piece))
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
                    received: Tensors = empty(form)
                    for value in received.values():
                        dist.recv(value, rank)
                    yield received


def form_of(tree: Any) -> Any:
    """Return dtypes and shapes as JSON: "float32 3 4" for a tensor; likewise for dicts and nested tuples."""
    if isinstance(tree, torch.Tensor):
        return " ".join([str(tree.dtype).removeprefix("torch."), *map(str, tree.shape)])
    if isinstance(tree, dict):
        return {name: form_of(value) for name, value in tree.items()}
    return [form_of(value) for value in tree]


def empty(form: Any) -> Any:
    """Return uninitialised tensors of this form."""
    if isinstance(form, str):
        dtype, *shape = form.split()
        return torch.empty([int(size) for size in shape], dtype=getattr(torch, dtype))
    if isinstance(form, dict):
        return {name: empty(part) for name, part in form.items()}
    return tuple(empty(part) for part in form)


ALONE = Ranks()


def ranks_here() -> Ranks:
    """Return the ranks of the current process group, or a single rank without one."""
    if dist.is_available() and dist.is_initialized():
        return Ranks(dist.get_rank(), dist.get_world_size())
    return ALONE


def backend() -> str:
    """Return who carries tensors between ranks: gloo, and nccl those on GPUs; each rank then takes its own GPU."""
    if not (torch.cuda.is_available() and dist.is_nccl_available()):
        return "gloo"
    torch.cuda.set_device(local_rank() % torch.cuda.device_count())
    return "cpu:gloo,cuda:nccl"


@contextmanager
def joined() -> Iterator[Ranks]:
    """Join the ranks that ``torchrun`` started, if any, and leave them at the end."""
    if not launched() or dist.is_initialized():
        yield ranks_here()
        return
    end_with_launcher()
    store, rank, size = next(rendezvous("env://", timeout=TIMEOUT))
    # After a restart the store still has the addresses of the previous ranks, so each start uses its own prefix.
    store = PrefixStore(f"start {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    dist.init_process_group(backend(), store=store, rank=rank, world_size=size, timeout=TIMEOUT)
    try:
        yield ranks_here()
    except RuntimeError as error:
        if "gloo/transport" not in str(error):
            raise
        reason = str(error).partition("] ")[2].partition(". ")[0]
        raise FedstrataError(
            f"Another rank stopped or cannot be reached ({reason}). If it printed an error, that is the cause; if not, "
            "it was killed, for example because it ran out of memory."
        ) from error
    finally:
        dist.destroy_process_group()
