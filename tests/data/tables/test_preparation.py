"""The preparation of tables: equal to scikit-learn's on the pooled table, from sums that tell of no small group."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.compose import ColumnTransformer
from sklearn.impute import SimpleImputer
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, RobustScaler, StandardScaler

import fedstrata as fs
from fedstrata.data.tables import Column, Schema, Target, statistics
from fedstrata.data.tables.preparation import Fitted, Plan, Preparation

COLUMNS = (
    Column("age", range=(0, 120), step=1.0, missing="median", indicator=True),
    Column("pressure", range=(0.0, 300.0), missing="mean"),
    Column("stage", "ordinal", categories=("I", "II", "III", "IV"), missing="median"),
    Column("smoker", "flag", categories=("no", "yes"), missing="most_frequent"),
    Column("region", "category", categories=("a", "b", "c", "d"), missing="most_frequent", indicator=True),
    Column("seen", "date", range=("2020-01-01", "2022-01-01"), missing="mean"),
    Column("group", "category", categories=("x", "y"), missing="constant", fill="y"),
)


def sites(rows: tuple[int, ...] = (120, 45, 300), seed: int = 0, lost: float = 0.1) -> list[np.ndarray]:
    rng, tables = np.random.default_rng(seed), []
    for k, n in enumerate(rows):
        values = np.column_stack(
            [
                rng.integers(20, 95, n) + k,
                rng.normal(120 + 10 * k, 15, n),
                rng.choice(4, n, p=(0.4, 0.3, 0.2, 0.1)),
                rng.integers(0, 2, n),
                rng.choice(4, n, p=(0.5, 0.3, 0.19, 0.01)),
                18262 + rng.integers(0, 700, n),
                rng.integers(0, 2, n),
            ]
        ).astype(np.float64)
        values[rng.random(values.shape) < lost] = np.nan
        tables.append(values)
    return tables


def plan_of(columns: tuple[Column, ...], **how: object) -> Plan:
    return Plan(Schema(target=Target("died"), columns=columns), Preparation(**how))


def fitted(tables: list[np.ndarray], columns: tuple[Column, ...] = COLUMNS, **how: object) -> Fitted:
    plan = plan_of(columns, **how)
    return plan.fit(np.stack([plan.answer(values) for values in tables]))


def reference(scale: str) -> ColumnTransformer:
    """The same in scikit-learn: statistics of present cells, then imputing."""

    def numbers(strategy: str) -> list[object]:
        scaler = {"standard": [StandardScaler()], "robust": [RobustScaler()], "none": []}[scale]
        return [*scaler, SimpleImputer(strategy=strategy)]

    def one_hot(size: int, **how: object) -> object:
        return make_pipeline(SimpleImputer(**how), OneHotEncoder(categories=[np.arange(size)], sparse_output=False))

    return ColumnTransformer(
        [
            ("age", make_pipeline(*numbers("median")[:-1], SimpleImputer(strategy="median", add_indicator=True)), [0]),
            ("pressure", make_pipeline(*numbers("mean")), [1]),
            ("stage", make_pipeline(*numbers("median")), [2]),
            ("smoker", SimpleImputer(strategy="most_frequent"), [3]),
            ("region", one_hot(4, strategy="most_frequent"), [4]),
            ("missing", make_pipeline(SimpleImputer(strategy="most_frequent", add_indicator=True)), [4]),
            ("seen", make_pipeline(*numbers("mean")), [5]),
            ("group", one_hot(2, strategy="constant", fill_value=1), [6]),
        ]
    )


@pytest.mark.parametrize("scale", ["standard", "none", "robust"])
def test_equals_scikit_learn_on_the_pooled_table(scale: str) -> None:
    columns = tuple(c if c.name != "pressure" or scale != "robust" else c.replace(step=1.0) for c in COLUMNS)
    tables = sites()
    if scale == "robust":
        tables = [np.column_stack([t[:, :1], np.round(t[:, 1]), t[:, 2:]]) for t in tables]
    pooled = np.concatenate(tables)
    made = fitted(tables, columns, scale=scale, minimum=1)
    wanted = np.delete(reference(scale).fit_transform(pooled), 9, axis=1)  # the values beside the indicator
    np.testing.assert_allclose(made.transform(pooled), wanted, rtol=1e-9, atol=1e-9)
    assert len(made.names) == wanted.shape[1]


def test_names_follow_the_columns() -> None:
    names = fitted(sites(), minimum=1, rare=20).names
    assert names[:5] == ("age", "age missing", "pressure", "stage", "smoker")
    regions = [*(f"region={c}" for c in "abcd"), "region=other", "region missing"]
    assert names[5:] == (*regions, "seen", "group=x", "group=y", "group=other")


def test_rare_categories_share_an_input() -> None:
    tables = sites()
    counts = np.bincount(np.concatenate(tables)[:, 4][~np.isnan(np.concatenate(tables)[:, 4])].astype(int))
    made = fitted(tables, minimum=1, rare=int(counts[3]) + 1)
    values = np.tile(tables[0][0], (4, 1))
    values[:, 4] = np.arange(4)
    at = made.names.index("region=a")
    np.testing.assert_array_equal(made.transform(values)[:, at : at + 5], np.eye(5)[[0, 1, 2, 4]])


def test_frequencies() -> None:
    tables = sites()
    made = fitted(tables, minimum=1, encode="frequency")
    codes = np.concatenate(tables)[:, 4]
    shares = np.bincount(codes[~np.isnan(codes)].astype(int)) / (~np.isnan(codes)).sum()
    values = np.tile(tables[0][0], (4, 1))
    values[:, 4] = np.arange(4)
    np.testing.assert_allclose(made.transform(values)[:, made.names.index("region")], shares)


def test_an_unknown_category_is_none_of_them() -> None:
    made = fitted(sites(), minimum=1)
    values = sites()[0][:1].copy()
    values[0, 4] = -1.0
    at = made.names.index("region=a")
    np.testing.assert_array_equal(made.transform(values)[0, at : at + 4], 0.0)


def test_numbers_are_clipped_to_their_range() -> None:
    made = fitted(sites(), minimum=1, scale="none")
    values = np.tile(np.nan_to_num(sites()[0][:1]), (2, 1))
    values[:, 0] = -5.0, 500.0
    assert made.transform(values)[:, 0].tolist() == [0.0, 120.0]


def test_a_median_needs_a_range() -> None:
    with pytest.raises(fs.InputError, match=r"'weight' needs both ends of its range"):
        plan_of((Column("weight"),))
    with pytest.raises(fs.InputError, match=r"'weight', 'height' need both ends of their range"):
        plan_of((Column("weight"), Column("age", range=[0, 99]), Column("height", range=[0, None])))


def test_a_column_that_no_site_can_tell_of_is_an_error() -> None:
    with pytest.raises(fs.InputError, match="No site can tell anything of the column 'pressure'"):
        fitted([values * np.where(np.arange(7) == 1, np.nan, 1) for values in sites()])


@pytest.mark.parametrize("how", [{}, {"scale": "robust"}, {"encode": "frequency"}], ids=str)
def test_a_site_alone_does_without_a_column_that_it_lacks(how: dict[str, object]) -> None:
    (values,), lacking = sites((40,)), [1, 2, 4, 5]
    values[:, lacking] = np.nan
    plan = plan_of(tuple(c.replace(step=1.0) if c.name == "pressure" else c for c in COLUMNS), **how)
    with pytest.raises(fs.InputError, match="No site can tell anything"):
        plan.fit(plan.answer(values)[None])
    alone = plan.of_one_site()
    made = alone.fit(alone.answer(values)[None])
    inputs = made.transform(np.concatenate(sites()))
    assert np.isfinite(inputs).all() and made.names == plan.names
    for name in ("pressure", "stage", "seen"):
        assert not inputs[:, made.names.index(name)].any(), "it knows nothing of what others have there"
    ages = values[:, 0][~np.isnan(values[:, 0])]
    if not how:
        assert made.vector[len(COLUMNS)] == pytest.approx(ages.mean()), "its own counts are exact"


def test_the_same_on_the_tensors_of_an_exported_module() -> None:
    import torch

    made = fitted(sites(), minimum=1)
    values = torch.from_numpy(np.concatenate(sites()))
    exported = torch.export.export(made.module, (values[:7],), dynamic_shapes=({0: torch.export.Dim("rows")},))
    torch.testing.assert_close(exported.module()(values), made.module(values))


# --- what leaves a site ----------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(0, 60),
    lost=st.floats(0, 1),
    minimum=st.integers(1, 12),
    seed=st.integers(0, 1000),
)
def test_no_count_below_the_minimum_leaves_a_site(rows: int, lost: float, minimum: int, seed: int) -> None:
    values = sites((rows,), seed, lost)[0]
    plan = plan_of(COLUMNS, scale="robust", rare=2, minimum=minimum)
    parts = np.split(plan.answer(values), np.cumsum(plan.sizes)[:-1])
    q, c = len(plan.averaged), len(plan.counted)
    counts = [part[0] for part in parts[:q]]
    cells = [cell for part in parts[q : q + c] for cell in part]
    cumulative = [np.diff(part, prepend=0.0) for part in parts[q + c :]]
    told = [*counts, *cells, *(cell for part in cumulative for cell in part)]
    assert all(cell == 0 or cell >= minimum for cell in told)
    present = (~np.isnan(values)).sum(0)
    for j, count in zip(plan.averaged, counts, strict=True):
        assert count == 0 or rows - count == 0 or rows - count >= minimum
        assert abs(count - present[j]) < minimum
    for part in parts[q + c :]:
        assert part[-1] == 0 or rows - part[-1] == 0 or rows - part[-1] >= minimum
    for j, part in zip(plan.counted, parts[q : q + c], strict=True):
        true = np.bincount(values[~np.isnan(values[:, j]), j].astype(int), minlength=plan.columns[j].size)
        small = (true > 0) & (true < minimum)
        assert (part[small] % minimum == 0).all() and (part[true == 0] == 0).all()
        assert (abs(part - true) < minimum).all()


def test_what_small_counts_are_rounded_to_is_right_on_average() -> None:
    tables = sites((25,) * 2000, lost=0.2)
    present = [np.count_nonzero(~np.isnan(t[:, 1])) for t in tables]
    told = [statistics.moments(t[:, [1]], 10)[0, 0] for t, n in zip(tables, present, strict=True) if n >= 10]
    assert abs(sum(told) - sum(n for n in present if n >= 10)) < 4 * 5 * math.sqrt(len(told))
    counts = sum(statistics.category_counts(t[:, 4], 4, 10) for t in tables)
    codes = np.concatenate(tables)[:, 4]
    true = np.bincount(codes[~np.isnan(codes)].astype(int), minlength=4)
    np.testing.assert_allclose(counts, true, atol=4 * 5 * math.sqrt(len(tables)))


def test_quantiles_of_many_small_sites_are_those_of_all_rows() -> None:
    columns = (COLUMNS[0], COLUMNS[1].replace(step=0.1, missing="median"))
    tables = [table[:, :2] for table in sites((12,) * 400, lost=0.05)]
    exact, told = (fitted(tables, columns, scale="robust", minimum=m).vector[2:] for m in (1, 10))
    np.testing.assert_allclose(told[:2], exact[:2], atol=0.1 * exact[2:].max())
    np.testing.assert_allclose(told[2:], exact[2:], rtol=0.2)


def test_the_largest_value_of_a_site_is_not_told() -> None:
    """The last values of a table move, and what is told does not follow, but for one table in ten or so."""
    rng, grid = np.random.default_rng(0), np.arange(1000.0)
    places = []
    for _ in range(200):
        values = np.append(rng.integers(0, 100, 49), 900.0).astype(float)
        told = statistics.below(values, grid, 10)
        places.append(grid[np.argmax(told == 50)])
    assert 0 < np.mean(np.array(places) == 900.0) < 0.25


def test_the_sum_of_the_larger_categories_does_not_tell_a_small_one() -> None:
    """Tables that differ in the small category alone, and those around it, give every answer."""
    for few in (1, 9):
        codes = np.repeat([0.0, 1.0, 2.0], [50, 20, few])
        told = statistics.category_counts(codes, 3, 10)
        assert told[0] == 50 and told[1] in (10, 20, 30) and told[2] in (0, 10)


@pytest.mark.parametrize("kind", ["ordinal", "flag"])
def test_moments_of_codes_do_not_tell_how_often_each_occurs(kind: str) -> None:
    """The number, mean and squares of two or three codes are as many equations as there are counts."""
    codes = np.repeat([0.0, 1.0, 2.0], [60, 37, 3]) if kind == "ordinal" else np.repeat([0.0, 1.0], [97, 3])
    column = Column("stage", kind, categories=("I", "II", "III")[: len(np.unique(codes))], missing="mean")
    powers = np.vander(np.unique(codes), 3, increasing=True).T
    for key in range(20):
        values = np.random.default_rng(key).permutation(codes)[:, None]
        count, mean, squares = plan_of((column,), scale="standard").answer(values)
        sums = np.array([count, count * mean, squares + count * mean**2])
        told = np.linalg.lstsq(powers, sums, rcond=None)[0]
        assert np.abs(told[-1] - 10 * np.round(told[-1] / 10)) < 1e-6, "a multiple of the minimum"
    exact = plan_of((column,), scale="standard", minimum=1).answer(codes[:, None])
    np.testing.assert_allclose(exact, statistics.moments(codes[:, None], 1)[0], rtol=1e-12)


def test_a_mean_does_not_tell_how_many_cells_are_missing() -> None:
    """The mean of whole numbers, times their number, is whole; so are the squares, and neither may tell the number."""
    for key in range(20):
        rng = np.random.default_rng(key)
        ages = rng.integers(20, 90, 97).astype(np.float64)
        exact = ages.mean()
        count, mean, squares = statistics.moments(np.append(ages, [np.nan] * 3)[:, None], 10)[0]
        assert count in (90, 100) and abs(mean - exact) <= ages.std() / 97
        assert squares / count == pytest.approx(ages.var(), rel=0.02)
        fit = [n for n in range(91, 101) if abs(round(mean * n) - mean * n) <= n * ages.std() / 97]
        assert len(fit) == 10 and mean != exact
    assert statistics.moments(np.append(ages, [np.nan] * 10)[:, None], 10)[0, 1] == pytest.approx(
        ages.mean(), rel=1e-15
    )


def test_the_sum_of_categories_does_not_tell_a_few_missing_cells() -> None:
    told = {
        tuple(statistics.category_counts(np.append(np.repeat([0.0, 1.0], [57, 40]), [np.nan] * few), 2, 10))
        for few in (1, 3, 9)
    }
    assert all(large == 57 and small % 10 == 0 for large, small in told)
    codes = np.append(np.repeat([0.0, 1.0], [57, 41]), [np.nan] * 12)
    assert statistics.category_counts(codes, 2, 10).tolist() == [57, 41], "enough are missing"


def test_moments_merge_like_those_of_all_rows() -> None:
    tables = sites(lost=0.0)
    merged = statistics.merged(np.stack([statistics.moments(values, 1) for values in tables]))
    pooled = np.concatenate(tables)
    np.testing.assert_allclose(merged[:, 1], pooled.mean(0), rtol=1e-13)
    np.testing.assert_allclose(np.sqrt(merged[:, 2] / merged[:, 0]), pooled.std(0), rtol=1e-12)


@given(st.lists(st.integers(0, 30), min_size=1, max_size=40), st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0, 0.1]))
def test_quantiles_equal_those_of_numpy(values: list[int], share: float) -> None:
    column, grid = np.array(values, dtype=np.float64), np.arange(31.0)
    counts = statistics.below(column, grid + 0.5, 1)
    assert math.isclose(statistics.quantile(grid, counts, share), np.quantile(column, share), abs_tol=1e-9)
