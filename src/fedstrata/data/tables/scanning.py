"""A pass over all bytes of a text file: whether they are text, how long its lines are, and where its quotes are."""

from __future__ import annotations

from codecs import getincrementaldecoder
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import numpy as np

from fedstrata.data.tables.streams import BLOCK, problems_of, stream, unreadable

LONGEST_LINE = BLOCK
"""A line with so many bytes is refused: no row is so long, but a file without line ends is, or a quote."""


@dataclass(frozen=True)
class Scan:
    """What a pass over the bytes of a file finds.

    plain:      whether every row is one line: no blank lines, and no line breaks in quotes.
    open_quote: whether the number of quotes is odd.
    """

    lines: int
    plain: bool
    open_quote: bool


class _Scanner:
    """Looks at the bytes of a UTF-8 text, block by block."""

    def __init__(self, path: Path) -> None:
        self.path, self.lines, self.plain, self.quotes = path, 0, True, 0
        self._decoder, self._unread = getincrementaldecoder("utf-8")(), b""
        self._ends, self._line = 1, 0  # line ends before this block, and bytes of its unfinished line

    def take(self, block: bytes) -> None:
        """Look at the next block; the last one is empty."""
        self._check_text(block)
        block, self._unread = self._unread + block, b""
        if b"\r" in block:
            self._unread = b"\r" if block.endswith(b"\r") else b""
            block = block.removesuffix(b"\r").replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        if not block:
            return
        self._check_length(block)
        body = block.rstrip(b"\n")
        if body and (b"\n\n" in body or self._ends + len(block) - len(block.lstrip(b"\n")) > 1):
            self.plain = False
        self._ends = len(block) - len(body) + (0 if body else self._ends)
        if b'"' in block:
            self._count_quotes(np.frombuffer(block, np.uint8))
        self.lines += block.count(b"\n")

    def _check_text(self, block: bytes) -> None:
        pending = self._decoder.getstate()[0]
        if b"\0" in block:
            self._wrong(f"it has a NUL byte in line {self._line_of(block, block.index(0))}", "Export it as text.")
        if not pending and block.isascii() and block:
            return
        try:
            self._decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:
            line = self._line_of(block, max(0, error.start - len(pending)))
            remedy = 'Say which encoding it has, such as "latin-1" or "cp1252".'
            self._wrong(f"line {line} is not UTF-8 text (byte 0x{error.object[error.start]:02x})", remedy)

    def _line_of(self, block: bytes, place: int) -> int:
        return self.lines + len(block[:place].splitlines()) + block[:place].endswith((b"\n", b"\r")) + (place == 0)

    def _check_length(self, block: bytes) -> None:
        first = block.find(b"\n")
        self._line += len(block) if first < 0 else first
        if self._line >= LONGEST_LINE:
            why = f"line {self.lines + 1} has more than a million bytes"
            self._wrong(why, "Look for a quote that is not closed, or a file without line ends.")
        if first >= 0:
            self._line = len(block) - 1 - block.rfind(b"\n")

    def _count_quotes(self, block: np.ndarray) -> None:
        quotes = np.flatnonzero(block == ord('"'))
        if self.plain:
            before = np.searchsorted(quotes, np.flatnonzero(block == ord("\n"))) + self.quotes
            self.plain = not bool((before % 2).any())
        self.quotes += len(quotes)

    def _wrong(self, why: str, remedy: str) -> NoReturn:
        raise unreadable(self.path, why, remedy)


def scan_of(path: Path, encoding: str) -> Scan:
    """Look at all bytes of a file; raise where they are not text."""
    scanner = _Scanner(path)
    with problems_of(path), stream(path, encoding) as file:
        while block := file.read(BLOCK):
            scanner.take(block)
        scanner.take(b"")
    return Scan(scanner.lines + (scanner._ends == 0), scanner.plain, scanner.quotes % 2 == 1)
