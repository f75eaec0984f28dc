"""A cluster as seen from a process that is on none of its hosts, such as a controller on a login node."""

from __future__ import annotations

from memstore.distributed.rules import View
from memstore.distributed.serving import Asker, Cluster, halt, raise_silent
from memstore.engine import deadline_after


class FarCluster(Cluster):
    """It knows the members of the moment when they were served, and holds their secret. It can't be pickled."""

    def __init__(self, root: str, view: View, secret: bytes) -> None:
        self.root = root
        self._known, self._known_secret = view, secret

    def stop(self, *, timeout: float = 30.0) -> None:
        with Asker(self._known_secret) as asker:
            raise_silent(halt(asker, self._known.members, deadline_after(timeout)))

    def _view(self) -> View:
        return self._known

    def _secret(self) -> bytes:
        return self._known_secret

    def __reduce__(self) -> tuple[object, ...]:
        raise TypeError("a cluster that is on other hosts has their secret, and isn't sent: send its root")
