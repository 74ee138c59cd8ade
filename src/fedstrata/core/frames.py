"""Rows as pandas DataFrames; pandas is optional."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fedstrata.core.errors import InputError

if TYPE_CHECKING:
    import pandas


def frame(rows: Sequence[dict[str, Any]]) -> pandas.DataFrame:
    """Return rows as a DataFrame, one column per key."""
    try:
        import pandas
    except ImportError:
        raise InputError("pandas is not installed: pip install 'fedstrata[frames]'.") from None
    return pandas.DataFrame(rows)
