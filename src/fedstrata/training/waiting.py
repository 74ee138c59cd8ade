"""Runs that ranks do not divide: the first rank trains, and the others wait for its result."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fedstrata.algorithms.algorithm import Algorithm
from fedstrata.clients.chunk import too_small_to_divide
from fedstrata.clients.cohort import cohort_size
from fedstrata.clients.engine import Learned, as_lists, from_lists
from fedstrata.clients.faults import QuorumError
from fedstrata.clients.ranks import Ranks
from fedstrata.core.errors import Diverged, FedstrataError, InputError, MissingData, Unsolvable
from fedstrata.core.files import Row
from fedstrata.core.schedules import Epochs, Interval
from fedstrata.data.federated import FederatedData
from fedstrata.data.tables.fitted import Fitted
from fedstrata.problems.problem import Problem
from fedstrata.training.callbacks import Callback
from fedstrata.training.rounds import problem_of_round
from fedstrata.training.run import Run
from fedstrata.training.settings import Settings

_TRAINING = "training"
_ERRORS: dict[str, type[FedstrataError]] = {
    kind.__name__: kind for kind in (InputError, MissingData, Unsolvable, QuorumError)
}


def divides(problem: Problem, data: FederatedData, algorithm: Algorithm, settings: Settings) -> bool:
    """Whether ranks divide the clients between them; if not, the first one computes all of them."""
    if settings.divide != "auto":
        return settings.divide == "always"
    steps = getattr(algorithm, "steps", 1)
    steps = steps if isinstance(steps, int | Epochs | Interval) else 1
    cohort = cohort_size(settings.participation, data.clients)
    return not too_small_to_divide(problem, data, cohort, steps, settings.batch_size)


class _Sign(Callback):
    """Tells the waiting ranks at every evaluation that the run goes on: they do not wait for ever."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks

    def on_evaluation(self, row: Row) -> None:
        self.ranks.from_first(_TRAINING)


def lead(ranks: Ranks, work: Callable[[Sequence[Callback]], tuple[Run, Sequence[Learned]]]) -> Run:
    """Train on the first rank, and send the other ranks the result, or the error.

    work: trains with these callbacks besides its own; returns the run, and the answers to the problem's queries.
    """
    try:
        run, learned = work([_Sign(ranks)])
    except FedstrataError as error:
        history = error.history if isinstance(error, Diverged) else []
        ranks.from_first({"error": type(error).__name__, "message": str(error), "history": history})
        raise
    ranks.from_first({"history": run.history, "summary": run.summary, "learned": as_lists(learned)})
    ranks.tensors(run.solution)
    return run


def follow(ranks: Ranks, problem: Problem, data: FederatedData, settings: Settings) -> Run:
    """Wait for the run of the first rank; return it, or raise its error."""
    while (result := ranks.from_first(None)) == _TRAINING:
        pass
    if "error" in result:
        if result["error"] == Diverged.__name__:
            raise Diverged(result["message"], result["history"])
        raise _ERRORS.get(result["error"], FedstrataError)(result["message"])
    solution = {name: tensor.to(problem.x0.device) for name, tensor in ranks.tensors(None).items()}
    learned, last = from_lists(result["learned"]), result["summary"]["round"] - 1
    fitted = None
    if data.plan is not None:
        fitted, learned = Fitted.of(data.plan, learned), learned[1:]
    problem = problem_of_round(problem, learned, last, settings.rounds)
    return Run(solution["x"], solution.get("y"), result["history"], result["summary"], problem, fitted)
