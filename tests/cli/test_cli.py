"""The command line, in this process: what it prints, and its exit codes."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from fedstrata.algorithms import ALGORITHMS
from fedstrata.cli import printing
from fedstrata.cli.app import COMMANDS as EVERY_COMMAND
from fedstrata.cli.app import command_of, main
from fedstrata.cli.demo import DEMO
from fedstrata.cli.printing import print_table
from fedstrata.core.schedules import StepDecay
from fedstrata.experiments import config_methods
from fedstrata.experiments.build import Experiment
from fedstrata.experiments.compare import compare_methods
from fedstrata.experiments.config import read
from fedstrata.training.metrics.evaluation import Evaluation

QUICK = """
[data]
clients = 4
holdout = 0.2
partition = { name = "dirichlet", alpha = 1.0, min_samples = 10 }
[model]
name = "logreg"
[algorithm]
lr = 0.1
steps = 2
[train]
rounds = 3
batch_size = 8
"""


@pytest.fixture
def experiment(tmp_path: Path) -> Path:
    path = tmp_path / "experiment.toml"
    path.write_text(QUICK)
    return path


def test_run_writes_a_directory_and_prints_a_table(fedstrata, experiment, tmp_path):
    out = tmp_path / "run"
    code, printed, progress = fedstrata("run", experiment, "--out", out)
    assert code == 0
    assert "fedavg on digits" in printed and "accuracy worst" in printed and str(out) in printed
    assert "round 3/3" in progress and "at a time" in progress
    found = {p.name for p in out.iterdir()}
    tensors = {"model.safetensors", "solution.safetensors"}
    assert found == {"checkpoint", "config.toml", "metrics.jsonl", "plot.png", "summary.json", *tensors}


@pytest.mark.slow
@pytest.mark.usefixtures("no_pictures")
def test_config_of_a_run_runs_again_with_the_same_result(fedstrata, experiment, tmp_path):
    fedstrata("run", experiment, "--out", tmp_path / "a", "--quiet", "--set", "algorithm.steps={epochs=1}")
    code, _, err = fedstrata("run", tmp_path / "a" / "config.toml", "--out", tmp_path / "b", "--quiet")
    assert code == 0, err
    assert (tmp_path / "a/config.toml").read_text() == (tmp_path / "b/config.toml").read_text()
    assert (tmp_path / "a/model.safetensors").read_bytes() == (tmp_path / "b/model.safetensors").read_bytes()


def test_run_json_is_the_summary(fedstrata, experiment):
    code, printed, _ = fedstrata("run", experiment, "--json", "--quiet")
    summary = json.loads(printed)
    assert code == 0 and summary["round"] == 3 and summary["status"] == "finished"
    assert len(summary["per_client"]["accuracy"]) == 4


def test_set_changes_settings(fedstrata, experiment):
    changes = ["algorithm.name=scaffold", "train.rounds=2", "algorithm.lr={schedule='step', value=0.1, at=[1]}"]
    words = [w for c in changes for w in ("--set", c)]
    code, printed, _ = fedstrata("run", experiment, "--json", "--quiet", *words)
    assert code == 0 and json.loads(printed)["algorithm"] == "scaffold" and json.loads(printed)["round"] == 2


@pytest.mark.usefixtures("no_pictures")
def test_a_run_can_be_resumed(fedstrata, experiment, tmp_path):
    out = tmp_path / "run"
    assert fedstrata("run", experiment, "--out", out, "--quiet")[0] == 0
    code, _, err = fedstrata("run", experiment, "--out", out, "--quiet", "--resume", "--set", "train.rounds=5")
    assert code == 0, err
    assert [json.loads(r)["round"] for r in (out / "metrics.jsonl").read_text().splitlines()] == [0, 1, 2, 3, 4, 5]


@pytest.mark.slow
def test_compare_prints_mean_and_spread_and_does_not_run_twice(fedstrata, experiment, tmp_path):
    out = tmp_path / "compare"
    words = ("compare", experiment, "--algorithms", "fedavg,scaffold", "--seeds", 2, "--out", out)
    code, printed, progress = fedstrata(*words)
    assert code == 0 and "±" in printed and "scaffold" in printed and (out / "plot.png").stat().st_size > 1000
    rows = json.loads((out / "compare.json").read_text())
    assert [r["algorithm"] for r in rows] == ["fedavg", "scaffold"]
    finals = [json.loads((out / f"fedavg-seed{s}/summary.json").read_text())["accuracy"] for s in (0, 1)]
    assert rows[0]["accuracy"] == pytest.approx(np.mean(finals))
    assert rows[0]["accuracy_std"] == pytest.approx(np.std(finals, ddof=1))
    assert progress.count("round 3/3") == 4
    code, _, err = fedstrata(*words)
    assert code == 2 and "Nothing was overwritten" in err
    code, _, progress = fedstrata(*words, "--resume")
    assert code == 0 and "round 3/3" not in progress


def test_compare_continues_if_one_run_diverges(fedstrata, tmp_path):
    path = tmp_path / "q.toml"
    path.write_text('[problem]\nname = "quadratic"\n[algorithms.fedavg]\nlr = 1e30\n[train]\nrounds = 20\n')
    code, printed, err = fedstrata(
        "compare", path, "--algorithms", "fedavg,scaffold", "--set", "algorithms.scaffold.lr=0.01"
    )
    assert code == 0
    assert err.count("fedavg diverged in round") == 3 and "diverged in 3 of 3" in printed
    assert "fedavg diverged in 3 of 3 seeds: no verdict." in printed and "quadratic, 3 seeds" in printed


def test_runs_that_diverged_are_passed_to_the_plot(fedstrata, tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(
        "fedstrata.training.plots.plot", lambda runs, *_, diverged={}, **__: drawn.append((runs, diverged))
    )
    path, out = tmp_path / "q.toml", tmp_path / "out"
    path.write_text(
        '[problem]\nname = "quadratic"\n[algorithms.fedavg]\nlr = 1e3\n[train]\nrounds = 60\neval_every = 1\n'
    )
    words = ("compare", path, "--algorithms", "fedavg,scaffold", "--set", "algorithms.scaffold.lr=0.01", "--seeds", 2)
    assert fedstrata(*words, "--quiet", "--out", out)[0] == 0
    runs, diverged = drawn[-1]
    for jobs in (1, 2):
        compared = compare_methods(*config_methods.config_methods(read(path), ["fedavg"]), [0, 1], jobs=jobs)
        assert [h[-1]["round"] for h in compared.diverged["fedavg"]] == [h[-1]["round"] for h in diverged["fedavg"]]
        assert compared.histories == {} and compared.rows[0]["diverged"] == 2 and "loss" not in compared.rows[0]
    assert list(runs) == ["scaffold"] and list(diverged) == ["fedavg"] and len(diverged["fedavg"]) == 2
    assert all(0 < history[-1]["round"] < 60 for history in diverged["fedavg"])
    assert fedstrata("plot", *sorted(out.glob("*-seed*")), "--out", tmp_path / "x.png")[0] == 0
    assert drawn[-1] == (runs, diverged)
    (out / "fedavg-seed0/diverged.json").unlink()
    assert fedstrata("plot", *sorted(out.glob("*-seed*")), "--out", tmp_path / "x.png")[0] == 0
    assert {k: len(v) for k, v in drawn[-1][0].items()} == {"fedavg": 1, "scaffold": 2}, "one that was interrupted"


def test_a_run_that_diverged_and_is_resumed_is_no_longer_marked(fedstrata, tmp_path, monkeypatch):
    """Here its evaluation failed once."""
    monkeypatch.setattr("fedstrata.training.plots.plot", lambda *_, **__: None)
    path, out = tmp_path / "q.toml", tmp_path / "run"
    path.write_text('[problem]\nname = "quadratic"\n[algorithm]\nname = "fedavg"\n[train]\nrounds = 4\n')
    with monkeypatch.context() as patch:
        patch.setattr(Evaluation, "__call__", lambda *_: {"loss": float("nan")})
        assert fedstrata("run", path, "--out", out, "--quiet")[0] == 1
    assert (out / "diverged.json").exists()
    assert fedstrata("run", path, "--out", out, "--resume", "--quiet")[0] == 0
    assert not (out / "diverged.json").exists() and (out / "summary.json").exists()


@pytest.mark.slow
@pytest.mark.usefixtures("no_pictures")
def test_tune_gives_every_hyperparameter_the_same_number_of_trials(fedstrata, experiment, tmp_path):
    out = tmp_path / "tune"
    words = ("tune", experiment, "--algorithms", "fedavg,fedprox", "--trials", 3, "--out", out, "--json", "--quiet")
    code, printed, _ = fedstrata(*words)
    assert code == 0
    result = json.loads(printed)
    trials = {name: [t for t in result["trials"] if t["algorithm"] == name] for name in ("fedavg", "fedprox")}
    searched = {name: sum(t["origin"] == "search" for t in group) for name, group in trials.items()}
    assert searched == {"fedavg": 3, "fedprox": 6}, "lr, and lr and mu"
    for name, group in trials.items():
        measured = [t["accuracy"] for t in group]
        assert measured == sorted(measured, reverse=True)
        assert result["best"][name] == group[0]["options"]
        finals = [json.loads((out / f"final/{name}-seed{s}/summary.json").read_text())["accuracy"] for s in (3, 4, 5)]
        assert finals == next(r["values"]["accuracy"] for r in result["test"] if r["algorithm"] == name)
    before = {p.name: p.stat().st_mtime_ns for p in (out / "trials").iterdir()}
    assert len(before) == 1 + 3 * len(result["trials"])
    code, printed, _ = fedstrata(*words, "--resume")
    assert code == 0 and json.loads(printed) == result
    assert {p.name: p.stat().st_mtime_ns for p in (out / "trials").iterdir()} == before
    code, _, _ = fedstrata("compare", out / "best.toml", "--algorithms", "fedavg", "--quiet")
    assert code == 0


@pytest.mark.slow
def test_a_trial_runs_what_it_reports(fedstrata, experiment, tmp_path, monkeypatch):
    """Options of the file, schedules and integers are compatible with the search."""
    used = []
    real = config_methods.run_config

    def spy(config, *rest, **options):
        used.append(Experiment(config).algorithm)
        return real(config, *rest, **options)

    monkeypatch.setattr(config_methods, "run_config", spy)
    settings = [
        "algorithm.name=fedadam",
        "algorithm.lr={schedule='step', value=0.5, at=[2]}",
        "algorithms.fedadam.server_lr=0.03",
        "tune.search.fedadam.lr=[0.01, 0.1]",
        "tune.search.fedadam.server_lr=[0.2, 0.9]",
        "tune.search.fedadam.steps=[2, 6]",
        "tune.seeds=1",
        "tune.extend=false",
    ]
    words = [w for s in settings for w in ("--set", s)]
    code, printed, err = fedstrata(
        "tune", experiment, "--algorithms", "fedadam", "--trials", 2, "--json", "--quiet", "--seeds", 1, *words
    )
    assert code == 0, err
    result = json.loads(printed)
    reported = [t["options"] for t in result["trials"]]
    (file,) = [t["options"] for t in result["trials"] if t["origin"] == "file"]
    assert file == {"lr": {"schedule": "step", "value": 0.5, "at": [2]}, "server_lr": 0.03, "steps": 2}
    (defaults,) = [t["options"] for t in result["trials"] if t["origin"] == "defaults"]
    assert defaults == {"lr": {"schedule": "step", "value": 0.1, "at": [2]}, "server_lr": 0.1, "steps": 10}
    assert len(used) == 9 and len({a.server_lr for a in used[2:8]}) == 6
    for algorithm in used:
        assert isinstance(algorithm.lr, StepDecay) and algorithm.lr.at == (2,)
        shown = {"lr": {"schedule": "step", "value": algorithm.lr.value, "at": [2]}}
        assert {**shown, "server_lr": algorithm.server_lr, "steps": algorithm.steps} in reported
    for algorithm in used[2:8]:
        assert 0.2 <= algorithm.server_lr <= 0.9 and isinstance(algorithm.steps, int) and 2 <= algorithm.steps <= 6
    assert result["best"]["fedadam"]["server_lr"] == used[-1].server_lr


@pytest.mark.usefixtures("no_pictures")
def test_the_algorithm_table_wins_over_the_shared_ones_in_a_run(fedstrata, experiment, tmp_path):
    words = ("--set", "algorithms.fedavg.lr=0.3", "--set", "algorithm.lr=0.7", "--out", tmp_path / "run", "--quiet")
    assert fedstrata("run", experiment, *words)[0] == 0
    assert tomllib.loads((tmp_path / "run/config.toml").read_text())["algorithm"]["lr"] == 0.7


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["data.folder=SITES", "data.imbalance=0.1"], "data.folder has one file per client: leave out data."),
        (["problem.name=quadratic"], "The problem quadratic brings its own data"),
        (["problem={name='quadratic', clients=2.5}", "data={}", "model={}"], "clients of the quadratic"),
        (["problem={name='quadratic', noise='x'}", "data={}", "model={}"], "noise of the quadratic"),
    ],
)
def test_settings_that_would_have_no_effect_are_refused(fedstrata, experiment, settings, message):
    code, _, err = fedstrata("run", experiment, *[w for s in settings for w in ("--set", s)])
    assert code == 2 and message in err


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["algorithms", "problems", "datasets", "models", "partitions", "schedules"])
def test_list_has_a_line_for_each(fedstrata, kind):
    code, printed, _ = fedstrata("list", kind, "--json")
    lines = json.loads(printed)
    assert code == 0 and len(lines) >= 2 and all(len(line) > 10 for line in lines.values())
    assert all(name in fedstrata("list", kind)[1] for name in lines)


def test_show_has_equations_and_hyperparameters(fedstrata):
    code, printed, _ = fedstrata("show", "scaffold")
    assert code == 0 and "c_k" in printed and "Sent: up 2*d" in printed and "local learning rate" in printed
    assert json.loads(fedstrata("show", "scaffold", "--json")[1])["hyperparameters"]["lr"]["default"] == 0.1


@pytest.mark.slow
def test_plot_draws_runs(fedstrata, experiment, tmp_path):
    fedstrata("run", experiment, "--out", tmp_path / "a", "--quiet")
    picture = tmp_path / "x.png"
    code, _, _ = fedstrata("plot", tmp_path / "a", "--out", picture, "--measure", "accuracy", "--axis", "bytes_up")
    assert code == 0 and picture.read_bytes()[:4] == b"\x89PNG"


@pytest.mark.slow
def test_demo_prints_a_table_and_writes_a_picture(fedstrata, tmp_path, monkeypatch):
    monkeypatch.setitem(DEMO, "train", {"rounds": 2, "batch_size": 16})
    code, printed, _ = fedstrata("demo", "--out", tmp_path / "demo.png", "--seeds", 1)
    assert code == 0 and "scaffold" in printed and "auc" in printed and (tmp_path / "demo.png").exists()


BAD = {
    "unknown algorithm": ("algorithm.name=fedavgg", "Did you mean 'fedavg'?"),
    "unknown hyperparameter": ("algorithm.lrr=1", "Did you mean 'algorithm.lr'?"),
    "unknown key": ("train.round=3", "Did you mean 'train.rounds'?"),
    "unknown table": ("trian.rounds=3", "Did you mean 'train'?"),
    "unknown set": ("data.name=digit", "Did you mean 'digits'?"),
    "unknown set option": ("data.options.size=3", "Unknown key 'data.options.size'. Known: none."),
    "unknown model": ("model.name=logregg", "Did you mean 'logreg'?"),
    "unknown model option": ("model.width=3", "Unknown key 'model.width'. Known: model.augment, model.name."),
    "unknown partition": ("data.partition=dirichle", "Did you mean 'dirichlet'?"),
    "unknown partition option": ("data.partition.alfa=1", "Did you mean 'data.partition.alpha'?"),
    "unknown problem": ("problem.name=ermm", "Did you mean 'erm'?"),
    "unknown problem option": ("problem.los=squared", "Did you mean 'problem.loss'?"),
    "unknown loss": ("problem.loss=cross_entropi", "Did you mean 'cross_entropy'?"),
    "unknown sampling": ("train.sampling=epoch", "Did you mean 'epochs'?"),
    "unknown weighting": ("train.weighting=size", "'uniform' or 'samples'"),
    "unknown schedule": ("algorithm.lr={schedule='stp', value=1}", "Did you mean 'step'?"),
    "incomplete schedule": ("algorithm.lr={schedule='step'}", "value"),
    "wrong type": ("train.rounds='many'", "The key train.rounds must be a whole number of at least 1. Got 'many'."),
    "a fraction of a round": (
        "train.rounds=2.5",
        "The key train.rounds must be a whole number",
    ),
    "wrong type of a rate": (
        "algorithm.lr=true",
        "The lr of fedavg must be a number above 0, or a schedule.",
    ),
    "negative rate": ("algorithm.lr=-0.1", "The lr of fedavg must be a number above 0, or a schedule. Got -0.1."),
    "no steps": ("algorithm.steps=0", "The steps of fedavg must be a whole number of at least 1"),
    "wrong steps": ("algorithm.steps={epoch=1}", "epochs such as {epochs = 2}"),
    "no rounds": ("train.rounds=0", "The key train.rounds must be a whole number of at least 1. Got 0."),
    "no batch": ("train.batch_size=0", "train.batch_size"),
    "negative seed": ("train.seed=-1", "train.seed"),
    "participation of nobody": ("train.participation=0", "The key train.participation must be a fraction in (0, 1]"),
    "participation of too many": ("train.participation=9", "from 1 to 4. Got 9."),
    "participation as a word": ("train.participation=all", "train.participation"),
    "chunk": ("train.chunk=0", "The key train.chunk must be a whole number of at least 1, or 'auto'. Got 0."),
    "device": ("train.device=warp", "The device 'warp' cannot be used"),
    "share": ("data.holdout=1.0", "data.holdout"),
    "imbalance": ("data.imbalance=2", "data.imbalance"),
    "positives alone": ("data.positives=[3]", "The key data.positives applies only with data.imbalance"),
    "positives of a wrong type": (
        "data.positives=3",
        "The key data.positives must be a list of whole numbers of at least 0",
    ),
    "labels outside the model's range": (
        "problem.loss=binary_cross_entropy",
        "The labels of the data must be between 0 and 1",
    ),
    "model that does not fit": ("model.name=lenet5", "needs images [channels, height, width] of at least 12x12"),
    "model option of a wrong type": (
        "model={name='mlp', hidden=3}",
        "The hidden of the mlp model must be a list of whole numbers",
    ),
    "a client with no data": (
        "data.clients=2000",
        "Partition 'dirichlet' cannot give 2000 clients at least 10 rows each",
    ),
    "loss as a number": ("problem.loss=5", "The loss of the erm problem must be 'cross_entropy', "),
    "a model's seed": ("model={name='logreg', seed=3}", "Unknown option of the logreg model 'seed'"),
    "a model's shape": ("model={name='logreg', shape=3}", "Unknown option of the logreg model 'shape'"),
    "a set's name as an option": ("data.options={name='x'}", "Unknown option of the digits data set 'name'"),
    "a name among options": ("algorithms.fedavg.name=x", "Unknown option of fedavg 'name'"),
    "a schedule of words": ("algorithm.lr={schedule='step', value='x'}", "The value of the step schedule must be"),
    "a falling schedule": (
        "algorithm.lr={schedule='step', value=-1}",
        "The value of the step schedule must be a number above 0",
    ),
    "a schedule's places": ("algorithm.lr={schedule='step', value=1, at=3}", "The at of the step schedule must be"),
    "a schedule without a name": ("algorithm.lr={value=1}", "Unknown schedule None"),
    "epochs as a word": ("algorithm.steps={epochs='x'}", "The epochs of the local work must be a number above 0"),
    "too many steps": (
        "algorithm.steps=99999999999999999999",
        "must be a number that fits in 64 bits",
    ),
    "a partition without a name": (
        "data.partition={name=['iid']}",
        "The key data.partition must be a name, or a table with a name",
    ),
    "a device without numbers": ("train.device=meta", "The device 'meta' cannot be used"),
    "a search that is no range": ("tune.search.fedavg.lr=[1.0]", "tune.search.fedavg.lr"),
    "an override without a value": ("train.rounds", "must have the form key=value"),
    "an override below a value": ("train.rounds.x=1", "rounds is not a table"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_settings_exit_with_2_and_say_what_is_wrong(fedstrata, experiment, tmp_path, case):
    setting, message = BAD[case]
    code, printed, err = fedstrata("run", experiment, "--out", tmp_path / "run", "--set", setting)
    assert code == 2
    assert message in err.replace("\n", " ")
    assert printed == ""
    assert not (tmp_path / "run").exists(), "nothing is left behind"


def test_missing_data_file_says_which_and_where(fedstrata, experiment, tmp_path, monkeypatch):
    monkeypatch.setenv("FEDSTRATA_OFFLINE", "1")
    words = ("--set", "data.name=mnist", "--set", f"data.directory={tmp_path}")
    code, _, err = fedstrata("run", experiment, *words)
    assert code == 2 and "train-images-idx3-ubyte" in err and str(tmp_path) in err.replace("\n", "")


def test_folder_with_an_empty_client_is_refused(fedstrata, experiment, tmp_path):
    folder = tmp_path / "sites"
    folder.mkdir()
    np.savez(folder / "a.npz", inputs=np.ones((5, 2), np.float32), targets=np.zeros(5, np.int64))
    np.savez(folder / "b.npz", inputs=np.ones((0, 2), np.float32), targets=np.zeros(0, np.int64))
    code, _, err = fedstrata("run", experiment, "--set", f"data={{folder='{folder}'}}")
    assert code == 2 and "Client 1 (b) has no data" in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("run", "nowhere.toml"), "There is no file nowhere.toml"),
        (("run",), "Missing argument"),
        (("frobnicate",), "No such command"),
        (("list", "algorithm"), "Did you mean 'algorithms'?"),
        (("show", "fedavgg"), "Did you mean 'fedavg'?"),
        (("plot", "nowhere"), "There is no run with metrics in nowhere"),
    ],
)
def test_bad_commands_exit_with_2(fedstrata, words, message):
    code, _, err = fedstrata(*words)
    assert code == 2 and message in err


def test_broken_toml_names_the_place(fedstrata, tmp_path):
    path = tmp_path / "broken.toml"
    path.write_text("[train\nrounds = 3")
    code, _, err = fedstrata("run", path)
    assert code == 2 and "not valid TOML" in err and "line 1" in err


def test_divergence_exits_with_1_and_names_the_round(fedstrata, tmp_path):
    path = tmp_path / "q.toml"
    path.write_text('[problem]\nname = "quadratic"\n[algorithm]\nname = "fedavg"\nlr = 1e6\n[train]\nrounds = 50\n')
    code, _, err = fedstrata("run", path, "--out", tmp_path / "run")
    assert code == 1 and re.search(r"diverged in round \d+", err) and "last good checkpoint" in err.replace("\n", " ")


@pytest.mark.usefixtures("no_pictures")
@pytest.mark.slow
def test_an_interrupted_run_exits_with_130_and_can_be_resumed(fedstrata, experiment, tmp_path):
    out = tmp_path / "run"
    words = ["run", str(experiment), "--out", str(out), "--set", "train.rounds=100000", "--set", "train.eval_every=1"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "fedstrata", *words]
    # A job in the background of a script would have its interrupts ignored, and hand that down.
    heeds = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment, **heeds) as process:
        for _ in range(600):
            if (out / "checkpoint").is_dir() and len(list((out / "checkpoint").glob("*.json"))) >= 2:
                break
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        err = process.communicate(timeout=60)[1]
    assert process.returncode == 130 and "Interrupted" in err and "Traceback" not in err
    done = json.loads((out / "metrics.jsonl").read_text().splitlines()[-1])["round"]
    more = ("--set", f"train.rounds={done + 2}", "--resume", "--json")
    code, printed, err = fedstrata(*words, *more)
    assert code == 0 and json.loads(printed)["round"] == done + 2, err


@pytest.mark.parametrize("more", ["[train]\nrounds = 1", "other = 3", "[[list]]"])
def test_an_override_sets_one_key(fedstrata, experiment, more):
    code, _, err = fedstrata("run", experiment, "--set", f"algorithm.lr=0.1\n{more}")
    assert code == 2 and "An override must set one key. Got 'algorithm.lr=0.1" in err


def test_plot_names_damaged_lines(fedstrata, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "metrics.jsonl").write_bytes(b"123\n\xff\xfe\n{}\n")
    with pytest.warns(UserWarning, match=r"Lines 1, 2, 3 of .*metrics.jsonl are damaged and left out"):
        code, _, err = fedstrata("plot", run, "--out", tmp_path / "a.png")
    assert code == 2 and f"There is no run with metrics in {run}" in err
    (run / "metrics.jsonl").write_bytes(b'{"round": 0, "loss": 2.0}\n123\n{"round": 1, "loss": 1.0}\n{"round": 2}\n')
    for axis in ("round", "steps"):
        with pytest.warns(UserWarning, match=r"Line 2 of .*metrics.jsonl is damaged and left out"):
            code, _, err = fedstrata(
                "plot", run, "--out", tmp_path / f"{axis}.png", "--measure", "loss", "--axis", axis
            )
        assert code == 0 and (tmp_path / f"{axis}.png").exists(), err


def test_a_users_algorithm_can_be_imported(fedstrata, experiment, tmp_path):
    own = tmp_path / "signed.py"
    own.write_text(
        "import torch\nimport fedstrata as fs\n\n\n"
        "class Signed(fs.Algorithm):\n    name = 'signed'\n"
        "    lr: float = fs.param(0.01, 'rate', above=0)\n\n    def round(self, s, clients):\n"
        "        return s._replace(x=s.x - self.lr * clients.mean(self.local, s.x))\n\n"
        "    @fs.remote\n    def local(self, client, x):\n        return torch.sign(client.grads(x, client.draw()))\n"
    )
    try:
        code, printed, err = fedstrata(
            "--import", own, "compare", experiment, "--algorithms", "fedavg,signed", "--json"
        )
        assert code == 0, err
        assert [r["algorithm"] for r in json.loads(printed)["rows"]] == ["fedavg", "signed"]
    finally:
        ALGORITHMS.pop("signed", None)
    code, _, err = fedstrata("--import", tmp_path / "nowhere.py", "list", "algorithms")
    assert code == 2 and f"--import: there is no file {tmp_path / 'nowhere.py'}." in err
    code, _, err = fedstrata("--import", tmp_path, "list", "algorithms")
    assert code == 2 and "--import needs a Python file" in err
    code, _, err = fedstrata("run", experiment, "--set", "algorithm.name=signed")
    assert code == 2 and "Unknown algorithm 'signed'" in err and "To add your own: fedstrata --import FILE" in err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("class Signed(fs.Algorithm):\n    pass", "line 2, TypeError: Signed must have a name for the command line"),
        (
            "class Mine(fs.FedAvg):\n    name = 'mine'\n    more = 1",
            "line 2, TypeError: Mine must derive from Algorithm",
        ),
        ("fs.FedAvg(lr=-1)", "line 2, InputError: The lr of fedavg must be"),
        ("1 +", "SyntaxError: invalid syntax"),
    ],
)
def test_a_file_that_cannot_be_imported_is_named(fedstrata, tmp_path, text, message):
    own = tmp_path / "own.py"
    own.write_text(f"import fedstrata as fs\n{text}\n")
    code, _, err = fedstrata("--import", own, "list", "algorithms")
    assert code == 2 and err.startswith(f"Error: {own}: {message}"), err


@pytest.mark.usefixtures("no_pictures")
def test_a_folder_of_sites_can_be_held_out_and_names_its_clients(fedstrata, tmp_path):
    folder = tmp_path / "sites"
    folder.mkdir()
    generator = np.random.default_rng(0)
    for site in ("north", "south"):
        targets = np.arange(60) % 2
        np.savez(folder / f"{site}.npz", x=generator.normal(size=(60, 3)) + targets[:, None], y=targets)
    path = tmp_path / "sites.toml"
    path.write_text(f"[data]\nfolder = '{folder}'\nholdout = 0.25\n[train]\nrounds = 5\n[model]\nname = 'logreg'\n")
    code, printed, err = fedstrata("run", path, "--json", "--quiet", "--out", tmp_path / "run")
    assert code == 0, err
    summary = json.loads(printed)
    assert summary["client_names"] == ["north", "south"] and summary["measured_on"]["clients"] == "held-out test data"
    assert len(summary["per_client"]["auc"]) == 2 and summary["auc_worst"] == min(summary["per_client"]["auc"])
    assert fedstrata("run", tmp_path / "run" / "config.toml", "--quiet")[0] == 0


COMMANDS = ["demo", "run", "compare", "tune", "reproduce", "list", "show", "plot", "partition", "federate"]


@pytest.mark.parametrize("command", COMMANDS)
def test_help_explains_itself(fedstrata, command):
    code, printed, _ = fedstrata(command, "--help")
    assert code == 0 and "Usage" in printed and len(printed.splitlines()) > 8
    code, printed, _ = fedstrata("--help")
    lines = [line for line in printed.splitlines() if line.strip("│ ").startswith(f"{command} ")]
    assert code == 0 and len(lines) == 1 and lines[0].rstrip("│ ").endswith("."), "one line, not cut"


def test_partition_describes_the_clients(fedstrata, experiment, tmp_path):
    code, printed, _ = fedstrata("partition", experiment, "--out", tmp_path / "x.png")
    assert code == 0 and printed.startswith("4 clients with ") and (tmp_path / "x.png").exists()


@pytest.mark.slow
def test_the_installed_command_exits_with_its_code_and_starts_light(experiment, tmp_path):
    words = ["run", str(experiment), "--set", "algorithm.name=nothing"]
    command = [sys.executable, "-X", "importtime", "-m", "fedstrata", *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 2 and "Unknown algorithm 'nothing'" in done.stderr and done.stdout == ""
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "torch" in imported and not imported & {"matplotlib", "flwr", "cryptography", "sklearn"}


def test_show_describes_problems(fedstrata):
    code, printed, _ = fedstrata("show", "auc")
    assert code == 0 and "scale_dual" in printed and "fraction of positives" in printed
    code, printed, _ = fedstrata("show", "quadratic_saddle", "--json")
    assert code == 0 and json.loads(printed)["options"]["spread"] == 1.0
    assert fedstrata("show", "nothing")[0] == 2


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("lstm", {"hidden": 256, "layers": 2, "embedding": 8}),
        ("dirichlet", {"alpha": 0.5, "min_samples": 1}),
        ("digits", {}),
        ("shakespeare", {"length": 80, "stride": 10, "min_characters": 1000, "roles": None}),
    ],
)
def test_show_describes_models_data_sets_and_partitions(name, options, fedstrata):
    assert json.loads(fedstrata("show", name, "--json")[1])["options"] == options
    code, printed, _ = fedstrata("show", name)
    assert code == 0 and all(option in printed for option in options)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("train", {"rounds": 100, "batch_size": None, "participation": 1.0}),
        ("channel", {"compress": "none", "clip": None}),
        ("faults", {"quorum": 0.5, "retries": 2}),
        ("faults.inject", {"drop": 0.0, "clients": []}),
        ("evaluate", {"clients": "auto", "attack_steps": 10}),
        ("diagnostics", {"norms": [], "clients": 2}),
        ("step", {"value": None, "at": [0.5, 0.75], "factor": 0.1}),
    ],
)
def test_show_describes_tables_and_schedules(name, options, fedstrata):
    shown = json.loads(fedstrata("show", name, "--json")[1])["options"]
    assert options.items() <= shown.items() and not {"channel", "faults", "inject", "folder"} & set(shown)
    code, printed, _ = fedstrata("show", name)
    assert code == 0 and all(option in printed for option in shown)


def test_show_has_a_column_on_what_an_option_takes(fedstrata):
    printed = " ".join(fedstrata("show", "channel")[1].split())
    assert "'none', 'top_k' or 'quantise'" in printed and "a number above 0, or left out" in printed
    assert "required" in fedstrata("show", "cube_root")[1]


def test_run_shows_and_draws_what_the_file_asks_for(fedstrata, tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(
        "fedstrata.training.plots.plot", lambda runs, path, **options: drawn.append((runs, path, options))
    )
    path = tmp_path / "experiment.toml"
    text = (
        "[problem]\nname = 'tower'\nclients = 2\nsamples = 8\n[train]\nrounds = 2\n[algorithm]\nname = 'local_smcgdam'"
    )
    path.write_text(text + "\n[plot]\nmeasures = ['distance_dual']\nlog = ['distance_dual']\n")
    code, out, err = fedstrata("run", path, "--out", tmp_path / "run", "--quiet")
    assert code == 0, err
    assert "distance dual" in out and "loss" not in out
    _, (runs, picture, options) = drawn  # the run plots itself first
    assert list(runs) == ["local_smcgdam"] and picture == tmp_path / "run" / "plot.png"
    assert options["measures"] == options["log"] == ["distance_dual"]
    code, _, err = fedstrata("show", "towers")
    assert code == 2 and "Unknown name 'towers'. Did you mean 'tower'?" in " ".join(err.split())


@pytest.mark.slow
@pytest.mark.usefixtures("no_pictures")
def test_resuming_with_another_schedule_is_refused_and_names_both(fedstrata, tmp_path):
    path = tmp_path / "experiment.toml"
    text = (
        "[problem]\nname = 'tower'\nclients = 2\nsamples = 8\n[train]\nrounds = 2\n[algorithm]\nname = 'local_smcgdam'"
    )
    path.write_text(text + "\neta = { schedule = 'step', value = 0.2 }\n")
    assert fedstrata("run", path, "--out", tmp_path / "run", "--quiet")[0] == 0
    code, _, err = fedstrata(
        "run", path, "--out", tmp_path / "run", "--resume", "--quiet", "--set", "algorithm.eta=0.3"
    )
    assert code == 2
    told = " ".join(err.split())
    assert "algorithm.eta was {'schedule': 'step', 'value': 0.2" in told and "and is now 0.3" in told


def test_a_long_label_is_wrapped_and_not_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    text = io.StringIO()
    monkeypatch.setattr(printing, "OUT", Console(width=60, file=text))
    label = "[red]a_label_of_one_long_word[/red]"
    print_table([{"variant": label, **{f"measure {i}": "0.123 ± 0.045" for i in range(4)}}], "digits")
    printed = [line.split("│")[1].strip() for line in text.getvalue().splitlines() if line.startswith("│")]
    assert "".join(printed) == label


def test_only_run_can_be_divided_over_processes(fedstrata, monkeypatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert fedstrata("list", "models")[0] == 0  # batch systems set it too
    monkeypatch.setenv("RANK", "1")
    for command in ("compare", "tune"):
        code, _, said = fedstrata(command, "nothing.toml")
        assert (
            code == 2
            and "The command under torchrun must be run, the only command that several processes can share."
            in " ".join(said.split())
        )
        assert f"Got '{command}'" in " ".join(said.split())


def test_the_list_of_commands_needs_no_torch_and_has_the_first_lines_of_their_help():
    command = [sys.executable, "-X", "importtime", "-m", "fedstrata", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "fedstrata" in imported and not imported & {"torch", "numpy", "matplotlib", "sklearn"}
    for name, (_, line) in EVERY_COMMAND.items():
        assert name in done.stdout and (command_of(name).help or "").splitlines()[0] == line


def test_a_nul_in_an_argument_is_an_error(fedstrata):
    code, _, err = fedstrata("run", "a\0b.toml")
    assert code == 2 and err.startswith("Error: An argument has a NUL character") and "'a\\x00b.toml'" in err


@pytest.mark.parametrize("setting", ["algorithm.lr=1e39", "algorithm.server_lr=1e39", "channel.clip=1e300"])
def test_a_number_that_does_not_fit_is_an_error_that_says_where(fedstrata, experiment, setting):
    code, _, err = fedstrata("run", experiment, "--quiet", "--set", setting, "--set", "algorithm.name=fedadam")
    assert code == 1 and re.search(r"Error: (RuntimeError in .*round 1.*|fedadam diverged in round 1)", err), err


def test_names_in_square_brackets_are_text(fedstrata, experiment, tmp_path, monkeypatch):
    """Rich takes square brackets for markup."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("fedstrata.training.plots.plot", lambda *_, **__: None)
    experiment.write_text(f'{QUICK}\n[variants."[/x]".algorithm]\nlr = 0.2\n')
    code, printed, err = fedstrata("run", experiment, "--out", "[/x]", "--variant", "[/x]")
    assert code == 0 and "Written to [/x]" in printed and not err.startswith("Error"), err
    for words in (["plot", "[/y]"], ["partition", "[/y]"], ["run", experiment, "--variant", "[/y]"], ["[/y]"]):
        code, _, err = fedstrata(*words)
        assert code == 2 and "[/y]" in err


def test_a_file_with_a_name_that_the_terminal_cannot_show_is_named(experiment, tmp_path, monkeypatch):
    printed = io.TextIOWrapper(io.BytesIO(), "ascii")
    monkeypatch.setattr(
        sys, "argv", ["fedstrata", "partition", str(experiment), "--out", str(tmp_path / "é\udcff.png")]
    )
    monkeypatch.setattr(sys, "stdout", printed)
    monkeypatch.setattr("fedstrata.cli.plot.plot_partition", lambda *_: None)
    with pytest.raises(SystemExit) as ended:
        main()
    printed.seek(0)
    assert ended.value.code == 0 and "\\xe9\\udcff.png" in printed.read()
