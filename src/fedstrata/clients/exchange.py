"""An exchange: send a message, collect the answers, and leave out clients whose answers cannot be used."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import torch

from fedstrata.clients.engine import Answer, Engine, Request, Usage, nbytes
from fedstrata.clients.faults import UNUSABLE, Fault, Faults, QuorumError, in_words
from fedstrata.core.errors import FedstrataError, listed
from fedstrata.core.trees import TreeSpec, tree_flatten, tree_unflatten

LARGEST = 1e15
"""An answer with a larger number is left out: its square, summed over a model, would overflow."""

FAR = 1e6
"""A client is named if its numbers are this many times as large as any other's, and the run diverges."""

Rejoin = Callable[[np.ndarray], None]
"""Makes clients, given by number, keep again what they have lost."""


class Exchange:
    """One exchange with a cohort. Iterate over it for the answers; afterwards ``answered`` and ``used`` are final.

    answered: who has answered, a mask over the cohort.
    used:     what the answers cost.
    faults:   the clients that were left out of an attempt.
    """

    def __init__(
        self, engine: Engine, request: Request, usage: Usage, log: list[Fault], rejoin: Rejoin | None = None
    ) -> None:
        self.engine, self.request = engine, request
        self.answered = request.answered
        self.answered[:] = engine.policy is None
        self.used = Usage()
        self.faults: list[Fault] = []
        self._form: _Form | None = None
        self._largest: dict[int, float] = {}
        self._usage, self._log, self._rejoin = usage, log, rejoin

    def __iter__(self) -> Iterator[Answer]:
        """Yield the answers, attempt by attempt, until enough clients have answered."""
        policy, request = self.engine.policy, self.request
        message = nbytes(request.message)
        try:
            while len(request.places):
                self._usage.bytes_down += len(request.places) * message
                yield from self._attempt(request)
                if policy is None:
                    return
                silent = self._ask_again(request.attempt, policy)
                request = request._replace(places=silent, answered=self.answered, attempt=request.attempt + 1)
        finally:
            self._log += self.faults
            if len(self._largest) > 1:
                self.engine.outlier = self._outlier() or self.engine.outlier

    def _attempt(self, request: Request) -> Iterator[Answer]:
        faults: list[Fault] = []
        for answer in self.engine.answers(request):
            if isinstance(answer, Fault):
                faults.append(answer)
                continue
            leaves, nesting = tree_flatten(answer.value)
            request.check(leaves, len(answer.places))
            self.used.bytes_up += answer.nbytes
            self._usage.bytes_down += answer.received
            self.used.samples += answer.samples
            self.used.steps = max(self.used.steps, answer.steps)
            form = nesting, tuple((leaf.shape[1:], leaf.dtype) for leaf in leaves)
            if not self._alike(request, answer, form, faults):
                continue
            if self.engine.policy is not None:
                answer = self._finite(request, answer, faults)
            if len(answer.places):
                received = answer.value if request.query else self.engine.channel.receive(answer.value)
                yield answer if received is answer.value else answer._replace(value=received)
        if self.engine.policy is None:
            return
        self.answered, faults = self.engine.agree(self.answered, faults)
        answered = set(request.cohort[self.answered].tolist())
        self.faults = [replace(f, left_out=f.client not in answered) for f in [*self.faults, *faults]]

    def _alike(self, request: Request, answer: Answer, form: _Form, faults: list[Fault]) -> bool:
        """Whether an answer has the form of the first one; otherwise its clients are left out, or it is an error.

        Tensors of different shapes would be broadcast, and reduced to numbers that no client meant.
        """
        self._form = self._form or form
        if form == self._form:
            return True
        clients = request.cohort[answer.places].tolist()
        if self.engine.policy is not None:
            faults += [request.fault(k, "shape", "answered with a different shape from the first") for k in clients]
            return False
        who = listed([self.engine.side.data.name_of(k) for k in clients])
        raise FedstrataError(
            f"{request.label} must return tensors of the same shapes and dtypes for every client. Got "
            f"{_in_words(form)} from {who}, but {_in_words(self._form)} from the first ones."
        )

    def _finite(self, request: Request, answer: Answer, faults: list[Fault]) -> Answer:
        """Return the answer without the clients whose numbers are not finite, or so large that sums would not be."""
        leaves, shape = tree_flatten(answer.value)
        numbers = [leaf.reshape(len(leaf), -1) for leaf in leaves if leaf.is_floating_point() and leaf.numel()]
        if not numbers:
            self.answered[answer.places] = True
            return answer
        ends = [torch.aminmax(n, dim=1) for n in numbers]  # NaN if there is any
        largest = torch.stack([torch.maximum(-low, high).double() for low, high in ends]).amax(0)
        finite = largest < (math.inf if request.query else LARGEST)
        good = finite.cpu().numpy()
        places = answer.places[good]
        self.answered[places] = True
        if not request.query:
            self._largest |= dict(zip(request.cohort[places].tolist(), largest[finite].tolist(), strict=True))
        if good.all():
            return answer
        for client, size in zip(request.cohort[answer.places].tolist(), largest.tolist(), strict=True):
            if not size < (math.inf if request.query else LARGEST):
                what = f"numbers up to {size:.0e}" if math.isfinite(size) else "NaN or infinity"
                faults.append(request.fault(client, "nan", f"answered with {what}"))
        return answer._replace(places=places, value=tree_unflatten([leaf[finite] for leaf in leaves], shape))

    def _outlier(self) -> str:
        """Return a sentence that names a client whose numbers are much larger than all others'; empty if none is."""
        (client, most), (_, second), *_ = sorted(self._largest.items(), key=lambda item: -item[1])[:2]
        if not 0 < FAR * second < most:
            return ""
        who, round = self.engine.side.data.name_of(client), self.request.clock.round + 1
        return f" In round {round} {who} answered with numbers up to {most:.0e}, the others up to {second:.0e}."

    def _ask_again(self, attempt: int, policy: Faults) -> np.ndarray:
        """Return the places of the clients to ask again, none if enough have answered; raise below the quorum."""
        cohort = self.request.cohort
        needed = 0 if self.request.rejoins else policy.needed(len(cohort))
        if self.answered.sum() < needed and attempt < policy.retries:
            unusable = [f.client for f in self.faults if f.kind in UNUSABLE]
            silent = ~self.answered & ~np.isin(cohort, unusable)
            if silent.any():
                return np.flatnonzero(silent)
        lost = ~self.answered & np.isin(cohort, [f.client for f in self.faults if f.kind == "lost"])
        if self._rejoin is not None and self.answered.sum() < needed <= (self.answered | lost).sum():
            rejoin, self._rejoin = self._rejoin, None  # once
            rejoin(np.unique(cohort[lost]))
            return np.flatnonzero(lost)
        self._usage.failed += int((~self.answered).sum())
        if self.answered.sum() < needed:
            raise QuorumError(self._no_quorum(attempt, needed))
        return np.empty(0, dtype=np.int64)

    def _no_quorum(self, attempt: int, needed: int) -> str:
        cohort = self.request.cohort
        last = {f.client: f for f in self.faults}
        missing = [last[k] for k in np.unique(cohort[~self.answered]).tolist() if k in last]
        hint = ""
        if not self.answered.any() and all(f.kind == "nan" for f in missing):
            hint = " No answer was finite: try a smaller learning rate."
        again = f" after asking {attempt + 1} times" if attempt else ""
        return (
            f"Only {int(self.answered.sum())} of {len(cohort)} clients answered {self.request.label} in round "
            f"{self.request.clock.round + 1}{again}, fewer than the quorum of {needed}. Left out: "
            f"{in_words(missing, self.engine.side.data.client_names)}.{hint}{self.engine.outlier}"
        )


_Form = tuple[TreeSpec, tuple[tuple[torch.Size, torch.dtype], ...]]
"""The nesting of an answer, and the shape and dtype of one client's row of each tensor."""


def _in_words(form: _Form) -> str:
    rows = [f"{tuple(shape)} {str(dtype).removeprefix('torch.')}" for shape, dtype in form[1]]
    return f"{len(rows)} tensor{'' if len(rows) == 1 else 's'} ({', '.join(rows)})"
