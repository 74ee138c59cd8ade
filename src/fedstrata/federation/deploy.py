"""The files of a federation: a Flower app, certificates, keys, and a folder for each node."""

from __future__ import annotations

import ipaddress
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedstrata.core.errors import InputError, invalid, unknown
from fedstrata.core.files import make_folder, read_toml, refuse_used, write_atomically
from fedstrata.data import intake
from fedstrata.data.federated import Arrays, FederatedData
from fedstrata.experiments.config import Config
from fedstrata.federation import keys, templates
from fedstrata.federation.experiment import check_config, experiment_text, module_list
from fedstrata.federation.superlink import superlink_command


def write_federation(
    config: Config,
    folder: Path,
    nodes: Mapping[str, Path | None],
    hosts: list[str],
    port: int,
    modules: Sequence[Path] = (),
) -> None:
    """Write all files of a federation, with a folder to hand over to each node.

    nodes: the file with each node's public key; None makes a key pair for that node here.
    hosts: names and addresses of the server; nodes connect to the first, on ``port``.
    """
    refuse_used(folder)
    check_config(config, len(nodes))
    experiment_text(config)
    for host in hosts:
        _check_host(host)
    given = {_check_name(name): None if path is None else _read_public(path) for name, path in nodes.items()}
    keys.check_distinct({name: key for name, key in given.items() if key is not None})
    local = [host for host in ("localhost", "127.0.0.1") if host not in hosts]
    keys.make_certificates(folder / "server", [*hosts, *local])
    public = {name: _write_node(folder, name, key, hosts[0], port) for name, key in given.items()}
    _write_server(folder / "server", public, port)
    write_app(config, folder / "app", public, (folder / "runs" / "app").resolve(), modules=modules)
    _write_text(folder / ".gitignore", "*\n")


def _write_node(folder: Path, name: str, public: str | None, host: str, port: int) -> str:
    """Write the folder of a node; return its public key."""
    own = folder / "nodes" / name
    own.mkdir(parents=True, exist_ok=True)
    _write_text(own / "ca.crt", (folder / "server" / "ca.crt").read_text())
    _write_text(own / "node.toml", templates.node_file(name, key_made_here=public is None))
    _write_script(own / "start", templates.node_start_file(host, port))
    return keys.make_key(own / "node.key") if public is None else public


def _write_server(server: Path, public: Mapping[str, str], port: int) -> None:
    """Write the server's files other than its certificates."""
    _write_script(server / "start", templates.server_start_file(superlink_command(port + 1, Path())))
    _write_text(server / "nginx.conf", templates.proxy_file(str(port), port + 1))
    (server / "keys").mkdir()
    for name, key in public.items():
        _write_text(server / "keys" / f"{name}.pub", key + "\n")
    (server / "cli").mkdir()
    connection = templates.connection_file(f"127.0.0.1:{port + 1}", server / "ca.crt", "federation")
    _write_text(server / "cli" / "config.toml", connection)


def _write_script(path: Path, text: str) -> None:
    _write_text(path, text)
    path.chmod(0o755)


def _write_text(path: Path, text: str) -> None:
    write_atomically(path, text.encode())


def write_app(
    config: Config,
    folder: Path,
    nodes: Mapping[str, str],
    out: Path,
    server_data: Path | None = None,
    modules: Sequence[Path] = (),
) -> None:
    """Write the Flower app of an experiment, with settings and no code, for ``nodes``: public keys by name."""
    check_config(config, len(nodes))
    experiment = experiment_text(config)
    public = {_check_name(name): keys.canonical(key) for name, key in nodes.items()}
    text = templates.app_file(folder, out, server_data, module_list(modules), public, experiment)
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "pyproject.toml", text.encode())


def add_app(config: Config, folder: Path, name: str, nodes: Sequence[str], modules: Sequence[Path] = ()) -> None:
    """Add the app of another experiment to a federation, for the nodes in ``nodes``, or for all if it is empty."""
    public = _nodes_of(folder)
    chosen = choose(public, nodes, folder)
    new = folder / _check_name(name, "app")
    if new.exists() or name == "runs":
        raise InputError(f"The folder {new} already exists. Nothing was overwritten. Choose another name.")
    write_app(config, new, chosen, (folder / "runs" / name).resolve(), modules=modules)


def choose(public: Mapping[str, str], nodes: Sequence[str], folder: Path) -> dict[str, str]:
    """Return the public keys of these nodes of a federation, or of all if none is named."""
    for node in nodes:
        if node not in public:
            raise unknown("node", node, tuple(public), str(folder))
    return {node: key for node, key in public.items() if not nodes or node in nodes}


def _nodes_of(folder: Path) -> dict[str, str]:
    """Return the public keys of a federation's nodes by name, in the order of its first app."""
    nodes: dict[str, str] = json.loads(app_settings(folder)["nodes"])
    return nodes


def app_settings(folder: Path, name: str = "app") -> dict[str, Any]:
    """Return the settings of an app of a federation."""
    file = folder / _check_name(name, "app") / "pyproject.toml"
    if not (folder / "app" / "pyproject.toml").exists():
        raise InputError(f"There is no federation in {folder}. Write one with 'fedstrata federate init'.")
    if not file.exists():
        known = [path.parent.name for path in folder.glob("*/pyproject.toml")]
        raise unknown("app", name, known, str(folder))
    settings: dict[str, Any] = read_toml(file)["tool"]["flwr"]["app"]["config"]
    return settings


def write_node_data(data: FederatedData, folder: Path, names: list[str]) -> None:
    """Write each client's data to the folder of its node, and the server's data to ``server/data``.

    Only this user may look into these folders.
    """
    for client, name in enumerate(names):
        own = folder / "nodes" / name / "data"
        make_folder(own, private=True)
        for part, rows in (("train", data.train), ("support", data.support), ("test", data.client_test)):
            arrays = None if rows is None or not rows.sizes[client] else rows.of_client(client)
            save_arrays(own / f"{part}.npz", arrays)
    server = folder / "server" / "data"
    make_folder(server, private=True)
    auxiliary = data.auxiliary
    save_arrays(server / "test.npz", None if data.plan is not None else data.test)  # nodes measure tables themselves
    save_arrays(
        server / "auxiliary.npz", None if auxiliary is None else tuple(a[auxiliary.rows] for a in auxiliary.arrays)
    )


def save_arrays(path: Path, arrays: Arrays | None) -> None:
    """Write inputs and targets to a file; remove the file if ``arrays`` is None."""
    path.unlink(missing_ok=True)
    if arrays is not None:
        intake.write(path, arrays)


def _read_public(path: Path) -> str:
    try:
        return keys.canonical(path.read_text())
    except (OSError, UnicodeDecodeError, InputError) as error:
        raise InputError(f"The public key {path} cannot be read: {error}") from None


def _check_name(name: str, what: str = "node") -> str:
    """Return the name if a folder can have it; raise otherwise."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", name):
        raise invalid(f"name of the {what}", name, "letters, digits, '_', '-' and '.'")
    return name


def _check_host(host: str) -> None:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        if not re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?", host):
            wanted = "a name or an address, without https://, port or path"
            raise invalid("host of the server", host, wanted) from None
