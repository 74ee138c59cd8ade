"""Options are declared once, and everything that takes options declares them."""

from __future__ import annotations

import ast
import inspect
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pytest
import torch

import fedstrata as fs
from fedstrata.algorithms import ALGORITHMS
from fedstrata.core.kinds import Limits
from fedstrata.core.options import Options, build, check, options, options_of, param
from fedstrata.core.registry import Registry
from fedstrata.core.schedules import SCHEDULES, EqualSteps, Rate, Steps
from fedstrata.data import SETS
from fedstrata.data.partitions import PARTITIONS
from fedstrata.experiments.config import Config, parse
from fedstrata.experiments.describe import KINDS, TABLES
from fedstrata.models import MODELS
from fedstrata.problems import PROBLEMS
from fedstrata.training.settings import Settings

SOURCE = Path(inspect.getfile(fs)).parent


class Inner(Options, owner="the inner part"):
    """A nested class."""

    size: int = param(..., "how large", least=1)
    colour: str = param("red", "which colour", choices=("red", "green"))


class Every(Options, owner="the example"):
    """One option of every kind."""

    flag: bool = param(False, "a switch")
    count: int = param(3, "a count", least=1, most=9)
    number: float = param(0.5, "a number", above=0, below=1)
    free: float = param(0.0, "any number")
    text: str = param("a", "a text")
    choice: str = param("red", "a colour", choices=("red", "green", "blue"))
    literal: Literal["x", "y", 3] = param("x", "one of these")
    maybe: int | None = param(None, "perhaps", least=0)
    rate: Rate = param(0.1, "a rate", above=0)
    steps: Steps = param(5, "steps")
    equal: EqualSteps = param(5, "equal steps")
    share: int | float = param(0.5, "a share")
    widths: Sequence[int] = param((1, 2), "widths", least=1)
    names: list[str] = param((), "names")
    pair: tuple[float, float] = param((0.0, 1.0), "a range")
    some: Annotated[int, Limits(least=1)] | Sequence[Annotated[int, Limits(least=0)]] = param(2, "some")
    table: dict[str, float] = param({}, "a table of numbers")
    anything: dict[str, Any] = param({}, "a table")
    inner: Inner | None = param(None, "a part")
    function: str | Callable[[float], float] = param("exp", "a function", choices=("exp", "square"))


RIGHT: list[tuple[str, Any, Any]] = [
    ("flag", True, True),
    ("count", np.int64(4), 4),
    ("number", np.float32(0.5), 0.5),
    ("free", 7, 7),
    ("literal", 3, 3),
    ("maybe", None, None),
    ("rate", fs.StepDecay(0.1), fs.StepDecay(0.1)),
    ("steps", fs.Epochs(2), fs.Epochs(2)),
    ("equal", fs.Interval(4, 2.0), fs.Interval(4, 2.0)),
    ("share", 3, 3),
    ("share", 1.0, 1.0),
    ("widths", [4, 5], (4, 5)),
    ("widths", range(1, 3), (1, 2)),
    ("names", ["a"], ("a",)),
    ("pair", [1, 2], (1, 2)),
    ("some", 4, 4),
    ("some", np.array([0, 3]), (0, 3)),
    ("table", {"a": 1}, {"a": 1}),
    ("anything", {"a": {"b": []}}, {"a": {"b": []}}),
    ("inner", Inner(2), Inner(2)),
    ("function", "square", "square"),
    ("function", abs, abs),
]


@pytest.mark.parametrize(("name", "value", "kept"), RIGHT, ids=[f"{n}={v!r}" for n, v, _ in RIGHT])
def test_a_valid_value_is_accepted(name: str, value: Any, kept: Any) -> None:
    found = getattr(Every(**{name: value}), name)
    assert found == kept and type(found) is type(kept)
    assert getattr(build(Every, {name: value}, "file.toml", "table"), name) == kept


STEPS = "a whole number of at least 1, epochs such as {epochs = 2}, or an interval such as {initial = 4, base = 2.0}"
WRONG: list[tuple[str, Any, str]] = [
    *(("flag", value, "true or false") for value in (1, "yes", None)),
    *(("count", value, "a whole number from 1 to 9") for value in (0, 10, 2.0, True, "3", None)),
    *(("number", value, "a number above 0 and below 1") for value in (0, 1, -1.0, float("nan"), "0.5", False)),
    *(("free", value, "a number") for value in (float("inf"), float("nan"), "1", True)),
    *(("text", value, "text") for value in (1, None)),
    *(("choice", value, "'red', 'green' or 'blue'") for value in ("pink", 1)),
    *(("literal", value, "'x', 'y' or 3") for value in ("z", 3.0)),
    *(("maybe", value, "a whole number of at least 0, or left out") for value in (-1, 1.5)),
    *(("rate", value, "a number above 0, or a schedule") for value in (0.0, "fast", fs.Epochs(1))),
    *(("steps", value, STEPS) for value in (0, 1.5, "a", fs.StepDecay(0.1), {"epochs": 1})),
    *(("equal", value, STEPS.replace(" epochs such as {epochs = 2},", "")) for value in (0, fs.Epochs(1))),
    *(
        ("share", value, "a fraction in (0, 1] or a whole number of at least 1")
        for value in (0, 0.0, 1.5, -1, True, "1")
    ),
    *(("widths", value, "a list of whole numbers of at least 1") for value in (3, "12", [0], [1.5], {"a": 1}, None)),
    *(("names", value, "a list of names") for value in ("a", [1])),
    *(("pair", value, "a list of 2 numbers") for value in ([1], [1, 2, 3], 1)),
    ("some", [-1], "a whole number of at least 1, or a list of whole numbers of at least 0"),
    *(("anything", value, "a table") for value in (1, [])),
    *(("inner", value, "an Inner, or left out") for value in (1, {"size": 1})),
    *(("function", value, "'exp' or 'square', or a function") for value in ("cube", 1)),
]


@pytest.mark.parametrize(("name", "value", "wants"), WRONG, ids=[f"{n}={v!r}" for n, v, _ in WRONG])
def test_an_invalid_value_is_refused(name: str, value: Any, wants: str) -> None:
    with pytest.raises(fs.InputError) as refused:
        Every(**{name: value})
    assert str(refused.value).startswith(f"The {name} of the example must be {wants}. Got {value!r}.")


def test_the_nearest_choice_is_suggested_and_a_number_fits_into_a_machine_word() -> None:
    with pytest.raises(fs.InputError, match=r"Got 'gren'\. Did you mean 'green'\?$"):
        Every(choice="gren")
    with pytest.raises(fs.InputError, match="maybe of the example must be a number that fits in 64 bits"):
        Every(maybe=1 << 63)


# --- tables ----------------------------------------------------------------------------------------------------------


def test_tables_become_options_and_options_tables() -> None:
    table = {
        "rate": {"schedule": "step", "value": 0.1, "at": [3]},
        "steps": {"epochs": 5},
        "equal": {"initial": 4, "base": 2.0},
        "inner": {"size": 3},
        "widths": [7],
    }
    built = build(Every, table)
    assert built.rate == fs.StepDecay(0.1, at=(3,)) and built.steps == fs.Epochs(5)
    assert built.equal == fs.Interval(4, 2.0) and built.inner == Inner(3) and built.widths == (7,)
    assert Every.from_table(built.to_table()) == built and "maybe" not in built.to_table()
    assert built.to_table()["inner"] == {"size": 3, "colour": "red"}
    assert built.replace(inner=None).inner is None and pickle.loads(pickle.dumps(built)) == built


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"cont": 1}, "Unknown key 'part.cont'. Did you mean 'part.count'? Known: part.anything, "),
        ({"count": 0}, "The key part.count must be a whole number from 1 to 9. Got 0. (file.toml)"),
        ({"inner": {"sise": 1}}, "Unknown key 'part.inner.sise'. Did you mean 'part.inner.size'?"),
        ({"inner": {"size": 0}}, "The key part.inner.size must be a whole number of at least 1. Got 0. (file.toml)"),
        ({"inner": 3}, "The key part.inner must be a table. Got 3. (file.toml)"),
        ({"inner": {}}, "The inner part needs size. (file.toml)"),
        ({"table": {"a": "b"}}, "The key part.table.a must be a number. Got 'b'. (file.toml)"),
    ],
)
def test_an_error_in_a_table_names_the_key(table: dict[str, Any], message: str) -> None:
    with pytest.raises(fs.InputError) as refused:
        build(Every, table, "file.toml", "part")
    assert str(refused.value).startswith(message)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"cont": 1}, "Unknown option of the example 'cont'. Did you mean 'count'? Known: anything, "),
        ({"rate": {"schedule": "stp"}}, "Unknown schedule 'stp'. Did you mean 'step'? Known: cube_root, "),
        ({"rate": {"schedule": "step", "value": 0}}, "The value of the step schedule must be a number above 0. Got 0."),
        ({"rate": {"schedule": "step"}}, "The step schedule needs value. (rate of the example)"),
        ({"steps": {"epoch": 1}}, f"The steps of the example must be {STEPS}. Got"),
        ({"steps": {"initial": 1}}, "An interval needs base. (steps of the example)"),
    ],
)
def test_an_error_in_a_table_without_a_key_names_the_option(table: dict[str, Any], message: str) -> None:
    with pytest.raises(fs.InputError) as refused:
        build(Every, table)
    assert str(refused.value).startswith(message)


# --- functions -------------------------------------------------------------------------------------------------------


@options("the cake problem")
def cake(
    flour: torch.Tensor,
    guests: int = param(..., "known from the data", least=1, in_file=False),
    form: Literal["square", "round"] = param("square", "its form"),
    radius: float = param(1.0, "its radius", above=0, only={"form": ("round",)}),
    dtype: torch.dtype = torch.float64,
) -> tuple[Any, ...]:
    """Bake."""
    return flour, guests, form, radius, dtype


def test_a_function_checks_its_options_and_shows_its_defaults() -> None:
    flour = torch.ones(1)
    assert cake(flour, guests=2) == (flour, 2, "square", 1.0, torch.float64)
    assert cake(flour, 3, "round", 2)[1:4] == (3, "round", 2)
    parameters = inspect.signature(cake).parameters
    assert parameters["radius"].default == 1.0 and parameters["guests"].default is inspect.Parameter.empty
    assert list(options_of(cake)) == ["guests", "form", "radius"]
    assert "radius: its radius (a number above 0)" in (cake.__doc__ or "")
    with pytest.raises(
        fs.InputError, match=r"^The guests of the cake problem must be a whole number of at least 1\. Got 0\.$"
    ):
        cake(flour, guests=0)


def test_an_option_that_does_not_apply_is_refused() -> None:
    message = r"^The radius of the cake problem applies only with form = 'round'\. Got 2\.0 with form = 'square'\.$"
    with pytest.raises(fs.InputError, match=message):
        cake(torch.ones(1), radius=2.0, guests=1)
    assert cake(torch.ones(1), radius=1.0, guests=1)[3] == 1.0, "the default is always accepted"


def test_missing_and_extra_arguments_are_errors() -> None:
    with pytest.raises(fs.InputError, match=r"^The cake problem needs flour and guests\.$"):
        cake()
    with pytest.raises(TypeError, match="cake: too many positional arguments"):
        cake(1, 2, "round", 1.0, None, 6)
    with pytest.raises(TypeError, match="cake: multiple values for argument 'flour'"):
        cake(1, flour=2, guests=1)


def test_a_file_cannot_set_options_for_python_only() -> None:
    assert check(cake, {"form": "round"}) == {"form": "round"}
    for name in ("guests", "flour", "dtype"):
        with pytest.raises(
            fs.InputError, match=rf"^Unknown option of the cake problem '{name}'\. .*Known: form, radius\.$"
        ):
            check(cake, {name: 3})


# --- unknown keywords in Python and in a file ------------------------------------------------------------------------

UNKNOWN: list[tuple[Callable[[], Any], str]] = [
    (lambda: fs.FGDA(lr=0.1), r"Unknown option of fgda 'lr'\. .*Known: alpha, beta, .*weights\."),
    (lambda: fs.FedAvg(learning_rate=0.1), r"Unknown option of fedavg 'learning_rate'\. .*Known: lr, server_lr, steps"),
    (lambda: fs.Channel(clp=1.0), r"Unknown option of the channel 'clp'\. Did you mean 'clip'\? Known: bound, clip, "),
    (lambda: fs.Faults(quorun=1), r"Unknown option of the faults 'quorun'\. Did you mean 'quorum'\?"),
    (lambda: fs.Evaluation(client="test"), r"Unknown option of the evaluation 'client'\. Did you mean 'clients'\?"),
    (lambda: fs.Diagnostics(norm=["v"]), r"Unknown option of the diagnostics 'norm'\. Did you mean 'norms'\?"),
    (lambda: fs.StepDecay(0.1, factr=2), r"Unknown option of the step schedule 'factr'\. Did you mean 'factor'\?"),
    (lambda: fs.partition.dirichlet(alfa=1), r"Unknown option of the dirichlet partition 'alfa'\."),
    (
        lambda: fs.auc(torch.nn.Linear(1, 1), margn=2),
        r"Unknown option of the auc problem 'margn'\. Did you mean 'margin'\?",
    ),
    (lambda: fs.data.digits(size=3), r"Unknown option of the digits data set 'size'\."),
    (lambda: fs.models.model("mlp", (3,), 2, hiden=[3]), r"Unknown option of the mlp model 'hiden'\. Did you mean"),
    (
        lambda: fs.train(None, None, None, round=3),
        r"Unknown argument of train 'round'\. Did you mean 'rounds'\? Known: ",
    ),
    (lambda: fs.train(None, None, None, evaluat=3), r"Unknown argument of train 'evaluat'\. Did you mean 'evaluate'\?"),
]


@pytest.mark.parametrize(("call", "message"), UNKNOWN, ids=[m.split("'")[1] for _, m in UNKNOWN])
def test_the_error_for_an_unknown_keyword_lists_the_known_ones(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(fs.InputError, match=f"^{message}"):
        call()


def test_python_and_a_file_give_the_same_error() -> None:
    with pytest.raises(fs.InputError) as in_python:
        fs.FGDA(lr=0.1)
    with pytest.raises(fs.InputError) as in_a_file:
        fs.algorithm("fgda", {"lr": 0.1})
    assert str(in_python.value) == str(in_a_file.value)


# --- what cannot be declared -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "annotation",
    [object, Any, torch.Tensor, complex, list, dict, dict[int, int], set[int], int | torch.Tensor, Sequence[object]],
    ids=str,
)
@pytest.mark.parametrize("default", [..., None], ids=["required", "with a default"])
def test_an_annotation_that_cannot_be_checked_is_an_error(annotation: Any, default: Any) -> None:
    message = "The odd of the broken thing cannot be declared. An option cannot have the annotation"

    def function(odd: Any = param(default, "odd")) -> None: ...

    function.__annotations__["odd"] = annotation
    with pytest.raises(TypeError, match=message):
        options("the broken thing")(function)
    body = {"odd": param(default, "odd"), "__annotations__": {"odd": annotation}}
    with pytest.raises(TypeError, match=message):
        type("Broken", (Options,), body, owner="the broken thing")


@pytest.mark.parametrize(
    ("annotation", "limits"),
    [
        (int | float, {"above": 0.5}),
        (int | float | None, {"least": 2}),
        (float, {"choices": (0.5, 1.0)}),
        (int, {"choices": (1, 2), "most": 1}),
        (bool, {"choices": (True,)}),
        (str, {"most": 3}),
        (Literal["x", "y"], {"choices": ("x",)}),
        (Sequence[str], {"least": 1}),
        (dict[str, Any], {"least": 1}),
        (fs.Epochs, {"least": 1}),
    ],
    ids=str,
)
def test_limits_that_would_not_be_applied_are_an_error(annotation: Any, limits: dict[str, Any]) -> None:
    def function(odd: Any = param(..., "odd", **limits)) -> None: ...

    function.__annotations__["odd"] = annotation
    with pytest.raises(TypeError, match=r"The odd of the broken thing cannot be declared\. Its limits do not apply to"):
        options("the broken thing")(function)


def test_an_algorithm_with_such_an_annotation_is_an_error() -> None:
    with pytest.raises(TypeError, match="The odd of broken cannot be declared"):

        class Broken(fs.Algorithm):
            name = "broken"
            odd: torch.Tensor = param(..., "not an option")

            def round(self, s: Any, clients: Any) -> Any: ...

    assert "broken" not in ALGORITHMS


def test_a_default_must_be_valid_and_only_must_name_an_option() -> None:
    with pytest.raises(fs.InputError, match="The default size of the broken thing must be a whole number"):

        class Wrong(Options, owner="the broken thing"):
            size: int = param(0.5, "how large")

    with pytest.raises(TypeError, match="The size of the broken thing depends on colour, which is not an option"):

        class Alone(Options, owner="the broken thing"):
            size: int = param(1, "how large", only={"colour": ("red",)})


# --- everything is covered, and declared once ------------------------------------------------------------------------

NOT_OPTIONS = {
    *("self", "model", "shape", "outputs", "data_dir", "progress", "dtype", "folder"),
    *("levels", "outer", "x0", "y0", "project_y"),  # of multilevel: functions and tensors
}
SAME_WORDS = {("compare", "Comparison"), ("compare", "Difference"), ("compare", "TuneTable")}
"""Results record what they were judged by; the seeds and the measure of a trial are not those of a comparison."""

TAKE_SETTINGS = ("train", "train_local", "compare", "tune")
"""The functions of ``fs`` that take the settings of a run as keywords."""

BUILDERS: dict[str, Any] = {
    **{f"{kind} {name}": thing for kind, things in KINDS.items() for name, thing in things.definitions().items()},
    **{f"table {name}": table for name, table in TABLES.items()},
    "multilevel": fs.multilevel,
    "config": Config,
}


@pytest.mark.parametrize("name", BUILDERS)
def test_every_parameter_is_an_option_with_an_explanation(name: str) -> None:
    thing = BUILDERS[name]
    called = thing.__init__ if isinstance(thing, type) else thing
    declared = options_of(thing)
    assert hasattr(called, "__options__"), "it is not declared"
    parameters = set(inspect.signature(called).parameters)
    own = {"levels"} if name == "problems tower" or name == "problems compositional_auc" else set()
    own |= {"shape"} if name == "problems adversarial" else set()
    assert parameters - set(declared) <= NOT_OPTIONS - own, (
        "a parameter that is neither an option nor listed in NOT_OPTIONS"
    )
    for option in declared.values():
        assert option.doc and option.doc[-1] != "." and option.wants, option.name


def test_everything_public_that_takes_options_is_among_these() -> None:
    """A class or function of ``fs`` that takes numbers, texts or switches by keyword declares them."""
    covered = {id(thing) for thing in BUILDERS.values()} | {id(kind) for kind in ALGORITHMS.values()}
    covered |= {id(fs.Epochs), id(fs.Interval)}
    others = {
        "Callback",
        "Client",
        "Clients",
        "Dataset",
        "FederatedData",
        "Problem",
        "Quadratic",
        "Run",
        "ShowProgress",
    }
    others |= {"State", "TensorBoard", "Algorithm", "Variables", "algorithm", "param", "remote"}
    others |= {"Comparison", "LocalRun", "Tuned", "declare_measure"}
    others |= {"FederatedClassifier"}  # scikit-learn requires that its arguments are stored as they are
    others |= {"Diverged", "FedstrataError", "InputError", "MissingData", "QuorumError"}
    for name in fs.__all__:
        thing = getattr(fs, name)
        if inspect.ismodule(thing) or name in others or name in TAKE_SETTINGS:
            continue
        assert id(thing) in covered, f"fs.{name} is not known to this test"
        assert options_of(thing), f"fs.{name} declares no options"


def test_every_registry_is_a_registry() -> None:
    registries = (ALGORITHMS, PROBLEMS, MODELS, PARTITIONS, SETS, SCHEDULES)
    assert all(isinstance(registry, Registry) for registry in registries)
    for registry in registries:
        with pytest.raises(fs.InputError, match=f"^Unknown {registry.kind} 'nothing'\\."):
            registry.find("nothing")


def test_the_tables_of_a_file_are_the_options_of_python() -> None:
    declared = options_of(Config)
    same = {"train": Settings, "evaluate": fs.Evaluation, "channel": fs.Channel}
    assert {name: declared[name].annotation for name in same} == same
    assert declared["faults"].annotation == fs.Faults | None
    assert options_of(fs.Faults)["inject"].annotation == fs.Inject | None
    for name in TAKE_SETTINGS:
        assert set(inspect.signature(getattr(fs, name)).parameters) >= set(options_of(Settings)), name
    with pytest.raises(fs.InputError, match=r"Unknown key 'train\.channel'"):
        parse({"train": {"channel": {}}}, "here")


@pytest.mark.parametrize("name", [name for name, kind in PROBLEMS.items() if not kind.brings_data])
def test_a_problem_has_its_name_and_records_its_options(name: str) -> None:
    """So a run is resumed only with the same options."""
    data = fs.FederatedData.from_arrays([(np.ones((4, 3), np.float32), np.array([0, 1, 0, 1]))] * 2)
    problem = PROBLEMS[name].on(torch.nn.Linear(3, PROBLEMS[name].outputs or 2), data)
    defaults = {key: option.default for key, option in options_of(PROBLEMS[name].build).items() if option.in_file}
    assert problem.name == name
    assert problem.options == defaults


def fields_of(node: ast.ClassDef) -> set[str]:
    lines = [n for n in node.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)]
    return {n.target.id for n in lines if "ClassVar" not in ast.dump(n.annotation)}  # type: ignore[union-attr]


def test_no_option_is_declared_twice() -> None:
    """No other class repeats the fields of a table, no function the settings of a run, and nothing has a schema."""
    classes, with_settings = {}, []
    for path in SOURCE.rglob("*.py"):
        tree = ast.parse(path.read_text())
        imported = {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
        imported |= {n.module or "" for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
        assert not any(name.split(".")[0] == "pydantic" for name in imported), path
        classes |= {n.name: fields_of(n) for n in ast.walk(tree) if isinstance(n, ast.ClassDef)}
        for function in (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)):
            if any(isinstance(d, ast.Name) and d.id == "takes_settings" for d in function.decorator_list):
                named = {a.arg for a in (*function.args.args, *function.args.kwonlyargs)}
                assert not named & set(options_of(Settings)), function.name
                with_settings.append(function.name)
    assert sorted(with_settings) == sorted(TAKE_SETTINGS)
    for name, table in TABLES.items():
        own = set(options_of(table)) - {"name", "options"}
        for other, fields in classes.items():
            repeated = own & fields
            most = max(2, min(4, len(own) / 2))
            allowed = other == table.__name__ or (name, other) in SAME_WORDS
            assert allowed or len(repeated) < most, f"{other} repeats {sorted(repeated)} of [{name}]"


def test_instances_do_not_share_the_table_of_a_default() -> None:
    class Tables(Options, owner="the tables"):
        empty: dict[str, Any] = param({}, "a table")
        filled: dict[str, Any] = param({"a": {"b": 1}}, "another")

    @options("the function")
    def function(filled: dict[str, Any] = param({"a": {"b": 1}}, "a table")) -> dict[str, Any]:
        return filled

    first, second = Tables(), Tables()
    first.empty["a"] = first.filled["a"]["b"] = function()["a"]["b"] = 2
    assert (second.empty, second.filled, Tables().filled) == ({}, {"a": {"b": 1}}, {"a": {"b": 1}})
    assert function() == {"a": {"b": 1}}
