"""Seconds per exchange of a federation over loopback, with TLS and node keys: fast nodes against stock SuperNodes.

    python bench/federation.py [--nodes 4] [--rounds 40] [--stock-rounds 6] [--fast-only]

FedAvg with 10 local steps of logistic regression on `digits`, one exchange per round. Prints, in one run, the median
round with each kind of node; the work in it, measured with the nodes' own code in this process, all nodes after each
other; what an exchange costs beyond the work (target: at most 0.5 s on a quiet machine); the ratio of the two kinds
(target: at most 1/8); the processor time per round of each kind of process; and how far the model of either is from
that of simulated clients.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import torch
from safetensors.torch import load_file

import fedstrata as fs
from common import parser, start
from fedstrata.experiments.build import Experiment
from fedstrata.experiments.config import Config, parse
from fedstrata.federation import wire
from fedstrata.federation.deploy import app_settings
from fedstrata.federation.local import run_locally
from fedstrata.federation.node.answer import Answers
from fedstrata.federation.superlink import Federation
from fedstrata.federation.wire import Call, Reply

WARM = 3
"""The first rounds are not counted: in them, nodes read data and trace the model's functions."""

PARTS = {
    "SuperLink": "flower-superlink",
    "server's loop": "flwr-serverapp",
    "nodes": "fedstrata.federation.node ",
    "workers": "fedstrata.federation.node.worker",
}


def experiment(rounds: int) -> Config:
    """Return the experiment."""
    tables = {
        "data": {"name": "digits"},
        "model": {"name": "logreg"},
        "algorithm": {"name": "fedavg", "steps": 10},
        "train": {"rounds": rounds, "batch_size": 32, "threads": 1},
    }
    return parse(tables, "the benchmark")


def federate(rounds: int, nodes: int, folder: Path, stock: bool) -> tuple[list[float], dict[str, float]]:
    """Run a federation; return the seconds of each round, and the processor time per round of its processes by kind."""
    looks: list[tuple[int, dict[str, float]]] = []
    out = folder / "run"

    def look(_: Federation) -> None:
        if (out / "metrics.jsonl").exists():
            looks.append((len(rows_of(out)), processor_times(folder)))

    run_locally(experiment(rounds), nodes, folder / "federation", out, False, [], print, hook=look, stock=stock)
    ends = [row["seconds"] for row in rows_of(out)]
    took = [after - before for before, after in zip(ends[WARM:-1], ends[WARM + 1 :], strict=True)]
    first, last = next(item for item in looks if item[0] > WARM), looks[-1]
    each = {kind: (last[1][kind] - first[1][kind]) / max(1, last[0] - first[0]) for kind in PARTS}
    return took, each


def rows_of(out: Path) -> list[fs.Row]:
    """Return the evaluations of a run."""
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines() if line.endswith("}")]


def processor_times(folder: Path) -> dict[str, float]:
    """Return the processor time so far of the processes in a folder, and of what they started, by kind."""
    total = dict.fromkeys(PARTS, 0.0)
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ValueError, IndexError):
            if f"FLWR_HOME={folder}" not in (entry / "environ").read_bytes().decode(errors="replace"):
                continue
            words = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            for kind in [kind for kind in PARTS if PARTS[kind] in words]:
                total[kind] += (int(fields[11]) + int(fields[12])) / 100
    return total


def seconds_of_work(nodes: int, folder: Path, repeats: int = 20) -> float:
    """Return the seconds in which the nodes, one after the other, answer a call for work: the median."""
    split = Experiment(experiment(1).replace(data=experiment(1).data.replace(clients=nodes)))
    form, arrays = wire.pack((split.problem.x0,))
    text = str(app_settings(folder / "federation")["experiment"])
    times, answers = [], []
    for k in range(nodes):
        own = folder / "federation" / "nodes" / f"node{k}"
        state = {"state": str(folder / "state" / str(k))}
        answers.append(Answers({"data": str(own / "data"), "key": str(own / "node.key"), **state}))
    for number in range(repeats):
        began = time.perf_counter()
        for k, answer in enumerate(answers):
            call = Call("work", "0" * 32, "n", k, nodes, f"node{k}", 10, number, work="local")
            answer.answer(Reply(call.text(form), b"", tuple(arrays)).packet(), text)
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:])


def distance(rounds: int, nodes: int, folder: Path) -> float:
    """Return how far the model of a federation is from that of simulated clients, relative to its distance from 0."""
    config = experiment(rounds).replace(data=experiment(rounds).data.replace(clients=nodes))
    built = Experiment(config)
    run = fs.train(built.problem, built.data, built.algorithm, settings=config.settings)
    assert run.problem.flat is not None
    expected = run.problem.flat.state_dict(run.x)
    ours = load_file(folder / "run" / "model.safetensors")
    gap = torch.cat([(ours[name] - value).flatten() for name, value in expected.items()]).norm()
    return float(gap / torch.cat([value.flatten() for value in expected.values()]).norm())


def report(kind: str, took: list[float], each: dict[str, float]) -> float:
    """Print the times of a kind of node; return the median of a round."""
    median, slow = statistics.median(took), sorted(took)[int(0.9 * len(took))]
    print(f"{kind}: {median:.3f} s per exchange, 90 % below {slow:.3f} s ({len(took)} rounds)")
    print("    processor time per round: " + ", ".join(f"{name} {1e3 * s:.0f} ms" for name, s in each.items() if s))
    return median


def main() -> None:
    """Run the benchmark."""
    own = parser(__doc__)
    own.add_argument("--nodes", type=int, default=4)
    own.add_argument("--rounds", type=int, default=40)
    own.add_argument("--stock-rounds", type=int, default=6)
    own.add_argument("--fast-only", action="store_true")
    arguments = start(own)
    nodes, rounds = arguments.nodes, arguments.rounds
    with tempfile.TemporaryDirectory(prefix="fedstrata-") as scratch:
        folder = Path(scratch).resolve()
        fast = report("fast nodes", *federate(rounds, nodes, folder / "fast", stock=False))
        work = seconds_of_work(nodes, folder / "fast")
        print(f"work of {nodes} nodes after each other {work:.3f} s; beyond it {fast - work:.3f} s per exchange")
        print(f"distance from simulated clients {distance(rounds, nodes, folder / 'fast'):.1e}")
        if not arguments.fast_only:
            rounds = arguments.stock_rounds + WARM
            stock = report("stock SuperNodes", *federate(rounds, nodes, folder / "stock", stock=True))
            print(f"distance from simulated clients {distance(rounds, nodes, folder / 'stock'):.1e}")
            print(f"fast against stock: {fast / stock:.3f}, 1 to {stock / fast:.1f}")


if __name__ == "__main__":
    main()
