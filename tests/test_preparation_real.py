"""Real tables in every engine: prepared as scikit-learn does, described, and no message tells of a small group."""

from __future__ import annotations

import json
import multiprocessing
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from federation.stand_in import Site, site_of_files
from fedstrata.clients.faults import Faults
from fedstrata.data.tables.checking import read_checked
from fedstrata.data.tables.describing import describe
from fedstrata.data.tables.fitted import Fitted
from fedstrata.experiments.build import plan_of, schema_of
from fedstrata.experiments.config import parse
from fedstrata.federation.server import nodes
from fedstrata.federation.server.nodes import Nodes
from fedstrata.federation.server.tables import ask_tables, described_by
from rank_of_tables import statistics, work
from real_tables import FOLDER, WORLDS, World

pytestmark = [
    pytest.mark.skipif("FEDSTRATA_DATA" not in os.environ or not FOLDER.is_dir(), reason="needs the hospitals' files"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

WAYS: dict[str, dict[str, Any]] = {
    "standard": {"scale": "standard", "encode": "one_hot"},
    "robust": {"scale": "robust", "encode": "frequency"},
}
CASES = [(world, way) for world in WORLDS for way in WAYS]


def cut(world: World, way: str) -> World:
    """The world without the columns whose quartiles a grid does not give exactly."""
    kept = [c for c in world.columns if way != "robust" or c["kind"] != "numeric" or "step" in c]
    drop = [c["name"] for c in world.columns if c not in kept]
    return World(world.files, {**world.schema, "columns": kept, "drop": drop}, world.pooled)


def experiment(world: World, way: str, minimum: int, calibrate: str = "none") -> dict[str, Any]:
    """One step of one client: the preparation asks all before."""
    return {
        "data": {"tables": [str(file) for file in world.files], "schema": world.schema},
        "model": {"name": "logreg"},
        "prepare": {**WAYS[way], "minimum": minimum},
        "problem": {"name": "erm", "loss": "binary_cross_entropy"},
        "algorithm": {"name": "fedavg", "steps": 1, "lr": 0.1},
        "train": {"rounds": 1, "batch_size": 8, "threads": 1, "participation": 1, "calibrate": calibrate},
        "evaluate": {"clients": "none"},
    }


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], World]:
    made = {name: make(tmp_path_factory.mktemp(name)) for name, make in WORLDS.items()}
    return {(name, way): cut(made[name], way) for name, way in CASES}


@pytest.fixture(scope="module")
def of_ranks(worlds: dict[tuple[str, str], World], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what two ranks have found."""
    folder = tmp_path_factory.mktemp("ranks")
    tables = {f"{name} {way}": experiment(world, way, 1) for (name, way), world in worlds.items()}
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["fedstrata", "fedstrata.training.plots"])
    ranks = [context.Process(target=work, args=(rank, 2, folder, tables)) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(600)
    codes = [process.exitcode for process in ranks]
    for process in ranks:
        process.kill()
    assert codes == [0, 0]
    return folder


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: None)
    monkeypatch.setattr(nodes, "POLL", 0.01)


def served(folder: Path, world: World, way: str, minimum: int, calibrate: str = "none") -> tuple[Site, np.ndarray]:
    """Prepare in a federation of nodes with these files; return its messages and the statistics."""
    config = parse(experiment(world, way, minimum, calibrate), "a test")
    site = site_of_files(folder / "federation", config, world.files, minimum=str(minimum))
    run = site.serve(folder / "run")
    assert run.fitted is not None
    return site, run.fitted.vector


def inputs(world: World, vector: np.ndarray, way: str, minimum: int = 1) -> np.ndarray:
    """The inputs that a preparation with these statistics makes of all rows."""
    config = parse(experiment(world, way, minimum), "a test")
    plan = plan_of(config)
    assert plan is not None
    tables, _ = read_checked([str(file) for file in world.files], plan.schema)
    return Fitted(plan, vector).transform(np.concatenate([table.values for table in tables]))


def assert_like_scikit_learn(world: World, vector: np.ndarray, way: str) -> None:
    made, wanted = inputs(world, vector, way), world.reference(way, way == "robust")
    assert made.shape == wanted.shape and len(made) > 900
    np.testing.assert_allclose(made, wanted, rtol=1e-9, atol=1e-9)


# --- equal to scikit-learn ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "way"), CASES)
def test_simulated(worlds: dict[tuple[str, str], World], name: str, way: str) -> None:
    world = worlds[name, way]
    assert_like_scikit_learn(world, statistics(experiment(world, way, 1)), way)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "way"), CASES)
def test_on_two_ranks(worlds: dict[tuple[str, str], World], of_ranks: Path, name: str, way: str) -> None:
    found = [np.load(of_ranks / f"{name} {way}-{rank}.npy") for rank in range(2)]
    np.testing.assert_array_equal(*found)
    assert_like_scikit_learn(worlds[name, way], found[0], way)


@pytest.mark.parametrize(
    ("name", "way"), [pytest.param(*case, marks=pytest.mark.slow if case[0] != "heart" else ()) for case in CASES]
)
def test_in_a_federation(worlds: dict[tuple[str, str], World], tmp_path: Path, name: str, way: str) -> None:
    world = worlds[name, way]
    assert_like_scikit_learn(world, served(tmp_path, world, way, 1)[1], way)


# --- with the default minimum ---------------------------------------------------------------------------------------


def exact_columns(world: World, way: str) -> list[int]:
    """The columns in which every site has no value or at least 10, and no missing cell or at least 10."""
    plan = plan_of(parse(experiment(world, way, 10), "a test"))
    assert plan is not None
    tables, _ = read_checked([str(file) for file in world.files], plan.schema)
    counts = np.array([[(~np.isnan(t.values)).sum(0), np.isnan(t.values).sum(0)] for t in tables])
    kept = ((counts == 0) | (counts >= 10)).all((0, 1))
    return [j for j in plan.averaged if kept[j]]


@pytest.mark.parametrize("name", ["heart", "gusto"])
def test_means_and_deviations_are_exact_where_no_small_count_is_hidden(
    worlds: dict[tuple[str, str], World], name: str
) -> None:
    world = worlds[name, "standard"]
    vector = statistics(experiment(world, "standard", 10))
    p = len(world.columns)
    columns = exact_columns(world, "standard")
    assert len(columns) >= {"heart": 2, "gusto": 5}[name]
    cells = world.cells()
    for j in columns:
        column = world.columns[j]
        if column["kind"] != "numeric":
            continue
        values = cells[column["name"]].clip(*column["range"])
        assert vector[p + j] == pytest.approx(values.mean(), rel=1e-9)
        assert vector[2 * p + j] == pytest.approx(values.std(ddof=0), rel=1e-9)


@pytest.mark.parametrize("name", WORLDS)
def test_what_hiding_changes_is_small(worlds: dict[tuple[str, str], World], name: str) -> None:
    """The figures of docs/tables.md: the largest change of a mean, in deviations, and of a deviation."""
    world = worlds[name, "standard"]
    p, exact, told = len(world.columns), *(statistics(experiment(world, "standard", m)) for m in (1, 10))
    scale = exact[2 * p : 3 * p]
    mean = np.abs(told - exact)[p : 2 * p] / scale
    deviation = np.abs(told[2 * p : 3 * p] / scale - 1)
    numbers = np.array([column["kind"] == "numeric" for column in world.columns])
    largest = {"heart": (0.005, 0.005), "gusto": (0, 0), "eicu": (0.35, 0.2)}[name]
    assert mean[numbers].max() <= largest[0] and deviation[numbers].max() <= largest[1]
    assert mean.max() <= 0.35 and deviation.max() <= 0.35, "ordinals and flags, of which small counts are rounded"


def check_parts(plan: Any, numbers: np.ndarray, table: np.ndarray) -> None:
    """Raise if an answer has a count from 1 to 9, or two whose difference is one, or a value of a row."""
    parts = np.split(numbers, np.cumsum(plan.sizes)[:-1])
    q, c = len(plan.averaged), len(plan.counted)
    counts = [part[:1] for part in parts[:q]] + parts[q : q + c]
    counts += [np.diff(part, prepend=0.0) for part in parts[q + c :]]
    for part in counts:
        assert ((part == 0) | (part >= 10)).all() and (part == np.round(part)).all()
    for (_, mean, squares), j in zip(parts[:q], plan.averaged, strict=True):
        values = table[~np.isnan(table[:, j]), j]
        assert plan.columns[j].size or len(values) >= 10 or (mean, squares) == (0, 0)


@pytest.mark.parametrize(
    ("name", "way"), [pytest.param(*case, marks=pytest.mark.slow if case[0] != "heart" else ()) for case in CASES]
)
def test_no_message_tells_of_a_row_or_a_small_group(
    worlds: dict[tuple[str, str], World], tmp_path: Path, name: str, way: str
) -> None:
    world = worlds[name, way]
    site, _ = served(tmp_path, world, way, 10, "platt")
    plan = plan_of(parse(experiment(world, way, 10), "a test"))
    assert plan is not None
    tables, _ = read_checked([str(file) for file in world.files], plan.schema)
    asked, scored = set(), {}
    for sent, reply in zip(site.sent, site.replies, strict=True):
        header = json.loads(reply.text)
        kind = sent.header["work"] or sent.header["kind"]
        asked.add(kind)
        table = tables[sent.node].values
        assert "error" not in header
        if kind == "describe":
            assert set(header) == {"shapes", "dtypes", "classes", "rows", "nonce", "protocol", "version"}
            assert header["rows"] == 1 and header["shapes"] == [[len(plan.columns)], []] and not reply.arrays
            continue
        whole = [np.ravel(array).astype(np.float64) for array in reply.arrays]
        if kind == "query:column_statistics":
            check_parts(plan, *whole, table)
        elif kind == "query:class_counts":
            assert ((whole[0] == 0) | (whole[0] >= 10)).all()
        elif kind == "query:score_moments":
            assert whole[0][0] == 0 or whole[0][0] >= 10
            scored[sent.node] = whole[0][0]
        elif kind == "query:score_counts":
            assert ((whole[0] == 0) | (whole[0] >= 10)).all()
            for told in np.reshape(whole[0], (2, -1)).sum(1):
                rest = scored[sent.node] - told  # of the other class
                assert told == 0 or rest <= 0 or rest >= 10
        else:  # an update of the model, which is as long as the inputs, and no row
            assert kind == "local" and sum(map(len, whole)) == len(plan.names) + 1
        rows = {row.tobytes() for row in np.nan_to_num(table) if len(np.unique(row)) > 3}  # not one without values
        for numbers in whole:
            windows = np.lib.stride_tricks.sliding_window_view(numbers, min(len(numbers), table.shape[1]))
            assert not rows & {window.tobytes() for window in windows}
    queries = {f"query:{name}" for name in ("column_statistics", "class_counts", "score_moments", "score_counts")}
    assert asked == {"describe", "local", *queries}
    assert sum(sent.header["work"] == "query:column_statistics" for sent in site.sent) == len(world.files)


# --- the description -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "minimum"),
    [pytest.param(name, m, marks=pytest.mark.slow if name != "heart" else ()) for name in WORLDS for m in (1, 10)],
)
def test_nodes_describe_their_tables_as_all_files_are_described(
    worlds: dict[tuple[str, str], World], tmp_path: Path, name: str, minimum: int
) -> None:
    world = worlds[name, "standard"]
    config = parse(experiment(world, "standard", minimum), "a test")
    schema = schema_of(config)
    site = site_of_files(tmp_path, config, world.files, minimum=str(minimum))
    told = ask_tables(Nodes(site, site.roster, "0" * 32, Faults(timeout=5.0)), schema, minimum)
    d = described_by(json.loads(json.dumps(told, allow_nan=False)), schema)
    tables, findings = read_checked([str(file) for file in world.files], schema)
    wanted = describe(tables, schema, minimum, findings)
    assert [s.name for s in d.sites] == [s.name for s in wanted.sites] and d.left_out >= wanted.left_out
    for own, other in zip([*d.sites, d.together], [*wanted.sites, wanted.together], strict=True):
        assert own.rows == other.rows or (own.name == "together" and d.left_out > wanted.left_out)
        for column, mine in own.columns.items():
            theirs = other.columns[column]
            if minimum == 1:
                assert (mine.counts, mine.missing) == (theirs.counts, theirs.missing)
                assert (mine.mean is None) == (theirs.mean is None) and mine.extremes == theirs.extremes
                assert mine.mean is None or mine.mean == pytest.approx(theirs.mean, rel=2e-5)
            elif own.name != "together":  # which counts are hidden also depends on other sites, if these are known
                assert mine.quantiles == theirs.quantiles
                pairs = (mine.mean, theirs.mean), (mine.spread, theirs.spread)
                few = 0.2 * theirs.spread if mine.missing is None and theirs.spread else 0.0  # as their mean would tell
                # Three digits are told, so the last of them may differ too.
                assert all(a == b or (few and a == pytest.approx(b, abs=few + 0.01 * abs(b))) for a, b in pairs)
    for sent, reply in zip(site.sent, site.replies, strict=True):
        answer = json.loads(reply.text)["table"]
        assert answer["rows"] is None or answer["rows"] >= minimum
        for column in answer["columns"].values() if sent.header["kind"] == "summary" else ():
            counts = [*column["counts"], column["missing"]]
            assert all(count is None or count == 0 or count >= minimum for count in counts)
            if answer["rows"] is not None and None in counts:
                assert counts.count(None) > 1 and answer["rows"] - sum(count or 0 for count in counts) >= minimum
