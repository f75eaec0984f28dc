"""The rules of attempts, over all rows that they are given: of a store that nobody serves, of an owner, of a model."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from memstore.distributed.catalog import look, run
from memstore.distributed.rules import NoSession
from memstore.distributed.rules.messages import Ended
from memstore.engine import AttemptOutcome, AttemptRows, Failure, PendingPart, Root, attempts, boot_id, deadline_after
from memstore.engine.catalog import tables
from memstore.engine.catalog.tables import FailureDetails, Transaction
from memstore.engine.format.records import with_checksum
from memstore.engine.protocols.attempts import change_attempts
from memstore.errors import PartialCommitError, VersionConflictError
from tests.distributed.catalog.operations import serve
from tests.distributed.rules.tables import SimTables
from tests.engine.bytes_store import opened

KEY, LONG = b"key", 10**12  # nanoseconds
MEMBER = b"m" * 16
STEPS = 300

Run = Callable[[Callable[[AttemptRows], Any]], Any]


def unserved(root: Root) -> Run:
    return lambda action: change_attempts(root, action, deadline_after(10))


def owner(root: Root) -> Run:
    serve(root)
    return lambda action: run(root, action, deadline_after(10))


def model() -> Run:
    rows = SimTables(MEMBER, clock=itertools.count(1).__next__)
    return lambda action: action(rows)


class Script:
    """Steps of an attempt by chance, and what came of them: without times, and with the first number as 1."""

    def __init__(self, run: Run, member: bytes, seed: int) -> None:
        self.run, self.member, self.chance = run, member, random.Random(seed)
        self.numbers: dict[int, int] = {0: 0}
        self.said: list[Any] = []
        self.steps = 0

    def number(self, number: int) -> int:
        return self.numbers.setdefault(number, len(self.numbers))

    def tell(self, what: Any) -> None:
        if isinstance(what, AttemptOutcome):
            what = what.attempt, self.number(what.number), what.version, what.failure
        self.said.append(what)

    def step(self) -> None:
        chance = self.chance
        self.steps += 1
        attempt, rank = f"{chance.choice('ab')} {self.steps // 12}", chance.randrange(3)  # what is over stays so
        step = chance.choice([*["put"] * 6, *["publish"] * 3, "give up", "expire", "renew", "name"])
        self.tell(step)
        number, parts = self.run(lambda rows: self.look(rows, attempt))
        self.tell([(part.rank, part.world_size, part.expect) for part in parts])
        known = chance.choice([0, number, number, 1])
        try:
            if step == "put":
                world, expect = chance.choice([2] * 9 + [3]), chance.choice([None] * 8 + [3, 4])
                lease = chance.choice([0] + [LONG] * 5)
                part = PendingPart(KEY, attempt, 0, rank % world, world, 0, 0, expect=expect, waits_ns=lease)
                part = msgspec.structs.replace(part, boot=boot_id(), host=self.member)
                found = self.run(lambda rows: attempts.take_in(rows, part, b"said"))
                self.tell(self.number(found) if isinstance(found, int) else found)
            elif step == "publish" and parts:
                merged = attempts.places_of(parts[: chance.choice([1, 3, 3, 3])])
                version = self.steps
                self.tell(self.run(lambda rows: self.publish(rows, attempt, number, merged, version)))
            elif step == "give up":
                failure, lease = Failure("ShardMismatchError", "they differ"), chance.choice([0, LONG])
                only = attempts.places_of(parts[: chance.choice([1, 3])]) if chance.random() < 0.3 else None
                made = self.run(
                    lambda rows: attempts.give_up(rows, KEY, attempt, known, failure, only=only, waits=lease)
                )
                self.tell(made)
            elif step == "expire":
                self.run(attempts.expire)
            elif step == "renew":
                self.run(lambda rows: attempts.renew(rows, KEY, attempt, number, rank))
            elif step == "name":
                attempt = f"{attempt} of {self.steps}"  # nobody has begun it
                self.run(lambda rows: attempts.give_up(rows, KEY, attempt, 0, Failure("StoreTimeoutError", "")))
                self.tell(self.run(lambda rows: attempts.find(rows, KEY, attempt, 1)))
        except attempts.OverAlready as over:
            self.tell(over.outcome)
        except (attempts.OtherParts, attempts.NothingKnown, VersionConflictError) as error:
            self.tell((type(error), str(error)))

    def look(self, rows: AttemptRows, attempt: str) -> tuple[int, list[PendingPart]]:
        outcome, parts = attempts.find(rows, KEY, attempt, 0)
        self.tell(outcome)
        return (outcome.number if outcome else parts[0].number if parts else 0), parts

    def publish(self, rows: AttemptRows, attempt: str, number: int, merged: Any, version: int) -> AttemptOutcome:
        parts = attempts.parts_to_publish(rows, KEY, attempt, number, merged)
        attempts.expected_version(parts)
        return attempts.settle(rows, parts, version)


@pytest.mark.parametrize("seed", range(8))
def test_the_rules_do_the_same_over_all_rows(folder: str, seed: int) -> None:
    with opened(f"{folder}/unserved") as one, opened(f"{folder}/owner") as other:
        scripts = [
            Script(unserved(one), b"", seed),
            Script(owner(other), other.member_id(), seed),
            Script(model(), MEMBER, seed),
        ]
        for _ in range(STEPS):
            for script in scripts:
                script.step()
            first, *others = scripts
            for script in others:
                assert script.said == first.said
        versions = [said for said in scripts[0].said if isinstance(said, tuple) and len(said) == 4 and said[2]]
        assert versions, "this tests little"


# --- rows that were written before parts and outcomes were what hosts send to each other ----------------------------


def put_rows(root: Root, *rows: tuple[str, bytes, Any]) -> None:
    def write(transaction: Transaction) -> None:
        for table, name, body in rows:
            transaction.put_row(table, name, with_checksum(name, msgspec.msgpack.encode(body)))

    root.mutex.run(lambda: root.catalog.update(write), deadline_after(10))


def test_rows_of_before_are_read(folder: str) -> None:
    boot = boot_id()
    part = PendingPart(KEY, "a", 3, 1, 2, 5, 6, 7, 8, None, LONG, 1 << 62, boot)
    outcome = AttemptOutcome(
        KEY, "b", 4, 0, "PartialCommitError", "gone", FailureDetails(missing_ranks=(1,)), 1 << 62, boot
    )
    with opened(folder) as root:

        def names(transaction: Transaction) -> list[bytes]:
            tables.put_part(transaction, part, b"said")
            tables.put_outcome(transaction, outcome)
            return [transaction.rows_with(table, b"", 1)[0][0] for table in ("pending", "outcomes")]

        of_part, of_outcome = root.mutex.run(lambda: root.catalog.update(names), deadline_after(10))
        details: dict[str, Any] = {"missing_ranks": [1], "missing_boxes": []}
        put_rows(
            root,
            ("pending", of_part, [KEY, "a", 3, 1, 2, 5, 6, 7, 8, None, LONG, 1 << 62, boot, b""]),
            ("outcomes", of_outcome, [KEY, "b", 4, 0, "PartialCommitError", "gone", details, 1 << 62, boot]),
        )
        found = root.catalog.view(lambda transaction: (tables.parts_of(transaction), tables.all_outcomes(transaction)))
        assert found == ([part], [outcome])
        with pytest.raises(PartialCommitError, match="gone") as caught:
            attempts.version_of_outcome(outcome)
        assert (caught.value.missing_ranks, caught.value.missing_boxes) == ((1,), ())


def test_an_answer_that_was_kept_in_another_form_counts_as_forgotten(folder: str) -> None:
    ended = Ended(AttemptOutcome(KEY, "a", 3, 7, "", "", FailureDetails(), 9))
    with opened(folder) as root:
        serve(root)
        session = run(root, lambda one: one.new_session(), deadline_after(10))
        name = session.to_bytes(8, "big") + b"\3"
        last = [5, [ended.__struct_config__.tag, [KEY, "a", 3, 7, None, 9]]]
        put_rows(root, (tables.CALLS, name, last))
        kept = look(root, lambda one: one.last_call(session, 3), deadline_after(10))
        assert kept is not None and (kept.number, kept.answer) == (5, NoSession())
