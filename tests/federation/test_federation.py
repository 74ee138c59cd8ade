"""Federations on loopback: Flower's own processes, TLS, node keys. One always runs, the others with ``-m flower``.

Every process that a federation starts has its folder in its environment or command, so that one that is left is found.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import tomli_w
import torch
from safetensors.torch import load_file

from federation.stand_in import CANCER, DIGITS, Tables, made, simulated
from fedstrata.core.errors import FedstrataError
from fedstrata.core.files import Row
from fedstrata.experiments.config import Config
from fedstrata.federation import keys
from fedstrata.federation.local import run_locally
from fedstrata.federation.processes import free_ports
from fedstrata.federation.superlink import Federation, node_command, stock_node_command
from support import without_seconds

USED = ("steps", "samples", "bytes_up", "bytes_down")
TWO: Tables = {"data": {"clients": 2}, "train": {"rounds": 2}, "faults": {"timeout": 180.0}}
SCAFFOLD: Tables = {"algorithm": {"name": "scaffold", "steps": 2, "lr": 0.1}}


# --- processes and sockets --------------------------------------------------------------------------------------------


def processes(folder: Path) -> dict[int, str]:
    """The commands of the processes that belong to a folder, by number."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            around = (entry / "environ").read_bytes().decode(errors="replace")
            state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if state != "Z" and (str(folder) in command or f"FLWR_HOME={folder}" in around):
            found[int(entry.name)] = command
    return found


def left(folder: Path, seconds: float = 15.0) -> dict[int, str]:
    """The processes that are still running after a while: some take a second to notice that their parent has ended."""
    end = time.monotonic() + seconds
    while processes(folder) and time.monotonic() < end:
        time.sleep(0.2)
    return processes(folder)


def listening(numbers: list[int]) -> set[str]:
    """The addresses on which these processes listen, as the kernel writes them."""
    sockets = set()
    for number in numbers:
        try:
            for handle in Path(f"/proc/{number}/fd").iterdir():
                sockets.add(str(handle.readlink()))
        except OSError:
            continue
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and f"socket:[{words[9]}]" in sockets:
                found.add(words[1].rpartition(":")[0])
    return found


LOOPBACK = "0100007F"


class Watch:
    """Records, while a block runs, the processes of a folder and the addresses on which they listen."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.seen: dict[int, str] = {}
        self.addresses: set[str] = set()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def _look(self) -> None:
        while not self._over.wait(0.5):
            now = processes(self.folder)
            self.seen |= now
            self.addresses |= listening(list(now))

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder whose processes are ended after the test, even if it fails."""
    yield tmp_path
    for number in processes(tmp_path):
        os.kill(number, signal.SIGKILL)


def command(experiment: Path, *words: object) -> list[str]:
    return [sys.executable, "-m", "fedstrata", "federate", "local", str(experiment), *map(str, words)]


def written(config: Config, path: Path) -> Path:
    path.write_text(tomli_w.dumps(config.to_toml("compare", "plot", "pretrain", "tune", "variants")))
    return path


def assert_parity(out: Path, config: Config, used: Sequence[str] = USED) -> None:
    """Check that a run directory has the results of simulated clients."""
    expected = simulated(config)
    summary = json.loads((out / "summary.json").read_text())
    assert {k: summary[k] for k in used} == {k: expected.history[-1][k] for k in used}
    assert summary["left_out"] == {}
    assert expected.problem.flat is not None
    model = expected.problem.flat.state_dict(expected.x[: expected.problem.flat.size])
    ours = load_file(out / "model.safetensors")
    assert ours.keys() == model.keys()
    for name, value in model.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_a_federation_of_two_nodes_does_what_simulated_clients_do_on_loopback_and_leaves_nothing(folder: Path) -> None:
    config = made(DIGITS, TWO, SCAFFOLD)
    out = folder / "run"
    words = command(written(config, folder / "experiment.toml"), "--nodes", 2, "--out", out, "--json", "--quiet")
    with Watch(folder) as watch:
        done = subprocess.run(
            words, capture_output=True, text=True, timeout=280, env=os.environ | {"OMP_NUM_THREADS": "1"}
        )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["status"] == "finished"
    assert_parity(out, config)
    started = " ".join(watch.seen.values())
    assert all(word in started for word in ("flower-superlink", "federation.node ", "node.worker", "flwr-serverapp"))
    assert "flwr-clientapp" not in started and "flower-supernode" not in started
    daemons = [c for c in watch.seen.values() if "bin/flower-super" in c and "superexec" not in c]
    assert daemons and not any("--insecure" in c for c in daemons)
    assert watch.addresses == {LOOPBACK}
    assert left(folder) == {}


# --- with -m flower -------------------------------------------------------------------------------------------------

AUC: Tables = {"problem": {"name": "auc", "score": "none"}}
KINDS: dict[str, tuple[Tables, Tables]] = {
    "fedavg, without state": (DIGITS, {"algorithm": {"name": "fedavg", "steps": 2}}),
    "scaffold, clients keep": (DIGITS, SCAFFOLD),
    "fgda, two phases": (CANCER, {"algorithm": {"name": "fgda", "steps": 2}, **AUC}),
    "local_sgda, a dual": (DIGITS, {"algorithm": {"name": "local_sgda", "steps": 2}, "problem": {"name": "fair"}}),
    "local_smcgdam, two levels": (
        CANCER,
        {"algorithm": {"name": "local_smcgdam", "steps": 2}, "problem": {"name": "compositional_auc", "levels": 2}},
    ),
    "drfa, drawn by weights": (
        DIGITS,
        {"algorithm": {"name": "drfa", "steps": 2}, "problem": {"name": "agnostic"}},
    ),
}

Hook = Callable[[Federation], None]


def federate(
    config: Config, folder: Path, hook: Hook | None = None, name: str = "run", stock: bool = False, resume: bool = False
) -> Row:
    """Run a federation of as many nodes as there are clients."""
    own, out = folder / f"{name}.federation", folder / name
    return run_locally(config, config.data.clients, own, out, resume, [], print, hook=hook, stock=stock)


def lines(file: Path) -> list[Row]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


@pytest.mark.flower
@pytest.mark.parametrize("name", KINDS)
def test_a_federation_does_what_simulated_clients_do(name: str, folder: Path) -> None:
    base, over = KINDS[name]
    config = made(base, TWO, over)
    federate(config, folder)
    assert_parity(folder / "run", config)
    assert left(folder) == {}


@pytest.mark.flower
def test_a_federation_of_stock_supernodes_does_the_same(folder: Path) -> None:
    config = made(DIGITS, TWO, SCAFFOLD)
    with Watch(folder) as watch:
        federate(config, folder, stock=True)
    started = " ".join(watch.seen.values())
    assert "flower-supernode" in started and "flwr-clientapp" in started and "federation.node" not in started
    assert_parity(folder / "run", config)
    assert left(folder) == {}


@pytest.mark.flower
@pytest.mark.parametrize("secure", [False, True], ids=["plain", "secure sums"])
def test_a_run_continues_while_the_worker_of_a_node_is_killed_again_and_again(secure: bool, folder: Path) -> None:
    out, killed = folder / "run", set()
    over = {"train": {"rounds": 20, "eval_every": 1}, "faults": {"quorum": 2, "retries": 9}}
    config = made(DIGITS, TWO, SCAFFOLD, over, {"federation": {"secure": secure}})

    def hook(federation: Federation) -> None:
        if len(lines(out / "metrics.jsonl")) < 2 or len(killed) == 3:
            return
        number = federation.running["node1"].pid
        for worker in Path(f"/proc/{number}/task/{number}/children").read_text().split():
            if worker not in killed:
                os.kill(int(worker), signal.SIGKILL)
                killed.add(worker)

    federate(config, folder, hook)
    assert len(killed) == 3
    assert {fault["left_out"] for fault in lines(out / "faults.jsonl")} <= {False}
    assert_parity(out, config, used=("steps", "samples"))  # some were asked twice
    assert left(folder) == {}


@pytest.mark.flower
def test_a_run_continues_without_a_node_that_is_killed_and_with_it_once_it_is_back(folder: Path) -> None:
    rounds = 100
    out = folder / "run"
    killed: list[float] = []

    def hook(federation: Federation) -> None:
        done = len(lines(out / "metrics.jsonl")) - 1
        if not killed and done >= 1:
            os.killpg(federation.running["node1"].pid, signal.SIGKILL)
            federation.running["node1"].wait()
            killed.append(time.monotonic())
        elif killed and lines(out / "faults.jsonl") and federation.running["node1"].poll() is not None:
            federation.start_node("node1")  # it is refused until the SuperLink has noticed that it was gone

    config = made(DIGITS, TWO, SCAFFOLD, {"train": {"rounds": rounds, "eval_every": 1}, "faults": {"quorum": 0.5}})
    summary = federate(config, folder, hook)
    faults = lines(out / "faults.jsonl")
    assert summary["round"] == rounds
    assert faults and {f["client"] for f in faults} == {1} and {f["kind"] for f in faults} <= {"error", "silent"}
    assert set(summary["left_out"]) == {"node1"}
    assert min(f["round"] for f in faults) >= 2 and max(f["round"] for f in faults) < rounds, "it never came back"
    assert left(folder) == {}


@pytest.mark.flower
def test_a_server_that_is_killed_and_started_again_ends_with_the_same_bits(folder: Path) -> None:
    config = made(CANCER, TWO, AUC, {"algorithm": {"name": "local_sgdam", "steps": 2, "average_momentum": False}})
    config = made(config.to_table(), {"train": {"rounds": 20, "eval_every": 1}})
    federate(config, folder, name="straight")
    out = folder / "run"
    again: list[str] = []

    def hook(federation: Federation) -> None:
        if again or len(lines(out / "metrics.jsonl")) < 3:
            return
        (number,) = (n for n, c in processes(folder).items() if "bin/flwr-serverapp" in c)
        os.kill(number, signal.SIGKILL)
        again.append(federation.submit(federation.folder / "app"))
        while not federation.status(again[0]).startswith("finished"):
            time.sleep(2.0)
        assert federation.status(again[0]) == "finished:completed", federation.log(again[0])

    with pytest.raises(FedstrataError, match="The run failed"):  # the first one did
        federate(config, folder, hook)
    assert again
    assert (out / "model.safetensors").read_bytes() == (folder / "straight" / "model.safetensors").read_bytes()
    ours, theirs = (without_seconds(lines(folder / name / "metrics.jsonl")) for name in ("run", "straight"))
    assert ours == theirs
    assert left(folder) == {}


@pytest.mark.flower
@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("until", ["federation.node ", "bin/flwr-serverapp"])
def test_a_signal_ends_every_process(sign: signal.Signals, until: str, folder: Path) -> None:
    config = made(DIGITS, TWO, SCAFFOLD, {"train": {"rounds": 5000}})
    words = command(written(config, folder / "experiment.toml"), "--nodes", 2, "--out", folder / "run")
    heed = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)  # noqa: E731 (a job in the background ignores it)
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, preexec_fn=heed)
    end = time.monotonic() + 120
    while not any(until in c for c in processes(folder).values()) and time.monotonic() < end:
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.1)
    assert len(processes(folder)) > 2
    process.send_signal(sign)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 130, said
    assert "Interrupted" in said and "Traceback" not in said
    assert left(folder) == {}


@pytest.mark.flower
def test_a_federation_whose_command_was_killed_is_resumed(folder: Path) -> None:
    config = made(DIGITS, TWO, SCAFFOLD, {"train": {"rounds": 16}})
    out = folder / "run"
    words = command(written(config, folder / "experiment.toml"), "--nodes", 2, "--out", out, "--quiet")
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    end = time.monotonic() + 120
    while len(lines(out / "metrics.jsonl")) < 3 and time.monotonic() < end:
        time.sleep(0.1)
    process.kill()
    process.wait()
    assert processes(folder)
    done = subprocess.run([*words, "--resume", "--json"], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["round"] == 16
    assert_parity(out, config)
    assert left(folder) == {}


@pytest.mark.flower
def test_strangers_are_refused_and_the_run_is_unharmed(folder: Path) -> None:
    config = made(DIGITS, TWO, SCAFFOLD, {"train": {"rounds": 60}})
    began: list[str] = []
    strangers = folder / "strangers"
    for name in ("unregistered", "guest"):
        keys.make_key(strangers / f"{name}.key")

    def hook(federation: Federation) -> None:
        if began or federation.online() < 2:  # the twin must come second
            return
        ca = federation.folder / "server" / "ca.crt"
        ports = free_ports(3)

        own = federation.folder / "nodes" / "node0"
        unregistered, guest = ({"data": str(own / "data"), "state": str(strangers / "state")} for _ in range(2))
        unregistered["key"], guest["key"] = (str(strangers / f"{name}.key") for name in ("unregistered", "guest"))
        twin = {**guest, "key": str(federation.folder / "nodes" / "node1" / "node.key")}
        plain = ["flower-supernode", "--superlink", federation.address, "--host", "127.0.0.1", "--max-wait-time", "20"]
        federation.register(strangers / "guest.key.pub")
        for name, command in {
            "unregistered": node_command(federation.address, ca, unregistered),
            "stock": stock_node_command(federation.address, ca, unregistered, ports[0]),
            "guest": node_command(federation.address, ca, guest),
            "twin": node_command(federation.address, ca, twin),
            "keyless": [*plain, "--port", str(ports[1]), "--root-certificates", str(ca)],
            "insecure": [*plain, "--port", str(ports[2]), "--insecure"],
        }.items():
            federation.start(name, command)
            began.append(name)

    federate(config, folder, hook)
    assert_parity(folder / "run", config)
    logs = {name: (folder / "run.federation" / f"{name}.log").read_text() for name in began}
    for name in ("unregistered", "twin"):
        assert "The server refuses this node: Failed to activate SuperNode." in logs[name]
    assert "Failed to activate SuperNode" in logs["stock"]
    assert "SuperNode authentication is enabled" in logs["keyless"]
    assert "onnection attempt failed" in logs["insecure"] or "Exit Code" in logs["insecure"]
    assert "Connected to the server" in logs["guest"] and "asks this node" not in logs["guest"]
    assert not (strangers / "state").exists(), "the guest was asked to work"
    assert left(folder) == {}


@pytest.mark.flower
def test_a_node_that_signs_with_another_key_than_its_own_is_refused_by_name(folder: Path) -> None:
    config = made(DIGITS, TWO, SCAFFOLD)
    keys.make_key(folder / "another.key")
    began: list[str] = []

    def hook(federation: Federation) -> None:
        if began:
            return
        began.append("node1")
        node = federation.running["node1"]
        os.killpg(node.pid, signal.SIGTERM)
        node.wait(30)
        own = federation.folder / "nodes" / "node1"
        here = {"data": str(own / "data"), "key": str(own / "node.key"), "state": str(own / "state")}
        ca = federation.folder / "server" / "ca.crt"
        words = stock_node_command(federation.address, ca, here, federation.ports[2])
        words[-1] = words[-1].replace(f'key="{own / "node.key"}"', f'key="{folder / "another.key"}"')
        assert str(folder / "another.key") in words[-1]
        federation.start("node1", words)

    with pytest.raises(FedstrataError, match="node1: answered without a valid signature"):
        federate(config, folder, hook, stock=True)
    assert left(folder) == {}
