"""Real tables of hospitals for tests: a file per site, a schema, and scikit-learn's preparation of the pooled table.

The pooled table is read with pandas, and scikit-learn sees the cells as they are in it: nothing here uses the code that
reads, checks or prepares tables.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from sklearn.compose import ColumnTransformer
from sklearn.impute import MissingIndicator, SimpleImputer
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import (
    FunctionTransformer,
    OneHotEncoder,
    OrdinalEncoder,
    RobustScaler,
    StandardScaler,
)

FOLDER = Path(os.environ.get("FEDSTRATA_DATA", "")) / "sites"
EXAMPLE = Path(__file__).parents[1] / "examples" / "hospital" / "schema.toml"


def number(name: str, low: float, high: float, step: float | None = None, **more: Any) -> dict[str, Any]:
    steps = {} if step is None else {"step": step}
    return {"name": name, "kind": "numeric", "range": [low, high], **steps, **more}


def category(name: str, *cells: str, kind: str = "category", **more: Any) -> dict[str, Any]:
    return {"name": name, "kind": kind, "categories": list(cells), **more}


GUSTO = [
    number("age", 18, 100, missing="mean"),  # one patient of 110
    number("pulse", 20, 200, 1),
    number("sysbp", 40, 250, 1, missing="mean"),
    number("height", 120, 220, 0.1),
    number("weight", 35, 220, 0.1, indicator=True),
    category("Killip", "I", "II", "III", "IV", kind="ordinal", missing="median"),
    category("miloc", "Anterior", "Inferior", "Other"),
    category("smk", "never", "current", "quit"),
    category("pmi", "no", "yes", kind="flag"),
    category("tpa", "0", "1", kind="flag", indicator=True),
    category("tx", "SK", "tPA", "SK+tPA"),
]

LOST = {"missing_values": ["-1"], "optional": True}

EICU = [
    number("heartrate", 40, 180, 1, **LOST),
    number("temperature", 20, 45, 0.01, missing="mean", **LOST),
    number("sodium", 100, 175, 0.1, indicator=True, **LOST),
    number("creatinine", 0, 25, 0.001, missing="constant", fill=1.0, **LOST),
    number("wbc", 0, 100, 0.01, **LOST),
    number("albumin", 1, 6, 0.1, missing="mean", indicator=True, **LOST),
    category("motor", "1", "2", "3", "4", "5", "6", kind="ordinal", missing="median", **LOST),
    category("vent", "0", "1", kind="flag"),
    category("dialysis", "0", "1", kind="flag"),
    category("unittype", "Med-Surg ICU", "MICU", "Cardiac ICU", "SICU", "CCU-CTICU", "Neuro ICU", "CSICU", "CTICU"),
    category("ethnicity", "Caucasian", "African American", "Hispanic", "Other/Unknown", "Asian", "Native American",
             indicator=True, optional=True),
]  # fmt: skip


@dataclass(frozen=True)
class World:
    """A real table.

    files:  one for each site, in the order of the library.
    schema: as a table.
    pooled: the cells of all sites in this order, as text.
    """

    files: list[Path]
    schema: dict[str, Any]
    pooled: pd.DataFrame

    @property
    def columns(self) -> list[dict[str, Any]]:
        return self.schema["columns"]  # type: ignore[no-any-return]

    def cells(self) -> pd.DataFrame:
        """The pooled table: numbers, and categories as text; NaN where a cell is missing."""
        frame = {}
        for column in self.columns:
            text = self.pooled[column["name"]].str.strip()
            lost = [float(cell) for cell in column.get("missing_values", ())]
            absent = text.isin(["", "?"]) | pd.to_numeric(text, errors="coerce").isin(lost)
            values = text.mask(absent)
            codes = pd.to_numeric(values, errors="coerce")
            if column["kind"] == "numeric":
                values = codes
            elif codes.notna().sum() == values.notna().sum():  # 1 and 1.0 are the same category
                values = codes.map(lambda v: f"{v:g}", na_action="ignore")
            frame[column["name"]] = (
                values if column["kind"] == "numeric" else values.astype(object).mask(absent, np.nan)
            )
        return pd.DataFrame(frame)

    def reference(self, scale: str, frequency: bool) -> np.ndarray:
        """The pooled table as scikit-learn prepares it, statistics being those of the cells that are present."""
        cells = self.cells()
        steps = [(c["name"], _step(c, scale, frequency, cells[c["name"]]), [c["name"]]) for c in self.columns]
        indicators = [(f"{c['name']} missing", MissingIndicator(features="all"), [c["name"]])
                      for c in self.columns if c.get("indicator")]  # fmt: skip
        every = ColumnTransformer([*steps, *indicators], sparse_threshold=0, verbose_feature_names_out=True)
        made = np.asarray(every.fit_transform(cells), np.float64)
        order: list[int] = []
        for column in self.columns:
            for name in (column["name"], f"{column['name']} missing"):
                if name in every.output_indices_:
                    place = every.output_indices_[name]
                    order += range(place.start, place.stop)
        return made[:, order]


def _step(column: dict[str, Any], scale: str, frequency: bool, cells: pd.Series) -> Any:
    """What scikit-learn does with a column."""
    rule = column.get("missing", "most_frequent" if "categories" in column else "median")
    if column["kind"] in ("category", "flag"):
        rule = {"strategy": rule} | ({"fill_value": column["fill"]} if rule == "constant" else {})
        imputer: Any = SimpleImputer(missing_values=np.nan, **rule)
        names = [str(c) for c in column["categories"]]
        if column["kind"] == "flag":
            return make_pipeline(imputer, OrdinalEncoder(categories=[names]))
        if frequency:
            shares = cells.value_counts(normalize=True).to_dict()
            return make_pipeline(imputer, FunctionTransformer(np.vectorize(lambda c: shares.get(c, 0.0))))
        return make_pipeline(imputer, OneHotEncoder(categories=[names], sparse_output=False))
    steps: list[Any] = []
    if column["kind"] == "ordinal":
        names = [str(c) for c in column["categories"]]
        names += [np.nan] * bool(cells.isna().any())
        steps.append(OrdinalEncoder(categories=[np.array(names, object)], encoded_missing_value=np.nan))
    else:
        low, high = column["range"]
        steps.append(FunctionTransformer(np.clip, kw_args={"a_min": low, "a_max": high}))
    scaler = {"standard": StandardScaler(), "robust": RobustScaler()}[scale]
    if rule == "constant":  # in units of the column
        return make_pipeline(*steps, _Filled(scaler, column["fill"]))
    return make_pipeline(*steps, scaler, SimpleImputer(strategy=rule))


class _Filled(FunctionTransformer):
    """Scale by what is present, then scale the value that fills the rest."""

    def __init__(self, scaler: Any = None, fill: float = 0.0) -> None:
        super().__init__()
        self.scaler, self.fill = scaler, fill

    def fit_transform(self, X: Any, y: Any = None) -> Any:
        values = np.asarray(X, np.float64)
        return self.scaler.fit(values).transform(np.where(np.isnan(values), self.fill, values))


# --- the tables ------------------------------------------------------------------------------------------------------


def heart(folder: Path) -> World:
    schema = tomllib.loads(EXAMPLE.read_text())
    files = sorted((FOLDER / "heart-disease").glob("processed.*.data"))
    names = schema["file"]["names"]
    frames = [pd.read_csv(file, names=names, dtype=str, keep_default_na=False) for file in files]
    return World(files, schema, pd.concat(frames, ignore_index=True))


def gusto(folder: Path) -> World:
    frame = pd.read_csv(FOLDER / "gusto" / "gusto.csv.gz", dtype=str, keep_default_na=False)
    return _split(folder, frame, "regl", "day30", GUSTO)


def eicu(folder: Path) -> World:
    outcome, patient, values = (
        pd.read_csv(FOLDER / "eicu-demo" / f"{name}.csv.gz", dtype=str, keep_default_na=False)
        for name in ("apachepredvar", "patient", "apacheapsvar")
    )
    frame = outcome[["patientunitstayid", "diedinhospital"]].merge(values, on="patientunitstayid")
    frame = frame.merge(patient[["patientunitstayid", "hospitalid", "unittype", "ethnicity"]], on="patientunitstayid")
    return _split(folder, frame, "hospitalid", "diedinhospital", EICU)


def _split(folder: Path, frame: pd.DataFrame, site: str, target: str, columns: list[dict[str, Any]]) -> World:
    """Write a file for each site."""
    folder.mkdir(parents=True, exist_ok=True)
    parts = dict(sorted(((int(name), part) for name, part in frame.groupby(site)), key=lambda pair: pair[0]))
    for name, part in parts.items():
        part[[*(c["name"] for c in columns), target]].to_csv(folder / f"{name}.csv", index=False)
    schema = {"version": 1, "target": {"name": target}, "columns": columns}
    return World([folder / f"{name}.csv" for name in parts], schema, pd.concat(list(parts.values()), ignore_index=True))


WORLDS: dict[str, Callable[[Path], World]] = {"heart": heart, "eicu": eicu, "gusto": gusto}
