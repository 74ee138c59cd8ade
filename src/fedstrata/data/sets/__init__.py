"""Public data sets by name, each a function that returns a :class:`Dataset` ready for a model.

``digits`` and ``breast_cancer`` come with scikit-learn and ``sinusoid`` is generated, so they need no files. All others
are read in their standard file formats from the data directory (see :func:`load`). In binary sets, class 1 is the
positive class.

    >>> load("mnist").inputs.shape
    torch.Size([60000, 1, 28, 28])
"""

from __future__ import annotations

from inspect import signature
from typing import Any

from fedstrata.core.options import check
from fedstrata.data.dataset import Dataset
from fedstrata.data.download import Directory, Progress
from fedstrata.data.sets import images, medical, synthetic, tabular, text  # noqa: F401 (each registers its sets)
from fedstrata.data.sets.common import SETS as SETS


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
    if "data_dir" in signature(build).parameters:
        values |= {"data_dir": data_dir, "progress": progress}
    return build(**values)
