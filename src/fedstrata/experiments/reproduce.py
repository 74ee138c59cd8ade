"""Experiments that can be run again by name: the TOML files under ``experiments/``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fedstrata.core.errors import unknown


@dataclass(frozen=True)
class Found:
    """An experiment: its ``name``, as it is called under ``experiments/``, and the ``path`` of its file."""

    name: str
    path: Path

    @property
    def about(self) -> str:
        """The first comment line of the file."""
        comments = (line for line in self.path.read_text().splitlines() if line.startswith("#"))
        return next(comments, "").lstrip("# ")


def folders() -> list[Path]:
    """Return the ``experiments`` directories: of where we are, of its parents, and of the checkout of this package."""
    here = Path.cwd()
    places = [here, *here.parents]
    checkout = Path(__file__).resolve().parents[2]
    if (checkout / "pyproject.toml").is_file() and checkout not in places:
        places.append(checkout)
    return [p / "experiments" for p in places if (p / "experiments").is_dir()]


def everything() -> list[Found]:
    """Return all experiments there are, the nearest directory's first; a name that is there twice counts once."""
    found: dict[str, Found] = {}
    for folder in folders():
        for path in sorted(folder.rglob("*.toml")):
            name = path.relative_to(folder).with_suffix("").as_posix()
            found.setdefault(name, Found(name, path))
    return list(found.values())


def find(name: str) -> list[Found]:
    """Return the experiments that ``name`` stands for: a path or a name of a TOML file, or of a directory of some."""
    for place in (Path(name), *(folder / name for folder in folders())):
        if place.is_dir() and any(place.glob("*.toml")):
            return [Found(_name(path), path) for path in sorted(place.glob("*.toml"))]
        for path in (place, place.with_name(f"{place.name}.toml")):
            if path.suffix == ".toml" and path.is_file():
                return [Found(_name(path), path)]
    known = [f.name for f in everything()]
    where = "no such file, and no such name under experiments/ here, above, or where fedstrata is checked out"
    raise unknown("experiment", name, {*known, *(n.rpartition("/")[0] for n in known if "/" in n)}, where)


def _name(path: Path) -> str:
    """Return what follows ``experiments/`` in a path, or else the file's own name, without ``.toml``."""
    parts = path.resolve().with_suffix("").parts
    last = max((i for i, part in enumerate(parts[:-1]) if part == "experiments"), default=len(parts) - 2)
    return "/".join(parts[last + 1 :])
