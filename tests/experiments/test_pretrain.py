"""Pre-training by cross-entropy: where the weights come from, what is counted, kills, variants, tuning, refusals."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

import fedstrata as fs
from fedstrata.experiments import config_methods, pretrain
from fedstrata.experiments.build import Experiment
from fedstrata.experiments.config import Config, parse, read
from fedstrata.experiments.pretrain import Pretraining
from fedstrata.experiments.runs import run_config
from fedstrata.training.checkpoint import Checkpoints
from fedstrata.training.metrics.catalogue import TIMES
from fedstrata.training.rundir import RunDirectory
from support import without_seconds

COSTS = ("steps", "samples", "bytes_up", "bytes_down")

BASE = """
[data]
clients = 4
holdout = 0.2
partition = { name = "dirichlet", alpha = 1.0, min_samples = 10 }
[model]
name = "logreg"
[problem]
name = "robust"
[algorithm]
name = "comfedl"
lr = { schedule = "cube_root", k = 0.1, n = 2 }
steps = 2
[train]
rounds = 3
batch_size = 8
participation = 3
weighting = "samples"
sampling = "epochs"
seed = 5
eval_every = 1
"""

PRETRAIN = """
[pretrain]
rounds = 4
lr = 0.2
steps = 3
"""


pytestmark = pytest.mark.usefixtures("no_pictures")


def config_of(*parts: str, **changes: Any) -> Config:
    return parse({**tomllib.loads("".join(parts)), **changes}, "here")


def by_hand(config: Config, algorithm: fs.Algorithm, loss: str = "cross_entropy", rounds: int = 4) -> fs.Run:
    """Pre-train without [pretrain], as one would in Python."""
    built = Experiment(config.replace(pretrain=Config().pretrain))
    assert built.model is not None
    settings = {**config.train.to_table(), "rounds": rounds}
    return fs.train(fs.erm(built.model, loss), built.data, algorithm, **settings)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


# --- where the weights come from -------------------------------------------------------------------------------------


def test_the_run_starts_from_the_weights_of_a_run_by_hand() -> None:
    config = config_of(BASE, PRETRAIN)
    first = by_hand(config, fs.FedAvg(lr=0.2, steps=3))
    built = Experiment(config)
    assert not torch.equal(built.problem.x0, first.x), "an experiment alone trains nothing"
    run = run_config(config, None, False, [], built)
    assert torch.equal(built.problem.x0, first.x) and torch.equal(run.problem.x0, first.x)
    options = {"gamma": 0.5, "link": "exp"}
    second = fs.train(fs.robust(first.model(), **options), built.data, built.algorithm, **config.train.to_table())
    assert torch.equal(run.x, second.x), "the schedule counts the steps of the run alone"
    measures = [{k: v for k, v in row.items() if k not in (*COSTS, *TIMES)} for row in run.history]
    assert measures == [{k: v for k, v in row.items() if k not in (*COSTS, *TIMES)} for row in second.history]


@pytest.mark.parametrize(
    ("problem", "algorithm"),
    [
        ({"name": "maml", "inner_lr": 0.05}, {"name": "comfedl", "lr": 0.05}),
        ({"name": "agnostic"}, {"name": "afl"}),
        ({"name": "erm"}, {"name": "fedprox", "mu": 0.1}),
    ],
    ids=lambda table: table["name"],
)
def test_every_problem_on_a_model_can_be_pretrained(problem: dict[str, Any], algorithm: dict[str, Any]) -> None:
    config = config_of(
        '[data]\nclients = 3\n[model]\nname = "logreg"\n[train]\nrounds = 1\nbatch_size = 8\n',
        problem=problem,
        algorithm=algorithm,
        pretrain={"rounds": 4, "algorithm": "scaffold", "lr": 0.3},
    )
    run = run_config(config, None, False, [])
    first = by_hand(config, fs.Scaffold(lr=0.3))
    assert torch.equal(run.problem.x0[: len(first.x)], first.x)
    assert run.summary["pretrain"]["algorithm"] == "scaffold"


def test_batch_statistics_are_handled_as_the_problem_says() -> None:
    config = config_of(
        '[data]\nclients = 2\nsubset = 40\n[model]\nname = "resnet20"\nnorm = "batch"\nwidth = 4\n',
        problem={"name": "erm", "batchnorm": "batch"},
        algorithm={"steps": 1},
        train={"rounds": 1, "batch_size": 4},
        pretrain={"rounds": 1, "steps": 1, "lr": 0.01},
    )
    run = run_config(config, None, False, [])
    assert run.history[0]["loss"] == run.summary["pretrain"]["loss"]


@pytest.mark.parametrize("dropout", ["on", "off"])
def test_dropout_is_that_of_the_problem(dropout: str) -> None:
    config = config_of(
        '[data]\nclients = 2\nsubset = 40\n[model]\nname = "mlp"\nhidden = [4]\ndropout = 0.5\n',
        problem={"name": "maml", "dropout": dropout},
        pretrain={"rounds": 1, "steps": 1, "lr": 0.01},
    )
    before = Pretraining.of(Experiment(config))
    assert before is not None and before.problem.flat is not None
    assert before.config["problem"]["dropout"] == dropout and before.problem.flat.random == (dropout == "on")


@pytest.mark.parametrize("problem", [{"name": "robust", "loss": "binary_cross_entropy"}, {"name": "auc"}], ids=str)
def test_one_output_and_two_classes_make_it_binary(problem: dict[str, Any]) -> None:
    config = config_of(
        '[data]\nclients = 3\nimbalance = 0.3\n[model]\nname = "logreg"\n[train]\nrounds = 1\nbatch_size = 8\n',
        problem=problem,
        pretrain={"rounds": 4, "lr": 0.3},
    )
    built = Experiment(config)
    before = Pretraining.of(built)
    assert before is not None and before.config["problem"]["loss"] == "binary_cross_entropy"
    first = by_hand(config, fs.FedAvg(lr=0.3), "binary_cross_entropy")
    built.start_from(before.run(None, []))
    assert torch.equal(built.problem.x0[: len(first.x)], first.x)


def test_two_outputs_take_the_cross_entropy_of_classes() -> None:
    before = Pretraining.of(Experiment(config_of(BASE, PRETRAIN, data={"imbalance": 0.3})))
    assert before is not None and before.config["problem"]["loss"] == "cross_entropy"


def test_none_is_the_default_and_leaves_everything_as_it_was(tmp_path: Path) -> None:
    plain = run_config(config_of(BASE), tmp_path / "plain", False, [])
    off = run_config(config_of(BASE, PRETRAIN, pretrain={"rounds": 0, "lr": 0.7}), tmp_path / "off", False, [])
    assert torch.equal(plain.x, off.x) and "pretrain" not in plain.summary
    assert (tmp_path / "plain/config.toml").read_text() == (tmp_path / "off/config.toml").read_text()
    assert "pretrain" not in tomllib.loads((tmp_path / "plain/config.toml").read_text())
    assert not (tmp_path / "off/pretrain").exists() and plain.history[0]["samples"] == off.history[0]["samples"]


# --- what is counted -------------------------------------------------------------------------------------------------


def test_rows_and_summary_count_what_pretraining_used(tmp_path: Path) -> None:
    config = config_of(BASE, PRETRAIN)
    first = by_hand(config, fs.FedAvg(lr=0.2, steps=3))
    plain = run_config(config_of(BASE.replace('robust"', 'robust"\nprior = false')), None, False, [])
    run = run_config(config, tmp_path / "run", False, [])
    assert [row["round"] for row in run.history] == [0, 1, 2, 3]
    assert first.history[-1]["steps"] == 12
    for row, alone in zip(run.history, plain.history, strict=True):
        assert {k: row[k] for k in COSTS} == {k: first.history[-1][k] + alone[k] for k in COSTS}
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    told, last = summary["pretrain"], first.history[-1]
    assert told["rounds"] == 4 and told["algorithm"] == "fedavg"
    assert {k: told[k] for k in (*COSTS, "loss", "accuracy")} == {k: last[k] for k in (*COSTS, "loss", "accuracy")}
    assert summary["seconds"] >= run.history[0]["seconds"] >= told["seconds"] > 0
    assert summary["samples"] == run.history[-1]["samples"]


def test_in_python_a_run_can_count_an_earlier_one(tmp_path: Path) -> None:
    built = Experiment(config_of(BASE))
    assert built.model is not None
    first = fs.train(fs.erm(built.model), built.data, fs.FedAvg(lr=0.2), rounds=2, batch_size=8)
    options: dict[str, Any] = {"batch_size": 8, "out": tmp_path, "pretrain": first, "eval_every": 1}
    problem = fs.robust(first.model())
    fs.train(problem, built.data, built.algorithm, rounds=2, **options)
    longer = fs.train(problem, built.data, built.algorithm, rounds=4, **options, resume=True)
    whole = fs.train(problem, built.data, built.algorithm, rounds=4, **{**options, "out": None})
    assert without_seconds(longer.history) == without_seconds(whole.history), "resuming adds nothing twice"
    bare = fs.train(problem, built.data, built.algorithm, rounds=4, **{**options, "out": None, "pretrain": None})
    assert longer.history[-1]["samples"] == first.history[-1]["samples"] + bare.history[-1]["samples"]
    with pytest.raises(fs.InputError, match=r"The pretrain must be the Run that came before, or left out. Got 'str'"):
        fs.train(problem, built.data, built.algorithm, rounds=1, pretrain="runs/a")  # type: ignore[arg-type]


# --- run directories -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run without an interruption."""
    folder = tmp_path_factory.mktemp("straight") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fedstrata.training.plots.plot", lambda *_, **__: None)
        patch.setattr("fedstrata.problems.runner.Runner.tracing", False)  # as in the tests of this file
        run_config(config_of(BASE, PRETRAIN), folder, False, [])
    return folder


def assert_same(folder: Path, expected: Path) -> None:
    for part in (".", "pretrain"):
        ours, theirs = folder / part, expected / part
        for name in ("model.safetensors", "config.toml"):
            assert (ours / name).read_bytes() == (theirs / name).read_bytes()
        rows, expected_rows = (RunDirectory(p).metrics.read() for p in (ours, theirs))
        assert without_seconds(rows) == without_seconds(expected_rows)
    ours, theirs = (json.loads((p / "summary.json").read_text()) for p in (folder, expected))
    assert without_seconds([ours, ours.pop("pretrain")]) == without_seconds([theirs, theirs.pop("pretrain")])


class Killed(BaseException):
    """An exception that no code catches."""


def kill_at(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, call: int, after: bool) -> None:
    """Simulate a kill at a call of a method: before it, or after."""
    real = getattr(owner, name)
    calls = [0]

    def method(*arguments: Any, **options: Any) -> Any:
        calls[0] += 1
        if calls[0] == call and not after:
            raise Killed
        result = real(*arguments, **options)
        if calls[0] == call:
            raise Killed
        return result

    monkeypatch.setattr(owner, name, method)


MOMENTS = {
    "before the pre-training": (Pretraining, "run", 1, False),
    "before its first checkpoint": (Checkpoints, "save", 1, False),
    "inside the pre-training": (Checkpoints, "save", 2, True),
    "at its end": (Checkpoints, "save", 4, True),
    "between the two": (Experiment, "start_from", 1, True),
    "before the run's first checkpoint": (Checkpoints, "save", 5, False),
    "inside the run": (Checkpoints, "save", 6, True),
    "at the end of the run": (Checkpoints, "save", 7, True),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:No checkpoint in .* starting at round 0")
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_killed_run_that_is_resumed_ends_like_one_that_was_not(moment: str, straight: Path, tmp_path: Path) -> None:
    config, out = config_of(BASE, PRETRAIN), tmp_path / "run"
    owner, name, call, after = MOMENTS[moment]
    with pytest.MonkeyPatch.context() as patch:
        kill_at(patch, owner, name, call, after)
        with pytest.raises(Killed):
            run_config(config, out, False, [])
    saved: list[Path] = []
    with pytest.MonkeyPatch.context() as patch:
        real = Checkpoints.save
        patch.setattr(Checkpoints, "save", lambda self, *rest: (saved.append(self.folder.parent), real(self, *rest)))
        run_config(config, out, True, [])
    assert_same(out, straight)
    done = {"save": call - (not after), "start_from": 4, "run": 0}[name]
    assert saved.count(out / "pretrain") == max(0, 4 - done) and saved.count(out) == min(3, 7 - done)


def test_a_finished_run_can_be_resumed_for_more_rounds(straight: Path, tmp_path: Path) -> None:
    config, out = config_of(BASE, PRETRAIN), tmp_path / "run"
    shorter = config.replace(train=config.train.replace(rounds=1))
    run_config(shorter, out, False, [])
    before = (out / "pretrain/metrics.jsonl").read_bytes()
    run_config(config, out, True, [])
    assert_same(out, straight)
    run_config(config, out, True, [])
    assert_same(out, straight)
    assert (out / "pretrain/metrics.jsonl").read_bytes() == before, "seconds too: it was not trained again"


@pytest.mark.parametrize("finished", [False, True])
@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"rounds": 5, "lr": 0.2, "steps": 3}, "pretrain.rounds was 4 and is now 5"),
        ({"rounds": 4, "lr": 0.1, "steps": 3}, "pretrain.lr was 0.2 and is now 0.1"),
        ({"rounds": 0}, "pretrain.algorithm was 'fedavg' and is now None"),
    ],
)
def test_another_pretraining_is_not_resumed(
    finished: bool, table: dict[str, Any], message: str, tmp_path: Path
) -> None:
    config, out = config_of(BASE, PRETRAIN), tmp_path / "run"
    with pytest.MonkeyPatch.context() as patch:
        kill_at(patch, Checkpoints, "save", 7 if finished else 2, True)
        with pytest.raises(Killed):
            run_config(config, out, False, [])
    before = contents(out)
    with pytest.raises(fs.InputError, match=message):
        run_config(config_of(BASE, pretrain=table), out, True, [])
    assert contents(out) == before


def test_a_run_without_pretraining_is_not_resumed_with_one(tmp_path: Path) -> None:
    run_config(config_of(BASE), tmp_path, False, [])
    before = contents(tmp_path)
    with pytest.raises(fs.InputError, match=r"pretrain.algorithm was None and is now 'fedavg'"):
        run_config(config_of(BASE, PRETRAIN), tmp_path, True, [])
    assert contents(tmp_path) == before


def test_a_start_that_is_not_the_runs_is_refused(straight: Path, tmp_path: Path) -> None:
    """The digest of the start is that of the weights after pre-training."""
    config, out = config_of(BASE, PRETRAIN), tmp_path / "run"
    run_config(config, out, False, [])
    other = by_hand(config, fs.FedAvg(lr=0.2, steps=3), rounds=3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Pretraining, "run", lambda *_: other)
        with pytest.raises(fs.InputError, match=r"digest.start was"):
            run_config(config, out, True, [])
    assert_same(out, straight)


def test_an_existing_directory_is_refused_before_anything_is_trained(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(Pretraining, "run", lambda *_: pytest.fail("trained"))
    (tmp_path / "thesis.tex").write_text("years of work")
    for resume in (False, True):
        with pytest.raises(fs.InputError, match="contains no fedstrata run"):
            run_config(config_of(BASE, PRETRAIN), tmp_path, resume, [])
    assert contents(tmp_path) == {"thesis.tex": b"years of work"}


def test_an_interrupted_pretraining_is_not_overwritten_by_a_new_run(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        kill_at(patch, Checkpoints, "save", 2, True)
        with pytest.raises(Killed):
            run_config(config_of(BASE, PRETRAIN), tmp_path, False, [])
    before = contents(tmp_path)
    with pytest.raises(fs.InputError, match=r"pass --resume"):
        run_config(config_of(BASE, PRETRAIN), tmp_path, False, [])
    assert contents(tmp_path) == before


def test_a_second_process_is_kept_out_during_pretraining(tmp_path: Path, monkeypatch) -> None:
    config = config_of(BASE, PRETRAIN)
    real = Pretraining.run

    def second(self: Pretraining, out: Path, callbacks: list[fs.Callback]) -> fs.Run:
        monkeypatch.setattr(Pretraining, "run", real)
        with pytest.raises(fs.InputError, match="Another process is using"):
            run_config(config, tmp_path / "run", True, [])
        return real(self, out, callbacks)

    monkeypatch.setattr(Pretraining, "run", second)
    run_config(config, tmp_path / "run", False, [])


def test_the_configurations_of_a_run_run_again(fedstrata, straight: Path, tmp_path: Path) -> None:
    kept = tomllib.loads((straight / "config.toml").read_text())["pretrain"]
    assert kept == {
        "rounds": 4,
        "algorithm": "fedavg",
        **{"lr": 0.2, "steps": 3, "server_lr": 1.0, "weight_decay": 0.0},
    }
    code, _, err = fedstrata("run", straight / "config.toml", "--out", tmp_path / "again", "--quiet")
    assert code == 0, err
    assert_same(tmp_path / "again", straight)
    code, _, err = fedstrata("run", straight / "pretrain/config.toml", "--out", tmp_path / "first", "--quiet")
    assert code == 0, err
    ours, theirs = tmp_path / "first/model.safetensors", straight / "pretrain/model.safetensors"
    assert ours.read_bytes() == theirs.read_bytes()


# --- the command line ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_progress_says_which_part_it_is(fedstrata, write, tmp_path: Path) -> None:
    words = ("run", write(BASE, PRETRAIN), "--out", tmp_path / "run")
    code, printed, progress = fedstrata(*words, "--tensorboard", tmp_path / "events")
    assert code == 0 and "Pre-trained by fedavg for 4 rounds" in printed
    heads = [line.split(":")[0] for line in progress.splitlines()]
    assert heads == ["pre-training"] * 6 + ["comfedl"] * 5, "a line on the start of each, then one for each row"
    assert "pre-training: 4 rounds; 3 of 4 clients per round" in progress and "pre-training: round 4/4" in progress


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_gets_only_the_run_itself(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = run_config(config_of(BASE, PRETRAIN), None, False, [fs.TensorBoard(tmp_path)])
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [(e.step, e.value) for e in events.Scalars("samples")] == [(r["round"], r["samples"]) for r in run.history]


VARIANTS = """
[variants.base]
[variants."no pre-training".pretrain]
rounds = 0
[variants.longer.pretrain]
rounds = 5
"""


@pytest.mark.slow
def test_variants_change_it_or_switch_it_off(fedstrata, write, tmp_path: Path) -> None:
    out = tmp_path / "out"
    path = write(BASE, PRETRAIN, VARIANTS)
    code, _, progress = fedstrata("compare", path, "--out", out, "--seeds", 1)
    assert code == 0
    assert [line.split(":")[0] for line in progress.splitlines()] == [
        "run 1 of 3, base seed 5, pre-training",
        "run 1 of 3, base seed 5",
        "run 2 of 3, no pre-training seed 5",
        "run 3 of 3, longer seed 5, pre-training",
        "run 3 of 3, longer seed 5",
    ]
    rounds = {}
    for name in ("base", "no-pre-training", "longer"):
        summary = json.loads((out / f"{name}-seed5/summary.json").read_text())
        rounds[name] = summary.get("pretrain", {}).get("rounds")
        assert (out / f"{name}-seed5/pretrain").exists() is (rounds[name] is not None)
    assert rounds == {"base": 4, "no-pre-training": None, "longer": 5}
    code, _, progress = fedstrata("compare", path, "--out", out, "--seeds", 1, "--resume")
    assert code == 0 and progress == ""


@pytest.mark.slow
def test_every_seed_has_a_pretraining_of_its_own(fedstrata, write, tmp_path: Path) -> None:
    words = ("compare", write(BASE, PRETRAIN), "--algorithms", "comfedl,local_scgd", "--seeds", 2, "--quiet", "--out")
    assert fedstrata(*words, tmp_path / "out")[0] == 0
    models = {f"{n}{s}": tmp_path / f"out/{n}-seed{s}/pretrain" for n in ("comfedl", "local_scgd") for s in (5, 6)}
    weights = {k: (folder / "model.safetensors").read_bytes() for k, folder in models.items()}
    assert weights["comfedl5"] == weights["local_scgd5"] != weights["comfedl6"] == weights["local_scgd6"]


def test_another_algorithm_keeps_the_rounds_and_what_is_shared(write) -> None:
    text = '[pretrain]\nrounds = 7\nalgorithm = "fedprox"\nlr = 0.3\nmu = 0.5\n'
    other = "[variants.other.pretrain]\nalgorithm = 'scaffold'\nsteps = 2\n[variants.same.pretrain]\nmu = 0.1\n"
    path = write(text, other, "[preset.plain]\n[preset.other.pretrain]\nalgorithm = 'fedavg'\n")
    kept = {"rounds": 7, "lr": 0.3}
    assert read(path).pretrain.to_table() == {**kept, "algorithm": "fedprox", "mu": 0.5}
    assert read(path).variant("other").pretrain.to_table() == {**kept, "algorithm": "scaffold", "steps": 2}
    assert read(path).variant("same").pretrain.to_table() == {**kept, "algorithm": "fedprox", "mu": 0.1}
    assert read(path, preset="other").pretrain.to_table() == {**kept, "algorithm": "fedavg"}
    assert read(path, ["pretrain.algorithm=scaffold"]).pretrain.to_table() == {**kept, "algorithm": "scaffold"}
    assert read(path, ["pretrain.rounds=0"]).pretrain.to_table() == {
        "rounds": 0,
        **{"algorithm": "fedprox", "lr": 0.3, "mu": 0.5},
    }
    assert read(path, ["pretrain={rounds=2}"]).pretrain.to_table() == {"rounds": 2, "algorithm": "fedavg"}
    chosen = "[variants.prox.pretrain]\nalgorithm = 'fedprox'\nlr = 0.2\nmu = 0.1\n"
    changed = read(write("[pretrain]\nrounds = 7\n", chosen), ["pretrain.algorithm=scaffold"]).variant("prox")
    assert changed.pretrain.to_table() == {"rounds": 7, "algorithm": "scaffold", "lr": 0.2}


# --- tuning ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_tune_pretrains_once_for_all_trials_that_share_it(fedstrata, write, tmp_path: Path, monkeypatch) -> None:
    trained: list[tuple[int, int]] = []
    starts: dict[tuple[str | None, int], list[torch.Tensor]] = {}
    real = pretrain.train

    def spy(*arguments: Any, **options: Any) -> fs.Run:
        trained.append((options["settings"].rounds, options["settings"].seed))
        return real(*arguments, **options)

    real_run = config_methods.run_config

    def spy_run(config: Config, *rest: Any, **options: Any) -> fs.Run | fs.LocalRun:
        run = real_run(config, *rest, **options)
        assert isinstance(run, fs.Run)
        starts.setdefault((config.label, config.train.seed), []).append(run.problem.x0)
        return run

    monkeypatch.setattr(pretrain, "train", spy)
    monkeypatch.setattr(config_methods, "run_config", spy_run)
    same = "[variants.gamma.problem]\ngamma = 2.0\n"
    path = write(BASE, PRETRAIN, VARIANTS, same, "[tune]\ntrials = 2\nseeds = 2\nextend = false\n")
    words = ("tune", path, "--out", tmp_path / "out", "--quiet", "--seeds", 0)
    code, _, err = fedstrata(*words)
    assert code == 0, err
    assert sorted(trained) == [(4, 5), (4, 6), (5, 5), (5, 6)], "once for each seed and number of rounds"
    for (label, seed), points in starts.items():
        assert len(points) == 3 and all(torch.equal(points[0], point) for point in points), "2 trials, and the file's"
        assert torch.equal(points[0], starts["base", seed][0]) is (label in ("base", "gamma"))
    config = read(path).variant("base")
    data = Experiment(config).data.validation(config.tune.share, config.train.seed)
    built = Experiment(config)
    assert built.model is not None
    settings = {**config.train.to_table(), "rounds": 4}
    first = fs.train(fs.erm(built.model), data, fs.FedAvg(lr=0.2, steps=3), **settings)
    assert torch.equal(starts["base", 5][0], first.x), "on the part that trials are trained on"
    trained.clear()
    assert fedstrata(*words, "--resume")[0] == 0 and trained == [], "trials that are there need none"


def test_what_pretraining_depends_on_is_in_its_key() -> None:
    def key(config: Config, **changes: Any) -> str:
        built = Experiment(config)
        vars(built).update(changes)
        before = Pretraining.of(built)
        assert before is not None
        return before.key

    config = config_of(BASE, PRETRAIN)
    built = Experiment(config)
    others = {
        "seed": key(config.with_seed(6)),
        "settings": key(config_of(BASE, pretrain={"rounds": 4, "lr": 0.1, "steps": 3})),
        "data": key(config, data=built.data.validation(0.2)),
        "weights": key(config, model=torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))),
    }
    assert len({key(config), *others.values()}) == 5
    assert key(config_of(BASE, PRETRAIN, problem={"name": "maml"}, label="other")) == key(config)


def test_a_diverged_pretraining_is_reported_as_such(fedstrata, write, tmp_path: Path) -> None:
    path = write(BASE, "[pretrain]\nrounds = 4\nlr = 1e38\n[variants.base]\n")
    code, _, err = fedstrata("run", path, "--out", tmp_path / "run", "--quiet")
    assert code == 1 and "fedavg diverged in round 1:" in err and "([pretrain])" in err
    code, _, err = fedstrata("tune", path, "--quiet")
    assert code == 1 and "fedavg diverged in round" in err and "trial" not in err


# --- refusals --------------------------------------------------------------------------------------------------------


BAD = {
    "an unknown algorithm": (["pretrain.algorithm=fedavgg"], "Unknown algorithm 'fedavgg'. Did you mean 'fedavg'?"),
    "a wrong algorithm": (["pretrain.algorithm=mfcgd"], "mfcgd does not solve the problem 'erm'"),
    "a wrong key": (["pretrain.round=3"], "Unknown key 'pretrain.round'. Did you mean 'pretrain.rounds'?"),
    "a wrong key and no rounds": (
        ["pretrain={round=3}"],
        "Unknown key 'pretrain.round'. Did you mean 'pretrain.rounds'? Known: pretrain.algorithm, pretrain.lr",
    ),
    "a wrong value": (
        ["pretrain.lr=-1"],
        "The lr of fedavg must be a number above 0, or a schedule. Got -1. ([pretrain])",
    ),
    "negative rounds": (
        ["pretrain.rounds=-1"],
        "The key pretrain.rounds must be a whole number of at least 0. Got -1.",
    ),
    "half a round": (["pretrain.rounds=0.5"], "The key pretrain.rounds must be a whole number of at least 0. Got 0.5."),
    "no table": (["pretrain=3"], "The key pretrain must be"),
    "data of its own": (
        ["problem={name='quadratic'}", "algorithm={name='fedavg'}", "data={}", "model={}"],
        "The problem quadratic has no model to pre-train: leave out [pretrain], or set rounds = 0.",
    ),
    "no classes": (
        ["data={name='sinusoid'}", "problem.loss=squared"],
        "[pretrain] uses cross-entropy, which needs classes: the data sinusoid have none.",
    ),
    "an algorithm of the run's": (["algorithm.name=fedavg"], "fedavg does not solve the problem 'robust'"),
    "a device": (["train.device=warp"], "The device 'warp' cannot be used"),
    "participation": (["train.participation=9"], "from 1 to 4. Got 9."),
    "what cannot be evaluated": (["data.holdout=0.0", "evaluate.clients=test"], "Clients have no held-out test data"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_settings_are_refused_before_anything_is_trained(fedstrata, write, tmp_path, monkeypatch, case) -> None:
    monkeypatch.setattr(Pretraining, "run", lambda *_: pytest.fail("trained"))
    settings, message = BAD[case]
    words = [w for s in settings for w in ("--set", s)]
    code, printed, err = fedstrata("run", write(BASE, PRETRAIN), "--out", tmp_path / "run", *words)
    assert code == 2 and message in err.replace("\n", " ") and printed == ""
    assert not (tmp_path / "run").exists(), "nothing is left behind"


def test_a_variant_that_cannot_be_pretrained_is_named_before_anything_runs(fedstrata, write, tmp_path: Path) -> None:
    path = write(BASE, PRETRAIN, "[variants.good]\n[variants.bad.pretrain]\nalgorithm = 'mfcgd'\n")
    for command in ("compare", "tune"):
        code, _, err = fedstrata(command, path, "--out", tmp_path / "out")
        assert code == 2 and "mfcgd does not solve the problem 'erm'" in err
        assert err.rstrip().endswith("([pretrain]) (variant 'bad')") and not (tmp_path / "out").exists()


def test_a_problem_with_its_own_data_may_have_a_pretraining_of_no_rounds() -> None:
    config = parse({"problem": {"name": "quadratic"}, "pretrain": {"rounds": 0, "lr": 0.3}}, "here")
    assert Pretraining.of(Experiment(config)) is None
