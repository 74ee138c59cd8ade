"""Readers on tiny files in the standard formats, and their errors for damaged files."""

from __future__ import annotations

import gzip
import json
import os
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fedstrata.core.errors import InputError
from fedstrata.data import cells, formats
from fedstrata.data.sets import tabular

ADULT = (
    "39, State-gov, 77516, Bachelors, 13, Never-married, Adm-clerical, Not-in-family, White, Male, 2174, 0, 40, Cuba, "
)
BANK_HEADER = ";".join(f'"{name}"' for name in tabular.BANK_HEADER)
BANK = '56;"maid";"married";"basic.4y";"no";"no";"no";"cell";"may";"mon";261;1;999;0;"none";1.1;93.9;-36.4;4.8;5191;'


def idx_bytes(array: np.ndarray, code: int = 0x08) -> bytes:
    return struct.pack(f">BBBB{array.ndim}I", 0, 0, code, array.ndim, *array.shape) + array.tobytes()


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    def writer(content: bytes | str, name: str = "file", pack: bool = False) -> Path:
        data = content.encode() if isinstance(content, str) else content
        path = tmp_path / name
        path.write_bytes(gzip.compress(data) if pack else data)
        return path

    return writer


def refused(call: Callable[[], object], path: Path, what: str) -> None:
    """The call fails with an error that names the file and says what is wrong."""
    with pytest.raises(InputError) as caught:
        call()
    assert str(path) in str(caught.value)
    assert what in str(caught.value)


@pytest.mark.parametrize("pack", [False, True])
def test_idx(write: Callable[..., Path], pack: bool) -> None:
    images = np.arange(24, dtype=np.uint8).reshape(2, 3, 4)
    path = write(idx_bytes(images), "images", pack)
    assert np.array_equal(formats.idx(path), images)
    pixels, targets = formats.idx_pair(path, write(idx_bytes(np.array([7, 3], np.uint8)), "labels", pack))
    assert np.array_equal(pixels, images)
    assert targets.dtype == np.int64
    assert targets.tolist() == [7, 3]


def test_idx_of_wide_numbers_is_big_endian(write: Callable[..., Path]) -> None:
    values = np.array([1, -2, 70000])
    read = formats.idx(write(idx_bytes(values.astype(">i4"), 0x0C)))
    assert read.tolist() == [1, -2, 70000]
    assert read.dtype == np.int32
    assert read.dtype.isnative


def test_damaged_idx(write: Callable[..., Path], tmp_path: Path) -> None:
    good = idx_bytes(np.zeros((2, 3, 4), np.uint8))
    for content, what in (
        (b"", "wrong magic number (empty)"),
        (b"\x00\x01" + good[2:], "wrong magic number 00010803"),
        (b"\x00\x00\x07" + good[3:], "wrong magic number"),
        (good[:9], "truncated: a header of 3 dimensions takes 16 bytes"),
        (good[:-1], "truncated: shape (2, 3, 4) takes 40 bytes, but it has 39"),
        (good + b"x", "too long"),
        (gzip.compress(good)[:-9], "gzip data are truncated or damaged"),
    ):
        path = write(content)
        refused(lambda path=path: formats.idx(path), path, what)
    absent = tmp_path / "absent"
    refused(lambda: formats.idx(absent), absent, "No such file")


def test_idx_pair_must_match(write: Callable[..., Path]) -> None:
    images = write(idx_bytes(np.zeros((2, 3, 4), np.uint8)), "images")
    labels = write(idx_bytes(np.zeros(3, np.uint8)), "labels")
    refused(lambda: formats.idx_pair(images, labels), labels, "labels of shape (3,) for 2 images")
    refused(lambda: formats.idx_pair(labels, labels), labels, "not images of bytes")


@pytest.mark.parametrize("labels", [1, 2])
def test_cifar(write: Callable[..., Path], labels: int) -> None:
    rng = np.random.default_rng(0)
    pixels = rng.integers(256, size=(5, 3072), dtype=np.uint8)
    classes = rng.integers(10, size=(5, labels), dtype=np.uint8)
    records = np.concatenate([classes, pixels], axis=1)
    paths = [write(records[:3].tobytes(), "data_batch_1.bin"), write(records[3:].tobytes(), "data_batch_2.bin")]
    images, targets = formats.cifar(paths, labels, 10)
    assert np.array_equal(images, pixels.reshape(5, 3, 32, 32))
    assert targets.tolist() == classes[:, -1].tolist()


def test_damaged_cifar(write: Callable[..., Path]) -> None:
    short = write(bytes(3072))
    refused(lambda: formats.cifar([short], 1, 10), short, "truncated: 3072 bytes are not a whole number of 3073")
    high = write(b"\x0a" + bytes(3072), "high")
    refused(lambda: formats.cifar([high], 1, 10), high, "label 10, above 9")


def test_medmnist(tmp_path: Path) -> None:
    path = tmp_path / "set.npz"
    images = np.arange(2 * 28 * 28, dtype=np.uint32).astype(np.uint8).reshape(2, 28, 28)
    np.savez(path, train_images=images, train_labels=np.array([[1], [0]], np.uint8))
    pixels, targets = formats.medmnist(path, "train")
    assert np.array_equal(pixels, images)
    assert targets.dtype == np.int64
    assert targets.tolist() == [1, 0]
    refused(lambda: formats.medmnist(path, "val"), path, "no array 'val_images' (it has: train_images, train_labels)")


def test_damaged_npz(tmp_path: Path, write: Callable[..., Path]) -> None:
    images = np.zeros((2, 28, 28), np.uint8)
    path = tmp_path / "set.npz"
    for labels, what in (
        (np.zeros((3, 1), np.uint8), "'train_labels' has shape (3, 1)"),
        (np.zeros((2, 2), np.uint8), "not one class per image"),
        (np.zeros(2), "not one class per image"),
        (np.array([{}, {}]), "without pickled objects"),
    ):
        np.savez(path, train_images=images, train_labels=labels)
        refused(lambda: formats.medmnist(path, "train"), path, what)
    whole = path.read_bytes()
    for content in (whole[: len(whole) // 2], b"nonsense", b""):
        damaged = write(content, "damaged.npz")
        refused(lambda damaged=damaged: formats.npz(damaged, "x"), damaged, "not a readable .npz file")
    np.save(tmp_path / "one.npy", images)
    refused(lambda: formats.npz(tmp_path / "one.npy", "x"), tmp_path / "one.npy", "a single array")


def header(text: str) -> bytes:
    """An .npy file with this header, and few bytes of data."""
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode("latin-1") + b"\0" * 32


ABSURD = {
    "a trillion rows": "{'descr': '<f4', 'fortran_order': False, 'shape': (1000000000000, 2), }",
    "more rows than an integer can count": f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({10**30}, 2), }}",
    "fewer rows than none": "{'descr': '<f4', 'fortran_order': False, 'shape': (-4, 2), }",
    "rows that are no number": "{'descr': '<f4', 'fortran_order': False, 'shape': (4.0, 2), }",
    "true rows": "{'descr': '<f4', 'fortran_order': False, 'shape': (True, 2), }",
    "objects": "{'descr': '|O', 'fortran_order': False, 'shape': (4,), }",
    "a type that is a list": "{'descr': [1], 'fortran_order': False, 'shape': (4,), }",
    "brackets": "(" * 5000,
    "code": "__import__('os').abort()",
    "nothing": "",
}


@pytest.mark.parametrize("name", ABSURD)
def test_an_npz_file_with_an_absurd_header(name: str, tmp_path: Path) -> None:
    path = tmp_path / "site.npz"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("x.npy", header(ABSURD[name]))
    with pytest.raises(InputError, match=r"site\.npz cannot be read"):
        formats.npz(path)


def test_an_npz_file_larger_than_memory_is_not_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "bomb.npz"
    np.savez_compressed(path, x=np.zeros(10**6))
    assert path.stat().st_size < 20_000
    monkeypatch.setattr(formats, "physical_memory", lambda: 10**6)
    with pytest.raises(InputError, match=r"bomb\.npz cannot be read: its arrays are too large for memory"):
        formats.npz(path)
    monkeypatch.setattr(formats, "physical_memory", lambda: None)  # a system that does not say
    assert len(formats.npz(path)["x"]) == 10**6


def test_a_pipe_and_an_encrypted_or_unknown_member_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.npz")
    with pytest.raises(InputError, match=r"pipe\.npz cannot be read: it is a pipe or a device"):  # it would never end
        formats.npz(tmp_path / "pipe.npz")
    path = tmp_path / "site.npz"
    np.savez(path, x=np.arange(3))
    good = path.read_bytes()
    central = good.rindex(b"PK\x01\x02")
    for at, value, what in ((8, 1, "password required"), (10, 97, "compression")):
        content = bytearray(good)
        content[at - 2] = content[central + at] = value  # flags or method, in the local and the central header
        path.write_bytes(bytes(content))
        with pytest.raises(InputError, match=rf"site\.npz cannot be read: .*{what}"):
            formats.npz(path)
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("readme.txt", "not an array")
    with pytest.raises(InputError, match=r"'readme\.txt' in it is not an array"):
        formats.npz(path)


def test_omniglot(tmp_path: Path) -> None:
    bits = np.random.default_rng(0).integers(2, size=(3, 105, 105), dtype=np.uint8)
    path = tmp_path / "omniglot.npz"
    columns = {name: np.arange(3) for name in ("character", "alphabet", "drawer", "evaluation")}
    np.savez(path, images=np.packbits(bits, axis=2), **columns)
    drawings = formats.omniglot(path)
    assert np.array_equal(drawings.ink(np.array([2, 0])), 1 - bits[[2, 0]])
    np.savez(path, images=np.zeros((3, 105, 105), np.uint8), **columns)
    refused(lambda: formats.omniglot(path), path, "not uint8 [n, 105, 14]")


@pytest.mark.parametrize("pack", [False, True])
def test_libsvm(write: Callable[..., Path], pack: bool) -> None:
    inputs, labels = formats.libsvm(write("+1 1:0.5 3:-2 \n-1\n\n-1 4:1e1 # note\n", pack=pack), 4)
    assert inputs.dtype == np.float32
    assert inputs.tolist() == [[0.5, 0, -2, 0], [0, 0, 0, 0], [0, 0, 0, 10]]
    assert labels.tolist() == [1, -1, -1]


@pytest.mark.parametrize(
    ("content", "what"),
    [
        ("+1 1:1\n+1 2:1 3\n", "line 2 is not 'label index:value ...'"),
        ("1:1 2\n", "line 1 is not"),
        ("+1 1:1:1\n", "line 1 is not"),
        ("+1 5:1\n", "features 5 to 5, not 1 to 4"),
        ("+1 0:1\n", "features 0 to 0, not 1 to 4"),
        ("+1 1:x\n", "an entry is not a number"),
        ("yes 1:1\n", "an entry is not a number"),
        ("\n", "empty"),
    ],
)
def test_damaged_libsvm(write: Callable[..., Path], content: str, what: str) -> None:
    path = write(content)
    refused(lambda: formats.libsvm(path, 4), path, what)


@pytest.mark.parametrize("pack", [False, True])
def test_adult(write: Callable[..., Path], pack: bool) -> None:
    table = tabular.read_adult(write(f"|1x3 Cross validator\n{ADULT}<=50K.\n{ADULT}>50K\n\n", pack=pack))
    assert table.numbers.tolist() == [[39, 77516, 13, 2174, 0, 40]] * 2
    assert table.words[0].tolist() == [
        "State-gov",
        "Bachelors",
        "Never-married",
        "Adm-clerical",
        "Not-in-family",
        "White",
        "Male",
        "Cuba",
    ]
    assert table.targets.tolist() == [0, 1]


def test_bank(write: Callable[..., Path]) -> None:
    table = tabular.read_bank(write(f'{BANK_HEADER}\n{BANK}"yes"\n{BANK}"no"\n'))
    assert table.numbers[0].tolist() == [56, 261, 1, 999, 0, 1.1, 93.9, -36.4, 4.8, 5191]
    assert table.words[1].tolist() == ["maid", "married", "basic.4y", "no", "no", "no", "cell", "may", "mon", "none"]
    assert table.targets.tolist() == [1, 0]


def test_damaged_tables(write: Callable[..., Path]) -> None:
    for reader, content, what in (
        (tabular.read_adult, f"{ADULT}>50K\n{ADULT}0, >50K", "row 2 has 16 fields instead of 15"),
        (tabular.read_adult, f"{ADULT}maybe", "row 1 has label 'maybe'"),
        (tabular.read_adult, f"x{ADULT}>50K", "a numeric column has an entry that is not a number"),
        (tabular.read_adult, "\n", "no rows"),
        (tabular.read_adult, b"\xff\xfe", "not UTF-8"),
        (tabular.read_bank, f'{BANK}"yes"', "first line must be the header age;job"),
        (tabular.read_bank, f'{BANK_HEADER}\n{BANK}"ja"', "label 'ja' instead of 'no' or 'yes'"),
        (tabular.read_bank, BANK_HEADER, "no rows"),
    ):
        path = write(content)
        refused(lambda reader=reader, path=path: reader(path), path, what)


def test_encode_uses_training_rows_only() -> None:
    train = cells.Table(np.array([[1.0, 5], [3, 5]]), np.array([["b"], ["a"]]), np.array([0, 1]))
    test = cells.Table(np.array([[5.0, 6]] * 2), np.array([["a"], ["c"]]), np.array([0, 1]))
    inputs, test_inputs = cells.encode(train, test)
    assert inputs.dtype == test_inputs.dtype == np.float32
    assert inputs.tolist() == [[-1, 0, 0, 1], [1, 0, 1, 0]]
    assert test_inputs.tolist() == [[3, 1, 1, 0], [3, 1, 0, 0]]
    assert train.take(np.array([1])).words.tolist() == [["a"]]


def test_mammography(write: Callable[..., Path]) -> None:
    table = tabular.read_mammography(write("1,2,3,4,5,6.5,'-1'\n1,2,3,4,5,7,1\n"))
    assert table.numbers[:, -1].tolist() == [6.5, 7]
    assert table.targets.tolist() == [0, 1]
    for content, what in (
        ("1,2,3,4,5,6,'-1'\n1,2,3,'1'", "row 2 has 4 fields instead of 7"),
        ("1,2,3,4,5,6,'2'", "row 1 has label '2' instead of '-1' or '1'"),
        ("1,2,3,4,5,x,'1'", "a numeric column has an entry that is not a number"),
        ("", "no rows"),
    ):
        path = write(content)
        refused(lambda path=path: tabular.read_mammography(path), path, what)


def test_shakespeare(write: Callable[..., Path]) -> None:
    entry = {"play": "hamlet", "title": "Hamlet", "role": "GHOST", "speeches": ["Mark me.", "I am thy father's spirit"]}
    roles = formats.shakespeare(write(json.dumps(entry) + "\n", pack=True))
    assert roles == [formats.Role("hamlet", "GHOST", "Mark me.\nI am thy father's spirit")]
    for content in ("{", '{"play": "x", "role": "y"}', '{"play": "x", "role": "y", "speeches": "z"}', "[]"):
        path = write(json.dumps(entry) + "\n" + content)
        refused(lambda path=path: formats.shakespeare(path), path, "line 2 is not JSON with play, role and speeches")
    empty = write("")
    refused(lambda: formats.shakespeare(empty), empty, "no roles")
