"""The node's connection to the server: Flower's Fleet API, as flwr 1.41 and 1.42 have it.

Everything here is private to Flower and may change with any of its versions, so nothing else in the package touches it,
``tests/federation/test_connection.py`` says what has changed, and pyproject.toml names the versions. A stock SuperNode
(``fedstrata federate node --stock``) does without this module.

A node of this package answers with functions of this package. Of the app that the server submits, it reads one setting,
the experiment, and runs nothing.
"""

from __future__ import annotations

import hashlib
import io
import re
import ssl
import threading
import time
import tomllib
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import Error, Message
from flwr.app.message import remove_content_from_message
from flwr.common.constant import HEARTBEAT_DEFAULT_INTERVAL, ErrorCode
from flwr.common.serde import message_from_proto, message_to_proto, run_from_proto
from flwr.proto.fab_pb2 import GetFabRequest
from flwr.proto.fleet_pb2 import (
    ActivateNodeRequest,
    DeactivateNodeRequest,
    PullMessagesRequest,
    PushMessagesRequest,
)
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
from flwr.proto.message_pb2 import (
    ConfirmMessageReceivedRequest,
    ObjectTree,
    PullObjectRequest,
    PushObjectRequest,
)
from flwr.proto.node_pb2 import Node
from flwr.proto.run_pb2 import GetRunRequest
from flwr.supercore.error import FlowerError
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    iterate_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.interceptors.http.runtime_version import RuntimeVersionHttpInterceptor
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

from fedstrata.core.errors import FedstrataError, InputError, invalid
from fedstrata.federation.keys import private_key
from fedstrata.federation.packet import Packet
from fedstrata.federation.records import MOST_BYTES, PIECE, from_records, to_records

MOST_SETTINGS = 1 << 20
"""The largest file of settings in an app, in bytes."""

AT_ONCE = 4
"""How many requests for the parts of a message are under way at once."""

PATIENCE, FIRST_WAIT, LONGEST_WAIT = 60.0, 0.02, 1.0
"""Seconds to wait for a part of a message that the server is still receiving, and between two requests for it."""

BEAT = 0.6 * HEARTBEAT_DEFAULT_INTERVAL
"""Seconds between two signs of life."""

FAREWELL = 3.0
"""Seconds that a node takes at most to tell the server that it goes."""

FAILED = ErrorCode.CLIENT_APP_RAISED_EXCEPTION


class Unreachable(FedstrataError):
    """The server does not answer, or not now: trying again later may help."""


class Denied(FedstrataError):
    """The server refuses this node."""


class RunOver(FedstrataError):
    """The run to which a message belongs has ended."""


class Unreadable(FedstrataError):
    """What the server sent is not a message of this package, or too large."""


class Connection:
    """A node's connection to the server, by HTTPS; the node proves who it is with its key.

    address: host and port of the server.
    ca:      the certificate of the authority that signed the server's.
    key:     the node's private key.
    """

    def __init__(self, address: str, ca: Path, key: Path) -> None:
        private = private_key(key)
        self._public = public_key_to_bytes(private.public_key())
        self._client = _client(address, ca, private)
        self._node: Node | None = None
        self._pool = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="parts of messages")
        self._closed = threading.Event()
        self._heart: threading.Thread | None = None

    def open(self) -> int:
        """Tell the server that this node is there, and keep telling it; return the node's number."""
        with _errors():
            request = ActivateNodeRequest(public_key=self._public, heartbeat_interval=HEARTBEAT_DEFAULT_INTERVAL)
            self._node = Node(node_id=self._client.ActivateNode(request).node_id)
        if self._heart is None:
            self._heart = threading.Thread(target=self._keep_beating, name="signs of life", daemon=True)
            self._heart.start()
        return int(self._node.node_id)

    def close(self) -> None:
        """Tell the server that this node goes, if it can be told."""
        self._closed.set()
        node, self._node = self._node, None
        if node is not None:
            leave = threading.Thread(target=self._leave, args=(node.node_id,), daemon=True)
            leave.start()
            leave.join(FAREWELL)
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._client.close()

    def _leave(self, number: int) -> None:
        with suppress(FedstrataError), _errors():
            self._client.DeactivateNode(DeactivateNodeRequest(node_id=number))

    def receive(self) -> Message | None:
        """Return the next message without its content, or None if there is none."""
        with _errors():
            response = self._client.PullMessages(PullMessagesRequest(node=self._node))
            if not response.messages_list:
                return None
            message = message_from_proto(response.messages_list[0])
            message.__dict__["tree"] = response.message_object_trees[0]
            return message

    def content(self, message: Message) -> Packet:
        """Fetch the content of a message."""
        tree: ObjectTree = message.__dict__["tree"]
        names = list(dict.fromkeys(part.object_id for part in iterate_object_tree(tree)))
        if len(names) > MOST_BYTES // PIECE:
            raise Unreadable(f"A message has {len(names):,} parts. Allowed are {MOST_BYTES // PIECE:,}.")
        run, left = message.metadata.run_id, _Budget(MOST_BYTES)
        with _errors():
            parts = dict(zip(names, self._pool.map(lambda name: self._part(run, name, left), names), strict=True))
        self._pool.submit(self._confirm, run, tree.object_id)
        try:
            whole: Any = inflate_object_from_contents(tree.object_id, parts)
            return from_records(whole.content, MOST_BYTES)
        except Exception as error:  # the server may send anything
            raise Unreadable(f"The server sent something that is not a message ({type(error).__name__}).") from None

    def _part(self, run: int, name: str, left: _Budget) -> bytes:
        """Fetch a part of a message; wait while the server itself has not received it."""
        request = PullObjectRequest(node=self._node, run_id=run, object_id=name)
        wait, deadline = FIRST_WAIT, time.monotonic() + PATIENCE
        while not (response := self._client.PullObject(request)).object_available:
            if not response.object_found or time.monotonic() > deadline or self._closed.wait(wait):
                raise Unreadable("The server does not have a part of its own message.")
            wait = min(2 * wait, LONGEST_WAIT)
        left.use(len(response.object_content))
        return bytes(response.object_content)

    def _confirm(self, run: int, name: str) -> None:
        """Tell the server that a message has come, so that it need not keep it."""
        with suppress(FedstrataError), _errors():
            request = ConfirmMessageReceivedRequest(node=self._node, run_id=run, message_object_id=name)
            self._client.ConfirmMessageReceived(request)

    def experiment(self, run: int) -> str:
        """Return the experiment in the settings of a run's app; nothing else of the app is read."""
        with _errors():
            about = run_from_proto(self._client.GetRun(GetRunRequest(node=self._node, run_id=run)).run)
            if "experiment" in about.override_config:
                return str(about.override_config["experiment"])
            request = GetFabRequest(node=self._node, hash_str=about.fab_hash, run_id=run)
            content = self._client.GetFab(request).fab.content
        if hashlib.sha256(content).hexdigest() != about.fab_hash:
            raise Unreadable("The server sent another app than that of the run.")
        return _experiment_in(content)

    def send(self, message: Message, packet: Packet, seconds: float) -> None:
        """Send the answer to a message, which took so many seconds."""
        self._push(Message(to_records(packet), reply_to=message), seconds)

    def fail(self, message: Message, reason: str, seconds: float = 0.0) -> None:
        """Tell the server that there is no answer to a message, and why."""
        self._push(Message(Error(code=FAILED, reason=reason), reply_to=message), seconds)

    def _push(self, reply: Message, seconds: float) -> None:
        with no_object_id_recompute():
            reply.metadata.__dict__["_message_id"] = reply.object_id
            parts = get_all_nested_objects(reply)
            about = message_to_proto(remove_content_from_message(reply) if reply.has_content() else reply)
            request = PushMessagesRequest(
                node=self._node,
                messages_list=[about],
                message_object_trees=[get_object_tree(reply)],
                clientapp_runtime_list=[seconds],
            )
            with _errors():
                response = self._client.PushMessages(request)
                wanted = {name: parts[name].deflate() for name in response.objects_to_push if name in parts}
        run, session = reply.metadata.run_id, response.session_id

        def push(name: str) -> None:
            self._client.PushObject(
                PushObjectRequest(
                    node=self._node, run_id=run, object_id=name, object_content=wanted[name], session_id=session
                )
            )

        with _errors():
            list(self._pool.map(push, wanted))

    def beat(self) -> None:
        """Tell the server once that this node is alive. The main thread notices if the server has gone."""
        if self._node is not None:
            with suppress(FedstrataError), _errors():
                request = SendNodeHeartbeatRequest(node=self._node, heartbeat_interval=HEARTBEAT_DEFAULT_INTERVAL)
                self._client.SendNodeHeartbeat(request)

    def _keep_beating(self) -> None:
        while not self._closed.wait(BEAT):
            self.beat()


class _Budget:
    """How many bytes of a message may still come; requests share it."""

    def __init__(self, most: int) -> None:
        self._left, self._lock = most, threading.Lock()

    def use(self, size: int) -> None:
        with self._lock:
            self._left -= size
            if self._left < 0:
                raise Unreadable(f"A message has more than {MOST_BYTES:,} bytes.")


@contextmanager
def _errors() -> Iterator[None]:
    """Turn the errors of a request into those of this module."""
    try:
        yield
    except httpx.HTTPStatusError as error:
        code = error.response.status_code
        if code == httpx.codes.UNAUTHORIZED:
            raise Denied("its key is not registered, or the clocks differ by minutes") from None
        if code == httpx.codes.FORBIDDEN:
            raise RunOver("the run has ended") from None
        if code in (httpx.codes.PRECONDITION_FAILED, httpx.codes.BAD_REQUEST):
            raise Denied(_reason(error.response)) from None
        raise Unreachable(f"it answers with the HTTP status {code}") from None
    except httpx.TransportError as error:
        raise Unreachable(_in_words(error)) from None
    except (ValueError, IndexError) as error:
        raise Unreachable(f"its answer cannot be read ({type(error).__name__})") from None
    except SystemExit:  # Flower ends the process if versions differ
        raise Denied("its version of Flower does not go together with the one here (details are above)") from None


def _reason(response: httpx.Response) -> str:
    """Return why the server refuses a request, in its own words."""
    known = FlowerError.from_json(response.text)
    text = f"HTTP status {response.status_code}" if known is None else f"{known.message} {known.public_details or ''}"
    return "".join(c for c in text.strip()[:300] if c.isprintable())


def _in_words(error: httpx.TransportError) -> str:
    text = str(error) or type(error).__name__
    return f"its certificate is not trusted: {text}" if "certificate" in text.lower() else text


def _client(address: str, ca: Path, key: ec.EllipticCurvePrivateKey) -> FleetHttpClient:
    if not re.fullmatch(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):\d{1,5}", address):
        raise invalid("address of the server", address, "HOST:PORT, without https://")
    try:
        certificate = ca.read_bytes()
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=certificate.decode("ascii"))
    except (OSError, ValueError, ssl.SSLError) as error:
        raise InputError(f"The certificate {ca} cannot be read: {error}") from None
    version, who = RuntimeVersionHttpInterceptor("SuperNode"), NodeAuthHttpInterceptor(key, key.public_key())
    return FleetHttpClient.from_server_address(address, False, certificate, interceptors=[version, who])


def _experiment_in(app: bytes) -> str:
    """Return the experiment in the settings of an app, a ZIP file."""
    try:
        with zipfile.ZipFile(io.BytesIO(app)) as files, files.open("pyproject.toml") as file:
            text = file.read(MOST_SETTINGS + 1)
        if len(text) > MOST_SETTINGS:
            raise Unreadable(f"The settings of the app have more than {MOST_SETTINGS:,} bytes.")
        experiment = tomllib.loads(text.decode())["tool"]["flwr"]["app"]["config"]["experiment"]
    except (zipfile.BadZipFile, OSError, ValueError, KeyError, TypeError, RuntimeError, NotImplementedError) as error:
        raise Unreadable(f"The app of the run has no experiment of fedstrata ({type(error).__name__}).") from None
    if not isinstance(experiment, str):
        raise Unreadable("The experiment of the app must be a text.")
    return experiment
