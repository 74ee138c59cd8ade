"""The pass over the bytes of a text file finds what a reader of its text finds."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedstrata.data.tables import scanning
from fedstrata.data.tables.scanning import scan_of


def slowly(text: str) -> tuple[int, bool, bool]:
    """Return the number of lines, whether each row is one line, and whether a quote is open."""
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    body, open_quote, in_quotes = text.rstrip("\n"), False, False
    for character in text:
        open_quote ^= character == '"'
        in_quotes |= open_quote and character == "\n"
    blank = body.startswith("\n") or "\n\n" in body
    return text.count("\n") + (not text.endswith("\n")), not blank and not in_quotes, open_quote


@pytest.mark.parametrize("block", [1, 2, 3, 1 << 20])
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(parts=st.lists(st.sampled_from(["a", "ü", ",", "\n", "\r\n", "\r", '"']), min_size=1, max_size=12))
def test_scans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int, parts: list[str]) -> None:
    text = "".join(parts)
    monkeypatch.setattr(scanning, "BLOCK", block)
    path = tmp_path / "table.csv"
    path.write_bytes(text.encode())
    scan = scan_of(path, "utf-8")
    lines, plain, open_quote = slowly(text)
    assert (scan.plain, scan.open_quote) == (plain, open_quote)
    assert scan.lines == lines
