"""``fedstrata federate local | init | app | describe | key | renew | node``."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from fedstrata.cli.console import say
from fedstrata.cli.describe import check_output, give
from fedstrata.cli.options import ConfigFile, HtmlPage, Json, Preset, Quiet, Resume, RunOut, Set, a_path, check_resume
from fedstrata.cli.printing import print_run, progress
from fedstrata.core.errors import InputError, invalid, unknown
from fedstrata.core.files import read_toml
from fedstrata.data.tables.describing import MINIMUM
from fedstrata.data.tables.schema import Schema
from fedstrata.experiments.config import read
from fedstrata.training.rundir import RunDirectory

app = typer.Typer(
    no_args_is_help=True, add_completion=False, help="Run a real federation on Flower, where data stay on their nodes."
)

Federation = Annotated[Path, typer.Argument(help="Folder of the federation, as init wrote it.", show_default=False)]


Stock = Annotated[bool, typer.Option("--stock", help="Nodes are Flower's own SuperNodes, which are much slower.")]


def _require_flower() -> None:
    """Raise if Flower is missing; commands import what depends on it after this check."""
    try:
        import cryptography  # noqa: F401
        import flwr  # noqa: F401
    except ImportError:
        raise InputError("Flower is not installed: pip install 'fedstrata[flower]'.") from None


@app.command()
def local(
    context: typer.Context,
    experiment: ConfigFile,
    nodes: Annotated[int, typer.Option(min=1, metavar="N", help="Number of nodes, with one client each.")] = 4,
    out: RunOut = None,
    preset: Preset = None,
    set_: Set = None,
    resume: Resume = False,
    stock: Stock = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Run a whole federation on this machine.

    EXPERIMENT is a TOML file. Certificates and keys are created, a SuperLink and nodes start on loopback, and the
    data are split across the nodes, each of which sees only its own. All processes end with the run, even on Ctrl-C.

    With --out, the keys, logs and data of the federation are written to OUT.federation, next to the run directory.
    """
    _require_flower()
    from fedstrata.federation.local import run_locally

    config = read(experiment, set_, preset)
    check_resume(out, resume)
    folder = Path(tempfile.mkdtemp(prefix="fedstrata-")) if out is None else out.with_name(out.name + ".federation")
    run = folder / "run" if out is None else out
    tell = (lambda _: None) if quiet else say
    try:
        summary = run_locally(config, nodes, folder, run, resume, progress(quiet), tell, context.obj or (), stock=stock)
        print_run(summary, RunDirectory(run).metrics.read(), out, as_json)
    finally:
        if out is None:
            shutil.rmtree(folder, ignore_errors=True)


@app.command()
def init(
    context: typer.Context,
    experiment: ConfigFile,
    folder: Annotated[Path, typer.Argument(help="Folder to write; must be new.", show_default=False)],
    node: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME[=FILE.pub]", help="A node, with its public key if it has one. Can be repeated."),
    ] = None,
    host: Annotated[
        list[str] | None,
        typer.Option(metavar="HOST", help="Name or address of the server. Can be repeated.", show_default="127.0.0.1"),
    ] = None,
    port: Annotated[
        int,
        typer.Option(
            min=1, max=65534, metavar="PORT", help="Port that nodes connect to; the server also uses the next port."
        ),
    ] = 9443,
    preset: Preset = None,
    set_: Set = None,
) -> None:
    """Write the files of a federation: an app, certificates, and a folder for each node.

    EXPERIMENT is a TOML file. Of its data settings only holdout, support and seed are used, because each node names
    its own data. A node without a public key gets a key pair made here. See docs/deploy.md.
    """
    _require_flower()
    from fedstrata.federation.deploy import write_federation

    config = read(experiment, set_, preset)
    keys = _public_keys(node or ())
    write_federation(config, folder, keys, host or ["127.0.0.1", "localhost"], port, context.obj or ())
    say(f"Written to {folder}: app/, server/, and nodes/ with a folder for each of {', '.join(keys)}.")
    say("For the next steps see docs/deploy.md. To try it all on this machine first: fedstrata federate local.")


def _public_keys(nodes: Sequence[str]) -> dict[str, Path | None]:
    """Parse ``NAME`` and ``NAME=FILE.pub``."""
    keys: dict[str, Path | None] = {}
    for text in nodes:
        name, _, path = text.partition("=")
        if name in keys:
            raise invalid("name of a node", name, "unique")
        if path and not Path(path).exists():
            raise InputError(f"There is no file {path}, the public key of {name}.")
        keys[name] = Path(path) if path else None
    if not keys:
        raise InputError("A federation needs nodes: pass --node NAME=FILE.pub, or --node NAME to make a key here.")
    return keys


@app.command("app")
def write_app(
    context: typer.Context,
    experiment: ConfigFile,
    folder: Federation,
    name: Annotated[str, typer.Argument(help="Name of the app; must be new.", show_default=False)],
    node: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Node that takes part. Can be repeated.", show_default="all nodes"),
    ] = None,
    preset: Preset = None,
    set_: Set = None,
) -> None:
    """Add the app of another experiment to a federation.

    EXPERIMENT is a TOML file, FOLDER a federation that init wrote, and NAME a new name. Server, nodes and keys stay the
    same.
    """
    _require_flower()
    from fedstrata.federation.deploy import add_app

    add_app(read(experiment, set_, preset), folder, name, node or (), context.obj or ())
    say(f"Written to {folder / name}. Its runs go to {(folder / 'runs' / name).resolve()} by default.")


@app.command()
def describe(
    folder: Federation,
    name: Annotated[str, typer.Option("--app", metavar="NAME", help="App whose schema the tables have.")] = "app",
    schema: Annotated[
        Path | None, typer.Option(parser=a_path, metavar="FILE", help="Schema of the tables.", show_default="the app's")
    ] = None,
    node: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Node to describe. Can be repeated.", show_default="all of the app"),
    ] = None,
    html: HtmlPage = None,
    minimum: Annotated[
        int, typer.Option(min=1, metavar="N", help="Nodes hide counts below this, and others that would tell them.")
    ] = MINIMUM,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Describe the tables of the nodes, from what each node tells of its own.

    FOLDER is a federation that init wrote, and that runs. Call this on the server. A node hides small counts itself,
    and tells none below the minimum in its node.toml.
    """
    _require_flower()
    from fedstrata.federation.describing import describe_federation

    check_output(html, "--html")
    form = None if schema is None else Schema.read(schema)
    told = describe_federation(folder, name, form, node or (), minimum, (lambda _: None) if quiet else say)
    give(told, html, as_json, "Nodes tell smaller ones with --minimum N only if their node.toml allows it.")


@app.command()
def key(path: Annotated[Path, typer.Argument(help="Private key to write.", show_default=False)]) -> None:
    """Make a node's key, on the node itself.

    The private key PATH stays there; PATH.pub goes to the server.
    """
    _require_flower()
    from fedstrata.federation.keys import make_key

    for file in (path, path.with_name(path.name + ".pub")):
        if file.exists():
            raise InputError(f"The file {file} already exists. Nothing was overwritten. Choose another.")
    make_key(path)
    say(f"Written: {path} (private, stays here) and {path}.pub (for the server).")


@app.command()
def renew(
    folder: Federation,
    ca_key: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Private key of the certificate authority.", show_default="FOLDER/server/ca.key"
        ),
    ] = None,
) -> None:
    """Renew the server's certificate.

    FOLDER is a federation that init wrote. Names and authority stay the same, so nothing changes on the nodes.
    """
    _require_flower()
    from fedstrata.federation.keys import renew_certificate

    end = renew_certificate(folder / "server", ca_key or folder / "server" / "ca.key")
    say(f"Written: {folder / 'server' / 'server.pem'}, valid until {end:%Y-%m-%d}. Restart the server and the proxy.")


@app.command("node")
def start_node(
    settings: Annotated[Path, typer.Argument(help="TOML file with data, key and state.", show_default=False)],
    server: Annotated[str, typer.Option(metavar="HOST:PORT", help="Address of the server.")],
    ca: Annotated[
        Path, typer.Option(metavar="FILE", help="Certificate of the authority that signed the server's certificate.")
    ],
    stock: Stock = False,
    port: Annotated[
        int, typer.Option(min=1, max=65535, metavar="PORT", help="Loopback port of a stock SuperNode, for its own use.")
    ] = 9094,
) -> None:
    """Start a node, which connects to the server and waits for work.

    SETTINGS is the node's TOML file, which names its data, key and state. The data stay where they are. The node runs
    functions of this package, and no code that the server sends.
    """
    _require_flower()
    from fedstrata.federation.processes import commands
    from fedstrata.federation.superlink import node_command, stock_node_command

    table = _node_settings(settings)
    words = stock_node_command(server, ca, table, port) if stock else node_command(server, ca, table)
    os.execv(commands() / words[0], words)


def _node_settings(path: Path) -> dict[str, str]:
    """Read the settings of a node; raise now if they would fail at its first message."""
    table = read_toml(path)
    allowed = ("data", "key", "state", "import", "pool", "minimum", "secure", "peers")
    for name in table:
        if name not in allowed:
            raise unknown("setting of a node", name, allowed, str(path))
    for name in ("data", "key", "state"):
        if not isinstance(table.get(name), str):
            raise InputError(f"The file {path} must contain {name} = '/path'.")
        table[name] = str(Path(table[name]).expanduser())
    if not isinstance(table.get("import", ""), str):
        raise invalid("import of a node", table["import"], "a path, or several separated by ':'", str(path))
    for name in ("pool", "secure"):
        if not isinstance(table.get(name, True), bool):
            raise invalid(f"{name} of a node", table[name], "true or false", str(path))
    if not isinstance(table.get("peers", ""), str):
        raise invalid("peers of a node", table["peers"], "a path", str(path))
    if "peers" in table:
        table["peers"] = str(Path(table["peers"]).expanduser())
    if type(table.get("minimum", 1)) is not int or table.get("minimum", 1) < 1:
        raise invalid("minimum of a node", table["minimum"], "a whole number, at least 1", str(path))
    for name in ("data", "key", "peers"):
        if name in table and not Path(table[name]).exists():
            raise InputError(f"There is no {table[name]}, the {name} of the node in {path}.")
    return {k: str(v) for k, v in table.items()}
