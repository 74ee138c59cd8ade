"""What a stored result says of its origin, and how it is written."""

from __future__ import annotations

import datetime
import json
import platform
import re
import subprocess
from pathlib import Path
from typing import Any

import torch

import fedstrata as fs
from fedstrata.core.files import write_atomically

HERE = Path(__file__).resolve().parent
WORDS = ("holds", "holds in part", "does not hold", "undecided")
"""The verdicts on a claim."""

Json = dict[str, Any]


WRITTEN = ("*/results/*", "*/tuned/*", "*/figures/*", "README.md", "*/README.md")
"""What studies and ``evidence.py render`` write: such changes do not alter what another study measures."""


def commit() -> str:
    """Return the commit of the checkout, with the mark "-dirty" if it has changes, other than written results."""
    written = [f":(top,exclude)experiments/{pattern}" for pattern in WRITTEN]
    changes = _git("status", "--porcelain", "--untracked-files=no", "--", ":(top)", *written)
    return _git("rev-parse", "--short=12", "HEAD") + ("-dirty" if changes else "")


def _git(*words: str) -> str:
    return subprocess.run(["git", "-C", str(HERE), *words], capture_output=True, text=True, check=True).stdout.strip()


def origin() -> Json:
    """Return what made a result: commit, date, versions."""
    return {
        "commit": commit(),
        "date": datetime.date.today().isoformat(),
        "versions": {"fedstrata": fs.__version__, "torch": torch.__version__, "python": platform.python_version()},
    }


def rounded(value: Any) -> Any:
    """Return a value with six significant digits in its numbers."""
    if isinstance(value, dict):
        return {key: rounded(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(v) for v in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def write(path: Path, record: Json) -> None:
    """Write a result, a list per line."""
    path.parent.mkdir(exist_ok=True)
    text = json.dumps(record, indent=1, ensure_ascii=False)
    flat = re.sub(r"[\[{][^\[\]{}]*[\]}]", lambda found: re.sub(r"\s+", " ", found.group()), text)
    write_atomically(path, f"{flat}\n".encode())
