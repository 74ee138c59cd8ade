"""Errors to which the place where they arose is added."""

from __future__ import annotations

import pytest

from fedstrata.clients.state import LostState
from fedstrata.core.errors import FedstrataError, InputError, with_context, within


class TwoArguments(FedstrataError):
    """An error that is not made from a message alone."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(detail)
        self.kind = kind


def test_a_place_is_added_and_attributes_stay() -> None:
    error = with_context(LostState("It is lost.", (1, 2)), "round 3")
    assert type(error) is LostState and str(error) == "It is lost. (round 3)" and error.clients == (1, 2)


def test_within_adds_a_place_to_errors_of_any_class() -> None:
    with pytest.raises(TwoArguments, match=r"^too long \(client 4\)$") as caught, within("client 4", FedstrataError):
        raise TwoArguments("size", "too long")
    assert caught.value.kind == "size"


def test_within_leaves_errors_of_other_kinds_alone() -> None:
    with pytest.raises(FedstrataError, match=r"^here$"), within("there", InputError):
        raise FedstrataError("here")
