"""The real tables do what those of the simulation do, whatever is done to both."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import memstore
from memstore.distributed.catalog import look, run
from memstore.distributed.rules import (
    Change,
    Entry,
    Grant,
    KeptGroup,
    LastCall,
    LeavingGroup,
    Lent,
    Member,
    Ownership,
    Place,
    Remembered,
    Roster,
    Standing,
    Tables,
)
from memstore.distributed.rules.messages import Committed, Done, Failed, Found, Never
from memstore.distributed.rules.owning import apply
from memstore.engine import SealedSegment
from memstore.engine.catalog.tables import Transaction
from memstore.engine.format.records import LIVE
from memstore.engine.root.roots import Root
from memstore.engine.sync.primitives import deadline_after
from memstore.errors import CorruptionError
from tests.distributed.catalog.filling import Filled, asked, fill, fill_in_parts, given_up, published
from tests.distributed.rules.tables import Segment, SimTables
from tests.engine.bytes_store import opened
from tests.examples import examples
from tests.inside import root_of

Result = TypeVar("Result")

OTHER, THIRD = b"o" * 16, b"t" * 16
KEYS = [b"a", b"a/1", b"a/2", b"b", b"b/\xc3\xa4", b"c" * 500, b"/x", b"a!"]
GROUPS = [b"", b"a", b"a!", b"b", b"c" * 500]
SIZES = [100, 5_000, 20_000]
MOST = 1 << 10


@pytest.fixture
def root() -> Iterator[Root]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder, opened(f"{folder}/store") as one:
        yield one


class Both:
    """A root and its twin in the simulation."""

    def __init__(self, root: Root) -> None:
        self.root, self.member = root, root.member_id()
        self.sim = SimTables(self.member)
        self.places: list[Place] = []  # all that was ever filled here
        self.keys: dict[Place, bytes] = {}  # for which
        self.bodies: dict[bytes, Entry] = {}
        self.run(lambda tables: tables.put_standing(self.standing(1)))

    def standing(self, epoch: int, *, is_joining: bool = False) -> Standing:
        members = (Member(self.member, "here"), Member(OTHER, "there"))
        return Standing(self.member, Roster(b"C" * 16, 1, epoch, members, self.member), is_joining=is_joining)

    def run(self, action: Callable[[Tables], Result], sealed: tuple[SealedSegment, ...] = ()) -> Result:
        """Does the same to both, and returns what both have answered."""
        self.sim.number = self.root.catalog.view(Transaction.counters).number  # numbers of sessions are the store's
        expected = action(self.sim)
        found = run(self.root, action, deadline_after(10), sealed=sealed)
        assert found == expected
        return found

    def look(self, action: Callable[[Tables], Result]) -> Result:
        found = look(self.root, action, deadline_after(10))
        assert found == action(self.sim)
        return found

    def fill(self, filled: Filled) -> Change:
        """Its segments are known to both from here on."""
        change = asked(self.root, filled)
        for place in change.places:
            self.sim.segments[place.put_id] = Segment(0)
            self.places.append(place)
            self.keys[place] = change.key
        return change

    def compare(self) -> None:
        keys = [key for key, _ in self.look(lambda tables: tables.page(b"", MOST))]
        assert keys == sorted(keys)
        for prefix in (b"a", b"a/", b"b", b"x"):
            for after in (b"", b"a", b"a/1", b"b", b"zz"):
                self.look(lambda tables, after=after, prefix=prefix: tables.page(after, 1, prefix))
                self.look(lambda tables, after=after, prefix=prefix: tables.page(after, MOST, prefix))
                self.look(lambda tables, after=after, prefix=prefix: tables.heads(after, 2, prefix))
                self.look(lambda tables, after=after: tables.groups(after, 2))
        self.look(lambda tables: tables.groups(b"", MOST))
        self.look(lambda tables: [tables.record(key) for key in KEYS])
        self.look(lambda tables: (tables.standing(), tables.membership(), tables.version))
        self.look(lambda tables: [tables.is_there(place) for place in self.places])
        self.look(lambda tables: [tables.lent(place) for place in self.places])
        lent = self.look(lambda tables: tables.all_lent(0, MOST))
        for i in range(len(lent)):
            self.look(lambda tables, after=lent[i][0].put_id: tables.all_lent(after, 2))
        self.look(lambda tables: set(tables.owed(MOST)))
        self.look(
            lambda tables: (tables.remembers(), tables.count_remembered(), [tables.remembered(key) for key in KEYS])
        )
        for limit in (1, 3, MOST):
            self.look(lambda tables, limit=limit: (tables.all_remembered(limit), tables.all_keepers(b"a", limit)))
        self.compare_groups()
        self.look(lambda tables: [tables.has_session(session) for session in range(200)])
        for session in [0, *self.look(lambda tables: tables.sessions(0, MOST))]:
            self.look(lambda tables, after=session: tables.sessions(after, 2))
        calls = [(session, lane) for session in self.sim.open_sessions for lane in range(256)]
        self.look(lambda tables: [tables.last_call(*call) for call in calls])
        self.check_bytes()

    def compare_groups(self) -> None:
        self.look(lambda tables: [tables.owned(group) for group in GROUPS])
        self.look(lambda tables: [tables.leaving(group) for group in GROUPS])
        self.look(lambda tables: [tables.kept(group) for group in GROUPS])
        self.look(lambda tables: [tables.ownership(group) for group in GROUPS])
        self.look(lambda tables: (tables.granted, tables.mirrored, tables.early_promise))
        self.look(lambda tables: tables.ownerships_of(GROUPS))
        self.look(lambda tables: sorted(tables.all_leaving()))
        self.look(lambda tables: sorted(tables.all_kept()))
        self.look(lambda tables: (tables.kept_of(KEYS), tables.keepers_of(KEYS), tables.have_more(KEYS)))
        for limit in (1, MOST):
            self.look(lambda tables, limit=limit: tables.all_owned(None, limit))
            for group in GROUPS:
                self.look(lambda tables, limit=limit, group=group: tables.all_owned(group, limit))
                self.look(lambda tables, limit=limit, group=group: tables.kept_page(group, limit))
            for number in range(0, 64, 7):
                self.look(lambda tables, limit=limit, number=number: tables.ownerships(number, limit))

    def check_bytes(self) -> None:
        rows, counters = self.root.catalog.view(lambda one: (dict(one.segments()), one.counters()))
        sums = {state: sum(row.nbytes for row in rows.values() if row.state == state) for state in range(1, 5)}
        assert (counters.live, counters.retired + counters.held) == (sums[LIVE], sums[3])
        for segment, row in rows.items():
            with open(f"{self.root.segments}/{segment:016x}.safetensors", "rb") as file:
                assert (b" state=live " in file.read(128)) is (row.state == LIVE)


Step = tuple[str, int, int, int]
STEPS = st.lists(
    st.tuples(
        st.sampled_from(
            ["put", "put", "put_parts", "put_elsewhere", "lend", "own", "retire", "delete", "session", "end", "call"]
            + ["owe", "settle", "standing", "version", "raise", "look", "owned", "disowned", "leaving", "stays"]
            + ["remembers", "remember", "forget_remembered", "keepers", "keepers_of_many"]
            + ["kept", "keep", "keep_damaged", "take", "drop_kept", "grant", "drop_grant", "granted", "mirrored"]
            + ["promised"]
        ),
        st.integers(0, 7),
        st.integers(0, 63),
        st.integers(0, 255),
    ),
    max_size=25,
)


@settings(max_examples=examples(40), suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(steps=STEPS)
def test_tables_do_as_the_simulated_ones(steps: list[Step]) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder, opened(f"{folder}/store") as root:
        both = Both(root)
        for step in steps:
            do(both, *step)
        both.compare()


def do(both: Both, name: str, key_at: int, choice: int, number: int) -> None:
    key, sim = KEYS[key_at], both.sim
    there = [place for place in both.places if place.put_id in sim.segments]
    place = there[choice % len(there)] if there else None
    sessions = sim.sessions(0, MOST)
    session = sessions[choice % len(sessions)] if sessions else 7
    if name in ("put", "put_parts", "put_elsewhere"):
        put(both, name, key, choice)
    elif name == "lend" and place is not None:
        both.run(lambda tables: tables.lend(place, Lent(both.keys[place], OTHER, number, choice, 1, number)))
    elif name == "own" and place is not None:
        both.run(lambda tables: tables.own(place, both.keys[place]))
    elif name == "retire" and both.places:
        any_place = both.places[choice % len(both.places)]
        both.run(lambda tables: tables.retire(any_place))
    elif name == "delete":
        both.run(lambda tables: apply(tables, tables.standing(), [Change(key, None, missing_ok=choice % 2 == 0)]))
    elif name == "session":
        both.run(lambda tables: tables.new_session())
    elif name == "end":
        both.run(lambda tables: tables.end_session(session))
    elif name == "call":
        answers = [Done(), Never(), Committed((1, 2)), Failed("KeyNotFoundError", "why", key), Found((None,))]
        answer = answers[key_at % len(answers)]
        both.run(lambda tables: tables.put_last_call(session, number, LastCall(choice, answer)))
    elif name == "owe":
        both.run(lambda tables: tables.owe(Place([OTHER, THIRD][choice % 2], number + 1, 7)))
    elif name == "settle":
        both.run(lambda tables: tables.settle(Place([OTHER, THIRD][choice % 2], number + 1, 7)))
    elif name == "standing":
        epoch = 1 if sim.own_standing is None else sim.own_standing.roster.epoch + choice % 2
        standing = both.standing(epoch, is_joining=choice % 3 == 0)
        both.run(lambda tables: tables.put_standing(standing))
    elif name == "raise":
        both.run(lambda tables: tables.raise_version(key, (1 << 41) + number))
    elif name == "version":
        both.run(lambda tables: setattr(tables, "version", tables.version + number))
    elif name == "look":
        both.compare()
    else:
        change_group(both, name, GROUPS[key_at % len(GROUPS)], key, choice, number)


def change_group(both: Both, name: str, group: bytes, key: bytes, choice: int, number: int) -> None:
    sim, grant = both.sim, Grant(number, choice, number // 2)
    if name == "owned":
        both.run(lambda tables: tables.put_owned(group, grant))
    elif name == "disowned" and group in sim.own_groups:
        both.run(lambda tables: tables.drop_owned(group))
    elif name == "leaving":
        leaving = LeavingGroup(OTHER, number, grant if choice % 2 else None, choice)
        both.run(lambda tables: tables.put_leaving(group, leaving))
    elif name == "stays":
        both.run(lambda tables: tables.drop_leaving(group))
    elif name == "kept":
        kept = KeptGroup(OTHER, number, choice if choice % 2 else None, is_free=choice % 3 == 0)
        both.run(lambda tables: tables.put_kept(group, kept))
    elif name == "keep":
        entry = both.bodies.get(key, Entry(choice, b"body", (Place(OTHER, number, 3),)))
        both.run(lambda tables: tables.keep({key: entry}))
    elif name == "keep_damaged":
        both.run(lambda tables: tables.keep({key: None}))
    elif name == "take":
        both.run(lambda tables: tables.take_kept(group, 1 + choice % 3))
    elif name == "drop_kept":
        both.run(lambda tables: tables.drop_kept(group))
    elif name == "grant" and not any(row.grant.number == number for row in sim.directory.values()):
        row = Ownership(group, OTHER, grant, THIRD if choice % 2 else None, former=OTHER if choice % 3 else None)
        if not sim.granted:  # without a number that was given, the catalog tells it by the rows
            both.run(lambda tables: setattr(tables, "granted", 63))
        both.run(lambda tables: tables.put_ownerships([row]))
    elif name == "drop_grant" and group in sim.directory:
        both.run(lambda tables: tables.drop_ownership(group))
    elif name == "granted":
        both.run(lambda tables: setattr(tables, "granted", number + 1))
    elif name == "mirrored":
        both.run(lambda tables: setattr(tables, "mirrored", (choice, number)))
    elif name == "remembers":
        both.run(lambda tables: tables.put_remembers(choice % 2 == 0))
    elif name == "remember":
        both.run(lambda tables: tables.put_remembered(key, Remembered(OTHER if choice % 2 else b"", choice, number)))
    elif name == "forget_remembered":
        both.run(lambda tables: tables.forget(key))
    elif name == "keepers":
        both.run(lambda tables: tables.put_keepers(key, [(OTHER, choice), (THIRD, number)][: choice % 3]))
    elif name == "keepers_of_many":
        keepers = [(OTHER, choice), (THIRD, number)]
        both.run(lambda tables: tables.put_keepers_of(dict.fromkeys(KEYS[:choice], keepers)))
    elif name == "promised":
        both.run(lambda tables: setattr(tables, "early_promise", (OTHER, number)))


def put(both: Both, name: str, key: bytes, choice: int) -> None:
    """By the rules; a version that is expected and isn't there makes it fail."""
    size = SIZES[choice % len(SIZES)]
    filled = fill_in_parts(both.root, key, [b"1" * 9_000, b"2" * 9_000]) if name == "put_parts" else None
    filled = filled or fill(both.root, key, b"x" * size)
    change = both.fill(filled)
    if name == "put_elsewhere":  # another host has filled it: what lies here is given up
        given_up(both.root, filled)
        for place in change.places:
            del both.sim.segments[place.put_id]
        places = tuple(Place([OTHER, THIRD][choice % 2], place.put_id, place.segment) for place in change.places)
        change = Change(key, change.body, places)
    expect = None if choice % 4 else 1 << 50
    change = Change(key, change.body, change.places, expect)
    answer: Any = both.run(lambda tables: apply(tables, tables.standing(), [change]), tuple(filled.sealed))
    if isinstance(answer, Committed):
        assert change.body is not None
        both.bodies[key] = Entry(answer.versions[0], change.body, change.places)
        published(both.root, filled)
    else:
        for place in change.places:
            both.sim.segments.pop(place.put_id, None)
        given_up(both.root, filled)


def test_a_record_can_not_own_the_segment_of_another_key(scratch: str) -> None:
    with memstore.open(scratch) as store:
        store.put("k", torch.zeros(5000))
        root = root_of(store)
        record = root.catalog.read(b"k")
        assert record is not None
        place = Place(root.member_id(), record.put_id, record.segment)
        with pytest.raises(CorruptionError, match="'other'.*of this key"):
            run(root, lambda tables: tables.own(place, b"other"), deadline_after(10))
