"""Messages over Flower: packets and records, replies, errors, and whatever a node puts into its records."""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Metadata, RecordDict
from flwr.app.message import make_message
from flwr.supercore.date import now

from fedstrata.federation import records
from fedstrata.federation.packet import Packet, from_bytes, to_bytes
from fedstrata.federation.records import TooLarge, from_records, to_records
from fedstrata.federation.transport import FORMAT, FlowerTransport
from fedstrata.federation.wire import DTYPES, Reply

LIMIT = 1 << 10


def brought(content: RecordDict | None = None, source: int = 7, to: str = "message", **error: Any) -> Reply:
    """The reply to a message to node 7, as the transport returns it."""
    about = Metadata(1, "reply", source, 1, to, "0", now().timestamp(), 100.0, "query")
    message = make_message(metadata=about, content=content, error=Error(**error) if error else None)
    reply = FlowerTransport(SimpleNamespace(pull_messages=lambda _: [message]), 60.0).fetch("message", 7, LIMIT)
    assert reply is not None
    return reply


def recorded(reply: Reply) -> RecordDict:
    return to_records(reply.packet())


@pytest.mark.parametrize("dtype", DTYPES)
def test_arrays_come_back_as_they_were(dtype: str) -> None:
    arrays = (np.arange(6).reshape(2, 3).astype(dtype), np.zeros((), dtype), np.zeros((3, 0), dtype), np.ones(1, dtype))
    arrays += (arrays[0].T, *(np.full(1, k).astype(dtype) for k in range(11)))
    again = from_bytes(to_bytes(arrays))
    assert len(again) == len(arrays)
    for ours, theirs in zip(again, arrays, strict=True):
        assert ours.dtype == theirs.dtype and ours.shape == theirs.shape and (ours == theirs).all()
    assert from_bytes(to_bytes(())) == ()


def test_a_small_message_is_one_record_and_a_large_one_has_pieces_that_nodes_share(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(records, "SMALL", 100)
    monkeypatch.setattr(records, "PIECE", 1000)
    for size, pieces in ((0, 0), (100, 0), (101, 1), (1000, 1), (1001, 2), (12_345, 13)):
        packets = [Packet(f"to {node}", b"s", (bytes(range(251)) * 50)[:size]) for node in range(2)]
        sent = [to_records(packet) for packet in packets]
        assert [len(content) for content in sent] == [1 + pieces] * 2
        assert [from_records(content, 1 << 20) for content in sent] == packets
        ids = [{name: record.object_id for name, record in content.items()} for content in sent]
        assert all((ids[0][name] == ids[1][name]) == (name != "header") for name in ids[0])


def test_a_message_that_is_too_large_is_not_put_together() -> None:
    content = to_records(Packet("text", b"", bytes(100_000)))
    assert from_records(content, 100_004).text == "text"
    with pytest.raises(TooLarge) as error:
        from_records(content, 100_003)
    assert error.value.size == 100_004
    reply = brought(to_records(Packet("{}", b"s", bytes(LIMIT + FORMAT))))
    assert reply.kind == "size" and reply.error == f"answered with {LIMIT + FORMAT + 2:,} bytes, more than {LIMIT:,}"


def test_a_message_of_an_earlier_format_is_read_as_far_as_its_text_which_says_so() -> None:
    header = ConfigRecord({"text": '{"protocol": 2}', "signature": b""})
    content = RecordDict({"header": header, "arrays": ArrayRecord({"000000": Array(np.zeros(3))})})
    assert from_records(content, LIMIT) == Packet('{"protocol": 2}')


def test_a_reply_of_the_right_node_is_accepted() -> None:
    numbers = np.arange(6, dtype=np.int8).reshape(2, 3)
    reply = brought(recorded(Reply("{}", b"s", (numbers, numbers[:1]))))
    assert (reply.text, reply.signature, reply.error) == ("{}", b"s", "")
    assert [a.tolist() for a in reply.arrays] == [numbers.tolist(), numbers[:1].tolist()]
    assert reply.arrays[0].dtype == np.int8


@pytest.mark.parametrize(("source", "to"), [(8, "message"), (7, "another"), (8, "another"), (0, "message")])
def test_a_reply_that_claims_to_be_something_else_is_forged(source: int, to: str) -> None:
    assert brought(recorded(Reply("{}")), source, to).kind == "forged"


def test_an_error_of_flower_is_passed_on() -> None:
    assert (
        brought(None, 1, code=8, reason="ClientApp stopped responding.").error
        == "failed (ClientApp stopped responding.)"
    )


GOOD = {"text": "{}", "signature": b"", "bytes": b"", "pieces": 0}


def raw(more: Mapping[str, Any] | None = None, **changes: Any) -> RecordDict:
    """Records as a node could write them by hand."""
    header = {name: value for name, value in (GOOD | changes).items() if value is not None}
    return RecordDict({"header": ConfigRecord(header), **(more or {})})


def tensors(data: bytes = b"", **header: Any) -> RecordDict:
    """Records with a safetensors file as a node could write it by hand."""
    text = json.dumps(header).encode()
    return raw(bytes=len(text).to_bytes(8, "little") + text + data)


def announced(**changes: Any) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [3], "data_offsets": [0, 12], **changes}


@pytest.mark.parametrize(
    "content",
    [
        RecordDict({}),
        RecordDict({"header": ArrayRecord({})}),
        raw(text=None),
        raw(text=b"{}"),
        raw(text=3),
        raw(signature="s"),
        raw(bytes=None),
        raw(bytes="text"),
        raw(pieces="0"),
        raw(pieces=True),
        raw(pieces=-1),
        raw(pieces=1),
        raw(pieces=1 << 40),
        raw({"other": ConfigRecord({})}),
        raw({"other": ConfigRecord({"bytes": b""})}, pieces=1),
        raw({"arrays-000000": ConfigRecord({"bytes": "text"})}, pieces=1),
        raw({"arrays-000000": ArrayRecord({})}, pieces=1),
        raw(bytes=b"garbage" * 9),
        raw(bytes=b"\x93NUMPY\x01\x00" + bytes(100)),
        raw(bytes=(1 << 40).to_bytes(8, "little")),
        raw(bytes=(20).to_bytes(8, "little") + b"[" * 20),
        tensors(bytes(12), **{"000000": announced(dtype="pickle")}),
        tensors(bytes(12), **{"000000": announced(shape=[4])}),
        tensors(bytes(12), **{"000000": announced(shape=[-3])}),
        tensors(bytes(12), **{"000000": announced(shape=[1 << 40], data_offsets=[0, 1 << 42])}),
        tensors(bytes(12), **{"000000": announced(data_offsets=[4, 16])}),
        tensors(bytes(16), **{"000000": announced()}),
        tensors(bytes(12), **{"000001": announced()}),
        tensors(bytes(12), name=announced()),
        tensors(bytes(12), **{"000000": announced(), "000001": announced()}),
    ],
)
def test_anything_else_that_a_node_sends_is_an_error_of_that_node(content: RecordDict) -> None:
    assert brought(content).error.startswith("sent something that is not an answer")
