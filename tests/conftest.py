"""One thread for every test: small tensors are fastest that way, and sums run in one order. A command in process."""

from __future__ import annotations

import pytest
import torch

from fedstrata import cli

torch.set_num_threads(1)


@pytest.fixture
def fedstrata(capsys, monkeypatch):
    """Run a command; return (exit code, stdout, stderr)."""

    def run(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr(cli, "out_console", cli.Console(width=140))
        monkeypatch.setattr(cli, "err_console", cli.Console(stderr=True, width=140))
        code = cli._exit_code(lambda: cli.app([str(w) for w in words], standalone_mode=False))
        out, err = capsys.readouterr()
        return code, out, err

    return run
