"""Descriptions of tables: right numbers, no small counts, and a page that is safe to open."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser

import numpy as np
import pytest

from fedstrata.core.errors import InputError
from fedstrata.data.tables import Column, Schema, Target
from fedstrata.data.tables.checking import check
from fedstrata.data.tables.describing import Description, describe
from fedstrata.data.tables.drawings import columns, rows
from fedstrata.data.tables.page import page
from fedstrata.data.tables.reading import SiteTable, read_sites

pandas = pytest.importorskip("pandas")
pytest.importorskip("pyarrow")

SCHEMA = Schema(
    Target("died"),
    [
        Column("age", unit="years", description="at admission"),
        Column("sex", kind="flag", categories=["f", "m"]),
        Column("ward", kind="category", categories=["a", "b", "c"]),
        Column("seen", kind="date"),
    ],
)


def frames(*sizes: int) -> dict[str, pandas.DataFrame]:
    out = {}
    for i, size in enumerate(sizes):
        rng = np.random.default_rng(i)
        out[f"s{i}"] = pandas.DataFrame(
            {
                "age": rng.normal(60 + i, 10, size).round(1),
                "sex": rng.choice(["f", "m"], size),
                "ward": rng.choice(["a", "b", "c"], size, p=[0.6, 0.36, 0.04]),
                "seen": pandas.Timestamp("2020-01-01") + pandas.to_timedelta(rng.integers(0, 900, size), "D"),
                "died": rng.integers(0, 10, size) == 0,
            }
        ).astype({"ward": object})
        out[f"s{i}"].loc[rng.random(size) < 0.1, "age"] = None
    return out


def described(tables: dict[str, pandas.DataFrame], minimum: int = 10, schema: Schema = SCHEMA) -> Description:
    read = read_sites(tables, schema)
    return describe(read, schema, minimum, check(read, schema))


def test_numbers_are_those_of_pandas() -> None:
    tables = frames(200, 300)
    d = described(tables, minimum=1)
    pooled = pandas.concat(tables.values())
    for summary, frame in zip((*d.sites, d.together), (*tables.values(), pooled), strict=True):
        assert summary.rows == len(frame) and summary.positives == frame.died.sum()
        age, ward = summary.columns["age"], summary.columns["ward"]
        assert age.missing == frame.age.isna().sum() and sum(age.counts) == frame.age.notna().sum()
        assert age.mean == pytest.approx(frame.age.mean(), rel=1e-5)
        assert age.spread == pytest.approx(frame.age.std(ddof=0), rel=1e-5)
        assert age.quantiles == pytest.approx(frame.age.quantile([0.05, 0.25, 0.5, 0.75, 0.95]).tolist(), rel=1e-5)
        assert age.extremes == (frame.age.min(), frame.age.max())
        assert list(ward.counts) == [(frame.ward == w).sum() for w in "abc"]
        edges = d.bins["age"]
        assert list(age.counts) == np.histogram(frame.age.dropna(), [-np.inf, *edges[1:-1], np.inf])[0].tolist()


def counts_in(value: object) -> list[int]:
    if isinstance(value, dict):
        return [c for k, v in value.items() for c in counts_in(v) if k not in ("columns", "minimum", "quantiles")] + (
            [
                c
                for v in value["columns"].values()
                for c in counts_in({k: v[k] for k in ("counts", "missing") if k in v})
            ]
            if "columns" in value
            else []
        )
    if isinstance(value, list):
        return [c for v in value for c in counts_in(v)]
    return [value] if isinstance(value, int) and not isinstance(value, bool) else []


@pytest.mark.parametrize("sizes", [(200, 300), (200, 8), (9, 4, 60, 55), (5,), (30,) * 20])
def test_no_count_is_below_the_minimum(sizes: tuple[int, ...]) -> None:
    text = json.dumps(described(frames(*sizes)).as_json(), allow_nan=False)
    table = json.loads(text)
    found = counts_in(table["sites"]) + counts_in(table["together"]["columns"]) + [table["together"]["rows"]]
    assert found and not [count for count in found if 0 < count < 10]


def test_small_sites_are_left_out_where_they_would_be_told() -> None:
    d = described(frames(200, 300, 8))
    assert d.sites[2].rows is None and d.left_out == 1 and d.together.rows == 500
    assert set(d.sites[2].columns["ward"].counts) == {None}
    assert d.sites[2].columns["age"].mean is None
    d = described(frames(200, 300, 8, 7))
    assert d.left_out == 0 and d.together.rows == 515
    page(d)


def test_quantiles_have_enough_values_beyond() -> None:
    summary = described(frames(50, 500)).sites[0].columns["age"]
    assert summary.quantiles[0] is None and summary.quantiles[2] is not None and summary.extremes is None
    assert summary.mean == float(f"{summary.mean:.3g}")


def test_targets_of_several_classes_and_numbers() -> None:
    tables = {name: frame.assign(y=frame.ward) for name, frame in frames(90, 90).items()}
    schema = Schema(
        Target("y", kind="category", classes=["a", "b", "c"]), [SCHEMA.columns[0]], drop=["sex", "ward", "seen", "died"]
    )
    d = described(tables, 1, schema)
    assert sum(d.together.target.counts) == 180 and "target, category" in page(d)
    numbers = described({"s": frames(90)["s0"].assign(y=1.5)}, 1, schema.replace(target=Target("y", kind="numeric")))
    assert numbers.together.target.mean == 1.5 and numbers.as_json()["sites"]["s"]["columns"]["y"]["mean"] == 1.5


def test_columns_and_sites_without_values() -> None:
    columns = [*SCHEMA.columns[:1], Column("none", optional=True), Column("one")]
    schema = Schema(Target("died"), columns, drop=["sex", "ward", "seen"])
    tables = {name: frame.assign(none=None, one=3.0) for name, frame in frames(40, 1).items()}
    for minimum in (1, 10):
        d = described(tables, minimum, schema)
        assert d.together.columns["none"].mean is None and json.dumps(d.as_json(), allow_nan=False)
        assert "none" in page(d)
    with pytest.raises(InputError, match="no tables"):
        describe([], schema)
    empty = SiteTable("a", "a", np.empty((0, 3)), np.empty(0), np.empty(0, np.int64))
    page(describe([empty], schema))


class Reader(HTMLParser):
    """Collect the tags of a page, and whether they are closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.attributes: list[tuple[str, str | None]] = []
        self.words: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes += attributes
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


@pytest.mark.parametrize("sites", [1, 3, 30])
def test_the_page_is_one_file_in_which_all_foreign_text_is_text(sites: int) -> None:
    evil = '<script src="http://x.example/">&"\'</script><img onerror=x>'
    schema = Schema(
        Target(f"died {evil}"),
        [
            Column(f"age {evil}", unit=evil, description=evil),
            Column("ward", kind="category", categories=[evil, "b", "[red]c"]),
        ],
    )
    tables = {}
    for i, frame in enumerate(frames(*[60] * sites).values()):
        ward = frame.ward.map({"a": evil, "b": "b", "c": "[red]c"})
        tables[f"{evil} {i}"] = pandas.DataFrame(
            {f"age {evil}": frame.age + 900 * (i == 2), "ward": ward, f"died {evil}": frame.died}
        )
    text = page(described(tables, 10, schema))
    reader = Reader()
    reader.feed(text)
    assert reader.open == [] and evil in "".join(reader.words)
    assert not reader.tags & {"script", "img", "link", "iframe", "a", "object", "embed", "form"}
    assert not [name for name, _ in reader.attributes if name.startswith("on") or name in ("src", "href")]
    assert not re.search(r"url\((?!#hidden\))|@import", text)
    assert "Content-Security-Policy" in text and "default-src 'none'" in text


def test_findings_on_the_page_have_no_rows_and_no_cells() -> None:
    tables = frames(60, 60)
    tables["s0"].loc[3, "age"] = 4711.0
    schema = SCHEMA.replace(columns=[SCHEMA.columns[0].replace(range=[0, 120]), *SCHEMA.columns[1:]])
    d = described(tables, 10, schema)
    assert "outside 0 to 120 years" in page(d) and "4711" not in page(d) and "4711" not in json.dumps(d.as_json())
    assert "row 3: outside 0 to 120 years: 4711" in page(described(tables, 1, schema))


def test_plots_are_drawn_to_scale() -> None:
    drawn = columns([10, None, 5, 0], ["a", "b", "c", "d"], ("0", "1"), 100, 52, "<label>")
    heights = [float(h) for h in re.findall(r'height="([0-9.]+)" fill', drawn)]
    assert heights == [38, 5, 19, 0] and drawn.count("url(#hidden)") == 1 and "&lt;label&gt;" in drawn
    drawn = rows(["x" * 40, "y"], [30, None], 0, "–", 300, "l")
    assert "x" * 21 + "…" in drawn and ">–<" in drawn
    columns([], [], ("", ""), 10, 10, "nothing")
