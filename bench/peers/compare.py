"""Compare simulators on the same jobs: processor time per round, relative to a bare PyTorch loop. Lower is better.

    bench/peers/setup all                          # once: an environment for each of the other simulators
    .venv/bin/python bench/peers/compare.py [--jobs logreg lenet5] [--peers bare fedstrata] [--repeats 5] [--markdown]

Every peer is a process with one thread. First each one proves on a small version of the job that it computes what the
bare loop does; then all take turns, with ``bare`` in every turn. A number of the table is the median over turns of the
peer's time divided by the bare loop's in the same turn. Progress, with the range of each ratio, goes to stderr.
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
    "JAX_PLATFORMS": "cpu",
}
KEEP_MEMORY = {"MALLOC_TRIM_THRESHOLD_": str(1 << 30), "MALLOC_MMAP_THRESHOLD_": str(32 << 20)}
"""What a run of fedstrata asks of the C library; here all peers get it, so that it favours none."""

QUIET = {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0", "PYTHONWARNINGS": "ignore"}


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


def compare(job: Job, peers: list[str], arguments: argparse.Namespace) -> dict[str, list[float] | str]:
    """Return the times per round of each peer in all turns, or why there are none."""
    write(job)
    write(job.small())
    print(f"{job.name}", file=sys.stderr)
    expected = result("bare", job.small())
    running: dict[str, Process] = {}
    times: dict[str, list[float] | str] = {}
    rounds: dict[str, int] = {}
    for peer in peers:
        try:
            if peer != "bare" and not arguments.no_check:
                check(peer, job.small(), expected)
            running[peer] = Process(peer, job)
            arguments.versions.update(running[peer].versions)
            rounds[peer] = math.ceil(arguments.seconds * LONGER.get(peer, 1.0) / running[peer].seconds(1))
            times[peer] = []
        except Unavailable as reason:
            times[peer] = str(reason)
            running.pop(peer, None)
            print(f"  {peer}: {reason}", file=sys.stderr)
    for turn in range(arguments.repeats):
        order = list(running)
        order = order[turn % len(order) :] + order[: turn % len(order)]
        for peer in order:
            times[peer].append(running[peer].seconds(rounds[peer]))
    for process in running.values():
        process.end()
    for peer in running:
        ratios = ratios_of(times, peer)
        spread = f"{min(ratios):.3g} to {max(ratios):.3g}"
        best = min(times[peer]) / min(times["bare"])
        milli = 1e3 * statistics.median(times[peer])
        text = f"{milli:.3g} ms per round, {statistics.median(ratios):.3g} ({spread}), of the shortest times {best:.3g}"
        print(f"  {peer}: {text}; {rounds[peer]} rounds a turn", file=sys.stderr)
    return times


def ratios_of(times: dict[str, list[float] | str], peer: str) -> list[float]:
    """Return a peer's time relative to the bare loop's, in every turn."""
    return [mine / bare for mine, bare in zip(times[peer], times["bare"], strict=True)]


def table(results: dict[str, dict[str, list[float] | str]], peers: list[str], markdown: bool) -> str:
    """Return the table of ratios: a row for each job, a column for each peer."""
    rows = [["job", "bare, ms", *(peer for peer in peers if peer != "bare")]]
    for job, times in results.items():
        milli = 1e3 * statistics.median(times["bare"])
        cells = [
            "-" if isinstance(times[peer], str) else shown(statistics.median(ratios_of(times, peer)))
            for peer in peers
            if peer != "bare"
        ]
        rows.append([job, shown(milli), *cells])
    if markdown:
        rows.insert(1, ["---"] * len(rows[0]))
        return "\n".join(f"| {' | '.join(row)} |" for row in rows)
    widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def shown(value: float) -> str:
    """Return a number with two significant digits; whole numbers in full."""
    return f"{value:.0f}" if value >= 10 else f"{value:.2g}"


def main() -> None:
    """Run the comparison and print its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", nargs="+", choices=JOBS, default=list(JOBS))
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS))
    parser.add_argument("--repeats", type=int, default=5, help="turns of every peer")
    parser.add_argument("--seconds", type=float, default=1.0, help="how long a peer's turn is, at least one round")
    parser.add_argument("--no-check", action="store_true", help="do not compare the peers' results first")
    parser.add_argument("--markdown", action="store_true")
    arguments = parser.parse_args()
    arguments.versions = {}
    peers = ["bare", *(peer for peer in arguments.peers if peer != "bare")]
    results = {name: compare(JOBS[name], peers, arguments) for name in arguments.jobs}
    versions = ", ".join(f"{name} {number}" for name, number in arguments.versions.items())
    print(f"{datetime.date.today()}, Python {platform.python_version()}, {versions}")
    print(f"processor time per round relative to bare, one thread, median of {arguments.repeats} turns")
    print(table(results, peers, arguments.markdown))


if __name__ == "__main__":
    main()
