"""Train what a configuration describes, alone or as one of several algorithms or variants."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from fedstrata.core.errors import InputError, within
from fedstrata.core.registry import IMPORTED
from fedstrata.experiments.build import Experiment
from fedstrata.experiments.config import OF_SEVERAL_RUNS, Config
from fedstrata.experiments.pretrain import Pretraining, pretrain
from fedstrata.training.callbacks import Callback
from fedstrata.training.diagnostics import Diagnostics
from fedstrata.training.local import LocalRun, train_local
from fedstrata.training.run import Run
from fedstrata.training.train import train


def run_config(
    config: Config,
    out: Path | None,
    resume: bool,
    callbacks: Sequence[Callback],
    experiment: Experiment | None = None,
    *,
    compared: bool = False,
) -> Run | LocalRun:
    """Train a configuration; config.toml in ``out`` records every setting that the run depends on.

    In a comparison (``compared``) diagnostics skip what an algorithm does not report, and a run is not resumed if a
    file that the user has imported was changed: the others would have been trained with other code.
    """
    with labelled(config):
        built = Experiment(config) if experiment is None else experiment
        tables = config.to_toml(*OF_SEVERAL_RUNS, "pretrain")
        tables |= {"algorithm": built.algorithm.to_table()}
        if compared and IMPORTED:
            tables |= {"digest": {"imported": ", ".join(f"{name} {digest}" for name, digest in IMPORTED.items())}}
        pretraining = Pretraining.of(built)
        if pretraining is not None:
            tables |= {"pretrain": pretraining.table}
        if pretraining is not None and built.pretrained is None:
            pretrain(built, pretraining, tables, out, resume, callbacks)
            resume = resume or out is not None
        how: dict[str, Any] = {"settings": built.settings, "evaluate": built.evaluation, "config": tables}
        how |= {"out": out, "resume": resume, "callbacks": callbacks}
        if config.data.sites == "local":
            return train_local(built.problem_on, built.data, built.algorithm, **how)
        if out is not None and config.diagnostics:
            diagnostics = Diagnostics(**config.diagnostics, strict=not compared, folder=out)
            how["callbacks"] = [*callbacks, diagnostics]
        return train(built.problem, built.data, built.algorithm, **how, pretrain=built.pretrained)


def candidates(config: Config, names: Sequence[str] | None) -> tuple[str, dict[str, Config]]:
    """Return what to compare or tune: ``"algorithm"`` or ``"variant"``, and a configuration for each label.

    These are the algorithms in ``names``, or every variant of the experiment if it is None.
    """
    if names is None:
        return "variant", _variants(config)
    unlabelled = config.replace(label=None)
    return "algorithm", {name: unlabelled.with_algorithm(name) for name in names}


def _variants(config: Config) -> dict[str, Config]:
    """Return the variants by label; raise if two of them are the same, for example because of ``--set``."""
    variants = {label: config.variant(label) for label in config.variants}
    seen: list[tuple[str, Config, object]] = []
    for label, variant in variants.items():
        plain, search = variant.replace(label=None), config.tune.search.get(label)
        same = next((other for other, *rest in seen if rest == [plain, search]), None)
        if same is not None:
            raise InputError(
                f"The variants {same!r} and {label!r} are the same experiment. Change one of them, or leave out the "
                "--set that makes them equal."
            )
        seen.append((label, plain, search))
    return variants


def labelled(config: Config) -> AbstractContextManager[None]:
    """Add the label of the variant to errors in the block; errors about an algorithm already name it."""
    return nullcontext() if config.label is None else within(f"variant {config.label!r}")
