"""A whole federation on this machine, for trials and tests."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path

import tomli_w

from fedstrata.clients.faults import Fault
from fedstrata.core.errors import FedstrataError, InputError, invalid
from fedstrata.core.files import Row, lock, make_folder, read_toml, write_atomically
from fedstrata.experiments.build import Experiment, build_algorithm
from fedstrata.experiments.config import OF_SEVERAL_RUNS, Config
from fedstrata.federation.deploy import write_app, write_node_data
from fedstrata.federation.experiment import check_config, error_file, module_list
from fedstrata.federation.processes import commands, end_leftovers, interrupted_by_signals
from fedstrata.federation.superlink import Federation
from fedstrata.training.callbacks import Callback
from fedstrata.training.fingerprint import refuse_other_settings
from fedstrata.training.rundir import RunDirectory

Say = Callable[[str], None]
Hook = Callable[[Federation], None]


def run_locally(
    config: Config,
    nodes: int,
    folder: Path,
    out: Path,
    resume: bool,
    callbacks: Sequence[Callback],
    say: Say,
    modules: Sequence[Path] = (),
    hook: Hook | None = None,
    stock: bool = False,
) -> Row:
    """Run an experiment as a federation on this machine; return the summary of the run.

    modules: Python files that register the user's own algorithms, problems, models, ...
    hook:    called repeatedly while the run is in progress, for tests.
    stock:   whether nodes are Flower's own SuperNodes.
    """
    commands()
    check_config(config, nodes)
    _check_directories(config, nodes, folder, out, resume)
    split = config.data if config.data.own else config.data.replace(clients=nodes)
    data = Experiment(config.replace(data=split)).data
    if data.clients != nodes:
        raise invalid("number of nodes", nodes, f"{data.clients}, the number of clients in the data")
    names = list(data.client_names) if data.client_names else [f"node{k}" for k in range(nodes)]
    _check_names(names)
    with _owned(folder, say):
        say(f"Writing the data of {nodes} nodes, certificates and keys to {folder}")
        write_node_data(data, folder, names)
        # Written last: to a resumed run, this file means that the data are complete.
        write_atomically(folder / "config.toml", tomli_w.dumps(_tables(config, nodes)).encode())
        failure = error_file(out)
        failure.unlink(missing_ok=True)
        with interrupted_by_signals(), Federation(folder, names, stock) as federation:
            _start(federation, config, out, modules, say)
            run = federation.submit(folder / "app")
            slow = " A round takes several seconds, however little work it has." if stock else ""
            say(f"Run {run} has started.{slow}")
            _follow(federation, run, config, out, callbacks, hook)
            failed = federation.status(run) != "finished:completed"
            if failure.exists():
                raise FedstrataError(failure.read_text())
            if failed:
                raise FedstrataError(f"The run failed.\n{federation.log(run)[-3000:]}")
    summary: Row = json.loads((out / "summary.json").read_text())
    return summary


@contextmanager
def _owned(folder: Path, say: Say) -> Iterator[None]:
    """Lock the folder of a federation, and end what an earlier one in it left running when it was killed."""
    make_folder(folder, private=True)
    handle = lock(folder, "folder of the federation")
    try:
        left = end_leftovers(folder)
        if left:
            say(f"Ended {left} processes that an earlier federation in {folder} had left when it was killed")
        yield
    finally:
        if handle is not None:
            os.close(handle)


def _check_names(names: Sequence[str]) -> None:
    """Raise if a folder of a node, or its log, could not have its name; "server" is that of the SuperLink."""
    for name in names:
        if name in ("", ".", "..", "server") or "/" in name or not name.isprintable():
            raise invalid("name of a node", name, "a name that a folder can have, and not 'server': rename its data")


def _check_directories(config: Config, nodes: int, folder: Path, out: Path, resume: bool) -> None:
    """Raise if this would overwrite a run, or resume it with different settings."""
    settings = folder / "config.toml"
    if resume and settings.exists():
        refuse_other_settings(read_toml(settings), _tables(config, nodes), out)
    elif resume and (out / "config.toml").exists():
        raise InputError(f"The run in {out} cannot be resumed: {settings} is missing. Choose another directory.")
    else:
        RunDirectory(out).refuse_if_used()


def _tables(config: Config, nodes: int) -> Row:
    tables = config.to_toml(*OF_SEVERAL_RUNS)
    tables["federation"] = tables.get("federation", {}) | {"nodes": nodes}
    return tables | {"algorithm": build_algorithm(config).to_table()}


def _start(federation: Federation, config: Config, out: Path, modules: Sequence[Path], say: Say) -> None:
    """Write the app, and start the SuperLink and the nodes."""
    folder, names = federation.folder, federation.names
    public = federation.make_keys()
    split = config.replace(data=config.data.replace(holdout=0.0, support=0.0))  # the data are split already
    write_app(split, folder / "app", public, out.resolve(), (folder / "server" / "data").resolve(), modules)
    say(f"Starting a SuperLink on {federation.address} (TLS, node authentication)")
    federation.start_server()
    for name in names:
        federation.register(folder / "nodes" / name / "node.key.pub")
    say(f"Starting {len(names)} nodes")
    more = {"import": module_list(modules)} if modules else {}
    for name in names:
        federation.start_node(name, minimum=str(config.prepare.minimum), **more)


def _follow(
    federation: Federation, run: str, config: Config, out: Path, callbacks: Sequence[Callback], hook: Hook | None
) -> None:
    """Wait until the run has ended, and pass what it writes to the callbacks."""
    summary, failure = out / "summary.json", error_file(out)
    before = summary.stat().st_mtime_ns if summary.exists() else 0
    progress = _Progress(RunDirectory(out), federation.names, callbacks)
    checked = time.monotonic()
    note = f"{len(federation.names)} nodes on this machine"
    for callback in callbacks:
        callback.on_start(config.algorithm.name, max(progress.rounds, default=0), config.train.rounds, note)
    try:
        while True:
            if hook is not None:
                hook(federation)
            progress.update()
            written = summary.exists() and summary.stat().st_mtime_ns != before
            if written or failure.exists() or time.monotonic() - checked > 10:
                checked = time.monotonic()
                if federation.status(run).startswith("finished"):
                    return
            time.sleep(0.25)
    finally:
        for callback in callbacks:
            callback.on_end(None)


class _Progress:
    """Passes new rows and faults in a run directory to callbacks."""

    def __init__(self, directory: RunDirectory, names: list[str], callbacks: Sequence[Callback]) -> None:
        self._directory, self._names, self._callbacks = directory, names, callbacks
        self.rounds = {row["round"] for row in directory.metrics.read()}
        self._faults = set(map(Fault.of, directory.faults.read()))

    def update(self) -> None:
        """Pass on the faults and evaluations since the last call."""
        faults = [fault for fault in map(Fault.of, self._directory.faults.read()) if fault not in self._faults]
        rows = [row for row in self._directory.metrics.read() if row["round"] not in self.rounds]
        for callback in self._callbacks:
            for _, group in groupby(faults, key=lambda fault: fault.round):
                callback.on_faults(list(group), self._names)
            for row in rows:
                callback.on_evaluation(row)
        self._faults.update(faults)
        self.rounds.update(row["round"] for row in rows)
