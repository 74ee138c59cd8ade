"""The settings of a run: the keywords of ``fs.train``, and the tables [train], [channel] and [faults] of a file."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, Literal, TypeVar

import torch

from fedstrata.clients.channel import PLAIN, Channel
from fedstrata.clients.cohort import Weighting, cohort_size
from fedstrata.clients.faults import Faults
from fedstrata.core.errors import InputError, invalid, unknown
from fedstrata.core.options import Options, explained, options_of, param
from fedstrata.data.sampling import SAMPLINGS
from fedstrata.problems.precision import AUTOCASTS

F = TypeVar("F", bound=Callable[..., Any])


class Settings(Options, owner="the run"):
    """The settings of training."""

    rounds: int = param(100, "rounds of training", least=1)
    batch_size: int | None = param(
        None, "samples per client and step; by default all of the client's data in every step", least=1
    )
    participation: int | float = param(1.0, "fraction or number of the clients that take part in a round")
    weighting: Weighting = param("uniform", "weights in the mean over clients: equal, or by number of samples")
    sampling: str = param(
        "uniform",
        "how batches are drawn: with replacement, in shuffled passes, in each client's class proportions, or with "
        "equally many samples of each class and weights that keep means unbiased",
        choices=SAMPLINGS,
    )
    seed: int = param(0, "random seed of the run", least=0)
    chunk: int | Literal["auto"] = param(
        "auto", "how many clients to compute together; auto chooses a number that was fast in bench/chunk.py", least=1
    )
    divide: Literal["auto", "always", "never"] = param(
        "auto",
        "whether the processes of torchrun divide the clients, or the first one computes all of them and the others "
        "wait; auto divides unless messages would take longer than the computation",
    )
    threads: int | None = param(
        None, "torch threads during the run; by default PyTorch's own setting", least=1, most=1024
    )
    device: str = param("cpu", "torch device; under torchrun, cuda is the GPU of the rank")
    autocast: str = param(
        "none",
        "run the model in bfloat16 where PyTorch allows it, for processors that are fast at it; weights and updates "
        "keep their precision",
        choices=AUTOCASTS,
    )
    compile: bool = param(
        False,
        "compile the local steps of models without convolutions to machine code: up to a fifth faster for small "
        "models, but the first run waits up to a minute per graph, and later runs a few seconds (compile_seconds in "
        "the summary, part of total_seconds); needs a C++ compiler",
    )
    eval_every: int | None = param(
        None,
        "rounds between evaluations; by default, so that there are 20; the start and the end are always evaluated",
        least=1,
    )
    checkpoint_every: int = param(1, "rounds between checkpoints", least=1)
    max_seconds: float | None = param(
        None,
        "limit of training time in seconds; like the next two limits, it stops the run before the next round if an "
        "average round would exceed it; at least one round is run",
        above=0,
    )
    max_samples: int | None = param(None, "limit of the samples drawn by all clients", least=1)
    max_bytes: int | None = param(None, "limit of the bytes sent, up and down together", least=1)
    patience: int | None = param(
        None,
        "stop after this many evaluations without improvement on validation data; the run then has the best model",
        least=1,
    )
    validation: float = param(
        0.2, "fraction of each client's training rows to keep for validation if patience is set", above=0, below=1
    )
    watch: str | None = param(
        None,
        "measure on the validation data that patience judges by; by default as in [compare]",
    )
    calibrate: Literal["auto", "none", "platt", "isotonic"] = param(
        "auto",
        "for tables with two classes: how scores become risks at the end; auto is platt for models that only rank, and "
        "none where outputs are logits",
    )
    state_memory: int = param(
        4 << 30,
        "if a variable that clients keep needs more bytes than this, it goes to a memory-mapped file; by default 4 GiB",
        least=1,
    )
    channel: Channel = param(PLAIN, "clipping, noise, compression and medians of the clients' answers", in_file=False)
    faults: Faults | None = param(
        None,
        "how to handle clients that fail, and faults to inject; by default failures are not handled",
        in_file=False,
    )

    def __post_init__(self) -> None:
        default = options_of(Settings)["validation"].default
        if self.patience is None and (self.watch is not None or self.validation != default):
            raise InputError("The options watch and validation apply only with patience, the evaluations to wait.")

    def for_pooled(self, clients: int) -> Settings:
        """Return the settings for the data of all clients in one place: a step takes as many samples as all of theirs.

        clients: how many clients the data had before.
        """
        size = self.batch_size and self.batch_size * cohort_size(self.participation, clients)
        return self.replace(batch_size=size, participation=1.0, max_bytes=None)

    def for_local(self, clients: int) -> Settings:
        """Return the settings of one client that trains alone: it has its share of the budgets, and sends nothing."""
        samples = None if self.max_samples is None else max(1, self.max_samples // clients)
        seconds = None if self.max_seconds is None else self.max_seconds / clients
        return self.replace(participation=1.0, max_samples=samples, max_seconds=seconds, max_bytes=None)


def takes_settings(function: F) -> F:
    """Let a function with a keyword ``settings`` also take the fields of :class:`Settings` as keywords."""
    own = inspect.signature(function)
    fields = list(inspect.signature(Settings).parameters.values())
    names = [*own.parameters, *options_of(Settings)]

    @functools.wraps(function)
    def call(*args: Any, **keywords: Any) -> Any:
        for name in keywords:
            if name not in names:
                raise unknown(f"argument of {function.__name__}", name, names)
        chosen = {name: keywords.pop(name) for name in options_of(Settings) if name in keywords}
        if isinstance(chosen.get("device"), torch.device):
            chosen["device"] = str(chosen["device"])
        settings = keywords.pop("settings", None)
        if chosen and settings is not None:
            raise InputError(f"Pass either settings or {', '.join(chosen)}, not both.")
        if settings is not None and not isinstance(settings, Settings):
            raise invalid("settings", type(settings).__name__, "a Settings of fedstrata.training.settings, or left out")
        return function(*args, settings=Settings(**chosen) if settings is None else settings, **keywords)

    parameters = [p.replace(default=None) if p.name == "settings" else p for p in own.parameters.values()]
    parameters += [field.replace(kind=inspect.Parameter.KEYWORD_ONLY) for field in fields]
    call.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
    call.__doc__ = explained(function.__doc__, Settings)
    return call  # type: ignore[return-value]
