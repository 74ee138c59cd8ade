"""A secure sum over the nodes of a federation: the server learns the mean of their answers, and none of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from fedstrata.clients.engine import Request, nbytes
from fedstrata.core.errors import InputError
from fedstrata.core.trees import tree_flatten, tree_leaves, tree_unflatten
from fedstrata.experiments.schema import FederationTable
from fedstrata.federation import keys, wire
from fedstrata.federation.secure import fixedpoint
from fedstrata.federation.secure.collector import Collector
from fedstrata.federation.secure.exclusions import is_summed
from fedstrata.federation.secure.fields import SHARE
from fedstrata.federation.secure.messages import (
    ADVERT,
    SEALED,
    SIGNATURE,
    Advert,
    SecureError,
    Session,
    pack_rows,
    read_rows,
    usual_signature,
)
from fedstrata.federation.secure.participant import Phase
from fedstrata.federation.server.inbox import CheckedAnswer, Verified, announced, is_count, layout_of
from fedstrata.federation.server.nodes import SHORT, Nodes
from fedstrata.federation.wire import Call, Refused

FIRST = 2
"""How many whole numbers precede the answer in a vector: the weight, and the number of samples."""

Deviating = Callable[[dict[int, CheckedAnswer]], dict[int, Refused]]
"""Which of the clients' answers differ from the others in form or steps; their values are not known."""


def check_request(request: Request) -> None:
    """Raise if the answers to a request cannot be summed securely."""
    if not is_summed(request):
        raise InputError(
            f"A secure sum gives the server only means over different clients, but the answers to {request.label} are "
            "needed of every single one, or as a maximum, or of clients that were drawn twice. Choose an algorithm or "
            "a problem that takes only means, or set federation.secure = false."
        )


@dataclass(frozen=True)
class SecureMean:
    """The mean of the survivors' answers.

    value: tensors [1, ...].
    kept:  the survivors that kept something.
    """

    value: Any
    survivors: list[int]
    samples: int
    steps: int
    kept: list[int]


class SecureSum:
    """One attempt at the mean of the answers to a request.

    refused:  the clients that failed, and why; survivors among them are in the mean nevertheless.
    sent:     the bytes of arrays that the clients have sent.
    received: the bytes of arrays that they have received, beside the message of the request.
    """

    def __init__(self, nodes: Nodes, table: FederationTable, request: Request, calls: Mapping[int, Call]) -> None:
        threshold, clock = table.needed(len(request.cohort)), request.clock
        self.refused: dict[int, Refused] = {}
        self.sent = self.received = 0
        self._nodes, self._bits = nodes, table.bits
        self._needed = max(threshold, nodes.policy.needed(len(request.cohort)))
        self._calls = {
            k: replace(call, weighting=request.weighting or "", threshold=threshold) for k, call in calls.items()
        }
        session = Session(nodes.run, clock.round, request.exchange, request.attempt, threshold)
        about = wire.asked(next(iter(self._calls.values())), request.message)
        self._collector = Collector(session, self._verify, about)
        self._answers: dict[int, CheckedAnswer] = {}

    def mean(self, message: Any, limit: int, deviating: Deviating) -> SecureMean | None:
        """Return the mean of the clients' answers to a message; None if too few could be summed.

        limit: the largest size of an answer in bytes.
        """
        try:
            self._agree_on_keys()
            self._collect(message, limit, deviating)
            return self._open()
        except SecureError as error:
            why = Refused("error", f"could not be summed with the others: {error}")
            self.refused = dict.fromkeys(self._calls, why) | self.refused
            return None

    # --- the phases ---

    def _agree_on_keys(self) -> None:
        collector = self._collector

        def keys_of(client: int, reply: Verified) -> None:
            rows = read_rows(_content(reply), ADVERT, "keys")
            if set(rows) != {client}:
                raise Refused("type", "sent keys that are not its own")
            collector.take_advert(client, Advert.of(rows[client]))

        self._each("keys", dict.fromkeys(self._calls, ()), keys_of)
        collector.close_adverts()
        adverts = pack_rows({client: advert.row for client, advert in collector.adverts.items()}, ADVERT)
        public = tuple(self._nodes.roster.public[client] for client in sorted(collector.adverts))
        self._each(
            "shares",
            dict.fromkeys(sorted(collector.adverts), (*adverts, public)),
            lambda client, reply: collector.take_shares(client, read_rows(_content(reply), SEALED, "shares")),
        )

    def _collect(self, message: Any, limit: int, deviating: Deviating) -> None:
        """Ask for the work; add the masked vectors of those whose answers have the usual form."""
        collector = self._collector
        contents = {k: (pack_rows(collector.inbox_of(k), SEALED), message) for k in sorted(collector.sealed)}
        self.received -= nbytes(message) * len(contents)
        vectors: dict[int, np.ndarray] = {}

        def masked(client: int, reply: Verified) -> None:
            self._answers[client], vectors[client] = read_masked(reply, limit)

        self._each("masked", contents, masked, 2 * limit + SHORT)
        for client, error in deviating(self._answers).items():
            self.refused[client] = error
            del self._answers[client]
        for client in sorted(self._answers):
            self._try(client, partial(collector.take_masked, client, vectors.pop(client)))
        survivors = collector.close_masked()
        if len(survivors) < self._needed:
            raise SecureError(f"Only {len(survivors)} nodes answered, fewer than the quorum of {self._needed}.")

    def _open(self) -> SecureMean:
        collector = self._collector
        survivors = collector.survivors

        def signature(client: int, reply: Verified) -> None:
            rows = read_rows(_content(reply), SIGNATURE, "signatures")
            collector.take_signature(client, rows.get(client, bytes(SIGNATURE)))

        agreed = (torch.tensor(survivors, dtype=torch.int64),)
        self._each("agree", dict.fromkeys(survivors, agreed), signature)
        signatures = pack_rows(collector.close_signatures(), SIGNATURE)
        self._each(
            "open",
            dict.fromkeys(sorted(collector.signed), signatures),
            lambda client, reply: collector.take_opened(client, read_rows(_content(reply), SHARE, "shares")),
        )
        return self._mean_of(collector.total())

    def _mean_of(self, total: np.ndarray) -> SecureMean:
        answers = [self._answers[client] for client in self._collector.survivors]
        weight, samples = total[:FIRST].view(np.int64).tolist()
        if weight < len(answers) or not 0 <= samples < len(answers) << 31:
            raise SecureError("The sum of the weights or samples is wrong: a node has not kept to the protocol.")
        mean = torch.from_numpy(fixedpoint.decoded(total[FIRST:], self._bits) / weight)
        leaves, nesting = tree_flatten(answers[0].value)
        parts = torch.split(mean, [leaf[0].numel() for leaf in leaves])
        like = [leaf.dtype if leaf.is_floating_point() else torch.float64 for leaf in leaves]
        pairs = zip(parts, leaves, like, strict=True)
        value = tree_unflatten([part.reshape(leaf.shape).to(dtype) for part, leaf, dtype in pairs], nesting)
        kept = [client for client in self._collector.survivors if self._answers[client].kept]
        return SecureMean(value, list(self._collector.survivors), samples, max(a.steps for a in answers), kept)

    # --- messages ---

    def _each(
        self,
        phase: Phase,
        contents: Mapping[int, Any],
        read: Callable[[int, Verified], None],
        limit: int = SHORT,
    ) -> None:
        """Send each client its content, and read the replies in the order of the clients."""
        calls = {client: replace(self._calls[client], kind=phase) for client in contents}
        packed = {client: wire.pack(content) for client, content in contents.items()}
        replies, refused = self._nodes.ask_each(calls, packed, max(limit, SHORT * (1 + len(contents) // 1000)))
        self.refused |= refused
        self.received += sum(nbytes(content) for content in contents.values())
        for client in sorted(replies):
            reply = replies.pop(client)
            self.sent += sum(array.nbytes for array in reply.arrays)
            self._try(client, partial(read, client, reply))

    def _try(self, client: int, action: Callable[[], None]) -> None:
        try:
            action()
        except Refused as error:
            self.refused[client] = error

    def _verify(self, client: int, signature: bytes, content: bytes) -> bool:
        return keys.is_signed(self._nodes.roster.public[client], usual_signature(signature), content)


def _content(reply: Verified) -> Any:
    return wire.unpack(reply.header.get("form"), reply.arrays)


def read_masked(reply: Verified, limit: int) -> tuple[CheckedAnswer, np.ndarray]:
    """Check a masked answer; return what is known of it, with zeros for its value, and its vector."""
    header = reply.header
    if header.get("nan") is True:
        raise Refused("nan", "answered with NaN or infinity")
    like = announced(header.get("like"), limit)
    steps, kept = header.get("steps"), header.get("kept")
    if not is_count(steps) or not isinstance(kept, bool):
        raise Refused("type", "did not report its number of steps, or whether it kept something")
    content = _content(reply)
    if not isinstance(content, tuple) or len(content) != 1 or not isinstance(content[0], torch.Tensor):
        raise Refused("type", "sent a masked answer that is not one tensor")
    vector = content[0]
    size = FIRST + sum(leaf.numel() for leaf in tree_leaves(like))
    if vector.dtype != torch.int64 or tuple(vector.shape) != (size,):
        raise Refused("shape", f"sent {vector.dtype} of shape {tuple(vector.shape)} instead of {size} masked numbers")
    sent = sum(array.nbytes for array in reply.arrays)
    return CheckedAnswer(like, layout_of(like), 0, steps, sent, kept), vector.numpy().view(np.uint64)
