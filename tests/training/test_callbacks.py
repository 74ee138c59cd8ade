"""What listens to a run: the progress bar, plain lines, TensorBoard."""

from __future__ import annotations

from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

import fedstrata as fs


def shown(terminal: bool, brief: bool) -> str:
    q = fs.quadratic(clients=3)
    screen = StringIO()
    console = Console(file=screen, force_terminal=terminal, width=120)
    options = {"rounds": 4, "eval_every": 2, "callbacks": [fs.ShowProgress(console, brief)]}
    fs.train(q.problem, q.data, fs.FedAvg(lr=0.01), **options)
    return screen.getvalue()


def test_a_terminal_shows_a_bar_and_what_was_chosen():
    text = shown(terminal=True, brief=False)
    assert "3 of 3 clients per round, 3 at a time (chunk = auto)" in text
    assert "4/4" in text and "\x1b[" in text, "a bar that moves"


@pytest.mark.parametrize(("brief", "rounds"), [(False, [0, 2, 4]), (True, [4])])
def test_a_log_has_plain_lines(brief, rounds):
    lines = shown(terminal=False, brief=brief).splitlines()
    assert [int(line.split("round ")[1].split("/")[0]) for line in lines if "round " in line and "/4" in line] == rounds
    assert all("\x1b" not in line for line in lines)
    assert any("clients per round" in line for line in lines) is not brief


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_gets_every_measure(tmp_path: Path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    q = fs.quadratic(clients=3)
    run = fs.train(q.problem, q.data, fs.FedAvg(lr=0.01), rounds=4, eval_every=2, callbacks=[fs.TensorBoard(tmp_path)])
    events = EventAccumulator(str(tmp_path)).Reload()
    written = [(e.step, e.value) for e in events.Scalars("loss")]
    assert written == [(r["round"], pytest.approx(r["loss"], rel=1e-6)) for r in run.history]
    assert {"bytes_up", "samples"} <= set(events.Tags()["scalars"])
