"""Arguments and options that several commands share, and checks of their values."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedstrata.core.errors import InputError
from fedstrata.core.files import folder_at, refuse_used


def a_path(text: str | Path) -> Path:
    """Return a path from the command line; an empty one, such as an unset variable, does not mean this directory."""
    if not str(text).strip():
        raise typer.BadParameter("The path is empty.")
    return Path(text)


ConfigFile = Annotated[Path, typer.Argument(help="TOML file of the experiment.", show_default=False)]
RunOut = Annotated[
    Path | None,
    typer.Option(
        parser=a_path, metavar="DIR", help="Run directory to write; must be new. Without it nothing is saved."
    ),
]
Picture = Annotated[Path, typer.Option(parser=a_path, metavar="FILE", help="Plot to write (.png, .pdf or .svg).")]
HtmlPage = Annotated[
    Path | None, typer.Option("--html", parser=a_path, metavar="FILE", help="Page to write, with small plots.")
]
Preset = Annotated[
    str | None,
    typer.Option("--preset", metavar="NAME", help="Preset of the file to apply.", show_default="the first in the file"),
]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a setting, e.g. algorithm.lr=0.1. Can be repeated."),
]
Resume = Annotated[bool, typer.Option("--resume", help="Resume from the output directory.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="Hide progress.")]
Algorithms = Annotated[
    str | None,
    typer.Option(metavar="NAMES", help="Comma-separated names of algorithms.", show_default="the variants in the file"),
]
Seeds = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=10_000,
        metavar="N",
        help="Number of seeds, counting up from train.seed.",
        show_default="compare.seeds in the file",
    ),
]

Jobs = Annotated[
    int, typer.Option(min=1, max=1024, metavar="N", help="Runs to do side by side, each in a process with one thread.")
]


def check_resume(out: Path | None, resume: bool) -> None:
    """Raise if there is no directory to resume from, or if the one to write cannot be written."""
    if resume and out is None:
        raise InputError("--resume needs --out, the directory to resume.")
    if out is not None:
        folder_at(out, "--out")


def check_out(out: Path | None, resume: bool, mark: str) -> None:
    """Raise if the output directory is a file, or is not empty although there is nothing to resume.

    mark: a pattern of files that a directory to resume has.
    """
    check_resume(out, resume)
    if out is None or (resume and any(out.glob(mark))):
        return
    refuse_used(out, "It has nothing to resume. Choose another." if resume else "Choose another, or pass --resume.")
