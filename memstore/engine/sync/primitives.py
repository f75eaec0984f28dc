"""Primitives by which processes synchronise: robust mutexes, doorbells, the pages in which they lie, and clocks.

A `RobustMutex` protects what processes change. If its owner dies, the next one makes that whole. Beside the mutex
stands a *dirty word*. It says that the last owner died or failed in the middle of a change, or that nobody has owned
the mutex yet; as long as it says so, an owner recovers before it does anything else.

A `Doorbell` has futex words. Who changes something changes a word, and then wakes those that sleep on it. Who waits
loads the word, looks whether what it waits for is there, and sleeps only while the word is as it was loaded: so no
change is slept through.

Both lie in memory that all processes map: the page of a file (`SharedPage`), or a part of one. Deadlines are this
process's own; `boot_clock` is the clock that all processes of a boot share.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from typing import NoReturn, ParamSpec, TypeVar

import xxhash

from memstore.engine import syscalls
from memstore.engine.syscalls import Cleanup
from memstore.errors import ContentionError, CorruptionError, StoreTimeoutError

# --- mutexes ---------------------------------------------------------------------------------------------------------


Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

_DIED, _NEW, _FAILED = 1, 2, 4  # bits of the dirty word


class Refusal(Exception):
    """Raised by an action to say that it has changed nothing, and that its caller knows why: no recovery is due."""


class RobustMutex:
    """Mutex at an address. The caller keeps the memory mapped as long as this object lives.

    Attributes:
        address: where it stands.
        recover: called under the mutex when an owner died or failed in the middle of a change; None: not yet.
    """

    __slots__ = ("_dirty", "_inside", "_name", "_owner", "_refusals", "address", "recover")

    def __init__(
        self,
        address: int,
        recover: Callable[[], None] | None = None,
        *,
        name: str,
        dirty_at: int | None = None,
        refusals: tuple[type[BaseException], ...] = (),
    ) -> None:
        """Takes a mutex that somebody has created, or that `create` is about to.

        Args:
            address: `syscalls.MUTEX_SIZE` bytes of shared memory.
            recover: see above.
            name: what errors call it.
            dirty_at: the address of the dirty word, 8 bytes; None: it follows the mutex.
            refusals: errors by which an action says that it has changed nothing.
        """
        self.address, self._name, self._refusals, self.recover = address, name, refusals, recover
        self._owner = syscalls.words(address, 1)
        self._dirty = syscalls.long_words(address + syscalls.MUTEX_SIZE if dirty_at is None else dirty_at, 1)
        self._inside: dict[int, bool] = {}  # thread ids in `run`

    def create(self) -> None:
        """Makes the mutex, free, while nobody uses it. Its first owner recovers, and `is_new` tells it why."""
        syscalls.mutex_create(self.address)
        self._dirty[0] = _NEW

    def run(
        self,
        action: Callable[Arguments, Result],
        deadline: float,
        *arguments: Arguments.args,
        **keywords: Arguments.kwargs,
    ) -> Result:
        """Calls `action` with the arguments under the mutex. If it raises, the next owner recovers first.

        Written so that no Python function is entered between a change of the mutex and the code that answers for it:
        a KeyboardInterrupt is raised at such entries, and after calls. A `with` statement can't promise that, because
        it enters a Python function to leave: of 7,400 interrupts of a loop over one, 2,300 left the mutex held, and of
        8,000 of a loop over this, none. (It took 0.4 us more, too.)
        """
        address, owner, inside, me = self.address, self._owner, self._inside, syscalls.thread_id()
        if me in inside:
            raise ContentionError(
                f"{self._name}: this thread is in the middle of a change already: a signal handler or finalizer must "
                "not make another one"
            )
        inside[me] = True
        try:
            if owner[0] & syscalls.MUTEX_OWNER == me:  # an interrupt got past an earlier call: we hold it still
                self._dirty[0] |= _FAILED
            else:
                code = syscalls.mutex_lock(address, deadline)
                if code == syscalls.OWNER_DIED:
                    self._dirty[0] |= _DIED
                    syscalls.mutex_recovered(address)
                elif code == syscalls.TIMED_OUT:
                    who = describe_thread(self.owner())
                    raise StoreTimeoutError(f"{self._name}: waited for the mutex, held by {who}: look at what it does")
            if self._dirty[0] and self.recover is not None:
                self.recover()
                self._dirty[0] = 0
            return action(*arguments, **keywords)
        except self._refusals:
            raise
        except BaseException:
            if owner[0] & syscalls.MUTEX_OWNER == me:
                self._dirty[0] |= _FAILED
                syscalls.mutex_recovered(address)  # interrupted before that was said: unlocked as it is, it is lost
            raise
        finally:
            if me in inside:  # a child that was forked in the middle has forgotten it. (No call here: see above)
                del inside[me]
            if owner[0] & syscalls.MUTEX_OWNER == me:
                syscalls.mutex_unlock(address)

    def owe_recovery(self) -> None:
        """Lets the next owner recover, as if this one had failed. Under the mutex."""
        self._dirty[0] |= _FAILED

    def forget_threads(self) -> None:
        """Forgets the threads, in a forked child, whose thread ids are others."""
        self._inside.clear()

    @property
    def is_held(self) -> bool:
        """Returns whether this thread holds it. In the middle of an action: False in a child that was forked there."""
        return self.owner() == syscalls.thread_id()

    def owner(self) -> int:
        """Returns the thread id that holds the mutex, 0 if none does."""
        return self._owner[0] & syscalls.MUTEX_OWNER

    @property
    def is_new(self) -> bool:
        """Returns, while recovering, whether nobody has owned the mutex since it was created."""
        return bool(self._dirty[0] & _NEW)

    @property
    def has_died(self) -> bool:
        """Returns, while recovering, whether an owner died in the middle of a change."""
        return bool(self._dirty[0] & _DIED)


def describe_thread(thread: int) -> str:
    """Names the process of a thread id."""
    try:
        with open(f"/proc/{thread}/status") as file:
            fields = dict(line.rstrip("\n").split(":\t", 1) for line in file if ":\t" in line)
        return f"pid {fields['Tgid'].strip()} ({fields['Name']}, {fields['State']})"
    except (OSError, KeyError, ValueError):
        return f"thread {thread}, which can't be seen from here"


# --- doorbells -------------------------------------------------------------------------------------------------------


BELLS = 1024  # words in a page
_NOBODY_SLEEPS = 0


class Watch:
    """Word by which threads hear of every change, whatever it is of: a mark while one of them sleeps, else 0.

    1. A watcher calls `mark`, **then** looks for what it waits for, then calls `sleep`.
    2. Who has changed something, and finds the word marked, takes the mark away and wakes all watchers.
    So a change that the look missed finds the mark. While nobody watches, it costs one comparison.

    Each mark is a number of its own, and its watcher sleeps only while it stands there: so watchers of several
    processes may share the word. Where one has written over the other's mark, that one looks again before it sleeps.
    (With one mark for all, the second would restore the first one's, of which a change has just taken notice.)
    One object is for one thread: see `another`.
    """

    __slots__ = ("_mark", "_memory", "address", "word")

    def __init__(self, address: int, memory: object) -> None:
        """Takes a word at an address. `memory` keeps it mapped."""
        self.address, self._memory = address, memory
        self.word = syscalls.words(address, 1)
        self._mark = 1

    def another(self) -> Watch:
        """Returns one of the same word, for another thread."""
        return Watch(self.address, self._memory)

    def mark(self) -> None:
        # Not of the module `random`, whose numbers are the program's: ranks that are seeded alike would draw the same.
        self._mark = int.from_bytes(os.urandom(4), "little") | 1
        self.word[0] = self._mark

    def sleep(self, seconds: float) -> None:
        """Sleeps until somebody rings, and `seconds` at most; may return early."""
        syscalls.futex_wait(self.address, self._mark, seconds)

    def ring(self) -> None:
        self.word[0] = _NOBODY_SLEEPS
        syscalls.futex_wake(self.address)


class Doorbell:
    """Words at an address. The keys that they stand for are hashed onto them, so a waiter may wake for something else.

    Attributes:
        watch: told of each wake; None: nobody can watch.
    """

    __slots__ = ("_count", "_memory", "_watched", "_words", "address", "watch")

    def __init__(self, address: int, count: int, memory: object, watch: Watch | None = None) -> None:
        """Takes words at an address. `memory` keeps them mapped: a thread may wait after all others have let go."""
        self.address, self._count, self._memory, self.watch = address, count, memory, watch
        self._words = syscalls.words(address, count)
        self._watched = (_NOBODY_SLEEPS,) if watch is None else watch.word

    @classmethod
    def open(cls, path: str, *, writable: bool, watch: Watch | None = None) -> Doorbell:
        """Opens the one that fills a file of one page. Its inode is never replaced while somebody may wait."""
        page = SharedPage(path, writable=writable)
        page.close_file()
        return cls(page.address, BELLS, page, watch)

    def bell(self, key: bytes) -> int:
        return xxhash.xxh3_64_intdigest(key) % self._count

    def load(self, bell: int) -> int:
        return self._words[bell]

    def news(self, seen: dict[int, int]) -> list[int]:
        """Returns the bells whose words aren't those in `seen` any more, and puts the new ones there."""
        words = self._words
        changed = [bell for bell, word in seen.items() if words[bell] != word]
        for bell in changed:
            seen[bell] = words[bell]
        return changed

    def state(self) -> int:
        """Returns a number for all words together: another one after a change of any key."""
        return xxhash.xxh3_64_intdigest(memoryview(self._words).cast("B"))

    def words(self) -> list[int]:
        """Returns all of them, by bell, to count changes."""
        return [self._words[bell] for bell in range(self._count)]

    def change(self, bell: int) -> None:
        """Changes a word. Under a mutex, so that no change is lost."""
        self._words[bell] = (self._words[bell] + 1) & 0xFFFFFFFF

    def wake(self, bell: int) -> None:
        syscalls.futex_wake(self.address + 4 * bell)
        if self._watched[0] and self.watch is not None:
            self.watch.ring()

    def wait(self, bell: int, seen: int, seconds: float) -> None:
        """Sleeps while the word is `seen`, and `seconds` at most; may return early."""
        syscalls.futex_wait(self.address + 4 * bell, seen, seconds)

    def ring_all(self) -> None:
        """Changes all words and wakes all. Under the mutex."""
        for bell in range(self._count):
            self.change(bell)
            self.wake(bell)


# --- shared pages ----------------------------------------------------------------------------------------------------


class SharedPage:
    """Page of a file, mapped until nothing refers to this object: a thread may still wait on it after a close.

    Its file is open until `close_file`, or as long as the object lives.

    Attributes:
        address: where the page is mapped.
        fd: of the file; -1 after `close_file`.
        status: the file's, as fstat(2) gives it.
    """

    __slots__ = ("_closing", "_mapping", "address", "fd", "status")

    def __init__(self, path: str, *, writable: bool = True) -> None:
        fds: list[int] = []
        self._closing: Cleanup | None = Cleanup(syscalls.drain, (map(os.close, fds),))
        syscalls.open_into(fds, path, os.O_RDWR if writable else os.O_RDONLY)
        self.fd = fds[0]
        self.status = syscalls.status(self.fd)
        if self.status.st_size != syscalls.PAGE:
            detail = f"{self.status.st_size} bytes instead of {syscalls.PAGE}"
            raise CorruptionError(path=path, detail=detail)
        self._mapping, self.address, _ = syscalls.reserve(syscalls.PAGE)
        syscalls.map_shared(self.address, self.fd, syscalls.PAGE, writable=writable)

    def close_file(self) -> None:
        """Closes the file. The mapping stays, and so do the locks where `mappings_keep_locks`."""
        self.fd, self._closing = -1, None

    def __reduce__(self) -> NoReturn:
        raise TypeError("a mapped page can't be pickled or copied: send the path of its file, and map that there")


# --- deadlines, and the clock that all processes of a boot share -----------------------------------------------------


def deadline_after(seconds: float) -> float:
    """Returns the monotonic time in `seconds` (may be infinite: a year serves). Raises TypeError, ValueError."""
    try:
        if not seconds >= 0:  # nan, too
            raise ValueError(f"a timeout is a number of seconds, 0 or more, and not {seconds!r}")
        return time.monotonic() + float(min(seconds, 365 * 86400.0))
    except TypeError:
        raise TypeError(f"a timeout is a number of seconds, and not {seconds!r}") from None


# Returns nanoseconds since boot, suspend included: leases are compared across processes.
boot_clock = functools.partial(time.clock_gettime_ns, time.CLOCK_BOOTTIME)


def boot_id() -> bytes:
    """Returns 16 bytes that tell the boots of all machines apart."""
    return _read_boot_id(syscalls.BOOT_ID)


@functools.cache
def _read_boot_id(path: str) -> bytes:
    """Reads it once a process, which doesn't outlive its boot: to open the file takes 30 us."""
    with open(path) as file:
        return bytes.fromhex(file.read().strip().replace("-", ""))
