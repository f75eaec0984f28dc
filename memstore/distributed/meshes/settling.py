"""When a cluster that was started is ready: all are members, and have given and taken what moved with that."""

from __future__ import annotations

import time
from collections.abc import Sequence

from memstore.distributed.rules import View
from memstore.distributed.serving import Cluster, served_standing
from memstore.errors import StoreTimeoutError

_LOOK_EVERY = 0.02  # seconds
_OPEN_WITHIN = 10.0  # seconds


def settle(root: str, addresses: Sequence[str], seconds: float) -> View:
    """Waits until hosts have settled in an epoch in which all of them are members. Returns its view.

    Args:
        root: of one of them.
        addresses: of all.

    Raises StoreTimeoutError: not in that time; it names those that haven't.
    """
    deadline = time.monotonic() + seconds
    cluster = Cluster(root)
    while True:
        view = served_standing(root, _OPEN_WITHIN).view
        members = {member.address for member in view.members}
        late = [one for one in addresses if one not in members]
        what = "no members yet"
        if not late:
            settled = cluster.settled_in(view)
            late = [member.address for member in view.members if member.address not in settled]
            what = "not settled yet"
            if not late:
                return view
        if time.monotonic() > deadline:
            raise StoreTimeoutError(f"{', '.join(late)}: {what}, after {seconds:.3g} s")
        time.sleep(_LOOK_EVERY)
