"""Data spread over clients: from arrays, data sets and folders, and the errors of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

import fedstrata as fs
from fedstrata.data.federated import Part

X = np.arange(24.0).reshape(8, 3)
T = np.array([2, 0, 1, 0, 2, 1, 0, 0])


def dataset(rows: int = 40, classes: int = 4, tests: int = 6) -> fs.Dataset:
    """Distinct rows: input i is i, its class i modulo the number of classes."""
    numbers = torch.arange(rows + tests)
    inputs, targets = numbers[:, None].float(), numbers % classes
    return fs.Dataset("numbers", inputs[:rows], targets[:rows], inputs[rows:], targets[rows:], classes)


def numbers(part: Part, client: int) -> list[int]:
    return sorted(int(v) for v in part.of_client(client)[0].ravel())


# --- from arrays -----------------------------------------------------------------------------------------------------


def test_from_arrays_keeps_every_sample_with_its_client() -> None:
    data = fs.FederatedData.from_arrays([(X[:5], T[:5]), (X[5:], T[5:])], name="mine")
    assert (data.clients, data.classes, data.name) == (2, 3, "mine")
    assert data.sizes.tolist() == [5, 3]
    for client, (first, last) in enumerate([(0, 5), (5, 8)]):
        inputs, targets = data.train.of_client(client)
        order = np.argsort(T[first:last], kind="stable")  # within a client, rows are in class order
        assert np.array_equal(inputs.numpy(), X[first:last][order])
        assert np.array_equal(targets.numpy(), T[first:last][order])
    assert data.test is None
    assert data.client_test is None
    assert data.support is None


@pytest.mark.parametrize(
    ("targets", "classes"),
    [
        (T, 3),
        (T.astype(np.uint8), 3),
        (T > 0, 2),
        (T.astype(float), 0),
        (np.stack([T, T], 1), 0),
        (torch.from_numpy(T), 3),
        (T.tolist(), 3),
    ],
    ids=["int64", "uint8", "bool", "float", "two columns", "tensor", "list"],
)
def test_classes_are_counted_from_integers(targets: Any, classes: int) -> None:
    assert fs.FederatedData.from_arrays([(X, targets)]).classes == classes


def test_classes_are_counted_in_the_test_data_too() -> None:
    data = fs.FederatedData.from_arrays([(X, T)], test=(X[:1], np.array([7])))
    assert data.classes == 8
    assert fs.FederatedData.from_arrays([(X, T)], classes=10).classes == 10


def test_client_tests_are_pooled_when_there_is_no_other_test_set() -> None:
    tests = [(X[:2], T[:2]), (X[:0], T[:0]), (X[2:3], T[2:3])]
    data = fs.FederatedData.from_arrays([(X, T)] * 3, client_tests=tests)
    assert data.client_test is not None
    assert data.client_test.sizes.tolist() == [2, 0, 1]
    assert data.test is not None
    assert np.array_equal(data.test[0].numpy(), X[:3])


def test_repr() -> None:
    data = fs.FederatedData.from_arrays([(X, T), (X[:3], T[:3])], name="two")
    assert repr(data) == "<FederatedData two: 2 clients with 3 to 8 training rows>"
    assert repr(fs.data.Dataset.from_arrays(X, T)) == "<Dataset arrays: 8 training and 0 test rows, 3 classes>"


def test_own_arrays_are_split_by_name_with_support_and_holdout() -> None:
    inputs = np.arange(40.0)[:, None]
    data = fs.data.Dataset.from_arrays(inputs, np.arange(40) % 2).split("iid", clients=2, holdout=0.25, support=0.4)
    assert data.client_test is not None and data.support is not None and data.test is None
    assert [p.sizes.tolist() for p in (data.train, data.support, data.client_test)] == [[9, 9], [6, 6], [5, 5]]
    rows = [p.rows for p in (data.train, data.support, data.client_test)]
    assert sorted(torch.cat(rows).tolist()) == list(range(40))
    with pytest.raises(fs.InputError, match="already have test data"):
        data.with_holdout(0.1)
    for wrong in (fs.partition.iid, 3):
        with pytest.raises(fs.InputError, match="The partition must be a partition such as"):
            fs.data.Dataset.from_arrays(inputs, np.arange(40) % 2).split(wrong, clients=2)  # type: ignore[arg-type]


def test_half_precision_becomes_single() -> None:
    assert fs.FederatedData.from_arrays([(X.astype(np.float16), T)]).train.arrays[0].dtype == torch.float32


NAN, INF = X.copy(), X.copy()
NAN[3, 1], INF[0, 0] = np.nan, np.inf
BAD_ARRAYS: list[tuple[str, dict[str, Any], str]] = [
    ("no clients", {"clients": []}, "The data have no clients"),
    ("an empty client", {"clients": [(X, T), (X[:0], T[:0])]}, r"Client 1 has no data\. Every client needs at least"),
    (
        "mismatched lengths",
        {"clients": [(X, T), (X, T[:5])]},
        r"The number of targets of client 1 must be 8, as many as inputs\. Got 5\.",
    ),
    (
        "other shapes",
        {"clients": [(X, T), (X[:, :2], T)]},
        r"The shape of an input of client 1 must be \(3,\), as for client 0\. Got \(2,\)\.",
    ),
    ("other target shapes", {"clients": [(X, T), (X, np.stack([T, T], 1))]}, "target of client 1"),
    ("NaN", {"clients": [(X, T), (NAN, T)]}, r"The inputs of client 1 contain NaN or infinity\."),
    ("infinity", {"clients": [(INF, T)]}, r"The inputs of client 0 contain NaN or infinity\."),
    ("NaN targets", {"clients": [(X, T.astype(float)), (X, NAN[:, 1])]}, r"The targets of client 1 contain NaN"),
    ("texts", {"clients": [(np.array(["a"]), np.array([0]))]}, "client 0"),
    ("a number instead of an array", {"clients": [(1.0, 2.0)]}, "client 0"),
    ("NaN in a client's test", {"clients": [(X, T)], "client_tests": [(NAN, T)]}, "test data of client 0 contain NaN"),
    ("lengths of a client's test", {"clients": [(X, T)], "client_tests": [(X, T[:2])]}, "test data of client 0"),
    ("too few client tests", {"clients": [(X, T)] * 2, "client_tests": [(X, T)]}, "client"),
    (
        "too few client names",
        {"clients": [(X, T)] * 2, "client_names": ["a"]},
        r"The number of client names must be 2, one per client\. Got 1\.",
    ),
    ("lengths of the test set", {"clients": [(X, T)], "test": (X, T[:3])}, "test"),
    ("shape of the test set", {"clients": [(X, T)], "test": (X[:, :2], T)}, "test"),
    ("NaN in the test set", {"clients": [(X, T)], "test": (NAN, T)}, "test"),
]


PAIR = r"The data must be a pair \(inputs, targets\), or several inputs and the targets: .* Got"
BAD_ARRAYS += [
    ("one array", {"clients": [(X, T), (X,)]}, rf"{PAIR} 'tuple of 1 entries'\. \(client 1\)"),
    (
        "another number of arrays",
        {"clients": [(X, T), (X, X, T)]},
        r"The number of arrays of client 1 must be 2, as for client 0\. Got 3\.",
    ),
    (
        "lengths of a second input",
        {"clients": [(X, X, T), (X, X[:2], T)]},
        r"The number of inputs_1 of client 1 must be 8, as many as inputs\. Got 2\.",
    ),
    (
        "shape of a second input",
        {"clients": [(X, X, T), (X, X[:, :2], T)]},
        r"The shape of a row of inputs_1 of client 1 must be \(3,\), as for client 0\. Got \(2,\)\.",
    ),
    ("NaN in a third input", {"clients": [(X, X, NAN, T)]}, r"The inputs_2 of client 0 contain NaN or infinity\."),
    ("an array", {"clients": (X, T)}, rf"{PAIR} 'ndarray'\. \(client 0\)"),
    ("a dict per client", {"clients": [{"x": X, "y": T}]}, rf"{PAIR} 'dict of 2 entries'\. \(client 0\)"),
    ("a dict of clients", {"clients": {"a": (X, T)}}, r"clients must be a list with one \(inputs, targets\) pair per"),
    (
        "three test arrays",
        {"clients": [(X, T)], "test": (X, X, T)},
        "The number of arrays of the test set must be 2, as for client 0",
    ),
    (
        "three arrays to test a client",
        {"clients": [(X, T)], "client_tests": [(X, X, T)]},
        "The number of arrays of the test data of client 0 must be 2, as for client 0",
    ),
]


@pytest.mark.parametrize(("arguments", "message"), [b[1:] for b in BAD_ARRAYS], ids=[b[0] for b in BAD_ARRAYS])
def test_bad_arrays_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(fs.InputError, match=message):
        fs.FederatedData.from_arrays(**arguments)


def test_client_tests_that_are_all_empty_are_no_test_data() -> None:
    data = fs.FederatedData.from_arrays([(X, T)], client_tests=[(X[:0], T[:0])])
    assert data.classes == 3


# --- from data sets --------------------------------------------------------------------------------------------------


def test_from_datasets_stacks_samples() -> None:
    sets = [TensorDataset(torch.from_numpy(X[:5]), torch.from_numpy(T[:5])), [(X[5], 1), (X[6], 0)]]
    data = fs.FederatedData.from_datasets(sets, test=TensorDataset(torch.from_numpy(X), torch.from_numpy(T)))
    assert data.sizes.tolist() == [5, 2]
    assert data.train.of_client(1)[1].tolist() == [0, 1]
    assert np.array_equal(data.train.of_client(1)[0].numpy(), X[[6, 5]])
    assert data.test is not None
    assert np.array_equal(data.test[0].numpy(), X)


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        ([[(X[0], 0)], []], r"The data set of client 1 is empty\."),
        ([iter([(X[0], 0)])], r"The data set of client 0 must have a length and \(input, target\) samples"),
        (
            [[1, 2]],
            r"The sample must be an \(input, target\) pair.* Got 'int'\. \(sample 0 of the data set of client 0\)",
        ),
        (
            [[(X[0], 0)], TensorDataset(torch.ones(2, 3), torch.ones(2, 3), torch.zeros(2))],
            r"The number of arrays of client 1 must be 2, as for client 0\. Got 3\.",
        ),
        (
            [[(X[0], 0), (X[0], X[0], 0)]],
            r"The sample must be an \(input, target\) pair.* Got 'tuple of 3 entries'\. \(sample 1 .* of client 0\)",
        ),
        ([torch.zeros(4, 3)], r"The sample must be an \(input, target\) pair.* Got 'Tensor'"),
        ([TensorDataset(torch.ones(2, 3))], r"Got 'tuple of 1 entries'\. \(sample 0 of the data set of client 0\)"),
        ([[{"image": X[0], "label": 0}]], r"Got 'dict of 2 entries'\. \(sample 0 of the data set of client 0\)"),
        ([[(X[0], 0), (X[0, :2], 0)]], r"The data set of client 0 must have"),
        ([[("text", 0)]], r"The data set of client 0 must have"),
        ([[([[1], [1, 2]], 0)]], r"The data set of client 0 must have"),
        ([], "no clients"),
    ],
    ids=[
        "empty",
        "iterable",
        "no pairs",
        "triples",
        "unequal",
        "rows",
        "inputs only",
        "dicts",
        "shapes",
        "text",
        "ragged",
        "none",
    ],
)
def test_bad_datasets_are_refused(sets: list[Any], message: str) -> None:
    with pytest.raises(fs.InputError, match=message):
        fs.FederatedData.from_datasets(sets)


# --- from a folder ---------------------------------------------------------------------------------------------------


def test_from_folder_reads_clients_in_the_order_of_their_names(tmp_path: Path) -> None:
    np.savez(tmp_path / "b.npz", x=X[5:], y=T[5:], test_x=X[:1], test_y=T[:1])
    np.savez(tmp_path / "a.npz", inputs=X[:5], targets=T[:5], test_inputs=X[1:3], test_targets=T[1:3])
    np.savez(tmp_path / "test.npz", inputs=X, targets=T)
    (tmp_path / "notes.txt").write_text("not data")
    data = fs.FederatedData.from_folder(tmp_path)
    assert data.sizes.tolist() == [5, 3]
    assert data.name == tmp_path.name
    assert data.client_test is not None
    assert data.client_test.sizes.tolist() == [2, 1]
    assert data.test is not None
    assert np.array_equal(data.test[1].numpy(), T)
    assert sorted(data.train.of_client(0)[1].tolist()) == sorted(T[:5])


def test_a_client_file_without_test_data_has_an_empty_test_part(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=X[:5], y=T[:5], test_x=X[1:3], test_y=T[1:3])
    np.savez(tmp_path / "b.npz", x=X[5:], y=T[5:])
    data = fs.FederatedData.from_folder(tmp_path)
    assert data.client_test is not None
    assert data.client_test.sizes.tolist() == [2, 0]


def _truncated(path: Path) -> None:
    np.savez(path, inputs=X, targets=T)
    path.write_bytes(path.read_bytes()[:200])


def _flipped(path: Path) -> None:
    np.savez_compressed(path, inputs=np.random.default_rng(0).normal(size=(50, 3)), targets=np.zeros(50))
    content = bytearray(path.read_bytes())
    content[100] ^= 0xFF
    path.write_bytes(bytes(content))


def _npy(path: Path) -> None:
    with path.open("wb") as file:
        np.save(file, X)


BAD_FILES: list[tuple[str, Any, str]] = [
    ("pickled", lambda p: np.savez(p, inputs=np.array([{"a": 1}], dtype=object), targets=T[:1]), "without pickled"),
    ("text", lambda p: p.write_text("hello"), "is not a readable .npz"),
    ("empty", lambda p: p.write_bytes(b""), "is not a readable .npz"),
    ("truncated", _truncated, "is not a readable .npz"),
    ("flipped byte", _flipped, "is not a readable .npz"),
    ("npy", _npy, "is not a readable .npz"),
    ("no targets", lambda p: np.savez(p, inputs=X), r"must hold inputs and targets \(or x and y\)\. It holds: inputs"),
    (
        "other keys",
        lambda p: np.savez(p, images=X, labels=T),
        r"must hold inputs and targets.* It holds: images, labels",
    ),
    ("a test without targets", lambda p: np.savez(p, x=X, y=T, test_x=X), "a.npz must hold"),
]


@pytest.mark.parametrize(("write", "message"), [b[1:] for b in BAD_FILES], ids=[b[0] for b in BAD_FILES])
def test_a_bad_file_is_named(tmp_path: Path, write: Any, message: str) -> None:
    write(tmp_path / "a.npz")
    with pytest.raises(fs.InputError, match=message) as refused:
        fs.FederatedData.from_folder(tmp_path)
    assert str(tmp_path / "a.npz") in str(refused.value)


@pytest.mark.parametrize("kind", ["missing", "empty", "only a test set"])
def test_a_folder_without_clients_says_what_to_put_there(tmp_path: Path, kind: str) -> None:
    if kind == "only a test set":
        np.savez(tmp_path / "test.npz", inputs=X, targets=T)
    folder = tmp_path / "nowhere" if kind == "missing" else tmp_path
    with pytest.raises(fs.MissingData, match=r"No client files in .* Put one \.npz per client there"):
        fs.FederatedData.from_folder(folder)


# --- validation, moving ----------------------------------------------------------------------------------------------


def test_validation_splits_off_rows_of_each_client_and_drops_the_test_data() -> None:
    real = (torch.full((3, 1), -1.0), torch.zeros(3, dtype=torch.int64))
    pairs = [
        (np.arange(k * 100, k * 100 + n)[:, None].astype(float), np.arange(n) % 2) for k, n in enumerate([10, 1, 25])
    ]
    data = fs.FederatedData.from_arrays(pairs, test=real, client_tests=[real, real, real])
    held = data.validation(0.2, seed=3)
    assert held.client_test is not None
    assert held.train.sizes.tolist() == [8, 1, 20]
    assert held.client_test.sizes.tolist() == [2, 0, 5]
    for k, (inputs, _) in enumerate(pairs):
        assert sorted(numbers(held.train, k) + numbers(held.client_test, k)) == inputs.ravel().astype(int).tolist()
    assert held.test is not None
    assert sorted(held.test[0].ravel().tolist()) == sorted(
        v for k in range(3) for v in map(float, numbers(held.client_test, k))
    )
    assert (held.test[0] >= 0).all()
    assert numbers(data.validation(0.2, seed=3).train, 2) == numbers(held.train, 2)
    assert numbers(data.validation(0.2, seed=4).train, 2) != numbers(held.train, 2)


def test_validation_of_single_samples_is_refused() -> None:
    data = fs.FederatedData.from_arrays([(X[:1], T[:1])] * 3, classes=3)
    with pytest.raises(fs.InputError, match="too few samples per client"):
        data.validation()


@pytest.mark.parametrize("share", [0.0, 1.0, -0.1, float("nan")])
def test_a_share_outside_zero_and_one_is_refused(share: float) -> None:
    data = fs.FederatedData.from_arrays([(X, T)])
    with pytest.raises(fs.InputError, match="share to hold out must be between 0 and 1"):
        data.validation(share)


def test_moving_keeps_shared_arrays_shared() -> None:
    data = dataset().split(fs.partition.iid(), clients=3, holdout=0.2, support=0.5)
    moved = data.to(torch.device("cpu"), torch.float64)
    assert moved.support is not None
    assert moved.client_test is not None
    assert moved.train.arrays[0].dtype == torch.float64
    assert moved.train.arrays[1].dtype == torch.int64
    assert moved.train.arrays[0] is moved.support.arrays[0] is moved.client_test.arrays[0]
    assert data.train.arrays[0].dtype == torch.float32


# --- a data set: split, imbalance, subset ----------------------------------------------------------------------------


@pytest.mark.parametrize("holdout", [0.0, 0.25])
@pytest.mark.parametrize("support", [0.0, 0.5])
def test_split_uses_every_row_once(holdout: float, support: float) -> None:
    data = dataset().split(fs.partition.iid(), clients=4, seed=1, holdout=holdout, support=support)
    parts = [p for p in (data.train, data.support, data.client_test) if p is not None]
    assert len(parts) == 1 + (holdout > 0) + (support > 0)
    assert sorted(n for p in parts for k in range(4) for n in numbers(p, k)) == list(range(40))
    held = round(10 * holdout)
    inner = round((10 - held) * support)
    assert data.train.sizes.tolist() == [10 - held - inner] * 4
    assert data.sizes.tolist() == [10 - held] * 4
    if data.client_test is not None:
        assert data.client_test.sizes.tolist() == [held] * 4
    if data.support is not None:
        assert data.support.sizes.tolist() == [inner] * 4
        assert data.part(1) is data.support
    assert data.part(0) is data.train
    assert data.test is not None
    assert data.test[0].ravel().tolist() == list(range(40, 46))


def test_split_follows_the_seed() -> None:
    one, same, other = (dataset().split(fs.partition.iid(), clients=4, seed=s) for s in (0, 0, 1))
    assert numbers(one.train, 0) == numbers(same.train, 0)
    assert numbers(one.train, 0) != numbers(other.train, 0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"clients": 0}, r"The clients of the split must be a whole number of at least 1\. Got 0\."),
        ({"clients": 2.0}, "clients of the split must be a whole number"),
        ({"clients": True}, "clients of the split must be a whole number"),
        ({"clients": 2, "seed": -1}, r"The seed of the split must be a whole number of at least 0\. Got -1\."),
        ({"clients": 2, "seed": 0.5}, "seed of the split must be a whole number"),
        ({"clients": 2, "holdout": 1.0}, "holdout of the split must be"),
        ({"clients": 2, "holdout": -0.5}, "holdout of the split must be"),
        ({"clients": 2, "support": 1.5}, "support of the split must be"),
        ({"clients": 40, "support": 0.5}, "Client 0 has 1 training rows, too few for 0.5 of them as support"),
    ],
)
def test_a_bad_split_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(fs.InputError, match=message):
        dataset().split(fs.partition.iid(), **arguments)


@pytest.mark.parametrize("share", [0.05, 0.2, 0.5, 0.8])
def test_imbalance_makes_a_binary_task_with_that_share_of_positives(share: float) -> None:
    whole = dataset(rows=400, classes=4, tests=8)
    task = whole.imbalance(share, seed=2)
    assert task.classes == 2
    assert float(task.targets.float().mean()) == pytest.approx(share, abs=0.01)
    original = task.inputs.ravel().long() % 4
    assert torch.equal(task.targets, (original < 2).long())  # the first half of the classes is positive
    assert torch.equal(task.test_targets, (torch.arange(400, 408) % 4 < 2).long())
    assert len(task.test_inputs) == 8
    full = task.targets.sum() == 200 or (task.targets == 0).sum() == 200
    assert full, "only one of the classes is thinned out"
    assert len(np.unique(task.inputs.ravel().numpy())) == len(task.inputs)


def test_imbalance_keeps_the_labels_of_a_binary_set() -> None:
    task = dataset(rows=100, classes=2).imbalance(0.1)
    assert torch.equal(task.targets, task.inputs.ravel().long() % 2)
    assert int(task.targets.sum()) == 6  # 50 negatives: 6 of 56 is nearest to a tenth


@pytest.mark.parametrize("positives", [[3], [2, 0], np.array([1, 2, 3])])
def test_imbalance_takes_the_positive_classes(positives: Sequence[int]) -> None:
    task = dataset(rows=400, classes=4, tests=8).imbalance(0.1, seed=2, positives=positives)
    original = task.inputs.ravel().numpy() % 4
    assert np.array_equal(task.targets.numpy(), np.isin(original, positives))
    assert np.array_equal(task.test_targets.numpy(), np.isin(np.arange(400, 408) % 4, positives))
    assert task.origins is not None and np.array_equal(task.origins, original)
    assert float(task.targets.float().mean()) == pytest.approx(0.1, abs=0.01)


def test_the_default_positives_are_the_first_half_of_the_classes() -> None:
    whole = dataset(rows=400, classes=5, tests=8)
    default, chosen = whole.imbalance(0.1, seed=2), whole.imbalance(0.1, seed=2, positives=[0, 1])
    assert torch.equal(default.inputs, chosen.inputs) and torch.equal(default.targets, chosen.targets)


def test_the_positive_class_of_a_binary_set_may_be_0() -> None:
    for kind in (torch.int64, torch.float32):
        whole = fs.Dataset.from_arrays(np.arange(100.0), (torch.arange(100) % 2).to(kind))
        task = whole.imbalance(0.1, positives=[0])
        assert torch.equal(task.targets, 1 - task.inputs.long() % 2)
        assert task.origins is None and int(task.targets.sum()) == 6


def test_class_groups_divide_the_chosen_positives() -> None:
    task = dataset(rows=400, classes=5).imbalance(0.3, positives=[1, 4])
    data = task.split(fs.partition.class_groups(), clients=4)
    held = [set((data.train.of_client(k)[0].ravel().long() % 5).tolist()) for k in range(4)]
    assert held == [{1, 0, 2}, {4, 3}] * 2


@pytest.mark.parametrize("positives", [[], [4], [-1], [1, 1], [0, 1, 2, 3], [0.5], 1, "1", [True]])
def test_imbalance_refuses_bad_positives(positives: Any) -> None:
    with pytest.raises(fs.InputError, match=r"The positives of the imbalance must be .*Got"):
        dataset(classes=4).imbalance(0.1, positives=positives)


def test_imbalance_refuses_bad_input() -> None:
    for share in (0.0, 1.0, 2.0):
        with pytest.raises(fs.InputError, match="share of the imbalance must be a number above 0 and below 1"):
            dataset().imbalance(share)
    regression = fs.Dataset("r", torch.ones(2, 1), torch.ones(2), torch.ones(1, 1), torch.ones(1), classes=0)
    with pytest.raises(fs.InputError, match="has no classes"):
        regression.imbalance(0.5)
    for label, missing in ((0, "positive"), (1, "negative")):
        one_class = fs.Dataset.from_arrays(X, np.full(len(X), label), classes=2, name="one class")
        with pytest.raises(fs.InputError, match=f"The data set one class has no {missing} rows"):
            one_class.imbalance(0.5)


def test_a_subset_is_some_of_the_rows() -> None:
    few = dataset().subset(7, seed=1)
    chosen = few.inputs.ravel().long()
    assert len(set(chosen.tolist())) == 7
    assert torch.equal(few.targets, chosen % 4)
    assert len(few.test_inputs) == 6
    assert not torch.equal(dataset().subset(7, seed=2).inputs, few.inputs)
    for samples in (0, 41, 2.5):
        with pytest.raises(fs.InputError, match="must be a whole number from 1 to 40"):
            dataset().subset(samples)  # type: ignore[arg-type]


def test_original_classes_follow_their_rows() -> None:
    whole = dataset(rows=400, classes=4)
    assert whole.origins is None
    task = whole.imbalance(0.2)
    for some in (task, task.subset(50), task.imbalance(0.1), whole.subset(100).imbalance(0.2)):
        assert some.origins is not None
        assert np.array_equal(some.origins, some.inputs.ravel().numpy() % 4)
    assert dataset(classes=2).imbalance(0.1).origins is None
    data = task.split(fs.partition.class_groups(groups=2), clients=4)
    held = [set((data.train.of_client(k)[0].ravel().long() % 4).tolist()) for k in range(4)]
    assert held == [{0, 2}, {1, 3}] * 2
    assert sum(data.sizes) == len(task)
    assert all(set(data.train.of_client(k)[1].tolist()) == {0, 1} for k in range(4))
    with pytest.raises(fs.InputError, match=r"number of origins of numbers must be 400, one per training row\. Got 3"):
        replace(whole, origins=np.arange(3))


def test_keys_follow_their_rows() -> None:
    whole = dataset()
    keyed = fs.Dataset(
        "k", whole.inputs, whole.targets, whole.test_inputs, whole.test_targets, 4, keys=np.arange(40) * 10
    )
    for some in (keyed.subset(9), keyed.imbalance(0.3)):
        assert some.keys is not None
        assert np.array_equal(some.keys, some.inputs.ravel().numpy() * 10)


def test_a_test_part_unlike_the_training_part_is_refused() -> None:
    with pytest.raises(fs.InputError, match="arrays of the test part of mine must be 2, as for the training part"):
        fs.Dataset.from_arrays(X, T, test=(X, X, T), name="mine")  # type: ignore[arg-type]
    with pytest.raises(fs.InputError, match=r"test part of mine must be \(3,\), as for the training part\. Got \(2,\)"):
        fs.Dataset.from_arrays(X, T, test=(X[:, :2], T), name="mine")


@pytest.mark.parametrize("names", [("a", "a"), ("a", ""), ("a", None), (1, 2)], ids=str)
def test_names_of_clients_are_different_texts(names: tuple) -> None:
    pair = (torch.ones(2, 1), torch.zeros(2))
    with pytest.raises(fs.InputError, match="name of a client must be a non-empty text that no other client has"):
        fs.FederatedData.from_arrays([pair, pair], client_names=names)


def test_an_npz_file_with_a_single_number_is_refused(tmp_path) -> None:
    np.savez(tmp_path / "a.npz", inputs=np.float64(3), targets=np.zeros(2))
    with pytest.raises(fs.InputError, match=r"array 'inputs' is a single number, not one row per sample"):
        fs.FederatedData.from_folder(tmp_path)


def test_clients_of_one_form_are_checked_together_and_a_wrong_one_is_still_named() -> None:
    sites = [(torch.randn(3, 2), torch.tensor([0, 1, 1])) for _ in range(5)]
    apart = fs.FederatedData.from_arrays([*sites[:4], list(sites[4])])  # a list is not looked at together with others
    data = fs.FederatedData.from_arrays(sites)
    for a, b in zip(data.train.arrays, apart.train.arrays, strict=True):
        assert torch.equal(a, b) and a.dtype == b.dtype
    assert torch.equal(data.train.rows, apart.train.rows) and data.classes == apart.classes == 2
    sites[3][0][1, 1] = torch.nan
    with pytest.raises(fs.InputError, match="The inputs of client 3 contain NaN or infinity"):
        fs.FederatedData.from_arrays(sites)
    with pytest.raises(fs.InputError, match="Client 2 has no data"):
        fs.FederatedData.from_arrays([*sites[:2], (torch.zeros(0, 2), torch.zeros(0, dtype=torch.int64))])
