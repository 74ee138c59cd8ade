"""What a user waits for before the first number: imports, the first round, the list of commands and the demo.

    python bench/startup.py [--repeats 5] [--demo] [--against COMMIT]

Each line is a command in a process of its own; they take turns. Prints the median processor time of each in seconds,
and the ratio to `import torch` where that says more; of the demo, which uses several processes, the time on the clock.
Cached bytecode is used, as after the first use of a package. With --against, the same commands take turns with those of
another commit, checked out into a temporary folder; the ratio of the two follows (lower is better).
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

HERE = Path(__file__).resolve().parents[1]

FIRST_USE = "import fedstrata as fs; fs.train, fs.FedAvg, fs.erm, fs.data, fs.partition, fs.models"
ROUND = (
    f"{FIRST_USE}; import time; d = fs.data.digits().split(fs.partition.iid(), clients=4, seed=0); "
    "p = fs.erm(fs.models.model('mlp', (1, 8, 8), 10, seed=0)); begun = time.process_time(); "
    "fs.train(p, d, fs.FedAvg(steps=2), rounds=1, batch_size=8, threads=1)"
)
TORCH = "import torch"
DEMO = "fedstrata demo, on the clock"
COMMANDS = {
    TORCH: ["-c", "import torch"],
    "import fedstrata": ["-c", "import fedstrata"],
    "import fedstrata and use it": ["-c", FIRST_USE],
    "fedstrata --help": ["-m", "fedstrata", "--help"],
    "first round, after imports": ["-c", f"{ROUND}; print(time.process_time() - begun)"],
    "imports, data and first round": ["-c", ROUND],
}


def seconds(words: list[str], tree: Path) -> float:
    """Return the processor time of a command with the code in ``tree``, or what it prints, if that is a number."""
    where = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"} | {"PYTHONPATH": str(tree / "src")}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=True, env=where, cwd=tree)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    try:
        return float(done.stdout)
    except ValueError:
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def demo(tree: Path) -> float:
    """Return how long the demo takes on the clock."""
    with tempfile.TemporaryDirectory() as folder:
        begun = time.perf_counter()
        seconds(["-m", "fedstrata", "demo", "--out", f"{folder}/demo.png"], tree)
        return time.perf_counter() - begun


@contextmanager
def checked_out(commit: str) -> Iterator[Path]:
    """Check out a commit into a temporary folder."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        git = ["git", "-C", str(HERE), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(tree), commit], check=True)
        try:
            yield tree
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], check=True)


def measure(trees: dict[str, Path], repeats: int, demos: int) -> dict[str, dict[str, float]]:
    """Return the median time of each command with each tree; all take turns."""
    times: dict[str, dict[str, list[float]]] = {name: {label: [] for label in trees} for name in (*COMMANDS, DEMO)}
    for turn in range(repeats + 1):
        for name, words in COMMANDS.items():
            for label, tree in trees.items():
                took = seconds(words, tree)
                if turn:  # the first turn writes bytecode
                    times[name][label].append(took)
    for _ in range(demos):
        for label, tree in trees.items():
            times[DEMO][label].append(demo(tree))
    return {
        name: {label: statistics.median(t) for label, t in each.items()}
        for name, each in times.items()
        if all(each.values())
    }


def main() -> None:
    """Run and print every command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--demo", action="store_true", help="also run the demo, once; three times with --against")
    parser.add_argument("--against", metavar="COMMIT", help="also measure this commit, in turns")
    arguments = parser.parse_args()
    if arguments.against is None:
        report(measure({"now": HERE}, arguments.repeats, int(arguments.demo)))
        return
    with checked_out(arguments.against) as before:
        report(measure({"now": HERE, arguments.against: before}, arguments.repeats, 3 * arguments.demo))


def report(times: dict[str, dict[str, float]]) -> None:
    """Print the times, and the ratios to those of the other commit, or to importing torch."""
    torch = times[TORCH]["now"]
    for name, each in times.items():
        ratio = "" if name == DEMO else f", {each['now'] / torch:.2g} times import torch"
        others = [f"; {took:.3g} s at {label}, ratio {each['now'] / took:.2f}" for label, took in each.items()][1:]
        print(f"{name}: {each['now']:.3g} s{ratio}{''.join(others)}")


if __name__ == "__main__":
    main()
