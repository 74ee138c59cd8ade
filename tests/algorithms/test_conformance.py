"""What every algorithm promises, checked over the whole registry: a new algorithm is covered the day it is added.

``test_nothing_is_missing`` is the checklist of a new algorithm: what it names is to be added, where it says.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import fedstrata as fs
from algorithms.examples import quick
from algorithms.families import METHODS
from cases import table
from fedstrata.algorithms import ALGORITHMS
from fedstrata.algorithms.sent import sent
from fedstrata.clients import Client
from fedstrata.clients.work import is_remote
from fedstrata.core.options import options_of
from support import example_for, play, shared_oracles

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "src" / "fedstrata" / "algorithms"
NAMES = sorted(ALGORITHMS)
SECOND = "fednest, composition"
CLASSES = [*NAMES, SECOND]
"""Every algorithm with a problem that it solves; FedNest, a saddle's and a composition's method, with two."""


def kind_of(name: str) -> type[fs.Algorithm]:
    return ALGORITHMS[name.split(",")[0]]


def example(name: str, dtype: torch.dtype = torch.float64) -> tuple[fs.Problem, fs.FederatedData]:
    return example_for(kind_of(name), dtype, 1 if name == SECOND else None)


def participation_of(name: str, share: int | float) -> int | float:
    return 1.0 if kind_of(name).full_participation else share


# --- the checklist ---------------------------------------------------------------------------------------------------


def algorithm_classes() -> Iterator[tuple[str, str]]:
    """Yield the classes with a name in the files of algorithms, imported or not: file and class."""
    for path in sorted(FOLDER.glob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and any(
                isinstance(line, ast.Assign)
                and getattr(line.targets[0], "id", "") == "name"
                and getattr(line.value, "value", "")
                for line in node.body
            ):
                yield path.stem, node.name


@pytest.mark.parametrize(("file", "name"), list(algorithm_classes()))
def test_an_algorithm_is_imported(file: str, name: str) -> None:
    for module, path in ((fs.algorithms, "algorithms/__init__.py"), (fs, "__init__.py")):
        where = f"src/fedstrata/{path}"
        assert hasattr(module, name), (
            f"{where} does not import {name}, of {file}.py: add 'from fedstrata.algorithms.{file} import {name} as "
            f"{name}' to src/fedstrata/algorithms/__init__.py, among the imports above __all__."
        )
        assert name in module.__all__, f"The import of {name} must be above __all__ in {where}."


@cache
def references() -> set[str]:
    """The functions of the NumPy references."""
    found = set()
    for path in (ROOT / "tests" / "reference").glob("*.py"):
        found |= {node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)}
    return found


def family_of(kind: type[fs.Algorithm]) -> tuple[str, str]:
    """Return the file with the equations of algorithms of this class, and one of them to start from."""
    if kind.inner_mean == "global":
        return "equations_levels.py", "local_scgdam"
    if kind.mixture:
        return "equations_mixture.py", "drfa"
    if kind.dual:
        return "equations_saddle.py", "local_sgda"
    return ("equations_composition.py", "local_moml") if max(kind.levels) else ("equations_plain.py", "fedavg")


def missing_in(name: str) -> Iterator[str]:
    """Say what an algorithm lacks, and where it belongs."""
    kind = ALGORITHMS[name]
    module = inspect.getmodule(kind)
    text = (module.__doc__ if module is not None else None) or ""
    where = f"src/fedstrata/algorithms/{kind.__module__.rpartition('.')[2]}.py"
    for heading in ("Problem: ", "Departures from the paper"):
        if not re.search(rf"^{heading}", text, re.M):
            yield f"{where}: a paragraph of the module's docstring that begins with '{heading.strip()}'"
    if '"' not in text.partition("Problem:")[0]:
        yield f'{where}: authors, "title" and year of the paper at the top of the module\'s docstring'
    try:
        sent(kind)
    except fs.FedstrataError as problem:
        yield f"{where}: what is sent. {problem}"
    if not inspect.getdoc(kind):
        yield f"{where}: a docstring of one line for {kind.__name__}, for 'fedstrata list'"
    table_file, example = family_of(kind)
    options = options_of(kind).values()
    if not any(option.search for option in options):
        yield f"{where}: a range for 'fedstrata tune' (search=) of at least the learning rate"
    for option in options:
        if not option.doc:
            yield f"{where}: an explanation of {option.name}: param({option.default!r}, 'what it is')"
    if not any(is_remote(getattr(kind, method)) for method in dir(kind) if callable(getattr(kind, method))):
        yield f"{where}: @remote on the methods that run on clients"
    if not re.search(rf"^\|.*`{name}`", (ROOT / "README.md").read_text(), re.M):
        yield f"README.md: `{name}` in the rows of algorithms of the table under 'What it includes'"
    if name not in references():
        like = f"with the arguments of tests/reference/{example}.py"
        yield f"tests/reference/{name}.py: a NumPy version of the paper's lines, a function {name}(x, ...) {like}"
    if all(method.build is not kind for method in METHODS.values()):
        yield f"tests/algorithms/{table_file}: a Method with that reference, beside the one of {example}"


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_missing(name: str) -> None:
    missing = list(missing_in(name))
    assert not missing, f"{name} is not complete. Add:\n" + "\n".join(f"  - {what}" for what in missing)


@pytest.mark.parametrize("name", NAMES)
def test_an_algorithm_is_a_frozen_set_of_hyperparameters_in_a_file_of_its_box(name: str) -> None:
    kind = ALGORITHMS[name]
    algorithm = kind()
    assert kind.name == name
    assert kind.__module__.startswith("fedstrata.algorithms.")
    base = kind.__bases__[0]
    assert base is fs.Algorithm or (base.__bases__ == (fs.Algorithm,) and base.__module__ == kind.__module__)
    for field in dataclasses.fields(algorithm):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(algorithm, field.name, getattr(algorithm, field.name))
    assert dataclasses.fields(algorithm)
    assert kind() == algorithm
    assert fs.algorithm(name) == algorithm


# --- runs ------------------------------------------------------------------------------------------------------------


KINDS = {"float32": (torch.float32, "epochs"), "float64": (torch.float64, "uniform")}
CHUNKS = [(name, kind, traced) for traced in (False, True) for name in CLASSES for kind in KINDS]


@table("name, kind, traced", CHUNKS, key=lambda name, kind, _: [name, kind], name=lambda *row: row)
def test_chunks_of_any_size_agree(name: str, kind: str, traced: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not traced:
        monkeypatch.setattr("fedstrata.problems.runner.Runner.tracing", False)
    dtype, sampling = KINDS[kind]
    problem, data = example(name, dtype)
    fs.testing.check_chunks(quick(kind_of(name)), problem, data, sampling)
    shared_oracles(problem)._runner.graphs.clear()  # those of functions that were not traced are not graphs


@pytest.mark.untraced
@pytest.mark.parametrize("name", CLASSES)
def test_counted_samples_are_those_drawn(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch at which two gradients are taken counts once."""
    seen: dict[tuple[Any, ...], int] = {}

    def watched(method: Any) -> Any:
        def draw(client: Client, *args: Any, **options: Any) -> Any:
            before = client.samples
            batch = method(client, *args, **options)
            drawn = client._batches
            place = (drawn._exchange, drawn._loops, client.clock.step, len(client))
            seen[(method.__name__, tuple(client.ids), *place, repr(args), repr(options))] = client.samples - before
            return batch

        return draw

    for method in (Client.draw, Client.all_data):
        monkeypatch.setattr(Client, method.__name__, watched(method))
    problem, data = example(name)
    algorithm, share = quick(kind_of(name)), participation_of(name, 3)
    _, usage = play(algorithm, problem, data, 2, batch_size=4, participation=share, chunk=2)
    assert usage.samples == sum(seen.values()) > 0


@pytest.mark.untraced
@pytest.mark.parametrize("name", CLASSES)
def test_a_state_becomes_named_tensors_and_back(name: str) -> None:
    """That is how a checkpoint is written and read."""
    fs.testing.check_state(quick(kind_of(name)), *example(name))


def problem_class(name: str) -> list[Any]:
    kind = kind_of(name)
    return [(kind.levels, kind.dual, kind.mixture, kind.auxiliary)]


@pytest.mark.untraced
@table("name", [(name,) for name in CLASSES], key=problem_class, name=lambda name: [name])
@pytest.mark.usefixtures("no_pictures")
def test_a_resumed_run_ends_with_the_same_bits(name: str) -> None:
    fs.testing.check_resume(quick(kind_of(name)), *example(name))


@pytest.mark.untraced
@pytest.mark.parametrize("name", NAMES)
def test_options_and_problems_are_checked(name: str) -> None:
    fs.testing.check_options(ALGORITHMS[name])
    fs.testing.check_refusals(ALGORITHMS[name]())
