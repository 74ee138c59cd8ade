"""The Flower transport: replies, errors, and whatever a node puts into its records."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Metadata, RecordDict
from flwr.app.message import make_message
from flwr.supercore.date import now

from fedstrata.federation.transport import FlowerTransport, to_records
from fedstrata.federation.wire import Reply


def brought(content: RecordDict | None = None, source: int = 7, to: str = "message", **error: Any) -> Reply:
    """The reply to a message to node 7, as the transport returns it."""
    about = Metadata(1, "reply", source, 1, to, "0", now().timestamp(), 100.0, "query")
    message = make_message(metadata=about, content=content, error=Error(**error) if error else None)
    reply = FlowerTransport(SimpleNamespace(pull_messages=lambda _: [message]), 60.0).fetch("message", 7)
    assert reply is not None
    return reply


HEADER = ConfigRecord({"text": "{}", "signature": b""})


def test_a_reply_of_the_right_node_is_accepted() -> None:
    numbers = np.arange(6, dtype=np.int8).reshape(2, 3)
    reply = brought(to_records(Reply("{}", b"s", (numbers, numbers[:1]))))
    assert (reply.text, reply.signature, reply.error) == ("{}", b"s", "")
    assert [a.tolist() for a in reply.arrays] == [numbers.tolist(), numbers[:1].tolist()]
    assert reply.arrays[0].dtype == np.int8


@pytest.mark.parametrize(("source", "to"), [(8, "message"), (7, "another"), (8, "another"), (0, "message")])
def test_a_reply_that_claims_to_be_something_else_is_forged(source: int, to: str) -> None:
    assert brought(to_records(Reply("{}")), source, to).kind == "forged"


def test_an_error_of_flower_is_passed_on() -> None:
    assert (
        brought(None, 1, code=8, reason="ClientApp stopped responding.").error
        == "failed (ClientApp stopped responding.)"
    )


def raw(**changes: Any) -> RecordDict:
    """Records with an array as a node could write it by hand."""
    whole = Array(np.zeros(3, dtype=np.float32))
    array = Array(**{"dtype": "float32", "shape": (3,), "stype": whole.stype, "data": whole.data, **changes})
    return RecordDict({"header": HEADER, "arrays": ArrayRecord({"000000": array})})


def npy(header: str, data: bytes = b"") -> bytes:
    text = header.ljust(117) + "\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode() + data


@pytest.mark.parametrize(
    "content",
    [
        RecordDict({}),
        RecordDict({"header": HEADER}),
        RecordDict({"header": HEADER, "arrays": ConfigRecord({"a": "b"})}),
        RecordDict({"header": ArrayRecord({}), "arrays": ArrayRecord({})}),
        RecordDict({"header": ConfigRecord({"text": "{}"}), "arrays": ArrayRecord({})}),
        RecordDict({"header": ConfigRecord({"text": b"{}", "signature": b""}), "arrays": ArrayRecord({})}),
        RecordDict({"header": ConfigRecord({"text": 3, "signature": b""}), "arrays": ArrayRecord({})}),
        raw(data=b""),
        raw(data=b"\x93NUMPY"),
        raw(data=b"garbage" * 9),
        raw(stype="pickle"),
        raw(data=npy("{'descr': '|O', 'fortran_order': False, 'shape': (1,), }", b"cos\nsystem\n")),
        raw(data=npy("{'descr': '<f4', 'fortran_order': False, 'shape': (1000000000000000,), }")),
        raw(data=npy("{'descr': '<f4', 'fortran_order': False, 'shape': (-4,), }", b"1234")),
        raw(data=npy("__import__('os').system('true')")),
    ],
)
def test_anything_else_that_a_node_sends_is_an_error_of_that_node(content: RecordDict) -> None:
    assert brought(content).error.startswith("sent something that is not an answer")
