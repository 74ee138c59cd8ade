"""Text as sequences of characters."""

from __future__ import annotations

import numpy as np

from fedstrata.core.errors import InputError, invalid
from fedstrata.core.options import param
from fedstrata.data import formats
from fedstrata.data.dataset import Dataset
from fedstrata.data.download import Directory, Progress, locate
from fedstrata.data.sets.common import TEST_SHARE, build, data_set

CHARACTERS = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
"""LEAF's vocabulary of 80 characters: the token (and class) of a character is its position."""

Windows = tuple[np.ndarray, np.ndarray, int]
"""Training rows, test rows and number of a role."""


@data_set
def shakespeare(
    data_dir: Directory = None,
    progress: Progress = None,
    length: int = param(80, "characters per row", least=1),
    stride: int = param(10, "characters between the starts of consecutive rows", least=1),
    min_characters: int = param(1000, "minimum number of characters of a role", least=1),
    roles: int | None = param(None, "number of roles to keep, a fixed random choice; by default all", least=1),
) -> Dataset:
    """Load Shakespeare's 37 plays for next-character prediction, keyed by speaking role (641 of 1,344 by default).

    An input is ``length`` characters of a role as uint8 tokens, positions in :data:`CHARACTERS`; any other character
    becomes a space. The target is the next character: 80 classes. ``keys`` are role numbers in the order of the file:
    the partition ``by_key`` gives each client one role, ``iid`` mixes them. The last 20 % of the rows of each role are
    test rows; training rows that overlap them are dropped.

    A stride of 1 uses every position, with ten times the memory of the default. Roles too short for a training and a
    test row are always dropped.

    After LEAF (Caldas et al., "LEAF: A Benchmark for Federated Settings", 2018); the text is in the public domain.
    """
    texts = formats.shakespeare(locate("shakespeare/shakespeare_roles.jsonl.gz", data_dir, progress))
    windows = _windows(texts, length, stride, min_characters)
    if not windows:
        raise InputError(
            f"No role of data set 'shakespeare' is long enough for length {length}, stride {stride} and "
            f"min_characters {min_characters}. Lower them."
        )
    if roles is not None:
        if roles > len(windows):
            raise invalid("roles of the shakespeare data set", roles, f"at most {len(windows)}, the number of roles")
        windows = [windows[i] for i in np.sort(np.random.default_rng(0).choice(len(windows), roles, replace=False))]
    train, test = (np.concatenate([window[part] for window in windows]) for part in (0, 1))
    keys = np.concatenate([np.full(len(rows), number) for rows, _, number in windows])
    return build("shakespeare", train[:, :-1], train[:, -1], test[:, :-1], test[:, -1], len(CHARACTERS), keys)


def _windows(texts: list[formats.Role], length: int, stride: int, min_characters: int) -> list[Windows]:
    """Cut the text of each role that is long enough into rows of ``length`` characters and the next one."""
    tokens = np.full(129, CHARACTERS.index(" "), np.uint8)
    tokens[[ord(character) for character in CHARACTERS]] = np.arange(len(CHARACTERS))
    windows: list[Windows] = []
    for number, role in enumerate(texts):
        if len(role.text) < max(min_characters, length + 1):
            continue
        text = tokens[np.minimum(np.frombuffer(role.text.encode("utf-32-le"), "<u4"), 128)]
        rows = np.lib.stride_tricks.sliding_window_view(text, length + 1)[::stride]
        first_test = len(rows) - max(1, round(TEST_SHARE * len(rows)))
        kept = first_test - length // stride  # a row overlaps the next length // stride rows
        if kept > 0:
            windows.append((rows[:kept], rows[first_test:], number))
    return windows
