"""A dataset in the simulation: processes of its host add rows under a mutex, and seal it; their calls are cut off."""

from __future__ import annotations

from memstore.distributed.rules import Change, Place, Steps, group_of, is_unsealed, look_up
from memstore.errors import HomeUnavailableError, MemstoreError, MutableEntryError, StoreTimeoutError
from tests.distributed.rules.world import SECOND, Host, Process, World
from tests.support.explore import Fault

OPEN, SEALING, SEALED = range(3)


class SealedRows:
    """What the processes of its host share: the words of the control page, and who has its mutex.

    Attributes:
        rows: that were acknowledged.
    """

    def __init__(self, world: World, host: Host, key: bytes) -> None:
        self.world, self.host, self.key = world, host, key
        self.place = Place(host.id, host.tables.fill(0))
        self.state, self.rows = OPEN, 0
        self.owner: Process | None = None

    def create(self) -> None:
        process = self.world.start_process(self.host)
        change = Change(self.key, b"0", (self.place,), expect=0, is_mutable=True)

        def ended(_: object, error: BaseException | None) -> None:
            if error is not None:
                raise error

        self.world.call(process, process.client.commit([change], self._until(60)), 60, ended)

    def take_turn(self, *, seals: bool, seconds: float) -> None:
        """A process of its own adds a row, or seals it, unless another one is about it."""
        if self.owner is not None:
            return
        process = self.owner = self.world.start_process(self.host)

        def ended(_: object, error: BaseException | None) -> None:
            self.world.note(f"{'seal' if seals else 'extend'}: state {self.state}, {self.rows} rows, {error!r}")
            if self.owner is process:
                self.owner = None
            if error is not None and not isinstance(error, MemstoreError):
                raise error

        self.world.call(process, self._turn(process, seals, self._until(seconds)), seconds, ended)

    def kill(self) -> None:
        """Who has the mutex is killed; the next one finds the words as they are."""
        if self.owner is not None:
            self.world.note("its owner is killed")
            self.owner.is_alive = False
            self.owner = None

    def _until(self, seconds: float) -> int:
        return self.world.now + self.host.clock_offset + int(seconds * SECOND)

    def _turn(self, process: Process, seals: bool, until: int) -> Steps[None]:
        if self.state == SEALING:
            is_open = yield from is_unsealed(process.client, self.key, self.place, until)
            self.state = OPEN if is_open else SEALED
        if self.state == SEALED:
            return
        if not seals:
            self.rows += 1
            return
        self.state = SEALING
        try:
            yield from self._seal(process, until)
        except (HomeUnavailableError, StoreTimeoutError):
            self.state = OPEN
            raise
        self.state = SEALED

    def _seal(self, process: Process, until: int) -> Steps[None]:
        (entry,) = yield from look_up(process.client, [self.key])
        if entry is None or not entry.is_mutable:
            raise MutableEntryError("it was sealed before")
        places = (Place(self.host.id, self.host.tables.fill(self.rows)),)
        change = Change(self.key, str(self.rows).encode(), places, expect=entry.version, seals=self.place.put_id)
        yield from process.client.commit([change], until)

    def check(self) -> None:
        """Once all is settled: what was acknowledged is there."""
        owner = next(one for one in self.world.hosts.values() if group_of(self.key) in one.tables.own_groups)
        entry = owner.tables.record(self.key)
        if entry is None or self.state == SEALING:
            raise self._fault(f"state {self.state}, and its record is {entry}")
        if entry.is_mutable != (self.state == OPEN):
            raise self._fault(f"its processes say state {self.state}, and its owner {entry}")
        if not entry.is_mutable and int(entry.body) != self.rows:
            raise self._fault(f"{self.rows} rows were acknowledged, and {int(entry.body)} are sealed")
        if entry.places[0].host == self.host.id and not self.host.tables.is_there(entry.places[0]):
            raise self._fault("its bytes were given back")

    def _fault(self, text: str) -> Fault:
        return Fault(text, tuple(self.world.trace))
