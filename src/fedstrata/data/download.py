"""The files of data sets: where they are, and how to download them.

Files are read from the data directory. A missing file with an official address is downloaded once: to a temporary name,
checked against the published checksum if there is one, then renamed, so an incomplete file never has the final name.
Nothing that is downloaded is executed or unpickled.
"""

from __future__ import annotations

import hashlib
import http.client
import os
import shutil
import tarfile
import tempfile
import urllib.error
import urllib.request
import zipfile
import zlib
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import IO

from fedstrata.core.errors import InputError, MissingData

CONNECT_SECONDS = 5.0
READ_SECONDS = 30.0
CHUNK_BYTES = 1 << 20

Directory = str | Path | None
"""A data directory; None for the default."""

Progress = Callable[[str], None] | None
"""A function to call with a line of text from time to time during a download, or None."""


@dataclass(frozen=True)
class Source:
    """A file or folder of a data set.

    path:     its path in the data directory; a file may also be stored under its name with ``.gz`` added or removed.
    address:  the official URL to download it from, None if there is none.
    checksum: ``"md5:..."`` or ``"sha256:..."`` of the download, if published.
    member:   the member to unpack, if the download is an archive (.tar.gz or .zip).
    note:     what a file without an address must contain.
    """

    path: str
    address: str | None = None
    checksum: str | None = None
    member: str | None = None
    note: str = ""


_MNIST = "https://ossci-datasets.s3.amazonaws.com/mnist/"
_FASHION = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"
_CIFAR = "https://www.cs.toronto.edu/~kriz/"
_MEDMNIST = "https://zenodo.org/records/10519652/files/"
_LIBSVM = "https://www.csie.ntu.edu.tw/~cjlin/libsvmtools/datasets/binary/"
_UCI = "https://archive.ics.uci.edu/ml/machine-learning-databases/"


def _idx(folder: str, base: str, *digests: str) -> list[Source]:
    """Return the four files of a set in idx format, with these SHA-256 digests."""
    names = [f"{part}-{kind}-ubyte.gz" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")]
    pairs = zip(names, digests, strict=True)
    return [Source(f"{folder}/{name}", base + name, f"sha256:{digest}") for name, digest in pairs]


_FILES: tuple[Source, ...] = (
    *_idx(
        "mnist",
        _MNIST,
        "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
        "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
        "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
        "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
    ),
    *_idx(
        "fashion-mnist",
        _FASHION,
        "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
        "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
        "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
        "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
    ),
    Source(
        "cifar-10-batches-bin",
        _CIFAR + "cifar-10-binary.tar.gz",
        "md5:c32a1d4ab5d03f1284b67883e8d87530",
        "cifar-10-batches-bin",
    ),
    Source(
        "cifar-100-binary",
        _CIFAR + "cifar-100-binary.tar.gz",
        "md5:03b5dce01913d631647c71ecec9e9cb8",
        "cifar-100-binary",
    ),
    Source("pneumoniamnist.npz", _MEDMNIST + "pneumoniamnist.npz?download=1", "md5:28209eda62fecd6e6a2d98b1501bb15f"),
    Source("breastmnist.npz", _MEDMNIST + "breastmnist.npz?download=1", "md5:750601b1f35ba3300ea97c75c52ff8f6"),
    Source("tabular/a9a", _LIBSVM + "a9a"),
    Source("tabular/a9a.t", _LIBSVM + "a9a.t"),
    Source("tabular/w8a", _LIBSVM + "w8a"),
    Source("tabular/w8a.t", _LIBSVM + "w8a.t"),
    Source("tabular/adult.data", _UCI + "adult/adult.data"),
    Source("tabular/adult.test", _UCI + "adult/adult.test"),
    Source(
        "tabular/bank-additional-full.csv",
        _UCI + "00222/bank-additional.zip",
        member="bank-additional/bank-additional-full.csv",
    ),
    Source("tabular/mammography.csv", note="a CSV of 7 columns, 6 features and the label -1 or 1, without a header"),
    Source(
        "ham10000.npz", note="an npz with images [n, 28, 28, 3] uint8, melanoma [n] (1 = melanoma) and is_test [n] bool"
    ),
    Source(
        "omniglot.npz",
        note="an npz with images [n, 105, 14] uint8 (105 x 105 bits, packed along the last axis, 0 = ink), and "
        "character, alphabet, drawer (1 to 20) and evaluation [n]",
    ),
    Source(
        "shakespeare/shakespeare_roles.jsonl.gz",
        note="one JSON object per line with play, title, role and speeches (a list of texts)",
    ),
)

SOURCES: dict[str, Source] = {source.path: source for source in _FILES}
"""Every file that the data sets read, by its path in the data directory."""


def data_directory(data_dir: Directory = None) -> Path:
    """Return the data directory: ``data_dir``, else ``FEDSTRATA_DATA``, else ``fedstrata`` in the user's cache.

    The cache is ``XDG_CACHE_HOME`` if that is set, ``~/.cache`` otherwise. The directory need not exist.
    """
    chosen = data_dir or os.environ.get("FEDSTRATA_DATA")
    if chosen:
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "fedstrata"


def find(source: Source, directory: Path) -> Path | None:
    """Return the path of the file in the data directory, packed or not, or None."""
    other = source.path.removesuffix(".gz") if source.path.endswith(".gz") else source.path + ".gz"
    return next((directory / name for name in (source.path, other) if (directory / name).exists()), None)


def locate(path: str, data_dir: Directory, progress: Progress = None) -> Path:
    """Return the location of the file ``path`` of :data:`SOURCES`, after downloading it if necessary.

    If it is not available, the :class:`MissingData` error says where it belongs and how to get it.
    """
    source, directory = SOURCES[path], data_directory(data_dir)
    present = find(source, directory)
    if present is not None:
        return present
    if source.address is not None and os.environ.get("FEDSTRATA_OFFLINE", "0") not in ("", "0"):
        raise missing(source, directory, "FEDSTRATA_OFFLINE is set, so it was not downloaded. ")
    try:
        return download(source, directory, progress)
    except (OSError, http.client.HTTPException) as error:
        if isinstance(error, urllib.error.HTTPError):
            error.close()
        raise missing(source, directory, f"Downloading it failed: {error}. ") from error


def missing(source: Source, directory: Path, reason: str = "") -> MissingData:
    """Build the error for a missing file: which one, where it belongs, and how to get it."""
    if source.address is None:
        remedy = f"It has no official address, so put it there yourself: {source.note}."
    elif source.member is None:
        remedy = f"Download it from {source.address} and put it there."
    else:
        remedy = f"Download {source.address} and put its member {source.member} there."
    return MissingData(
        f"The data file {source.path} is not in the data directory {directory.absolute()}. {reason}{remedy} "
        "Set the directory with the argument data_dir (data.directory in a configuration file) or the environment "
        "variable FEDSTRATA_DATA."
    )


def download(source: Source, directory: Path, progress: Progress = None) -> Path:
    """Download a file to its path in the data directory; raise OSError if the network or the disk fails."""
    if source.address is None:
        raise missing(source, directory)
    target = directory / source.path
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".download-", dir=target.parent) as folder:
        fetched = Path(folder) / "file"
        _fetch(source.address, fetched, source.checksum, source.path, progress)
        if source.member is not None:
            fetched = _unpack(fetched, source.member, Path(folder) / "unpacked", source.address)
        try:
            fetched.replace(target)
        except OSError:
            if not target.is_dir():  # another process may have downloaded the same folder in the meantime
                raise
    return target


class _Http(http.client.HTTPConnection):
    def connect(self) -> None:
        super().connect()
        self.sock.settimeout(READ_SECONDS)


class _Https(http.client.HTTPSConnection):
    def connect(self) -> None:
        super().connect()
        self.sock.settimeout(READ_SECONDS)


class _PatientReader(urllib.request.HTTPSHandler, urllib.request.HTTPHandler):
    """Use a short timeout to connect, and a longer one to read."""

    def http_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_Http, req)

    def https_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_Https, req)


def _fetch(address: str, path: Path, checksum: str | None, name: str, progress: Progress) -> None:
    request = urllib.request.Request(address, headers={"User-Agent": "fedstrata"})
    kind, _, expected = (checksum or "md5:").partition(":")
    digest = hashlib.new(kind, usedforsecurity=False)
    done = 0
    with (
        urllib.request.build_opener(_PatientReader).open(request, timeout=CONNECT_SECONDS) as response,
        path.open("wb") as file,
    ):
        total = int(response.headers.get("Content-Length") or 0)
        of_total = f" of {total / 1e6:.1f}" if total else ""
        while block := response.read(CHUNK_BYTES):
            file.write(block)
            digest.update(block)
            done += len(block)
            if progress:
                progress(f"downloading {name}: {done / 1e6:.1f}{of_total} MB")
    if total and done != total:
        raise OSError(f"{address} stopped after {done} of {total} bytes")
    if expected and digest.hexdigest() != expected:
        raise OSError(f"{address} has {kind} {digest.hexdigest()} instead of the published {expected}")


def _members(archive: Path) -> Generator[tuple[str, bool, Callable[[], IO[bytes] | None]], None, None]:
    """Yield the name of each file in an archive, whether it is a regular file, and a function that opens it."""
    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as packed:
            for entry in packed.infolist():
                if not entry.is_dir():
                    yield entry.filename, True, partial(packed.open, entry)
    else:
        with tarfile.open(archive) as tar:
            for item in tar:
                if not item.isdir():
                    yield item.name, item.isfile(), partial(tar.extractfile, item)


def _unpack(archive: Path, member: str, folder: Path, address: str) -> Path:
    """Unpack one member of an archive, a file or a whole folder, below ``folder`` and return its path."""
    try:
        with closing(_members(archive)) as members:
            for name, regular, opened in members:
                path = PurePosixPath(name)
                if path.is_absolute() or ".." in path.parts or "\\" in name or ":" in name:
                    raise InputError(f"Refused the archive {address}: its member {name!r} points outside of it.")
                if not path.is_relative_to(member):
                    continue
                packed = opened() if regular else None
                if packed is None:
                    raise InputError(f"Refused the archive {address}: its member {name!r} is not a regular file.")
                (folder / path).parent.mkdir(parents=True, exist_ok=True)
                with packed, (folder / path).open("wb") as file:
                    shutil.copyfileobj(packed, file)
    except (tarfile.TarError, zipfile.BadZipFile, EOFError, zlib.error) as error:
        raise OSError(f"{address} is not a readable archive: {error}") from error
    if not (folder / member).exists():
        raise OSError(f"{address} has no member {member}")
    return folder / member
