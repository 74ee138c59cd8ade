"""A node's connection: what it needs of Flower's private interfaces, and what it takes from a server."""

from __future__ import annotations

import ast
import hashlib
import importlib
import inspect
import io
import tomllib
import zipfile
from collections.abc import Iterator
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from flwr.app import Message, RecordDict
from flwr.app.message import make_message
from flwr.app.metadata import Metadata
from flwr.common.serde import message_to_proto, run_to_proto
from flwr.proto import fleet_pb2, message_pb2
from flwr.supercore.date import now
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.run import Run
from packaging.requirements import Requirement

from fedstrata.core.errors import InputError
from fedstrata.federation import keys, records
from fedstrata.federation.node import connection
from fedstrata.federation.node.connection import Connection, Denied, RunOver, Unreachable, Unreadable
from fedstrata.federation.packet import Packet
from fedstrata.federation.records import to_records

# --- the contract -----------------------------------------------------------------------------------------------------

REMEDY = "src/fedstrata/federation/node/connection.py must be adapted; until then, pin flwr below this version"


def imported() -> list[tuple[str, str]]:
    """What the connection imports from Flower."""
    spec = find_spec("fedstrata.federation.node.connection")
    assert spec is not None and spec.origin is not None
    tree = ast.parse(Path(spec.origin).read_text())
    froms = [n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and (n.module or "").startswith("flwr")]
    return [(str(node.module), alias.name) for node in froms for alias in node.names]


def test_only_the_connection_touches_what_is_private_to_flower() -> None:
    public = {"flwr.app", "flwr.serverapp", "flwr.clientapp"}
    package = Path(str(connection.__file__)).parents[2]
    for file in package.rglob("*.py"):
        nodes = [n for n in ast.walk(ast.parse(file.read_text())) if isinstance(n, ast.Import | ast.ImportFrom)]
        modules = [n.module or "" if isinstance(n, ast.ImportFrom) else n.names[0].name for n in nodes]
        private = {m for m in modules if m.startswith("flwr.") and m not in public}
        assert not private or file.name == "connection.py", f"{file}: {private}"


def test_the_pinned_versions_are_those_of_the_contract() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    (needed,) = (Requirement(line) for line in project["optional-dependencies"]["flower"] if line.startswith("flwr"))
    assert version("flwr") in needed.specifier
    assert "1.43.0" not in needed.specifier and "1.40.0" not in needed.specifier


@pytest.mark.parametrize(("module", "name"), imported(), ids=lambda word: word.rpartition(".")[2])
def test_flower_has_what_the_connection_imports(module: str, name: str) -> None:
    try:
        found = hasattr(importlib.import_module(module), name)
    except ImportError as error:
        pytest.fail(f"flwr {version('flwr')}: {error}. {REMEDY}.")
    assert found, f"flwr {version('flwr')} has no {name} in {module}. {REMEDY}."


FIELDS = {
    "ActivateNodeRequest": {"public_key", "heartbeat_interval"},
    "ActivateNodeResponse": {"node_id"},
    "DeactivateNodeRequest": {"node_id"},
    "PullMessagesRequest": {"node"},
    "PullMessagesResponse": {"messages_list", "message_object_trees"},
    "PushMessagesRequest": {"node", "messages_list", "message_object_trees", "clientapp_runtime_list"},
    "PushMessagesResponse": {"objects_to_push", "session_id"},
    "PullObjectRequest": {"node", "run_id", "object_id"},
    "PullObjectResponse": {"object_found", "object_available", "object_content"},
    "PushObjectRequest": {"node", "run_id", "object_id", "object_content", "session_id"},
    "ConfirmMessageReceivedRequest": {"node", "run_id", "message_object_id"},
}


@pytest.mark.parametrize("name", FIELDS)
def test_flowers_requests_have_the_fields_that_the_connection_uses(name: str) -> None:
    kind = getattr(fleet_pb2, name, None) or getattr(message_pb2, name)
    missing = FIELDS[name] - set(kind.DESCRIPTOR.fields_by_name)
    assert not missing, f"flwr {version('flwr')}: {name} has no {', '.join(sorted(missing))}. {REMEDY}."


def test_flowers_client_has_the_methods_that_the_connection_calls() -> None:
    client, calls = connection.FleetHttpClient, set()
    for node in ast.walk(ast.parse(inspect.getsource(connection))):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Attribute) and node.value.attr == "_client":
            calls.add(node.attr)
    assert len(calls) == 11
    for name in calls:
        assert hasattr(client, name), f"flwr {version('flwr')}: FleetHttpClient has no {name}. {REMEDY}."
    taken = list(inspect.signature(client.from_server_address).parameters)
    assert taken[:4] == ["server_address", "insecure", "root_certificates", "interceptors"], REMEDY


# --- a server ---------------------------------------------------------------------------------------------------------


class Server:
    """The part of Flower's Fleet API that a node calls, in this process."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.waiting: list[Message] = []
        self.late: dict[str, int] = {}
        self.came: list[Any] = []
        self.confirmed: list[str] = []
        self.error: Exception | None = None
        self.app = b""
        self.run = Run.create_empty(5)

    def put(self, content: RecordDict, **changes: Any) -> Message:
        about = Metadata(5, "", 1, 7, "", "0", now().timestamp(), 100.0, "query")
        message = make_message(metadata=about, content=content)
        message.metadata.__dict__["_message_id"] = message.object_id
        self.objects |= {name: part.deflate() for name, part in get_all_nested_objects(message).items()}
        self.waiting.append(message)
        return message

    def __getattr__(self, name: str) -> Any:
        def call(request: Any) -> Any:
            if self.error is not None:
                raise self.error
            return getattr(self, f"on_{name}")(request)

        return call

    def close(self) -> None: ...

    def on_ActivateNode(self, request: Any) -> Any:
        return SimpleNamespace(node_id=7)

    def on_DeactivateNode(self, request: Any) -> None:
        self.came.append("left")

    def on_PullMessages(self, request: Any) -> Any:
        first = [self.waiting.pop(0)] if self.waiting else []
        trees = [get_object_tree(message) for message in first]
        bare = [make_message(metadata=message.metadata, content=RecordDict()) for message in first]
        return fleet_pb2.PullMessagesResponse(
            messages_list=[message_to_proto(message) for message in bare], message_object_trees=trees
        )

    def on_PullObject(self, request: Any) -> Any:
        name = request.object_id
        self.late[name] = self.late.get(name, 0) - 1
        if self.late[name] >= 0:
            return message_pb2.PullObjectResponse(object_found=True, object_available=False)
        found = name in self.objects
        content = self.objects.get(name, b"")
        return message_pb2.PullObjectResponse(object_found=found, object_available=found, object_content=content)

    def on_ConfirmMessageReceived(self, request: Any) -> None:
        self.confirmed.append(request.message_object_id)

    def on_PushMessages(self, request: Any) -> Any:
        self.came.append(request)
        wanted = [request.message_object_trees[0].object_id]
        wanted += [
            part.object_id for tree in request.message_object_trees[0].children for part in [tree, *tree.children]
        ]
        return fleet_pb2.PushMessagesResponse(objects_to_push=wanted, session_id="s")

    def on_PushObject(self, request: Any) -> None:
        assert hashlib.sha256(request.object_content).hexdigest() == request.object_id
        self.objects[request.object_id] = request.object_content

    def on_GetRun(self, request: Any) -> Any:
        return SimpleNamespace(run=run_to_proto(self.run))

    def on_GetFab(self, request: Any) -> Any:
        return SimpleNamespace(fab=SimpleNamespace(content=self.app))


@pytest.fixture
def server() -> Server:
    return Server()


@pytest.fixture
def node(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Connection]:
    keys.make_key(tmp_path / "node.key")
    monkeypatch.setattr(connection, "_client", lambda *_: server)
    own = Connection("localhost:1", tmp_path / "ca.crt", tmp_path / "node.key")
    assert own.open() == 7
    yield own
    server.error = None
    own.close()
    assert server.came[-1] == "left"


def taken(node: Connection) -> Message:
    message = node.receive()
    assert message is not None
    return message


PACKET = Packet('{"kind": "work"}', b"", bytes(range(200)))


@pytest.mark.parametrize("size", [10, 3000])
def test_messages_come_and_answers_go(
    size: int, node: Connection, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "SMALL", 1000)
    monkeypatch.setattr(records, "PIECE", 1000)
    assert node.receive() is None
    packet = Packet("{}", b"", bytes(range(250)) * (size // 10))
    sent = server.put(to_records(packet))
    server.late = dict.fromkeys(server.objects, 2)  # the server is still receiving them
    message = taken(node)
    assert node.content(message) == packet
    answer = Packet("{}", b"s", packet.body[::-1])
    node.send(message, answer, 1.5)
    (pushed,) = server.came
    about = pushed.messages_list[0].metadata
    assert (about.reply_to_message_id, about.dst_node_id, about.run_id) == (sent.metadata.message_id, 1, 5)
    assert list(pushed.clientapp_runtime_list) == [1.5]
    node._pool.shutdown()
    assert server.confirmed == [sent.object_id]
    back = server.objects[about.message_id]
    assert about.message_id == hashlib.sha256(back).hexdigest()


def test_a_failure_goes_as_an_error_with_a_reason(node: Connection, server: Server) -> None:
    server.put(to_records(PACKET))
    node.fail(taken(node), "The process ended.")
    assert server.came[0].messages_list[0].error.reason == "The process ended."


@pytest.mark.parametrize(
    "content", [RecordDict({}), RecordDict({"header": to_records(PACKET)["header"], "x": to_records(PACKET)["header"]})]
)
def test_a_message_of_something_else_is_unreadable(content: RecordDict, node: Connection, server: Server) -> None:
    server.put(content)
    with pytest.raises(Unreadable, match="not a message"):
        node.content(taken(node))


def test_a_message_has_at_most_so_many_parts_and_bytes(
    node: Connection, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "MOST_BYTES", 300)
    monkeypatch.setattr(connection, "PIECE", 100)
    server.put(to_records(PACKET))
    with pytest.raises(Unreadable, match="more than 300 bytes"):
        node.content(taken(node))
    monkeypatch.setattr(connection, "PIECE", 150)
    server.put(to_records(PACKET))
    with pytest.raises(Unreadable, match="has 3 parts"):
        node.content(taken(node))


def test_a_part_that_never_comes_is_not_waited_for_without_end(
    node: Connection, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "PATIENCE", 0.05)
    server.put(to_records(PACKET))
    server.late = dict.fromkeys(server.objects, 10**6)
    with pytest.raises(Unreadable, match="does not have a part"):
        node.content(taken(node))


def status(code: int, text: str = "") -> Exception:
    request = httpx.Request("POST", "https://localhost")
    return httpx.HTTPStatusError("", request=request, response=httpx.Response(code, text=text, request=request))


@pytest.mark.parametrize(
    ("error", "kind", "said"),
    [
        (httpx.ConnectError("Connection refused"), Unreachable, "Connection refused"),
        (httpx.ReadTimeout(""), Unreachable, "ReadTimeout"),
        (httpx.ConnectError("[SSL: CERTIFICATE_VERIFY_FAILED]"), Unreachable, "its certificate is not trusted"),
        (status(503), Unreachable, "status 503"),
        (status(500), Unreachable, "status 500"),
        (status(401), Denied, "its key is not registered"),
        (
            status(412, '{"code": 2004, "detail": "Failed to activate SuperNode.\\u001b[2J"}'),
            Denied,
            "Failed to activate",
        ),
        (status(412, "?"), Denied, "status 412"),
        (status(403), RunOver, "ended"),
        (ValueError("Invalid protobuf response payload"), Unreachable, "cannot be read"),
        (SystemExit(1), Denied, "version of Flower"),
    ],
)
def test_errors_of_the_network_are_told_apart(
    error: Exception, kind: Any, said: str, node: Connection, server: Server
) -> None:
    server.error = error
    with pytest.raises(kind, match=said) as raised:
        node.receive()
    assert str(raised.value).isprintable()


# --- the app of a run -------------------------------------------------------------------------------------------------

TOML = '[tool.flwr.app.config]\nexperiment = "[model]"\n'


def app(text: str | None = TOML, name: str = "pyproject.toml") -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as content:
        content.writestr("harm.py", "raise SystemExit")
        if text is not None:
            content.writestr(name, text)
    return file.getvalue()


def submitted(server: Server, content: bytes, **override: Any) -> None:
    server.app = content
    server.run.fab_hash, server.run.override_config = hashlib.sha256(content).hexdigest(), override


def test_of_the_app_only_the_experiment_is_read(node: Connection, server: Server) -> None:
    submitted(server, app())
    assert node.experiment(5) == "[model]"
    submitted(server, app(), experiment="[other]")
    assert node.experiment(5) == "[other]"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"no archive", "BadZipFile"),
        (app(None), "KeyError"),
        (app("no TOML"), "TOMLDecodeError"),
        (app("a = 1"), "KeyError"),
        (app("[tool]\nflwr = 3"), "TypeError"),
        (app("[tool.flwr.app.config]\nexperiment = 3"), "must be a text"),
        (app(TOML + "#" * (1 << 20)), "more than 1,048,576 bytes"),
    ],
)
def test_an_app_without_an_experiment_is_unreadable(
    content: bytes, said: str, node: Connection, server: Server
) -> None:
    submitted(server, content)
    with pytest.raises(Unreadable, match=said):
        node.experiment(5)


def test_an_app_that_is_not_that_of_the_run_is_refused(node: Connection, server: Server) -> None:
    submitted(server, app())
    server.app = app(TOML + "\n")
    with pytest.raises(Unreadable, match="another app"):
        node.experiment(5)


@pytest.mark.parametrize("address", ["host", "https://host:9443", "host:", ":9443", "a b:9443", "host:9443/path", ""])
def test_an_address_is_a_host_and_a_port(address: str, tmp_path: Path) -> None:
    keys.make_key(tmp_path / "node.key")
    with pytest.raises(InputError, match="The address of the server must be HOST:PORT"):
        Connection(address, tmp_path / "ca.crt", tmp_path / "node.key")


def test_a_node_without_a_certificate_does_not_start(tmp_path: Path) -> None:
    keys.make_key(tmp_path / "node.key")
    for ca in ("missing", "node.key"):
        with pytest.raises(InputError, match=r"The certificate .* cannot be read"):
            Connection("localhost:1", tmp_path / ca, tmp_path / "node.key")
