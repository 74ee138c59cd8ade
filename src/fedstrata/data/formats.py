"""Readers of the standard file formats of data sets, from a file to NumPy arrays.

Every reader takes paths and returns arrays as they stand in the file; scaling and splitting are the business of
``fedstrata.data.sets``. A file that is not what it should be is an :class:`InputError` that names the file and
says what is wrong. Files packed with gzip are recognised by their content, whatever their name. No pickle is read.
"""

from __future__ import annotations

import csv
import gzip
import json
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np

from fedstrata.core.errors import InputError, MissingData

_IDX_TYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}


def _bad(path: Path, what: str) -> InputError:
    return InputError(f"The file {path} cannot be read: {what}.")


def read_bytes(path: Path) -> bytes:
    """Return the content of a file, unpacked if it is gzip."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise _bad(path, error.strerror or str(error)) from error
    if not content.startswith(b"\x1f\x8b"):
        return content
    try:
        return gzip.decompress(content)
    except (EOFError, OSError, zlib.error) as error:
        raise _bad(path, f"its gzip data are truncated or damaged ({error})") from error


def _read_text(path: Path) -> str:
    try:
        return read_bytes(path).decode("utf-8")
    except UnicodeDecodeError as error:
        raise _bad(path, f"it is not UTF-8 text ({error})") from error


def idx(path: Path) -> np.ndarray:
    """Read an idx file (MNIST's format): an array of any shape, of the type that its header names."""
    content = read_bytes(path)
    if len(content) < 4 or content[:2] != b"\0\0" or content[2] not in _IDX_TYPES:
        raise _bad(path, f"wrong magic number {content[:4].hex() or '(empty)'}, this is not an idx file")
    kind, dimensions = np.dtype(_IDX_TYPES[content[2]]), content[3]
    start = 4 + 4 * dimensions
    if len(content) < start:
        raise _bad(path, f"it is truncated: the header of {dimensions} dimensions needs {start} bytes")
    shape = tuple(int(n) for n in np.frombuffer(content, ">u4", dimensions, offset=4))
    wanted = start + prod(shape) * kind.itemsize
    if len(content) != wanted:
        state = "truncated" if len(content) < wanted else "too long"
        raise _bad(path, f"it is {state}: shape {shape} needs {wanted} bytes, it has {len(content)}")
    return np.frombuffer(content, kind, offset=start).reshape(shape).astype(kind.newbyteorder("="), copy=False)


def idx_pair(images: Path, labels: Path) -> tuple[np.ndarray, np.ndarray]:
    """Read images [n, height, width] and labels [n] from two idx files and check that they belong together."""
    pixels, targets = idx(images), idx(labels)
    if pixels.ndim != 3 or pixels.dtype != np.uint8:
        raise _bad(images, f"it holds {pixels.dtype} of shape {pixels.shape}, not images of bytes")
    if targets.shape != (len(pixels),):
        raise _bad(labels, f"it holds labels of shape {targets.shape} for {len(pixels)} images")
    return pixels, targets.astype(np.int64)


def cifar(paths: Sequence[Path], labels: int, classes: int) -> tuple[np.ndarray, np.ndarray]:
    """Read CIFAR binary batches: images [n, 3, 32, 32] of bytes and their last label, in the order of ``paths``.

    A record has ``labels`` label bytes (1 in CIFAR-10; 2 in CIFAR-100, coarse and fine) and 3072 pixels.
    """
    record = labels + 3 * 32 * 32
    batches = []
    for path in paths:
        content = np.frombuffer(read_bytes(path), np.uint8)
        if len(content) == 0 or len(content) % record:
            raise _bad(path, f"it is truncated: {len(content)} bytes are not a whole number of {record}-byte records")
        rows = content.reshape(-1, record)
        highest = rows[:, labels - 1].max()
        if highest >= classes:
            raise _bad(path, f"it has label {highest}, above {classes - 1}: this is another format")
        batches.append(rows)
    images = np.concatenate([rows[:, labels:] for rows in batches]).reshape(-1, 3, 32, 32)
    return images, np.concatenate([rows[:, labels - 1] for rows in batches]).astype(np.int64)


def folder_files(folder: Path, pattern: str) -> list[Path]:
    """Return the files in a folder that fit a pattern, sorted by name; none at all is an error."""
    found = sorted(folder.glob(pattern))
    if not found:
        raise MissingData(
            f"The folder {folder} has no file {pattern}. Put it there, or remove the folder to fetch the whole again."
        )
    return found


def npz(path: Path, *names: str) -> list[np.ndarray]:
    """Read the named arrays of an npz file, which must all have the same length."""
    try:
        with path.open("rb") as stream:
            file = np.load(stream, allow_pickle=False)
            if not isinstance(file, np.lib.npyio.NpzFile):
                raise _bad(path, "it is a single NumPy array, not an npz file")
            absent = [name for name in names if name not in file.files]
            if absent:
                raise _bad(path, f"it has no array {absent[0]!r} (it has: {', '.join(file.files) or 'none'})")
            arrays = [file[name] for name in names]
    except InputError:
        raise
    except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile, zlib.error) as error:
        raise _bad(path, f"it is not a sound npz file without pickle ({error})") from error
    for name, array in zip(names, arrays, strict=True):
        if array.ndim == 0 or len(array) != len(arrays[0]):
            raise _bad(path, f"array {name!r} has shape {array.shape}, {names[0]!r} has shape {arrays[0].shape}")
    return arrays


def medmnist(path: Path, part: str) -> tuple[np.ndarray, np.ndarray]:
    """Read one part ("train", "val" or "test") of a MedMNIST npz: images [n, 28, 28] of bytes and labels [n]."""
    images, labels = npz(path, f"{part}_images", f"{part}_labels")
    if images.ndim != 3 or images.dtype != np.uint8:
        raise _bad(path, f"{part}_images has {images.dtype} of shape {images.shape}, not grey images of bytes")
    if labels.size != len(images) or not np.issubdtype(labels.dtype, np.integer):
        raise _bad(path, f"{part}_labels has {labels.dtype} of shape {labels.shape}, not one class per image")
    return images, labels.reshape(-1).astype(np.int64)


@dataclass(frozen=True)
class Omniglot:
    """Omniglot's drawings, one bit per pixel: ``images`` [n, 105, 14] bytes (8 pixels each, 0 = ink)."""

    images: np.ndarray
    character: np.ndarray
    alphabet: np.ndarray
    drawer: np.ndarray
    evaluation: np.ndarray

    def ink(self, rows: np.ndarray) -> np.ndarray:
        """Return the drawings of some rows as [rows, 105, 105] of 0 (paper) and 1 (ink)."""
        return 1 - np.unpackbits(self.images[rows], axis=2)[:, :, :105]


def omniglot(path: Path) -> Omniglot:
    """Read Omniglot's 32,460 drawings from one npz file of packed bits."""
    parts = npz(path, "images", "character", "alphabet", "drawer", "evaluation")
    if parts[0].dtype != np.uint8 or parts[0].shape[1:] != (105, 14):
        raise _bad(path, f"images has {parts[0].dtype} of shape {parts[0].shape}, not uint8 [n, 105, 14]")
    return Omniglot(*parts)


def libsvm(path: Path, features: int) -> tuple[np.ndarray, np.ndarray]:
    """Read LIBSVM text (``label index:value ...``, indices from 1) as dense float32 [n, features] and labels [n]."""
    rows = [line.split(b"#")[0].split() for line in read_bytes(path).split(b"\n")]
    for number, row in enumerate(rows, start=1):
        if row and (b":" in row[0] or any(pair.count(b":") != 1 for pair in row[1:])):
            raise _bad(path, f"line {number} is not 'label index:value ...'")
    rows = [row for row in rows if row]
    if not rows:
        raise _bad(path, "it is empty")
    words = [word for row in rows for pair in row[1:] for word in pair.split(b":")]
    try:
        labels = np.array([row[0] for row in rows]).astype(np.float64)
        columns = np.array(words[0::2]).astype(np.int64) - 1
        values = np.array(words[1::2]).astype(np.float32)
    except ValueError as error:
        raise _bad(path, f"it has something other than numbers ({error})") from error
    if columns.size and not 0 <= columns.min() <= columns.max() < features:
        raise _bad(path, f"it has feature {columns.min() + 1} to {columns.max() + 1}, allowed are 1 to {features}")
    inputs = np.zeros((len(rows), features), np.float32)
    inputs[np.repeat(np.arange(len(rows)), [len(row) - 1 for row in rows]), columns] = values
    return inputs, labels


@dataclass(frozen=True)
class Table:
    """A table of people or events: ``numbers`` [n, p], ``words`` [n, q] (categories) and ``targets`` [n] of 0 and 1."""

    numbers: np.ndarray
    words: np.ndarray
    targets: np.ndarray

    def take(self, rows: np.ndarray) -> Table:
        """Return the table of some of the rows."""
        return Table(self.numbers[rows], self.words[rows], self.targets[rows])


_ADULT_NUMBERS = (0, 2, 4, 10, 11, 12)
_ADULT_WIDTH = 15
_BANK_HEADER = (
    *("age", "job", "marital", "education", "default", "housing", "loan", "contact", "month", "day_of_week"),
    *("duration", "campaign", "pdays", "previous", "poutcome", "emp.var.rate", "cons.price.idx", "cons.conf.idx"),
    *("euribor3m", "nr.employed", "y"),
)
_BANK_NUMBERS = (0, 10, 11, 12, 13, 15, 16, 17, 18, 19)


def _cells(path: Path, delimiter: str, quote: str) -> list[list[str]]:
    """Read a CSV file without its blank lines."""
    lines = _read_text(path).splitlines()
    try:
        return [row for row in csv.reader(lines, delimiter=delimiter, quotechar=quote, skipinitialspace=True) if row]
    except csv.Error as error:
        raise _bad(path, str(error)) from error


def adult(path: Path) -> Table:
    """Read UCI Adult (``adult.data`` or ``adult.test``); target 1 = income above 50,000, ``?`` is a category."""
    rows = [row for row in _cells(path, ",", '"') if not row[0].startswith("|")]
    return _table(
        path, [[*row[:-1], row[-1].rstrip(".")] for row in rows], _ADULT_WIDTH, _ADULT_NUMBERS, "<=50K", ">50K"
    )


def bank(path: Path) -> Table:
    """Read UCI Bank Marketing (``bank-additional-full.csv``); target 1 = the person took the deposit."""
    rows = _cells(path, ";", '"')
    if not rows or tuple(rows[0]) != _BANK_HEADER:
        raise _bad(path, f"its first line must be the header {';'.join(_BANK_HEADER)}")
    return _table(path, rows[1:], len(_BANK_HEADER), _BANK_NUMBERS, "no", "yes")


def _table(
    path: Path, rows: list[list[str]], width: int, numbers: tuple[int, ...], negative: str, positive: str
) -> Table:
    if not rows:
        raise _bad(path, "it has no rows")
    for number, row in enumerate(rows, start=1):
        if len(row) != width:
            raise _bad(path, f"row {number} has {len(row)} fields instead of {width}")
        if row[-1] not in (negative, positive):
            raise _bad(path, f"row {number} has label {row[-1]!r} instead of {negative!r} or {positive!r}")
    cells = np.array(rows)
    try:
        values = cells[:, numbers].astype(np.float64)
    except ValueError as error:
        raise _bad(path, f"a column of numbers has something else ({error})") from error
    words = np.delete(cells[:, :-1], numbers, axis=1)
    return Table(values, words, (cells[:, -1] == positive).astype(np.int64))


def encode(train: Table, test: Table) -> tuple[np.ndarray, np.ndarray]:
    """Turn two tables into float32 inputs, by what the training table alone holds.

    Numbers are standardised; each column of categories becomes one 0/1 column per category, in alphabetical order.
    A category that only the test table has becomes zeros.
    """
    train_parts, test_parts = ([part] for part in standardise(train.numbers, test.numbers))
    for column in range(train.words.shape[1]):
        known = np.unique(train.words[:, column])
        for table, parts in ((train, train_parts), (test, test_parts)):
            parts.append((table.words[:, column, None] == known).astype(np.float32))
    return np.concatenate(train_parts, axis=1), np.concatenate(test_parts, axis=1)


def standardise(train: np.ndarray, test: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Shift and scale each column so that the training part has mean 0 and variance 1; float32.

    A column that is constant in the training part is only shifted.
    """
    mean, std = train.mean(axis=0), train.std(axis=0)
    std[std == 0] = 1
    return ((train - mean) / std).astype(np.float32), ((test - mean) / std).astype(np.float32)


def mammography(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Read the mammography CSV: six features [n, 6] and the label, last in each line, -1 or 1 (may be quoted)."""
    rows = _cells(path, ",", "'")
    if not rows:
        raise _bad(path, "it has no rows")
    for number, row in enumerate(rows, start=1):
        if len(row) != 7 or row[-1] not in ("-1", "1"):
            raise _bad(path, f"row {number} is not six numbers and a label -1 or 1")
    try:
        values = np.array(rows).astype(np.float64)
    except ValueError as error:
        raise _bad(path, f"it has something other than numbers ({error})") from error
    return values[:, :-1], values[:, -1]


@dataclass(frozen=True)
class Role:
    """All that one role says in one play, in order, speeches joined by line breaks."""

    play: str
    role: str
    text: str


def shakespeare(path: Path) -> list[Role]:
    """Read speaking roles, one JSON object per line with ``play``, ``role`` and ``speeches`` (a list of texts)."""
    roles = []
    for number, line in enumerate(_read_text(path).splitlines(), start=1):
        try:
            entry = json.loads(line)
            if not isinstance(entry["speeches"], list):
                raise TypeError("speeches is not a list")
            role = Role(str(entry["play"]), str(entry["role"]), "\n".join(entry["speeches"]))
        except (ValueError, KeyError, TypeError) as error:
            raise _bad(path, f"line {number} is not JSON with play, role and speeches ({error!r})") from error
        roles.append(role)
    if not roles:
        raise _bad(path, "it has no roles")
    return roles
