"""``fs.compare`` and ``fs.tune``: arguments, folders, and the same numbers in any number of processes."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fedstrata as fs


def sites(rows: int = 20, seed: int = 0) -> fs.FederatedData:
    generator = torch.Generator().manual_seed(seed)
    inputs = [torch.randn(rows, 3, generator=generator) for _ in range(3)]
    return fs.FederatedData.from_arrays([(x, (x[:, 0] > 0).long()) for x in inputs])


def unseeded(seed: int) -> fs.Problem:
    return fs.erm(nn.Linear(3, 2))


METHODS: dict[str, Any] = {"a": (unseeded, fs.FedAvg(lr=0.1)), "b": (unseeded, fs.FedAvg(lr=0.5))}
HOW: dict[str, Any] = {"rounds": 2, "batch_size": 4, "threads": 1}


def test_models_that_are_not_seeded_are_the_same_in_every_process() -> None:
    before = torch.get_rng_state()
    alone, together = (fs.compare(METHODS, sites(), seeds=3, jobs=jobs, **HOW) for jobs in (1, 2))
    values = [[row["values"]["loss"] for row in result.rows] for result in (alone, together)]
    assert values[0] == values[1] and len({v for group in values[0] for v in group}) == 6
    assert torch.equal(before, torch.get_rng_state()), "the caller's generator is left alone"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"methods": {"a": (nn.Linear(3, 2), fs.FedAvg())}}, "The methods must be a dict of label"),
        ({"methods": {"a": (unseeded, fs.FedAvg)}}, "The algorithm of 'a' must be an Algorithm"),
        ({"methods": {}}, "The methods must be a dict of label"),
        ({"data": [1, 2]}, "The data must be FederatedData"),
        ({"seeds": 0}, "The seeds must be a whole number from 1 to 10,000"),
        ({"seeds": [1, 1]}, "different whole numbers"),
        ({"seeds": 10**30}, "The seeds must be"),
        ({"seeds": range(10**9)}, "as many different whole numbers"),
        ({"jobs": 0}, "The number of jobs must be a whole number of at least 1"),
        ({"jobs": "2"}, "The number of jobs must be"),
        ({"baseline": "c"}, "Unknown method 'c'"),
        ({"baselines": ("locall",)}, "'local', 'pooled' or both"),
        ({"baselines": 3}, "'local', 'pooled' or both.* Got 3"),
        ({"baselines": [["local"]]}, "'local', 'pooled' or both"),
        ({"baselines": ["local", "local"]}, "once each"),
        ({"baseline": ["a"]}, r"Unknown method \['a'\]"),
        ({"measure": ["loss"]}, r"Unknown measure \['loss'\]"),
        ({"round": 3}, "Unknown argument of compare 'round'"),
    ],
)
def test_bad_arguments_write_nothing(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    given: dict[str, Any] = {"methods": METHODS, "data": sites(), "seeds": 2, "out": tmp_path / "out", **HOW, **change}
    with pytest.raises(fs.InputError, match=message):
        fs.compare(given.pop("methods"), given.pop("data"), **given)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("search", "message"),
    [
        (3, "search of the tune table must be a table. Got 3"),
        ({"a": 3}, "search.a of the tune table must be a table. Got 3"),
        ({"a": {"lr": 3}}, "search.a.lr of the tune table must be a list of 2 numbers. Got 3"),
    ],
)
def test_ranges_of_another_form_are_refused(search: Any, message: str) -> None:
    with pytest.raises(fs.InputError, match=message):
        fs.tune(METHODS, sites(), search=search, **HOW)


def test_an_option_that_is_not_a_number_is_not_searched(tmp_path: Path) -> None:
    methods = {"a": (unseeded, fs.FedAvg()), "b": (unseeded, fs.Scaffold())}
    with pytest.raises(fs.InputError, match="search range of option must be within its limits: 'I' or 'II'"):
        fs.tune(methods, sites(), search={"b": {"option": (1, 2)}}, trials=1, out=tmp_path / "out", **HOW)
    assert not (tmp_path / "out").exists(), "noticed before the trials of the other method"


@pytest.mark.parametrize("name", ["trials", "seeds"])
def test_a_search_without_end_is_refused(name: str) -> None:
    with pytest.raises(fs.InputError, match=f"The {name} of the tune table must be a whole number from 1 to 10000"):
        fs.tune(METHODS, sites(), **{name: 10**12}, **HOW)


def test_unknown_labels_and_measures_of_a_result_are_named() -> None:
    tuned = fs.tune(METHODS, sites(), trials=1, seeds=1, **HOW)
    with pytest.raises(fs.InputError, match="Unknown method 'c'"):
        tuned.plot_response("c")
    with pytest.raises(fs.InputError, match="Unknown measure 'lost'"):
        tuned.compare(1).differences("lost")


def test_a_tuned_comparison_uses_new_seeds_and_writes_its_results(tmp_path: Path) -> None:
    tuned = fs.tune(METHODS, sites(), trials=1, seeds=2, **HOW)
    result = tuned.compare(2, out=tmp_path / "final", baseline="b")
    assert [outcome.seed for outcome in result.outcomes["a"]] == [2, 3] and result.baseline == "b"
    assert {"compare.json", "verdicts.json", "table.md", "ranking.png"} <= {
        p.name for p in (tmp_path / "final").iterdir()
    }
    assert not result.warnings
    with pytest.raises(fs.InputError, match="not empty"):
        tuned.compare(2, out=tmp_path / "final")
    (warning,) = tuned.compare(range(1, 4)).warnings
    assert warning.startswith("Warning: seed 1 had trials") and "optimistic" in warning


def test_a_frame_of_trials_has_a_column_for_each_hyperparameter() -> None:
    pytest.importorskip("pandas")
    frame = fs.tune({"a": METHODS["a"]}, sites(), trials=1, seeds=1, extend=False, **HOW).frame()
    assert {"method", "trial", "lr", "auc"} <= {*frame.columns} and "options" not in frame.columns


def test_files_that_block_a_search_are_noticed_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("trials.json", "tune.md", "search.png", "response-b.png"):
        (tmp_path / name / name).mkdir(parents=True)
        with monkeypatch.context() as patch:
            patch.setattr("fedstrata.experiments.object_methods.train", never)
            with pytest.raises(fs.InputError, match=f"{name} is a directory"):
                fs.tune(METHODS, sites(), trials=1, seeds=1, out=tmp_path / name, resume=True, **HOW)
        assert [path.name for path in (tmp_path / name).iterdir()] == [name]


def test_a_search_is_not_resumed_on_other_data_or_measures(tmp_path: Path) -> None:
    options = {"trials": 1, "seeds": 1, "out": tmp_path / "out", **HOW}
    fs.tune(METHODS, sites(), **options)
    fs.tune(METHODS, sites(), resume=True, **options)
    for data, more in ((sites(seed=1), {}), (sites(), {"evaluate": fs.Evaluation(clients="none")})):
        with pytest.raises(fs.InputError, match="a search with different settings"):
            fs.tune(METHODS, data, resume=True, **options, **more)


@pytest.mark.parametrize("command", ["compare", "tune"])
def test_a_directory_of_something_else_is_not_resumed(command: str, fedstrata: Any, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    file = tmp_path / "e.toml"
    file.write_text("[train]\nrounds = 1\n")
    code, _, err = fedstrata(command, file, "--algorithms", "fedavg", "--out", tmp_path / "out", "--resume")
    assert code == 2 and "nothing to resume" in err
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["notes.txt"]


@pytest.mark.parametrize("name", ["nowhere/x.png", "x.foo", "."])
def test_the_demo_refuses_a_file_that_it_cannot_write(name: str, fedstrata: Any, tmp_path: Path) -> None:
    code, _, err = fedstrata("demo", "--out", tmp_path / name)
    assert code == 2 and "a .png, .pdf or .svg file" in err and not list(tmp_path.iterdir())


def never(*_: Any, **__: Any) -> None:
    raise AssertionError("a run has started")


LABELS = {
    "": "a name with letters or digits",
    " / ": "a name with letters or digits",
    "x" * 300: r"at most 100 bytes long, since files are named after it. Got 'xxxxxxxxxxxxxxxxxxxx... \(300 bytes\)'",
    "é" * 60: r"\(120 bytes\)",
    "two\nlines": "one line without control characters",
    "bell\a": "one line without control characters",
    "half \ud800": "one line without control characters",
    "a/": "distinct from 'a' in its letters and digits",
}


@pytest.mark.parametrize("label", LABELS)
@pytest.mark.parametrize("call", [fs.compare, fs.tune])
def test_labels_that_cannot_name_files_are_refused(call: Any, label: str, tmp_path: Path) -> None:
    methods = METHODS | {label: METHODS["b"]}
    with pytest.raises(fs.InputError, match=rf"label of a method must be .*{LABELS[label]}"):
        call(methods, sites(), out=tmp_path / "out", evaluate=never, **HOW)
    assert not (tmp_path / "out").exists()


def test_labels_of_variants_are_checked_too(fedstrata: Any, tmp_path: Path) -> None:
    for label, message in {"x" * 300: "at most 100 bytes long", "two\\nlines": "one line", "//": "letters or"}.items():
        file = tmp_path / "e.toml"
        file.write_text(f'[train]\nrounds = 1\n[variants.a]\n[variants."{label}".algorithm]\nlr = 0.2\n')
        for command in ("compare", "tune"):
            code, _, err = fedstrata(command, file, "--out", tmp_path / "out")
            assert code == 2 and message in err.replace("\n", " "), err
    assert not (tmp_path / "out").exists()


def test_a_label_may_have_a_slash(tmp_path: Path) -> None:
    fs.compare({"lr/10": METHODS["a"], "../lr": METHODS["b"]}, sites(), seeds=1, out=tmp_path / "out", **HOW)
    assert {p.name for p in (tmp_path / "out").iterdir() if p.is_dir()} == {"lr-10-seed0", "lr-seed0"}
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("call", [fs.compare, fs.tune])
def test_an_unknown_measure_is_found_before_anything_runs(call: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("fedstrata.experiments.object_methods.train", never)
    for evaluate, known in ((None, "accuracy, .*loss, loss_mean"), (lambda *_: {"mine": 1.0}, "Known: .*mine")):
        with pytest.raises(fs.InputError, match=rf"Unknown measure 'acuracy'.*{known}"):
            call(METHODS, sites(), measure="acuracy", evaluate=evaluate, out=tmp_path / "out", **HOW)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("command", "key"), [("compare", "compare.measure"), ("tune", "compare.measure"), ("tune", "tune.measure")]
)
def test_a_measure_that_the_runs_do_not_have_is_found_before_they_start(
    command: str, key: str, fedstrata: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedstrata.experiments.config_methods.run_config", never)
    file = tmp_path / "e.toml"
    file.write_text("[train]\nrounds = 1\n")
    words = [command, file, "--algorithms", "fedavg", "--set", f"{key}=distance", "--out", tmp_path / "out"]
    code, _, err = fedstrata(*words)
    assert code == 2 and "Unknown measure 'distance'" in err and "accuracy_mean" in err
    assert not (tmp_path / "out").exists()


def test_pooled_training_has_no_measures_over_clients() -> None:
    result = fs.compare(METHODS, sites(), seeds=1, baselines=["pooled"], measure="loss_mean", **HOW)
    assert result.measure == "loss_mean"
    with pytest.raises(fs.InputError, match="Unknown measure 'distance'"):
        fs.compare(METHODS, sites(), seeds=1, baselines=["local", "pooled"], measure="distance", **HOW)


def bad_at(seed: int, bad: Any) -> Any:
    return bad if seed == 2 else unseeded(seed)


@pytest.mark.parametrize("call", [fs.compare, fs.tune])
@pytest.mark.parametrize(
    ("problem", "data", "message"),
    [
        (lambda seed: bad_at(seed, None), sites(), r"function of 'b' returns must be Problem. Got 'NoneType'.*seed 2"),
        (lambda seed: bad_at(seed, fs.erm(nn.Linear(4, 2))), sites(), r"\(seed 2\)"),
        (unseeded, lambda seed: sites() if seed < 2 else [], r"must be FederatedData. Got 'list'.*seed 2"),
    ],
)
def test_every_seed_is_checked_before_the_first_run(
    call: Any, problem: Any, data: Any, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedstrata.experiments.object_methods.train", never)
    methods = METHODS | {"b": (problem, fs.FedAvg())}
    with pytest.raises(fs.InputError, match=message):
        call(methods, data, seeds=3, out=tmp_path / "out", **HOW)
    assert not (tmp_path / "out").exists()


def accuracy_like(problem: Any, data: Any, x: torch.Tensor, y: Any) -> dict[str, float]:
    return {"loss": 1.0, "size": float(x.norm())}


def shifted(problem: Any, data: Any, x: Any, y: Any, by: float = 0.0) -> dict[str, float]:
    return {"loss": sum((1.0, 2.0, by))}


def shifting(by: float) -> Any:
    return lambda problem, data, x, y: {"loss": by}


EVALUATIONS: list[Any] = [
    shifted,
    partial(shifted, by=1.0),
    partial(shifted, by=2.0),
    shifting(1.0),
    shifting(2.0),
    None,
    fs.Evaluation(clients="none"),
    accuracy_like,
    lambda problem, data, x, y: {"loss": 1.0},
    lambda problem, data, x, y: {"loss": 2.0},
    lambda problem, data, x, y: {"loss": 1.0, "more": sum(1.0 for _ in range(2))},
]


@pytest.mark.parametrize("baselines", [(), ("local",)])
@pytest.mark.parametrize("first", range(len(EVALUATIONS)))
def test_a_comparison_is_not_resumed_with_another_evaluation(
    first: int, baselines: tuple[str, ...], tmp_path: Path, no_pictures: None
) -> None:
    how: dict[str, Any] = {"seeds": 1, "out": tmp_path / "out", "baselines": baselines, **HOW}
    result = fs.compare({"a": METHODS["a"]}, sites(), evaluate=EVALUATIONS[first], **how)
    again = fs.compare({"a": METHODS["a"]}, sites(), evaluate=EVALUATIONS[first], resume=True, **how)
    assert again.rows == result.rows
    before = {p: p.read_bytes() for p in (tmp_path / "out").rglob("*") if p.is_file()}
    for other in EVALUATIONS[:first] + EVALUATIONS[first + 1 :]:
        with pytest.raises(fs.InputError, match=r"cannot be resumed with other settings: evaluate\."):
            fs.compare({"a": METHODS["a"]}, sites(), evaluate=other, resume=True, **how)
    assert before == {p: p.read_bytes() for p in (tmp_path / "out").rglob("*") if p.is_file()}


def test_the_default_evaluation_is_that_of_the_defaults(tmp_path: Path, no_pictures: None) -> None:
    how: dict[str, Any] = {"seeds": 1, "out": tmp_path / "out", **HOW}
    fs.compare({"a": METHODS["a"]}, sites(), **how)
    fs.compare({"a": METHODS["a"]}, sites(), evaluate=fs.Evaluation(), resume=True, **how)
