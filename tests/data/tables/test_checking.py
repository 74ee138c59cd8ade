"""Checks of tables that can be read: what is implausible at one site, and between sites."""

from __future__ import annotations

import numpy as np
import pytest

from fedstrata.core.errors import InputError
from fedstrata.data.tables import Column, Schema, Target
from fedstrata.data.tables.checking import area, check, outside, quantiles_of, read_checked
from fedstrata.data.tables.findings import Finding, together
from fedstrata.data.tables.reading import read_sites
from fedstrata.data.tables.units import conversion

pandas = pytest.importorskip("pandas")
pytest.importorskip("pyarrow")

COLUMNS = (
    Column("age", range=[0, 120], unit="years"),
    Column("chol", unit="mg/dL"),
    Column("sex", kind="flag", categories=["f", "m"]),
    Column("ward", kind="category", categories=["a", "b", "c"]),
)
SCHEMA = Schema(Target("died"), COLUMNS)


def frame(rows: int = 200, seed: int = 0) -> pandas.DataFrame:
    rng = np.random.default_rng(seed)
    return pandas.DataFrame(
        {
            "age": rng.normal(60, 10, rows).round(1),
            "chol": rng.normal(200, 30, rows).round(1),
            "sex": rng.choice(["f", "m"], rows),
            "ward": rng.choice(["a", "b", "c"], rows),
            "died": rng.integers(0, 2, rows),
        }
    )


def found(frames: dict[str, pandas.DataFrame], schema: Schema = SCHEMA) -> list[Finding]:
    return check(read_sites(frames, schema), schema)


def sites(**changed: pandas.DataFrame) -> dict[str, pandas.DataFrame]:
    return {f"s{i}": frame(seed=i) for i in range(4)} | changed


def only(findings: list[Finding]) -> Finding:
    (finding,) = findings
    return finding


def test_good_tables_have_no_findings() -> None:
    assert found(sites()) == []


@pytest.mark.parametrize(("factor", "words"), [(365.25, "divided by 365.25"), (12, "Convert the column")])
def test_a_unit_mix_up_by_range(factor: float, words: str) -> None:
    finding = only(found(sites(s2=frame(seed=2).assign(age=lambda f: f.age * factor))))
    assert (finding.site, finding.column, finding.kind, finding.severity) == ("s2", "age", "unit", "error")
    assert "100 % of the values are outside 0 to 120 years: is it another unit?" in str(finding) and words in str(
        finding
    )
    with pytest.raises(InputError, match=r"s2, column 'age', rows 0, 1, 2, 3, 4 and 195 more"):
        read_checked(sites(s2=frame(seed=2).assign(age=lambda f: f.age * factor)), SCHEMA)


def test_a_unit_mix_up_between_sites() -> None:
    finding = only(found(sites(s1=frame(seed=1).assign(chol=lambda f: f.chol / 38.67))))
    assert (finding.site, finding.column, finding.kind, finding.severity) == ("s1", "chol", "unit", "warning")
    assert "times 38.67 (cholesterol in mmol/L, to mg/dL)" in finding.remedy and finding.examples == (
        "a median of 5.085, not 199.4",
    )
    zeros = only(found(sites(s1=frame(seed=1).assign(chol=0.0)))[1:])
    assert zeros.kind == "unit" and "a code for missing" in zeros.what
    inches = frame(seed=1).assign(chol=lambda f: f.chol / 2.54)
    assert only(found(sites(s1=inches))).kind == "unit"
    small = {"a": frame(9), "b": frame(9).assign(chol=1.0)}
    assert not [f for f in found(small) if f.kind == "unit"]


def test_single_values_out_of_range_are_doubtful() -> None:
    table = frame()
    table.loc[[3, 7], "age"] = [-1, 633]
    tables, warnings = read_checked({"a": table}, SCHEMA)
    finding = only(warnings)
    assert finding.rows == (3, 7) and finding.examples == ("-1", "633") and finding.what == "outside 0 to 120 years"
    assert tables[0].values[7, 0] == 633


def test_dates_out_of_range() -> None:
    schema = Schema(Target("y"), [Column("d", kind="date", range=["2010-01-01", None])])
    days = pandas.DataFrame({"d": ["2015-01-01", "1905-06-07", None], "y": [0, 1, 0]})
    assert str(found({"a": days}, schema)[0]).startswith("a, column 'd', row 1: outside 2010-01-01 to any: 1905-06-07.")


def test_columns_without_values() -> None:
    empty = frame(seed=1).assign(chol=None)
    finding = only(found(sites(s1=empty)))
    assert (finding.severity, finding.kind) == ("error", "empty") and "200 rows: all its cells are missing" in str(
        finding
    )
    assert not found(sites(s1=empty[:9]))
    for column, severities in ((Column("chol", optional=True), []), (Column("chol", missing_values=[0]), ["warning"])):
        schema = SCHEMA.replace(columns=(COLUMNS[0], column, *COLUMNS[2:]))
        assert [f.severity for f in found(sites(s1=empty), schema)] == severities
        nowhere = found({name: f.assign(chol=None) for name, f in sites().items()}, schema)
        assert [f.what for f in nowhere if f.severity == "error"] == ["no site has a value"]


def test_missing_cells_may_be_refused() -> None:
    schema = SCHEMA.replace(columns=(COLUMNS[0].replace(missing="refuse"), *COLUMNS[1:]))
    table = frame()
    table.loc[5, "age"] = None
    finding = only(found({"a": table}, schema))
    assert finding.severity == "error" and finding.rows == (5,) and "which the schema refuses" in finding.what


def test_constant_columns() -> None:
    findings = found({"a": frame(seed=0).assign(ward="b"), "b": frame(seed=1)})
    assert only(findings).what == "all 200 values are 'b'"
    findings = found({"a": frame(9).assign(sex="m"), "b": frame(9, 1).assign(sex="m")})
    assert only(findings).what.startswith("every value of every site is 'm'")


def test_repeated_rows_at_a_site_and_between_sites() -> None:
    twice = pandas.concat([frame(), frame()[10:20]], ignore_index=True)
    finding = only(found({"a": twice, "b": frame(seed=1)}))
    assert finding.kind == "repeated" and finding.count == 10 and finding.rows == (200, 201, 202, 203, 204)
    shared = pandas.concat([frame(seed=1), frame()[10:20]], ignore_index=True)
    finding = only(found({"a": frame(), "b": shared, "c": frame(seed=2)}))
    assert (finding.site, finding.kind, finding.count) == ("a", "shared", 10) and finding.what.endswith("also at b")


def test_rows_of_few_categories_may_repeat() -> None:
    schema = Schema(Target("died"), COLUMNS[2:])
    tables = {name: f.drop(columns=["age", "chol"]) for name, f in sites().items()}
    assert found(tables, schema) == []


def test_negative_zero_and_missing_cells_are_equal() -> None:
    table = frame()
    table.loc[6] = table.loc[5]
    table.loc[[5, 6], "age"] = [0.0, -0.0]
    table.loc[[5, 6], "chol"] = np.nan
    assert only(found({"a": table})).rows == (6,)


@pytest.mark.parametrize(
    "leak",
    [
        lambda f: f.assign(chol=f.chol - 300 * f.died),
        lambda f: f.assign(chol=f.chol.where(f.died == 1)),
        lambda f: f.assign(ward=np.where(f.died, "b", f.ward.where(f.ward != "b", "c"))),
    ],
)
def test_leakage_is_suspected(leak) -> None:
    findings = found({"a": leak(frame(seed=1)), "b": leak(frame(seed=2))})
    assert {f.kind for f in findings} == {"leak"} and all("the target (AUC 1.000)" in f.what for f in findings)


def test_leakage_shows_over_small_sites_together() -> None:
    small = {f"s{i}": frame(15, seed=i).assign(chol=lambda f: f.chol - 300 * f.died) for i in range(8)}
    finding = only([f for f in found(small) if f.kind == "leak"])
    assert finding.site == "" and finding.column == "chol"


def test_names_like_the_target() -> None:
    schema = Schema(Target("died"), [COLUMNS[0], Column("Died_in_hospital", kind="flag", categories=[0, 1])])
    frames = {"a": frame()[["age", "died"]].assign(Died_in_hospital=lambda f: 1 - f.died)}
    assert [f.column for f in found(frames, schema)] == ["Died_in_hospital"] * 2


def test_sites_of_one_class_are_allowed_and_all_of_one_class_doubtful() -> None:
    assert found(sites(s1=frame(seed=1).assign(died=0))) == []
    assert only(found({"a": frame().assign(died=0)})).what == "all rows of all sites have class 0"


def test_findings_of_several_sites_are_one() -> None:
    frames = {f"s{i}": frame(seed=i).assign(ward="a") for i in range(4)}
    findings = together(found(frames))
    assert [f.site for f in findings] == ["4 sites (s0, s1, s2 and 1 more)", ""]
    assert findings[0].public(10).count == 0 and findings[0].as_json()["kind"] == "constant"


def test_the_area_under_the_curve() -> None:
    scores, positive = np.array([0, 1, 1, 2.0]), np.array([False, False, True, True])
    assert area(scores, positive) == 3.5 / 4
    assert area(-scores, positive) == 0.5 / 4


def test_conversions() -> None:
    assert "divided by 2.54" in conversion(np.array([170.0]), 60, 75)
    assert "Fahrenheit to Celsius" in conversion(np.array([98.6, 101]), 35, 42)
    assert conversion(np.array([98.6]), 35, np.inf) == "" == conversion(np.array([1e-9, 5e9]), 1, 2)


def test_quantiles_are_those_of_numpy() -> None:
    for size in (1, 2, 7, 100):
        values = np.random.default_rng(size).normal(size=size)
        np.testing.assert_allclose(quantiles_of(values, (0, 0.05, 0.5, 1)), np.quantile(values, (0, 0.05, 0.5, 1)))


def test_values_around_zero_are_not_in_another_unit() -> None:
    centred = {f"s{i}": frame(20, seed=i).assign(chol=lambda f: f.chol - 200) for i in range(30)}
    assert not [f for f in found(centred) if f.kind in ("unit", "site")]


def test_a_column_that_names_sites() -> None:
    finding = only(found({f"s{i}": frame(seed=i).assign(chol=lambda f, i=i: f.chol + 1000 * i) for i in range(5)}))
    assert finding.kind == "site" and finding.column == "chol"


def test_values_outside_their_range() -> None:
    values = np.array([[-1, 300, 1, 2.0], [120, np.nan, np.nan, 0], [121, -5, 0, 0]])
    assert np.argwhere(outside(values, SCHEMA)).tolist() == [[0, 0], [2, 0]]
