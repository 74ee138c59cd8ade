"""Data sets: those without files always, the others if FEDSTRATA_DATA points to a directory that holds them."""

from __future__ import annotations

import gzip
import hashlib
import http.server
import io
import json
import os
import tarfile
import threading
import zipfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from fedstrata.core.errors import InputError, MissingData
from fedstrata.data import download as fetching
from fedstrata.data.download import SOURCES, Source, data_directory, download, find, locate
from fedstrata.data.sets import SETS, load
from fedstrata.data.sets.text import CHARACTERS

REAL = os.environ.get("FEDSTRATA_DATA", "")
needs_data = pytest.mark.skipif(not REAL, reason="FEDSTRATA_DATA does not point to a data directory")

# name: (shape of a row, test rows, classes, positive or per-class training rows, allowed numbers of training rows)
COUNTS: dict[str, tuple[tuple[int, ...], int, int, int, set[int]]] = {
    "mnist": ((1, 28, 28), 10_000, 10, 6742, {60_000}),
    "fashion_mnist": ((1, 28, 28), 10_000, 10, 6000, {60_000}),
    "cifar10": ((3, 32, 32), 10_000, 10, -1, {50_000, 30_000}),
    "cifar100": ((3, 32, 32), -1, 100, -1, {50_000, 5_000}),
    "omniglot": ((1, 28, 28), 3856, 964, 16, {15_424}),
    "pneumoniamnist": ((1, 28, 28), 624, 2, 3494, {4708}),
    "breastmnist": ((1, 28, 28), 156, 2, 147, {546}),
    "ham10000": ((3, 28, 28), 1198, 2, 393, {4786}),
    "a9a": ((123,), 16_281, 2, 7841, {32_561}),
    "adult": ((108,), 16_281, 2, 7841, {32_561}),
    "bank": ((63,), 8238, 2, 3712, {32_950}),
    "mammography": ((6,), 2237, 2, 208, {8946}),
}
NORMALISED = ("mnist", "fashion_mnist", "cifar10", "cifar100")


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test may use the real network."""
    monkeypatch.setenv("FEDSTRATA_OFFLINE", "1")


def test_digits() -> None:
    data = load("digits")
    assert data.inputs.shape == (1438, 1, 8, 8)
    assert data.test_inputs.shape == (359, 1, 8, 8)
    assert data.inputs.dtype == torch.float32
    assert data.targets.dtype == torch.int64
    assert data.inputs.min() == 0
    assert data.inputs.max() == 1
    shares = torch.bincount(data.test_targets) / (torch.bincount(data.targets) + torch.bincount(data.test_targets))
    assert torch.allclose(shares, torch.full((10,), 0.2), atol=0.005)
    assert torch.equal(data.inputs, load("digits", data_dir="/nowhere").inputs)


def test_digits_are_the_same_through_scikit_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are read from its file, or from its function if the file is elsewhere."""
    direct = load("digits")
    monkeypatch.setattr(Path, "is_file", lambda self: False)
    imported = load("digits")
    for name in ("inputs", "targets", "test_inputs", "test_targets"):
        assert torch.equal(getattr(direct, name), getattr(imported, name))


def test_breast_cancer() -> None:
    data = load("breast_cancer")
    assert data.inputs.shape == (456, 30)
    assert data.test_inputs.shape == (113, 30)
    assert int(data.targets.sum() + data.test_targets.sum()) == 212  # malignant
    assert torch.allclose(data.inputs.mean(0), torch.zeros(30), atol=1e-5)
    assert torch.allclose(data.inputs.std(0, correction=0), torch.ones(30), atol=1e-5)
    assert data.test_inputs.mean(0).abs().max() > 1e-3


@pytest.mark.slow
@needs_data
@pytest.mark.filterwarnings("ignore:The data set cifar.* is incomplete")
@pytest.mark.parametrize("name", COUNTS)
def test_counts_of_real_sets(name: str) -> None:
    shape, test_rows, classes, count, train_rows = COUNTS[name]
    data = load(name)
    assert data.name == name
    assert data.classes == classes
    assert len(data.inputs) == len(data.targets)
    assert len(data.inputs) in train_rows
    assert len(data.test_inputs) == len(data.test_targets)
    assert test_rows in (-1, len(data.test_inputs))
    assert data.inputs.shape[1:] == data.test_inputs.shape[1:] == shape
    assert data.inputs.dtype == data.test_inputs.dtype == torch.float32
    assert data.targets.dtype == data.test_targets.dtype == torch.int64
    assert data.inputs.is_contiguous()
    assert torch.isfinite(data.inputs).all()
    classes_seen = torch.bincount(data.targets, minlength=classes)
    assert len(classes_seen) == classes
    assert classes_seen.min() > 0
    assert int(classes_seen[1]) == (count if count > 0 else len(data.targets) // classes)
    if name in NORMALISED:
        assert data.inputs.mean((0, 2, 3)).abs().max() < 0.03
        assert (data.inputs.std((0, 2, 3)) - 1).abs().max() < 0.03


@pytest.mark.slow
@needs_data
def test_real_w8a() -> None:
    data = load("w8a")
    total = len(data.inputs) + len(data.test_inputs)
    assert (len(data.inputs), total) in {(49_749, 64_700), (39_799, 49_749)}
    assert 0.0295 < data.targets.double().mean() < 0.03


@pytest.mark.slow
@needs_data
@pytest.mark.parametrize(("name", "rows", "positive"), [("pneumoniamnist", 5232, 3883), ("breastmnist", 624, 168)])
def test_validation_rows_are_added(name: str, rows: int, positive: int) -> None:
    data = load(name, validation=True)
    assert len(data.inputs) == rows
    assert int(data.targets.sum()) == positive
    assert -1 <= data.inputs.min() < data.inputs.max() <= 1


@pytest.mark.slow
@needs_data
def test_real_omniglot() -> None:
    data = load("omniglot", size=21)
    assert data.keys is not None
    assert len(np.unique(data.keys)) == 30
    assert data.inputs.shape[1:] == (1, 21, 21)
    # 105 / 21 is whole: the reduction is a mean over blocks of 5 x 5 pixels.
    with np.load(data_directory() / "omniglot.npz", allow_pickle=False) as file:
        first = 1 - np.unpackbits(file["images"][:1], axis=2)[0, :, :105]
    expected = first.reshape(21, 5, 21, 5).mean((1, 3))
    assert np.allclose(data.inputs[0, 0].numpy(), expected, atol=1e-6)
    assert torch.bincount(data.test_targets).tolist() == [4] * 964


@pytest.mark.slow
@needs_data
def test_real_shakespeare() -> None:
    data = load("shakespeare")
    assert data.keys is not None
    assert len(np.unique(data.keys)) == 641
    assert data.inputs.dtype == torch.uint8
    assert data.inputs.shape == (319_215, 80)
    assert data.classes == 80
    assert int(data.inputs.max()) < 80


def decoded(row: torch.Tensor, target: torch.Tensor) -> str:
    return "".join(CHARACTERS[int(token)] for token in [*row, target])


def test_shakespeare_windows(tmp_path: Path) -> None:
    texts = ["".join(CHARACTERS[(7 * i + k) % 80] for i in range(60)) for k in (0, 1)] + ["$" + "x" * 59, "short"]
    lines = [json.dumps({"play": "p", "role": str(k), "speeches": [text]}) for k, text in enumerate(texts)]
    folder = tmp_path / "shakespeare"
    folder.mkdir()
    (folder / "shakespeare_roles.jsonl.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
    data = load("shakespeare", tmp_path, length=6, stride=3, min_characters=20)
    # 18 rows per role start at 0, 3, ..., 51; 4 are test (from 42); training rows end before character 42.
    assert data.keys is not None
    assert data.keys.tolist() == [0] * 12 + [1] * 12 + [2] * 12
    assert len(data.test_inputs) == 12
    for row in range(12):
        assert decoded(data.inputs[row], data.targets[row]) == texts[0][3 * row : 3 * row + 7]
    for row in range(4):
        assert decoded(data.test_inputs[row], data.test_targets[row]) == texts[0][42 + 3 * row : 49 + 3 * row]
    assert 3 * 11 + 6 < 42 <= 3 * 12 + 6
    assert decoded(data.inputs[24], data.targets[24]) == " xxxxxx"
    with pytest.raises(InputError, match=r"No role .* is long enough"):
        load("shakespeare", tmp_path, min_characters=500)
    with pytest.raises(InputError, match=r"stride of the shakespeare data set must be a whole number .* Got 0"):
        load("shakespeare", tmp_path, stride=0)


@pytest.mark.parametrize("with_test", [False, True])
def test_w8a_prefers_its_own_test_rows(tmp_path: Path, with_test: bool) -> None:
    folder = tmp_path / "tabular"
    folder.mkdir()
    (folder / "w8a").write_text("".join(f"{'+1' if i < 10 else '-1'} {i + 1}:1\n" for i in range(50)))
    if with_test:
        (folder / "w8a.t.gz").write_bytes(gzip.compress(b"+1 300:1\n-1 1:1\n"))
    data = load("w8a", tmp_path)
    assert (len(data.inputs), len(data.test_inputs)) == ((50, 2) if with_test else (40, 10))
    assert int(data.test_targets.sum()) == (1 if with_test else 2)


def test_the_error_for_an_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(InputError, match=r"Unknown data set 'minst'. Did you mean 'mnist'"):
        load("minst")
    with pytest.raises(InputError, match=r"Unknown option of the shakespeare data set 'lenght'. Did you mean 'length'"):
        load("shakespeare", lenght=3)
    with pytest.raises(InputError, match=r"Unknown option of the \w+ data set 'size'. Known: none"):
        load("digits", size=3)


@pytest.mark.parametrize("name", sorted(set(SETS) - {"digits", "breast_cancer", "sinusoid"}))
def test_a_missing_set_says_what_to_do(name: str, tmp_path: Path) -> None:
    with pytest.raises(MissingData) as caught:
        load(name, tmp_path)
    message = str(caught.value)
    assert str(tmp_path) in message
    assert "data_dir" in message
    assert "FEDSTRATA_DATA" in message
    source = next(source for path, source in SOURCES.items() if f"data file {path} is not" in message)
    assert (source.address or "put it there yourself") in message
    assert ("FEDSTRATA_OFFLINE is set" in message) == (source.address is not None)
    assert list(tmp_path.iterdir()) == []


def test_missing_cifar_files_are_named(tmp_path: Path) -> None:
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    (folder / "test_batch.bin").write_bytes(bytes(3073))
    with pytest.raises(MissingData, match=r"lacks data_batch_1\.bin, .*, data_batch_5\.bin of the data set cifar10\."):
        load("cifar10", tmp_path)
    (folder / "test_batch.bin").rename(folder / "data_batch_1.bin")
    with pytest.raises(MissingData, match=r"cifar-10-batches-bin lacks data_batch_2\.bin, .*, test_batch\.bin"):
        load("cifar10", tmp_path)


def test_a_partial_cifar_folder_is_read_with_a_warning(tmp_path: Path) -> None:
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    for name, label, images in (("data_batch_4.bin", 4, 2), ("data_batch_1.bin", 1, 3), ("test_batch.bin", 9, 1)):
        (folder / name).write_bytes((bytes([label]) + bytes(3072)) * images)
    counts = r"has 5 of 50,000 training images and 1 of 10,000 test images\."
    lacks = r" It lacks data_batch_2\.bin, data_batch_3\.bin, data_batch_5\.bin\. Remove the folder"
    with pytest.warns(UserWarning, match=f"cifar10 is incomplete: .*{counts}{lacks}"):
        data = load("cifar10", tmp_path)
    assert data.targets.tolist() == [1, 1, 1, 4, 4], "in the order of the batches"


def test_files_of_cifar_with_too_few_images_are_read_with_a_warning(tmp_path: Path) -> None:
    folder = tmp_path / "cifar-100-binary"
    folder.mkdir()
    for name, images in (("train.bin", 4), ("test.bin", 2)):
        (folder / name).write_bytes(bytes(3074) * images)
    counts = r"has 4 of 50,000 training images and 2 of 10,000 test images\. Remove"
    with pytest.warns(UserWarning, match=f"cifar100 is incomplete: .*{counts}"):
        assert len(load("cifar100", tmp_path)) == 4


def test_data_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FEDSTRATA_DATA", "/from/environment")
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert data_directory(tmp_path) == tmp_path
    assert data_directory("~/x") == Path.home() / "x"
    assert data_directory(None) == Path("/from/environment")
    monkeypatch.setenv("FEDSTRATA_DATA", "")
    assert data_directory() == Path("/cache/fedstrata")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert data_directory() == Path.home() / ".cache" / "fedstrata"


def test_find_takes_packed_and_plain(tmp_path: Path) -> None:
    source = Source("a/file.gz")
    assert find(source, tmp_path) is None
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "file").touch()
    assert find(source, tmp_path) == tmp_path / "a" / "file"
    assert find(Source("a/fil"), tmp_path) is None
    (tmp_path / "a" / "plain.gz").touch()
    assert find(Source("a/plain"), tmp_path) == tmp_path / "a" / "plain.gz"


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Keep the test output clean."""


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, str]]:
    """A web server on this machine: the folder that it serves, and its address."""
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setenv("FEDSTRATA_OFFLINE", "0")
    folder = tmp_path / "site"
    folder.mkdir()
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield folder, f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    thread.join()
    server.server_close()


def test_download(site: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, address = site
    content = bytes(range(256)) * 8192
    (folder / "file").write_bytes(content)
    checksum = "sha256:" + hashlib.sha256(content).hexdigest()
    monkeypatch.setitem(SOURCES, "set/file", Source("set/file", address + "file", checksum))
    lines: list[str] = []
    directory = tmp_path / "data"
    path = locate("set/file", directory, lines.append)
    assert path == directory / "set" / "file"
    assert path.read_bytes() == content
    assert lines[-1] == "downloading set/file: 2.1 of 2.1 MB"
    assert len(lines) >= 2
    assert [entry.name for entry in (directory / "set").iterdir()] == ["file"]
    (folder / "file").unlink()
    assert locate("set/file", directory) == path


@pytest.mark.parametrize(
    ("name", "checksum", "reason"),
    [("file", "md5:" + "0" * 32, "instead of the published 000"), ("absent", None, "HTTP Error 404")],
)
def test_a_failed_download_leaves_nothing(
    site: tuple[Path, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    checksum: str | None,
    reason: str,
) -> None:
    folder, address = site
    (folder / "file").write_bytes(b"other")
    monkeypatch.setitem(SOURCES, "set/file", Source("set/file", address + name, checksum))
    with pytest.raises(MissingData) as caught:
        locate("set/file", tmp_path)
    assert reason in str(caught.value)
    assert address + name in str(caught.value)
    assert list((tmp_path / "set").iterdir()) == []


def test_no_connection_is_missing_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setenv("FEDSTRATA_OFFLINE", "")
    monkeypatch.setitem(SOURCES, "file", Source("file", "http://127.0.0.1:9/file"))
    with pytest.raises(MissingData, match="Downloading it failed"):
        locate("file", tmp_path)


def tar_bytes(*entries: tuple[str, bytes | None]) -> bytes:
    """A tar.gz; an entry without content is a symbolic link to /etc/passwd."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tape:
        for name, content in entries:
            item = tarfile.TarInfo(name)
            if content is None:
                item.type, item.linkname = tarfile.SYMTYPE, "/etc/passwd"
            else:
                item.size = len(content)
            tape.addfile(item, io.BytesIO(content or b""))
    return buffer.getvalue()


def zip_bytes(*entries: tuple[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as packed:
        for name, content in entries:
            packed.writestr(name, content)
    return buffer.getvalue()


def test_a_folder_of_a_tar_archive(site: tuple[Path, str], tmp_path: Path) -> None:
    folder, address = site
    (folder / "x.tar.gz").write_bytes(tar_bytes(("set/a.bin", b"A"), ("set/b.bin", b"B"), ("other", b"C")))
    path = download(Source("set", address + "x.tar.gz", member="set"), tmp_path / "data")
    assert {entry.name: entry.read_bytes() for entry in path.iterdir()} == {"a.bin": b"A", "b.bin": b"B"}
    assert [entry.name for entry in (tmp_path / "data").iterdir()] == ["set"]


def test_a_file_of_a_zip_archive(site: tuple[Path, str], tmp_path: Path) -> None:
    folder, address = site
    (folder / "x.zip").write_bytes(zip_bytes(("inner/file.csv", b"1;2"), ("inner/file.csv.bak", b"no")))
    source = Source("tabular/file.csv", address + "x.zip", member="inner/file.csv")
    assert download(source, tmp_path / "data").read_bytes() == b"1;2"
    assert [entry.name for entry in (tmp_path / "data" / "tabular").iterdir()] == ["file.csv"]


@pytest.mark.parametrize(
    ("pack", "entries", "error", "what"),
    [
        (tar_bytes, [("set/a", b"A"), ("set/../../escaped", b"x")], InputError, "points outside"),
        (tar_bytes, [("/escaped", b"x")], InputError, "points outside"),
        (tar_bytes, [("set/a", None)], InputError, "not a regular file"),
        (zip_bytes, [("set/../../escaped", b"x")], InputError, "points outside"),
        (tar_bytes, [("other/a", b"A")], OSError, "has no member set"),
        (lambda *_: b"no archive", [], OSError, "not a readable archive"),
    ],
)
def test_an_unsafe_or_wrong_archive_is_refused(
    site: tuple[Path, str],
    tmp_path: Path,
    pack: Callable[..., bytes],
    entries: list[tuple[str, bytes | None]],
    error: type[Exception],
    what: str,
) -> None:
    folder, address = site
    (folder / "x").write_bytes(pack(*entries))
    with pytest.raises(error, match=what):
        download(Source("set", address + "x", member="set"), tmp_path / "data")
    assert list((tmp_path / "data").iterdir()) == []
    assert not list(tmp_path.rglob("escaped"))


def test_connecting_times_out_sooner_than_reading() -> None:
    assert fetching.CONNECT_SECONDS <= 5 < fetching.READ_SECONDS


def test_sources_are_complete() -> None:
    for path, source in SOURCES.items():
        assert source.path == path
        assert source.address or source.note
        if source.address and not source.address.startswith("https:"):
            assert source.checksum, f"{path} comes over an open line and needs a checksum"
        kind, _, digest = (source.checksum or "md5:" + "0" * 32).partition(":")
        assert len(digest) == {"md5": 32, "sha256": 64}[kind]
