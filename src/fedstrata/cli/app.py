"""The command ``fedstrata``: its commands, the options before a command, and the exit codes."""

from __future__ import annotations

import io
import os
import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import click
import typer
from typer.core import TyperCommand, TyperGroup

from fedstrata.cli.console import say
from fedstrata.core.errors import FedstrataError, InputError, invalid
from fedstrata.core.registry import IMPORTED
from fedstrata.core.torchrun import launched
from fedstrata.core.version import __version__

COMMANDS = {
    "demo": ("demo.demo", "Compare four algorithms on real data in under a minute."),
    "run": ("run.run", "Run an experiment."),
    "compare": ("compare.compare", "Compare algorithms or variants over several seeds."),
    "tune": ("tune.tune", "Tune algorithms or variants, all by the same rule."),
    "reproduce": ("reproduce.reproduce", "Run all variants of an experiment by name."),
    "describe": ("describe.describe", "Describe the tables of sites, and draft a schema for them."),
    "predict": ("predict.predict", "Score the rows of a table with a trained model."),
    "threshold": ("predict.threshold", "Choose a threshold on held-out rows, and say what follows from it."),
    "export": ("predict.export", "Export a trained model with its schema, preparation, calibration and threshold."),
    "list": ("show.list_names", "List the names that a configuration file can use."),
    "show": ("show.show", "Describe anything that a configuration file can name."),
    "plot": ("plot.plot", "Plot finished runs."),
    "partition": ("plot.partition", "Plot how the training data are split across clients."),
    "federate": ("federate.app", "Run a real federation on Flower, where data stay on their nodes."),
}
"""Every command: where its function is, and the first line of its help. It is imported when it is called."""


class Commands(TyperGroup):
    """The commands by name; those that are not called are not imported, and neither is PyTorch for a list of them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names, in the order of the help."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        """Return a command to list in the help."""
        return TyperCommand(name, help=COMMANDS[name][1]) if name in COMMANDS else None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command to call."""
        name, command, rest = super().resolve_command(ctx, args)
        return name, command if name is None else command_of(name), rest


def command_of(name: str) -> click.Command:
    """Import a command."""
    module, _, attribute = COMMANDS[name][0].partition(".")
    target = getattr(import_module(f"fedstrata.cli.{module}"), attribute)
    if not isinstance(target, typer.Typer):
        function, target = target, typer.Typer(**STYLE)
        target.command(name)(function)
    return typer.main.get_command(target)


STYLE: dict[str, Any] = {
    "add_completion": False,
    "pretty_exceptions_enable": False,
    "rich_markup_mode": "markdown",  # rewraps the paragraphs of a docstring
}

app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    help="Federated learning for layered objectives. Start with: fedstrata demo",
    **STYLE,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"fedstrata {__version__}")
        raise typer.Exit


@app.callback()
def _before_command(
    context: typer.Context,
    modules: Annotated[
        list[Path] | None,
        typer.Option(
            "--import",
            metavar="FILE",
            help="Python file that registers your own algorithms, problems, models, ... Can be repeated.",
        ),
    ] = None,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    if context.invoked_subcommand != "run" and launched():
        wants = "run, the only command that several processes can share"
        raise invalid("command under torchrun", context.invoked_subcommand, wants)
    context.obj = tuple(modules or ())
    IMPORTED.clear()
    if modules:
        from fedstrata.experiments.config import import_file

        for path in modules:
            import_file(path)


def main() -> None:
    """Run the command in ``sys.argv`` and exit with its code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a file may have a name that its encoding cannot show
            stream.reconfigure(errors="backslashreplace")
    warnings.showwarning = lambda message, *_, **__: say(f"Warning: {message}")
    code = invoke()
    if launched():
        # Threads of the process group may outlive it, and abort a rank that has finished while Python shuts down.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def invoke(arguments: Sequence[str] | None = None) -> int:
    """Run a command; return 0 for success, 2 for bad input, 1 for any other failure, 130 for an interrupt."""
    try:
        _refuse_nul(sys.argv[1:] if arguments is None else arguments)
        code = app(arguments, standalone_mode=False)
    except FedstrataError as error:
        say(f"Error: {error}")
        return error.exit_code
    except click.ClickException as error:
        error.show()
        return 2
    except (click.Abort, KeyboardInterrupt):
        code = 130
    except OSError as error:
        say(f"Error: {error}")
        return 1
    if code == 130:
        say("Interrupted. With --out, resume by adding --resume; for reproduce, repeat the command.")
    return code if isinstance(code, int) else 0


def _refuse_nul(words: Sequence[str]) -> None:
    for word in words:
        if "\0" in word:
            raise InputError(f"An argument has a NUL character, which no name of a file can have: {ascii(word)[:100]}")
