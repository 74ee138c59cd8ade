"""A trained model with all that a new row needs: schema, preparation, calibration and threshold."""

from __future__ import annotations

import html
import io
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import tomli_w
import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import nn

from fedstrata.core.errors import InputError, invalid, is_finite
from fedstrata.core.files import (
    flatten,
    folder_at,
    make_folder,
    naming,
    read_toml,
    refuse_used,
    whole_or_nothing,
    write_atomically,
)
from fedstrata.core.options import build
from fedstrata.core.version import __version__
from fedstrata.data.tables.fitted import Fitted, Prepare
from fedstrata.data.tables.preparation import Plan, Preparation
from fedstrata.data.tables.schema import Schema
from fedstrata.models import zoo
from fedstrata.training.checkpoint import to_safetensors
from fedstrata.training.risk.calibration import Calibration

if TYPE_CHECKING:
    import pandas

FORMAT = 1
"""The version of a model folder's form."""

FILES = ("model.toml", "schema.toml", "weights.safetensors", "preparation.safetensors", "decisions.json")
"""The files of a model folder."""


@dataclass(frozen=True, repr=False)
class Predictor:
    """A trained model for tables: ``predictor.predict("new.csv")`` returns a risk for every row.

    fitted:      the preparation of the columns, with its schema.
    model:       the module, in evaluation mode: prepared inputs to logits.
    calibration: what turns scores into risks; None if scores are not probabilities and nobody has calibrated them.
    threshold:   the score above which a row raises an alert; None if there is none.
    about:       what a reader should know: the algorithm, the problem, the sites, ...
    """

    fitted: Fitted
    model: nn.Module
    calibration: Calibration | None = None
    threshold: float | None = None
    about: dict[str, Any] | None = None

    def __repr__(self) -> str:
        what = "risks" if self.calibration is not None else "scores that are not probabilities"
        return f"<Predictor of {self.schema.target.name}: {what} from {len(self.schema.features)} columns>"

    @property
    def schema(self) -> Schema:
        """The schema of the tables."""
        return self.fitted.plan.schema

    @cached_property
    def module(self) -> WholePath:
        """From raw values to the score and the risk, as one module."""
        return WholePath(self)

    @torch.no_grad()
    def scores_of(self, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the score and the risk of rows of raw values [n, p]; the risk is NaN if scores are not calibrated."""
        score, risk = self.module(torch.from_numpy(np.asfortranarray(values)))
        return score.numpy(), risk.numpy()

    # --- tables -------------------------------------------------------------------------------------------------

    def predict(self, source: Any, keep: Sequence[str] = ()) -> pandas.DataFrame:
        """Score the rows of a file or a frame; return a frame with a row for each.

        keep: columns to copy from the table, such as an identifier.

        The columns are those in ``keep``, ``score``, ``risk`` (if scores are calibrated), ``alert`` (if there is a
        threshold), ``missing`` (cells filled in), ``unknown`` (cells that the schema does not allow, which count as
        missing) and ``out_of_range`` (numbers outside the range of the schema).
        """
        import pandas as pd

        parts = [pd.DataFrame(columns) for columns in self.rows(source, keep)]
        return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame(self._columns(keep))

    def rows(self, source: Any, keep: Sequence[str] = ()) -> Iterator[dict[str, Any]]:
        """Yield the columns of :meth:`predict` in chunks, in memory that does not depend on the length of the table."""
        from fedstrata.data.tables.reading import chunks

        low, high = np.array([column.bounds for column in self.schema.features]).T
        for name in keep:
            if name in self._columns(()):
                raise InputError(f"The column {name!r} cannot be kept: the result has one of this name. Rename it.")
        for chunk in chunks(source, self.schema, keep=keep):
            score, risk = self.scores_of(chunk.values)
            unknown = np.zeros(len(score), np.int64)
            for problem in chunk.problems:
                unknown[problem.rows] += 1
            with np.errstate(invalid="ignore"):
                outside = ((chunk.values < low) | (chunk.values > high)).sum(1)
            columns = {name: chunk.texts[name].to_pylist() for name in keep if name in chunk.texts}
            columns["score"] = score
            if self.calibration is not None:
                columns["risk"] = risk
            if self.threshold is not None:
                columns["alert"] = (score > self.threshold).astype(np.int64)
            columns |= {"missing": np.isnan(chunk.values).sum(1), "unknown": unknown, "out_of_range": outside}
            yield columns

    def _columns(self, keep: Sequence[str]) -> dict[str, list[Any]]:
        risk = ["risk"] * (self.calibration is not None) + ["alert"] * (self.threshold is not None)
        return {name: [] for name in (*keep, "score", *risk, "missing", "unknown", "out_of_range")}

    # --- files --------------------------------------------------------------------------------------------------

    def save(self, folder: str | Path) -> Path:
        """Write a model folder with a card (README.md), for :meth:`load`; return its path.

        A new folder has its name only once it is whole.
        """
        path = folder_at(folder, "folder of a model")
        refuse_used(path)
        with whole_or_nothing(path) as place:
            self.write(place)
            write_atomically(place / "README.md", self.card().encode())
        return path

    def write(self, folder: Path) -> None:
        """Write the files of a model folder, over those that are there."""
        make_folder(folder)
        recipe = zoo.recipe_of(self.model)
        table: dict[str, Any] = {"format": FORMAT, "version": __version__, "model": recipe or {"name": ""}}
        table |= {"schema": self.schema.digest, "preparation": self.fitted.plan.how.to_table()}
        decisions = {
            "calibration": None if self.calibration is None else self.calibration.to_table(),
            "threshold": self.threshold,
            "about": self.about or {},
        }
        weights = {name: tensor.cpu() for name, tensor in self.model.state_dict().items()}
        write_atomically(folder / "schema.toml", self.schema.text().encode())
        write_atomically(folder / "weights.safetensors", to_safetensors(weights))
        vector = {"statistics": torch.from_numpy(self.fitted.vector)}
        write_atomically(folder / "preparation.safetensors", to_safetensors(vector))
        write_atomically(folder / "decisions.json", json.dumps(decisions, indent=2).encode())
        write_atomically(folder / "model.toml", tomli_w.dumps(table).encode())

    @staticmethod
    def load(folder: str | Path, model: nn.Module | None = None) -> Predictor:
        """Read a model folder, or the one in a run directory.

        model: the module, with any weights, if it was not built by :func:`fedstrata.models.model`.
        """
        path = Path(folder)
        path = path / "model" if (path / "model" / "model.toml").exists() else path
        if not (path / "model.toml").exists():
            raise InputError(
                f"There is no model in {path}. Name a run on tables that has finished, or a folder that was saved or "
                "exported."
            )
        table = read_toml(path / "model.toml")
        if table.get("format") != FORMAT:
            raise invalid(f"format in {path / 'model.toml'}", table.get("format"), f"{FORMAT}")
        schema = Schema.read(path / "schema.toml")
        if table.get("schema", schema.digest) != schema.digest:
            raise InputError(
                f"The schema in {path / 'schema.toml'} is not the one that the model was trained with. Restore it, or "
                "train again."
            )
        how = build(Preparation, _table(table, "preparation"), str(path / "model.toml"), "preparation")
        plan = Plan(schema, how)
        statistics = _tensors(path / "preparation.safetensors").get("statistics", torch.empty(0))
        fitted = Fitted(plan, statistics.double().numpy())
        module = _module(model, _table(table, "model"), plan, path)
        try:
            module.load_state_dict(_tensors(path / "weights.safetensors"))
        except RuntimeError as error:
            raise InputError(f"The weights in {path} do not fit the model: {error}") from None
        if not all(bool(torch.isfinite(p).all()) for p in module.parameters()):
            raise InputError(f"The weights in {path} are damaged: they are not finite.")
        decisions = _json(path / "decisions.json")
        threshold, calibration = decisions.get("threshold"), decisions.get("calibration")
        if threshold is not None and not is_finite(threshold):
            raise invalid(f"threshold in {path / 'decisions.json'}", threshold, "a finite number")
        where, about = str(path / "decisions.json"), decisions.get("about")
        calibrated = None if calibration is None else Calibration.from_table(calibration, where)
        return Predictor(fitted, module.eval(), calibrated, threshold, about if isinstance(about, dict) else {})

    def with_threshold(self, threshold: float | None) -> Predictor:
        """Return the predictor with another threshold on scores."""
        return replace(self, threshold=threshold)

    def card(self) -> str:
        """Return a model card: what the model predicts, from which columns, for whom it was trained."""
        about, name = self.about or {}, _cell(self.schema.target.name)
        kind = "the risk" if self.calibration is not None else "a score, which is not a probability,"
        names = about.get("client_names") or [f"{about.get('clients', '?')} sites"]
        how = f"{about.get('algorithm', '?')} on the problem {about.get('problem', '?')}"
        lines = [f"# Model card: {name}", "", f"This model gives {kind} of `{name}` for a row of a table.", ""]
        lines += [f"Trained by {_cell(how)}, without pooling rows. Sites: {_cell(', '.join(map(str, names)))}.", ""]
        lines += ["## Columns", "", "| column | kind | range or categories | missing cells |"]
        lines += ["| --- | --- | --- | --- |"]
        for column in self.schema.features:
            low, high = column.bounds
            allowed = ", ".join(map(str, column.categories)) if column.size else f"{low:g} to {high:g} {column.unit}"
            lines.append(f"| {_cell(column.name)} | {column.kind} | {_cell(allowed)} | {column.missing} |")
        method = "uncalibrated" if self.calibration is None else self.calibration.method
        words = {"uncalibrated": "none: scores are not probabilities", "none": "not needed: scores are log odds"}
        calibration = words.get(method, method)
        alert = "none" if self.threshold is None else f"alert above a score of {self.threshold:.6g}"
        lines += [
            "",
            "## Decisions",
            "",
            f"- Calibration: {calibration}",
            f"- Threshold: {alert}",
            "",
            "## Measures",
            "",
        ]
        measures = flatten({key: about[key] for key in sorted(about) if key != "client_names"})
        lines += [f"- {_cell(key)}: {_cell(str(value))}" for key, value in measures.items()]
        lines += ["", "Before it is used for patients, check it on your own recent patients."]
        return "\n".join(lines) + "\n"

    # --- export -------------------------------------------------------------------------------------------------

    def export_program(self, path: str | Path) -> Path:
        """Write the whole path from raw values to the score and the risk as a program of ``torch.export``."""
        target, content = Path(path), io.BytesIO()
        torch.export.save(self._program(), content)
        write_atomically(target, content.getvalue())
        return target

    def export_onnx(self, path: str | Path) -> Path:
        """Write the whole path from raw values to the score and the risk as an ONNX file; needs ``fedstrata[onnx]``."""
        target, example = Path(path), self._example()
        try:
            import onnx  # noqa: F401
            import onnxscript  # noqa: F401
        except ImportError:
            raise InputError("Exporting to ONNX needs further packages: pip install 'fedstrata[onnx]'.") from None
        rows = {0: torch.export.Dim("rows")}
        program = torch.onnx.export(
            self.module, (example,), input_names=["values"], output_names=["score", "risk"], dynamo=True,
            dynamic_shapes=(rows,), verbose=False,
        )  # fmt: skip
        assert program is not None
        with naming(target), whole_or_nothing(target) as place:
            program.save(str(place))
        return target

    def _program(self) -> torch.export.ExportedProgram:
        return torch.export.export(self.module, (self._example(),), dynamic_shapes=({0: torch.export.Dim("rows")},))

    def _example(self) -> torch.Tensor:
        return torch.zeros(3, len(self.schema.features), dtype=torch.float64)


class WholePath(nn.Module):
    """From raw values [n, p] of float64, with NaN for missing cells, to scores [n] and risks [n]."""

    scores: torch.Tensor
    lengths: torch.Tensor
    slopes: torch.Tensor

    def __init__(self, predictor: Predictor) -> None:
        super().__init__()
        self.prepare, self.model = Prepare(predictor.fitted), predictor.model
        self.dtype = next(self.model.parameters()).dtype
        calibration = predictor.calibration
        self.method = "uncalibrated" if calibration is None else calibration.method
        self.slope, self.offset, self.first = 1.0, 0.0, 0.0
        knots, risks = np.zeros(2), np.zeros(2)
        if calibration is not None:
            self.slope, self.offset = calibration.slope, calibration.offset
            if calibration.scores:
                knots, risks = np.array(calibration.scores), np.array(calibration.risks)
                self.first = calibration.risks[0]
        lengths = np.diff(knots)
        slopes = np.diff(risks) / np.where(lengths > 0, lengths, 1.0)
        for name, values in (("scores", knots[:-1]), ("lengths", lengths), ("slopes", slopes)):
            self.register_buffer(name, torch.from_numpy(np.ascontiguousarray(values)))

    def forward(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return scores and risks."""
        outputs = self.model(self.prepare(values).to(self.dtype)).flatten(1).to(values.dtype)
        score = outputs[:, 0] if outputs.shape[1] == 1 else outputs[:, 1] - outputs[:, 0]
        if self.method == "uncalibrated":
            return score, torch.full_like(score, torch.nan)
        if self.method == "isotonic":
            into = torch.minimum((score[:, None] - self.scores).clamp(min=0.0), self.lengths)
            return score, self.first + into @ self.slopes
        return score, torch.sigmoid(self.slope * score + self.offset)


def _cell(text: str) -> str:
    """Return text that cannot break a table in Markdown, or be markup."""
    return html.escape(text).replace("|", "\\|").replace("`", "'").replace("\n", " ")


def _module(model: nn.Module | None, recipe: dict[str, Any], plan: Plan, path: Path) -> nn.Module:
    """Return the module of a model folder, with any weights."""
    if model is not None:
        return model
    if not recipe.get("name"):
        raise InputError(
            f"The model in {path} is a module of your own: load it in Python, with Predictor.load(folder, model=...)."
        )
    options = {k: v for k, v in recipe.items() if k not in ("name", "shape", "outputs")}
    shape, outputs = recipe.get("shape"), recipe.get("outputs")
    if shape != [len(plan.names)] or not isinstance(outputs, int) or not 1 <= outputs <= 10_000:
        raise invalid(f"shape and outputs of the model in {path}", [shape, outputs], f"[[{len(plan.names)}], 1]")
    return zoo.model(str(recipe["name"]), tuple(shape), outputs, **options)


def _table(table: dict[str, Any], name: str) -> dict[str, Any]:
    value = table.get(name)
    if not isinstance(value, dict):
        raise invalid(f"{name} in model.toml", type(value).__name__, "a table")
    return value


def _tensors(path: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = _read(path, load)
    return tensors


def _json(path: Path) -> dict[str, Any]:
    value: Any = _read(path, json.loads)
    if not isinstance(value, dict):
        raise invalid(str(path), type(value).__name__, "a table")
    return value


def _read(path: Path, parse: Callable[[bytes], Any]) -> Any:
    try:
        return parse(path.read_bytes())
    except FileNotFoundError:
        raise InputError(f"The model is not complete: {path} is missing.") from None
    except (OSError, ValueError, RecursionError, SafetensorError) as error:
        raise InputError(f"The file {path} cannot be read: {error}") from None
