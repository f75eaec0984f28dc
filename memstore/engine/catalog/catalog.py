"""The catalog: the index of a host, an LMDB database, read and changed in transactions.

`Catalog.view` calls a function with one moment of it, `Catalog.update` in a write transaction, which it commits, and
repeats if the map had to grow. The tables are in `tables.py`, LMDB's files in `environment.py`.

Callers hold the store's mutex for every `update`. Each call takes the catalog's guard, a lock of this process that
forks take too: so no fork splits a transaction, and no two threads share the readers' slot.

`Growth` says when the map grows, and by how much. A tenth of the map is kept for deletes, which need pages too, because
LMDB writes a changed page to a free one. Pages that were replaced since a reader began (`reader_of_the_past`) are not
free: while a process is stopped in a read, overwrites would use the tenth up. So they are counted.
"""

from __future__ import annotations

import contextlib
import errno
import operator
import threading
from collections.abc import Callable
from typing import Any, ClassVar, Concatenate, ParamSpec, TypeVar

import lmdb

from memstore.engine.catalog.environment import STEP, Environment, count_free, located, reader_of_the_past
from memstore.engine.catalog.tables import OPTIONAL, SERVED, SERVED_COUNTERS, Counters, Transaction
from memstore.engine.format.records import Record, decode_record
from memstore.errors import CorruptionError, StoreFullError

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

_MapFull: Any = lmdb.MapFullError  # its stub doesn't say that it is an exception


class ReadOnlyTransaction(Exception):
    """Raised where the action of a `view` writes. Nothing was written; users never see this."""


class Catalog:
    """Index of a host: one LMDB environment. Open it once a process, under the folder's lock and the store's mutex.

    Attributes:
        guard: held in every call. Who needs several calls, or files between them, without a fork in between, takes it.
        crowded: how many of this process's next values go into segments, because there was no room for one here.
        is_released: this is a forked child that has yet to open it again, under the store's mutex: call `reopen`.
        commit: commits LMDB's write transactions. It is C, and costs no frame; tests replace it.
    """

    commit: ClassVar[staticmethod[[Any], None]] = staticmethod(operator.methodcaller("commit"))

    def __init__(self, folder: str, *, durable: bool, writable: bool, locked: bool = True) -> None:
        """Opens it. `locked` False doesn't touch lock.mdb: to read while nobody else uses the store."""
        self.guard = threading.RLock()
        self._folder = folder
        self._environment = Environment(folder, durable=durable, writable=writable, locked=locked)
        self._growth = Growth(self._environment)
        self.crowded = 0
        self.is_released = False
        self._writing: Any = None  # LMDB's write transaction, until it was committed or aborted

    # --- reading ------------------------------------------------------------------------------------------------------

    def read(self, key: bytes) -> Record | None:
        """Reads one record, as `view` would, in one frame: every get of one key comes here."""
        environment = self._environment
        with self.guard:
            environment.ended = None
            try:
                handle = environment.handle.begin(None, None, False, False)
            except (AttributeError, lmdb.Error):  # released; or what `begin` knows a way out of
                return self.view(Transaction.record, key)
            try:
                stored = handle.get(key, None, environment.tables["entries"])
            except lmdb.Error as error:
                raise environment.translated(error) from error
            finally:  # as `Environment.end`
                handle.abort()
                if environment.keeps_slot:
                    environment.ended = handle
                del handle
        try:
            return None if stored is None else decode_record(key, stored)
        except CorruptionError as error:
            raise located(error, self._folder) from None

    def has_membership(self) -> bool:
        """Returns whether the counters have one, in one frame: every get of a key that isn't there comes here."""
        environment = self._environment
        with self.guard:
            environment.ended = None
            try:
                handle = environment.handle.begin(None, None, False, False)
            except (AttributeError, lmdb.Error):  # as in `read`
                return self.view(Transaction.counters).membership != 0
            try:
                stored = handle.get(b"counters", None, environment.tables["counters"])
            except lmdb.Error as error:
                raise environment.translated(error) from error
            finally:
                handle.abort()
                if environment.keeps_slot:
                    environment.ended = handle
                del handle
        size = 0 if stored is None else len(stored)
        if stored is None or size <= SERVED_COUNTERS:
            return size == SERVED_COUNTERS
        return any(stored[SERVED_COUNTERS - 8 : SERVED_COUNTERS])  # a store with quotas, served or not

    def view(
        self,
        action: Callable[Concatenate[Transaction, Arguments], Result],
        *arguments: Arguments.args,
        **keywords: Arguments.kwargs,
    ) -> Result:
        """Calls `action` with one moment of the catalog, and the arguments."""
        environment = self._environment
        with self.guard:
            handle = environment.begin()
            transaction = Transaction(handle, environment.tables)
            try:
                return action(transaction, *arguments, **keywords)
            except BaseException as error:
                transaction.forget()  # who keeps the error keeps its frames, and with them the transaction's slot
                if isinstance(error, lmdb.ReadonlyError):
                    raise ReadOnlyTransaction from None
                if isinstance(error, lmdb.Error):
                    raise environment.translated(error) from error
                if isinstance(error, CorruptionError):
                    raise located(error, self._folder) from None
                raise
            finally:
                environment.end(handle)
                del handle

    # --- writing ------------------------------------------------------------------------------------------------------

    def update(
        self, action: Callable[[Transaction], Result], *, is_delete: bool = False, most: int | None = None
    ) -> Result:
        """Calls `action` in a write transaction and commits it; more than once if the map had to grow.

        With `most`, it writes large values: CatalogCrowded is raised where the catalog has many of them already, or
        would have to be grown to more than `most` bytes.
        """
        environment, growth = self._environment, self._growth
        with self.guard:
            for _ in range(64):
                try:
                    if not is_delete:
                        growth.unlooked -= 1
                        if growth.unlooked < 0 and growth.is_due(lambda: self.view(Transaction.pages)):
                            growth.grow(self.view(Transaction.counters), most)
                    handle = self._writing = (environment.handle or environment.opened()).begin(None, None, True, True)
                    try:
                        transaction = Transaction(handle, environment.tables)
                        if most is not None:
                            growth.check_values(transaction)
                        result = action(transaction)
                        self.commit(handle)
                        self._writing = None
                        return result
                    except BaseException as error:
                        self._abort()
                        if isinstance(error, CorruptionError):
                            raise located(error, self._folder) from None
                        raise
                except lmdb.MapResizedError:  # another process has grown it
                    environment.map(0)
                except lmdb.MapFullError:
                    if not environment.opened().reader_check():  # what a dead reader kept is free then: try again
                        growth.grow(self.view(Transaction.counters), most)
                except lmdb.Error as error:
                    raise environment.translated(error) from error
                finally:
                    if self._writing is not None:  # an interrupt came before the abort
                        self._abort()
            raise growth.full("the catalog can't be grown fast enough for this transaction")

    def _abort(self) -> None:
        """Ends a write transaction. It is not left to its end as an object: an error's traceback may keep that."""
        with contextlib.suppress(lmdb.Error):  # a failed commit has ended it
            self._writing.abort()
        self._writing = None

    # --- the tables that a later version has added --------------------------------------------------------------------

    def open_optional(self) -> None:
        """Opens tables that others have made since this process opened the store to read: it may not make them."""
        environment = self._environment
        if OPTIONAL[-1] in environment.tables:
            return
        with self.guard:
            environment.open_optional()

    # --- the tables of a store that is served -------------------------------------------------------------------------

    @property
    def is_served(self) -> bool:
        """Returns whether this process knows these tables."""
        return SERVED[-1] in self._environment.tables

    def open_served(self) -> None:
        """Opens the tables that another process has made since this one opened the store. Under the store's mutex."""
        with self.guard:
            self._environment.opened()
            self._environment.open_served()

    def create_served(self) -> None:
        """Makes the tables, where they aren't there, all or none. Under the store's mutex."""
        environment = self._environment
        with self.guard:
            if not self.is_served:
                database = environment.opened()
                environment.tables |= self.update(lambda transaction: transaction.create(database, SERVED))

    # --- its size -----------------------------------------------------------------------------------------------------

    @property
    def growth(self) -> int:
        """Returns the bytes that it has taken beyond its first step, which count against the store's capacity."""
        with self.guard:
            return max(self._environment.opened().info()["map_size"] - STEP, 0)

    @property
    def nbytes(self) -> int:
        return self._environment.nbytes

    def forget_dead_readers(self) -> None:
        """Frees the slots of dead readers. Under the store's mutex: where there are any, LMDB locks its table."""
        with self.guard:
            self._environment.opened().reader_check()

    # --- forks, and the end -------------------------------------------------------------------------------------------

    def leave_to_parent(self) -> None:
        """Gives up the parent's guard and LMDB environment, in a forked child that has done nothing yet."""
        self.guard = threading.RLock()
        self._environment.release()
        self.is_released = not self._environment.is_closed

    def reopen(self) -> None:
        """Opens what was released. Under the store's mutex, as any opening."""
        with self.guard:
            self._environment.opened()
            self.is_released = False

    def close(self) -> None:
        with self.guard:
            self._environment.close()
            self.is_released = False


# --- growth ----------------------------------------------------------------------------------------------------------


_RESERVED_FOR_DELETES = 0.1
MOST_FOR_VALUES = 64 << 20  # bytes of data.mdb up to which it is grown for the sake of large values
_MOST_OF_VALUES = 48 << 20  # bytes of large values that it takes in: small ones may have made it larger still
_PART_FOR_VALUES = 0.7  # of the map: where it can't grow, segments still need their rows
_PAGES_AN_UPDATE, _MOST_UNLOOKED = 64, 16  # that one takes at most, as a rule; updates between two looks for room


class CatalogCrowded(Exception):
    """Raised where the catalog would have to grow too large for a value that can lie in a segment as well.

    The change was given up. Whoever put the value puts it into a segment then; users never see this.
    """


class Growth:
    """Room of the map: looks for some before an update, and makes some. Under the store's mutex.

    Attributes:
        unlooked: updates until the next look; negative: it is due.
    """

    __slots__ = ("_environment", "unlooked")

    def __init__(self, environment: Environment) -> None:
        self._environment = environment
        self.unlooked = 0

    def is_due(self, count_used: Callable[[], int]) -> bool:
        """Returns whether the map is nearly full. `count_used` counts the pages that tables take."""
        info = self._environment.opened().info()
        pages = info["map_size"] // self._environment.page_size
        room = int((1 - _RESERVED_FOR_DELETES) * pages) - info["last_pgno"]
        if room > 0:
            self.unlooked = min(room // _PAGES_AN_UPDATE, _MOST_UNLOOKED)
            return False
        reserve = int(2 * _RESERVED_FOR_DELETES * pages)
        if count_used() > pages - reserve:  # pages that were freed are used again
            return True
        reader = reader_of_the_past(self._environment.opened())  # `count_used` may have opened another one
        room = pages - info["last_pgno"] - 1
        if reader is None or room >= reserve:
            return False
        free = count_free(self._environment.path, reader.moment, reserve - room)
        return room + free < reserve

    def check_values(self, transaction: Transaction) -> None:
        """Looks before a large value is written whether there is room for it, beside room for the rows of segments.

        Raises:
            CatalogCrowded: there are as many large values as the catalog may have.
            lmdb.MapFullError: the map has to grow.
        """
        environment = self._environment.opened()
        taken, size = transaction.pages_of_values() * self._environment.page_size, environment.info()["map_size"]
        if taken > _MOST_OF_VALUES:
            raise CatalogCrowded
        if size > MOST_FOR_VALUES and reader_of_the_past(environment) is not None:
            raise CatalogCrowded  # what is replaced now isn't free before it ends
        if taken > _PART_FOR_VALUES * size:
            raise _MapFull

    def grow(self, counters: Counters, most: int | None = None) -> None:
        """Grows the map by a quarter, or by a step.

        Raises:
            CatalogCrowded: it would have more than `most` bytes, or there is no room for it.
            StoreFullError: there is no room, and `most` is None.
        """
        size = self._environment.opened().info()["map_size"]
        size += max(STEP, size // 4 // STEP * STEP)
        if most is not None and size > most:
            raise CatalogCrowded
        try:
            self._grow_to(size, counters)
        except StoreFullError:
            if most is None:
                raise
            raise CatalogCrowded from None

    def _grow_to(self, size: int, counters: Counters) -> None:
        if counters.capacity and counters.allocated + size - STEP > counters.capacity:
            raise self.full(
                f"the store may take {counters.capacity:,} bytes, and the catalog has to grow to {size:,} beside "
                f"{counters.allocated:,} of its files"
            )
        try:
            self._environment.allocate(size)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise self.full(f"no room to grow the catalog to {size:,} bytes") from None
        self._environment.map(size)

    def full(self, why: str) -> StoreFullError:
        """Makes the error, which names the oldest reader: there may be room enough, but for the pages that it keeps."""
        env = self._environment.opened()
        reader = reader_of_the_past(env)
        if reader is not None:
            behind = env.info()["last_txnid"] - reader.moment
            why += f"; pid {reader.pid} has read since {behind:,} changes ago: what they replaced is kept until it ends"
        return StoreFullError(f"{self._environment.folder}: {why}")
