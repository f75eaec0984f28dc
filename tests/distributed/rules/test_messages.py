"""What comes from the network is checked when it is decoded: kinds, types and bounds."""

from __future__ import annotations

from typing import Any, get_args

import hypothesis
import hypothesis.strategies as st
import msgspec
import pytest

from memstore.distributed.rules import messages
from memstore.distributed.rules.messages import (
    Answer,
    ClaimGroups,
    Commit,
    Found,
    Give,
    IsRoster,
    List,
    Lookup,
    Place,
    Prepare,
    Release,
    Request,
    RosterChange,
    Wait,
)
from memstore.distributed.rules.nouns import (
    Call,
    Change,
    Grant,
    Member,
    Roster,
)
from memstore.engine import PendingPart
from tests.examples import examples

encode = msgspec.msgpack.encode
replace = msgspec.structs.replace
REQUESTS = msgspec.msgpack.Decoder(Request)
ANSWERS = msgspec.msgpack.Decoder(Answer)
CALL = Call(1, 0, 1, 1)
GRANT = Grant(1 << 40, 1)
PART = PendingPart(b"k", "a", 0, 0, 1, 7, 7, host=b"m" * 16)


class Sent(msgspec.Struct, array_like=True):
    """A message as it lies in a frame: its number, and what `Prepare` would not be made of here."""

    number: int
    call: Call
    part: PendingPart
    content: bytes
    grant: Grant


def test_every_kind_has_a_number_of_its_own() -> None:
    kinds = [*get_args(Request), *get_args(Answer)]
    numbers = [kind.__struct_config__.tag for kind in kinds]
    assert len(set(numbers)) == len(kinds) == 83
    assert {kind.__name__ for kind in kinds} <= set(vars(messages))


@hypothesis.settings(max_examples=examples(50))
@hypothesis.given(
    st.lists(st.binary(min_size=1, max_size=500), min_size=1, max_size=20),
    st.none() | st.binary(max_size=100),
    st.none() | st.integers(0, 2**63 - 1),
)
def test_requests_arrive_as_they_were_sent(keys: list[bytes], body: bytes | None, expect: int | None) -> None:
    places = (Place(b"m" * 16, 7),)
    for request in (
        Commit(CALL, tuple(Change(key, body, places, expect) for key in keys), (GRANT,)),
        Lookup(tuple(keys), (GRANT,), pin=True),
        Prepare(CALL, replace(PART, key=keys[0], expect=expect), body or b"", GRANT),
    ):
        assert REQUESTS.decode(encode(request)) == request


MEMBERS = tuple(Member(b"%016d" % number, f"h{number}") for number in range(8))


@st.composite
def rosters(draw: st.DrawFn) -> Roster:
    def some() -> tuple[bytes, ...]:
        return tuple(draw(st.lists(st.sampled_from([member.id for member in MEMBERS]), unique=True)))

    members = tuple(draw(st.lists(st.sampled_from(MEMBERS), min_size=1, unique=True)))
    members = tuple(replace(one, is_owner=draw(st.booleans())) for one in members)
    position = draw(st.integers(1, 2)), draw(st.integers(1, 9))
    return Roster(b"C" * 16, *position, members, members[0].id, voters=some(), leased=some())


@hypothesis.settings(max_examples=examples(300))
@hypothesis.given(rosters(), rosters(), st.booleans())
def test_a_change_of_a_roster_makes_the_same_of_that_one_alone(old: Roster, new: Roster, admits: bool) -> None:
    change = RosterChange.between(old, IsRoster(new, admits, 7))
    if change is not None:
        change = ANSWERS.decode(encode(change))
        assert isinstance(change, RosterChange)
        assert change.whole(old) == IsRoster(new, admits, 7)
        assert change.whole(replace(old, epoch=old.epoch + 1)) is None
        assert change.whole(replace(old, cluster=b"D" * 16)) is None


def test_a_change_of_one_of_a_thousand_members_is_small() -> None:
    members = tuple(Member(b"%016d" % number, f"tcp://10.0.0.{number}:1") for number in range(1000))
    ids = tuple(member.id for member in members)
    old = Roster(b"C" * 16, 1, 5, members, ids[0], voters=ids[:-1], leased=ids)
    new = replace(old, epoch=6, members=(*members[:7], *members[8:]), voters=ids, leased=(*ids[:7], *ids[8:]))
    change = RosterChange.between(old, IsRoster(new))
    assert change is not None and len(encode(change)) < 200 < len(encode(IsRoster(new))) / 100
    assert change.whole(old) == IsRoster(new)


@pytest.mark.parametrize(
    "request_",
    [
        Lookup((), ()),
        Lookup((b"",), (GRANT,)),
        Lookup((b"k" * 501,), (GRANT,)),
        Lookup((b"k",) * 65_537, (GRANT,)),
        Lookup((b"k",), (Grant(-1, 1),)),
        Lookup((b"k",), (Grant(2**63, 1),)),
        Wait(b"k", GRANT, 0, 10_001),
        List(b"", b"", 0),
        List(b"", b"", 1025),
        Commit(CALL, (), ()),
        Commit(Call(1, 256, 1, 1), (Change(b"k", None),), (GRANT,)),
        Commit(CALL, (Change(b"k", None, (Place(b"short", 1),)),), (GRANT,)),
        Commit(CALL, (Change(b"k", None, expect=-1),), (GRANT,)),
        Release((Place(b"m" * 16, 2**64 - 1),)),
        Give(b"g", b"m" * 17, 1, ()),
        ClaimGroups((b"k" * 501,), None),
        Prepare(CALL, replace(PART, rank=-1), b"", GRANT),
        Prepare(CALL, replace(PART, world_size=0), b"", GRANT),
        Prepare(CALL, replace(PART, waits_ns=10**18 + 1), b"", GRANT),
        Prepare(CALL, replace(PART, host=b"m" * 17), b"", GRANT),
        Prepare(CALL, replace(PART, attempt=""), b"", GRANT),
        Sent(14, CALL, replace(PART, attempt="a" * 65_537), b"", GRANT),
    ],
    ids=repr,
)
def test_what_is_out_of_bounds_is_refused(request_: Any) -> None:
    with pytest.raises(msgspec.ValidationError):
        REQUESTS.decode(encode(request_))


def test_an_answer_is_no_request() -> None:
    with pytest.raises(msgspec.ValidationError):
        REQUESTS.decode(encode(Found(())))
    with pytest.raises(msgspec.ValidationError):
        ANSWERS.decode(encode(Lookup((b"k",), (GRANT,))))


@hypothesis.settings(max_examples=examples(300))
@hypothesis.given(st.binary(max_size=200))
def test_garbage_is_refused(garbage: bytes) -> None:
    for decoder in (REQUESTS, ANSWERS):
        try:
            found = decoder.decode(garbage)
        except msgspec.MsgspecError:
            continue
        assert type(found) in get_args(Request) + get_args(Answer)
