"""The launchers of a mesh, as `serve` gives them orders. This module imports no Monarch until there is a mesh."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from memstore import errors
from memstore._threads import between_forks
from memstore.distributed.links import hello_of_this_process
from memstore.distributed.meshes.messages import Failed, Order, Report, decode_report, encode, last_line
from memstore.errors import MemstoreError, MissingPackageError, NotServedError, StoreTimeoutError

_GRACE = 2.0  # seconds that an answer may be late, by a launcher that knows its time
_STOP_WITHIN = 5.0  # seconds

Answer = TypeVar("Answer", bound=Report)


class Launchers:
    """One a host of the mesh, from the making until `close`.

    Attributes:
        count: how many.

    Raises:
        MissingPackageError: Monarch isn't installed.
        TypeError: it is no host mesh.
        StoreTimeoutError: Monarch has not reached all of its hosts.
        NotServedError: Monarch can't start processes there: the mesh was shut down, for instance.
    """

    def __init__(self, host_mesh: Any, deadline: float) -> None:
        if not hello_of_this_process().monarch:
            advice = "pip install 'torchmonarch>=0.7,<0.8'"
            raise MissingPackageError(f"memstore.serve needs torchmonarch (Linux, Python 3.10 to 3.13): {advice}")
        with between_forks():
            from monarch.actor import HostMesh, this_proc

            from memstore.distributed.meshes.launcher import Overseer
        if not isinstance(host_mesh, HostMesh):
            raise TypeError(
                f"memstore.serve takes a HostMesh of Monarch, such as this_host() or attach_to_workers(...), and not "
                f"{type(host_mesh).__name__}; without Monarch, each host runs `memstore serve`"
            )
        try:
            host_mesh.initialized.get(max(deadline - time.monotonic(), 0.1))
        except TimeoutError:
            raise StoreTimeoutError(
                "Monarch has not reached all hosts of the mesh in time, and doesn't say which one is missing: see "
                "whether the worker of each runs, at the address that the mesh was given"
            ) from None
        except Exception as error:  # of any class: Monarch's are many, and its own affair
            raise NotServedError(f"Monarch could not attach to the mesh: {last_line(error)}") from error
        self._overseer: Any = this_proc().spawn("memstore_overseer", Overseer)
        self._names: dict[int, str] = {}
        self._dead: set[int] = set()
        try:
            self.count: int = self._get(self._overseer.spawn.call_one(host_mesh), deadline - time.monotonic())
        except BaseException:
            self.close()
            raise

    def name(self, rank: int, name: str) -> None:
        """What the host is called in errors from now on."""
        self._names[rank] = name

    def ask(self, orders: Mapping[int, Order], kind: type[Answer], deadline: float) -> dict[int, Answer]:
        """Gives orders, by rank. Returns when all have answered.

        Raises:
            NotServedError, or another one of memstore.errors: a launcher could not do it, or is dead. It names it.
            StoreTimeoutError: a launcher did not answer in time.
        """
        seconds = max(deadline - time.monotonic(), 0.0) + _GRACE
        sent = {rank: encode(order) for rank, order in orders.items()}
        heard = self._get(self._overseer.ask.call_one(sent, seconds), seconds + _GRACE)
        found: dict[int, Answer] = {}
        failures: list[MemstoreError] = []
        for one in heard:
            if not one.report:
                self._dead.add(one.rank)
            report = decode_report(one.report) if one.report else Failed("", NotServedError.__name__, one.why)
            if isinstance(report, kind):
                found[one.rank] = report
            elif isinstance(report, Failed):
                failures.append(_error(report.host or self._name(one.rank), report))
        if failures:
            raise failures[0]
        silent = [self._name(rank) for rank in orders if rank not in found]
        if silent:
            raise StoreTimeoutError(f"{', '.join(silent)}: no answer of the launcher there in time")
        return found

    def try_ask(self, order: Order, kind: type[Answer], seconds: float) -> None:
        """Gives an order to all that live. Monarch ends this process for a message to one that doesn't."""
        living = [rank for rank in range(self.count) if rank not in self._dead]
        try:
            self.ask(dict.fromkeys(living, order), kind, time.monotonic() + seconds)
        except (MemstoreError, TimeoutError):
            return

    def close(self) -> None:
        """Ends their processes, and what they have open."""
        try:
            self._overseer.end.call_one().get(_STOP_WITHIN)
            self._overseer.stop().get(_STOP_WITHIN)
        except Exception:
            return

    def _name(self, rank: int) -> str:
        return self._names.get(rank) or f"host {rank} of the mesh"

    def _get(self, future: Any, seconds: float) -> Any:
        try:
            return future.get(max(seconds, 0.1))
        except TimeoutError:
            raise StoreTimeoutError("Monarch's launchers did not come up in time") from None
        except Exception as error:  # as above
            raise NotServedError(f"Monarch could not start launchers on the mesh: {last_line(error)}") from error


def _error(name: str, failed: Failed) -> MemstoreError:
    """As it was raised on the host, with its name."""
    found = getattr(errors, failed.error, None)
    make: Callable[[str], MemstoreError] = NotServedError
    if isinstance(found, type) and issubclass(found, MemstoreError):
        make = found
        text = failed.text
    else:
        text = failed.text if failed.error == NotServedError.__name__ else f"{failed.error}: {failed.text}"
    return make(f"{name}: {text}")
