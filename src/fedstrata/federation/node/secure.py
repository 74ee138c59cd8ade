"""A node's part in secure sums: what it keeps on its disk between the messages of one, and its masked answer."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedstrata.core.errors import InputError, invalid
from fedstrata.core.trees import tree_leaves
from fedstrata.federation import keys, wire
from fedstrata.federation.node.data import path_of
from fedstrata.federation.secure import fixedpoint
from fedstrata.federation.secure.fields import SHARE
from fedstrata.federation.secure.messages import (
    ADVERT,
    MOST_CLIENTS,
    SEALED,
    SIGNATURE,
    Advert,
    SecureError,
    Session,
    pack_rows,
    read_rows,
    usual_signature,
)
from fedstrata.federation.secure.participant import PHASES, Participant, Verify
from fedstrata.federation.wire import Call

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]

Header = dict[str, Any]
Answer = tuple[Header, list[np.ndarray]]

Work = Callable[[Any], Answer]
"""Does the work that a message asks for; returns the header and the arrays of the unmasked answer."""

UNFINISHED = 24 * 3600.0
"""Seconds after which the secrets of a sum that never ended are removed."""


def only_secure(node: Mapping[str, Any]) -> bool:
    """Whether the node's configuration lets its client answer in secure sums only."""
    return str(node.get("secure", False)).lower() == "true"  # Flower passes the configuration on as text


def check_allowed(call: Call, node: Mapping[str, Any]) -> None:
    """Raise if the node's own configuration forbids it to answer a call."""
    if call.kind == "work" and only_secure(node):
        raise InputError(
            "This node answers in secure sums only (secure = true in its configuration). Set federation.secure = true "
            "in the experiment."
        )


def without_answer(header: Header, arrays: list[np.ndarray]) -> Answer:
    """Return what leaves the node of work whose answer stays there: that it was done."""
    form, nothing = wire.pack(torch.zeros(1, 0))
    return {"steps": header["steps"], "kept": header["kept"], "samples": 0, "form": form}, nothing


def answer(call: Call, content: Any, node: Mapping[str, Any], bits: int, rows: int, work: Work) -> Answer:
    """Answer a message of a secure sum.

    rows: the client's number of samples, its weight if the run weights clients by samples.
    """
    folder = SessionFile(path_of(node, "state"), call.run)
    with folder.alone():
        return _answer(call, content, node, bits, rows, work, folder)


def _answer(
    call: Call, content: Any, node: Mapping[str, Any], bits: int, rows: int, work: Work, folder: SessionFile
) -> Answer:
    session = Session(call.run, call.round, call.exchange, call.attempt, call.threshold)
    if call.kind == "keys":
        me, public = Participant(session, call.client), Public({}, node)
        reply = wire.pack(pack_rows({call.client: me.advert(public.sign).row}, ADVERT))
    else:
        me, known = folder.load()
        if (me.session, me.client) != (session, call.client):
            raise SecureError("The server asked for a secure sum that this node has not begun, or has left.")
        me.expect(call.kind)
        public = Public(known, node)
    header: Header = {}
    if call.kind == "shares":
        adverts, public = _read_adverts(content, node)
        reply = wire.pack(pack_rows(me.shares(adverts, public.verify), SEALED))
    elif call.kind == "masked":
        inbox, message = _pair(content)
        sealed = read_rows(inbox, SEALED, "shares")
        header, arrays = work(message)
        vector = _vector(header, arrays, rows if call.weighting == "samples" else 1, bits, len(me.adverts))
        header = {"like": header.get("like", header["form"]), "steps": header["steps"], "kept": header["kept"]}
        if vector is None:
            header["nan"], reply = True, wire.pack(())
        else:
            masked = me.masked(sealed, vector, wire.asked(call, message))
            reply = wire.pack((torch.from_numpy(masked.view(np.int64)),))
    elif call.kind == "agree":
        signed = me.agree(_numbers(content), public.sign)
        reply = wire.pack(pack_rows({call.client: signed}, SIGNATURE))
    elif call.kind == "open":
        shares = me.opened(read_rows(content, SIGNATURE, "signatures"), public.verify)
        folder.remove()
        reply = wire.pack(pack_rows(shares, SHARE))
    if call.kind != "open":
        folder.save(me, public.keys)
    form, out = reply
    return {**header, "form": form}, out


def _vector(header: Header, arrays: list[np.ndarray], weight: int, bits: int, terms: int) -> np.ndarray | None:
    """Return an answer as the vector to be masked: its weight, its samples, the weighted numbers; None for NaN."""
    leaves = tree_leaves(wire.unpack(header["form"], arrays))
    numbers = np.concatenate([leaf.double().numpy().ravel() for leaf in leaves])
    whole = fixedpoint.encoded(np.array([weight, header["samples"]], dtype=np.float64), 0, terms)
    try:
        return np.concatenate([whole, fixedpoint.encoded(weight * numbers, bits, terms)])
    except fixedpoint.NotFinite:
        return None


# --- what the server sends --------------------------------------------------------------------------------------------


def _pair(content: Any) -> tuple[Any, Any]:
    if not isinstance(content, tuple) or len(content) != 2:
        raise invalid("content of a masked call", type(content).__name__, "shares, and a message")
    return content


def _numbers(content: Any) -> list[int]:
    """Return the clients in a message."""
    good = isinstance(content, tuple) and len(content) == 1 and isinstance(content[0], torch.Tensor)
    if not good or content[0].dtype != torch.int64 or content[0].dim() != 1 or len(content[0]) > MOST_CLIENTS:
        raise invalid("survivors of a secure sum", type(content).__name__, "one tensor of client numbers")
    numbers: list[int] = content[0].tolist()
    return numbers


def _read_adverts(content: Any, node: Mapping[str, Any]) -> tuple[dict[int, Advert], Public]:
    """Return everybody's keys, and the public keys of their nodes, checked against those that this node trusts."""
    if not isinstance(content, tuple) or len(content) != 3 or not isinstance(content[2], tuple):
        raise invalid("keys of a secure sum", type(content).__name__, "clients, their keys, and their nodes' keys")
    rows = read_rows(content[:2], ADVERT, "keys")
    named = content[2]
    if len(named) != len(rows) or not all(isinstance(key, str) for key in named):
        raise invalid("public keys of a secure sum", len(named), f"{len(rows)} lines of text")
    public = {client: keys.canonical(key) for client, key in zip(sorted(rows), named, strict=True)}
    keys.check_distinct({f"client {client}": key for client, key in public.items()})
    if "peers" in node:
        trusted = _trusted(path_of(node, "peers"))
        for client, key in public.items():
            if key not in trusted:
                raise InputError(
                    f"The key of client {client} is not in the file of this node's peers ({path_of(node, 'peers')}). "
                    "Add the line in that node's .pub file if it may take part."
                )
    return {client: Advert.of(row) for client, row in rows.items()}, Public(public, node)


def _trusted(path: Path) -> set[str]:
    try:
        lines = [line for line in path.read_text().splitlines() if line.strip() and not line.startswith("#")]
        return {keys.canonical(line) for line in lines}
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"The file of this node's peers, {path}, cannot be read: {error}") from None


class Public:
    """The public keys of the nodes in a sum, by client, and this node's own private one."""

    def __init__(self, public: Mapping[int, str], node: Mapping[str, Any]) -> None:
        self.keys = dict(public)
        self._key = path_of(node, "key")
        self.verify: Verify = lambda client, signature, content: (
            client in self.keys and keys.is_signed(self.keys[client], usual_signature(signature), content)
        )

    def sign(self, content: bytes) -> bytes:
        """Sign with the node's own key."""
        return keys.sign(self._key, content)


# --- between two messages ---------------------------------------------------------------------------------------------


class SessionFile:
    """The file in which a node keeps the secrets of the secure sum that it takes part in, one for each run.

    It is written before the answer is sent, so that no message can be answered twice, and removed with the last one.
    """

    def __init__(self, base: Path, run: str) -> None:
        if len(run) != 32 or not set(run) <= set("0123456789abcdef"):
            raise invalid("id of the run", run, "32 hexadecimal digits")
        self._path = base / f"secure-{run}.json"

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Let no other process of this node answer a message of a secure sum meanwhile: it would answer it again."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(self._path.parent, os.O_RDONLY)
        try:
            if fcntl is not None:
                fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            os.close(handle)

    def load(self) -> tuple[Participant, dict[int, str]]:
        """Return the participant, and the public keys of the nodes."""
        try:
            table = json.loads(self._path.read_text())
        except FileNotFoundError:
            raise SecureError("The server asked for a secure sum that this node has not begun, or has left.") from None
        return Participant.from_json(table["participant"]), {int(k): key for k, key in table["public"].items()}

    def save(self, participant: Participant, public: Mapping[int, str]) -> None:
        """Write the participant to disk, readable for the node only; remove old files of other runs."""
        if participant.phase == PHASES[0]:
            self._remove_old()
        temporary = self._path.with_suffix(".tmp")
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(handle, "w") as file:
            json.dump({"participant": participant.to_json(), "public": public}, file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self._path)

    def remove(self) -> None:
        """Remove the secrets."""
        self._path.unlink(missing_ok=True)

    def _remove_old(self) -> None:
        for path in self._path.parent.glob("secure-*"):
            if time.time() - path.stat().st_mtime > UNFINISHED:
                path.unlink(missing_ok=True)
