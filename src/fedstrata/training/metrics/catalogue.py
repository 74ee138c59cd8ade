"""All measures, their properties, and which of them progress, tables and plots show."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fedstrata.core.errors import InputError, invalid


@dataclass(frozen=True)
class Measure:
    """A number that says how good a model is.

    label:            its name in sentences, if it is more than the heading.
    higher_is_better: whether a larger value is better; None if nobody has said so.
    tiny:             whether it may be far below 1, so that it is printed with significant digits.
    """

    name: str
    label: str = ""
    higher_is_better: bool | None = False
    tiny: bool = False

    @property
    def heading(self) -> str:
        """Its name in tables."""
        return self.name.replace("_", " ")

    @property
    def phrase(self) -> str:
        """Its name inside a sentence."""
        return self.label or " ".join("AUC" if word == "auc" else word for word in self.heading.split())

    @property
    def title(self) -> str:
        """Its name in plots."""
        return self.phrase[:1].upper() + self.phrase[1:]

    @property
    def rows(self) -> str:
        """The rows that it is measured on, as ``measured_on`` calls them: "pooled" or "clients"; empty if on neither.

        Costs, the distance to a solution, the objective of training and measures on validation rows are on neither.
        """
        if self.name.startswith(VALIDATION):
            return ""
        if self.name == WITHIN:
            return "clients"
        if self.name in POOLED or self.name.startswith("adapted_"):
            return "pooled"
        return "clients" if self.name.endswith(("_mean", "_worst", "_spread")) else ""


_ALL = (
    Measure("loss"),
    Measure("loss_mean", "loss, mean over clients"),
    Measure("loss_worst", "loss of the worst client"),
    Measure("loss_spread", "loss, spread over clients"),
    Measure("accuracy", higher_is_better=True),
    Measure("accuracy_mean", "accuracy, mean over clients", higher_is_better=True),
    Measure("accuracy_worst", "accuracy of the worst client", higher_is_better=True),
    Measure("accuracy_spread", "accuracy, spread over clients"),
    Measure("accuracy_worst_class", "accuracy of the worst class", higher_is_better=True),
    Measure("auc", higher_is_better=True),
    Measure("auc_within", "AUC within clients", higher_is_better=True),
    Measure("auc_mean", "AUC, mean over clients", higher_is_better=True),
    Measure("auc_worst", "AUC of the worst client", higher_is_better=True),
    Measure("attacked_loss", "loss under attack"),
    Measure("attacked_accuracy", "accuracy under attack", higher_is_better=True),
    Measure("attacked_auc", "AUC under attack", higher_is_better=True),
    Measure("adapted_loss"),
    Measure("adapted_accuracy", higher_is_better=True),
    Measure("adapted_auc", higher_is_better=True),
    Measure("personal_loss_mean", "personal loss, mean over clients"),
    Measure("personal_loss_worst", "personal loss of the worst client"),
    Measure("personal_loss_spread", "personal loss, spread over clients"),
    Measure("personal_accuracy_mean", "personal accuracy, mean over clients", higher_is_better=True),
    Measure("personal_accuracy_worst", "personal accuracy of the worst client", higher_is_better=True),
    Measure("personal_accuracy_spread", "personal accuracy, spread over clients"),
    Measure("distance", "distance to the solution", tiny=True),
    Measure("distance_dual", "distance of y to the solution", tiny=True),
    Measure("objective"),
    Measure("gradient_norm", tiny=True),
)

MEASURES: dict[str, Measure] = {measure.name: measure for measure in _ALL}
"""Our measures by name; which of them a run has depends on its problem, data and evaluation."""

DECLARED: dict[str, Measure] = {}
"""The measures of users' own evaluation functions, as far as they are declared."""


WITHIN = "auc_within"
"""Of all pairs of a positive and a negative of the same client, the share in the right order."""

VALIDATION = "validation_"
"""Begins the name of a measure on validation data."""

TIMES = ("seconds", "total_seconds")
"""How long a run has trained, and how long it has taken with evaluations, tracing and checkpoints."""


COSTS = ("steps", "samples", "bytes_up", "bytes_down", *TIMES)
"""What every row counts besides measures."""

MORE_COSTS = ("failed", "epsilon")
"""What a row also counts, with faults and with noise."""


def measure(name: str) -> Measure:
    """Return the properties of a measure, or of a cost."""
    plain = name.removeprefix(VALIDATION)
    unknown = Measure(plain, higher_is_better=False if plain in (*COSTS, *MORE_COSTS) else None)
    base = (MEASURES | DECLARED).get(plain, unknown)
    return base if base.name == name else replace(base, name=name, label="")


def declare_measure(name: str, *, higher_is_better: bool, label: str = "") -> None:
    """Declare a measure of your own evaluation function, so that methods and trials can be judged by it.

        fs.declare_measure("f1", higher_is_better=True)
        fs.compare(methods, data, evaluate=my_evaluation, measure="f1")

    label: its name in plots and sentences; by default the name.
    """
    if not isinstance(name, str) or not name or name in MEASURES or name.startswith(VALIDATION):
        wants = f"a name of your own that does not begin with {VALIDATION}, e.g. 'f1'"
        raise invalid("name of declare_measure", name, wants)
    if not isinstance(higher_is_better, bool):
        raise invalid("higher_is_better of declare_measure", higher_is_better, "True or False")
    DECLARED[name] = Measure(name, label, higher_is_better)


def sign_of(name: str) -> int:
    """Return 1 if a larger value of a measure is better, and -1 if a smaller one is; raise if nobody has said so."""
    better = measure(name).higher_is_better
    if better is None:
        raise InputError(
            f"It is not known whether a larger {name} is better. Declare it once, in Python or in a file for --import: "
            f"fs.declare_measure({name!r}, higher_is_better=True), or False."
        )
    return 1 if better else -1


PER_CLIENT = ("loss", "accuracy", "auc")
"""Measures of the unadapted model on each client."""

POOLED = (*PER_CLIENT, "accuracy_worst_class", "attacked_loss", "attacked_accuracy", "attacked_auc")
"""Measures of the unadapted model on one set of samples."""

RANKING = ("distance", "auc", "accuracy", "loss")
"""If no measure is named, methods and trials are judged by the first of these that all runs have.

Only problems whose solution is known have a distance; the value of a minimax problem says little about them.
"""

IN_PROGRESS = ("loss", "accuracy", "accuracy_worst", "auc", "auc_worst", "attacked_accuracy", "distance", "epsilon")
"""Measures that a line of progress shows, in order."""

IN_TABLES = (
    *("auc", "adapted_auc", "auc_within", "auc_mean", "auc_worst"),
    *("accuracy", "adapted_accuracy", "accuracy_mean", "accuracy_worst", "attacked_accuracy"),
    *("personal_accuracy_mean", "personal_accuracy_worst", "personal_loss_mean"),
    *("loss", "distance", "distance_dual", "gradient_norm"),
)
"""Measures that a table shows by default, in order."""

IN_PLOTS = (
    *("auc", "auc_worst", "personal_accuracy_mean", "accuracy", "attacked_accuracy", "accuracy_worst"),
    *("personal_loss_mean", "distance", "gradient_norm", "loss"),
)
"""Measures that a plot shows by default, in order of preference."""
