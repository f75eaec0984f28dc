"""A robust mutex in memory that processes share. What it protects is made whole by the next owner if one dies.

Beside the mutex stands a *dirty word*. It says that the last owner died or failed in the middle of a change, or that
nobody has owned the mutex yet; as long as it says so, an owner recovers before it does anything else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from memstore.engine import syscalls
from memstore.errors import ContentionError, StoreTimeoutError

Result = TypeVar("Result")

_DIED, _NEW, _FAILED = 1, 2, 4  # bits of the dirty word


class Refusal(Exception):
    """Raised by an action to say that it has changed nothing, and that its caller knows why: no recovery is due."""


class RobustMutex:
    """A mutex at an address. The caller keeps the memory mapped as long as this object lives.

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

    def run(self, action: Callable[[], Result], deadline: float) -> Result:
        """Calls `action` under the mutex. If it raises, the next owner recovers first.

        Written so that no Python function is entered between a change of the mutex and the code that answers for it:
        a KeyboardInterrupt is raised at such entries, and after calls.
        """
        address, owner, inside, me = self.address, self._owner, self._inside, syscalls.thread_id()
        if me in inside:
            raise ContentionError(
                f"{self._name}: this thread is in the middle of a change already: a signal handler or finalizer must "
                "not make another one"
            )
        inside[me] = True
        try:
            self._lock(deadline, me)
            if self._dirty[0] and self.recover is not None:
                self.recover()
                self._dirty[0] = 0
            return action()
        except self._refusals:
            raise
        except BaseException:
            if owner[0] & syscalls.MUTEX_OWNER == me:
                self._dirty[0] |= _FAILED
                syscalls.mutex_recovered(address)  # interrupted before `_lock` said so: unlocked as it is, it is lost
            raise
        finally:
            if me in inside:  # a child that was forked in the middle has forgotten it. (No call here: see above)
                del inside[me]
            if owner[0] & syscalls.MUTEX_OWNER == me:
                syscalls.mutex_unlock(address)

    def _lock(self, deadline: float, me: int) -> None:
        if self._owner[0] & syscalls.MUTEX_OWNER == me:  # an interrupt got past `run`: we hold it still
            self._dirty[0] |= _FAILED
            return
        code = syscalls.mutex_lock(self.address, deadline)
        if code == syscalls.OWNER_DIED:
            self._dirty[0] |= _DIED
            syscalls.mutex_recovered(self.address)
        elif code == syscalls.TIMED_OUT:
            who = describe_thread(self.owner())
            raise StoreTimeoutError(f"{self._name}: waited for the mutex, held by {who}: look at what it does")

    def owe_recovery(self) -> None:
        """Under the mutex: the next owner recovers, as if this one had failed."""
        self._dirty[0] |= _FAILED

    def forget_threads(self) -> None:
        """In a forked child, whose thread ids are others."""
        self._inside.clear()

    @property
    def is_held(self) -> bool:
        """Whether this thread holds it. In the middle of an action: False in a child that was forked there."""
        return self.owner() == syscalls.thread_id()

    def owner(self) -> int:
        """The thread id that holds the mutex, 0 if none does."""
        return self._owner[0] & syscalls.MUTEX_OWNER

    @property
    def is_new(self) -> bool:
        """While recovering: nobody has owned the mutex since it was created."""
        return bool(self._dirty[0] & _NEW)

    @property
    def has_died(self) -> bool:
        """While recovering: an owner died in the middle of a change."""
        return bool(self._dirty[0] & _DIED)


def describe_thread(thread: int) -> str:
    """Names the process of a thread id."""
    try:
        with open(f"/proc/{thread}/status") as file:
            fields = dict(line.rstrip("\n").split(":\t", 1) for line in file if ":\t" in line)
        return f"pid {fields['Tgid'].strip()} ({fields['Name']}, {fields['State']})"
    except (OSError, KeyError, ValueError):
        return f"thread {thread}, which can't be seen from here"
