"""Plots of runs: what they show, that methods look the same in all of them, and that they leave matplotlib alone."""

from __future__ import annotations

import errno
import itertools
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgb
from matplotlib.container import ErrorbarContainer
from matplotlib.figure import Figure
from scipy import stats

import fedstrata as fs
from fedstrata.algorithms import ALGORITHMS
from fedstrata.experiments.plots import plot_partition
from fedstrata.training.plots import AXES, plot, plot_diagnostics
from fedstrata.training.plots.styles import ALGORITHM_STYLES, COLOURS, styles

ROWS = [{"round": r, "samples": 2 * r, "loss": 1.0, "gradient_norm": 10.0**-r} for r in range(3)]
MANY = ("fedavg", "scaffold", "fgda", "adafgda", "local_sgda", "sagda", "cdma", "coda", "gamma = 0.1", "gamma = 1")


def rising(end: float, start: float = 0.5, seed: int = 0, rounds: int = 20) -> list[dict[str, Any]]:
    """A history whose AUC rises fast from ``start`` to ``end``, with some noise."""
    noise = 0.002 * np.random.default_rng(seed).normal(size=rounds + 1)
    values = end - (end - start) * np.exp(-np.arange(rounds + 1.0)) + noise
    return [{"round": r, "bytes_up": 4e5 * r, "seconds": 100.0 * r, "auc": float(v)} for r, v in enumerate(values)]


def comparison(labels: Sequence[str], seeds: int = 3) -> dict[str, list[list[dict[str, Any]]]]:
    return {label: [rising(0.9 + 0.005 * n, seed=s) for s in range(seeds)] for n, label in enumerate(labels)}


def looks(panel: Axes) -> dict[str, tuple[Any, ...]]:
    """The colour, marker and line style of each label."""
    named = [line for line in panel.lines if not str(line.get_label()).startswith("_")]
    return {str(n.get_label()): (to_hex(n.get_color()), n.get_marker(), str(n._dash_pattern)) for n in named}  # type: ignore[attr-defined]


def legend_of(figure: Figure) -> list[str]:
    """The labels of the only legend."""
    legends = [*figure.legends, *(legend for panel in figure.axes if (legend := panel.get_legend()))]
    assert len(legends) == 1
    return [text.get_text() for text in legends[0].get_texts()]


def notes(panel: Axes) -> str:
    return panel.get_title(loc="left")


def test_each_measure_is_plotted_for_the_runs_that_have_it(figures: list[Figure]) -> None:
    bare = [{k: v for k, v in row.items() if k != "gradient_norm"} for row in ROWS]
    runs = {"bare": [bare], "both": [ROWS, ROWS]}
    plot(runs, "x.png", ["loss", "gradient_norm"], "samples", log=["gradient_norm"], title="Two")
    loss, norm = figures[0].axes
    assert [p.get_yscale() for p in (loss, norm)] == ["linear", "log"] and figures[0].get_suptitle() == "Two"
    assert len(loss.lines) == 2 and len(norm.lines) == 1
    assert norm.lines[0].get_color() == loss.lines[1].get_color() and loss.get_legend() and not norm.get_legend()
    plot(runs, "x.png", ["gradient_norm"])
    assert not figures[1].legends and not figures[1].axes[0].get_legend(), "only one label has a line"
    with pytest.raises(fs.InputError, match=r"Unknown measure 'los'. Did you mean 'loss'"):
        plot(runs, "x.png", log=["los"])


# --- colours, markers and lines --------------------------------------------------------------------------------------


def test_a_method_looks_the_same_in_every_figure(figures: list[Figure]) -> None:
    runs = comparison(MANY)
    plot(runs, "x.png")
    few = {label: runs[label] for label in ("coda", "fgda", "fedavg")}
    plot(few, "x.png")
    plot({"fgda": runs["fgda"]}, "x.png", diverged={"fedavg": [[]], "coda": [[], []]})
    every, some, one = (looks(figure.axes[0]) for figure in figures)
    assert set(every) == set(MANY) and set(some) == set(few)
    assert some == {label: every[label] for label in few} and one == {"fgda": every["fgda"]}


@pytest.mark.parametrize("labels", [MANY, [*ALGORITHM_STYLES, *map(str, range(40))], ["fedams1", "fedams2", "fedams"]])
def test_no_two_labels_of_a_figure_share_colour_and_marker(labels: Sequence[str]) -> None:
    chosen = styles(labels)
    assert list(chosen) == list(labels)
    assert len({(style.colour, style.marker) for style in chosen.values()}) == len(labels)
    assert chosen == {label: styles(reversed(labels))[label] for label in labels}, "whatever their order"


def test_up_to_eight_variants_differ_in_colour() -> None:
    chosen = styles([f"tau = {n}" for n in range(8)]).values()
    assert {style.colour for style in chosen} == set(COLOURS.values()) and {style.line for style in chosen} == {"-"}
    mixed = styles(["fedavg", "fedavg, by samples", "comfedl-maml"])
    assert mixed["fedavg, by samples"].colour != mixed["fedavg"].colour
    assert mixed["comfedl-maml"].colour == ALGORITHM_STYLES["comfedl"].colour, "the colour of its algorithm is free"


def test_algorithms_and_their_presets_differ_in_colour() -> None:
    assert set(ALGORITHM_STYLES) <= set(ALGORITHMS), "a style for an algorithm that does not exist"
    for name, kind in ALGORITHMS.items():
        base = next((n for n, other in ALGORITHMS.items() if other in kind.__mro__[1:]), None)
        if base is not None and name in ALGORITHM_STYLES:
            assert ALGORITHM_STYLES[name].colour != ALGORITHM_STYLES[base].colour, f"{name} is a preset of {base}"


CONES = {  # Machado, Oliveira and Fernandes 2009, table 1, severity 1
    "normal": np.eye(3),
    "protanopia": [[0.1523, 1.0526, -0.2049], [0.1145, 0.7863, 0.0992], [-0.0039, -0.0481, 1.0520]],
    "deuteranopia": [[0.3673, 0.8606, -0.2280], [0.2801, 0.6725, 0.0474], [-0.0118, 0.0429, 0.9689]],
    "tritanopia": [[1.2555, -0.0767, -0.1788], [-0.0784, 0.9308, 0.1476], [0.0047, 0.6914, 0.3039]],
}


def linear(colour: str) -> np.ndarray:
    """The intensities of red, green and blue light of a colour."""
    rgb = np.array(to_rgb(colour))
    return np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)


def lab(light: np.ndarray) -> np.ndarray:
    """CIELAB, in which distances are those that a person sees."""
    to_xyz = [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    x, y, z = np.cbrt(np.array(to_xyz) @ np.clip(light, 0, 1) / (0.9505, 1, 1.0888))
    return np.array([116 * y, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("cones", CONES)
def test_colour_blind_readers_can_tell_the_colours_apart(cones: str) -> None:
    seen = {name: lab(np.array(CONES[cones]) @ linear(colour)) for name, colour in COLOURS.items()}
    for one, other in itertools.combinations(seen, 2):
        assert np.linalg.norm(seen[one] - seen[other]) > 15, f"{one} and {other}"
    for name, colour in COLOURS.items():
        assert 1.05 / (linear(colour) @ (0.2126, 0.7152, 0.0722) + 0.05) > 2.2, f"{name} is too pale on white"


# --- runs that diverged ----------------------------------------------------------------------------------------------


def test_diverged_runs_are_counted_in_the_legend_and_end_in_a_cross(figures: list[Figure]) -> None:
    runs = comparison(("fedavg", "fgda"))
    stopped = [[*rising(0.9)[:8], {"round": 8, "auc": 0.2}], rising(0.913)[:11]]
    plot({"fedavg": runs["fedavg"], "fgda": runs["fgda"][:1]}, "x.png", diverged={"fgda": stopped, "coda": [[]] * 3})
    assert legend_of(figures[0]) == ["fedavg", "fgda (diverged in 2 of 3)", "coda (diverged in 3 of 3)"]
    panel = figures[0].axes[0]
    crosses = [line for line in panel.lines if line.get_marker() == "x"]
    low, high = panel.get_ylim()
    ends = [(8, low), (10, pytest.approx(min(high, stopped[1][-1]["auc"])))]
    assert low > 0.6, "a run that blew up does not squeeze the others: its cross is at the edge"
    assert [(float(line.get_xdata()[0]), float(line.get_ydata()[0])) for line in crosses] == ends  # type: ignore[index]
    assert {line.get_color() for line in crosses} == {ALGORITHM_STYLES["fgda"].colour}
    caption = " ".join(figures[0].get_supxlabel().split())
    assert "Line: mean over 3 seeds" in caption and "Thin lines: single seeds of a method that diverged" in caption
    means = [line for line in panel.lines if line.get_label() in ("fedavg", "fgda")]
    assert [line.get_label() for line in means] == ["fedavg"], "no mean over survivors"


def test_if_every_run_diverged_their_curves_are_shown(figures: list[Figure]) -> None:
    plot({}, "x.png", diverged={"fgda": [rising(0.9)[:5]]})
    assert legend_of(figures[0]) == ["fgda (diverged in 1 of 1)"]
    low, high = figures[0].axes[0].get_ylim()
    assert low < 0.5 < 0.88 < high


# --- axes ------------------------------------------------------------------------------------------------------------


def test_a_start_that_squeezes_the_curves_is_cut_off_and_noted(figures: list[Figure]) -> None:
    runs = {**comparison(("fedavg", "fgda")), "bad": [rising(0.85)]}
    plot(runs, "x.png")
    plot(runs, "x.png", range="full")
    plot({"slow": [[{"round": r, "auc": 0.5 + 0.02 * r} for r in range(20)]]}, "x.png")
    cut, full, slow = (figure.axes[0] for figure in figures)
    low, high = cut.get_ylim()
    assert 0.7 < low < min(group[0][-1]["auc"] for group in runs.values()) and high > 0.905
    assert re.fullmatch(r"↓ starts lower, at 0\.\d+", notes(cut))
    assert full.get_ylim()[0] < 0.5 and not notes(full)
    assert slow.get_ylim()[0] < 0.5 and not notes(slow), "the start does not squeeze a curve that rises steadily"
    with pytest.raises(fs.InputError, match=r"range of a plot must be 'auto' or 'full'. Got 'ful'. Did you mean"):
        plot(runs, "x.png", range="ful")


@pytest.mark.parametrize("seed", range(20))
def test_final_values_are_never_cut_off(seed: int, figures: list[Figure]) -> None:
    """Also those of curves that end near their start, jump at the end, or are much shorter than others."""
    draw = np.random.default_rng(seed)
    runs = {}
    for label in "abc":
        history = rising(draw.uniform(0.5, 1), draw.uniform(0.3, 0.6), seed, rounds=int(draw.integers(1, 30)))
        history[-1]["auc"] += draw.choice([0, -0.4, 0.3])
        runs[label] = [history]
    plot(runs, "x.png")
    low, high = figures[0].axes[0].get_ylim()
    assert all(low < group[0][-1]["auc"] < high for group in runs.values())


def test_exploding_values_can_be_plotted(figures: list[Figure]) -> None:
    rows = [{"round": r, "loss": 10.0 ** (30 * r), "distance": -(10.0 ** (30 * r))} for r in range(11)]
    plot({"a": [rows, [{**row, "distance": 2 * row["distance"]} for row in rows]]}, "x.png", ["loss", "distance"])
    assert [panel.get_yscale() for panel in figures[0].axes] == ["log", "linear"]
    assert np.isfinite([panel.get_ylim() for panel in figures[0].axes]).all()


@pytest.mark.parametrize(
    ("axis", "largest", "label", "shown"),
    [
        ("round", 100, "Rounds", 100),
        ("steps", 20_000, "Local steps", 20_000),
        ("samples", 3_500_000, "Samples drawn (millions)", 3.5),
        ("bytes_up", 2_500, "Data sent by clients (kB)", 2.5),
        ("bytes_down", 7.5e9, "Data sent to clients (GB)", 7.5),
        ("seconds", 90, "Training time (seconds)", 90),
        ("seconds", 5400, "Training time (minutes)", 90),
    ],
)
def test_axes_have_units(axis: str, largest: float, label: str, shown: float, figures: list[Figure]) -> None:
    assert axis in AXES
    plot({"a": [[{axis: share * largest, "accuracy": share} for share in (0, 0.5, 1)]]}, "x.png", axis=axis)
    panel = figures[0].axes[0]
    assert panel.get_xlabel() == label and panel.get_ylabel() == "Accuracy"
    assert panel.lines[0].get_xdata()[-1] == pytest.approx(shown)  # type: ignore[index]
    figures[0].draw_without_rendering()
    ticks = [text.get_text() for text in panel.get_xticklabels()]
    assert ("20,000" in ticks) == (largest == 20_000)


def test_measures_are_spelled_for_readers(figures: list[Figure]) -> None:
    names = {
        "auc": "AUC",
        "accuracy_worst": "Accuracy of the worst client",
        "adapted_auc": "Adapted AUC",
        "my_sauce": "My sauce",
    }
    plot({"a": [[{"round": 0, **dict.fromkeys(names, 0.5)}]]}, "x.png", list(names))
    assert [panel.get_ylabel() for panel in figures[0].axes] == list(names.values())


# --- bands and legends -----------------------------------------------------------------------------------------------


def test_up_to_six_methods_have_bands_and_more_have_bars_side_by_side(figures: list[Figure]) -> None:
    plot(comparison(MANY[:6]), "x.png")
    plot(comparison(MANY), "x.png")
    plot(comparison(MANY[:7]), "x.png")
    few, many, seven = (figure.axes[0] for figure in figures)
    assert len(few.collections) == 6 and not few.containers and len(seven.containers) == 7
    assert "band: its 95 % interval" in figures[0].get_supxlabel()
    bars = [bar for bar in many.containers if isinstance(bar, ErrorbarContainer)]
    assert len(bars) == len(MANY) and "bar at its end: its 95 % interval" in figures[1].get_supxlabel()
    runs = comparison(MANY)
    places = {}
    for bar in bars:
        ((x, low), (_, high)) = bar.lines[2][0].get_segments()[0]
        places[to_hex(bar.lines[0].get_color()), bar.lines[0].get_marker()] = x, low, high
    for label, style in styles(MANY).items():
        finals = [run[-1]["auc"] for run in runs[label]]
        x, low, high = places[style.colour.lower(), style.marker]
        width = np.ptp(stats.t.interval(0.95, len(finals) - 1, np.mean(finals), stats.sem(finals)))
        assert x > 20 and high - low == pytest.approx(width)
    ordered = sorted(places.values(), key=lambda bar: bar[1] + bar[2])
    assert all(one[0] != other[0] for one, other in itertools.pairwise(ordered)), "neighbours must not overlap"
    assert max(many.get_xticks()) <= 20, "there are no rounds below the bars"


def test_a_method_without_a_value_in_some_seed_has_no_mean(figures: list[Figure]) -> None:
    runs = comparison(("fedavg", "fgda"))
    runs["fgda"][1] = [{k: v for k, v in row.items() if k != "auc"} for row in runs["fgda"][1]]
    plot(runs, "x.png", ["auc"])
    (panel,) = figures[0].axes
    assert list(looks(panel)) == ["fedavg"] and len(panel.collections) == 1
    colour = ALGORITHM_STYLES["fgda"].colour.lower()
    assert sum(to_hex(line.get_color()) == colour for line in panel.lines) == 2, "the seeds that have one"
    caption = " ".join(figures[0].get_supxlabel().split())
    assert "Thin lines: single seeds of a method that diverged, or has no value, with others." in caption


def test_bands_are_intervals_and_do_not_stretch_the_axis(figures: list[Figure]) -> None:
    """With two seeds, an interval is 18 times as long as the distance of the two."""
    runs = {label: [rising(0.9, seed=n), rising(0.92, seed=n)] for n, label in enumerate(("fedavg", "fgda"))}
    plot(runs, "x.png")
    (panel,) = figures[0].axes
    ends = panel.collections[0].get_paths()[0].vertices[:, 1]  # type: ignore[index]
    finals = [run[-1]["auc"] for run in runs["fedavg"]]
    low, high = stats.t.interval(0.95, 1, np.mean(finals), stats.sem(finals))
    assert min(abs(ends - low)) < 1e-9 and min(abs(ends - high)) < 1e-9
    least, most = panel.get_ylim()
    assert least < min(finals) and max(finals) < most < 1.0 < high


def test_a_legend_of_one_measure_is_ordered_by_the_final_value(figures: list[Figure]) -> None:
    runs = comparison(MANY[:3])
    plot(runs, "x.png", ["auc"])
    losses = {
        k: [[{"round": r["round"], "loss": 1 - r["auc"], "auc": r["auc"]} for r in g[0]]] for k, g in runs.items()
    }
    plot(losses, "x.png", ["loss"])
    plot(losses, "x.png", ["loss", "auc"])
    own = {k: [[{"round": r["round"], "f1": 1 - r["auc"]} for r in g[0]]] for k, g in runs.items()}
    plot(own, "x.png", ["f1"])
    one, loss, two, undeclared = map(legend_of, figures)
    assert one == loss == list(MANY[:3])[::-1] and two == undeclared == list(MANY[:3])


def test_a_legend_is_inside_only_if_it_is_short_and_covers_nothing(figures: list[Figure]) -> None:
    def crossing(seed: int) -> list[dict[str, Any]]:
        draw = np.random.default_rng(seed)
        return [{"round": r, "auc": float(draw.uniform())} for r in range(200)]

    plot(comparison(MANY[:4]), "x.png", range="full")
    plot(comparison(MANY[:5]), "x.png", range="full")
    plot({"a": [crossing(0)], "b": [crossing(1)]}, "x.png")
    assert [len(figure.legends) for figure in figures] == [0, 1, 1]
    short, beside = figures[0], figures[1]
    assert short.axes[0].get_legend() and legend_of(beside)
    assert beside.get_size_inches()[0] > short.get_size_inches()[0], "the panel does not shrink"
    beside.draw_without_rendering()
    assert beside.legends[0].get_window_extent().x0 > beside.axes[0].get_window_extent().x1


# --- files and matplotlib --------------------------------------------------------------------------------------------


def test_vector_formats_keep_text_as_text(tmp_path: Path) -> None:
    before = dict(matplotlib.rcParams)
    for suffix in ("pdf", "svg", "png"):
        plot(comparison(("fedavg", "fgda")), tmp_path / f"a.{suffix}")
        plot(comparison(("fedavg", "fgda")), tmp_path / f"b.{suffix}")
        assert (tmp_path / f"a.{suffix}").read_bytes() == (tmp_path / f"b.{suffix}").read_bytes()
    assert dict(matplotlib.rcParams) == before, "the caller's settings stay as they are"
    assert ">fedavg</text>" in (tmp_path / "a.svg").read_text()
    pdf = (tmp_path / "a.pdf").read_bytes()
    assert b"/FontFile2" in pdf and b"/Type3" not in pdf, "TrueType fonts, embedded"
    header = (tmp_path / "a.png").read_bytes()
    assert int.from_bytes(header[16:20], "big") == 920, "4.6 inches at 200 dpi"


def test_a_partition_shows_totals_and_classes_and_only_totals_without_classes(figures: list[Figure]) -> None:
    plot_partition(fs.data.load("digits").split("iid", clients=4), "x.png", "Digits")
    top, bottom, _ = figures[0].axes
    assert len(top.patches) == 4 and bottom.images[0].get_array().shape == (10, 4)
    plot_partition(fs.quadratic(clients=3).data, "x.png")
    (totals,) = figures[1].axes
    assert len(totals.patches) == 3 and not totals.images


@pytest.mark.slow
def test_the_callers_backend_and_figures_stay_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import matplotlib.pyplot as plt

    before = plt.get_backend()
    plt.switch_backend("svg")
    try:
        mine = plt.figure()
        draw_all(tmp_path)
        assert plt.get_backend() == "svg" and plt.get_fignums() == [mine.number]
    finally:
        plt.close("all")
        plt.switch_backend(before)
    monkeypatch.delitem(sys.modules, "matplotlib.pyplot")
    draw_all(tmp_path)
    assert "matplotlib.pyplot" not in sys.modules, "pyplot chooses a backend when it is imported"


def draw_all(folder: Path) -> None:
    diagnostics: list[dict[str, Any]] = [{"round": 1, "local_steps": 2}, {"round": 1, "client": 0, "step": 1, "v": 1.0}]
    plot({"a": [ROWS]}, folder / "a.png")
    plot_diagnostics(diagnostics, folder / "b.png")
    plot_partition(fs.quadratic(clients=3).data, folder / "c.png")
    assert all((folder / f"{name}.png").read_bytes().startswith(b"\x89PNG") for name in "abc")


def test_a_plot_on_a_full_disk_leaves_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = plot({"a": [ROWS]}, tmp_path / "x.png")
    before = path.read_bytes()

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(fs.FedstrataError, match=r"x\.png cannot be written: No space left") as raised:
        plot({"a": [ROWS[:2]]}, path)
    assert raised.value.exit_code == 1, "the input was not bad"
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


def test_a_plot_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(fs.InputError, match=r"The path of a plot must be a .*x\.txt"):
        plot({"a": [ROWS]}, tmp_path / "x.txt")
