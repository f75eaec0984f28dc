"""Before a root that has keys joins a cluster: has the cluster keys of the same names? Then it must not.

Nothing is changed by looking. What is put between the look and the joining is settled by the rules: the later one wins.
"""

from __future__ import annotations

from memstore.distributed.rules import (
    Ask,
    Found,
    IsView,
    Member,
    Refused,
    Steps,
    Tables,
    View,
    look_up_at,
    pause,
    send,
    view,
)

SHOWN = 10  # names
_PAGE = 256  # keys: their records come with the answer
_AGAIN = 0.2  # seconds


def taken_keys(seed: str, member: Member) -> Steps[list[str] | Refused]:
    """Keys of this root that the cluster has too, the first few; or what the seed says to who asks."""
    while True:
        # Of no epoch: so it is told the view, and not heard.
        answer = yield from send(seed, Ask(member, None, 0, False, 0))
        if isinstance(answer, Refused):
            return answer
        if isinstance(answer, IsView):
            taken = yield from _taken(answer.view)
            if taken is not None:
                return taken
        yield from pause(_AGAIN)


def _taken(cluster: View) -> Steps[list[str] | None]:
    """None: there is another epoch by now, or a home doesn't answer."""
    taken: list[str] = []
    after = b""
    while len(taken) < SHOWN:
        keys = yield from view(lambda tables, start=after: _keys(tables, start))
        if not keys:
            break
        after = keys[-1]
        for home, asked in _by_home(cluster, keys).items():
            member = cluster.member(home)
            assert member is not None, "a home is a member"
            answer = yield from look_up_at(member, cluster.epoch, asked)
            if not isinstance(answer, Found):
                return None
            found = zip(asked, answer.entries, strict=True)
            taken += [key.decode() for key, entry in found if entry is not None]
    return taken[:SHOWN]


def _keys(tables: Tables, after: bytes) -> list[bytes]:
    return [key for key, _ in tables.page(after, _PAGE)]


def _by_home(cluster: View, keys: list[bytes]) -> dict[bytes, list[bytes]]:
    homes: dict[bytes, list[bytes]] = {}
    for key in keys:
        homes.setdefault(cluster.home_of(key), []).append(key)
    return homes
