"""The commands of a federation: ``fedstrata federate local | init | app | renew | key | node``."""

from __future__ import annotations

import os
import shutil
import tempfile
import tomllib
from pathlib import Path
from typing import Annotated, Any

import typer

from fedstrata.core.errors import InputError, invalid, unknown
from fedstrata.experiments.config import read
from fedstrata.training.rundir import RunDirectory

app = typer.Typer(no_args_is_help=True, help="A real federation on Flower: data stay on their nodes.")

ConfigFile = Annotated[Path, typer.Argument(help="The experiment, a TOML file.", show_default=False)]
Set = Annotated[list[str] | None, typer.Option("--set", help="Change a setting. May be repeated.")]
Preset = Annotated[str | None, typer.Option("--preset", help="A preset of the file; by default its first one.")]


def _needs_flower() -> None:
    try:
        import cryptography  # noqa: F401
        import flwr  # noqa: F401
    except ImportError:
        raise InputError("Flower is not installed here: pip install 'fedstrata[flower]'.") from None


@app.command()
def local(
    context: typer.Context,
    experiment: ConfigFile,
    nodes: Annotated[int, typer.Option(min=1, help="How many nodes; each has one client.")] = 4,
    out: Annotated[
        Path | None, typer.Option(help="The run directory; must be new. Without it nothing is kept.")
    ] = None,
    preset: Preset = None,
    set_: Set = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in the directory.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for a script.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Show no progress.")] = False,
) -> None:
    """Try a federation on this machine: certificates, keys, a SuperLink and SuperNodes on loopback, a run, an end.

    EXPERIMENT is a TOML file. Its data are split over the nodes, each of which then sees only its own. With --out, what
    the federation needed (keys, logs, data of the nodes) is in OUT.federation beside the run directory. Every process
    that was started is ended, also on Ctrl-C.
    """
    _needs_flower()
    from fedstrata.cli import commands as cli
    from fedstrata.federation.local import run_locally

    config = read(experiment, set_, preset)
    if resume and out is None:
        raise InputError("--resume needs --out: the run directory to go on with.")
    say = (lambda _: None) if quiet else cli.say
    kept = out is not None
    folder = Path(tempfile.mkdtemp(prefix="fedstrata-")) if out is None else out.with_name(out.name + ".federation")
    where = folder / "run" if out is None else out
    try:
        summary = run_locally(config, nodes, folder, where, resume, cli.progress(quiet), say, context.obj or ())
        cli.print_run(summary, RunDirectory(where).rows(), out, as_json)
    finally:
        if not kept:
            shutil.rmtree(folder, ignore_errors=True)


@app.command()
def init(
    context: typer.Context,
    experiment: ConfigFile,
    folder: Annotated[Path, typer.Argument(help="Where to write; must be new.", show_default=False)],
    node: Annotated[
        list[str] | None,
        typer.Option(help="A node by name, or NAME=FILE.pub with its public key. Repeat it for every node."),
    ] = None,
    host: Annotated[
        list[str] | None,
        typer.Option(help="The server's name or address; by default 127.0.0.1. May be repeated."),
    ] = None,
    port: Annotated[
        int, typer.Option(min=1, max=65534, help="The server's port for nodes; the next one is for its own use.")
    ] = 9443,
    preset: Preset = None,
    set_: Set = None,
) -> None:
    """Write a ready Flower app, certificates, and a folder for each node: see docs/deploy.md.

    EXPERIMENT is a TOML file. Of its data only holdout, support and seed are kept, because nodes name their own data.
    """
    _needs_flower()
    from fedstrata.cli.commands import say
    from fedstrata.federation.deploy import write_federation

    config = read(experiment, set_, preset)
    found: dict[str, Path | None] = {}
    for text in node or ():
        name, _, path = text.partition("=")
        if name in found:
            raise invalid("name of the node", name, "another one: it is there already")
        if path and not Path(path).exists():
            raise InputError(f"There is no file {path}, the public key of {name}.")
        found[name] = Path(path) if path else None
    if not found:
        raise InputError("A federation needs nodes: --node NAME=FILE.pub for each, or --node NAME for a key made here.")
    write_federation(config, folder, found, host or ["127.0.0.1", "localhost"], port, context.obj or ())
    say(f"Written to {folder}: app/, server/, and in nodes/ a folder for each of {', '.join(found)}.")
    say("What next: docs/deploy.md. To look at it all on this machine first: fedstrata federate local.")


@app.command("app")
def another_app(
    context: typer.Context,
    experiment: ConfigFile,
    folder: Annotated[Path, typer.Argument(help="A federation that init wrote.", show_default=False)],
    name: Annotated[str, typer.Argument(help="A name for the app; must be new.", show_default=False)],
    node: Annotated[
        list[str] | None, typer.Option(help="A node that takes part; by default all do. May be repeated.")
    ] = None,
    preset: Preset = None,
    set_: Set = None,
) -> None:
    """Write the app of another experiment into a federation that is there: the same server, nodes and keys."""
    _needs_flower()
    from fedstrata.cli.commands import say
    from fedstrata.federation.deploy import add_app

    add_app(read(experiment, set_, preset), folder, name, node or (), context.obj or ())
    say(f"Written to {folder / name}; its runs go to {(folder / 'runs' / name).resolve()}, unless you say another.")


@app.command()
def key(path: Annotated[Path, typer.Argument(help="Where to write the private key.", show_default=False)]) -> None:
    """Make a node's key on the node itself: the private one stays there, PATH.pub goes to the server."""
    _needs_flower()
    from fedstrata.cli.commands import say
    from fedstrata.federation.keys import make_key

    for there in (path, path.with_name(path.name + ".pub")):
        if there.exists():
            raise InputError(f"The file {there} exists. Nothing was overwritten. Choose another.")
    make_key(path)
    say(f"Written: {path} (private, stays here) and {path}.pub (for the server).")


@app.command()
def renew(
    folder: Annotated[Path, typer.Argument(help="A federation that init wrote.", show_default=False)],
    ca_key: Annotated[Path | None, typer.Option(help="The authority's key; by default FOLDER/server/ca.key.")] = None,
) -> None:
    """Renew the server's certificate: the same names and authority, so that nothing changes at the nodes."""
    _needs_flower()
    from fedstrata.cli.commands import say
    from fedstrata.federation.keys import renew_certificate

    end = renew_certificate(folder / "server", ca_key or folder / "server" / "ca.key")
    say(
        f"Written: {folder / 'server' / 'server.pem'}, valid until {end:%Y-%m-%d}. Start the server and the gate again."
    )


@app.command("node")
def start_node(
    settings: Annotated[Path, typer.Argument(help="The node's TOML file: data, key, state.", show_default=False)],
    server: Annotated[str, typer.Option(help="The server, HOST:PORT.")],
    ca: Annotated[Path, typer.Option(help="The certificate of the authority that the server's is from.")],
    port: Annotated[int, typer.Option(min=1, max=65535, help="A port on loopback for the node's own use.")] = 9094,
) -> None:
    """Start a node: it connects to the server and waits for work; its data stay where they are."""
    _needs_flower()
    from fedstrata.federation.local import commands, node_command

    table = _node_table(settings)
    words = node_command(server, ca, table, port)
    os.execv(commands() / words[0], words)


def _node_table(path: Path) -> dict[str, str]:
    """Read a node's settings, and refuse what would only fail at the first message."""
    try:
        table: dict[str, Any] = tomllib.loads(path.read_text())
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise InputError(f"The file {path} cannot be read: {error}") from None
    known = ("data", "key", "state", "import")
    for name in table:
        if name not in known:
            raise unknown("setting of a node", name, known, str(path))
    for name in ("data", "key", "state"):
        if not isinstance(table.get(name), str):
            raise InputError(f"The file {path} must have {name} = '/a/path'.")
        table[name] = str(Path(table[name]).expanduser())
    if not isinstance(table.get("import", ""), str):
        raise invalid("import of a node", table["import"], "a path, or several with ':' between", str(path))
    for name in ("data", "key"):
        if not Path(table[name]).exists():
            raise InputError(f"There is no {table[name]}, which {path} names as {name}.")
    return {k: str(v) for k, v in table.items()}
