"""Convert the server's state to named tensors, for checkpoints and checks, and back."""

from __future__ import annotations

from typing import Any, get_type_hints

import torch

from fedstrata.algorithms.algorithm import Algorithm, State
from fedstrata.core.errors import FedstrataError, InputError
from fedstrata.problems.problem import Problem


def tensors_of(algorithm: Algorithm, state: Any) -> dict[str, torch.Tensor]:
    """Return the tensors of a state by name: "x", and "h.0", "h.1" for a tuple."""
    named: dict[str, torch.Tensor] = {}
    for name, value in getattr(state, "_asdict", dict)().items():
        parts = {f"{name}.{i}": part for i, part in enumerate(value)} if isinstance(value, tuple) else {name: value}
        named |= parts
    if not named or not all(isinstance(value, torch.Tensor) for value in named.values()):
        got = {name: type(value).__name__ for name, value in named.items()} or type(state).__name__
        raise FedstrataError(f"The state of {algorithm.name} must be a NamedTuple of tensors. Got {got}.")
    return named


def state_of(algorithm: Algorithm, tensors: dict[str, torch.Tensor]) -> Any:
    """Return the state with these tensors; its class is the return annotation of the algorithm's ``start``."""
    kind = _state_class(algorithm)
    if kind is None:
        raise _not_annotated(algorithm, "MyState", "no annotation")
    values: dict[str, Any] = {name: tensor for name, tensor in tensors.items() if "." not in name}
    for field in {name.partition(".")[0] for name in tensors} - set(values):
        length = sum(name.startswith(f"{field}.") for name in tensors)
        values[field] = tuple(tensors[f"{field}.{i}"] for i in range(length))
    return kind(**values)


def _state_class(algorithm: Algorithm) -> Any:
    """Return the class that ``start`` is annotated with; None if it has no annotation."""
    try:
        kind = get_type_hints(type(algorithm).start).get("return")
    except NameError as error:
        raise FedstrataError(
            f"The annotations of start of {algorithm.name} cannot be read: {error}. Define or import the name at the "
            "top of the module."
        ) from None
    return State if kind is Any else kind


def _not_annotated(algorithm: Algorithm, wants: str, got: str) -> FedstrataError:
    return FedstrataError(
        f"start of {algorithm.name} must be annotated with the class of the state that it returns, which checkpoints "
        f"are read into: def start(self, x, y, clients) -> {wants}. Got {got}."
    )


def check_same(algorithm: Algorithm, method: str, got: dict[str, torch.Tensor], wants: dict[str, torch.Tensor]) -> None:
    """Raise if tensors that a method returned differ in type from those before."""
    for name, tensor in wants.items():
        if got[name].dtype != tensor.dtype:
            hint = " The mean of whole numbers or bools is torch.float64." if got[name].dtype == torch.float64 else ""
            raise FedstrataError(
                f"{method} of {algorithm.name} must return a State whose {name} is {tensor.dtype}. Got "
                f"{got[name].dtype}.{hint}"
            )


def check_restorable(algorithm: Algorithm, state: Any) -> None:
    """Raise if a checkpoint of this state could not be read."""
    kind = _state_class(algorithm)
    if kind is not type(state):
        got = "no annotation" if kind is None else getattr(kind, "__name__", repr(kind))
        raise _not_annotated(algorithm, type(state).__name__, got)
    empty = [name for name, value in state._asdict().items() if isinstance(value, tuple) and not value]
    if empty:
        raise FedstrataError(
            f"The tuple {empty[0]} in the state of {algorithm.name} is empty, and a checkpoint could not restore it: "
            "leave out the field, or let it hold an empty tensor."
        )


def restored(algorithm: Algorithm, problem: Problem, tensors: dict[str, torch.Tensor]) -> Any:
    """Return the state of a checkpoint; raise if it is not a state of this algorithm on this problem."""
    saved = sorted({name.partition(".")[0] for name in tensors})
    fields = sorted(getattr(_state_class(algorithm), "_fields", saved))
    if saved != fields:
        raise _other_state(f"fields {', '.join(saved)}", f"the state of {algorithm.name} has {', '.join(fields)}")
    state = state_of(algorithm, tensors)
    x, y = algorithm.solution(state)
    sizes = {"x": (x, problem.x0), "y": (y, problem.x0[:0] if problem.y0 is None else problem.y0)}
    for name, (value, start) in sizes.items():
        if value is not None and value.shape != start.shape:
            what = f"a solution {name} of {value.numel()} numbers"
            raise _other_state(what, f"{name} of the problem {problem.name} has {start.numel()}")
    return state


def _other_state(has: str, wants: str) -> InputError:
    return InputError(
        f"The checkpoint has {has}, but {wants}. Resume the run with the algorithm and the problem that it was started "
        "with, or start a new run in another directory."
    )


def shapes_of(tensors: dict[str, torch.Tensor]) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor."""
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}
