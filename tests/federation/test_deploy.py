"""The files of a federation: folders, keys, certificates, the app with the experiment; and the commands for them."""

from __future__ import annotations

import datetime
import importlib
import ipaddress
import json
import os
import stat
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519

import fedstrata as fs
from federation.stand_in import CANCER, DIGITS, Tables, made, site
from fedstrata.core.files import lock
from fedstrata.experiments.build import Experiment
from fedstrata.experiments.config import parse
from fedstrata.federation import keys
from fedstrata.federation.deploy import write_app, write_federation, write_node_data
from fedstrata.federation.local import _check_names
from fedstrata.federation.processes import Processes, commands, end_leftovers, environment, started_in
from fedstrata.federation.server.nodes import Roster
from fedstrata.federation.superlink import Federation

FILE = """
[data]
clients = 3
holdout = 0.2
partition = { name = "dirichlet", alpha = 1.0, min_samples = 10 }
[model]
name = "logreg"
[problem]
name = "auc"
p = 0.25
[algorithm]
name = "fgda"
steps = 2
synchronisation = "single"
eta = { schedule = "step", value = 0.1, at = [0.5] }
[train]
rounds = 3
batch_size = 8
[channel]
clip = 1.5
[faults]
quorum = 2
inject = { drop = 0.1, clients = [0] }
"""


@pytest.fixture
def experiment(tmp_path: Path) -> Path:
    path = tmp_path / "experiment.toml"
    path.write_text(FILE)
    return path


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def app_of(folder: Path) -> dict[str, Any]:
    return tomllib.loads((folder / "app" / "pyproject.toml").read_text())["tool"]["flwr"]["app"]


# --- keys -------------------------------------------------------------------------------------------------------------


def test_a_key_signs_and_its_public_half_verifies(tmp_path: Path) -> None:
    public = keys.make_key(tmp_path / "node.key")
    assert (tmp_path / "node.key.pub").read_text().strip() == public
    assert mode(tmp_path / "node.key") == 0o600
    key = serialization.load_ssh_private_key((tmp_path / "node.key").read_bytes(), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey) and isinstance(key.curve, ec.SECP384R1)
    signature = keys.sign(tmp_path / "node.key", b"content")
    assert keys.is_signed(public, signature, b"content")
    assert not keys.is_signed(public, signature, b"contents")
    assert not keys.is_signed(public, signature[:-1], b"content")
    assert not keys.is_signed(keys.make_key(tmp_path / "other.key"), signature, b"content")


def test_an_existing_key_is_never_overwritten(tmp_path: Path) -> None:
    keys.make_key(tmp_path / "node.key")
    before = (tmp_path / "node.key").read_bytes()
    with pytest.raises(FileExistsError):
        keys.make_key(tmp_path / "node.key")
    assert (tmp_path / "node.key").read_bytes() == before


def test_public_keys_are_compared_in_one_form(tmp_path: Path) -> None:
    public = keys.make_key(tmp_path / "node.key")
    key = serialization.load_ssh_public_key(public.encode())
    pem = key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    assert (
        keys.canonical(f"  {public}  somebody@somewhere\n")
        == keys.canonical(pem)
        == keys.canonical(pem.decode())
        == public
    )


@pytest.mark.parametrize(
    "text", ["", "no key", "ssh-rsa AAAA", "-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----"]
)
def test_an_invalid_public_key_is_refused(text: str) -> None:
    with pytest.raises(fs.InputError, match="public key"):
        keys.canonical(text)


def test_keys_of_another_kind_are_refused(tmp_path: Path) -> None:
    key = ed25519.Ed25519PrivateKey.generate()
    form = serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    with pytest.raises(fs.InputError, match="elliptic-curve"):
        keys.canonical(key.public_key().public_bytes(*form))
    kinds = serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    (tmp_path / "key").write_bytes(key.private_bytes(*kinds))
    with pytest.raises(fs.InputError, match="elliptic-curve"):
        keys.sign(tmp_path / "key", b"content")


def test_the_authority_signs_the_servers_certificate_for_its_hosts(tmp_path: Path) -> None:
    keys.make_certificates(tmp_path, ["server.example.org", "10.1.2.3", "::1"])
    authority, server = (x509.load_pem_x509_certificate((tmp_path / f).read_bytes()) for f in ("ca.crt", "server.pem"))
    server.verify_directly_issued_by(authority)
    authority.verify_directly_issued_by(authority)
    names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["server.example.org"]
    addresses = [ipaddress.ip_address("10.1.2.3"), ipaddress.ip_address("::1")]
    assert names.get_values_for_type(x509.IPAddress) == addresses
    about = {c: c.extensions.get_extension_for_class(x509.BasicConstraints).value.ca for c in (authority, server)}
    assert about == {authority: True, server: False}
    now = datetime.datetime.now(datetime.UTC)
    for certificate in (authority, server):
        assert certificate.not_valid_before_utc < now
        assert certificate.not_valid_after_utc - now > datetime.timedelta(days=365)
    for name, certificate in (("ca.key", authority), ("server.key", server)):
        assert mode(tmp_path / name) == 0o600
        key = serialization.load_pem_private_key((tmp_path / name).read_bytes(), None)
        assert key.public_key() == certificate.public_key()


# --- the app ----------------------------------------------------------------------------------------------------------

WRITTEN: dict[str, tuple[Tables, Tables]] = {
    "plain": (DIGITS, {}),
    "channel and faults": (
        DIGITS,
        {"channel": {"compress": "top_k", "top": 0.1}, "faults": {"inject": {"drop": 0.5, "clients": [0, 1]}}},
    ),
    "schedules": (CANCER, {"algorithm": {"name": "fedavg", "lr": {"schedule": "step", "value": 0.1, "at": [0.5]}}}),
    "whole data": (DIGITS, {"train": {"batch_size": None, "participation": 0.5}}),
    "quotes and braces": (DIGITS, {"label": "it's {braces} and ''quotes''"}),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_the_app_holds_the_experiment_unchanged(name: str, tmp_path: Path) -> None:
    base, over = WRITTEN[name]
    config = made(base, over)
    public = {f"node-{k}": keys.make_key(tmp_path / f"{k}.key") for k in range(2)}
    write_app(config, tmp_path / "app", public, Path("/srv/a folder/run"), Path("/srv/data"))
    told = app_of(tmp_path)["config"]
    held = parse(tomllib.loads(told["experiment"]), "the app")
    for table in ("algorithm", "problem", "model", "train", "evaluate", "channel", "faults", "label"):
        assert getattr(held, table) == getattr(config, table)
    assert (told["out"], told["server-data"], told["resume"]) == ("/srv/a folder/run", "/srv/data", True)
    nodes = Roster.read(told["nodes"])
    assert dict(zip(nodes.names, nodes.public, strict=True)) == public
    for part in app_of(tmp_path)["components"].values():
        module, _, name = part.partition(":")
        assert hasattr(importlib.import_module(module), name)


def test_of_the_data_an_app_holds_only_how_nodes_split_theirs(tmp_path: Path) -> None:
    config = made(
        DIGITS, {"data": {"holdout": 0.2, "directory": "/somewhere/private", "seed": 0}, "train": {"seed": 3}}
    )
    write_app(config, tmp_path / "app", {"a": keys.make_key(tmp_path / "key")}, Path("run"))
    told = app_of(tmp_path)["config"]["experiment"]
    assert tomllib.loads(told)["data"] == {"holdout": 0.2, "seed": 0}
    assert "private" not in told


def test_an_experiment_that_flower_could_not_carry_is_refused(tmp_path: Path) -> None:
    with pytest.raises(fs.InputError, match="backslashes"):
        write_app(made(DIGITS, {"label": "a\\b"}), tmp_path / "app", {}, Path("run"))
    assert not (tmp_path / "app").exists()


def test_data_of_clients_are_written_to_their_own_folders_only(tmp_path: Path) -> None:
    config = made(DIGITS, {"data": {"holdout": 0.2, "support": 0.3, "auxiliary": 2}})
    nodes = site(tmp_path, config)
    total = 0
    for k in range(3):
        parts = {p.stem: np.load(p) for p in Path(nodes.here(k)["data"]).iterdir()}
        assert set(parts) == {"train", "support", "test"}
        total += sum(len(part["targets"]) for part in parts.values())
        assert all(
            part["inputs"].dtype == np.float32 and part["inputs"].shape[1:] == (1, 8, 8) for part in parts.values()
        )
    assert total == 240 - 2 * 10
    assert {p.name for p in (tmp_path / "server" / "data").iterdir()} == {"test.npz", "auxiliary.npz"}


# --- a whole federation -----------------------------------------------------------------------------------------------


def federation(folder: Path, nodes: dict[str, Path | None], **tables: Any) -> None:
    write_federation(made(DIGITS, tables), folder, nodes, ["fl.example.org", "10.0.0.1"], 9555)


def test_only_the_owner_may_look_at_the_data_of_nodes(tmp_path: Path) -> None:
    (tmp_path / "nodes" / "node0" / "data").mkdir(parents=True, mode=0o755)  # as earlier versions left it
    write_node_data(Experiment(made(DIGITS)).data, tmp_path, ["node0", "node1", "node2"])
    folders = [*tmp_path.glob("nodes/*/data"), tmp_path / "server" / "data"]
    assert [folder.stat().st_mode & 0o777 for folder in folders] == [0o700] * 4
    assert not list(tmp_path.rglob("*.tmp"))


def test_a_federation_has_a_folder_for_the_server_and_for_each_node(tmp_path: Path) -> None:
    public = keys.make_key(tmp_path / "brought.key")
    folder = tmp_path / "federation"
    federation(folder, {"north": None, "south": tmp_path / "brought.key.pub"})
    found = {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}
    assert found == {
        *(".gitignore", "app/pyproject.toml"),
        *(
            f"server/{n}"
            for n in ("ca.crt", "ca.key", "server.pem", "server.key", "start", "nginx.conf", "cli/config.toml")
        ),
        *("server/keys/north.pub", "server/keys/south.pub"),
        *(f"nodes/north/{n}" for n in ("node.key", "node.key.pub", "ca.crt", "node.toml", "start")),
        *(f"nodes/south/{n}" for n in ("ca.crt", "node.toml", "start")),
    }
    private = list(folder.rglob("*.key"))
    assert len(private) == 3 and {mode(p) for p in private} == {0o600}
    assert (folder / ".gitignore").read_text() == "*\n"
    for start, port in ((folder / "server" / "start", "9556"), (folder / "nodes" / "north" / "start", "9555")):
        assert os.access(start, os.X_OK) and port in start.read_text()
    proxy = (folder / "server" / "nginx.conf").read_text()
    assert "listen 9555 ssl;" in proxy and "https://127.0.0.1:9556;" in proxy and proxy.count("location") == 2
    assert "127.0.0.1" in (folder / "server" / "start").read_text()
    assert "--enable-supernode-auth" in (folder / "server" / "start").read_text()
    assert "fl.example.org:9555" in (folder / "nodes" / "south" / "start").read_text()
    for name in ("north", "south"):
        assert set(tomllib.loads((folder / "nodes" / name / "node.toml").read_text())) == {"data", "key", "state"}
        assert (folder / "nodes" / name / "ca.crt").read_bytes() == (folder / "server" / "ca.crt").read_bytes()
    assert keys.canonical((folder / "server" / "keys" / "south.pub").read_text()) == public
    names = Roster.read(app_of(folder)["config"]["nodes"])
    assert names.names == ("north", "south") and names.public[1] == public
    assert names.public[0] == (folder / "nodes" / "north" / "node.key.pub").read_text().strip()
    assert (
        tomllib.loads((folder / "server" / "cli" / "config.toml").read_text())["superlink"]["default"] == "federation"
    )


def test_the_scripts_start_what_a_local_federation_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "federation"
    federation(folder, {"north": None})
    started: list[list[str]] = []
    monkeypatch.setattr(Processes, "start", lambda self, name, command: started.append(command))
    monkeypatch.setattr(Processes, "wait_until", lambda *_: None)
    local = Federation(folder, ["north"])
    local.start_server("--database", "local.db")
    shown = tmp_path / "bin"
    shown.mkdir()
    for name in ("flower-superlink", "fedstrata"):
        (shown / name).write_text('#!/bin/sh\nprintf "%s\\n" "$@"\nenv | grep ^FLWR_\n')
        (shown / name).chmod(0o755)
    printed = {}
    for start in (folder / "server" / "start", folder / "nodes" / "north" / "start"):
        plain = {"PATH": f"{shown}{os.pathsep}{os.environ['PATH']}"}
        shell = subprocess.run([start], capture_output=True, text=True, env=plain)
        printed[start.parent.name] = shell.stdout.splitlines()
    (_, *words), script = started[0], printed["server"][: printed["server"].index("--database")]
    here = [word.removeprefix(f"{folder / 'server'}/").replace(str(local.ports[0]), "9556") for word in words]
    assert script == here[:-2]
    for lines, own in ((printed["server"], "server"), (printed["north"], "nodes/north")):
        set_here = {line for line in lines if line.startswith("FLWR_")}
        wanted = environment(folder / own / "flwr").items()
        assert set_here == {f"{name}={value}" for name, value in wanted if name.startswith("FLWR_")}


REFUSALS: dict[str, tuple[Callable[[Path], dict[str, Path | None]], Tables, str]] = {
    "a name with a slash": (lambda f: {"a": None, "b/../../c": None}, {}, "name of the node"),
    "a name of dots": (lambda f: {"..": None}, {}, "name of the node"),
    "an empty name": (lambda f: {"": None}, {}, "name of the node"),
    "a name with a quote": (lambda f: {"it's": None}, {}, "name of the node"),
    "a name with a line break": (lambda f: {"a\n": None}, {}, "name of the node"),
    "a public key that is not there": (lambda f: {"a": f / "nothing.pub"}, {}, "cannot be read"),
    "a public key that is none": (lambda f: {"a": f / "experiment.toml"}, {}, "public key cannot be read"),
    "a private key": (lambda f: {"a": f / "one.key"}, {}, "public key cannot be read"),
    "the same key twice": (lambda f: {"a": f / "one.key.pub", "b": f / "one.key.pub"}, {}, "same public key"),
    "a pre-training": (lambda f: {"a": None}, {"pretrain": {"rounds": 2}}, "does not pre-train"),
    "a backslash": (lambda f: {"a": None}, {"label": "a\\b"}, "backslashes"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_bad_input_is_refused_before_anything_is_written(name: str, tmp_path: Path, experiment: Path) -> None:
    nodes, tables, said = REFUSALS[name]
    keys.make_key(tmp_path / "one.key")
    with pytest.raises(fs.InputError, match=said):
        federation(tmp_path / "federation", nodes(tmp_path), **tables)
    assert not (tmp_path / "federation").exists()


def test_a_folder_that_is_not_empty_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "federation").mkdir()
    (tmp_path / "federation" / "mine").write_text("x")
    with pytest.raises(fs.InputError, match="not empty"):
        federation(tmp_path / "federation", {"a": None})
    assert [p.name for p in (tmp_path / "federation").iterdir()] == ["mine"]


# --- the commands -----------------------------------------------------------------------------------------------------


def test_init_writes_a_federation_and_prints_the_next_steps(fedstrata, experiment: Path, tmp_path: Path) -> None:
    keys.make_key(tmp_path / "b.key")
    words = ["--node", "a", "--node", f"b={tmp_path / 'b.key.pub'}", "--host", "fl.example.org", "--port", "9777"]
    folder = tmp_path / "federation"
    code, _, said = fedstrata("federate", "init", experiment, folder, *words, "--set", "train.rounds=9")
    assert code == 0 and "a, b" in said and "docs/deploy.md" in said
    held = parse(tomllib.loads(app_of(folder)["config"]["experiment"]), "the app")
    assert held.train.rounds == 9 and held.data.holdout == 0.2 and held.algorithm.name == "fgda"
    assert held.faults is not None and held.faults.inject is not None and held.faults.inject.clients == (0,)
    certificate = x509.load_pem_x509_certificate((folder / "server" / "server.pem").read_bytes())
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["fl.example.org", "localhost"]
    code, _, said = fedstrata("federate", "init", experiment, folder, "--node", "a")
    assert code == 2 and "not empty" in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--node", "a", "--node", "a"], "name of a node must be unique"),
        (["--node", "a=nothing.pub"], "There is no file nothing.pub"),
        (["--node", "a b"], "name of the node"),
        (["--node", "=x"], "There is no file x"),
        ([], "A federation needs nodes"),
        (["--node", "a", "--host", "https://fl.example.org"], "without https://"),
        (["--node", "a", "--host", "fl.example.org:9443"], "without https://, port or path"),
        (["--node", "a", "--host", "-x"], "without https://, port or path"),
        (["--node", "a", "--set", "model.name=nothing"], "Unknown model 'nothing'"),
        (["--node", "a", "--set", "train.participation=2"], "whole number from 1 to 1. Got 2"),
        (["--node", "a", "--set", "evaluate.clients=train"], "'auto', 'test' or 'none'"),
        (["--node", "a", "--set", "problem={name='tower'}"], "brings its own data"),
        (["--set", "train.round=9"], "train.rounds"),
        (["--node", "a", "--set", "algorithm.gamma=-1"], "The gamma of fgda must be a number above 0. Got -1"),
        (["--node", "a", "--set", "faults.inject.clients=[1]"], "injected faults must be from 0 to 0. Got 1"),
        (["--node", "a", "--set", "problem.q=1"], "Unknown key 'problem.q'"),
        (["--port", "0"], "port"),
    ],
)
def test_init_refuses_bad_input(words: list[str], said: str, fedstrata, experiment: Path, tmp_path: Path) -> None:
    code, _, printed = fedstrata("federate", "init", experiment, tmp_path / "federation", *words)
    assert code == 2 and said in " ".join(printed.split())
    assert not (tmp_path / "federation").exists()


def test_key_makes_a_key_once(fedstrata, tmp_path: Path) -> None:
    path = tmp_path / "deep" / "node.key"
    code, _, said = fedstrata("federate", "key", path)
    assert code == 0 and "stays here" in said and mode(path) == 0o600
    before = path.read_bytes()
    code, _, said = fedstrata("federate", "key", path)
    assert code == 2 and "Nothing was overwritten" in said and path.read_bytes() == before
    path.unlink()
    code, _, said = fedstrata("federate", "key", path)
    assert code == 2 and f"{path.name}.pub already exists" in "".join(said.split("\n")) and not path.exists()


def test_a_certificate_is_renewed_for_the_same_names(fedstrata, experiment: Path, tmp_path: Path) -> None:
    folder = tmp_path / "federation"
    words = ["--node", "a", "--host", "fl.example.org", "--host", "10.0.0.7"]
    assert fedstrata("federate", "init", experiment, folder, *words)[0] == 0
    server, safe = folder / "server", tmp_path / "safe.key"
    (server / "ca.key").rename(safe)
    before = {name: (server / name).read_bytes() for name in ("server.pem", "server.key", "ca.crt")}
    code, _, said = fedstrata("federate", "renew", folder)
    assert code == 2 and "cannot be renewed" in " ".join(said.split())
    assert before == {name: (server / name).read_bytes() for name in before}
    keys.make_certificates(tmp_path / "other", ["x"])
    code, _, said = fedstrata("federate", "renew", folder, "--ca-key", tmp_path / "other" / "ca.key")
    assert code == 2 and "does not belong to the authority" in " ".join(said.split())
    code, _, said = fedstrata("federate", "renew", folder, "--ca-key", safe)
    assert code == 0 and "Restart the server" in said
    old, new = (x509.load_pem_x509_certificate(c) for c in (before["server.pem"], (server / "server.pem").read_bytes()))
    names = [c.extensions.get_extension_for_class(x509.SubjectAlternativeName).value for c in (old, new)]
    assert names[0] == names[1] and old.public_key() != new.public_key()
    authority = x509.load_pem_x509_certificate(before["ca.crt"])
    new.verify_directly_issued_by(authority)
    assert authority.not_valid_after_utc > new.not_valid_after_utc + datetime.timedelta(days=3000)
    assert (server / "server.pem.old").read_bytes() == before["server.pem"] and mode(server / "server.key") == 0o600
    assert (server / "ca.crt").read_bytes() == before["ca.crt"]


NODE_FILES = {"data": "data.npz", "key": "node.key", "state": "state"}


@pytest.fixture
def node_file(tmp_path: Path) -> Path:
    keys.make_key(tmp_path / "node.key")
    np.savez(tmp_path / "data.npz", inputs=np.zeros((2, 3)), targets=np.zeros(2))
    file = tmp_path / "node.toml"
    file.write_text("".join(f"{k} = {json.dumps(str(tmp_path / v))}\n" for k, v in NODE_FILES.items()))
    return file


def test_node_starts_a_node_with_its_settings(
    fedstrata, node_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda path, words: started.append([str(path), *words[1:]]))
    code, _, said = fedstrata("federate", "node", node_file, "--server", "fl.example.org:9443", "--ca", "ca.crt")
    assert code == 0, said
    (command,) = started
    assert command[:-1] == [sys.executable, "-m", "fedstrata.federation.node", "fl.example.org:9443", "ca.crt"]
    settings = json.loads(command[-1])
    assert settings == {name: str(tmp_path / file) for name, file in NODE_FILES.items()}


def test_stock_starts_a_supernode_that_listens_on_loopback(
    fedstrata, node_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda path, words: started.append([str(path), *words[1:]]))
    words = ["--server", "fl.example.org:9443", "--ca", tmp_path / "ca.crt", "--stock"]
    code, _, said = fedstrata("federate", "node", node_file, *words)
    assert code == 0, said
    (command,) = started
    assert command[0] == str(commands() / "flower-supernode")
    told = dict(zip(command[1::2], command[2::2], strict=True))
    assert told["--superlink"] == "fl.example.org:9443" and told["--root-certificates"] == str(tmp_path / "ca.crt")
    assert told["--host"] == "127.0.0.1" and told["--auth-supernode-private-key"] == str(tmp_path / "node.key")
    assert f'data="{tmp_path / "data.npz"}"' in told["--node-config"] and "--insecure" not in command


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("data = 3\n", "must contain data = "),
        ("data = 'd'\nkey = 'k'\nstate = 's'\npool = 'no'\n", "The pool of a node must be true or false. Got 'no'"),
        ("data = 'd'\nkey = 'k'\nstate = 's'\nsecure = 1\n", "The secure of a node must be true or false. Got 1"),
        ("data = 'd'\nkey = 'k'\nstate = 's'\npeers = ['p']\n", "The peers of a node must be a path"),
        ("data = 'd'\nkey = 'k'\nstate = 's'\nminimum = '10'\n", "must be a whole number, at least 1. Got '10'"),
        ("data = 'd'\nkey = 'k'\nstate = 's'\nminimum = 0\n", "must be a whole number, at least 1. Got 0"),
        ("date = 'x'\n", "Did you mean 'data'"),
        ("data = 'nothing.npz'\nkey = 'nothing.key'\nstate = 's'\n", "There is no nothing.npz"),
        ("no toml", "is not valid TOML"),
        ("", "must contain data"),
    ],
)
def test_node_refuses_settings_that_would_fail_later(text: str, said: str, fedstrata, tmp_path: Path) -> None:
    (tmp_path / "node.toml").write_text(text)
    words = ["--server", "a:1", "--ca", "ca.crt"]
    code, _, printed = fedstrata("federate", "node", tmp_path / "node.toml", *words)
    assert code == 2 and said in " ".join(printed.split())
    code, _, printed = fedstrata("federate", "node", tmp_path / "nothing.toml", *words)
    assert code == 2 and "There is no file" in printed


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--set", "problem={name='tower'}", "--set", "data={}"], "brings its own data"),
        (["--set", "pretrain.rounds=1"], "does not pre-train"),
        (["--resume"], "--resume needs --out"),
        (["--nodes", "0"], "nodes"),
    ],
)
def test_local_refuses_before_anything_is_started(
    words: list[str], said: str, fedstrata, experiment: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Processes, "start", lambda *_: pytest.fail("something was started"))
    code, _, printed = fedstrata("federate", "local", experiment, *words)
    assert code == 2 and said in " ".join(printed.split())


def test_local_does_not_overwrite_a_run(fedstrata, experiment: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(Processes, "start", lambda *_: pytest.fail("something was started"))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "mine").write_text("x")
    code, _, printed = fedstrata("federate", "local", experiment, "--out", tmp_path / "run")
    assert code == 2 and "not empty" in " ".join(printed.split())
    assert [p.name for p in (tmp_path / "run").iterdir()] == ["mine"]


def test_local_ends_what_a_killed_one_left_and_nothing_else(tmp_path: Path) -> None:
    """A federation is known by its folder: a neighbour whose name begins like it is left alone."""
    child = "import os, time; os.fork() or os.setsid(); print('x', flush=True); time.sleep(60)"
    code = (
        "import os, pathlib, signal, sys\n"
        "from fedstrata.federation.processes import Processes\n"
        "for folder in sys.argv[2:]:\n"
        "    Processes(pathlib.Path(folder)).start('node', [sys.executable, '-c', sys.argv[1]])\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    ours, other = tmp_path / "run.federation", tmp_path / "run.federation2"
    subprocess.run([sys.executable, "-c", code, child, "run.federation", str(other)], cwd=tmp_path, check=False)
    end = time.monotonic() + 20
    while any((f / "node.log").read_text() != "x\nx\n" for f in (ours, other)) and time.monotonic() < end:
        time.sleep(0.05)
    try:
        assert len(started_in(ours)) == len(started_in(other)) == 2
        assert end_leftovers(ours) == 2
        assert started_in(ours) == [] and len(started_in(other)) == 2
        assert end_leftovers(ours) == 0
    finally:
        end_leftovers(other)


def test_local_touches_no_federation_that_is_in_use(fedstrata, experiment: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("fedstrata.federation.local.end_leftovers", lambda _: pytest.fail("processes were ended"))
    folder = tmp_path / "run.federation"
    folder.mkdir()
    handle = lock(folder, "folder")
    assert handle is not None
    code, _, printed = fedstrata("federate", "local", experiment, "--nodes", 3, "--out", tmp_path / "run")
    os.close(handle)
    assert code == 2 and "Another process is using the folder of the federation" in printed
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("name", ["server", "..", "a/b", "a\nb", ""])
def test_a_node_cannot_be_called_like_the_server_or_no_folder(name: str) -> None:
    with pytest.raises(fs.InputError, match="name of a node must be a name that a folder can have, and not 'server'"):
        _check_names(["St. Mary [2]", name])


def test_a_process_that_runs_is_not_started_again(tmp_path: Path) -> None:
    """Its first one would never be ended."""
    with Processes(tmp_path) as processes:
        processes.start("server", [sys.executable, "-c", "import time; time.sleep(60)"])
        with pytest.raises(fs.FedstrataError, match="The process server of the federation is running already"):
            processes.start("server", [sys.executable, "-c", "pass"])


def test_local_resumes_only_with_the_same_settings(fedstrata, experiment: Path, tmp_path: Path, monkeypatch) -> None:
    class Started(Exception):
        pass

    def start(*_: Any) -> None:
        raise Started

    monkeypatch.setattr(Federation, "start_server", start)
    words = ["federate", "local", experiment, "--nodes", "3", "--set", "data.name=breast_cancer"]
    words += ["--out", tmp_path / "run"]
    with pytest.raises(Started):
        fedstrata(*words)
    files = {p: p.read_bytes() for p in (tmp_path / "run.federation").rglob("*.npz")}
    assert len(files) == 7
    for change, told in (
        (["--set", "data.seed=7"], "data.seed was"),
        (["--set", "algorithm.steps=3"], "algorithm.steps was 2 and is now 3"),
        (["--nodes", "2"], "federation.nodes was 3 and is now 2"),
    ):
        code, _, printed = fedstrata(*words, "--resume", *change)
        assert code == 2 and told in " ".join(printed.split())
    assert {p: p.read_bytes() for p in (tmp_path / "run.federation").rglob("*.npz")} == files
    with pytest.raises(Started):
        fedstrata(
            *words, "--resume", "--set", "train.rounds=30", "--set", "faults.quorum=1", "--set", "algorithm.gamma=0.1"
        )
    with pytest.raises(Started):  # what is there of other data does not stay
        fedstrata(*words, "--set", "data.holdout=0")
    left = (tmp_path / "run.federation").rglob("*.npz")
    assert {p.relative_to(tmp_path).parts[-3:] for p in left} == {
        *(("node0", "data", "train.npz"), ("node1", "data", "train.npz"), ("node2", "data", "train.npz")),
        ("server", "data", "test.npz"),
    }
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.toml").write_text("")
    (tmp_path / "run.federation" / "config.toml").unlink()
    code, _, printed = fedstrata(*words, "--resume")
    assert code == 2 and "cannot be resumed: " in " ".join(printed.split())


def test_an_app_can_be_added_to_a_federation(fedstrata, experiment: Path, tmp_path: Path) -> None:
    folder = tmp_path / "federation"
    assert fedstrata("federate", "init", experiment, folder, "--node", "b", "--node", "a", "--node", "c")[0] == 0
    first = app_of(folder)["config"]
    assert first["out"] == str(folder / "runs" / "app")
    words = ["federate", "app", experiment, folder]
    code, _, said = fedstrata(*words, "second", "--set", "train.rounds=7", "--node", "a", "--node", "b")
    assert code == 0 and str(folder / "runs" / "second") in said.replace("\n", "")
    new = tomllib.loads((folder / "second" / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    there = json.loads(first["nodes"])
    assert list(json.loads(new["nodes"]).items()) == [("b", there["b"]), ("a", there["a"])]
    assert new["out"] == str(folder / "runs" / "second") and "rounds = 7" in new["experiment"]
    for more, told in (
        (["second"], "exists. Nothing was overwritten"),
        (["app"], "exists. Nothing was overwritten"),
        (["runs"], "exists. Nothing was overwritten"),
        (["third", "--node", "d"], "Unknown node 'd'"),
        (["../third"], "name of the app"),
    ):
        code, _, said = fedstrata(*words, *more)
        assert code == 2 and told in " ".join(said.split())
    code, _, said = fedstrata("federate", "app", experiment, tmp_path, "x")
    assert code == 2 and "There is no federation in" in " ".join(said.split())
