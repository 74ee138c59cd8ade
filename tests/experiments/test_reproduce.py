"""Experiments by name: found, listed, run with all their variants, and put into a table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fedstrata.core.errors import InputError
from fedstrata.experiments import reproduce
from fedstrata.experiments.config import read
from fedstrata.experiments.tables import as_markdown

FIGURE = """# Noise on a quadratic: Figure 2 of [paper].
# A second line.
[problem]
name = "quadratic"
clients = 3
dimension = 2
[algorithm]
lr = 0.01
[compare]
seeds = 2
[plot]
measures = ["loss"]
[variants.calm]
[variants."noise = 0.5".problem]
noise = 0.5
[preset.cpu.train]
rounds = 2
[preset.paper.train]
rounds = 4
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch) -> Path:
    """A directory below one that has experiments/, where pictures are not drawn."""
    folder = tmp_path / "experiments" / "001"
    folder.mkdir(parents=True)
    (folder / "figure2.toml").write_text(FIGURE)
    (folder / "figure3.toml").write_text(
        "[variants.only]\n" + FIGURE.partition("[variants.calm]")[0].partition("\n")[2]
    )
    (tmp_path / "below").mkdir()
    monkeypatch.chdir(tmp_path / "below")
    monkeypatch.setattr(reproduce, "__file__", str(tmp_path / "checkout/src/fedstrata/experiments/reproduce.py"))
    monkeypatch.setattr("fedstrata.training.plots.plot", lambda runs, path, **_: path.write_text("plot"))
    return tmp_path / "below"


@pytest.mark.parametrize("name", ["001/figure2", "001/figure2.toml", "../experiments/001/figure2.toml"])
def test_an_experiment_is_found_by_name_or_path(here, name):
    (found,) = reproduce.find(name)
    assert found.name == "001/figure2" and found.path.samefile(here.parent / "experiments/001/figure2.toml")


def test_a_directory_stands_for_all_of_its_files(here):
    assert [f.name for f in reproduce.find("001")] == ["001/figure2", "001/figure3"]


def test_a_file_elsewhere_goes_by_its_own_name(here):
    (here / "mine.toml").write_text(FIGURE)
    assert [f.name for f in reproduce.find("mine.toml")] == ["mine"]


def test_an_unknown_experiment_lists_the_known_ones(here):
    with pytest.raises(InputError) as error:
        reproduce.find("001/figur2")
    assert "Did you mean '001/figure2'?" in str(error.value) and "001, 001/figure2, 001/figure3" in str(error.value)


def test_the_nearest_experiment_of_a_name_counts(here):
    nearer = here / "experiments" / "001"
    nearer.mkdir(parents=True)
    (nearer / "figure2.toml").write_text("# Another\n")
    assert {f.name: f.about for f in reproduce.find_all()}["001/figure2"] == "Another"
    assert reproduce.find("001/figure2")[0].about == "Another"


def test_the_checkout_of_the_package_is_searched(here):
    checkout = here.parent / "checkout"
    (checkout / "experiments").mkdir(parents=True)
    (checkout / "experiments/own.toml").write_text(FIGURE)
    assert "own" not in [f.name for f in reproduce.find_all()]
    (checkout / "pyproject.toml").touch()
    assert [f.name for f in reproduce.find_all()] == ["001/figure2", "001/figure3", "own"]


def test_the_experiments_of_this_checkout_are_found_from_anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ours = Path(__file__).parents[2] / "experiments"
    assert reproduce.folders() == [ours] and reproduce.find("000/bias")[0].path == ours / "000/bias.toml"


def test_list_has_a_line_for_each(fedstrata, here):
    code, printed, _ = fedstrata("reproduce", "--list")
    lines = printed.splitlines()
    assert code == 0
    assert any("001/figure2" in li and "cpu, paper" in li and "Figure 2 of [paper]." in li for li in lines)
    assert any("001/figure3" in li and "A second line." in li for li in lines) and printed.count("second line") == 1


def test_reproduce_runs_everything_once_and_writes_the_results(fedstrata, here):
    code, printed, progress = fedstrata("reproduce", "001/figure2")
    out = here / "runs/001/figure2-cpu"
    assert code == 0 and "noise = 0.5" in printed and "2 seeds" in printed
    assert "Experiment 1 of 1: 001/figure2, preset cpu" in progress
    assert "run 4 of 4, noise = 0.5 seed 1: round 2/2" in progress
    assert {p.name for p in out.iterdir() if p.is_file()} == {
        *("compare.json", "plot.png", "ranking.png", "table.md", "verdicts.json"),
    }
    rows = json.loads((out / "compare.json").read_text())
    assert [r["variant"] for r in rows] == ["calm", "noise = 0.5"] and rows[0]["seeds"] == 2
    table = (out / "table.md").read_text().splitlines()
    assert table[0] == "| variant | distance | loss | samples | bytes up | seconds | diverged |"
    assert len(table) == 10 and table[5].startswith("Measured on the pooled ")
    verdicts = json.loads((out / "verdicts.json").read_text())
    assert verdicts["baseline"] == "calm" and verdicts["measure"] == "distance" and len(verdicts["verdicts"]) == 1
    assert table[6:9] == ["", f"- {verdicts['verdicts'][0]}", ""] and table[9].startswith(
        "Gains in distance to the solution"
    )
    cells = [f"{rows[0][name]:.3f} ± {rows[0][f'{name}_std']:.3f}" for name in ("distance", "loss")]
    assert table[2].startswith(f"| calm | {' | '.join(cells)} | ")
    code, _, progress = fedstrata("reproduce", "001/figure2", "--seeds", 3)
    assert code == 0 and [li[: li.index(":")] for li in progress.splitlines()[1:]] == [
        "run 3 of 6, calm seed 2",
        "run 6 of 6, noise = 0.5 seed 2",
    ]


def test_a_preset_and_a_directory_of_results_can_be_chosen(fedstrata, here):
    words = ("--preset", "paper", "--seeds", 1, "--quiet", "--set", "train.batch_size=2")
    code, _, err = fedstrata("reproduce", "001/figure2", *words, "--out", here / "mine")
    assert code == 0 and err == ""
    assert json.loads((here / "mine/compare.json").read_text())[0]["round"] == 4
    assert fedstrata("reproduce", "001/figure2", *words)[0] == 0
    assert (here / "runs/001/figure2-paper/table.md").exists()


def test_the_files_of_a_directory_run_one_after_another(fedstrata, here):
    code, _, progress = fedstrata("reproduce", "001", "--seeds", 1, "--set", "train.rounds=1", "--out", here / "all")
    assert code == 0 and "Experiment 2 of 2: 001/figure3, preset (none)" in progress
    assert (here / "all/figure2/table.md").exists() and (here / "all/figure3/table.md").exists()
    code, _, err = fedstrata("reproduce", "001", "--preset", "cpu", "--out", here / "other")
    assert code == 2 and "the file has no [preset.NAME] tables" in err and "figure3.toml" in err
    assert not (here / "other").exists(), "every file is read before anything runs"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "reproduce needs the NAME of an experiment"),
        (("002",), "Unknown experiment '002'. Did you mean '001'?"),
        (("001/figure2", "--preset", "gpu"), "Unknown preset 'gpu'."),
        (("bare.toml",), "has no variants"),
    ],
)
def test_bad_commands_exit_with_2(fedstrata, here, words, message):
    (here / "bare.toml").write_text("[train]\nrounds = 1\n")
    code, _, err = fedstrata("reproduce", *words)
    assert code == 2 and message in err


def test_a_markdown_table_has_what_a_readme_needs():
    costs = {"samples": 1200.0, "bytes_up": 4.1e6, "seconds": 2.04}
    rows = [
        {"variant": "a|b", "seeds": 3, "diverged": 0, "accuracy": 0.91, "accuracy_std": 0.02, "loss": 3e-5, **costs}
        | {"loss_std": 1e-6, "values": {"accuracy": [0.89, 0.91, 0.93], "loss": [2.9e-5, 3e-5, 3.1e-5]}},
        {"variant": "some", "seeds": 3, "diverged": 1, "values": {"accuracy": [0.9, None, 0.9], "auc": [1, None, 1]}},
        {"variant": "lost", "seeds": 3, "diverged": 3, "values": {}},
    ]
    assert as_markdown(rows).splitlines() == [
        "| variant | auc | accuracy | loss | samples | bytes up | seconds | diverged |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
        r"| a\|b | – | 0.910 ± 0.020 | 3.00e-05 ± 1.00e-06 | 1,200 | 4.1 MB | 2.0 | 0 of 3 |",
        "| some | – | – | – | – | – | – | 1 of 3 |",
        "| lost | – | – | – | – | – | – | 3 of 3 |",
    ]
    assert as_markdown(rows, ["loss"]).startswith("| variant | loss | samples |")


def test_all_experiments_are_run(fedstrata, here):
    folder = here.parent / "experiments" / "001"
    (folder / "claims.toml").write_text("[[claim]]\n")
    (folder / "tuned").mkdir()
    (folder / "tuned" / "x.toml").write_text("[variants.calm.algorithm]\nlr = 0.02\n")
    code, _, progress = fedstrata("reproduce", "--all", "--preset", "cpu", "--seeds", 1, "--set", "train.rounds=1")
    assert code == 0 and (here / "runs/001/figure2-cpu/table.md").exists()
    assert "Experiment 1 of 1: 001/figure2" in progress and "Skipping 001/figure3: it has no preset cpu." in progress
    for words in (("--all", "001/figure2"), ()):
        code, _, err = fedstrata("reproduce", *words)
        assert code == 2 and "NAME of an experiment, or --all" in err
    code, _, err = fedstrata("reproduce", "--all", "--preset", "big")
    assert code == 2 and "Unknown preset 'big'" in err


def test_variants_take_tuned_options_from_a_file(here):
    path = here / "x.toml"
    path.write_text(f'tuned = "tuned.toml"\n{FIGURE}')
    tuned = here / "tuned.toml"
    tuned.write_text("[variants.calm.algorithm]\nlr = 0.5\n[variants.other.algorithm]\nlr = 0.7\n")
    config = read(path)
    assert config.variant("calm").algorithm.options == {"lr": 0.5} and list(config.variants) == ["calm", "noise = 0.5"]
    assert config.variant("noise = 0.5").algorithm.options == {"lr": 0.01}
    assert read(path, tuned=False).variant("calm").algorithm.options == {"lr": 0.01}
    assert read(path, ["algorithm.lr=0.9"]).variant("calm").algorithm.options == {"lr": 0.9}
    for content, message in (
        ("x = 1", r"Unknown key 'x'.*tuned\.toml"),
        ("[variants.calm.train]\nrounds = 2", r"have tables such as \[variants.fedavg.algorithm\]"),
        ("variants = 3", "key variants must be a table"),
    ):
        tuned.write_text(content)
        with pytest.raises(InputError, match=message):
            read(path)
    tuned.unlink()
    with pytest.raises(InputError, match="There is no file"):
        read(path)
    path.write_text(f"tuned = 3\n{FIGURE}")
    with pytest.raises(InputError, match="key tuned"):
        read(path)
