"""``fedstrata predict``, ``fedstrata threshold`` and ``fedstrata export``: a trained model for tables at work."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer

from fedstrata.cli.console import echo, say
from fedstrata.cli.options import Json, Quiet, a_path
from fedstrata.cli.printing import print_grid
from fedstrata.core.errors import InputError, invalid
from fedstrata.core.files import whole_or_nothing
from fedstrata.training.risk.predictor import Predictor
from fedstrata.training.risk.risks import read_counts
from fedstrata.training.risk.thresholds import Threshold, choose_threshold, goal_of

if TYPE_CHECKING:
    import pyarrow

RunOrModel = Annotated[Path, typer.Argument(metavar="RUN", help="Run directory, or a model folder.")]
FORMATS = (".csv", ".parquet")
COLUMNS = ("site", "rows", "positives", "sensitivity", "specificity", "ppv", "alerts per 100")


def predict(
    run: RunOrModel,
    table: Annotated[Path, typer.Argument(help="CSV or Parquet file with new rows.")],
    out: Annotated[Path, typer.Option(parser=a_path, metavar="FILE", help="Scores to write (.csv or .parquet).")],
    keep: Annotated[
        str | None, typer.Option(metavar="NAMES", help="Comma-separated columns to copy, such as an identifier.")
    ] = None,
    quiet: Quiet = False,
) -> None:
    """Score the rows of a table with a trained model.

    The table has the columns of the schema; the target may be missing. The result has a row for each of its rows: the
    score, the risk if scores are probabilities or calibrated, whether it raises an alert if a threshold was set, and
    how many of its cells were missing, unknown or out of range.
    """
    predictor = Predictor.load(run)
    check_new(out, FORMATS)
    names = [name.strip() for name in keep.split(",")] if keep else []
    totals = write_scores(predictor.rows(table, names), table, out, None if quiet else say)
    echo(f"{totals['rows']:,} rows scored. Written to {out}.")
    if predictor.calibration is None:
        echo("The scores rank patients; they are not probabilities, since nobody has calibrated them.")
    for name, words in (("missing", "missing cells were filled in"), ("unknown", "cells are not in the schema")):
        if totals[name]:
            echo(f"{totals[name]:,} {words}.")
    if totals["out_of_range"]:
        echo(f"{totals['out_of_range']:,} numbers are outside their range.")


def write_scores(chunks: Iterator[dict[str, Any]], table: Path, out: Path, tell: Any = None) -> dict[str, int]:
    """Write the columns of a prediction to a file, chunk by chunk; an interrupted one leaves nothing behind.

    table: the file with the rows.
    """
    import pyarrow as pa

    totals = dict.fromkeys(("rows", "missing", "unknown", "out_of_range"), 0)
    writer: Any = None
    with whole_or_nothing(out) as place:
        for chunk in chunks:
            columns = pa.table({name: _as_arrow(values) for name, values in chunk.items()})
            writer = writer or _writer(place, columns.schema, out.suffix)
            writer.write_table(columns)
            totals["rows"] += columns.num_rows
            for name in ("missing", "unknown", "out_of_range"):
                totals[name] += int(np.sum(chunk[name]))
            if tell is not None and totals["rows"] % 1_000_000 < columns.num_rows and totals["rows"] >= 1_000_000:
                tell(f"{totals['rows']:,} rows")
        if writer is None:
            raise InputError(f"The table {table} has no rows. Export it again. Nothing was written.")
        writer.close()
    return totals


def _as_arrow(values: list[str] | np.ndarray) -> pyarrow.Array:
    """Return a column for pyarrow, which would import pandas to look at an array of NumPy."""
    import pyarrow as pa

    if not isinstance(values, np.ndarray):
        return pa.array(values)
    buffer = pa.py_buffer(np.ascontiguousarray(values))
    return pa.Array.from_buffers(pa.from_numpy_dtype(values.dtype), len(values), [None, buffer])


def _writer(path: Path, schema: pyarrow.Schema, suffix: str) -> Any:
    from pyarrow import csv, parquet

    return csv.CSVWriter(path, schema) if suffix == ".csv" else parquet.ParquetWriter(path, schema)


def threshold(
    run: RunOrModel,
    sensitivity: Annotated[float | None, typer.Option(metavar="SHARE", help="Find at least this share.")] = None,
    specificity: Annotated[
        float | None, typer.Option(metavar="SHARE", help="Raise no alert for at least this share of the others.")
    ] = None,
    ppv: Annotated[
        float | None, typer.Option(metavar="SHARE", help="At least this share of the alerts are right.")
    ] = None,
    alerts: Annotated[float | None, typer.Option(metavar="N", help="At most N alerts per 100 rows.")] = None,
    set_: Annotated[bool, typer.Option("--set", help="Store the threshold in the model, for predict.")] = False,
    as_json: Json = False,
) -> None:
    """Choose a threshold on held-out rows, and say what follows from it.

    Give one goal, for example --sensitivity 0.9. The table has sensitivity, specificity and positive predictive value
    (ppv) with 95 % intervals, and alerts per 100 rows, for all sites together and for each site. Sites tell counts
    only, and none below the minimum of the preparation.
    """
    goal, wanted = goal_of({"sensitivity": sensitivity, "specificity": specificity, "ppv": ppv, "alerts": alerts})
    predictor, counts = Predictor.load(run), read_counts(run)
    chosen = choose_threshold(counts, goal, wanted)
    names = _names(run, len(chosen.sites))
    if set_:
        predictor.with_threshold(chosen.score).write(run / "model")
    if as_json:
        echo(
            json.dumps({"score": chosen.score, "risk": _risk(predictor, chosen), "rows": chosen.rows(names)}, indent=2)
        )
        return
    print_grid(_lines(chosen, names), COLUMNS)
    risk = _risk(predictor, chosen)
    echo(f"Alert if the score is above {chosen.score:.6g}{'' if risk is None else f', a risk of {100 * risk:.1f} %'}.")
    if set_:
        echo(f"Stored in {run / 'model'}: fedstrata predict now says who raises an alert.")


def _risk(predictor: Predictor, chosen: Threshold) -> float | None:
    calibration = predictor.calibration
    return None if calibration is None else float(calibration(np.array([chosen.score]))[0])


def _names(run: Path, sites: int) -> list[str]:
    try:
        names = json.loads((run / "summary.json").read_bytes()).get("client_names")
    except (OSError, ValueError, AttributeError, RecursionError):
        names = None
    right = isinstance(names, list) and len(names) == sites and all(isinstance(n, str) for n in names)
    return list(names) if right else [f"site {k}" for k in range(sites)]


def _lines(chosen: Threshold, names: Sequence[str]) -> list[list[str]]:
    lines = []
    for row in chosen.rows(names):
        shares = [_share(row, name) for name in ("sensitivity", "specificity", "ppv")]
        rate = row["alerts_per_100"]
        told = [f"{row['rows']:,}", f"{row['positives']:,}"] if row["rows"] else ["too few", "-"]
        lines.append([row["site"], *told, *shares, "-" if rate is None else f"{rate:.1f}"])
    return lines


def _share(row: dict[str, Any], name: str) -> str:
    value = row[name]
    return "-" if value is None else f"{value:.3f} [{row[f'{name}_low']:.3f}, {row[f'{name}_high']:.3f}]"


def export(
    run: RunOrModel,
    out: Annotated[
        Path, typer.Option(parser=a_path, metavar="PATH", help="Folder to write, or a file ending in .onnx or .pt2.")
    ],
) -> None:
    """Export a trained model with its schema, preparation, calibration and threshold.

    A folder holds all of them, for predict and for Predictor.load in Python. An .onnx or .pt2 file (torch.export) is
    the path from the raw values of a row (numbers, codes of categories, NaN for missing cells) to its score and risk.
    """
    predictor = Predictor.load(run)
    if out.suffix in (".onnx", ".pt2"):
        check_new(out, (".onnx", ".pt2"))
        (predictor.export_onnx if out.suffix == ".onnx" else predictor.export_program)(out)
    else:
        predictor.save(out)
    echo(f"Exported to {out}.")


def check_new(path: Path, endings: Sequence[str]) -> None:
    """Raise unless a file can be written there: with one of these endings, where nothing is yet."""
    if path.suffix not in endings:
        raise invalid("--out", str(path), f"a file that ends in {' or '.join(endings)}")
    if os.path.lexists(path):
        raise InputError(f"The file {path} exists. Nothing was overwritten. Choose another.")
    if not path.parent.is_dir() or not os.access(path.parent, os.W_OK | os.X_OK):
        raise InputError(f"There is no directory {path.parent} that can be written.")
