"""How a process that is no index process asks them how they are: for `memstore status`, `remove`, and `Cluster`."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

from memstore.distributed.actors import FindActor
from memstore.distributed.links import CLIENT, Links, hello_of_this_process
from memstore.distributed.rules import Member, Standing
from memstore.distributed.serving.messages import Asking, Halt, Report, Told, decode_answer, encode
from memstore.distributed.serving.reporting import standing_of
from memstore.engine import Creation, absolute_path, close_root, open_root
from memstore.errors import HomeUnavailableError, MemstoreError, NotServedError

_AT_ONCE = 32  # hosts
_AGAIN = 0.1  # seconds
_SILENT = "no answer in time; somebody listens there"


def standing_at(root: str, timeout: float) -> Standing | None:
    """What a root knows of its cluster; None: it was never served."""
    use = open_root(absolute_path(root), "r", Creation(), timeout)
    try:
        return standing_of(use.root)
    finally:
        close_root(use)


def served_standing(root: str, timeout: float) -> Standing:
    """Raises NotServedError where `standing_at` returns None."""
    standing = standing_at(root, timeout)
    if standing is None:
        raise NotServedError(f"{root} was never served: memstore serve {root} --address tcp://IP:PORT")
    return standing


class Asker:
    """Asks members. Use it in a `with`.

    Args:
        secret: of the cluster; None: it has none.
    """

    def __init__(self, secret: bytes | None) -> None:
        self._links = Links(secret=secret, kind=CLIENT, hello=hello_of_this_process())

    def ask(
        self,
        member: Member,
        request: Asking,
        deadline: float,
        *,
        patience: float = float("inf"),
    ) -> Told | None:
        """Asks, and asks again where a connection breaks or can't be made.

        Args:
            deadline: monotonic.
            patience: seconds after which it isn't asked again: an index process that was killed is back by then.

        Returns: the answer. None: there was none.

        Raises:
            LinkRefusedError: another secret, protocol or member is there.
        """
        last_try = min(deadline, time.monotonic() + patience)
        while True:
            with contextlib.suppress(HomeUnavailableError):
                received = self._links.send(member.address, member.id, encode(request), deadline)
                if received is not None:
                    return decode_answer(received)
            if time.monotonic() + _AGAIN > last_try:
                return None
            time.sleep(_AGAIN)

    def ask_all(
        self,
        members: Iterable[Member],
        request: Report | Halt | FindActor,
        deadline: float,
        *,
        patience: float = float("inf"),
    ) -> dict[bytes, object]:
        """By member: the answer, or the error by which there was none."""

        def one(member: Member) -> object:
            try:
                answer = self.ask(member, request, deadline, patience=patience)
            except MemstoreError as error:
                return error
            return HomeUnavailableError(self._links.trouble_of(member.address) or _SILENT) if answer is None else answer

        asked = list(members)
        with ThreadPoolExecutor(_AT_ONCE) as threads:
            return dict(zip((member.id for member in asked), threads.map(one, asked), strict=True))

    def __enter__(self) -> Asker:
        return self

    def __exit__(self, *_: object) -> None:
        self._links.close()
