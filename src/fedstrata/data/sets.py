"""The data sets, each a function that returns a :class:`Dataset` ready for a model.

``digits`` and ``breast_cancer`` come with scikit-learn and ``sinusoid`` is drawn at random: they need no files. The
others are read in their standard file formats from a data directory (the option ``data_dir``, else the environment
variable ``FEDSTRATA_DATA``, else ``~/.cache/fedstrata``), and downloaded to it once where an official address is known
and ``FEDSTRATA_OFFLINE`` is not set. In binary sets class 1 is the positive one, the one to be found.

    >>> load("mnist").inputs.shape
    torch.Size([60000, 1, 28, 28])
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedstrata.core.errors import InputError, invalid
from fedstrata.core.options import check, options, param
from fedstrata.core.registry import Registry
from fedstrata.data import formats
from fedstrata.data.dataset import Dataset
from fedstrata.data.download import SOURCES, Progress, data_directory, find, locate

Directory = str | Path | None

CHARACTERS = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
"""The vocabulary of ``shakespeare``, LEAF's 80 characters: token and class number k is the k-th, counted from 0."""

TEST_SHARE = 0.2
SPLIT_SEED = 0

VALIDATION = param(False, "add the validation rows to the training rows")


def load(name: str, data_dir: Directory = None, progress: Progress | None = None, **options: Any) -> Dataset:
    """Load a data set by name, for instance ``load("shakespeare", length=40)``.

    ``data_dir`` is the data directory, not used by the sets that need no files. ``progress`` is called with a line
    of text now and then during a download. The options are those of the set's own function.
    """
    build = SETS.find(name)
    values = check(build, options)
    if "data_dir" in signature(build).parameters:
        values |= {"data_dir": data_dir, "progress": progress}
    return build(**values)


@options("the digits data set")
def digits() -> Dataset:
    """Handwritten digits, 8 x 8 grey pixels in [0, 1]: 1,438 train and 359 test rows, 10 classes.

    Part of scikit-learn; stratified 80/20 split, always the same. Alpaydin and Kaynak, "Optical Recognition of
    Handwritten Digits", UCI 1998; CC BY 4.0.
    """
    from sklearn.datasets import load_digits  # here, because it takes a second that most sets do not need

    bunch = load_digits()
    images = (bunch.images[:, None] / 16).astype(np.float32)
    train, test = _split(bunch.target)
    return _dataset("digits", images[train], bunch.target[train], images[test], bunch.target[test], 10)


@options("the breast_cancer data set")
def breast_cancer() -> Dataset:
    """Breast cancer from 30 measures of cell nuclei, standardised: 456 train and 113 test rows.

    Class 1 is malignant (37 %); scikit-learn numbers the classes the other way round. Part of scikit-learn;
    stratified 80/20 split, always the same. Wolberg et al., "Breast Cancer Wisconsin (Diagnostic)", UCI 1995;
    CC BY 4.0.
    """
    from sklearn.datasets import load_breast_cancer

    bunch = load_breast_cancer()
    return _split_and_standardise("breast_cancer", bunch.data, 1 - bunch.target)


@options("the mnist data set")
def mnist(data_dir: Directory = None, progress: Progress | None = None) -> Dataset:
    """MNIST, handwritten digits, 28 x 28 grey pixels, (v/255 - 0.1307) / 0.3081: 60,000 train, 10,000 test rows.

    LeCun et al., "Gradient-Based Learning Applied to Document Recognition", Proceedings of the IEEE 1998; licence not
    stated by the authors, commonly given as CC BY-SA 3.0.
    """
    return _idx_set("mnist", "mnist", 0.1307, 0.3081, data_dir, progress)


@options("the fashion_mnist data set")
def fashion_mnist(data_dir: Directory = None, progress: Progress | None = None) -> Dataset:
    """Fashion-MNIST, clothes, 28 x 28 grey pixels, (v/255 - 0.2860) / 0.3530: 60,000 train, 10,000 test rows.

    Xiao et al., "Fashion-MNIST: a Novel Image Dataset for Benchmarking Machine Learning Algorithms", 2017; MIT.
    """
    return _idx_set("fashion_mnist", "fashion-mnist", 0.2860, 0.3530, data_dir, progress)


@options("the cifar10 data set")
def cifar10(data_dir: Directory = None, progress: Progress | None = None) -> Dataset:
    """CIFAR-10, objects, 3 x 32 x 32 pixels, normalised per channel: 50,000 train, 10,000 test rows, 10 classes.

    Reads every ``data_batch_*.bin`` of the binary version that is there. Krizhevsky, "Learning Multiple Layers of
    Features from Tiny Images", 2009; licence not stated.
    """
    folder = locate("cifar-10-batches-bin", data_directory(data_dir), progress)
    mean, std = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
    return _cifar_set("cifar10", folder, ("data_batch_*.bin", "test_batch.bin"), 1, 10, mean, std)


@options("the cifar100 data set")
def cifar100(data_dir: Directory = None, progress: Progress | None = None) -> Dataset:
    """CIFAR-100, objects, 3 x 32 x 32 pixels, normalised per channel: 50,000 train, 10,000 test rows, 100 classes.

    The target is the fine label. Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009; licence
    not stated.
    """
    folder = locate("cifar-100-binary", data_directory(data_dir), progress)
    mean, std = (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)
    return _cifar_set("cifar100", folder, ("train.bin", "test.bin"), 2, 100, mean, std)


@options("the shakespeare data set")
def shakespeare(
    data_dir: Directory = None,
    progress: Progress | None = None,
    length: int = param(80, "characters of a row", least=1),
    stride: int = param(10, "characters between the starts of two rows", least=1),
    min_characters: int = param(1000, "characters that a role must have", least=1),
    roles: int | None = param(None, "how many of the roles are kept, a fixed random choice; by default all", least=1),
) -> Dataset:
    """Next-character prediction in Shakespeare's 37 plays, one owner per speaking role (641 of 1,344 by default).

    A row is ``length`` characters of a role (uint8 tokens, see :data:`CHARACTERS`; any other character becomes a
    space) and its target the next character: 80 classes. A row starts every ``stride`` characters; stride 1 is every
    position, at ten times the memory of the default. Roles with fewer than ``min_characters`` characters are left out,
    as are those too short for a training and a test row. The last 20 % of the rows of each role are test rows, and the
    training rows that share a character with them are dropped. Keys are role numbers, in the order of the file.
    ``roles`` keeps only so many of the roles, drawn at random but always the same ones: the partition ``by_key`` gives
    each to a client, ``iid`` mixes them.

    After LEAF (Caldas et al., "LEAF: A Benchmark for Federated Settings", 2018); the text is in the public domain.
    """
    read = formats.shakespeare(locate("shakespeare/shakespeare_roles.jsonl.gz", data_directory(data_dir), progress))
    tokens = np.full(129, CHARACTERS.index(" "), np.uint8)
    tokens[[ord(character) for character in CHARACTERS]] = np.arange(len(CHARACTERS))
    train, test, keys = [], [], []
    for number, role in enumerate(read):
        if len(role.text) < max(min_characters, length + 1):
            continue
        text = tokens[np.minimum(np.frombuffer(role.text.encode("utf-32-le"), "<u4"), 128)]
        rows = np.lib.stride_tricks.sliding_window_view(text, length + 1)[::stride]
        first = len(rows) - max(1, round(TEST_SHARE * len(rows)))
        kept = first - length // stride  # a row reaches into the next length // stride rows
        if kept > 0:
            train.append(rows[:kept])
            test.append(rows[first:])
            keys.append(np.full(kept, number))
    if not keys:
        raise InputError(
            f"No role of data set 'shakespeare' is long enough for length {length}, stride {stride} and "
            f"min_characters {min_characters}. Lower them."
        )
    if roles is not None:
        if roles > len(keys):
            raise invalid("roles of the shakespeare data set", roles, f"at most {len(keys)}, the roles there are")
        kept_roles = np.sort(np.random.default_rng(0).choice(len(keys), roles, replace=False))
        train, test, keys = ([part[i] for i in kept_roles] for part in (train, test, keys))
    old, new = np.concatenate(train), np.concatenate(test)
    return _dataset(
        "shakespeare", old[:, :-1], old[:, -1], new[:, :-1], new[:, -1], len(CHARACTERS), np.concatenate(keys)
    )


@options("the omniglot data set")
def omniglot(
    data_dir: Directory = None,
    progress: Progress | None = None,
    size: int = param(28, "side of an image in pixels", least=1, most=105),
) -> Dataset:
    """Omniglot, handwritten characters of 30 alphabets (the background set): 15,424 train, 3,856 test rows.

    The drawings, 105 x 105 with 1 = ink and 0 = paper, are reduced to [1, size, size] by the mean over the area of each
    new pixel. The target is the character (964 classes), keys are alphabet numbers. Each character was drawn by 20
    people: drawers 1 to 16 are training rows, 17 to 20 test rows. Lake et al., "Human-level concept learning through
    probabilistic program induction", Science 2015; MIT.
    """
    drawings = formats.omniglot(locate("omniglot.npz", data_directory(data_dir), progress))
    background = np.flatnonzero(~drawings.evaluation.astype(bool))
    # Row i of the matrix weighs the old pixels by how much of them lies in new pixel i.
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
    return _dataset("omniglot", images[~test], targets[~test], images[test], targets[test], len(names), keys)


@options("the pneumoniamnist data set")
def pneumoniamnist(
    data_dir: Directory = None, progress: Progress | None = None, validation: bool = VALIDATION
) -> Dataset:
    """PneumoniaMNIST, chest X-rays, 28 x 28 grey pixels in [-1, 1]: 4,708 train, 624 test rows.

    Class 1 is pneumonia, the more frequent one (74 % of train). ``validation`` adds the 524 validation rows to the
    training rows. Yang et al., "MedMNIST v2", Scientific Data 2023; CC BY 4.0.
    """
    path = locate("pneumoniamnist.npz", data_directory(data_dir), progress)
    return _medmnist_set("pneumoniamnist", path, 1, validation)


@options("the breastmnist data set")
def breastmnist(data_dir: Directory = None, progress: Progress | None = None, validation: bool = VALIDATION) -> Dataset:
    """BreastMNIST, breast ultrasound, 28 x 28 grey pixels in [-1, 1]: 546 train, 156 test rows.

    Class 1 is malignant (27 %); the file numbers the classes the other way round. ``validation`` adds the 78 validation
    rows to the training rows. Yang et al., "MedMNIST v2", Scientific Data 2023; CC BY 4.0.
    """
    path = locate("breastmnist.npz", data_directory(data_dir), progress)
    return _medmnist_set("breastmnist", path, 0, validation)


@options("the ham10000 data set")
def ham10000(data_dir: Directory = None, progress: Progress | None = None) -> Dataset:
    """HAM10000, one photograph per skin lesion, 3 x 28 x 28 pixels in [-1, 1]: 4,786 train, 1,198 test rows.

    Class 1 is melanoma (8.2 %). The split is the array ``is_test`` of the file. Tschandl et al., "The HAM10000 dataset,
    a large collection of multi-source dermatoscopic images of common pigmented skin lesions", Scientific Data 2018;
    CC BY-NC 4.0 (not for commercial use).
    """
    path = locate("ham10000.npz", data_directory(data_dir), progress)
    images, targets, is_test = formats.npz(path, "images", "melanoma", "is_test")
    if images.ndim != 4 or images.shape[3] != 3 or images.dtype != np.uint8:
        raise InputError(f"The file {path} cannot be read: images has {images.dtype} of shape {images.shape}.")
    pixels, test = _scale(images.transpose(0, 3, 1, 2), 0.5, 0.5), is_test.astype(bool)
    return _dataset("ham10000", pixels[~test], targets[~test], pixels[test], targets[test], 2)


@options("the a9a data set")
def a9a(data_dir: Directory = None, progress: Progress | None = None) -> Dataset:
    """a9a, UCI Adult as 123 binary features: 32,561 train, 16,281 test rows; class 1 is income above 50,000 (24 %).

    Platt, "Fast Training of Support Vector Machines Using Sequential Minimal Optimization", 1998, from the LIBSVM
    collection; CC BY 4.0 (UCI Adult).
    """
    directory = data_directory(data_dir)
    paths = [locate(f"tabular/{name}", directory, progress) for name in ("a9a", "a9a.t")]
    return _dataset("a9a", *_libsvm(paths[0], 123), *_libsvm(paths[1], 123), 2)


@options("the w8a data set")
def w8a(data_dir: Directory = None, progress: Progress | None = None) -> Dataset:
    """w8a, web pages as 300 binary key words: 49,749 rows, class 1 is 3.0 %.

    The test rows are those of ``w8a.t`` (14,951) if that file is in the data directory. If only ``w8a`` is there, it is
    split 80/20, stratified, always the same. Platt, "Fast Training of Support Vector Machines Using Sequential Minimal
    Optimization", 1998, from the LIBSVM collection; licence not stated.
    """
    directory = data_directory(data_dir)
    if find(SOURCES["tabular/w8a"], directory) is None:
        # Test rows first: a download that breaks off in between must not leave a set that is split otherwise.
        locate("tabular/w8a.t", directory, progress)
    inputs, targets = _libsvm(locate("tabular/w8a", directory, progress), 300)
    test_path = find(SOURCES["tabular/w8a.t"], directory)
    if test_path is not None:
        return _dataset("w8a", inputs, targets, *_libsvm(test_path, 300), 2)
    train, test = _split(targets)
    return _dataset("w8a", inputs[train], targets[train], inputs[test], targets[test], 2)


@options("the adult data set")
def adult(data_dir: Directory = None, progress: Progress | None = None) -> Dataset:
    """UCI Adult: 32,561 train, 16,281 test rows, 108 features; class 1 is income above 50,000 (24 %).

    Six standardised numbers, and eight categories as 0/1 columns, by the training rows; "?" is a category of its own.
    Becker and Kohavi, "Adult", UCI 1996; CC BY 4.0.
    """
    directory = data_directory(data_dir)
    train, test = (formats.adult(locate(f"tabular/adult.{part}", directory, progress)) for part in ("data", "test"))
    inputs, test_inputs = formats.encode(train, test)
    return _dataset("adult", inputs, train.targets, test_inputs, test.targets, 2)


@options("the bank data set")
def bank(data_dir: Directory = None, progress: Progress | None = None) -> Dataset:
    """UCI Bank Marketing (``bank-additional-full``): 32,950 train, 8,238 test rows, 63 features.

    Class 1 is a deposit taken (11.3 %). Ten standardised numbers, and ten categories as 0/1 columns, by the training
    rows; stratified 80/20 split, always the same. It includes the duration of the call, which is known only once the
    answer is: fine to compare methods, not to predict. Moro et al., "A Data-Driven Approach to Predict the Success
    of Bank Telemarketing", Decision Support Systems 2014; CC BY 4.0.
    """
    table = formats.bank(locate("tabular/bank-additional-full.csv", data_directory(data_dir), progress))
    train, test = (table.take(rows) for rows in _split(table.targets))
    inputs, test_inputs = formats.encode(train, test)
    return _dataset("bank", inputs, train.targets, test_inputs, test.targets, 2)


@options("the mammography data set")
def mammography(data_dir: Directory = None, progress: Progress | None = None) -> Dataset:
    """Mammography, microcalcifications from 6 standardised features: 8,946 train, 2,237 test rows.

    Class 1 is a calcification (2.3 %); stratified 80/20 split, always the same. Woods et al., "Comparative Evaluation
    of Pattern Recognition Techniques for Detection of Microcalcifications in Mammography", 1993; licence not stated.
    """
    inputs, labels = formats.mammography(locate("tabular/mammography.csv", data_directory(data_dir), progress))
    return _split_and_standardise("mammography", inputs, labels > 0)


@options("the sinusoid data set")
def sinusoid(
    tasks: int = param(25, "number of tasks; task i is the same however many there are", least=1),
    samples: int = param(100, "training rows of each task, and as many test rows", least=1),
    noise: float = param(0.0, "standard deviation of the noise of training and test targets", least=0),
    seed: int = param(0, "seed of tasks, inputs and noise", least=0),
) -> Dataset:
    """Sinusoids, the regression tasks of MAML: 2,500 train and 2,500 test rows by default, one input, no classes.

    Task i is y = A_i sin(x - phi_i), with A_i uniform in [0.1, 5], phi_i in [0, pi] and x in [-5, 5]. The test rows of
    all tasks are one pooled test set. The noise is drawn last, so that it changes neither tasks nor inputs.

    Keys are task numbers: the partition ``by_key`` with as many clients as tasks gives each client one task, in random
    order. With fewer clients it leaves tasks out, whose test rows stay in the test set. Finn, Abbeel and Levine,
    "Model-Agnostic Meta-Learning for Fast Adaptation of Deep Networks", ICML 2017, section 5.1.
    """
    inputs = np.empty((tasks, 2 * samples), np.float32)
    targets = np.empty_like(inputs)
    for task in range(tasks):
        rng = np.random.default_rng([seed, task])
        amplitude, phase = rng.uniform(0.1, 5), rng.uniform(0, np.pi)
        inputs[task] = rng.uniform(-5, 5, 2 * samples)
        # In double precision from the rounded inputs, so that the rows lie on the curve up to one rounding.
        curve = amplitude * np.sin(inputs[task].astype(np.float64) - phase)
        targets[task] = curve + noise * rng.standard_normal(2 * samples)
    (x, test_x), (y, test_y) = (
        [torch.from_numpy(half.reshape(shape)) for half in np.hsplit(array, 2)]
        for array, shape in ((inputs, (-1, 1)), (targets, (-1,)))
    )
    return Dataset("sinusoid", x, y, test_x, test_y, 0, np.repeat(np.arange(tasks), samples))


_LOADERS: tuple[Callable[..., Dataset], ...] = (
    *(digits, breast_cancer, mnist, fashion_mnist, cifar10, cifar100, shakespeare, omniglot, pneumoniamnist),
    *(breastmnist, ham10000, a9a, w8a, adult, bank, mammography, sinusoid),
)

SETS: Registry[Callable[..., Dataset]] = Registry("data set", {load.__name__: load for load in _LOADERS})
"""Every data set by its name in a configuration file."""


def _dataset(
    name: str,
    inputs: np.ndarray,
    targets: np.ndarray,
    test_inputs: np.ndarray,
    test_targets: np.ndarray,
    classes: int,
    keys: np.ndarray | None = None,
) -> Dataset:
    def tensor(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array))

    labels, test_labels = (tensor(array.astype(np.int64)) for array in (targets, test_targets))
    return Dataset(name, tensor(inputs), labels, tensor(test_inputs), test_labels, classes, keys)


def _split(targets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Split rows 80/20 in each class, always in the same way; both parts in increasing order."""
    # RandomState, unlike default_rng, promises the same stream in every version of NumPy.
    order = np.random.RandomState(SPLIT_SEED).permutation(len(targets))
    test = np.zeros(len(targets), bool)
    for target in np.unique(targets):
        rows = order[targets[order] == target]
        test[rows[: round(TEST_SHARE * len(rows))]] = True
    return np.flatnonzero(~test), np.flatnonzero(test)


def _split_and_standardise(name: str, inputs: np.ndarray, targets: np.ndarray) -> Dataset:
    train, test = _split(targets)
    scaled, test_scaled = formats.standardise(inputs[train], inputs[test])
    return _dataset(name, scaled, targets[train], test_scaled, targets[test], 2)


def _scale(images: np.ndarray, mean: float | Sequence[float], std: float | Sequence[float]) -> np.ndarray:
    """Turn bytes [n, channels, height, width] into (v / 255 - mean) / std, float32, mean and std per channel."""
    centre, spread = (np.asarray(value, np.float32).reshape(-1, 1, 1) for value in (mean, std))
    floats = images.astype(np.float32, order="C")
    floats *= 1 / (255 * spread)
    floats -= centre / spread
    return floats


def _idx_set(
    name: str, folder: str, mean: float, std: float, data_dir: Directory, progress: Progress | None
) -> Dataset:
    arrays: list[np.ndarray] = []
    directory = data_directory(data_dir)
    kinds = ("images-idx3-ubyte.gz", "labels-idx1-ubyte.gz")
    paths = [[locate(f"{folder}/{part}-{kind}", directory, progress) for kind in kinds] for part in ("train", "t10k")]
    for images, labels in paths:
        pixels, targets = formats.idx_pair(images, labels)
        arrays += [_scale(pixels[:, None], mean, std), targets]
    return _dataset(name, arrays[0], arrays[1], arrays[2], arrays[3], 10)


def _cifar_set(
    name: str,
    folder: Path,
    patterns: tuple[str, str],
    labels: int,
    classes: int,
    mean: Sequence[float],
    std: Sequence[float],
) -> Dataset:
    parts = [formats.cifar(formats.folder_files(folder, pattern), labels, classes) for pattern in patterns]
    (images, targets), (test_images, test_targets) = parts
    return _dataset(name, _scale(images, mean, std), targets, _scale(test_images, mean, std), test_targets, classes)


def _medmnist_set(name: str, path: Path, positive: int, validation: bool) -> Dataset:
    parts = [formats.medmnist(path, part) for part in ("train", "val")[: 2 if validation else 1]]
    images, labels = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    test_images, test_labels = formats.medmnist(path, "test")
    pixels, test_pixels = (_scale(array[:, None], 0.5, 0.5) for array in (images, test_images))
    return _dataset(name, pixels, labels == positive, test_pixels, test_labels == positive, 2)


def _libsvm(path: Path, features: int) -> tuple[np.ndarray, np.ndarray]:
    inputs, labels = formats.libsvm(path, features)
    if not np.isin(labels, (-1, 1)).all():
        raise InputError(f"The file {path} cannot be read: it has labels other than -1 and +1.")
    return inputs, labels > 0
