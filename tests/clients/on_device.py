"""A guard that raises an error where a local step would make an accelerator wait, or move data to it or from it.

There is no accelerator here, so the guard tells host memory from device memory itself. Memory is the host's if it was
made from NumPy arrays or numbers; what ``.to(device)`` returns is a copy that counts as the device's. In a step, these
are errors:

- operations that read values: ``item``, ``nonzero``, a mask as an index, a comparison of whole tensors, ... (seen below
  autograd, vmap and traced graphs, where operations reach PyTorch's kernels);
- methods that read values without an operation: ``numpy``, ``tolist``, ``cpu``, ``float(x)``, ...;
- making a tensor from numbers or a NumPy array, and ``zeros``, ``arange``, ... without a device;
- ``.to`` of host memory, or ``.to("cpu")``; and any operation on host memory, which would be a pageable copy or fail.
  Kernels take single numbers of the host, so only copies of those are errors;
- what clients keep in the memory of the host.

It does not watch what is meant to happen once for many steps: drawing the batches of a loop (again only after clients
have left it), and tracing a graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cached_property
from typing import Any

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import fedstrata as fs
from fedstrata.clients.batches import Batches, Draws, Now
from fedstrata.clients.client import Client
from fedstrata.clients.state import ClientState
from fedstrata.clients.variables import Variables
from fedstrata.core.stopwatch import Stopwatch
from fedstrata.data.batch import Batch

aten = torch.ops.aten
T = torch.Tensor

READING = {
    *(aten._local_scalar_dense, aten.item, aten.is_nonzero, aten.equal, aten.nonzero, aten.nonzero_static),
    *(aten.masked_select, aten.unique_dim, aten.unique_consecutive, aten._unique, aten._unique2, aten.bincount),
    *(aten.allclose, aten.is_pinned, aten._pin_memory, aten.pin_memory),
}
"""Operations that wait for values, or whose results have a shape that depends on them."""

METHODS = {
    *(T.item, T.tolist, T.numpy, T.cpu, T.cuda, T.pin_memory, T.new_tensor, T.nonzero),
    *(T.__bool__, T.__float__, T.__int__, T.__index__, T.__complex__, T.__contains__, T.__repr__, T.__format__),
    *(T.__array__, T.__array_wrap__, T.__dlpack__),
}
MAKING = {torch.tensor, torch.as_tensor, torch.asarray, torch.from_numpy, torch.scalar_tensor, torch.frombuffer}
EMPTY = {
    *(torch.zeros, torch.ones, torch.full, torch.empty, torch.eye, torch.arange, torch.linspace, torch.logspace),
    *(torch.rand, torch.randn, torch.randint, torch.randperm),
}
INDEXING = {T.__getitem__, T.__setitem__}


class Guard:
    """What is watched: ``watching`` while a local step runs.

    steps: how many steps were watched.
    host:  where host memory begins; the tensors are kept, so that no other memory is there later.
    """

    def __init__(self) -> None:
        self.watching = self.drawing = False
        self.steps = 0
        self.host: dict[int, torch.Tensor] = {}
        self.drawn: set[tuple[int, ...]] = set()
        self.alive: list[object] = []

    def check(self, wrong: object, what: str) -> None:
        """Raise if this is wrong in a step."""
        if self.watching and wrong:
            raise AssertionError(f"{what} in a local step")

    def on_host(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is in host memory."""
        if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            return False
        return bool(tensor.numel()) and tensor.untyped_storage().data_ptr() in self.host

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Count a tensor's memory as the host's."""
        if tensor.numel():
            self.host[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    @contextmanager
    def drawing_batches(self) -> Iterator[None]:
        """Do not watch the block. What it makes counts as the device's, which computes it by itself."""
        before, self.drawing = self.drawing, True
        try:
            with self.paused():
                yield
        finally:
            self.drawing = before

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not watch the block."""
        before, self.watching = self.watching, False
        try:
            yield
        finally:
            self.watching = before

    def once(self, owner: object, *numbers: int) -> None:
        """Raise if something happens again in the same loop."""
        names = (id(owner), *numbers)
        self.check(names in self.drawn, f"drawing again ({type(owner).__name__})")
        self.drawn.add(names)
        self.alive.append(owner)  # so that no other object has its id


class Functions(TorchFunctionMode):
    """Watches the functions that Python calls."""

    def __init__(self, guard: Guard) -> None:
        super().__init__()
        self.guard = guard

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        guard, kwargs = self.guard, kwargs or {}
        name = getattr(func, "__name__", str(func))
        guard.check(func in METHODS | MAKING, name)
        guard.check(func in EMPTY and kwargs.get("device") is None, f"{name} without a device")
        if func in INDEXING:
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            guard.check(any(isinstance(i, np.ndarray | list) for i in index), "an index from the host")
        if func is T.to:
            return self._moved(args, kwargs)
        out = func(*args, **kwargs)
        made = func in MAKING and kwargs.get("device") is None and not guard.drawing
        return guard.to_host(out) if made else out

    def _moved(self, args: Any, kwargs: Any) -> torch.Tensor:
        """Let ``.to`` return a copy on the device, if it is told one."""
        guard, (tensor, *rest) = self.guard, args
        wants = [*rest, *kwargs.values()]
        guard.check(any(isinstance(want, str) for want in wants), "to(...) of a fixed device")
        elsewhere = any(isinstance(want, torch.device | torch.Tensor | str) for want in wants)
        guard.check(elsewhere and guard.on_host(tensor), "to(...) of host memory")
        out: torch.Tensor = tensor.to(*rest, **kwargs)
        if elsewhere and guard.on_host(out):
            out = out.clone()
        elif guard.on_host(tensor):
            guard.to_host(out)
        return out


class Operations(TorchDispatchMode):
    """Watches the operations that reach PyTorch's kernels."""

    def __init__(self, guard: Guard) -> None:
        super().__init__()
        self.guard = guard

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        guard, kwargs = self.guard, kwargs or {}
        if guard.watching:
            packet = func.overloadpacket
            name = packet._qualified_op_name.removeprefix("aten::")
            tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
            masks = [t for t in tree_leaves(args[1:2]) if isinstance(t, torch.Tensor) and t.dtype == torch.bool]
            indexes = packet in (aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_)
            guard.check(packet in READING or (packet is aten.repeat_interleave and len(tensors)), name)
            guard.check(indexes and masks, f"{name} by a mask")
            copies = packet in (aten.copy_, aten._to_copy)
            host = [t for t in tensors if guard.on_host(t) and (copies or t.dim())]  # kernels take numbers
            guard.check(host, f"{name} on host memory")
        return func(*args, **kwargs)


@contextmanager
def guarded(monkeypatch: pytest.MonkeyPatch) -> Iterator[Guard]:
    """Watch every local step from the second round on."""
    guard = Guard()

    def loop(self: Client, steps: fs.Epochs | int, k: Variables) -> Iterator[int]:
        guard.drawn.clear()
        for step in own_loop(self, steps, k):
            guard.watching = self.clock.round > 0
            guard.steps += guard.watching
            yield step
            guard.watching = False

    def from_numpy(array: np.ndarray) -> torch.Tensor:  # not seen by a mode, since it takes no tensor
        guard.check(True, "from_numpy")
        tensor = own_from_numpy(array)
        return tensor if guard.drawing else guard.to_host(tensor)

    def new_draws(self: Batches, *names: int) -> Draws:
        with guard.drawing_batches():
            return own_new_draws(self, *names)

    def drawn(self: Draws, now: Now) -> Any:
        with guard.drawing_batches():
            before, rows = self._rows, own_drawn(self, now)
        if self._rows is not before:
            guard.once(self, now.active)
        return rows

    def words(self: Batches, level: int, stream: int, now: Now) -> torch.Tensor:
        with guard.drawing_batches():
            before, rows = self._layers.get((level, stream)), own_words(self, level, stream, now)
        if self._layers[level, stream] is not before:
            guard.once(self, level, stream)
        return rows

    def all_data(self: Batches, level: int, ids: np.ndarray) -> tuple[Batch, int]:
        with guard.drawing_batches():
            before, found = self._everything.get(level), own_all_data(self, level, ids)
        if self._everything[level] is not before:
            guard.once(self, level, len(ids))
        return found

    def numbers(self: Batches) -> torch.Tensor:
        with guard.drawing_batches():
            return torch.from_numpy(self._ids).to(self._device)

    def running(self: Stopwatch) -> AbstractContextManager[None]:
        stack = ExitStack()
        stack.enter_context(own_running(self))
        stack.enter_context(guard.paused())
        return stack

    def state(own: Callable[..., Any]) -> Callable[..., Any]:
        def used(self: ClientState, *rest: Any) -> Any:
            guard.check(True, f"ClientState.{own.__name__}")
            return own(self, *rest)

        return used

    own_loop, own_from_numpy, own_running = Client.loop, torch.from_numpy, Stopwatch.running
    own_new_draws, own_drawn, own_words, own_all_data = (
        *(Batches._new_draws, Draws._drawn, Batches._words, Batches._all_data),
    )
    own_numbers = cached_property(numbers)
    own_numbers.__set_name__(Batches, "_numbers")
    monkeypatch.setattr(Client, "loop", loop)
    monkeypatch.setattr(torch, "from_numpy", from_numpy)
    monkeypatch.setattr(Stopwatch, "running", running)
    monkeypatch.setattr(Draws, "_drawn", drawn)
    for name, method in {"_new_draws": new_draws, "_words": words, "_all_data": all_data}.items():
        monkeypatch.setattr(Batches, name, method)
    monkeypatch.setattr(Batches, "_numbers", own_numbers)
    for name in ("recall", "keep"):
        monkeypatch.setattr(ClientState, name, state(getattr(ClientState, name)))
    with Functions(guard), Operations(guard):
        yield guard
