"""Public data sets by name, each a function that returns a :class:`Dataset` ready for a model.

``digits`` and ``breast_cancer`` come with scikit-learn and ``sinusoid`` is generated, so they need no files. All others
are read in their standard file formats from the data directory (see :func:`load`). In binary sets, class 1 is the
positive class.

    >>> load("mnist").inputs.shape
    torch.Size([60000, 1, 28, 28])
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any, TypeVar

from fedstrata.core.errors import invalid
from fedstrata.core.named import registered
from fedstrata.core.options import check
from fedstrata.data.dataset import Dataset
from fedstrata.data.download import Directory, Progress
from fedstrata.data.sets import images, medical, synthetic, tabular, text  # noqa: F401 (each registers its sets)
from fedstrata.data.sets.common import SETS as SETS

F = TypeVar("F", bound=Callable[..., Dataset])


def load(name: str, data_dir: Directory = None, progress: Progress = None, **options: Any) -> Dataset:
    """Load a data set by name, e.g. ``load("shakespeare", length=40)``.

    name:     one of :data:`SETS`.
    data_dir: the data directory; by default the environment variable ``FEDSTRATA_DATA``, else ``~/.cache/fedstrata``. A
              missing file is downloaded to it once, if the file has an official address and ``FEDSTRATA_OFFLINE`` is
              not set. Sets that need no files ignore it.
    progress: called with a line of text from time to time during a download.
    options:  the options of the set, see ``fedstrata show NAME``.
    """
    build = SETS.find(name)
    values = check(build, options)
    given = {"data_dir": data_dir, "progress": progress}
    dataset: Any = build(**values, **{k: v for k, v in given.items() if k in signature(build).parameters})
    if not isinstance(dataset, Dataset):
        raise invalid(
            f"result of the function {name}", type(dataset).__name__, "a Dataset, e.g. Dataset.from_arrays(...)"
        )
    return dataset


def register(function: F) -> F:
    """Register a function that returns a data set of your own, under its own name.

        @fs.data.register
        def clinic(rows: int = fs.param(1000, "rows to read", least=1)) -> fs.Dataset:
            return fs.Dataset.from_arrays(inputs, targets)

    A file then uses it as ``[data]`` with ``name = "clinic"``, and ``options = { rows = 200 }`` for the options that
    are declared with ``fs.param``. A parameter ``data_dir`` gets the data directory (``data.directory``; may be None).
    """
    return registered(SETS)(function)
