"""A federation on this machine: a SuperLink and SuperNodes on loopback, with TLS and keys, for a try and for tests."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import tomli_w

from fedstrata.clients.faults import Fault
from fedstrata.core.errors import FedstrataError, InputError, invalid
from fedstrata.experiments.build import Experiment, build_algorithm
from fedstrata.experiments.config import Config
from fedstrata.federation import keys
from fedstrata.federation.deploy import connection_file, write_app, write_nodes_data
from fedstrata.federation.server import check_config
from fedstrata.training.callbacks import Callback
from fedstrata.training.checkpoint import write_atomically
from fedstrata.training.rundir import Row, RunDirectory, read_toml, refuse_other_settings

Say = Callable[[str], None]
LOOPBACK = "127.0.0.1"


def commands() -> Path:
    """Return the folder with Flower's commands, those of this Python."""
    folder = Path(sys.executable).parent
    if not (folder / "flower-superlink").exists():
        raise InputError("Flower is not installed here: pip install 'fedstrata[flower]'.")
    return folder


def environment(home: Path) -> dict[str, str]:
    """Return the environment for Flower's commands: nothing asks the internet, or writes to the home folder."""
    return {
        **os.environ,
        "PATH": f"{commands()}{os.pathsep}{os.environ.get('PATH', '')}",
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1",
        "NO_PROXY": LOOPBACK,
        "no_proxy": LOOPBACK,
        "PYTHONUNBUFFERED": "1",
    }


@dataclass
class Federation:
    """Processes of a federation on this machine; ``folder`` holds their files, and a log of each.

    Use it as a context: every process that it started is ended, however the block is left.
    """

    folder: Path
    names: list[str]
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.ports = free_ports(1 + len(self.names))

    @property
    def address(self) -> str:
        """Where the SuperLink listens."""
        return f"{LOOPBACK}:{self.ports[0]}"

    def __enter__(self) -> Federation:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def make_keys(self) -> dict[str, str]:
        """Make certificates and node keys, unless they are there already; return the public keys by name."""
        if not (self.folder / "server" / "server.pem").exists():
            keys.make_certificates(self.folder / "server", [LOOPBACK, "localhost"])
        public = {}
        for name in self.names:
            path = self.folder / "nodes" / name / "node.key"
            there = path.with_name("node.key.pub")
            public[name] = there.read_text().strip() if there.exists() else keys.make_key(path)
        return public

    def start_server(self, *options: str) -> None:
        """Start the SuperLink and wait until it listens."""
        server = self.folder / "server"
        words = [
            *("flower-superlink", "--host", LOOPBACK, "--port", str(self.ports[0])),
            *("--ssl-ca-certfile", str(server / "ca.crt"), "--ssl-certfile", str(server / "server.pem")),
            *("--ssl-keyfile", str(server / "server.key"), "--enable-supernode-auth"),
            *("--isolation", "subprocess", "--disable-runtime-dependency-installation", *options),
        ]
        process = self.start("server", words)
        self._wait(lambda: _listens(self.ports[0]), process, "server", 90)
        home = self.folder / "cli"
        home.mkdir(exist_ok=True)
        (home / "config.toml").write_text(connection_file(self.address, server / "ca.crt", "local"))

    def register(self, public: Path) -> str:
        """Let the SuperLink know a node's public key; return the node's number."""
        return str(self.flwr("supernode", "register", str(public), "local")["node-id"])

    def start_node(self, name: str, **settings: str) -> subprocess.Popen[bytes]:
        """Start a SuperNode with the data and key in its folder."""
        own = (self.folder / "nodes" / name).resolve()
        config = {"data": own / "data", "key": own / "node.key", "state": own / "state", **settings}
        words = node_command(
            self.address,
            self.folder / "server" / "ca.crt",
            {k: str(v) for k, v in config.items()},
            self.ports[1 + self.names.index(name)],
        )
        return self.start(name, words)

    def start(self, name: str, words: Sequence[str]) -> subprocess.Popen[bytes]:
        """Start a process that belongs to the federation; what it prints goes to NAME.log."""
        home = self.folder / "homes" / name
        home.mkdir(parents=True, exist_ok=True)
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                words,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                env=environment(home),
                start_new_session=True,
            )
        return self.processes[name]

    def online(self) -> int:
        """Return how many nodes are connected."""
        nodes = self.flwr("supernode", "list", "local")["nodes"]
        return sum(node["status"] == "online" for node in nodes)

    def submit(self, app: Path) -> str:
        """Start a run of the app; return its number."""
        return str(self.flwr("run", str(app), "local")["run-id"])

    def status(self, run: str) -> str:
        """Return what has become of a run: "running", "finished:completed", "finished:failed", ..."""
        return str(self.flwr("list", "--run-id", run, "local")["runs"][0]["status"])

    def log(self, run: str) -> str:
        """Return what the ServerApp printed."""
        words = [str(commands() / "flwr"), "log", run, "local", "--show"]
        return subprocess.run(words, capture_output=True, text=True, env=environment(self.folder / "cli")).stdout

    def flwr(self, *words: str) -> dict[str, Any]:
        """Run Flower's command line; return what it says as JSON."""
        done = subprocess.run(
            [str(commands() / "flwr"), *words, "--format", "json"],
            capture_output=True,
            text=True,
            env=environment(self.folder / "cli"),
        )
        try:
            answer: dict[str, Any] = json.loads(done.stdout)
        except json.JSONDecodeError:
            raise FedstrataError(f"flwr {words[0]} failed: {(done.stderr or done.stdout).strip()}") from None
        if not answer.get("success"):
            raise FedstrataError(f"flwr {words[0]} failed: {answer.get('error-message', done.stderr)}")
        return answer

    def _wait(self, ready: Callable[[], bool], process: subprocess.Popen[bytes], name: str, seconds: float) -> None:
        end = time.monotonic() + seconds
        while not ready():
            if process.poll() is not None or time.monotonic() > end:
                raise FedstrataError(f"{name} of the federation did not start: see {self.folder / name}.log")
            time.sleep(0.1)

    def end(self) -> None:
        """End every process that was started, nodes first."""
        with _undisturbed():
            order = [p.pid for _, p in sorted(self.processes.items(), key=lambda item: item[0] == "server")]
            others = _descendants(order)  # Flower starts some in sessions of their own
            for sign, patience in ((signal.SIGTERM, 10.0), (signal.SIGKILL, 5.0)):
                for group in order:
                    with suppress(ProcessLookupError, PermissionError):
                        os.killpg(group, sign)
                if sign is signal.SIGKILL:
                    for process in others:
                        with suppress(ProcessLookupError, PermissionError):
                            os.kill(process, sign)
                end = time.monotonic() + patience
                while time.monotonic() < end and (
                    any(_alive(p) for p in self.processes.values()) or any(map(_runs, others))
                ):
                    time.sleep(0.05)
            self.processes.clear()


def node_command(address: str, ca: Path, config: Mapping[str, str], port: int) -> list[str]:
    """Return the command that starts a SuperNode; it listens, for its own processes, on loopback."""
    told = " ".join(f"{k}={json.dumps(v)}" for k, v in config.items())
    return [
        *("flower-supernode", "--superlink", address, "--root-certificates", str(ca)),
        *("--auth-supernode-private-key", config["key"], "--host", LOOPBACK, "--port", str(port)),
        *("--isolation", "subprocess", "--node-config", told),
    ]


def run_locally(
    config: Config,
    nodes: int,
    folder: Path,
    out: Path,
    resume: bool,
    callbacks: Sequence[Callback],
    say: Say,
    modules: Sequence[Path] = (),
    hook: Callable[[Federation], None] | None = None,
) -> Row:
    """Run an experiment as a federation on this machine; return the run's summary.

    ``modules`` are Python files with algorithms of the user's own. ``hook`` is called while the run is under way, again
    and again: for tests.
    """
    commands()
    check_config(config, nodes)
    settings = folder / "config.toml"
    tables = config.to_toml("compare", "plot", "tune", "variants") | {"federation": {"nodes": nodes}}
    tables["algorithm"] = build_algorithm(config).to_table()
    if resume and settings.exists():
        refuse_other_settings(read_toml(settings), tables, out)
    elif resume and (out / "config.toml").exists():
        raise InputError(f"There is no {settings}, so the run in {out} cannot go on. Choose another directory.")
    else:
        RunDirectory(out).refuse_if_used()
    data = Experiment(_with_clients(config, nodes)).data
    if data.clients != nodes:
        raise invalid("number of nodes", nodes, f"{data.clients}, as many as the data have clients")
    names = list(data.client_names) if data.client_names else [f"node{k}" for k in range(nodes)]
    folder.mkdir(parents=True, exist_ok=True)
    say(f"Writing the data of {nodes} nodes, certificates and keys to {folder}")
    write_nodes_data(data, folder, names)
    write_atomically(settings, tomli_w.dumps(tables).encode())
    ready = config.replace(data=config.data.replace(holdout=0.0, support=0.0))
    error = out.with_name(out.name + ".error.txt")
    error.unlink(missing_ok=True)
    with _stopped_by_signals(), Federation(folder, names) as federation:
        public = federation.make_keys()
        server_data = (folder / "server" / "data").resolve()
        write_app(ready, folder / "app", public, out.resolve(), server_data, modules)
        say(f"Starting a SuperLink on {federation.address} (TLS, node authentication)")
        federation.start_server()
        for name in names:
            federation.register(folder / "nodes" / name / "node.key.pub")
        say(f"Starting {nodes} SuperNodes")
        more = {"import": ":".join(str(path.resolve()) for path in modules)} if modules else {}
        for name in names:
            federation.start_node(name, **more)
        run = federation.submit(folder / "app")
        say(f"Run {run} is under way: a round takes some 6 s and more, whatever its work")
        _follow(federation, run, config, out, error, callbacks, hook)
        failed = federation.status(run) != "finished:completed"
        if error.exists():
            raise FedstrataError(error.read_text())
        if failed:
            raise FedstrataError(f"The run failed.\n{federation.log(run)[-3000:]}")
    summary: Row = json.loads((out / "summary.json").read_text())
    return summary


def _with_clients(config: Config, nodes: int) -> Config:
    if config.data.folder is not None:
        return config
    return config.replace(data=config.data.replace(clients=nodes))


def _follow(
    federation: Federation,
    run: str,
    config: Config,
    out: Path,
    error: Path,
    callbacks: Sequence[Callback],
    hook: Callable[[Federation], None] | None,
) -> None:
    """Show progress until the run is over, from what it writes."""
    directory, summary = RunDirectory(out), out / "summary.json"
    before = summary.stat().st_mtime_ns if summary.exists() else 0
    shown, looked = {row["round"] for row in directory.rows()}, time.monotonic()
    told = set(map(Fault.of, directory.faults()))
    rounds, note = config.train.rounds, f"{len(federation.names)} nodes on this machine"
    for callback in callbacks:
        callback.on_start(config.algorithm.name, max(shown, default=0), rounds, note)
    try:
        while True:
            if hook is not None:
                hook(federation)
            faults = [fault for fault in map(Fault.of, directory.faults()) if fault not in told]
            for _, group in groupby(faults, key=lambda fault: fault.round):
                together = list(group)
                for callback in callbacks:
                    callback.on_faults(together, federation.names)
            rows = [row for row in directory.rows() if row["round"] not in shown]
            for row in rows:
                for callback in callbacks:
                    callback.on_evaluation(row)
            told.update(faults)
            shown.update(row["round"] for row in rows)
            written = summary.exists() and summary.stat().st_mtime_ns != before
            if written or error.exists() or time.monotonic() - looked > 10:
                looked = time.monotonic()
                if federation.status(run).startswith("finished"):
                    return
            time.sleep(0.25)
    finally:
        for callback in callbacks:
            callback.on_end(None)


@contextmanager
def _stopped_by_signals() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into the exception that Ctrl-C makes, so that everything started is ended."""

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with _handled(stop, signal.SIGTERM, signal.SIGHUP):
        yield


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Let no signal come between; a second Ctrl-C must not leave processes behind."""
    with _handled(signal.SIG_IGN, signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        yield


@contextmanager
def _handled(handler: Any, *signs: signal.Signals) -> Iterator[None]:
    try:
        before = {sign: signal.signal(sign, handler) for sign in signs}
    except ValueError:  # not in the main thread
        yield
        return
    try:
        yield
    finally:
        for sign, was in before.items():
            signal.signal(sign, was)


def free_ports(number: int) -> list[int]:
    """Return ports on loopback that nobody listens on."""
    sockets = [socket.socket() for _ in range(number)]
    try:
        for s in sockets:
            s.bind((LOOPBACK, 0))
        return [int(s.getsockname()[1]) for s in sockets]
    finally:
        for s in sockets:
            s.close()


def _listens(port: int) -> bool:
    with socket.socket() as s:
        s.settimeout(0.5)
        return s.connect_ex((LOOPBACK, port)) == 0


def _descendants(roots: Sequence[int]) -> list[int]:
    """Return the processes that these started, and those that these did, where /proc tells."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, ValueError, IndexError):
            children.setdefault(int(path.read_text().rpartition(")")[2].split()[1]), []).append(int(path.parent.name))
    found: list[int] = []
    todo = list(roots)
    while todo:
        born = children.get(todo.pop(), [])
        found += born
        todo += born
    return found


def _runs(process: int) -> bool:
    """Whether a process is there, and not only waiting to be forgotten."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (OSError, IndexError):
        return False


def _alive(process: subprocess.Popen[bytes]) -> bool:
    process.poll()
    try:
        os.killpg(process.pid, 0)
    except (ProcessLookupError, PermissionError):
        return False
    return True
