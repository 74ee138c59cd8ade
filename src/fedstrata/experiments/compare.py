"""Compare methods over several seeds, and judge their differences."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from fedstrata.clients.ranks import ranks_here
from fedstrata.core.errors import InputError, invalid, is_number, listed, unknown
from fedstrata.core.files import folder_at, read_toml, refuse_blocked, refuse_used
from fedstrata.core.schedules import Schedule
from fedstrata.experiments import tables
from fedstrata.experiments.comparison import Comparison, files_of
from fedstrata.experiments.methods import Method, Outcome, Trial, check_methods, default_measure, in_all
from fedstrata.experiments.overlay import slug
from fedstrata.experiments.pool import Say, check_jobs, run_all
from fedstrata.experiments.schema import MOST
from fedstrata.training.callbacks import Callback, Titled
from fedstrata.training.metrics.catalogue import RANKING, sign_of
from fedstrata.training.stopping import BUDGETS


def compare_methods(
    kind: str,
    methods: Mapping[str, Method],
    seeds: Sequence[int],
    *,
    baseline: str | None = None,
    measure: str | None = None,
    shown: Sequence[str] = (),
    warnings: Sequence[str] = (),
    out: Path | None = None,
    form: str = "png",
    jobs: int = 1,
    callbacks: Sequence[Callback] = (),
    say: Say = lambda line: None,
) -> Comparison:
    """Run each method with each seed, at most ``jobs`` runs at a time.

    A run that is already in ``out`` is resumed, or skipped if it is finished. One that diverges does not stop the rest.

    shown:    measures that tables and plots will show.
    warnings: what a reader must know of the search that came before.
    form:     of the pictures that will be written to ``out``.
    """
    check_jobs(jobs)
    chosen, judged_by = check_comparison(kind, methods, seeds, baseline, measure, shown)
    if out is not None:
        refuse_blocked(out, *files_of(form))
        check_budgets(methods, seeds, out)
    if jobs > 1:
        methods = {label: method.with_threads(1) for label, method in methods.items()}
    plan = [(label, seed) for label in methods for seed in seeds]
    outcomes: dict[tuple[str, int], Outcome] = {}

    def task(number: int, label: str, seed: int) -> Outcome:
        folder = None if out is None else folder_of_run(out, label, seed)
        title = f"run {number} of {len(plan)}, {label} seed {seed}"
        listeners = [Titled(callback, title) for callback in callbacks if jobs == 1]
        outcome = methods[label].run(seed, None, folder, listeners)
        return outcome if jobs == 1 else outcome.without_run()

    def done(number: int, outcome: Outcome) -> None:
        outcomes[outcome.label, outcome.seed] = outcome
        if outcome.error is not None:
            say(f"{outcome.label}, seed {outcome.seed}: {outcome.error}")
        elif jobs > 1:
            result = tables.in_short(outcome.final)
            say(f"{len(outcomes)} of {len(plan)}: {outcome.label}, seed {outcome.seed}: {result}")

    tasks = [partial(task, number, label, seed) for number, (label, seed) in enumerate(plan, 1)]
    run_all(tasks, jobs, done)
    groups = {label: [outcomes[label, seed] for seed in seeds] for label in methods}
    if measure is None:
        judged_by = _shared_measure(groups, judged_by)
    return Comparison(kind, groups, chosen, judged_by, tuple(warnings))


def check_comparison(
    kind: str,
    methods: Mapping[str, Method],
    seeds: Sequence[int],
    baseline: str | None,
    measure: str | None,
    shown: Sequence[str] = (),
) -> tuple[str, str]:
    """Return the baseline, and the measure to judge by.

    Raise if a run of any seed cannot work, if no method has the measure or one to be shown, or if methods cannot be
    judged by it.
    """
    if not methods:
        raise InputError("There is nothing to compare.")
    chosen = next(iter(methods)) if baseline is None else baseline
    if not isinstance(chosen, str) or chosen not in methods:
        raise unknown(kind, chosen, methods, "baseline")
    check_methods(methods, seeds)
    measured = [method.measures(seeds[0], Trial()) for method in methods.values()]
    names = {name for each in measured for name in each}
    for name in [*([] if measure is None else [measure]), *shown]:
        if not isinstance(name, str) or name not in names:
            raise unknown("measure", name, names, "" if name == measure else "plot.measures")
    judged_by = default_measure(measured) if measure is None else measure
    sign_of(judged_by)
    return chosen, judged_by


def _shared_measure(groups: Mapping[str, Sequence[Outcome]], expected: str) -> str:
    """Return the first measure of ``RANKING`` that all finished runs have; ``expected`` if there is none."""
    shared = in_all([o.final for group in groups.values() for o in group if o.final is not None])
    return next((name for name in RANKING if name in shared), expected)


def folder_of_run(out: Path, label: str, seed: int) -> Path:
    """Return the directory of a run of a comparison."""
    return out / f"{slug(label)}-seed{seed}"


def check_budgets(methods: Mapping[str, Method], seeds: Sequence[int], out: Path) -> None:
    """Raise if a run in ``out`` was begun under other conditions than the others would be now.

    With a larger budget, it may have used more than the others may. With another length, schedules in fractions of
    training gave its first rounds other rates.
    """
    for label, method in methods.items():
        sends = method.where == "federated"
        limits = {name: getattr(method.settings, name) for name in BUDGETS if sends or name != "max_bytes"}
        for seed in seeds:
            file = folder_of_run(out, label, seed) / "config.toml"
            if not file.exists():
                continue
            tables = read_toml(file)
            before = tables.get("train", {})
            before = before if isinstance(before, Mapping) else {}
            refused = f"The run in {file.parent} cannot be part of this comparison: its"
            for name, limit in limits.items():
                old = before.get(name)
                if limit is not None and (not is_number(old) or old > limit):
                    raise InputError(
                        f"{refused} {name} was {old}, and is {limit} now, so it may have used more than the others. "
                        "Choose another directory."
                    )
            rounds, stretched = method.settings.rounds, _stretched(tables, ("algorithm", "problem"))
            if before.get("rounds") != rounds and stretched:
                raise InputError(
                    f"{refused} rounds were {before.get('rounds')}, and are {rounds} now, and {listed(stretched)} "
                    "follows a schedule in fractions of training, so its first rounds had other rates than those of "
                    "the others. Choose another directory."
                )


def _stretched(tables: Mapping[str, Any], keys: Iterable[str]) -> list[str]:
    """Return the rates in these tables of a run that depend on its length."""
    rates = []
    for key in keys:
        table = tables.get(key)
        if isinstance(table, Mapping) and "schedule" in table:
            rates += [key] if Schedule.from_table(table).stretches else []
        elif isinstance(table, Mapping):
            rates += [f"{key}.{rate}" for rate in _stretched(table, table)]
    return rates


def seeds_of(seeds: int | Sequence[int], first: int) -> Sequence[int]:
    """Return seeds: so many, counted from ``first``, or those that are given."""
    if isinstance(seeds, int) and not isinstance(seeds, bool) and 1 <= seeds <= MOST:
        return range(first, first + seeds)
    if isinstance(seeds, Sequence) and 1 <= len(seeds) <= MOST:
        whole = all(isinstance(s, int) and not isinstance(s, bool) and 0 <= s < 1 << 62 for s in seeds)
        if whole and len(set(seeds)) == len(seeds):
            return seeds
    raise invalid("seeds", seeds, f"a whole number from 1 to {MOST:,}, or as many different whole numbers")


def compare_in(
    kind: str,
    methods: Mapping[str, Method],
    seeds: Sequence[int],
    out: str | Path | None,
    resume: bool,
    **options: Any,
) -> Comparison:
    """Compare methods from Python: as :func:`compare_methods`, with the results written to ``out``."""
    folder = folder_of(out, resume)
    comparison = compare_methods(kind, methods, seeds, out=folder, **options)
    if folder is not None:
        comparison.write(folder, None)
    return comparison


def folder_of(out: str | Path | None, resume: bool) -> Path | None:
    """Return the directory to write, which must be new unless something is resumed in it; None for none."""
    if ranks_here().size > 1:
        raise InputError("Methods are compared and tuned in one process or with jobs: run without torchrun.")
    if resume and out is None:
        raise InputError("resume=True needs out: the directory to resume.")
    if out is None:
        return None
    folder = folder_at(out)
    if not (resume and folder.is_dir()):
        refuse_used(folder, "Choose another, or pass resume=True.")
    return folder
