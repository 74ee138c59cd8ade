"""The description of nodes' tables: that of a simulation, from counts that each node hides itself."""

from __future__ import annotations

import json
import secrets
import tomllib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedstrata as fs
from broken_tables import BROKEN, SCHEMA, frames
from federation.stand_in import Change, Sent, Site, Tables, headed, made, site, site_of_files
from fedstrata.data.tables import describing
from fedstrata.data.tables.checking import read_checked
from fedstrata.data.tables.describing import Description, SiteSummary
from fedstrata.data.tables.page import page
from fedstrata.data.tables.schema import Schema
from fedstrata.experiments.build import schema_of
from fedstrata.federation import app, deploy, wire
from fedstrata.federation import describing as describing_nodes
from fedstrata.federation.server.nodes import Nodes
from fedstrata.federation.server.tables import ask_tables, described_by
from fedstrata.federation.superlink import Federation
from fedstrata.federation.templates import connection_file
from fedstrata.federation.wire import Reply

pandas = pytest.importorskip("pandas")
pytest.importorskip("pyarrow")

SIZES = (90, 60, 45, 8)


def config_of(pattern: Path | str, *over: Tables) -> Any:
    base: Tables = {
        "data": {"tables": str(pattern), "schema": SCHEMA},
        "model": {"name": "logreg"},
        "problem": {"name": "erm", "loss": "binary_cross_entropy"},
        "algorithm": {"name": "fedavg"},
        "train": {"rounds": 1, "batch_size": 16, "threads": 1},
    }
    return made(base, *over)


def written(folder: Path, tables: dict[str, pandas.DataFrame]) -> list[Path]:
    folder.mkdir()
    for name, frame in tables.items():
        frame.to_csv(folder / f"{name}.csv", index=False)
    return [folder / f"{name}.csv" for name in tables]


def nodes_of(folder: Path, tables: dict[str, pandas.DataFrame] | None = None, **settings: str) -> Site:
    files = written(folder / "sites", frames(SIZES) if tables is None else tables)
    return site_of_files(folder / "federation", config_of(folder / "sites" / "*.csv"), files, **settings)


def told_by(nodes: Site, minimum: int = 10) -> dict[str, Any]:
    """What the server learns, over the messages of Flower."""
    asked = Nodes(nodes, nodes.roster, secrets.token_hex(16), fs.Faults(timeout=0.5))
    return ask_tables(asked, schema_of(nodes.config), minimum)


def described(nodes: Site, minimum: int = 10) -> Description:
    told = json.loads(json.dumps(told_by(nodes, minimum), allow_nan=False))
    return described_by(told, schema_of(nodes.config))


def local(nodes: Site, minimum: int, files: Any = None) -> Description:
    schema = schema_of(nodes.config)
    tables, findings = read_checked(list(nodes.files) if files is None else files, schema)
    return describing.describe(tables, schema, minimum, findings)


def assert_alike(own: SiteSummary, other: SiteSummary, quantiles: bool = True, bins: bool = True) -> None:
    assert own.rows == other.rows and list(own.columns) == list(other.columns)
    pairs = [(own.target, other.target), *zip(own.columns.values(), other.columns.values(), strict=True)]
    for mine, theirs in pairs:
        if bins:
            assert (mine.counts, mine.missing, mine.hidden) == (theirs.counts, theirs.missing, theirs.hidden)
        np.testing.assert_allclose(
            np.array([mine.mean, mine.spread], float),
            np.array([theirs.mean, theirs.spread], float),
            rtol=2e-6,
            atol=0.03 * (theirs.spread or 0.0) if mine.missing is None else 0.0,  # else it would tell the missing cells
        )
        assert mine.extremes == theirs.extremes
        if quantiles:
            assert mine.quantiles == theirs.quantiles


# --- equal to the local description ----------------------------------------------------------------------------------


def test_nothing_hidden_is_what_describe_says_of_all_files(tmp_path: Path) -> None:
    nodes = nodes_of(tmp_path, minimum="1")
    d, wanted = described(nodes, 1), local(nodes, 1)
    for name, edges in wanted.bins.items():
        np.testing.assert_array_equal(d.bins[name], edges)
    for mine, theirs in zip((*d.sites, d.together), (*wanted.sites, wanted.together), strict=True):
        assert mine.name == theirs.name
        assert_alike(mine, theirs, quantiles=mine.name != "together")
    for name, edges in wanted.bins.items():
        if name in d.together.columns:
            pair = (d.together.columns[name].quantiles, wanted.together.columns[name].quantiles)
            np.testing.assert_allclose(*pair, atol=edges[1] - edges[0])  # linear within a bin
    text = d.as_json()
    assert text["sites"] == wanted.as_json()["sites"] and page(d).endswith("</html>\n")


def test_each_node_hides_what_describe_hides_of_its_file_alone(tmp_path: Path) -> None:
    nodes = nodes_of(tmp_path)
    d = described(nodes)
    for k, own in enumerate(d.sites):
        alone = local(nodes, 10, [nodes.files[k]]).sites[0]
        assert_alike(own, alone, bins=False)
        for name in ("sex", "region"):
            assert own.columns[name].counts == alone.columns[name].counts
        assert own.target.counts == alone.target.counts


def test_together_are_sums_of_what_is_told(tmp_path: Path) -> None:
    tables = frames(SIZES)
    nodes = nodes_of(tmp_path, tables)
    d = described(nodes)
    assert d.left_out == 1 and d.together.rows == 195 and d.sites[3].rows is None
    every = pandas.concat(list(tables.values())[:3])
    for name, summary in d.together.columns.items():
        told = np.array([[*s.columns[name].counts, s.columns[name].missing] for s in d.sites[:3]], float)
        sums, hidden = np.nan_to_num(told).sum(0), np.isnan(told).sum(0)
        assert [c or 0 for c in (*summary.counts, summary.missing)] == sums.tolist()
        assert list(summary.hidden or 0 * hidden) == hidden.tolist()
        if name in d.bins and name != "seen" and summary.mean is not None:
            column, edges = every[name], d.bins[name]
            assert summary.mean == pytest.approx(column.mean(), rel=0.01)
            true = np.histogram(column.dropna(), [-np.inf, *edges[1:-1], np.inf])[0]
            assert all(c is None or c == t or h for c, t, h in zip(summary.counts, true, hidden, strict=False))
    assert d.together.columns["rare"].mean is None
    words = json.dumps(d.as_json()) + page(d)
    assert "hidden_at" in words and "≥" in page(d)
    assert "≥ " in d.together.columns["region"].told(2) or d.together.columns["region"].told(2) == "–"


def test_raw_values_in_a_folder_are_described_too(tmp_path: Path) -> None:
    files = written(tmp_path / "sites", frames(SIZES))
    config = config_of(tmp_path / "sites" / "*.csv", {"data": {"holdout": 0.3}})
    nodes = site(tmp_path / "federation", config)
    by_file = site_of_files(tmp_path / "files", config, files)
    assert described(nodes).together == described(by_file).together


# --- what leaves a node ----------------------------------------------------------------------------------------------


def numbers_in(value: Any) -> list[float]:
    parts = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
    own = [value] if isinstance(value, int | float) and not isinstance(value, bool) else []
    return [*own, *(number for part in parts for number in numbers_in(part))]


def test_no_message_tells_of_a_row_or_a_small_group(tmp_path: Path) -> None:
    tables = frames(SIZES)
    nodes = nodes_of(tmp_path, tables)
    told_by(nodes)
    assert [sent.header["kind"] for sent in nodes.sent] == ["spans"] * 4 + ["summary"] * 4
    for sent, reply in zip(nodes.sent, nodes.replies, strict=True):
        assert not reply.arrays
        table = json.loads(reply.text)["table"]
        frame = tables[nodes.names[sent.node]]
        cells = {*frame.pressure.dropna(), *frame.rare.dropna()}
        assert not cells & set(numbers_in(table))
        assert not any(date.isoformat() in reply.text for date in frame.seen)
        if sent.header["kind"] == "spans":
            assert table["rows"] is None or table["rows"] >= 10
            continue
        for column in table["columns"].values():
            counts = [*column["counts"], column["missing"]]
            assert all(count is None or count == 0 or count >= 10 for count in counts)
            if table["rows"] is None:
                assert set(counts) == {None} and set(column) == {"counts", "missing"}
            elif None in counts:
                assert counts.count(None) > 1 and table["rows"] - sum(c or 0 for c in counts) >= 10


@pytest.mark.parametrize("call", ["spans", "work"])
def test_a_node_tells_nothing_below_its_own_minimum(tmp_path: Path, call: str) -> None:
    nodes = nodes_of(tmp_path, minimum="25")
    if call == "spans":
        with pytest.raises(
            fs.InputError, match=r"- site0 failed: This node tells no count below 25 .* --minimum to 25"
        ):
            told_by(nodes, 24)
        assert told_by(nodes, 25)["minimum"] == 25
    else:
        with pytest.raises(fs.FedstrataError, match=r"site0: failed: .*below 25 .* prepare.minimum of the experiment"):
            nodes.serve(tmp_path / "run")


# --- tables that do not fit ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", BROKEN)
def test_a_table_that_does_not_fit(tmp_path: Path, case: str) -> None:
    nodes = nodes_of(tmp_path, frames((60, 60)))
    broken, file = BROKEN[case], nodes.files[1]
    file.write_bytes(broken.bytes_of(file.read_text()))
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(fs.InputError, match=r"Not every node described its table\.\n- site1 failed: ") as e:
        told_by(nodes)
    assert broken.is_said_in(str(e.value), "site1") and "site0" not in str(e.value) and e.value.exit_code == 2
    with pytest.raises(fs.FedstrataError) as trained:
        nodes.serve(tmp_path / "run")
    assert broken.is_said_in(str(trained.value), "site1")
    assert sorted(tmp_path.rglob("*")) == before
    for reply in nodes.replies:
        cells = [f"{v:.3f}" for v in frames((60, 60))["site1"].pressure]
        assert "secret" not in reply.text and not any(cell in reply.text for cell in cells)


def test_a_column_that_only_other_nodes_have(tmp_path: Path) -> None:
    tables = frames((60, 60))
    tables["site1"] = tables["site1"].drop(columns="rare")
    d = described(nodes_of(tmp_path, tables))
    assert d.sites[1].columns["rare"].missing == 60
    assert any("counts as missing" in f.remedy and f.site == "site1" for f in d.findings)


def test_a_node_in_another_unit_is_found_by_its_quantiles(tmp_path: Path) -> None:
    tables = frames((300,) * 5)
    tables["site2"]["pressure"] *= 100
    nodes = nodes_of(tmp_path, tables)
    (finding,) = [f for f in described(nodes).findings if f.kind == "unit"]
    assert (finding.site, finding.column) == ("site2", "pressure")


def test_a_file_with_a_column_that_names_the_site(tmp_path: Path) -> None:
    tables = {name: frame.assign(hospital=name) for name, frame in frames((60, 50)).items()}
    files = written(tmp_path / "sites", tables)
    config = config_of(tmp_path / "none.csv", {"data": {"schema": {**SCHEMA, "site": "hospital"}}})
    assert described(site_of_files(tmp_path / "federation", config, files)).together.rows == 110


# --- hostile nodes ---------------------------------------------------------------------------------------------------


def column(name: str, **changes: Any) -> Callable[[dict[str, Any]], Any]:
    def change(table: dict[str, Any]) -> Any:
        table["columns"][name] |= changes
        return table

    return change


def with_(**changes: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda table: table | changes


FINDING = {"kind": "leak", "column": "age", "what": "x", "remedy": ""}

HOSTILE: dict[str, tuple[str, Callable[[dict[str, Any]], Any], str]] = {
    "no table": ("spans", lambda t: [1], "of no table"),
    "no answer": ("summary", lambda t: None, "of no table"),
    "columns": ("summary", with_(columns=[]), "of no columns"),
    "another column": ("spans", with_(columns={"\x1b[31m": [0, 1, True]}), r"of a column '\x1b[31m' that"),
    "span of a category": ("spans", with_(columns={"sex": [0, 1, True]}), "of a column 'sex' that"),
    "span": ("spans", with_(columns={"age": [0, 1]}), "no span of 'age'"),
    "infinite": ("spans", with_(columns={"age": [0, float("inf"), True]}), "is no finite number"),
    "order": ("spans", with_(columns={"age": [2, 1, True]}), "in the wrong order"),
    "no rows": ("spans", with_(rows=None), "but hides how many rows"),
    "a missing column": ("summary", lambda t: t["columns"].pop("sex") and t, "nothing of the column 'sex'"),
    "text": ("summary", with_(rows="90"), "a number of rows that is none"),
    "true": ("summary", with_(rows=True), "a number of rows that is none"),
    "negative": ("summary", with_(rows=-90), "a number of rows that is none"),
    "huge": ("summary", with_(rows=10**30), "a number of rows that is none"),
    "few rows": ("summary", with_(rows=9), "rows below the minimum, 10"),
    "few": ("summary", column("sex", missing=3), "cells of 'sex' below the minimum, 10"),
    "counts": ("summary", column("sex", counts=[90]), "no list of 2 counts of 'sex'"),
    "nan": ("summary", column("pressure", mean=float("nan")), "a mean of 'pressure' that is no finite number"),
    "sum": ("summary", column("sex", counts=[90, 90], missing=0), "sum to 180, but 60 rows"),
    "larger": ("summary", column("sex", counts=[90, None]), "but 60 rows"),
    "mean": ("summary", column("sex", mean=1.0), "a mean of 'sex', which are categories"),
    "few values": ("summary", column("rare", mean=1.0, missing=60, counts=None), "no list of"),
    "spread": ("summary", column("age", spread=-1.0), "a spread of 'age' below 0"),
    "quantiles": ("summary", column("age", quantiles=[3, 2, 1, None, None]), "quantiles of 'age' in the wrong order"),
    "extremes": ("summary", column("age", extremes=[1, 2]), "which are those of single rows"),
    "findings": ("summary", with_(findings={}), "of no findings"),
    "finding": ("summary", with_(findings=[FINDING | {"what": "\x1b[31m"}]), "a finding that is none"),
    "long finding": ("summary", with_(findings=[FINDING | {"what": "x" * 5000}]), "a finding that is none"),
    "rows of a finding": ("summary", with_(findings=[FINDING | {"rows": [1]}]), "a finding that is none"),
}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Site:
    return nodes_of(tmp_path_factory.mktemp("two"), frames((60, 60)))


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_node_is_named(two: Site, case: str) -> None:
    kind, change, words = HOSTILE[case]

    def changed(nodes: Site, sent: Sent, reply: Reply) -> Reply:
        if sent.node != 1 or sent.header["kind"] != kind:
            return reply
        return nodes.signed(1, {**headed(reply), "table": change(json.loads(reply.text)["table"])})

    nodes = two.again(change=changed)
    with pytest.raises(fs.InputError, match=r"Not every node described its table\.\n- site1 told ") as e:
        told_by(nodes)
    assert words in str(e.value) and "\x1b" not in str(e.value)


def test_a_silent_node_and_one_without_a_signature_are_named(tmp_path: Path) -> None:
    nodes = nodes_of(tmp_path, frames((60, 60, 60)))
    change: Change = lambda _, sent, reply: [reply, None, Reply(reply.text, b"", ())][sent.node]  # noqa: E731
    nodes.change = change
    with pytest.raises(
        fs.InputError, match=r"- site1 did not answer within 0.5 s\n- site2 answered without a valid sig"
    ):
        told_by(nodes)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ((0,), "The minimum of a description must be"),
        ((True,), "The minimum of a description must be"),
        ((10, torch.zeros(3, dtype=torch.float64)), "finite and increasing"),
        ((10, torch.zeros(1000, dtype=torch.float64)), "from 2 to 100 edges"),
        ((10, torch.arange(3.0)), "from 2 to 100 edges"),
        ((10, torch.arange(3.0, dtype=torch.float64)), "number of columns with bins must be 4"),
    ],
)
def test_a_node_checks_what_it_is_asked(two: Site, content: Any, words: str) -> None:
    nodes = two.again()
    asked = Nodes(nodes, nodes.roster, secrets.token_hex(16), fs.Faults(timeout=2.0))
    _, refused = asked.ask_all(asked.call("summary"), *wire.pack(content))
    assert words in refused[0].detail


# --- the command -----------------------------------------------------------------------------------------------------


class Submitted:
    """Flower's command line, with the app's own code in this process."""

    def __init__(self, nodes: Site) -> None:
        self.nodes = nodes

    def submit(self, folder: Path) -> str:
        settings = tomllib.loads((folder / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
        self.nodes.experiment = settings["experiment"]
        with suppress(fs.FedstrataError):
            app.write_description(None, settings)  # type: ignore[arg-type]
        return "7"


@pytest.fixture
def federation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    nodes = nodes_of(tmp_path)
    monkeypatch.setattr(app, "FlowerTransport", lambda grid, lifetime: nodes)
    monkeypatch.setattr(describing_nodes, "Flower", lambda home, connection: Submitted(nodes))
    return nodes


def test_the_command_prints_and_writes_what_describe_does(fedstrata, federation: Site, tmp_path: Path) -> None:
    words = ("federate", "describe", federation.folder)
    code, printed, err = fedstrata(*words, "--html", tmp_path / "page.html")
    assert code == 0 and "Asking site0, site1, site2, site3" in err
    assert "4 sites, 195 rows, target died" in printed and "≥ " in printed and "1 of the sites have so few" in printed
    assert "only if their node.toml allows it" in printed and (tmp_path / "page.html").read_text().endswith("</html>\n")
    code, printed, err = fedstrata(*words, "--json", "--quiet", "--node", "site1", "--minimum", 30)
    table = json.loads(printed)
    assert code == 0 and not err and list(table["sites"]) == ["site1"] and table["minimum"] == 30


def test_the_command_takes_another_schema(fedstrata, federation: Site, tmp_path: Path) -> None:
    form = Schema.from_table(SCHEMA, "the test").select(["age"], ())
    form.write(tmp_path / "schema.toml")
    words = ("federate", "describe", federation.folder, "--schema", tmp_path / "schema.toml", "--json")
    code, printed, _ = fedstrata(*words)
    assert code == 0 and list(json.loads(printed)["columns"]) == ["died", "age"]


def test_what_the_command_refuses(fedstrata, federation: Site, tmp_path: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    for words, said in (
        ((tmp_path,), "There is no federation in"),
        ((federation.folder, "--app", "other"), "Unknown app 'other'"),
        ((federation.folder, "--node", "site9"), "Unknown node 'site9'"),
        ((federation.folder, "--html", tmp_path / "none" / "page.html"), "a file in a directory that exists"),
        ((federation.folder, "--minimum", 0), "range x>=1"),
        ((federation.folder, "--minimum", 9), "tells no count below 10"),
        ((federation.folder, "--schema", tmp_path / "none.toml"), "There is no file"),
    ):
        code, printed, err = fedstrata("federate", "describe", *words)
        assert code == 2 and said in " ".join(err.split()) and not printed, err
    federation.files[2].write_text("age\n1\n")
    code, printed, err = fedstrata("federate", "describe", federation.folder, "--html", tmp_path / "page.html")
    assert code == 2 and "- site2 failed: The tables do not fit" in err and not printed
    assert sorted(tmp_path.rglob("*")) == before
    deploy.write_app(made({"model": {"name": "logreg"}, "data": {"name": "digits"}}),
                     federation.folder / "plain", {"site0": federation.public[0]}, tmp_path / "run")  # fmt: skip
    code, _, err = fedstrata("federate", "describe", federation.folder, "--app", "plain")
    assert code == 2 and "has no schema of a table" in err


@pytest.mark.flower
def test_the_command_on_a_federation_that_runs(fedstrata, tmp_path: Path) -> None:
    nodes = nodes_of(tmp_path)
    wanted = described(nodes).as_json()
    with Federation(nodes.folder, nodes.names) as running:
        running.make_keys()
        running.start_server()
        for name, file in zip(nodes.names, nodes.files, strict=True):
            running.register(nodes.folder / "nodes" / name / "node.key.pub")
            running.start_node(name, data=str(file))
        (nodes.folder / "server" / "cli").mkdir()
        text = connection_file(running.address, nodes.folder / "server" / "ca.crt", "federation")
        (nodes.folder / "server" / "cli" / "config.toml").write_text(text)
        words = ("federate", "describe", nodes.folder, "--json")
        code, printed, err = fedstrata(*words)
        assert code == 0 and json.loads(printed) == wanted, err
        nodes.files[2].write_text("age\n1\n")
        code, printed, err = fedstrata(*words, "--html", tmp_path / "page.html")
    assert code == 2 and not printed and not (tmp_path / "page.html").exists()
    assert "- site2 failed: The tables do not fit." in err
