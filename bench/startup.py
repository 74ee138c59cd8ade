"""What a user waits for before the first number: imports, the first round, the list of commands and the demo.

    python bench/startup.py [--repeats 5] [--demo]

Each line is a command in a process of its own; they take turns. Prints the median processor time of each in seconds,
and the ratio to `import torch` where that says more. Cached bytecode is used, as after the first use of a package.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile

FIRST_USE = "import fedstrata as fs; fs.train, fs.FedAvg, fs.erm, fs.data"
FIRST_ROUND = (
    "import fedstrata as fs, time; d = fs.data.digits().split(fs.partition.iid(), clients=4, seed=0); "
    "p = fs.erm(fs.models.model('mlp', (1, 8, 8), 10, seed=0)); begun = time.process_time(); "
    "fs.train(p, d, fs.FedAvg(steps=2), rounds=1, batch_size=8, threads=1); print(time.process_time() - begun)"
)
COMMANDS = {
    "import torch": ["-c", "import torch"],
    "import fedstrata": ["-c", "import fedstrata"],
    "import fedstrata and use it": ["-c", FIRST_USE],
    "fedstrata --help": ["-m", "fedstrata", "--help"],
    "first round, after imports": ["-c", FIRST_ROUND],
}


def seconds(words: list[str]) -> float:
    """Return the processor time of a command, or what it prints, if that is a number."""
    where = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=True, env=where)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    try:
        return float(done.stdout)
    except ValueError:
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    """Run and print every command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--demo", action="store_true", help="also run the demo, once")
    arguments = parser.parse_args()
    times: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for turn in range(arguments.repeats + 1):
        for name, words in COMMANDS.items():
            took = seconds(words)
            if turn:  # the first turn writes bytecode
                times[name].append(took)
    torch = statistics.median(times["import torch"])
    for name, each in times.items():
        middle = statistics.median(each)
        print(f"{name}: {middle:.3g} s, {middle / torch:.2g} times import torch")
    if arguments.demo:
        with tempfile.TemporaryDirectory() as folder:
            took = seconds(["-m", "fedstrata", "demo", "--out", f"{folder}/demo.png"])
            print(f"fedstrata demo: {took:.3g} s")


if __name__ == "__main__":
    main()
