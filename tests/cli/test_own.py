"""Things of the user's own, registered by a file: the example of docs/add-your-own.md through every command."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import fedstrata as fs
from fedstrata.core.registry import Registry
from fedstrata.experiments.describe import KINDS

Command = Callable[..., tuple[int, str, str]]

WIDTH = fs.param(3, "units")

NAMES = {
    "algorithms": "fedsign",
    "problems": "focal",
    "datasets": "bars",
    "models": "bottleneck",
    "augmentations": "erase",
    "partitions": "growing",
}
KEYS = {
    "algorithms": "algorithm.name",
    "problems": "problem.name",
    "datasets": "data.name",
    "models": "model.name",
    "augmentations": "model.augment",
    "partitions": "data.partition",
}


@pytest.mark.usefixtures("no_pictures")
def test_a_run_uses_one_of_each_and_resumes_and_repeats(fedstrata: Command, own: Path) -> None:
    run = "--import", own / "mine.py", "run"
    code, printed, err = fedstrata(*run, own / "mine.toml", "--out", own / "run", "--json", "--quiet")
    assert code == 0, err
    summary = json.loads(printed)
    assert summary["algorithm"] == "fedsign" and summary["accuracy"] > 0.95
    config = tomllib.loads((own / "run" / "config.toml").read_text())
    assert config["model"]["augment"] == [{"name": "erase", "size": 3}, "flip"]
    assert (config["problem"], config["data"]["partition"]["name"]) == ({"name": "focal", "focus": 1.0}, "growing")
    short = own / "run" / "config.toml", "--out", own / "again", "--quiet"
    fedstrata(*run, *short, "--set", "train.rounds=7")
    code, _, err = fedstrata(*run, *short, "--resume")
    assert code == 0, err
    ours, theirs = (load_file(own / name / "model.safetensors") for name in ("run", "again"))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    code, _, err = fedstrata(*run, own / "mine.toml", "--out", own / "run", "--resume", "--set", "model.augment=[]")
    assert code == 2 and "model.augment was" in err


@pytest.mark.slow
@pytest.mark.usefixtures("no_pictures")
def test_comparisons_and_tuning_use_them(fedstrata: Command, own: Path) -> None:
    short = own / "mine.toml", "--algorithms", "fedsign,fedavg", "--set", "train.rounds=2", "--json", "--quiet"
    code, printed, err = fedstrata("--import", own / "mine.py", "compare", *short)
    assert code == 0 and [row["algorithm"] for row in json.loads(printed)["rows"]] == ["fedsign", "fedavg"], err
    code, printed, err = fedstrata("--import", own / "mine.py", "tune", *short, "--trials", 2, "--out", own / "tune")
    assert code == 0 and "fedsign" in printed, err


@pytest.mark.parametrize("kind", NAMES)
def test_they_are_listed_and_described(kind: str, fedstrata: Command, own: Path) -> None:
    name = NAMES[kind]
    assert name not in KINDS[kind]
    code, printed, err = fedstrata("--import", own / "mine.py", "list", kind, "--json")
    definition = KINDS[kind].definition(KINDS[kind][name])
    line = (definition.__doc__ or "").split("\n")[0]
    assert code == 0 and json.loads(printed)[name] == line and line, err
    code, printed, err = fedstrata("--import", own / "mine.py", "show", name, "--json")
    about = json.loads(printed)
    assert code == 0 and about["text"] == line, err
    assert len(about["hyperparameters" if kind == "algorithms" else "options"]) >= 1
    code, printed, err = fedstrata("--import", own / "mine.py", "show", name)
    assert code == 0 and line in " ".join(printed.split()) and "takes" in printed, err


@pytest.mark.parametrize("kind", NAMES)
def test_without_the_file_the_name_is_unknown(kind: str, fedstrata: Command, own: Path) -> None:
    file = own / "plain.toml"
    file.write_text('[data]\nclients = 2\n[model]\nname = "logreg"\n[train]\nrounds = 1\n')
    value = f"['{NAMES[kind]}']" if kind == "augmentations" else NAMES[kind]
    code, _, err = fedstrata("run", file, "--set", f"{KEYS[kind]}={value}")
    assert code == 2 and f"Unknown {KINDS[kind].kind} '{NAMES[kind]}'" in err
    assert "To add your own: fedstrata --import FILE ..." in " ".join(err.split())


def test_options_of_ones_own_are_checked(fedstrata: Command, own: Path) -> None:
    for setting, message in (
        ("problem.focus=-1", "The focus of the focal problem must be a number of at least 0. Got -1."),
        ("data.options={nois=1}", "Unknown option of the bars data set 'nois'. Did you mean 'noise'?"),
        ("model.width=0", "The width of the bottleneck model must be a whole number of at least 1. Got 0."),
        ("model.augment=[{name='erase', size=0}]", "The size of the erase augmentation must be a whole number"),
        ("data.partition.power=-1", "The power of the growing partition must be a number of at least 0. Got -1."),
    ):
        code, _, err = fedstrata("--import", own / "mine.py", "run", own / "mine.toml", "--set", setting)
        assert code == 2 and message in " ".join(err.split()), err


@pytest.mark.usefixtures("no_pictures")
def test_a_problem_without_a_model_and_one_with_its_own_data(fedstrata: Command, own: Path) -> None:
    huber, median = own / "huber.toml", own / "median.toml"
    huber.write_text('[data]\nname = "breast_cancer"\n[problem]\nname = "huber"\ndelta = 0.5\n[algorithm]\nlr = 0.02\n')
    median.write_text('[problem]\nname = "median"\nclients = 3\n[algorithm]\nlr = 0.05\n[train]\nseed = 4\n')
    for file in (huber, median):
        words = (
            "--import",
            own / "mine.py",
            "run",
            file,
            "--set",
            "train.rounds=10",
            "--out",
            own / file.stem,
            "--quiet",
        )
        code, _, err = fedstrata(*words)
        assert code == 0, err
        rows = [json.loads(line) for line in (own / file.stem / "metrics.jsonl").read_text().splitlines()]
        assert rows[-1]["loss"] < rows[0]["loss"]
        config = tomllib.loads((own / file.stem / "config.toml").read_text())
        assert "model" not in config and ("data" in config) == (file is huber)
        for setting, message in (
            ("model.name=logreg", "takes no model: leave out [model]" if file is huber else "brings its own data"),
            ("pretrain.rounds=1", "has no model to pre-train: leave out [pretrain]"),
        ):
            code, _, err = fedstrata("--import", own / "mine.py", "run", file, "--set", setting)
            assert code == 2 and message in err
    numbers = torch.randn(3, 20, generator=torch.Generator().manual_seed(4))
    x = load_file(own / "median" / "model.safetensors")["x"]
    assert abs(float(x) - float(numbers.median())) < 0.15, "the run's seed is that of the data"


# --- the decorators, in Python ----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("registries")
def test_what_they_return_must_be_of_their_kind() -> None:
    @fs.data.register
    def numbers(data_dir: Any = None) -> Any:
        return np.ones((4, 2)), data_dir

    @fs.problems.register
    def nothing(model: Any) -> Any:
        return None

    @fs.problems.register
    def pair(model: Any) -> Any:
        return fs.erm(model), "data"

    @fs.problems.register(brings_data=True)
    def alone() -> Any:
        return fs.erm(torch.nn.Linear(2, 2))

    @fs.models.register
    def text(shape: Any, outputs: int) -> Any:
        return "text"

    data = fs.FederatedData.from_arrays([(np.ones((4, 2)), np.arange(4) % 2)])
    net, problems = torch.nn.Linear(2, 2), KINDS["problems"]
    for call, message in (
        (lambda: fs.data.load("numbers"), r"result of the function numbers must be a Dataset.* Got 'tuple'"),
        (lambda: nothing(net), r"result of the function nothing must be a Problem\. Got 'NoneType'"),
        (
            lambda: problems["pair"].on(net, data),
            r"result of the function pair must be a Problem; if .* brings_data=True",
        ),
        (lambda: problems["alone"].with_data(0), r"result of the function alone must be a Problem and its Federated"),
        (lambda: fs.erm(fs.models.model("text", (2,), 2)), r"The model must be a torch.nn.Module"),
    ):
        with pytest.raises(fs.InputError, match=message):
            call()


@pytest.mark.usefixtures("registries")
def test_a_problem_of_ones_own_has_its_name_and_options_and_infers_what_it_needs() -> None:
    @fs.problems.register(outputs=3)
    def scaled(
        model: torch.nn.Module,
        classes: int = fs.param(..., "number of classes", in_file=False),
        device: str = fs.param("cpu", "set in Python only", in_file=False),
        by: float = fs.param(2.0, "a factor", above=0),
    ) -> fs.Problem:
        """Build a scaled loss."""
        assert classes == 2 and device == "cpu"
        return fs.erm(model, lambda outputs, targets: by * outputs.square().sum(1))

    data = fs.FederatedData.from_arrays([(np.ones((4, 2)), np.arange(4) % 2)])
    problem = KINDS["problems"]["scaled"].on(torch.nn.Linear(2, 3), data, by=3.0)
    assert (problem.name, problem.options) == ("scaled", {"by": 3.0})
    assert KINDS["problems"]["scaled"].outputs == 3
    assert scaled(torch.nn.Linear(2, 3), classes=2).options == {"by": 2.0}


@pytest.mark.usefixtures("registries")
@pytest.mark.parametrize(
    ("register", "name"),
    [(fs.data.register, "digits"), (fs.models.register, "mlp"), (fs.problems.register, "erm")],
    ids=["data", "models", "problems"],
)
def test_a_taken_name_is_refused_and_a_file_can_be_imported_again(register: Any, name: str) -> None:
    with pytest.raises(TypeError, match=rf"The name '{name}' of {name} is taken by fedstrata\.\w+"):
        register(defined(name, "mine"))
    for _ in range(2):
        register(defined("another", "mine"))
    with pytest.raises(TypeError, match=r"The name 'another' of another is taken by mine\.another"):
        register(defined("another", "yours"))


def defined(name: str, module: str) -> Any:
    """Return a function as a user's file would define it."""

    def function() -> None: ...

    function.__name__, function.__qualname__, function.__module__ = name, name, module
    return function


@pytest.mark.usefixtures("registries")
def test_an_option_needs_a_type_and_a_partition_a_name() -> None:
    with pytest.raises(TypeError, match=r"The width of the narrow model needs a type: width: float = param"):

        @fs.models.register
        def narrow(shape, outputs, width=WIDTH):  # type: ignore[no-untyped-def]
            return torch.nn.Linear(3, 3)

    with pytest.raises(TypeError, match=r"Nameless must have a name for files"):

        class Nameless(fs.partition.Partition):
            def owners(self, rows: Any, clients: int, rng: Any) -> Any:
                return rng.integers(clients, size=len(rows.targets))


def test_definitions_are_those_of_the_entries() -> None:
    registry: Registry[tuple[Any]] = Registry("pair", definition=lambda entry: entry[0])
    registry.add("mine", (defined("mine", "mine"),))
    assert registry.definitions() == {"mine": registry["mine"][0]}
