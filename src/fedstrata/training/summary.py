"""The summary of a finished run: its last row, and what a reader needs to understand it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedstrata.core.files import Row
from fedstrata.training.metrics.catalogue import TIMES
from fedstrata.training.metrics.evaluation import Evaluator
from fedstrata.training.stopping import best_row

if TYPE_CHECKING:
    from fedstrata.training.loop import Loop


def summary_of(loop: Loop, reason: str | None) -> Row:
    """Return the summary of a run that has ended; ``reason`` says why it ended early."""
    data, settings = loop.data, loop.settings
    summary: Row = {"status": "finished", "algorithm": loop.algorithm.name, "problem": loop.problem.name}
    summary |= {"data": data.name, "clients": data.clients, "seed": settings.seed}
    summary |= {"chunk": min(loop.clients.engine.chunk, loop.clients.sampled), **_final(loop)}
    if reason is not None and loop.done < settings.rounds:
        summary["stopped_by"] = reason
    compiler = loop.clients.engine.side.oracles.compiler
    if compiler is not None:
        summary["compile_seconds"] = compiler.seconds
    if loop.pretrain is not None:
        last = dict(loop.pretrain.history[-1])
        summary["pretrain"] = {"algorithm": loop.pretrain.summary["algorithm"], "rounds": last.pop("round"), **last}
    if data.client_names:
        summary["client_names"] = list(data.client_names)
    if settings.channel.noise:
        summary["delta"] = settings.channel.delta
    if settings.faults is not None:
        summary["left_out"] = {data.name_of(k): n for k, n in sorted(loop.journal.left_out.items())}
    if loop.risks is not None:
        calibration = loop.risks.calibration
        summary["scores_are"] = "risks" if calibration is not None else "no probabilities"
        summary["calibration"] = "none" if calibration is None else calibration.method
        summary["score_bytes"] = loop.risks.nbytes
        summary |= {"note": loop.risks.why} if loop.risks.why else {}
    if isinstance(loop.evaluation, Evaluator):
        about = loop.evaluation.about(loop.problem, data, *loop.chosen()) if loop.ranks.first else {}
        summary |= loop.ranks.from_first(about)
    return summary


def _final(loop: Loop) -> Row:
    """Return the last row; with early stopping its measures are those of the best solution."""
    history = loop.journal.history
    if loop.validation is None:
        return history[-1]
    best, costs = history[best_row(history)], rounded(loop.used())
    return {**best, **costs, "round": history[-1]["round"], "best_round": best["round"]}


def rounded(used: Row) -> Row:
    """Return what was used, with times in milliseconds."""
    return used | {name: round(used[name], 3) for name in TIMES}
