"""Writing a federation down: a ready Flower app, certificates, keys, and a folder for each node."""

from __future__ import annotations

import ipaddress
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import tomli_w

from fedstrata.core.errors import InputError, invalid, unknown
from fedstrata.core.files import read_toml, write_atomically
from fedstrata.data.federated import Arrays, FederatedData
from fedstrata.experiments.config import Config
from fedstrata.federation import keys
from fedstrata.federation.server import check_config, nodes_split

PROJECT = '''\
# A Flower app that runs one experiment of fedstrata: flwr run {folder} CONNECTION
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "fedstrata-federation"
version = "1.0.0"
description = "One experiment of fedstrata, for Flower"
license = "Apache-2.0"
dependencies = []  # fedstrata[flower] is installed on the server and on every node beforehand

[tool.flwr.app]
publisher = "fedstrata"

[tool.flwr.app.components]
serverapp = "fedstrata.federation.app:server_app"
clientapp = "fedstrata.federation.app:client_app"

[tool.flwr.app.config]
# On the server: the run directory, whether to go on with the run in it, and a folder with test.npz (optional).
out = {out}
resume = true
server-data = {server_data}
# A Python file on the server with an algorithm of your own, if any; nodes name theirs in node.toml.
import = {modules}
# Who may take part, in the clients' order: names and public keys.
nodes = {nodes}
experiment = """
{experiment}"""
'''


def check_name(name: str, what: str = "node") -> str:
    """Return the name of a node or an app, if it will do for a folder and a message."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", name):
        raise invalid(f"name of the {what}", name, "letters, digits, '_', '-' and '.'")
    return name


def check_host(host: str) -> str:
    """Return a host, if it is a name or an address and nothing more."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        if not re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?", host):
            wanted = "a name or an address, without https://, port or path"
            raise invalid("host of the server", host, wanted) from None
    return host


def _experiment(config: Config) -> str:
    """Return what the app holds of an experiment, as TOML: of the data only how nodes split theirs."""
    tables = config.to_toml("compare", "plot", "pretrain", "tune", "variants")
    split = nodes_split(config)
    tables = {k: v for k, v in tables.items() if k != "data"} | ({"data": split} if split else {})
    experiment = tomli_w.dumps(tables)
    if '"""' in experiment or "\\" in experiment:
        raise InputError("The experiment must not hold backslashes or three quotes: Flower takes it as one text.")
    return experiment


def write_app(
    config: Config,
    folder: Path,
    nodes: Mapping[str, str],
    out: Path,
    server_data: Path | None = None,
    modules: Sequence[Path] = (),
) -> None:
    """Write the Flower app of an experiment for these nodes, names and public keys: no code, only settings."""
    check_config(config, len(nodes))
    experiment = _experiment(config)
    public = json.dumps({check_name(name): keys.same_form(key) for name, key in nodes.items()})
    text = PROJECT.format(
        folder=folder,
        out=json.dumps(str(out), ensure_ascii=False),
        server_data=json.dumps("" if server_data is None else str(server_data), ensure_ascii=False),
        modules=json.dumps(":".join(str(path.resolve()) for path in modules)),
        nodes=f"'{public}'",
        experiment=experiment,
    )
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "pyproject.toml", text.encode())


def write_nodes_data(data: FederatedData, folder: Path, names: list[str]) -> None:
    """Write what each client of simulated data has to a folder of its own, and the server's to ``server``."""
    for client, name in enumerate(names):
        own = folder / "nodes" / name / "data"
        own.mkdir(parents=True, exist_ok=True)
        for part, rows in (("train", data.train), ("support", data.support), ("test", data.client_test)):
            pair = None if rows is None or not rows.sizes[client] else rows.of_client(client)
            _save(own / f"{part}.npz", pair)
    server = folder / "server" / "data"
    server.mkdir(parents=True, exist_ok=True)
    few = data.auxiliary
    _save(server / "test.npz", data.test)
    _save(server / "auxiliary.npz", None if few is None else tuple(a[few.rows] for a in few.arrays))


def _save(path: Path, arrays: Arrays | None) -> None:
    """Write samples, or see to it that there are none."""
    path.unlink(missing_ok=True)
    if arrays is not None:
        inputs, targets = (a.cpu().numpy() for a in arrays)
        np.savez(path, inputs=inputs, targets=targets)


def write_federation(
    config: Config,
    folder: Path,
    nodes: Mapping[str, Path | None],
    hosts: list[str],
    port: int,
    modules: Sequence[Path] = (),
) -> None:
    """Write everything of a federation: app, certificates, and for each node a folder to hand over.

    A node with a path brings its public key; for the others a key is made here.
    """
    if folder.exists() and not folder.is_dir():
        raise InputError(f"The folder {folder} is a file. Nothing was overwritten. Choose another.")
    if folder.exists() and any(folder.iterdir()):
        raise InputError(f"The folder {folder} exists and is not empty. Nothing was overwritten. Choose another.")
    check_config(config, len(nodes))
    _experiment(config)
    for host in hosts:
        check_host(host)
    public: dict[str, str] = {}
    read = {check_name(name): None if path is None else _public_in(path) for name, path in nodes.items()}
    known = [key for key in read.values() if key is not None]
    if len(set(known)) < len(known):
        raise InputError("Two nodes of the federation have the same public key. Each needs its own.")
    local = [host for host in ("localhost", "127.0.0.1") if host not in hosts]
    keys.make_certificates(folder / "server", [*hosts, *local])
    for name, key in read.items():
        own = folder / "nodes" / name
        own.mkdir(parents=True, exist_ok=True)
        public[name] = keys.make_key(own / "node.key") if key is None else key
        (own / "ca.crt").write_bytes((folder / "server" / "ca.crt").read_bytes())
        (own / "node.toml").write_text(_node_file(name, key is None))
        (own / "start").write_text(_start_file(hosts[0], port))
        (own / "start").chmod(0o755)
    (folder / "server" / "start").write_text(_server_file(port + 1))
    (folder / "server" / "start").chmod(0o755)
    (folder / "server" / "keys").mkdir()
    for name, key in public.items():
        (folder / "server" / "keys" / f"{name}.pub").write_text(key + "\n")
    (folder / "server" / "nginx.conf").write_text(gate_file(str(port), port + 1))
    (folder / "server" / "cli").mkdir()
    told = connection_file(f"127.0.0.1:{port + 1}", folder / "server" / "ca.crt", "federation")
    (folder / "server" / "cli" / "config.toml").write_text(told)
    write_app(config, folder / "app", public, (folder / "runs" / "app").resolve(), modules=modules)
    (folder / ".gitignore").write_text("*\n")


def add_app(config: Config, folder: Path, name: str, nodes: Sequence[str], modules: Sequence[Path] = ()) -> None:
    """Write an app for another experiment into a federation, for some of its nodes, or all when none are named."""
    there = _nodes_of(folder)
    for node in nodes:
        if node not in there:
            raise unknown("node", node, tuple(there), str(folder))
    new = folder / check_name(name, "app")
    if new.exists() or name == "runs":
        raise InputError(f"The folder {new} exists. Nothing was overwritten. Choose another name.")
    chosen = {node: key for node, key in there.items() if not nodes or node in nodes}
    write_app(config, new, chosen, (folder / "runs" / name).resolve(), modules=modules)


def _nodes_of(folder: Path) -> dict[str, str]:
    """Return the nodes of the federation in a folder, names and public keys, in the order of its first app."""
    file = folder / "app" / "pyproject.toml"
    if not file.exists():
        raise InputError(f"There is no federation in {folder}: fedstrata federate init writes one.")
    found: dict[str, str] = json.loads(read_toml(file)["tool"]["flwr"]["app"]["config"]["nodes"])
    return found


def _public_in(path: Path) -> str:
    try:
        return keys.same_form(path.read_text())
    except (OSError, UnicodeDecodeError, InputError) as error:
        raise InputError(f"The public key {path} cannot be read: {error}") from None


def _node_file(name: str, made: bool) -> str:
    about = "node.key, made here: hand it over on a safe way" if made else "the key whose public half you sent"
    return f"""\
# What the node {name} has. Paths are on the node; change them to where things are.
data = "/path/to/data.npz"            # inputs and targets; or a folder with train.npz and test.npz
key = "/path/to/node.key"             # {about}
state = "/var/lib/fedstrata/{name}"   # what the client keeps between messages
"""


def _start_file(host: str, port: int) -> str:
    host = f"[{host}]" if ":" in host else host
    return f"""\
#!/bin/sh
# Starts this node: it connects to the server, and listens on loopback only. Run it again after a reboot.
cd "$(dirname "$0")" || exit 1
export FLWR_HOME="$PWD/flwr" FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1
export FLWR_SUPEREXEC_TASK_POLL_INTERVAL=0.1
exec fedstrata federate node node.toml --server {host}:{port} --ca ca.crt "$@"
"""


def _server_file(port: int) -> str:
    return f"""\
#!/bin/sh
# Starts the SuperLink on loopback. Nodes come in through the gate (nginx.conf); runs are submitted on this machine.
cd "$(dirname "$0")" || exit 1
export FLWR_HOME="$PWD/flwr" FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1
export FLWR_SUPEREXEC_TASK_POLL_INTERVAL=0.1
mkdir -p "$FLWR_HOME"
exec flower-superlink --host 127.0.0.1 --port {port} \\
  --ssl-ca-certfile ca.crt --ssl-certfile server.pem --ssl-keyfile server.key --enable-supernode-auth \\
  --database "$FLWR_HOME/state.db" --isolation subprocess --disable-runtime-dependency-installation
"""


def gate_file(listen: str, superlink: int) -> str:
    """Return an nginx configuration that lets through what nodes need, and nothing else: not the submitting of runs."""
    return f"""\
# The gate for nodes: nginx -p $PWD -c nginx.conf
worker_processes 1;
pid nginx.pid;
error_log gate.log;
events {{ worker_connections 1024; }}
http {{
  access_log access.log;
  client_body_temp_path temp-body;
  proxy_temp_path temp-proxy;
  fastcgi_temp_path temp-fastcgi;
  uwsgi_temp_path temp-uwsgi;
  scgi_temp_path temp-scgi;
  server {{
    listen {listen} ssl;
    ssl_certificate server.pem;
    ssl_certificate_key server.key;
    client_max_body_size 2g;
    location /v1/fleet/ {{
      proxy_pass https://127.0.0.1:{superlink};
      proxy_ssl_trusted_certificate ca.crt;
      proxy_ssl_verify on;
      proxy_ssl_name localhost;
      proxy_http_version 1.1;
      proxy_request_buffering off;
      proxy_read_timeout 300s;
    }}
    location / {{ return 403; }}
  }}
}}
"""


def connection_file(address: str, ca: Path, name: str) -> str:
    """Return the configuration of the command flwr that calls the SuperLink at ``address`` by ``name``."""
    return f"""\
# For the command flwr, with FLWR_HOME naming this folder.
[superlink]
default = "{name}"

[superlink.{name}]
address = "{address}"
root-certificates = "{ca.resolve()}"
"""
