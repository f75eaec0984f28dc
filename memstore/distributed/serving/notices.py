"""What an index process tells people of its cluster: who has joined and gone, and who runs other versions."""

from __future__ import annotations

import time

from memstore.distributed.links import Hello
from memstore.distributed.rules import Member, Standing, View
from memstore.distributed.serving.silence import LONG


def named(member: Member) -> str:
    return f"{member.name or 'a host'} at {member.address}"


class Notices:
    """Args:
    own: this host.
    hello: what this process says of itself.
    """

    def __init__(self, own: Member, hello: Hello) -> None:
        self._own, self._hello = own, hello
        self._view: View | None = None
        self._missing: tuple[bytes, ...] = ()
        self._told: set[str] = set()
        self._waits_since = 0.0  # monotonic

    def of_standing(self, standing: Standing) -> list[str]:
        """What has changed since the last call."""
        before, view = self._view, standing.view
        self._view = view
        lines = [f"epoch {view.epoch}: {change}" for change in _changes(before, view)] if before else []
        if before is None:
            hosts = "1 host" if len(view.members) == 1 else f"{len(view.members)} hosts"
            lines.append(f"{named(self._own)} is a member: epoch {view.epoch}, {hosts}, seed {view.seed_address}")
        if standing.missing and set(standing.missing) != set(self._missing):
            names = ", ".join(_name_in(view, one) for one in standing.missing)
            lines.append(f"epoch {view.epoch}: keys are on their way from {names}")
        elif self._missing and not standing.missing:
            lines.append(f"epoch {view.epoch}: all keys that are at home here have come")
        self._missing = standing.missing
        return lines

    def of_waiting(self, seed: str, epoch: int) -> list[str]:
        """That the seed has answered, and has not let this host in, once for each epoch that lasts.

        Args:
            epoch: the last one that the seed has told; 0: none, which `Silences` tells.
        """
        now = time.monotonic()
        self._waits_since = self._waits_since or now
        text = (
            f"the seed {seed} lets {named(self._own)} in when all members have settled in epoch {epoch}: "
            "`memstore status` of the seed's folder says which of them don't answer"
        )
        if not epoch or now - self._waits_since < LONG or text in self._told:
            return []
        self._told.add(text)
        return [text]

    def of_hello(self, address: str, hello: Hello | None) -> list[str]:
        """That the host at this address runs other versions, once."""
        if hello is None:
            return []
        theirs, ours = _versions(hello), _versions(self._hello)
        differences = [f"{name} {theirs[name]}, this host {ours[name]}" for name in ours if theirs[name] != ours[name]]
        text = f"{hello.host or 'the host'} at {address} has {'; '.join(differences)}"
        if not differences or text in self._told:
            return []
        self._told.add(text)
        return [text]


def _name_in(view: View, member: bytes) -> str:
    found = view.member(member)
    return member.hex() if found is None else named(found)


def _changes(before: View, after: View) -> list[str]:
    old = {member.id: member for member in before.members}
    new = {member.id: member for member in after.members}
    changes = [f"{named(member)} has joined" for key, member in new.items() if key not in old]
    changes += [f"{named(member)} was removed" for key, member in old.items() if key not in new]
    for key, member in new.items():
        if key in old and old[key].is_home != member.is_home:
            changes.append(f"{named(member)} is {'a home' if member.is_home else 'no home any more'}")
    return changes


def _versions(hello: Hello) -> dict[str, str]:
    return {
        "memstore": hello.memstore,
        "torch": hello.torch or "missing",
        "monarch": hello.monarch or "missing",
    }
