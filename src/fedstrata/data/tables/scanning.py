"""A pass over all bytes of a text file: whether they are text, how long its lines are, and where its quotes are."""

from __future__ import annotations

from codecs import getincrementaldecoder
from dataclasses import dataclass
from pathlib import Path

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
    """Looks at the bytes of a UTF-8 text, block by block; places are counted from the beginning of the file."""

    def __init__(self, path: Path) -> None:
        self.path, self.lines, self.quotes, self.read = path, 0, 0, 0
        self._decoder, self._unread = getincrementaldecoder("utf-8")(), b""
        self._end, self._blank, self._body = -1, -1, -1  # the last line end, first blank line, last byte of a row
        self._quoted = False  # whether there is a line end in quotes

    @property
    def found(self) -> Scan:
        """What has been found, after all blocks."""
        blank = 0 <= self._blank < self._body  # blank lines at the end do no harm
        unfinished = self._end < self.read - 1
        return Scan(self.lines + unfinished, not blank and not self._quoted, self.quotes % 2 == 1)

    def take(self, block: bytes) -> None:
        """Look at the next block; the last one is empty."""
        self._check_text(block)
        block, self._unread = self._unread + (block or b"\n" * len(self._unread)), b""
        if b"\r" in block:
            self._unread = b"\r" if block.endswith(b"\r") else b""
            block = block.removesuffix(b"\r").replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        if not block:
            return
        codes = np.frombuffer(block, np.uint8)
        ends = np.flatnonzero(codes == ord("\n"))
        if self.quotes % 2 or b'"' in block:
            quotes = np.flatnonzero(codes == ord('"'))
            self._quoted |= bool(((np.searchsorted(quotes, ends) + self.quotes) % 2).any())
            self.quotes += len(quotes)
        self._look_at_lines(ends + self.read, self.read + len(block))
        if ends.size < len(block):
            body = block.rstrip(b"\n") if block.endswith(b"\n") else block
            self._body = self.read + len(body) - 1
        self.lines += len(ends)
        self.read += len(block)

    def _look_at_lines(self, ends: np.ndarray, after: int) -> None:
        lengths = np.diff(ends, prepend=self._end)
        self._end = int(ends[-1]) if len(ends) else self._end
        long = np.flatnonzero(np.append(lengths, after - self._end) > LONGEST_LINE)
        if len(long):
            why = f"line {self.lines + long[0] + 1} has more than a million bytes"
            remedy = "Look for a quote that is not closed, or a file without line ends."
            raise unreadable(self.path, why, remedy)
        if self._blank < 0 and (lengths == 1).any():
            self._blank = int(ends[np.argmax(lengths == 1)])

    def _check_text(self, block: bytes) -> None:
        pending = self._decoder.getstate()[0]
        if b"\0" in block:
            line = self._line_of(block, block.index(0))
            raise unreadable(self.path, f"it has a NUL byte in line {line}", "Export it as text.")
        if not pending and block.isascii() and block:
            return
        try:
            self._decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:
            line = self._line_of(block, max(0, error.start - len(pending)))
            why = f"line {line} is not UTF-8 text (byte 0x{error.object[error.start]:02x})"
            remedy = 'Say which encoding it has, such as "latin-1" or "cp1252".'
            raise unreadable(self.path, why, remedy) from None

    def _line_of(self, block: bytes, place: int) -> int:
        return self.lines + len(block[:place].splitlines()) + block[:place].endswith((b"\n", b"\r")) + (place == 0)


def scan_of(path: Path, encoding: str) -> Scan:
    """Look at all bytes of a file; raise where they are not text."""
    scanner = _Scanner(path)
    with problems_of(path), stream(path, encoding) as file:
        while block := file.read(BLOCK):
            scanner.take(block)
        scanner.take(b"")
    return scanner.found
