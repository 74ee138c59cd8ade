"""Tables with two classes."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fedstrata.data import cells, formats
from fedstrata.data.dataset import Dataset
from fedstrata.data.download import SOURCES, Directory, Progress, data_directory, find, locate
from fedstrata.data.sets.common import build, data_set, split, split_and_standardise

_ADULT_NUMBERS = (0, 2, 4, 10, 11, 12)
_ADULT_WIDTH = 15
BANK_HEADER = (
    *("age", "job", "marital", "education", "default", "housing", "loan", "contact", "month", "day_of_week"),
    *("duration", "campaign", "pdays", "previous", "poutcome", "emp.var.rate", "cons.price.idx", "cons.conf.idx"),
    *("euribor3m", "nr.employed", "y"),
)
_BANK_NUMBERS = (0, 10, 11, 12, 13, 15, 16, 17, 18, 19)


@data_set
def breast_cancer() -> Dataset:
    """Load Breast Cancer Wisconsin, 30 standardised measures of cell nuclei: 456 training and 113 test rows.

    Class 1 is malignant (37 %); scikit-learn numbers the classes the other way round. Included in scikit-learn, so no
    files are needed; fixed stratified 80/20 split.

    Wolberg et al., "Breast Cancer Wisconsin (Diagnostic)", UCI 1995; CC BY 4.0.
    """
    from sklearn.datasets import load_breast_cancer  # takes a second to import, and most sets do not need it

    bunch = load_breast_cancer()
    return split_and_standardise("breast_cancer", bunch.data, 1 - bunch.target)


@data_set
def a9a(data_dir: Directory = None, progress: Progress = None) -> Dataset:
    """Load a9a, UCI Adult as 123 binary features: 32,561 training and 16,281 test rows.

    Class 1 is an income above 50,000 (24 %).

    Platt, "Fast Training of Support Vector Machines Using Sequential Minimal Optimization", 1998, from the LIBSVM
    collection; CC BY 4.0 (UCI Adult).
    """
    train, test = (_libsvm(locate(f"tabular/{name}", data_dir, progress), 123) for name in ("a9a", "a9a.t"))
    return build("a9a", *train, *test, 2)


@data_set
def w8a(data_dir: Directory = None, progress: Progress = None) -> Dataset:
    """Load w8a, web pages as 300 binary keywords: 49,749 training and 14,951 test rows.

    Class 1 is 3.0 % of the rows. If the data directory has ``w8a`` but not its test file ``w8a.t``, a fixed stratified
    80/20 split of ``w8a`` is used.

    Platt, "Fast Training of Support Vector Machines Using Sequential Minimal Optimization", 1998, from the LIBSVM
    collection; no licence stated.
    """
    directory = data_directory(data_dir)
    if find(SOURCES["tabular/w8a"], directory) is None:
        # Test rows first: an interrupted download must not leave w8a alone, which would be split differently.
        locate("tabular/w8a.t", directory, progress)
    inputs, targets = _libsvm(locate("tabular/w8a", directory, progress), 300)
    test_path = find(SOURCES["tabular/w8a.t"], directory)
    if test_path is not None:
        return build("w8a", inputs, targets, *_libsvm(test_path, 300), 2)
    train, test = split(targets)
    return build("w8a", inputs[train], targets[train], inputs[test], targets[test], 2)


@data_set
def adult(data_dir: Directory = None, progress: Progress = None) -> Dataset:
    """Load UCI Adult, people's incomes from 108 features: 32,561 training and 16,281 test rows.

    Class 1 is an income above 50,000 (24 %). Six numbers are standardised with the mean and variance of the training
    rows, and eight categories become 0/1 columns; "?" is a category of its own.

    Becker and Kohavi, "Adult", UCI 1996; CC BY 4.0.
    """
    train, test = (read_adult(locate(f"tabular/adult.{part}", data_dir, progress)) for part in ("data", "test"))
    return _encoded("adult", train, test)


@data_set
def bank(data_dir: Directory = None, progress: Progress = None) -> Dataset:
    """Load UCI Bank Marketing (``bank-additional-full``), 63 features: 32,950 training and 8,238 test rows.

    Class 1 is a customer who took the deposit (11.3 %). Ten numbers are standardised with the mean and variance of the
    training rows, and ten categories become 0/1 columns; fixed stratified 80/20 split. One feature is the duration of
    the call, which is known only after the answer: use the set to compare methods, not to predict answers.

    Moro et al., "A Data-Driven Approach to Predict the Success of Bank Telemarketing", Decision Support Systems 2014;
    CC BY 4.0.
    """
    table = read_bank(locate("tabular/bank-additional-full.csv", data_dir, progress))
    train, test = (table.take(rows) for rows in split(table.targets))
    return _encoded("bank", train, test)


@data_set
def mammography(data_dir: Directory = None, progress: Progress = None) -> Dataset:
    """Load Mammography, microcalcifications from 6 standardised features: 8,946 training and 2,237 test rows.

    Class 1 is a calcification (2.3 %); fixed stratified 80/20 split.

    Woods et al., "Comparative Evaluation of Pattern Recognition Techniques for Detection of Microcalcifications in
    Mammography", 1993; no licence stated.
    """
    table = read_mammography(locate("tabular/mammography.csv", data_dir, progress))
    return split_and_standardise("mammography", table.numbers, table.targets)


def read_adult(path: Path) -> cells.Table:
    """Read UCI Adult (``adult.data`` or ``adult.test``): target 1 is an income above 50,000, ``?`` is a category."""
    rows = [row for row in cells.read_cells(path, ",", '"') if not row[0].startswith("|")]
    rows = [[*row[:-1], row[-1].rstrip(".")] for row in rows]
    return cells.table_of(path, rows, _ADULT_WIDTH, _ADULT_NUMBERS, "<=50K", ">50K")


def read_bank(path: Path) -> cells.Table:
    """Read UCI Bank Marketing (``bank-additional-full.csv``): target 1 is a customer who took the deposit."""
    rows = cells.read_cells(path, ";", '"')
    if not rows or tuple(rows[0]) != BANK_HEADER:
        raise formats.unreadable(path, f"its first line must be the header {';'.join(BANK_HEADER)}")
    return cells.table_of(path, rows[1:], len(BANK_HEADER), _BANK_NUMBERS, "no", "yes")


def read_mammography(path: Path) -> cells.Table:
    """Read the mammography CSV: six numbers and the label, -1 or 1, which may be quoted; target 1 is the label 1."""
    return cells.table_of(path, cells.read_cells(path, ",", "'"), 7, range(6), "-1", "1")


def _encoded(name: str, train: cells.Table, test: cells.Table) -> Dataset:
    inputs, test_inputs = cells.encode(train, test)
    return build(name, inputs, train.targets, test_inputs, test.targets, 2)


def _libsvm(path: Path, features: int) -> tuple[np.ndarray, np.ndarray]:
    inputs, labels = formats.libsvm(path, features)
    if not np.isin(labels, (-1, 1)).all():
        raise formats.unreadable(path, "it has labels other than -1 and +1")
    return inputs, labels > 0
