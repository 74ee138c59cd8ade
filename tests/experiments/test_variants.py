"""Presets and variants of a configuration file: how they are merged, run, compared, tuned and drawn."""

from __future__ import annotations

import json
import tomllib
from collections import Counter
from pathlib import Path

import pytest
import torch

from fedstrata.algorithms import ALGORITHMS
from fedstrata.core.errors import Diverged, InputError
from fedstrata.core.options import options, param
from fedstrata.data import load
from fedstrata.experiments import config_methods
from fedstrata.experiments.build import Experiment, build_data
from fedstrata.experiments.config import Config, parse, presets, read
from fedstrata.experiments.methods import Trial, check_methods
from fedstrata.experiments.overlay import merge, slug
from fedstrata.experiments.tables import measured_in_all
from fedstrata.problems import PROBLEMS, ProblemKind
from fedstrata.training.metrics.catalogue import MEASURES

SMALL = """
[problem]
name = "quadratic"
clients = 3
dimension = 2
[algorithm]
name = "fedavg"
lr = 0.01
steps = 2
[train]
rounds = 3
"""

VARIANTS = """
[variants."noise = 0.5".problem]
noise = 0.5
[variants.scaffold]
algorithm = { name = "scaffold", lr = 0.02 }
[variants.base]
"""

PRESETS = """
[model]
hidden = [8]
[data]
clients = 4
partition = { name = "dirichlet", alpha = 0.3 }
[train]
rounds = 9
batch_size = 8
[preset.cpu.train]
rounds = 5
[preset.paper]
model = { name = "lenet5" }
data = { partition = { alpha = 0.1 } }
tune = { trials = 3 }
[preset.paper.variants.slow.algorithm]
lr = 0.001
"""


@pytest.mark.parametrize(
    ("base", "over", "result"),
    [
        ({"a": 1, "b": 2}, {"b": 3}, {"a": 1, "b": 3}),
        ({"t": {"a": 1, "b": [1, 2]}}, {"t": {"b": [3]}}, {"t": {"a": 1, "b": [3]}}),
        ({"t": {"name": "x", "a": 1}}, {"t": {"name": "x", "b": 2}}, {"t": {"name": "x", "a": 1, "b": 2}}),
        ({"t": {"name": "x", "a": 1}}, {"t": {"name": "y"}}, {"t": {"name": "y"}}),
        ({"t": {"name": "x", "a": 1}}, {"t": "y"}, {"t": "y"}),
        ({"t": "x"}, {"t": {"name": "y"}}, {"t": {"name": "y"}}),
        ({"lr": {"schedule": "step", "at": [1]}}, {"lr": {"schedule": "cube_root"}}, {"lr": {"schedule": "cube_root"}}),
        ({"t": {"name": {"a": 1}}}, {"t": {"name": {"b": 1}}}, {"t": {"name": {"a": 1, "b": 1}}}),
    ],
)
def test_merge(base, over, result):
    before = json.dumps([base, over])
    assert merge(base, over) == result
    assert json.dumps([base, over]) == before


def test_the_first_preset_is_the_default(write):
    path = write(PRESETS)
    assert presets(path) == ["cpu", "paper"]
    assert read(path) == read(path, preset="cpu")
    assert read(path).train.rounds == 5 and read(path).train.batch_size == 8 and read(path).variants == {}


def test_a_preset_may_hold_anything_and_overrides_come_last(write):
    config = read(write(PRESETS), ["train.rounds=2", "model.augment=['flip']"], "paper")
    assert config.train.rounds == 2 and config.tune.trials == 3
    assert config.data.partition == {"name": "dirichlet", "alpha": 0.1} and config.data.clients == 4
    assert config.model.to_table() == {"name": "lenet5", "augment": ["flip"]}, "hidden of mlp is forgotten"
    assert config.variant("slow").algorithm.options == {"lr": 0.001}


POSITIVES = """
[data]
clients = 2
imbalance = 0.1
[variants.rest]
[variants.some.data]
positives = [3, 5]
[variants.unknown.data]
positives = [3, 10]
"""


def test_a_file_chooses_the_positive_classes(write):
    config = read(write(POSITIVES))
    digits = load("digits")
    for name, positives in (("rest", range(5)), ("some", [3, 5])):
        data = build_data(config.variant(name))
        whole = digits.imbalance(0.1, positives=positives)
        assert sum(data.sizes) == len(whole) and data.train.class_counts.sum(0)[1] == whole.targets.sum()
        assert data.test is not None and torch.equal(data.test[1], whole.test_targets)
    with pytest.raises(InputError, match=r"different classes from 0 to 9, at least one and not all\. Got \[3, 10\]"):
        build_data(config.variant("unknown"))


@pytest.mark.parametrize(
    ("text", "preset", "message"),
    [
        (PRESETS, "papr", "Unknown preset 'papr'. Did you mean 'paper'? Known: cpu, paper."),
        (SMALL, "cpu", "Unknown preset 'cpu': the file has no [preset.NAME] tables."),
        ("[preset]\ncpu = 3", None, "The key preset must be tables such as [preset.cpu.train]. Got {'cpu': 3}."),
        ("[preset.cpu.preset.x]", None, "A preset cannot contain presets. Got [preset.cpu.preset]."),
        ("[preset.cpu.train]\nround = 3", None, "Did you mean 'train.rounds'?"),
    ],
)
def test_bad_presets(write, text, preset, message):
    with pytest.raises(InputError) as error:
        read(write(text), preset=preset)
    assert message in str(error.value) and "experiment.toml" in str(error.value)


def test_variants_change_the_experiment_and_nothing_else(write):
    config = read(write(SMALL, VARIANTS))
    assert list(config.variants) == ["noise = 0.5", "scaffold", "base"]
    noisy = config.variant("noise = 0.5")
    assert noisy.problem.options == {"clients": 3, "dimension": 2, "noise": 0.5}
    assert noisy.label == "noise = 0.5" and noisy.variants == {}
    plain = {"label": None, "variants": config.variants}
    assert config.variant("base").replace(**plain) == config
    assert noisy.replace(**plain, problem=config.problem) == config


def test_another_algorithm_keeps_the_options_that_it_has_too():
    raw = {
        "algorithm": {"name": "fedprox", "lr": 0.3, "steps": {"epochs": 2}, "mu": 0.5},
        "algorithms": {"scaffold": {"server_lr": 0.7}},
        "variants": {"other": {"algorithm": {"name": "scaffold", "lr": 0.2}}, "same": {"algorithm": {"mu": 0.1}}},
    }
    config = parse(raw, "here")
    assert config.variant("other").algorithm.to_table() == {
        "name": "scaffold",
        "lr": 0.2,
        "steps": {"epochs": 2},
        "server_lr": 0.7,
    }
    assert config.variant("same").algorithm.options == {"lr": 0.3, "steps": {"epochs": 2}, "mu": 0.1}


def test_another_problem_keeps_the_options_that_it_has_too(monkeypatch):
    @options("the other problem")
    def other(model, loss: str = param("squared", "a loss"), gamma: float = param(1.0, "a number")):
        raise NotImplementedError

    monkeypatch.setitem(PROBLEMS, "other", ProblemKind(other))
    raw = {
        "problem": {"loss": "squared", "batchnorm": "group"},
        "variants": {"o": {"problem": {"name": "other", "gamma": 2.0}}},
    }
    assert parse(raw, "here").variant("o").problem.to_table() == {"name": "other", "loss": "squared", "gamma": 2.0}


def test_another_model_or_partition_keeps_nothing():
    raw = {
        "model": {"hidden": [8]},
        "data": {"clients": 3, "partition": {"name": "dirichlet", "alpha": 1.0}},
        "variants": {"v": {"model": {"name": "logreg"}, "data": {"partition": {"name": "shards", "per_client": 2}}}},
    }
    config = parse(raw, "here").variant("v")
    assert config.model.options == {} and config.data.clients == 3
    assert config.data.partition == {"name": "shards", "per_client": 2}


BAD = {
    "a wrong value": (
        {"train": {"rounds": "x"}},
        "The key train.rounds must be a whole number of at least 1.",
    ),
    "a wrong key": ({"train": {"round": 1}}, "Did you mean 'train.rounds'?"),
    "a wrong table": ({"problem": "erm"}, "The key problem must be"),
    "an unknown algorithm": ({"algorithm": {"name": "fedavgg"}}, "Unknown algorithm 'fedavgg'"),
    "an unknown problem": ({"problem": {"name": "ermm"}}, "Unknown problem 'ermm'"),
    "variants": ({"variants": {}}, "A variant cannot change variants"),
    "a preset": ({"preset": {}}, "A variant cannot change preset"),
    "what a run does not depend on": ({"plot": {"axis": "steps"}}, "A variant cannot change plot"),
    "the seed": ({"train": {"seed": 3}}, "A variant cannot change train.seed"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_variant_is_named(case):
    over, message = BAD[case]
    with pytest.raises(InputError) as error:
        parse({"variants": {"good": {}, "my variant": over}}, "file.toml")
    assert message in str(error.value) and str(error.value).endswith("(variant 'my variant' of file.toml)")


def test_labels_need_distinct_directories():
    assert slug("gamma = 0.1") == "gamma-0.1" and slug("../up") == "up" and slug("γ = 1e-3 (α)") == "γ-1e-3-α"
    with pytest.raises(InputError, match=r"distinct from 'a b' in its letters and digits. Got 'a=b'"):
        parse({"variants": {"a b": {}, "a=b": {}}}, "here")
    with pytest.raises(InputError, match=r"must be a name with letters or digits. Got '=='"):
        parse({"variants": {"==": {}}}, "here")
    with pytest.raises(InputError, match=r"Unknown variant 'bas'. Did you mean 'base'"):
        parse({"variants": {"base": {}}}, "here").variant("bas")


def test_compare_runs_the_variants_and_resumes_with_more(fedstrata, write, tmp_path, no_pictures):
    path, out = write(SMALL, VARIANTS, "[compare]\nseeds = 2\n"), tmp_path / "out"
    code, printed, progress = fedstrata("compare", path, "--out", out)
    assert code == 0 and "noise = 0.5" in printed and "2 seeds" in printed
    folders = [f"{v}-seed{s}" for v in ("noise-0.5", "scaffold", "base") for s in (0, 1)]
    assert sorted(p.name for p in out.iterdir() if p.is_dir()) == sorted(folders)
    assert "run 4 of 6, scaffold seed 1: round 3/3" in progress
    rows = json.loads((out / "compare.json").read_text())
    assert [r["variant"] for r in rows] == ["noise = 0.5", "scaffold", "base"] and rows[0]["loss"] > rows[2]["loss"]
    more = (
        SMALL + VARIANTS + '[variants.more.algorithm]\nname = "fedprox"\n[plot]\nlog = ["loss"]\n[tune]\ntrials = 2\n'
    )
    path.write_text(more)
    code, _, progress = fedstrata("compare", path, "--out", out, "--seeds", 1, "--resume")
    assert code == 0 and [line.split(":")[0] for line in progress.splitlines()] == ["run 4 of 4, more seed 0"]


def test_square_brackets_in_a_label_are_printed(fedstrata, write, no_pictures):
    path = write(SMALL, '[variants."steps [more]".algorithm]\nsteps = 3\n')
    code, printed, progress = fedstrata("compare", path)
    assert code == 0 and "steps [more]" in printed and "steps [more] seed 0: round 3/3" in progress


def test_trials_are_ranked_by_a_measure_that_all_of_them_have(fedstrata, write, tmp_path, monkeypatch, no_pictures):
    real = config_methods.ConfigMethod.measures
    left_out = {"distance"}

    def spy(self, *rest):
        names = [*real(self, *rest), *(["accuracy"] if self.label == "scaffold" else [])]
        return [name for name in names if name not in left_out or (name == "loss" and self.label == "base")]

    monkeypatch.setattr(config_methods.ConfigMethod, "measures", spy)
    text = "[variants.scaffold.algorithm]\nname = 'scaffold'\n[variants.base]\n[tune]\ntrials = 1\n"
    out = tmp_path / "out"
    words = ("tune", write(SMALL, text), "--out", out, "--seeds", 0, "--json", "--quiet")
    first = json.loads(fedstrata(*words)[1])
    assert all(trial["loss"] > 0 and "accuracy" not in trial for trial in first["trials"])
    for path in (out / "trials").glob("base-*"):
        path.unlink()
    assert json.loads(fedstrata(*words, "--resume")[1]) == first
    for measure in ("accuracy", "los"):
        code, _, err = fedstrata("tune", write(SMALL, text, f"measure = '{measure}'\n"), "--quiet")
        assert code == 2 and f"Unknown measure '{measure}'." in err and "(tune.measure, " in err
    left_out.add("loss")
    code, _, err = fedstrata("tune", write(SMALL, text), "--quiet")
    assert code == 2 and "Name the measure to judge by: of distance, auc, accuracy, loss" in err


def test_a_variant_that_cannot_be_built_is_named_before_anything_runs(fedstrata, write, tmp_path):
    path = write(SMALL, VARIANTS, "[variants.bad.problem]\nnois = 1\n")
    code, _, err = fedstrata("compare", path, "--out", tmp_path / "out")
    assert code == 2 and "Did you mean 'noise'?" in err and "(variant 'bad')" in err
    assert not (tmp_path / "out").exists()
    code, _, err = fedstrata("run", path, "--variant", "bad")
    assert code == 2 and "Did you mean 'noise'?" in err and err.count("(variant 'bad')") == 1


@pytest.mark.parametrize("command", ["compare", "tune"])
def test_a_variant_of_the_wrong_class_is_named_before_anything_runs(fedstrata, write, tmp_path, monkeypatch, command):
    monkeypatch.setattr(ALGORITHMS["scaffold"], "full_participation", True)
    path = write(SMALL, "participation = 0.5\n", VARIANTS)
    code, _, err = fedstrata(command, path, "--out", tmp_path / "out")
    assert code == 2 and "The participation of scaffold must be" in err and "(variant 'scaffold')" in err
    assert not (tmp_path / "out").exists()


CANNOT_RUN = {
    "no auxiliary samples": ({"algorithm": {"name": "local_sgdm_rl"}}, "needs samples on the server"),
    "balanced batches": ({"train": {"sampling": "balanced", "batch_size": 3}}, "batch_size must be at least 10"),
    "no held-out data": ({"evaluate": {"clients": "test"}}, "Clients have no held-out test data"),
    "no such device": ({"train": {"device": "nosuch"}}, "The device 'nosuch' cannot be used"),
    "too many clients": ({"train": {"participation": 20}}, "from 1 to 10"),
    "noise and pre-training": (
        {"channel": {"clip": 1.0, "noise": 1.0}, "pretrain": {"rounds": 1}},
        "The noise of a channel does not cover a pre-training",
    ),
}


@pytest.mark.parametrize("case", CANNOT_RUN)
def test_every_configuration_is_checked_as_its_run_would_be(case):
    tables, message = CANNOT_RUN[case]
    config = parse({"variants": {"good": {}, "bad": tables}}, "here")
    _, methods = config_methods.config_methods(config, None)
    methods["good"].check(0, Trial())
    with pytest.raises(InputError, match=rf"{message}.*\(variant 'bad'\)$"):
        check_methods(methods, [0])


def test_trials_are_checked_on_their_validation_data(fedstrata, write, no_pictures):
    path = write(PRESETS.partition("[preset")[0], "[evaluate]\nclients = 'test'\n[tune]\ntrials = 1\n")
    code, _, err = fedstrata("tune", path, "--algorithms", "fedavg", "--set", "train.rounds=1", "--seeds", "0")
    assert code == 0, err


def test_one_variant_runs_alone_and_its_directory_runs_again(fedstrata, write, tmp_path, no_pictures):
    words = ("run", write(SMALL, VARIANTS), "--variant", "noise = 0.5", "--quiet", "--out", tmp_path / "a")
    assert fedstrata(*words)[0] == 0
    kept = tomllib.loads((tmp_path / "a/config.toml").read_text())
    assert kept["label"] == "noise = 0.5" and kept["problem"]["noise"] == 0.5
    assert not {"variants", "tune", "compare", "plot"} & set(kept)
    code, _, err = fedstrata("run", tmp_path / "a/config.toml", "--quiet", "--out", tmp_path / "b")
    assert code == 0, err
    assert (tmp_path / "a/model.safetensors").read_bytes() == (tmp_path / "b/model.safetensors").read_bytes()
    assert (tmp_path / "a/config.toml").read_text() == (tmp_path / "b/config.toml").read_text()
    words = (
        "compare",
        tmp_path / "a/config.toml",
        "--algorithms",
        "fedavg,fedprox",
        "--quiet",
        "--out",
        tmp_path / "c",
    )
    assert fedstrata(*words)[0] == 0
    assert "label" not in tomllib.loads((tmp_path / "c/fedprox-seed0/config.toml").read_text()), "no longer the variant"


def test_plot_labels_runs_by_their_variants(fedstrata, write, tmp_path, monkeypatch):
    drawn: dict = {}

    def record(groups, path, *_, **options):
        drawn[path] = groups, options

    monkeypatch.setattr("fedstrata.training.plots.plot", record)
    text = "[plot]\nmeasures = ['loss']\naxis = 'samples'\nlog = ['loss']\ntitle = 'Noise'\n"
    out = tmp_path / "out"
    assert fedstrata("compare", write(SMALL, VARIANTS, text), "--out", out, "--seeds", 2, "--quiet")[0] == 0
    assert fedstrata("plot", *sorted(out.glob("*-seed*")), "--out", tmp_path / "x.png")[0] == 0
    (compared, options), (plotted, default) = drawn[out / "plot.png"], drawn[tmp_path / "x.png"]
    assert default == {"range": "auto", "diverged": {}}
    assert fedstrata("plot", *out.glob("*-seed*"), "--out", tmp_path / "x.png", "--range", "full")[0] == 0
    assert drawn[tmp_path / "x.png"][1]["range"] == "full"
    assert {k: len(v) for k, v in compared.items()} == {k: len(v) for k, v in plotted.items()}
    assert set(compared) == {"noise = 0.5", "scaffold", "base"}
    assert options == {
        "measures": ["loss"],
        "axis": "samples",
        "log": ["loss"],
        "title": "Noise",
        "range": "auto",
        "diverged": {},
    }


@pytest.mark.parametrize("command", ["compare", "tune"])
def test_without_variants_and_algorithms_there_is_nothing_to_do(fedstrata, write, command):
    code, _, err = fedstrata(command, write(SMALL))
    assert code == 2 and "has no variants: add [variants.LABEL] tables" in err and "--algorithms" in err


def test_commands_take_a_preset(fedstrata, write, no_pictures):
    path = write(SMALL, VARIANTS, "[preset.short.train]\nrounds = 1\n[preset.long.train]\nrounds = 4\n")
    for command, count in (("run", 1), ("compare", 3)):
        words = (command, path, "--json", "--quiet", "--preset", "long")
        result = json.loads(fedstrata(*words)[1])
        rows = [result] if count == 1 else result["rows"]
        assert len(rows) == count and rows[0]["round"] == 4
    assert json.loads(fedstrata("run", path, "--json", "--quiet")[1])["round"] == 1


def test_tune_gives_every_hyperparameter_of_a_variant_the_same_number_of_trials(
    fedstrata, write, tmp_path, no_pictures
):
    search = '[tune]\ntrials = 3\nmeasure = "loss"\nextend = false\n'
    search += '[tune.search."noise = 0.5"]\nlr = [0.001, 0.1]\nsteps = [1, 4]\n'
    path, out = write(SMALL, VARIANTS, search), tmp_path / "out"
    code, printed, err = fedstrata("tune", path, "--out", out, "--json", "--quiet")
    assert code == 0, err
    result = json.loads(printed)
    assert result["trials"] == json.loads((out / "trials.json").read_text())
    trials = {label: [t for t in result["trials"] if t["variant"] == label] for label in result["best"]}
    origins = {label: Counter(t["origin"] for t in rows) for label, rows in trials.items()}
    assert origins == {
        "noise = 0.5": {"file": 1, "defaults": 1, "search": 6},
        "scaffold": {"file": 1, "defaults": 1, "search": 3},
        "base": {"file": 1, "defaults": 1, "search": 3},
    }
    assert result["notes"][0].startswith("noise = 0.5: 3 trials for each of 2 hyperparameters (lr, steps), and its own")
    for label, rows in trials.items():
        losses = [t["loss"] for t in rows]
        assert losses == sorted(losses) and result["best"][label] == rows[0]["options"]
        assert sorted(t["trial"] for t in rows) == list(range(len(rows)))
    assert trials["base"][0]["loss"] != trials["scaffold"][0]["loss"]
    searched = {k: {t["options"]["lr"] for t in rows if t["origin"] == "search"} for k, rows in trials.items()}
    assert not searched["base"] & searched["scaffold"], "labels have points of their own"
    assert set(result["best"]["noise = 0.5"]) == {"lr", "steps"} and "lr" in result["best"]["base"]
    tuned = tomllib.loads((out / "tuned.toml").read_text())
    assert tuned["variants"] == {label: {"algorithm": options} for label, options in result["best"].items()}
    assert {p.name for p in (out / "final").glob("scaffold-*")} == {f"scaffold-seed{s}" for s in (3, 4, 5)}, (
        "other seeds"
    )
    assert tomllib.loads((out / "final/scaffold-seed3/config.toml").read_text())["algorithm"]["name"] == "scaffold"
    before = {p.name: p.read_text() for p in (out / "trials").iterdir()}
    assert len(before) == 1 + 3 * 18 and "noise-0.5-0007-rounds3-seed2.json" in before, "one for each run"
    assert path.read_text() == SMALL + VARIANTS + search
    code, printed, _ = fedstrata("tune", path, "--out", out, "--quiet", "--resume", "--seeds", 0)
    assert code == 0 and '[variants."noise = 0.5".algorithm]' in printed and "spread" not in printed
    assert {p.name: p.read_text() for p in (out / "trials").iterdir()} == before


def test_a_trial_is_the_mean_over_its_seeds_and_fails_with_any_of_them(fedstrata, write, monkeypatch, no_pictures):
    text = "[variants.base]\n[tune]\ntrials = 2\nmeasure = 'loss'\nextend = false\n"
    text += "[tune.search.base]\nlr = [0.001, 0.01]\n"
    measured: dict[float, list[float]] = {}
    real = config_methods.run_config

    def spy(config, *rest, **options):
        run = real(config, *rest, **options)
        measured.setdefault(config.algorithm.options["lr"], []).append(run.history[-1]["loss"])
        return run

    monkeypatch.setattr(config_methods, "run_config", spy)
    code, printed, err = fedstrata("tune", write(SMALL, text), "--json", "--quiet", "--seeds", 0)
    assert code == 0, err
    trials = json.loads(printed)["trials"]
    assert len(trials) == 4 == len(measured), "those of the file, the defaults, and two of the search"
    for trial in trials:
        losses = measured[trial["options"]["lr"]]
        assert len(set(losses)) == 3 and trial["values"] == losses and trial["diverged"] == 0
        assert trial["loss"] == pytest.approx(sum(losses) / 3)
    best = trials[0]["options"]["lr"]

    def fragile(config, *rest, **options):
        if config.algorithm.options["lr"] == best and config.train.seed == 2:
            raise Diverged("with the last seed")
        return real(config, *rest, **options)

    monkeypatch.setattr(config_methods, "run_config", fragile)
    _, printed, _ = fedstrata("tune", write(SMALL, text), "--json", "--quiet", "--seeds", 0)
    *others, last = json.loads(printed)["trials"]
    assert last["options"]["lr"] == best and last["loss"] is None and last["diverged"] == 1
    assert last["values"] == [*measured[best][:2], None]
    assert others == trials[1:]


def test_the_tuned_tables_run_what_was_tried(fedstrata, write, monkeypatch, no_pictures):
    used = []
    real = config_methods.run_config

    def spy(config, *rest, **options):
        used.append(Experiment(config).algorithm)
        return real(config, *rest, **options)

    monkeypatch.setattr(config_methods, "run_config", spy)
    text = "[variants.decay.algorithm.lr]\nschedule = 'step'\nvalue = 0.01\nat = [2]\n[tune]\ntrials = 2\nseeds = 1\n"
    code, printed, _ = fedstrata("tune", write(SMALL, text), "--json", "--quiet", "--seeds", 1)
    assert code == 0 and len(used) == 5 and used[4] in used[:4] and len({a.lr.value for a in used[:4]}) == 4
    assert used[4].lr.at == (2,) and used[4].lr.value == json.loads(printed)["best"]["decay"]["lr"]["value"]


def test_trials_are_ranked_by_every_measure_in_the_right_direction() -> None:
    higher = {name for name in MEASURES if MEASURES[name].higher_is_better}
    plain = {"accuracy", "accuracy_mean", "accuracy_worst", "accuracy_worst_class"}
    plain |= {"auc", "auc_within", "auc_mean", "auc_worst"}
    adapted = {"adapted_accuracy", "adapted_auc", "personal_accuracy_mean", "personal_accuracy_worst"}
    assert higher == plain | adapted | {"attacked_accuracy", "attacked_auc"}


@pytest.mark.parametrize(
    ("search", "message"),
    [
        ("[tune.search.bas]\nlr = [0.1, 1.0]", "Unknown method 'bas'. Did you mean 'base'?"),
        ("[tune.search.base]\nlrr = [0.1, 1.0]", "Unknown option of fedavg 'lrr'"),
    ],
)
def test_a_search_of_an_unknown_name_is_refused(fedstrata, write, search, message):
    code, _, err = fedstrata("tune", write(SMALL, VARIANTS, search))
    assert code == 2 and message in err and "trial" not in err


def test_unset_tables_are_not_written():
    assert set(Config().to_toml()) == {
        "data",
        "model",
        "problem",
        "algorithm",
        "algorithms",
        "train",
        "evaluate",
        "tune",
    }


def test_another_algorithm_on_the_command_line_keeps_only_what_is_shared(write):
    path = write('[algorithm]\nname = "mfcgd"\ngamma = 0.2\nbeta = 0.3\nsteps = 4\n')
    assert read(path, ["algorithm.name=local_scgd"]).algorithm.options == {"steps": 4}
    assert read(path, ["algorithm.name=mfcgd"]).algorithm.options == {"gamma": 0.2, "beta": 0.3, "steps": 4}
    assert read(path, ["algorithm.name=afl", "algorithm.lr=0.5"]).algorithm.options == {"lr": 0.5}
    assert read(path, ["algorithm.name=nonsense"]).algorithm.name == "nonsense"


def test_every_key_that_applies_to_a_folder_is_written() -> None:
    table = {"folder": "sites", "directory": "cache", "holdout": 0.2, "support": 0.1, "auxiliary": 0, "seed": 3}
    written = parse({"data": table}, "here").to_toml()["data"]
    assert written == {k: v for k, v in table.items() if k != "auxiliary"} | {"sites": "federated"}


def test_what_is_set_on_the_command_line_wins(tmp_path: Path) -> None:
    path = tmp_path / "file.toml"
    path.write_text(
        """
        [problem]
        name = "auc"
        score = "none"
        [algorithm]
        name = "fgda"
        [algorithms.local_sgda]
        lr = 0.2
        [variants.one]
        algorithm = { name = "local_sgda", lr = 0.3 }
        [variants.two]
        problem = { name = "erm", loss = "binary_cross_entropy" }
        algorithm = { name = "fedavg" }
        """
    )
    config = read(path, ["algorithm.steps=3"])
    assert config.variant("one").algorithm.options == {"steps": 3, "lr": 0.3}
    config = read(path, ["algorithm.name=local_sgda", "algorithm.lr=0.7", "problem.score=sigmoid"])
    assert config.variant("one").algorithm.options["lr"] == config.options_of("local_sgda")["lr"] == 0.7
    assert config.variant("two").problem.options == {"loss": "binary_cross_entropy"}
    assert read(path, ["problem.name=erm"]).problem.options == {}
    assert read(path, ["problem.name=auc"]).problem.options == {"score": "none"}


OVERRIDDEN = """
[model]
name = "mlp"
hidden = [8]
[train]
rounds = 2
[algorithm]
name = "fedavg"
lr = 0.1
[variants.long.train]
rounds = 9
[variants.wide]
model = { hidden = [64] }
data = { clients = 3, partition = { name = "dirichlet", alpha = 0.3 } }
channel = { clip = 2.0 }
[variants.other]
algorithm = { name = "fedprox", lr = { schedule = "step", value = 0.5 }, mu = 0.2 }
problem = { name = "robust", gamma = 0.3, loss = "squared" }
[variants.plain]
"""


@pytest.mark.parametrize(
    ("setting", "read_off", "value"),
    [
        ("train.rounds=5", lambda c: c.train.rounds, 5),
        ("model.hidden=[4]", lambda c: c.model.options["hidden"], [4]),
        ("data.clients=7", lambda c: c.data.clients, 7),
        ("channel.clip=0.5", lambda c: c.channel.clip, 0.5),
        ("algorithm.lr=0.7", lambda c: c.algorithm.options["lr"], 0.7),
        ("problem.loss='cross_entropy'", lambda c: c.problem.options["loss"], "cross_entropy"),
        ("algorithm.name=scaffold", lambda c: c.algorithm.name, "scaffold"),
        ("problem.name=maml", lambda c: c.problem.name, "maml"),
        ("algorithm={name='qfedavg', q=1.0}", lambda c: c.algorithm.to_table(), {"name": "qfedavg", "q": 1.0}),
    ],
)
def test_a_setting_of_the_command_line_wins_in_every_variant(write, setting, read_off, value) -> None:
    config = read(write(OVERRIDDEN), [setting])
    for label in config.variants:
        assert read_off(config.variant(label)) == value, label


def test_a_setting_leaves_alone_what_variants_do_not_set(write) -> None:
    config = read(write(OVERRIDDEN), ["train.rounds=5", "algorithm.name=scaffold", "problem.name=maml"])
    assert config.variant("wide").model.options == {"hidden": [64]} and config.variant("wide").channel.clip == 2.0
    other = config.variant("other")
    assert set(other.algorithm.options) == {"lr"}, "mu is only of fedprox"
    assert other.problem.options == {"loss": "squared"}, "gamma is only of robust"


OTHERS = """
[algorithm]
name = "fedavg"
lr = { schedule = "step", value = 0.5 }
[pretrain]
rounds = 1
[data]
partition = { name = "dirichlet", alpha = 0.3 }
[variants.one]
algorithm = { name = "fedprox" }
model = { name = "cnn4" }
problem = { name = "robust" }
pretrain = { algorithm = "fedprox" }
data = { name = "mnist", partition = { name = "dominant" } }
[variants.two]
algorithm = { name = "scaffold", lr = { schedule = "round_decay", value = 0.5 } }
data = { name = "shakespeare" }
[variants.three]
algorithm = { name = "fedavg" }
"""


@pytest.mark.parametrize(
    ("setting", "reached"),
    [
        ("algorithm.mu=0.7", "one three"),
        ("algorithm.lr.factor=0.7", "one two three"),
        ("model.width=7", "one two three"),
        ("model.hidden=[7]", "two three"),
        ("model.augment=['flip']", "one two three"),
        ("problem.gamma=0.7", "one two three"),
        ("pretrain.mu=0.7", "one two three"),
        ("data.clients=7", "one two three"),
        ("data.options.length=7", "two three"),
        ("data.partition.alpha=0.7", "three"),
        ("data.partition.share=0.7", "one three"),
    ],
)
def test_a_setting_reaches_the_variants_that_name_another_object_with_that_option(write, setting, reached) -> None:
    """The others either have what the file itself has, or an object without the option."""
    path, (key, _, value) = write(OTHERS), setting.partition("=")
    config = read(path, [setting])
    expected = tomllib.loads(f"value = {value}")["value"]
    for label in config.variants:
        tables = config.variant(label).to_table()
        for part in key.split("."):
            tables = tables.get(part, {}) if isinstance(tables, dict) else {}
        assert (tables == expected) == (label in reached.split()), label


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (
            "algorithm.muu=3",
            "Unknown key 'algorithm.muu'. Did you mean 'algorithm.mu'? Known: algorithm.lr, algorithm.mu",
        ),
        ("model.widht=3", "Unknown key 'model.widht'. Did you mean 'model.width'?"),
        ("problem.gamm=3", "Unknown key 'problem.gamm'. Did you mean 'problem.gamma'?"),
        ("pretrain.round=3", "Unknown key 'pretrain.round'. Did you mean 'pretrain.rounds'?"),
        ("data.options.lenght=3", "Unknown key 'data.options.lenght'. Did you mean 'data.options.length'?"),
        ("data.partition.alfa=3", "Unknown key 'data.partition.alfa'. Did you mean 'data.partition.alpha'?"),
        ("algorithm.lr.fator=3", "Unknown key 'algorithm.lr.fator'. Did you mean 'algorithm.lr.factor'?"),
    ],
)
def test_a_setting_that_nothing_has_is_refused(fedstrata, write, setting, message) -> None:
    """No variant would use it, and the table that it is in need not be built."""
    code, _, err = fedstrata("compare", write(OTHERS), "--set", setting)
    said = " ".join(err.split())
    assert code == 2 and message in said and f"(--set {setting})" in said


def test_an_option_that_algorithms_share_may_be_set_for_those_compared(write) -> None:
    config = read(write("[algorithms.fgda]\ngamma = 0.1\n"), ["algorithm.dual_lr=0.3", "algorithm.gamma=0.2"])
    assert config.options_of("local_sgda") == {"dual_lr": 0.3} and config.options_of("fgda")["gamma"] == 0.2
    with pytest.raises(InputError, match=r"Unknown key 'algorithm.gamma'"):
        read(write(""), ["algorithm.gamma=0.2"])


def test_variants_that_a_setting_makes_the_same_are_refused(fedstrata, write, tmp_path) -> None:
    """Or a row of the table called "lr = 0.01" would show a run with another rate."""
    rates = "".join(f'[variants."lr = {lr}"]\nalgorithm = {{ lr = {lr} }}\n' for lr in (0.01, 0.02))
    path = write(SMALL, rates, "[tune]\ntrials = 1\n")
    for command in ("compare", "tune"):
        code, _, err = fedstrata(command, path, "--set", "algorithm.lr=0.03", "--out", tmp_path / "out")
        said = " ".join(err.split())
        assert code == 2 and "The variants 'lr = 0.01' and 'lr = 0.02' are the same experiment." in said
        assert "leave out the --set that makes them equal" in said
    assert not (tmp_path / "out").exists()
    assert fedstrata("run", path, "--set", "algorithm.lr=0.03", "--quiet")[0] == 0, "variants have no part in it"
    searched = 'search = { "lr = 0.01" = { steps = [1, 2] }, "lr = 0.02" = { steps = [2, 4] } }\n'
    path = write(SMALL, rates, "[tune]\ntrials = 1\n", searched)
    code, _, err = fedstrata("tune", path, "--set", "algorithm.lr=0.03", "--quiet", "--seeds", 0)
    assert code == 0, "variants that differ in what is searched are not the same"


def test_the_measured_data_are_stated_once_and_by_label_if_they_differ() -> None:
    here = {"measured_on": {"pooled": "test data", "clients": "nothing"}}
    inside = {"measured_on": {**here["measured_on"], "model": "the one at x"}}
    assert measured_in_all({"a": [here, here], "b": [here]}) == "Measured on the pooled test data."
    said = measured_in_all({"a": [here], "b": [inside], "c": [inside]})
    assert said == "Measured on the pooled test data. b, c: the model is the one at x."
    assert measured_in_all({"a": [], "b": [{}]}).startswith("b: measured by your own")
    few, fewer = ({"measured_on": {**here["measured_on"], "auc": f"{n} of 4 sites measured"}} for n in (3, 2))
    said = measured_in_all({"a": [few, fewer, few, here]})
    several = "3 of 4 sites measured or 2 of 4 sites measured or all sites measured, depending on the seed"
    assert said == f"Measured on the pooled test data. A site's own AUC: {several}."
