"""How ``compare.py`` talks to a peer: lines on the peer's stdin, and one line of JSON on its stdout for each.

    (start)        {"versions": {...}}, or {"skip": "why"} and the peer ends
    run N          {"seconds": ...}: runs N rounds; the processor time that they took
    weights PATH   {}: saves the weights as one vector, in the order of the torch module

A peer is a program ``peer_NAME.py JOB_FILE`` that calls :func:`serve`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Protocol

import numpy as np

from jobs import Work, read

WARM_UP = 2


class Skip(Exception):
    """A peer cannot run its job; says why."""


class Peer(Protocol):
    """A simulator with a job."""

    def run(self, rounds: int) -> float | None:
        """Run rounds; return the processor time, or None to let the protocol measure it."""

    def weights(self) -> list[np.ndarray]:
        """Return the weights of the server, in the order and layout of the torch module."""


def serve(build: Callable[[Work], Peer], *packages: str) -> None:
    """Build the peer for the job on the command line, run some rounds, then answer the lines on stdin.

    packages: those whose versions to report.
    """
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print must not get in the way
    work = read(Path(sys.argv[1]))
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    try:
        peer = build(work)
    except Skip as reason:
        print(json.dumps({"skip": str(reason)}), file=answers)
        return
    if not work.job.check:
        peer.run(WARM_UP)
    print(json.dumps({"versions": {name: version(name) for name in packages}}), file=answers)
    for line in sys.stdin:
        command, _, argument = line.strip().partition(" ")
        answer = {}
        if command == "run":
            begun = time.process_time()
            spent = peer.run(int(argument))
            answer["seconds"] = time.process_time() - begun if spent is None else spent
        else:
            np.save(argument, np.concatenate([np.asarray(value, np.float32).ravel() for value in peer.weights()]))
        print(json.dumps(answer), file=answers)
