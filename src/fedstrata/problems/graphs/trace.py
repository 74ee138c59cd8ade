"""Trace a function into a flat graph of tensor operations, without the dispatch cost of vmap, grad and modules.

The function runs once, and every operation that reaches PyTorch's kernels is recorded. ``make_fx`` of PyTorch does the
same on tensors without values, but imports the compiler for it, which takes over a second.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from types import NoneType
from typing import Any

import torch
from torch import fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakTensorKeyDictionary

from fedstrata.problems.graphs.compiler import Compiler
from fedstrata.problems.graphs.direct import call_directly
from fedstrata.problems.graphs.nodes import Layout
from fedstrata.problems.graphs.pooling import pool_by_maxima
from fedstrata.problems.graphs.reuse import reuse_memory
from fedstrata.problems.graphs.simplify import simplify
from fedstrata.problems.graphs.writes import write_gradients_in_place

_UNTRACEABLE = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.nondeterministic_seeded}
_READS_VALUES = {
    torch.Tensor.tolist,
    torch.Tensor.numpy,
    torch.Tensor.__array__,
    torch.Tensor.__dlpack__,
    torch.Tensor.data_ptr,
    torch.Tensor.untyped_storage,
    torch.Tensor.__reversed__,
    torch.Tensor.__repr__,
    torch.Tensor.__format__,
}
"""Methods that read values without an operation that could be recorded."""


_ATEN = torch.ops.aten
_AS_VIEWS = {
    _ATEN.squeeze_.default: _ATEN.squeeze.default,
    _ATEN.squeeze_.dim: _ATEN.squeeze.dim,
    _ATEN.squeeze_.dims: _ATEN.squeeze.dims,
    _ATEN.unsqueeze_.default: _ATEN.unsqueeze.default,
    _ATEN.transpose_.default: _ATEN.transpose.int,
    _ATEN.t_.default: _ATEN.t.default,
}
"""Operations that change the shape of a tensor in place but not its numbers, and the views they make."""

_OF_SHAPES = {_ATEN.is_same_size.default, _ATEN._has_same_storage_numel.default}
"""Operations of forward mode that return no tensor but a bool, which depends on shapes only."""

_NUMBERS = (str, int, float, bool, complex, NoneType)
_ARGUMENTS = (torch.Tensor, torch.dtype, torch.device, torch.memory_format, torch.layout, *_NUMBERS)
"""What the operations of a graph may take."""


REFUSALS = (RuntimeError, NotImplementedError, TypeError, ValueError, LookupError, ArithmeticError)
"""Errors of tracing a function that cannot be traced, or of checking it on numbers that it does not take."""


class _Untraceable(RuntimeError):
    """The function reads values, or draws random numbers."""


def trace(
    function: Callable[..., Any], *tensors: torch.Tensor, compiler: Compiler | None = None, rough: bool = False
) -> Callable[..., Any] | None:
    """Return the function as a graph for tensors of these shapes, or None if it cannot be traced.

    A function cannot be traced if it branches on values, creates tensors whose shape depends on values, or draws random
    numbers. With a ``compiler``, the graph is compiled. A graph is used only if it gives what the function gives on
    other numbers: a value may have ended up in it in a way that recording does not notice.

    rough: whether the function computes in lower precision than its arguments have.
    """
    try:
        graph = record(function, *tensors)
        simplify(graph)
        run = runnable(graph, tensors, compiler)
        return run if _agree(run, function, tensors, rough) else None
    except REFUSALS:
        return None


def runnable(graph: fx.GraphModule, tensors: tuple[torch.Tensor, ...], compiler: Compiler | None) -> Callable[..., Any]:
    """Return a graph in its fastest form: compiled, if there is a compiler and it pays."""
    if compiler is not None and compiler.wants(graph):
        return compiler(graph, tensors)
    write_gradients_in_place(graph)
    reuse_memory(graph)
    pool_by_maxima(graph)
    call_directly(graph, tensors)
    run: Callable[..., Any] = graph.forward
    return run


def _agree(
    run: Callable[..., Any], function: Callable[..., Any], tensors: tuple[torch.Tensor, ...], rough: bool
) -> bool:
    """Whether a graph gives what the function gives on other numbers, also when it runs again."""
    others = [changed(t) for t in tensors]
    run(*(t.clone() for t in tensors))
    ours, theirs = (f(*(t.clone() for t in others)) for f in (run, function))
    return all(close(a, b, rough) for a, b in zip(tree_leaves(ours), tree_leaves(theirs), strict=True))


def close(ours: torch.Tensor, theirs: torch.Tensor, rough: bool = False, rounding: float = 0.0) -> bool:
    """Whether two tensors agree up to rounding, as vectors; infinity and NaN agree with themselves.

    rough:    whether they were computed in lower precision than they have.
    rounding: an error that is allowed whatever the size of the numbers.
    """
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return False
    finite = torch.isfinite(theirs)
    if not torch.equal(finite, torch.isfinite(ours)):
        return False
    if not torch.equal(ours[~finite].nan_to_num(), theirs[~finite].nan_to_num()):
        return False
    tolerance = 0.3 if rough else 1e-3 if theirs.dtype == torch.float32 else 1e-8
    ours, theirs = (t[finite].double() for t in (ours, theirs))
    return bool((ours - theirs).norm() <= tolerance * theirs.norm() + rounding + torch.finfo(torch.float32).tiny)


def record(function: Callable[..., Any], *tensors: torch.Tensor) -> fx.GraphModule:
    """Return every operation of the function on these tensors; each node's ``meta["layout"]`` is that of its result.

    Raises an error if the function reads values or draws random numbers.
    """
    graph = _recorded(function, tensors)
    constants = list(graph.buffers())
    if constants:
        # A tensor that no operation made is a constant: it must not depend on the arguments.
        others = list(_recorded(function, tuple(map(changed, tensors))).buffers())
        if len(others) != len(constants) or not all(map(torch.equal, constants, others)):
            raise _Untraceable("a tensor depends on the arguments without an operation that could be recorded")
    return graph


def _recorded(function: Callable[..., Any], tensors: tuple[torch.Tensor, ...]) -> fx.GraphModule:
    recorder, no_values = _Recorder(), _NoValues()
    own = [recorder.argument(t.clone()) for t in tensors]  # the function may change its arguments
    with no_values, recorder:
        out = function(*own)
    if recorder.refused or no_values.refused:
        raise _Untraceable("the function has caught the error of a refusal")
    recorder.graph.output(tree_map(recorder.node_of, out))
    return fx.GraphModule(recorder.root, recorder.graph)


def changed(tensor: torch.Tensor) -> torch.Tensor:
    """Return other numbers of the same kind: floats are shifted too, whole numbers stay in their columns."""
    rolled = tensor.roll(1, 0) if tensor.dim() else tensor
    return 1.5 * rolled + 0.1 if tensor.is_floating_point() else rolled


class _NoValues(TorchFunctionMode):
    """Refuses methods that read values."""

    refused = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _READS_VALUES:
            self.refused = True
            raise _Untraceable(f"{func.__name__} reads values")
        return func(*args, **(kwargs or {}))


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the operations that reach the kernels, below vmap and grad."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.root, self.graph = torch.nn.Module(), fx.Graph()
        self._nodes = WeakTensorKeyDictionary()
        self.refused = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # otherwise PyTorch imports its compiler

    def argument(self, tensor: torch.Tensor) -> torch.Tensor:
        """Record a tensor as the next argument of the graph."""
        number = sum(node.op == "placeholder" for node in self.graph.nodes)
        self._remember(tensor, self.graph.placeholder(f"argument_{number}"))
        return tensor

    def node_of(self, value: Any) -> Any:
        """Return the node of a tensor, a new constant if it has none; any other value as it is."""
        if not isinstance(value, torch.Tensor):
            return value
        if value not in self._nodes:
            name = f"_captured_{len(list(self.root.buffers()))}"
            self.root.register_buffer(name, value, persistent=False)
            self._remember(value, self.graph.get_attr(name))
        return self._nodes[value]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _OF_SHAPES:
            return func(*args, **kwargs)
        leaves = tree_leaves((args, kwargs))
        if _UNTRACEABLE & set(func.tags) or not all(isinstance(leaf, _ARGUMENTS) for leaf in leaves):
            self.refused = True
            raise _Untraceable(f"{func} depends on values, or takes what a graph cannot hold, such as a storage")
        view = _AS_VIEWS.get(func)
        fresh = None if view else self._out_of_place(func, args, kwargs)
        recorded = view or fresh or func
        node = self.graph.call_function(recorded, tree_map(self.node_of, args), tree_map(self.node_of, kwargs))
        out = func(*args, **kwargs)
        node.meta["views"] = fresh is None and _share_memory(tree_leaves(out), leaves)
        if isinstance(out, torch.Tensor):
            self._remember(out, node)
        elif isinstance(out, tuple | list):
            for i, part in enumerate(out):
                if isinstance(part, torch.Tensor):
                    self._remember(part, self.graph.call_function(operator.getitem, (node, i)))
        elif tree_leaves(out):
            raise _Untraceable(f"{func} returns no tensor")
        return out

    def _out_of_place(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the form of an operation that makes a new tensor, if it changes one that nothing else can see.

        Later operations on the changed tensor then use the new one; so the passes over graphs need not consider it.
        """
        name, _, overload = func._schema.name.removeprefix("aten::").rpartition("_")
        packet = getattr(_ATEN, name, None) if func._schema.is_mutable and not overload and args else None
        form = getattr(packet, func._overloadname, None)
        changed = args[0] if args else None
        if form is None or not isinstance(changed, torch.Tensor) or changed not in self._nodes:
            return None
        if self._nodes[changed].op != "call_function" or self._is_shared(changed):
            return None
        out = form(*args, **kwargs)
        return form if isinstance(out, torch.Tensor) and Layout.of(out) == Layout.of(changed) else None

    def _is_shared(self, tensor: torch.Tensor) -> bool:
        """Whether another tensor that the function still holds may share memory with this one."""
        return any(other is not tensor and _share_memory([other], [tensor]) for other in self._nodes)

    def _remember(self, tensor: torch.Tensor, node: fx.Node) -> None:
        node.meta["layout"] = Layout.of(tensor)
        self._nodes[tensor] = node


def _share_memory(results: list[Any], arguments: list[Any]) -> bool:
    """Whether a result of an operation is a view of one of its arguments; not every operation declares it."""
    with torch._C.DisableTorchFunction():  # the function that is recorded must not do this, but the recorder may
        owners = {a.untyped_storage()._cdata for a in arguments if isinstance(a, torch.Tensor)}
        return any(r.untyped_storage()._cdata in owners for r in results if isinstance(r, torch.Tensor))
