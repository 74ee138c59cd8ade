"""A SuperLink and nodes on the loopback interface of this machine, with TLS and node keys."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedstrata.core.errors import FedstrataError
from fedstrata.federation import keys
from fedstrata.federation.processes import LOOPBACK, Processes, commands, environment, free_ports, is_listening
from fedstrata.federation.templates import connection_file


class Flower:
    """Flower's command line, on the machine of the SuperLink.

    home:       the folder with its settings.
    connection: the name of the SuperLink in them.
    """

    def __init__(self, home: Path, connection: str) -> None:
        self.home, self.connection = home, connection

    def submit(self, app: Path) -> str:
        """Start a run of an app; return its number."""
        return str(self.call("run", str(app), self.connection)["run-id"])

    def status(self, run: str) -> str:
        """Return the status of a run: "running", "finished:completed", "finished:failed", ..."""
        return str(self.call("list", "--run-id", run, self.connection)["runs"][0]["status"])

    def stop(self, run: str) -> None:
        """End a run."""
        self.call("stop", run, self.connection)

    def log(self, run: str) -> str:
        """Return the output of a run's ServerApp."""
        return self._run("log", run, self.connection, "--show").stdout

    def call(self, *words: str) -> dict[str, Any]:
        """Run a command of flwr; return its output, parsed from JSON."""
        result = self._run(*words, "--format", "json")
        try:
            answer: dict[str, Any] = json.loads(result.stdout)
        except json.JSONDecodeError:
            raise FedstrataError(f"flwr {words[0]} failed: {(result.stderr or result.stdout).strip()}") from None
        if not answer.get("success"):
            raise FedstrataError(f"flwr {words[0]} failed: {answer.get('error-message', result.stderr)}")
        return answer

    def _run(self, *words: str) -> subprocess.CompletedProcess[str]:
        command = [str(commands() / "flwr"), *words]
        return subprocess.run(command, capture_output=True, text=True, env=environment(self.home))


class Federation(Processes):
    """The processes of a federation: ``server``, and one for each of ``names``. Their files are in ``folder``.

    stock: whether nodes are Flower's own SuperNodes.
    """

    def __init__(self, folder: Path, names: list[str], stock: bool = False) -> None:
        super().__init__(folder)
        self.names, self.stock = names, stock
        self.ports = free_ports(1 + len(names))

    @property
    def address(self) -> str:
        """The address on which the SuperLink listens."""
        return f"{LOOPBACK}:{self.ports[0]}"

    def make_keys(self) -> dict[str, str]:
        """Make certificates and the nodes' keys, unless they exist; return the public keys by name."""
        if not (self.folder / "server" / "server.pem").exists():
            keys.make_certificates(self.folder / "server", [LOOPBACK, "localhost"])
        public = {}
        for name in self.names:
            path = self.folder / "nodes" / name / "node.key"
            existing = path.with_name("node.key.pub")
            public[name] = existing.read_text().strip() if existing.exists() else keys.make_key(path)
        return public

    def start_server(self, *options: str) -> None:
        """Start the SuperLink, and wait until it listens."""
        server = self.folder / "server"
        self.start("server", [*superlink_command(self.ports[0], server), *options])
        self.wait_until(lambda: is_listening(self.ports[0]), "server", 90)
        home = self.folder / "cli"
        home.mkdir(exist_ok=True)
        (home / "config.toml").write_text(connection_file(self.address, server / "ca.crt", "local"))

    def start_node(self, name: str, **settings: str) -> None:
        """Start a node with the data and the key in its folder."""
        own = (self.folder / "nodes" / name).resolve()
        config = {"data": own / "data", "key": own / "node.key", "state": own / "state", **settings}
        table = {key: str(value) for key, value in config.items()}
        ca, port = self.folder / "server" / "ca.crt", self.ports[1 + self.names.index(name)]
        fast = node_command(self.address, ca, table)
        self.start(name, stock_node_command(self.address, ca, table, port) if self.stock else fast)

    # --- Flower's command line ---

    @property
    def _flower(self) -> Flower:
        return Flower(self.folder / "cli", "local")

    def register(self, public: Path) -> str:
        """Register a node's public key with the SuperLink; return the node's number."""
        return str(self.flwr("supernode", "register", str(public), "local")["node-id"])

    def online(self) -> int:
        """Return how many nodes are connected."""
        return sum(node["status"] == "online" for node in self.flwr("supernode", "list", "local")["nodes"])

    def submit(self, app: Path) -> str:
        """Start a run of an app; return its number."""
        return self._flower.submit(app)

    def status(self, run: str) -> str:
        """Return the status of a run: "running", "finished:completed", "finished:failed", ..."""
        return self._flower.status(run)

    def log(self, run: str) -> str:
        """Return the output of a run's ServerApp."""
        return self._flower.log(run)

    def flwr(self, *words: str) -> dict[str, Any]:
        """Run a command of flwr; return its output, parsed from JSON."""
        return self._flower.call(*words)


def superlink_command(port: int, folder: Path) -> list[str]:
    """Return the command that starts a SuperLink on loopback, with the certificates in ``folder``."""
    return [
        *("flower-superlink", "--host", LOOPBACK, "--port", str(port)),
        *("--ssl-ca-certfile", str(folder / "ca.crt"), "--ssl-certfile", str(folder / "server.pem")),
        *("--ssl-keyfile", str(folder / "server.key"), "--enable-supernode-auth"),
        *("--isolation", "subprocess", "--disable-runtime-dependency-installation"),
    ]


def node_command(address: str, ca: Path, config: Mapping[str, str]) -> list[str]:
    """Return the command that starts a node of this package; it listens nowhere."""
    return [sys.executable, "-m", "fedstrata.federation.node", address, str(ca), json.dumps(dict(config))]


def stock_node_command(address: str, ca: Path, config: Mapping[str, str], port: int) -> list[str]:
    """Return the command that starts Flower's SuperNode; it listens on a loopback port for its own processes."""
    settings = " ".join(f"{key}={json.dumps(value)}" for key, value in config.items())
    return [
        *("flower-supernode", "--superlink", address, "--root-certificates", str(ca)),
        *("--auth-supernode-private-key", config["key"], "--host", LOOPBACK, "--port", str(port)),
        *("--isolation", "subprocess", "--node-config", settings),
    ]
