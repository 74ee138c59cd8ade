"""``fs.compare`` and ``fs.tune``: arguments, folders, and the same numbers in any number of processes."""

from __future__ import annotations

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
        ({"jobs": 0}, "The number of jobs must be a whole number of at least 1"),
        ({"jobs": "2"}, "The number of jobs must be"),
        ({"baseline": "c"}, "Unknown method 'c'"),
        ({"baselines": ("locall",)}, "'local' or 'pooled'"),
        ({"round": 3}, "Unknown argument of compare 'round'"),
    ],
)
def test_bad_arguments_write_nothing(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    given: dict[str, Any] = {"methods": METHODS, "data": sites(), "seeds": 2, "out": tmp_path / "out", **HOW, **change}
    with pytest.raises(fs.InputError, match=message):
        fs.compare(given.pop("methods"), given.pop("data"), **given)
    assert not (tmp_path / "out").exists()


def test_a_tuned_comparison_uses_new_seeds_and_writes_its_results(tmp_path: Path) -> None:
    tuned = fs.tune(METHODS, sites(), trials=1, seeds=2, **HOW)
    result = tuned.compare(2, out=tmp_path / "final", baseline="b")
    assert [outcome.seed for outcome in result.outcomes["a"]] == [2, 3] and result.baseline == "b"
    assert {"compare.json", "verdicts.json", "table.md", "ranking.png"} <= {
        p.name for p in (tmp_path / "final").iterdir()
    }
    with pytest.raises(fs.InputError, match="not empty"):
        tuned.compare(2, out=tmp_path / "final")


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
