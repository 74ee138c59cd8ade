"""Predictors: what is saved scores as before, exported programs agree with the module, damage is refused."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import fedstrata as fs
from fedstrata.data.part import Part
from fedstrata.data.tables import Column, Schema, Target
from fedstrata.data.tables.preparation import Plan, Preparation
from fedstrata.training.risk.predictor import Predictor

COLUMNS = (
    Column("age", range=(0, 120), step=1.0, indicator=True),
    Column("sex", "flag", categories=("f", "m")),
    Column("region", "category", categories=("a", "b", "c")),
)


def run_of(calibrate: str = "auto", module: nn.Module | None = None, problem: str = "erm") -> fs.Run:
    rng = np.random.default_rng(0)
    values = np.stack([rng.integers(20, 90, 400), rng.integers(0, 2, 400), rng.integers(0, 3, 400)], 1).astype(float)
    values[rng.random(values.shape) < 0.1] = np.nan
    died = (rng.random(400) < 1 / (1 + np.exp(-(np.nan_to_num(values[:, 0], nan=55) - 60) / 8))).astype(np.int64)
    plan = Plan(Schema(target=Target("died"), columns=COLUMNS), Preparation())
    arrays = torch.from_numpy(values), torch.from_numpy(died)
    owned = np.array_split(np.arange(400), 3)
    data = fs.FederatedData(Part.of(arrays, owned), classes=2, name="t", plan=plan).with_holdout(0.3)
    net = fs.models.model("mlp", data.shape, outputs=1, hidden=[5]) if module is None else module
    built = fs.erm(net, "binary_cross_entropy") if problem == "erm" else fs.auc(net, score="none")
    algorithm = fs.FedAvg(lr=0.3) if problem == "erm" else fs.LocalSGDA(lr=0.03)
    return fs.train(built, data, algorithm, rounds=10, batch_size=16, threads=1, calibrate=calibrate)


VALUES = np.array([[50.0, 1.0, 2.0], [np.nan, 0.0, -1.0], [300.0, np.nan, np.nan], [0.0, 1.0, 0.0]])


@pytest.mark.parametrize(("calibrate", "problem"), [("auto", "erm"), ("isotonic", "erm"), ("auto", "auc")])
def test_a_saved_model_scores_as_before(tmp_path: Path, calibrate: str, problem: str) -> None:
    predictor = run_of(calibrate, problem=problem).predictor().with_threshold(0.25)
    again = Predictor.load(predictor.save(tmp_path / "model"))
    assert again.threshold == 0.25
    for one, other in zip(predictor.scores_of(VALUES), again.scores_of(VALUES), strict=True):
        np.testing.assert_array_equal(one, other)
    score, risk = again.scores_of(VALUES)
    for values in (np.asfortranarray(VALUES), VALUES[::-1].copy()[::-1]):
        np.testing.assert_array_equal(again.scores_of(values)[1], risk)
    assert again.calibration is not None
    np.testing.assert_allclose(risk, again.calibration(score), atol=1e-12)


PROGRAM = """
import sys
from pathlib import Path
from fedstrata.cli.predict import write_scores
from fedstrata.training.risk.predictor import Predictor
write_scores(Predictor.load("model").rows("new.csv"), Path("new.csv"), Path("scores.csv"))
print("pandas" in sys.modules)
"""


@pytest.mark.slow
def test_a_file_is_scored_without_pandas(tmp_path: Path) -> None:
    predictor = run_of().predictor()
    predictor.save(tmp_path / "model")
    (tmp_path / "new.csv").write_text("age,sex,region\n50,m,c\n,f,x\n300,,\n0,m,a\n")
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stdout.strip() == "False", "importing pandas takes longer than scoring a hundred thousand rows"
    written = np.genfromtxt(tmp_path / "scores.csv", delimiter=",", names=True)
    assert written["missing"].tolist() == [0, 2, 2, 0] and written["unknown"].tolist() == [0, 1, 0, 0]
    values = np.where(VALUES == -1, np.nan, VALUES)
    np.testing.assert_allclose(written["risk"], predictor.scores_of(values)[1], rtol=1e-12)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("calibrate", ["platt", "isotonic"])
def test_exported_programs_agree_with_the_module(tmp_path: Path, calibrate: str) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    predictor = run_of(calibrate).predictor()
    expected = predictor.scores_of(VALUES)
    session = onnxruntime.InferenceSession(predictor.export_onnx(tmp_path / "m.onnx"))
    program = torch.export.load(predictor.export_program(tmp_path / "m.pt2")).module()
    with torch.no_grad():
        exported = [t.numpy() for t in program(torch.from_numpy(VALUES))]
    for one, other, third in zip(expected, exported, session.run(None, {"values": VALUES}), strict=True):
        np.testing.assert_allclose(other, one, atol=1e-6)
        np.testing.assert_allclose(third, one, atol=1e-6)


def test_a_module_of_ones_own_is_passed_when_it_is_loaded(tmp_path: Path) -> None:
    def network() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 3), nn.Tanh(), nn.Linear(3, 1))

    predictor = run_of(module=network()).predictor()
    folder = predictor.save(tmp_path / "model")
    with pytest.raises(fs.InputError, match="a module of your own"):
        Predictor.load(folder)
    again = Predictor.load(folder, network())
    np.testing.assert_array_equal(again.scores_of(VALUES)[0], predictor.scores_of(VALUES)[0])


def test_unknown_cells_and_numbers_out_of_range_are_counted() -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(
        {"age": [50, 300, None], "sex": ["m", "x", "f"], "region": ["a", "b", "zz"], "id": [7, 8, 9]}
    )
    scored = run_of().predict(frame, keep=["id"])
    with pytest.raises(fs.InputError, match="'score' cannot be kept"):
        run_of().predict(frame.assign(score=1), keep=["score"])
    assert scored["unknown"].tolist() == [0, 1, 1]
    assert scored["out_of_range"].tolist() == [0, 1, 0]
    assert scored["missing"].tolist() == [0, 1, 2]
    assert [str(x) for x in scored["id"]] == ["7", "8", "9"]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("model.toml", b"format = 9"),
        ("model.toml", b"\xff"),
        ("schema.toml", b"version = 1"),
        ("weights.safetensors", b"no"),
        ("preparation.safetensors", None),
        ("decisions.json", b"[1]"),
        ("decisions.json", b'{"threshold": NaN}'),
        ("decisions.json", b'{"calibration": {"method": "platt", "slope": "x"}}'),
    ],
)
def test_a_damaged_model_is_refused(tmp_path: Path, name: str, content: bytes | None) -> None:
    folder = run_of().predictor().save(tmp_path / "model")
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_bytes(content)
    with pytest.raises(fs.InputError):
        Predictor.load(folder)


def test_a_schema_that_was_edited_after_training_is_refused(tmp_path: Path) -> None:
    schema = run_of().predictor().save(tmp_path / "model") / "schema.toml"
    schema.write_text(schema.read_text().replace('["f", "m"]', '["m", "f"]'))
    with pytest.raises(fs.InputError, match="is not the one that the model was trained with"):
        Predictor.load(tmp_path / "model")


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    folder = run_of().predictor().save(tmp_path / "model")
    text = (folder / "model.toml").read_text()
    (folder / "model.toml").write_text(text.replace("shape = [\n    6,\n]", "shape = [\n    600000000,\n]"))
    with pytest.raises(fs.InputError, match="shape and outputs"):
        Predictor.load(folder)


def test_a_card_cannot_be_broken_by_names(tmp_path: Path) -> None:
    predictor = run_of().predictor()
    about = {"clients": 2, "client_names": ["a|b", "<script>alert(1)</script>"]}
    card = Predictor(predictor.fitted, predictor.model, predictor.calibration, None, about).card()
    assert "<script>" not in card and "age" in card


def test_a_card_speaks_of_calibration_and_measures_in_words() -> None:
    predictor = run_of().predictor()
    card = predictor.card()
    assert "Calibration: not needed: scores are log odds" in card and "- measured_on.clients: " in card
    assert "Calibration: none: scores are not" in replace(predictor, calibration=None).card()


@pytest.mark.parametrize("name", ["model", "model.pt2"])
def test_nothing_has_the_final_name_before_it_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    predictor, renamed, replace_ = run_of().predictor(), [], Path.replace

    def rename(place: Path, path: str | Path) -> None:
        renamed.append(Path(path).name)
        if Path(path) == tmp_path / name:
            raise OSError("the disk is full")
        replace_(place, path)

    monkeypatch.setattr(Path, "replace", rename)
    with pytest.raises(fs.FedstrataError, match="the disk is full"):
        (predictor.export_program if name.endswith("pt2") else predictor.save)(tmp_path / name)
    assert renamed[-1] == name and not list(tmp_path.iterdir())
