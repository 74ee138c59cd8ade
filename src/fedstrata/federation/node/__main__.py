"""``python -m fedstrata.federation.node SERVER CA SETTINGS``: a node, until a signal ends it."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from fedstrata.core.errors import FedstrataError
from fedstrata.federation.node.loop import run_node
from fedstrata.federation.processes import interrupted_by_signals


def say(line: str) -> None:
    """Write a line to the node's log, with the time."""
    print(f"{time.strftime('%Y-%m-%d %H:%M:%S')}  {line}", file=sys.stderr, flush=True)


def main(server: str, ca: str, settings: str) -> int:
    """Run a node; return the code with which the process ends."""
    try:
        with interrupted_by_signals():
            run_node(json.loads(settings), server, Path(ca), say)
    except KeyboardInterrupt:
        say("Stopped.")
    except FedstrataError as error:
        say(f"Error: {error}")
        return error.exit_code
    return 0


if __name__ == "__main__":
    code = main(*sys.argv[1:])
    sys.stderr.flush()
    os._exit(code)  # without waiting for requests that are under way
