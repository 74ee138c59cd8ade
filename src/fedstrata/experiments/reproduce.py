"""Experiments that can be run by name: the TOML files under ``experiments/``."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from fedstrata.core.errors import unknown


@dataclass(frozen=True)
class ExperimentFile:
    """The file of an experiment; its ``name`` is the path below ``experiments/``, without ``.toml``."""

    name: str
    path: Path

    @property
    def about(self) -> str:
        """The first comment line of the file."""
        comments = (line for line in self.path.read_text().splitlines() if line.startswith("#"))
        return next(comments, "").lstrip("# ")


def folders() -> list[Path]:
    """Return the ``experiments`` folders of the working directory, of its parents, and of the package's checkout."""
    here = Path.cwd()
    parents = [here, *here.parents]
    checkout = Path(__file__).resolve().parents[3]
    if (checkout / "pyproject.toml").is_file() and checkout not in parents:
        parents.append(checkout)
    return [p / "experiments" for p in parents if (p / "experiments").is_dir()]


def find_all() -> list[ExperimentFile]:
    """Return every experiment; if a name is in several folders, the one in the nearest folder is used."""
    files: dict[str, ExperimentFile] = {}
    for folder in folders():
        for path in _files(folder.rglob("*.toml")):
            name = path.relative_to(folder).with_suffix("").as_posix()
            files.setdefault(name, ExperimentFile(name, path))
    return list(files.values())


def _files(paths: Iterable[Path]) -> list[Path]:
    """Return the files of experiments among these, and not those with claims or the results of tuning."""
    return sorted(path for path in paths if path.stem != "claims" and path.parent.name != "tuned")


def find(name: str) -> list[ExperimentFile]:
    """Return the experiments that ``name`` refers to: a TOML file or a directory of them, by path or by name."""
    for target in (Path(name), *(folder / name for folder in folders())):
        if target.is_dir() and any(_files(target.glob("*.toml"))):
            return [ExperimentFile(_name(path), path) for path in _files(target.glob("*.toml"))]
        for path in (target, target.with_name(f"{target.name}.toml")):
            if path.suffix == ".toml" and path.is_file():
                return [ExperimentFile(_name(path), path)]
    names = {f.name for f in find_all()}
    where = "no such file, and no such name under experiments/ here, in a parent directory, or in fedstrata's checkout"
    raise unknown("experiment", name, names | {n.rpartition("/")[0] for n in names if "/" in n}, where)


def _name(path: Path) -> str:
    """Return the part of a path after ``experiments/``, or else the file's name, without ``.toml``."""
    parts = path.resolve().with_suffix("").parts
    last = max((i for i, part in enumerate(parts[:-1]) if part == "experiments"), default=len(parts) - 2)
    return "/".join(parts[last + 1 :])
