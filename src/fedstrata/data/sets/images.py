"""Images of digits, clothes, objects and characters."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fedstrata.core.errors import MissingData
from fedstrata.core.options import param
from fedstrata.data import formats
from fedstrata.data.dataset import Dataset
from fedstrata.data.download import Directory, Progress, locate
from fedstrata.data.sets.common import build, data_set, scale, split


@data_set
def digits() -> Dataset:
    """Load handwritten digits, 8 x 8 grey pixels in [0, 1]: 1,438 training and 359 test rows, 10 classes.

    Included in scikit-learn, so no files are needed; fixed stratified 80/20 split.

    Alpaydin and Kaynak, "Optical Recognition of Handwritten Digits", UCI 1998; CC BY 4.0.
    """
    table = _digits_table()
    images, targets = (table[:, :-1].reshape(-1, 1, 8, 8) / 16).astype(np.float32), table[:, -1].astype(np.int64)
    train, test = split(targets)
    return build("digits", images[train], targets[train], images[test], targets[test], 10)


def _digits_table() -> np.ndarray:
    """Return the pixels and the class of each digit, read from scikit-learn's file: importing it takes a second."""
    package = importlib.util.find_spec("sklearn")
    file = Path(package.origin or "").parent / "datasets" / "data" / "digits.csv.gz" if package else None
    if file is not None and file.is_file():
        return np.loadtxt(file, delimiter=",")
    from sklearn.datasets import load_digits

    digits = load_digits()
    return np.column_stack([digits.data, digits.target])


@data_set
def mnist(data_dir: Directory = None, progress: Progress = None) -> Dataset:
    """Load MNIST, handwritten digits, 28 x 28 grey pixels: 60,000 training and 10,000 test rows, 10 classes.

    Pixels are normalised: (v / 255 - 0.1307) / 0.3081.

    LeCun et al., "Gradient-Based Learning Applied to Document Recognition", Proceedings of the IEEE 1998; the authors
    state no licence (CC BY-SA 3.0 is commonly given).
    """
    return _idx_set("mnist", "mnist", 0.1307, 0.3081, data_dir, progress)


@data_set
def fashion_mnist(data_dir: Directory = None, progress: Progress = None) -> Dataset:
    """Load Fashion-MNIST, clothes, 28 x 28 grey pixels: 60,000 training and 10,000 test rows, 10 classes.

    Pixels are normalised: (v / 255 - 0.2860) / 0.3530.

    Xiao et al., "Fashion-MNIST: a Novel Image Dataset for Benchmarking Machine Learning Algorithms", 2017; MIT.
    """
    return _idx_set("fashion_mnist", "fashion-mnist", 0.2860, 0.3530, data_dir, progress)


@data_set
def cifar10(data_dir: Directory = None, progress: Progress = None) -> Dataset:
    """Load CIFAR-10, photographs of objects, 3 x 32 x 32 pixels: 50,000 training and 10,000 test rows, 10 classes.

    Pixels are normalised per channel. The files are those of the binary version, five training batches and a test
    batch. A folder with only some of the training batches is read with a warning that names the missing files: enough
    for a trial, but the results are not those of CIFAR-10. A folder without any training batch, or without the test
    batch, is an error.

    Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009; no licence stated.
    """
    folder = locate("cifar-10-batches-bin", data_dir, progress)
    mean, std = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
    train = [f"data_batch_{i}.bin" for i in range(1, 6)]
    return _cifar_set("cifar10", folder, train, "test_batch.bin", 1, 10, mean, std)


@data_set
def cifar100(data_dir: Directory = None, progress: Progress = None) -> Dataset:
    """Load CIFAR-100, photographs of objects, 3 x 32 x 32 pixels: 50,000 training and 10,000 test rows, 100 classes.

    Pixels are normalised per channel; the target is the fine label. Files with fewer images are read with a warning.

    Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009; no licence stated.
    """
    folder = locate("cifar-100-binary", data_dir, progress)
    mean, std = (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)
    return _cifar_set("cifar100", folder, ["train.bin"], "test.bin", 2, 100, mean, std)


@data_set
def omniglot(
    data_dir: Directory = None,
    progress: Progress = None,
    size: int = param(28, "side of an image in pixels", least=1, most=105),
) -> Dataset:
    """Load Omniglot, handwritten characters of 30 alphabets: 15,424 training and 3,856 test rows, 964 classes.

    The drawings of the background set, 105 x 105 pixels with 1 for ink and 0 for paper, are reduced to [1, size, size]
    by averaging. The target is the character; ``keys`` are alphabet numbers, for the partition ``by_key``. Of the 20
    people who drew each character, 16 are in the training rows and 4 in the test rows.

    Lake et al., "Human-level concept learning through probabilistic program induction", Science 2015; MIT.
    """
    drawings = formats.omniglot(locate("omniglot.npz", data_dir, progress))
    background = np.flatnonzero(~drawings.evaluation.astype(bool))
    # Row i of the matrix weights each old pixel by how much of it lies in new pixel i.
    new, old = np.arange(size)[:, None] * 105 / size, np.arange(105)
    weights = np.clip(np.minimum(new + 105 / size, old + 1) - np.maximum(new, old), 0, None) * size / 105
    weights = weights.astype(np.float32)
    images = np.empty((len(background), 1, size, size), np.float32)
    for start in range(0, len(background), 1024):
        ink = drawings.ink(background[start : start + 1024]).astype(np.float32)
        images[start : start + 1024, 0] = weights @ ink @ weights.T
    names, targets = np.unique(drawings.character[background], return_inverse=True)
    test = drawings.drawer[background] >= 17
    keys = drawings.alphabet[background][~test].astype(np.int64)
    return build("omniglot", images[~test], targets[~test], images[test], targets[test], len(names), keys)


def _idx_set(name: str, folder: str, mean: float, std: float, data_dir: Directory, progress: Progress) -> Dataset:
    kinds = ("images-idx3-ubyte.gz", "labels-idx1-ubyte.gz")
    paths = [[locate(f"{folder}/{part}-{kind}", data_dir, progress) for kind in kinds] for part in ("train", "t10k")]
    (images, targets), (test_images, test_targets) = (formats.idx_pair(*pair) for pair in paths)
    pixels, test_pixels = (scale(array[:, None], mean, std) for array in (images, test_images))
    return build(name, pixels, targets, test_pixels, test_targets, 10)


def _cifar_set(
    name: str,
    folder: Path,
    train: Sequence[str],
    test: str,
    labels: int,
    classes: int,
    mean: Sequence[float],
    std: Sequence[float],
) -> Dataset:
    missing = [file for file in (*train, test) if not (folder / file).exists()]
    if test in missing or set(train) <= set(missing):
        raise MissingData(
            f"The folder {folder} lacks {', '.join(missing)} of the data set {name}. Put the files there, or remove "
            "the folder to download the whole set again."
        )
    paths = [folder / file for file in train if file not in missing]
    images, targets = formats.cifar(paths, labels, classes)
    test_images, test_targets = formats.cifar([folder / test], labels, classes)
    if len(images) < 50_000 or len(test_images) < 10_000:
        counts = f"{len(images):,} of 50,000 training images and {len(test_images):,} of 10,000 test images"
        lacks = f" It lacks {', '.join(missing)}." if missing else ""
        warnings.warn(
            f"The data set {name} is incomplete: the folder {folder} has {counts}.{lacks} Remove the folder to "
            "download the whole set again.",
            stacklevel=3,
        )
    return build(name, scale(images, mean, std), targets, scale(test_images, mean, std), test_targets, classes)
