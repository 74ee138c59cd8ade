"""Readers of standard file formats, from a file to NumPy arrays.

Readers return arrays as they are in the file; ``fedstrata.data.sets`` scales and splits them. A file with the wrong
content raises an :class:`InputError` that names the file and the problem. Files packed with gzip are recognised by
their content, whatever their name. Nothing is unpickled.
"""

from __future__ import annotations

import gzip
import json
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np

from fedstrata.core.errors import InputError
from fedstrata.core.files import refuse_special
from fedstrata.core.machine import physical_memory

_IDX_TYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}


def unreadable(path: Path, why: str) -> InputError:
    """Build the error for a file with the wrong content."""
    return InputError(f"The file {path} cannot be read: {why}.")


def read_bytes(path: Path) -> bytes:
    """Return the content of a file, unpacked if it is gzip."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise unreadable(path, error.strerror or str(error)) from error
    if not content.startswith(b"\x1f\x8b"):
        return content
    try:
        return gzip.decompress(content)
    except (EOFError, OSError, zlib.error) as error:
        raise unreadable(path, f"its gzip data are truncated or damaged ({error})") from error


def read_text(path: Path) -> str:
    """Return the content of a UTF-8 file, unpacked if it is gzip."""
    try:
        return read_bytes(path).decode("utf-8")
    except UnicodeDecodeError as error:
        raise unreadable(path, f"it is not UTF-8 text ({error})") from error


def npz(path: Path, *names: str) -> dict[str, np.ndarray]:
    """Read the named arrays of an .npz file, which must have the same length; without names, read all its arrays."""
    refuse_special(path)
    try:
        with path.open("rb") as stream:
            file = np.load(stream, allow_pickle=False)
            if not isinstance(file, np.lib.npyio.NpzFile):
                raise unreadable(path, "it is not a readable .npz file, but a single array")
            missing = [name for name in names if name not in file.files]
            if missing:
                raise unreadable(path, f"it has no array {missing[0]!r} (it has: {', '.join(file.files) or 'none'})")
            assert file.zip is not None
            _check_unpacked_size(file.zip, path)
            arrays = {name: file[name] for name in names or file.files}
    except InputError:
        raise
    except MemoryError:
        raise unreadable(path, "an array in it is too large for memory") from None
    except Exception as error:  # readers of zip files and of headers raise nearly anything
        raise unreadable(path, f"it is not a readable .npz file without pickled objects ({error})") from None
    wrong = [name for name, array in arrays.items() if not isinstance(array, np.ndarray)]
    if wrong:
        raise unreadable(path, f"{wrong[0]!r} in it is not an array")
    for name, array in arrays.items():
        if array.ndim == 0:
            raise unreadable(path, f"array {name!r} is a single number, not one row per sample")
    for name in names:
        if len(arrays[name]) != len(arrays[names[0]]):
            shapes = f"array {name!r} has shape {arrays[name].shape}, {names[0]!r} has shape {arrays[names[0]].shape}"
            raise unreadable(path, shapes)
    return arrays


def _check_unpacked_size(archive: zipfile.ZipFile, path: Path) -> None:
    """Raise if the members of an archive say that they do not fit into memory; no more is read than they say."""
    size, memory = sum(member.file_size for member in archive.infolist()), physical_memory()
    if memory is not None and size > memory:
        gigabytes = f"{size / 2**30:,.0f} GiB, and this machine has {memory / 2**30:,.0f}"
        raise unreadable(path, f"its arrays are too large for memory: they take {gigabytes}")


def idx(path: Path) -> np.ndarray:
    """Read an idx file (the format of MNIST): an array of any shape, of the type named in its header."""
    content = read_bytes(path)
    if len(content) < 4 or content[:2] != b"\0\0" or content[2] not in _IDX_TYPES:
        raise unreadable(path, f"wrong magic number {content[:4].hex() or '(empty)'}: this is not an idx file")
    kind, dimensions = np.dtype(_IDX_TYPES[content[2]]), content[3]
    start = 4 + 4 * dimensions
    if len(content) < start:
        raise unreadable(path, f"it is truncated: a header of {dimensions} dimensions takes {start} bytes")
    shape = tuple(int(n) for n in np.frombuffer(content, ">u4", dimensions, offset=4))
    expected = start + prod(shape) * kind.itemsize
    if len(content) != expected:
        state = "truncated" if len(content) < expected else "too long"
        raise unreadable(path, f"it is {state}: shape {shape} takes {expected} bytes, but it has {len(content)}")
    return np.frombuffer(content, kind, offset=start).reshape(shape).astype(kind.newbyteorder("="), copy=False)


def idx_pair(images: Path, labels: Path) -> tuple[np.ndarray, np.ndarray]:
    """Read images [n, height, width] and labels [n] from two idx files, and check that they match."""
    pixels, targets = idx(images), idx(labels)
    if pixels.ndim != 3 or pixels.dtype != np.uint8:
        raise unreadable(images, f"it holds {pixels.dtype} of shape {pixels.shape}, not images of bytes")
    if targets.shape != (len(pixels),):
        raise unreadable(labels, f"it holds labels of shape {targets.shape} for {len(pixels)} images")
    return pixels, targets.astype(np.int64)


def cifar(paths: Sequence[Path], labels: int, classes: int) -> tuple[np.ndarray, np.ndarray]:
    """Read CIFAR binary batches, in the order of ``paths``: images [n, 3, 32, 32] of bytes and their last label [n].

    A record has ``labels`` label bytes (1 in CIFAR-10; 2 in CIFAR-100, coarse and fine) and 3072 pixels.
    """
    record = labels + 3 * 32 * 32
    batches = []
    for path in paths:
        content = np.frombuffer(read_bytes(path), np.uint8)
        if len(content) == 0 or len(content) % record:
            size = f"{len(content)} bytes are not a whole number of {record}-byte records"
            raise unreadable(path, f"it is truncated: {size}")
        rows = content.reshape(-1, record)
        highest = rows[:, labels - 1].max()
        if highest >= classes:
            raise unreadable(path, f"it has label {highest}, above {classes - 1}, so it is in another format")
        batches.append(rows)
    images = np.concatenate([rows[:, labels:] for rows in batches]).reshape(-1, 3, 32, 32)
    return images, np.concatenate([rows[:, labels - 1] for rows in batches]).astype(np.int64)


def medmnist(path: Path, part: str) -> tuple[np.ndarray, np.ndarray]:
    """Read one part ("train", "val" or "test") of a MedMNIST .npz: images [n, 28, 28] of bytes and labels [n]."""
    images, labels = npz(path, f"{part}_images", f"{part}_labels").values()
    if images.ndim != 3 or images.dtype != np.uint8:
        raise unreadable(path, f"{part}_images has {images.dtype} of shape {images.shape}, not grey images of bytes")
    if labels.size != len(images) or not np.issubdtype(labels.dtype, np.integer):
        raise unreadable(path, f"{part}_labels has {labels.dtype} of shape {labels.shape}, not one class per image")
    return images, labels.reshape(-1).astype(np.int64)


@dataclass(frozen=True)
class Omniglot:
    """Omniglot's drawings with one bit per pixel: ``images`` [n, 105, 14] bytes of 8 pixels each, 0 for ink."""

    images: np.ndarray
    character: np.ndarray
    alphabet: np.ndarray
    drawer: np.ndarray
    evaluation: np.ndarray

    def ink(self, rows: np.ndarray) -> np.ndarray:
        """Return the drawings of these rows: [rows, 105, 105], 0 for paper and 1 for ink."""
        return 1 - np.unpackbits(self.images[rows], axis=2)[:, :, :105]


def omniglot(path: Path) -> Omniglot:
    """Read Omniglot's 32,460 drawings from one .npz file of packed bits."""
    drawings = Omniglot(**npz(path, "images", "character", "alphabet", "drawer", "evaluation"))
    images = drawings.images
    if images.dtype != np.uint8 or images.shape[1:] != (105, 14):
        raise unreadable(path, f"images has {images.dtype} of shape {images.shape}, not uint8 [n, 105, 14]")
    return drawings


def libsvm(path: Path, features: int) -> tuple[np.ndarray, np.ndarray]:
    """Read LIBSVM text (``label index:value ...``, indices from 1) as dense float32 [n, features] and labels [n]."""
    rows = [line.split(b"#")[0].split() for line in read_bytes(path).split(b"\n")]
    for number, row in enumerate(rows, start=1):
        if row and (b":" in row[0] or any(pair.count(b":") != 1 for pair in row[1:])):
            raise unreadable(path, f"line {number} is not 'label index:value ...'")
    rows = [row for row in rows if row]
    if not rows:
        raise unreadable(path, "it is empty")
    words = [word for row in rows for pair in row[1:] for word in pair.split(b":")]
    try:
        labels = np.array([row[0] for row in rows]).astype(np.float64)
        columns = np.array(words[0::2]).astype(np.int64) - 1
        values = np.array(words[1::2]).astype(np.float32)
    except ValueError as error:
        raise unreadable(path, f"an entry is not a number ({error})") from error
    if columns.size and not 0 <= columns.min() <= columns.max() < features:
        raise unreadable(path, f"it has features {columns.min() + 1} to {columns.max() + 1}, not 1 to {features}")
    inputs = np.zeros((len(rows), features), np.float32)
    inputs[np.repeat(np.arange(len(rows)), [len(row) - 1 for row in rows]), columns] = values
    return inputs, labels


@dataclass(frozen=True)
class Role:
    """All speeches of one role in one play, in order, joined by line breaks."""

    play: str
    role: str
    text: str


def shakespeare(path: Path) -> list[Role]:
    """Read speaking roles, one JSON object per line with ``play``, ``role`` and ``speeches`` (a list of texts)."""
    roles = []
    for number, line in enumerate(read_text(path).splitlines(), start=1):
        try:
            entry = json.loads(line)
            if not isinstance(entry["speeches"], list):
                raise TypeError("speeches is not a list")
            role = Role(str(entry["play"]), str(entry["role"]), "\n".join(entry["speeches"]))
        except (ValueError, KeyError, TypeError) as error:
            raise unreadable(path, f"line {number} is not JSON with play, role and speeches ({error!r})") from error
        roles.append(role)
    if not roles:
        raise unreadable(path, "it has no roles")
    return roles
