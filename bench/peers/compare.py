"""Compare simulators on the same jobs: processor time per round, relative to a bare PyTorch loop. Lower is better.

    bench/peers/setup all                          # once: an environment for each of the other simulators
    .venv/bin/python bench/peers/compare.py [--jobs logreg lenet5] [--peers bare fedstrata] [--repeats 5] [--markdown]

Every peer is a process with one thread. First each one proves on a small version of the job that it computes what the
bare loop does; then all take turns, each right after a turn of the bare loop. A number of the table is the median over
turns of the peer's time divided by that of the bare loop just before. Progress goes to stderr, with the range of each
ratio and the ratio of the shortest times.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from jobs import JOBS, Job, read, write

HERE = Path(__file__).parent
SOURCE = HERE.parents[1] / "src"
LOGS = HERE / ".logs"
PEERS = ("bare", "stacked", "fedstrata", "fedstrata-compile", "fedjax", "pfl", "flower", "fedlab")
OWN = ("bare", "stacked", "fedstrata", "fedstrata-compile")
"""Peers that run in the environment of this program."""

LONGER = {"flower": 4.0}
"""Peers whose clock is coarse, and how much longer than the others a turn of theirs is."""

ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1",
    "NPROC": "1",  # the threads of JAX's CPU client
    "JAX_CPU_ENABLE_ASYNC_DISPATCH": "0",
    "JAX_PLATFORMS": "cpu",
}
KEEP_MEMORY = {"MALLOC_TRIM_THRESHOLD_": str(1 << 30), "MALLOC_MMAP_THRESHOLD_": str(32 << 20)}
"""What a run of fedstrata asks of the C library; here all peers get it, so that it favours none."""

QUIET = {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0", "PYTHONWARNINGS": "ignore"}


Turns = list[tuple[float, float]]
"""Processor time per round in each turn: of a peer, and of the bare loop just before."""


class Unavailable(Exception):
    """A peer cannot run a job; says why."""


class Process:
    """A peer at work on a job."""

    def __init__(self, peer: str, job: Job) -> None:
        python = Path(sys.executable) if peer in OWN else HERE / ".envs" / peer / "bin" / "python"
        if not python.exists():
            raise Unavailable(f"not installed: bench/peers/setup {peer}")
        name, _, option = peer.partition("-")
        command = [str(python), str(HERE / f"peer_{name}.py"), str(job.path), *([f"--{option}"] if option else [])]
        environment = {**os.environ, **ONE_THREAD, **KEEP_MEMORY, **QUIET}
        environment["PYTHONPATH"] = os.pathsep.join([str(HERE), *([str(SOURCE)] if peer in OWN else [])])
        LOGS.mkdir(exist_ok=True)
        self.log = LOGS / f"{peer}-{job.path.stem}.log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env=environment
            )
        self.versions = self._answer()["versions"]

    def ask(self, line: str) -> dict[str, float]:
        """Send a line; return the answer."""
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return self._answer()

    def seconds(self, rounds: int) -> float:
        """Run rounds; return the processor time per round."""
        return self.ask(f"run {rounds}")["seconds"] / rounds

    def end(self) -> None:
        """Let the process end."""
        self.process.stdin.close()
        self.process.wait()

    def _answer(self) -> dict:
        line = self.process.stdout.readline()
        if not line:
            self.process.wait()
            last = self.log.read_text().strip().splitlines()[-1:]
            raise Unavailable(f"{' '.join(last)} (see {self.log})")
        answer = json.loads(line)
        if "skip" in answer:
            self.end()
            raise Unavailable(answer["skip"])
        return answer


def result(peer: str, job: Job, rounds: int = 2) -> np.ndarray:
    """Return the weights after some rounds of a job."""
    process = Process(peer, job)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "weights.npy"
        process.ask(f"run {rounds}")
        process.ask(f"weights {path}")
        process.end()
        return np.load(path)


def check(peer: str, job: Job, expected: np.ndarray) -> None:
    """Raise unless the peer's result on the check of a job is that of the bare loop."""
    start = np.concatenate([value.ravel() for value in read(job.path).start.values()])
    update, error = expected - start, result(peer, job) - expected
    relative = float(np.linalg.norm(error) / np.linalg.norm(update))
    print(f"  {peer}: checked, off by {relative:.0e} of the update", file=sys.stderr)
    if not (np.abs(error).max() <= 1e-4 and relative <= 1e-2):
        raise Unavailable(f"wrong result: off by {relative:.1e} of the update")


def compare(job: Job, peers: list[str], arguments: argparse.Namespace) -> dict[str, Turns]:
    """Return the times of each peer that can run the job."""
    write(job)
    write(job.small())
    print(job.name, file=sys.stderr)
    expected = result("bare", job.small())
    running: dict[str, Process] = {}
    rounds: dict[str, int] = {}
    results: dict[str, Turns] = {}
    for peer in ("bare", *peers):
        try:
            if peer != "bare" and not arguments.no_check:
                check(peer, job.small(), expected)
            process = Process(peer, job)
            rounds[peer] = math.ceil(arguments.seconds * LONGER.get(peer, 1.0) / process.seconds(1))
        except Unavailable as reason:
            print(f"  {peer}: {reason}", file=sys.stderr)
            continue
        running[peer], results[peer] = process, []
        arguments.versions.update(process.versions)
    bare = running.pop("bare")
    del results["bare"]
    for _ in range(arguments.repeats):
        for peer, process in list(running.items()):
            before = bare.seconds(rounds["bare"])
            try:
                results[peer].append((process.seconds(rounds[peer]), before))
            except Unavailable as reason:
                print(f"  {peer}: {reason}", file=sys.stderr)
                del running[peer], results[peer]
    for process in (bare, *running.values()):
        process.end()
    for peer, turns in results.items():
        print(report(peer, turns), file=sys.stderr)
    return results


def report(peer: str, turns: Turns) -> str:
    """Return a line about a peer: its time, the median and the range of the ratios, the ratio of the shortest times."""
    ratios = [mine / bare for mine, bare in turns]
    mine, bare = zip(*turns, strict=True)
    spread = f"{middle(turns):.3g} ({min(ratios):.3g} to {max(ratios):.3g})"
    best = min(mine) / min(bare)
    return f"  {peer}: {1e3 * statistics.median(mine):.3g} ms per round, {spread}, of the shortest {best:.3g}"


def table(results: dict[str, dict[str, Turns]], peers: list[str], markdown: bool) -> str:
    """Return the table of ratios: a row for each job, a column for each peer."""
    rows = [["job", "bare, ms", *peers]]
    for job, found in results.items():
        milli = 1e3 * statistics.median(bare for turns in found.values() for _, bare in turns)
        rows.append([job, shown(milli), *(shown(middle(found[peer])) if peer in found else "-" for peer in peers)])
    if markdown:
        rows.insert(1, ["---"] * len(rows[0]))
        return "\n".join(f"| {' | '.join(row)} |" for row in rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def middle(turns: Turns) -> float:
    """Return the median over turns of a peer's time relative to the bare loop's."""
    return statistics.median(mine / bare for mine, bare in turns)


def shown(value: float) -> str:
    """Return a number with two significant digits; whole numbers in full."""
    return f"{value:.0f}" if value >= 10 else f"{value:.2g}"


def commit() -> str:
    """Return the commit of this checkout."""
    command = ["git", "-C", str(HERE), "describe", "--always", "--dirty"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def main() -> None:
    """Run the comparison and print its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", nargs="+", choices=JOBS, default=list(JOBS))
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS), help="bare always takes part")
    parser.add_argument("--repeats", type=int, default=5, help="turns of every peer")
    parser.add_argument("--seconds", type=float, default=1.0, help="how long a peer's turn is, at least one round")
    parser.add_argument("--no-check", action="store_true", help="do not compare the peers' results first")
    parser.add_argument("--markdown", action="store_true")
    arguments = parser.parse_args()
    arguments.versions = {}
    peers = [peer for peer in arguments.peers if peer != "bare"]
    results = {name: compare(JOBS[name], peers, arguments) for name in arguments.jobs}
    versions = ", ".join(f"{name} {number}" for name, number in arguments.versions.items())
    print(f"{datetime.date.today()}, fedstrata {commit()}, Python {platform.python_version()}, {versions}")
    print(f"Processor time per round relative to bare, one thread, median of {arguments.repeats} turns\n")
    print(table(results, peers, arguments.markdown))


if __name__ == "__main__":
    main()
