"""How long ``fedstrata predict`` takes for a long table, against reading it with pandas, and how much memory it needs.

    python bench/predict.py [--rows 1000000] [--repeats 3]

The table has 24 columns of numbers, 3 of categories and 3 flags. The two sides take turns in processes of their own;
the ratio is that of the median times. Memory is the growth of the peak over a table of a tenth of the rows: it must not
depend on the length. The limit is 2.5 times the time of ``pandas.read_csv``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

import fedstrata as fs

READ = "import pandas; pandas.read_csv(PATH)"
PREDICT = (
    "import sys; from pathlib import Path; import torch; torch.set_num_threads(1); "
    "from fedstrata.cli.predict import write_scores; from fedstrata.training.risk.predictor import Predictor; "
    "predictor = Predictor.load('model'); write_scores(predictor.rows(PATH), Path(PATH), Path('scores.csv'))"
)
MEASURE = """
import json, resource, time
begun = time.perf_counter(), time.process_time()
CODE
ended = time.perf_counter(), time.process_time()
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
print(json.dumps([ended[0] - begun[0], ended[1] - begun[1], peak]))
"""


def write_table(path: Path, rows: int, part: int = 100_000) -> None:
    """Write a CSV file, a part at a time."""
    import pandas as pd

    rng = np.random.default_rng(0)
    for start in range(0, rows, part):
        n = min(part, rows - start)
        columns: dict[str, np.ndarray] = {f"x{i}": rng.normal(size=n).round(4) for i in range(24)}
        columns |= {f"c{i}": rng.choice(["alpha", "beta", "gamma", "delta"], n) for i in range(3)}
        columns |= {f"f{i}": rng.integers(0, 2, n) for i in range(3)} | {"died": (rng.random(n) < 0.1).astype(int)}
        pd.DataFrame(columns).to_csv(path, index=False, mode="w" if not start else "a", header=not start)


def write_schema(path: Path) -> None:
    """Write the schema of the table."""
    numbers = "".join(
        f'[[columns]]\nname = "x{i}"\nkind = "numeric"\nrange = [-10, 10]\nmissing = "mean"\n' for i in range(24)
    )
    words = '["alpha", "beta", "gamma", "delta"]'
    categories = "".join(f'[[columns]]\nname = "c{i}"\nkind = "category"\ncategories = {words}\n' for i in range(3))
    flags = "".join(f'[[columns]]\nname = "f{i}"\nkind = "flag"\ncategories = [0, 1]\n' for i in range(3))
    path.write_text(f'version = 1\n[target]\nname = "died"\n{numbers}{categories}{flags}')


def measured(code: str, path: Path, folder: Path) -> tuple[float, float, float]:
    """Return wall time, processor time and peak memory in MiB of code in a process of its own, without its imports."""
    imports, _, last = code.rpartition("; ")
    program = f"{imports}\n{MEASURE.replace('CODE', last)}".replace("PATH", repr(str(path)))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=folder)
    wall, processor, peak = json.loads(done.stdout)
    return wall, processor, peak


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        long, short = folder / "long.csv", folder / "short.csv"
        write_table(long, arguments.rows)
        write_table(short, max(1, arguments.rows // 10))
        write_schema(folder / "schema.toml")
        data = fs.FederatedData.from_tables([short], folder / "schema.toml")
        net = fs.models.model("mlp", data.shape, outputs=1, hidden=[32], seed=0)
        problem = fs.erm(net, "binary_cross_entropy")
        run = fs.train(problem, data, fs.FedAvg(lr=0.1), rounds=1, batch_size=32, threads=1)
        run.predictor().save(folder / "model")
        turns = [(measured(PREDICT, long, folder), measured(READ, long, folder)) for _ in range(arguments.repeats)]
        small = measured(PREDICT, short, folder)[2]
    for i, what in enumerate(("seconds", "processor seconds")):
        ours, theirs = (statistics.median(turn[side][i] for turn in turns) for side in (0, 1))
        print(f"{what}: predict {ours:.2f}, pandas.read_csv {theirs:.2f}, ratio {ours / theirs:.2f} (limit 2.5)")
    peak = max(turn[0][2] for turn in turns)
    print(f"peak memory: {peak:.0f} MiB for {arguments.rows:,} rows, {small:.0f} MiB for a tenth of them")


if __name__ == "__main__":
    main()
