"""Tuning a configuration file, and comparing what came out: at once, or later from what was written."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from fedstrata.core.errors import InputError
from fedstrata.experiments.config import parse, read
from fedstrata.experiments.config_methods import config_methods
from fedstrata.experiments.config_tune import with_one_measure, with_one_split
from fedstrata.experiments.tune import Tuned
from support import without_seconds

FILE = """
[data]
clients = 3
imbalance = 0.3
holdout = 0.3
[model]
name = "logreg"
[problem]
loss = "binary_cross_entropy"
[algorithm]
steps = 2
[train]
rounds = 2
batch_size = 8
threads = 1
[tune]
trials = 2
seeds = 2
extend = false
[tune.search.pooled]
lr = [2.0, 3.0]
[compare]
measure = "accuracy"
baselines = ["pooled"]
"""
VARIANTS = """
[variants.a.algorithm]
lr = 0.02
[variants.b.algorithm]
name = "scaffold"
"""


def values(folder: Path) -> list[Any]:
    return without_seconds([row["values"] for row in json.loads((folder / "compare.json").read_text())])


# --- a later comparison ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["variants", "algorithms"])
def test_a_later_comparison_repeats_the_final_runs(
    kind: str, fedstrata: Any, write: Any, tmp_path: Path, no_pictures: None
) -> None:
    """With the best settings, also of the baselines, on the same split, and with seeds that no trial has used."""
    path, out = write(FILE, VARIANTS if kind == "variants" else ""), tmp_path / "out"
    names = [] if kind == "variants" else ["--algorithms", "fedavg,scaffold"]
    code, printed, err = fedstrata("tune", path, *names, "--seeds", 2, "--out", out, "--quiet")
    assert code == 0, err
    later = out / "best.toml"
    if kind == "variants":
        later = tmp_path / "later.toml"
        later.write_text(f'tuned = "out/tuned.toml"\n{FILE}{VARIANTS}')
        assert "[baselines.pooled]" in printed and "[variants.a.algorithm]" in printed
    code, _, err = fedstrata("compare", later, *names, "--seeds", 2, "--out", tmp_path / "later", "--quiet")
    assert code == 0, err
    assert values(tmp_path / "later") == values(out / "final")
    run = tomllib.loads((tmp_path / "later" / "pooled-seed2" / "config.toml").read_text())
    trials = [t for t in json.loads((out / "trials.json").read_text()) if "pooled" in t.values()]
    assert run["algorithm"]["lr"] == trials[0]["options"]["lr"] and run["data"]["seed"] == 0
    assert (tmp_path / "later" / "pooled-seed3").is_dir() and not (tmp_path / "later" / "pooled-seed0").exists()


def test_baselines_that_are_not_tuned_take_the_best_settings_of_the_first_method(
    fedstrata: Any, write: Any, tmp_path: Path, no_pictures: None
) -> None:
    path, out = write(FILE.replace("[tune.search.pooled]\nlr = [2.0, 3.0]\n", ""), VARIANTS), tmp_path / "out"
    words = ("tune", path, "--seeds", 1, "--out", out, "--json", "--quiet", "--set", "tune.baselines=false")
    code, printed, err = fedstrata(*words)
    assert code == 0, err
    result = json.loads(printed)
    assert [*result["best"]] == ["a", "b"] and [row["variant"] for row in result["test"]] == ["a", "b", "pooled"]
    run = tomllib.loads((out / "final" / "pooled-seed2" / "config.toml").read_text())
    assert run["algorithm"]["lr"] == result["best"]["a"]["lr"]
    assert "baselines" not in tomllib.loads((out / "tuned.toml").read_text())
    own = ("--set", "baselines.pooled={name='scaffold', lr=0.7}", "--set", "tune.trials=1")
    code, _, err = fedstrata(*words[:4], "--out", tmp_path / "own", *words[6:], *own)
    assert code == 0, err
    run = tomllib.loads((tmp_path / "own" / "final" / "pooled-seed2" / "config.toml").read_text())
    assert (run["algorithm"]["name"], run["algorithm"]["lr"]) == ("scaffold", 0.7), "that of the file"
    assert {"baseline", "measure", "verdicts", "conditions", "warnings"} <= result.keys() and len(
        result["verdicts"]
    ) == 2


def test_the_algorithm_of_a_baseline_may_be_named() -> None:
    config = parse({"baselines": {"pooled": {"name": "scaffold", "lr": 0.3}, "local": {"steps": 3}}}, "here")
    _, methods = config_methods(config, ["fedavg", "pooled", "local"])
    used = {label: method.algorithm.to_table() for label, method in methods.items()}
    assert (used["pooled"]["name"], used["pooled"]["lr"]) == ("scaffold", 0.3)
    assert (used["local"]["name"], used["local"]["steps"]) == ("fedavg", 3)
    with pytest.raises(InputError, match=r"Unknown baseline 'poled'\. Did you mean 'pooled'"):
        parse({"baselines": {"poled": {}}}, "here")
    _, methods = config_methods(parse({"baselines": {"pooled": {"mu": 1.0}}}, "here"), ["fedavg", "pooled"])
    with pytest.raises(InputError, match="Unknown option of fedavg 'mu'"):
        _ = methods["pooled"].algorithm


def test_a_tuned_file_says_which_seeds_the_trials_have_used(write: Any, tmp_path: Path) -> None:
    text = '[variants.a.algorithm]\nlr = 0.5\n[variants.b.data]\nname = "breast_cancer"\n'
    path = write(f'tuned = "tuned.toml"\n[algorithm]\nsteps = 2\n{text}')
    tuned = tmp_path / "tuned.toml"
    tuned.write_text("trial_seeds = [0, 1, 2]\ndata_seed = 7\n[variants.a.algorithm]\nlr = 0.3\n")
    config = read(path)
    assert config.train.seed == 3 and config.data.seed == 7 and config.variant("b").data.seed == 7
    assert config.variant("a").algorithm.options == {"steps": 2, "lr": 0.3}
    assert read(path, ["train.seed=1", "data.seed=2"]).train.seed == 1
    assert read(path, ["data.seed=2"]).data.seed == 2 and read(path, tuned=False).train.seed == 0
    path.write_text(f"{path.read_text()}[train]\nseed = 40\n")
    assert read(path).train.seed == 40, "no trial has used it"
    tuned.write_text("trial_seeds = 3\n")
    with pytest.raises(InputError, match=r"key trial_seeds must be a list of whole numbers.*tuned\.toml"):
        read(path)


# --- one measure and one split ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("trials", "final", "expected"),
    [
        (None, "auc", ("auc", "auc")),
        ("auc", None, ("auc", "auc")),
        ("loss", "auc", ("loss", "auc")),
        (None, "bytes_up", (None, "bytes_up")),
        (None, None, (None, None)),
    ],
)
def test_trials_and_final_runs_have_one_measure(trials: Any, final: Any, expected: Any) -> None:
    tables = {key: {"measure": name} for key, name in (("tune", trials), ("compare", final)) if name}
    config = with_one_measure(parse(tables, "here"))
    assert (config.tune.measure, config.compare.measure) == expected


def test_variants_with_other_data_have_one_split_too() -> None:
    variants = {"a": {}, "b": {"data": {"name": "breast_cancer", "holdout": 0.3}}}
    config, notes = with_one_split(parse({"variants": variants, "train": {"seed": 4}}, "here"))
    assert config.variant("b").data.seed == 4 and "data.seed = 4" in notes[0]
    assert with_one_split(parse({"variants": {"a": {}}}, "here"))[1] == []


def test_test_rows_of_every_method_are_checked() -> None:
    variants = {"whole": {}, "split": {"data": {"holdout": 0.3}}}
    tables = {"data": {"clients": 3}, "model": {"name": "logreg"}, "train": {"rounds": 1}, "variants": variants}
    config = parse(tables | {"tune": {"trials": 1, "seeds": 1, "extend": False}}, "here")
    kind, methods = config_methods(config, None)
    tuned = Tuned(kind, methods, {}, {}, {}, "auc", [], range(1))
    (warning,) = tuned.seen([5, 6])
    assert warning.startswith("Warning: split: ") and "were rows of the trials" in warning


# --- before it starts ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    ["response-a.png", "response-pooled.png", "search.png", "tuned.toml", "final/compare.json", "final/plot.png"],
)
def test_files_that_block_the_results_are_noticed_before_the_search(
    name: str, fedstrata: Any, write: Any, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    (out / name).mkdir(parents=True)
    code, _, err = fedstrata("tune", write(FILE, VARIANTS), "--out", out, "--quiet")
    assert code == 2 and f"{name} is a directory" in " ".join(err.split()) and not (out / "trials").exists()


def test_a_search_whose_final_runs_do_not_have_the_measure_does_not_start(
    fedstrata: Any, write: Any, tmp_path: Path
) -> None:
    path, out = write(FILE, VARIANTS), tmp_path / "out"
    for measure, key in (("attacked_auc", "tune"), ("attacked_auc", "compare"), ("validation_auc", "compare")):
        code, _, err = fedstrata("tune", path, "--out", out, "--set", f"{key}.measure={measure}")
        assert code == 2 and f"Unknown measure '{measure}'" in err and not out.exists()


# --- pictures --------------------------------------------------------------------------------------------------------


def test_pictures_have_the_format_that_the_file_names(fedstrata: Any, write: Any, tmp_path: Path) -> None:
    path, out = write(FILE, VARIANTS, '[plot]\nformat = "svg"\n'), tmp_path / "out"
    code, printed, err = fedstrata("tune", path, "--seeds", 2, "--out", out, "--quiet")
    assert code == 0, err
    top = {file.name for folder in (out, out / "final") for file in folder.iterdir() if file.suffix in (".svg", ".png")}
    assert top == {
        "search.svg",
        *(f"response-{label}.svg" for label in ("a", "b", "pooled")),
        "plot.svg",
        "ranking.svg",
    }
    assert "plot.svg" in printed and "verdicts.json and the ranking" in " ".join(printed.split())
    (out / "final" / "ranking.svg").unlink()
    (out / "final" / "ranking.svg").mkdir()
    words = ("compare", path, "--out", out / "final", "--resume", "--set", "train.seed=2", "--set", "data.seed=0")
    code, _, err = fedstrata(*words)
    assert code == 2 and "ranking.svg is a directory" in " ".join(err.split())


def test_a_ranking_that_is_not_written_is_not_mentioned(fedstrata: Any, write: Any, tmp_path: Path) -> None:
    out = tmp_path / "out"
    code, printed, err = fedstrata("compare", write(FILE, VARIANTS), "--seeds", 1, "--out", out, "--quiet")
    assert code == 0 and not (out / "ranking.png").exists(), err
    assert "also has table.md and verdicts.json" in " ".join(printed.split()) and "and the ranking" not in printed
