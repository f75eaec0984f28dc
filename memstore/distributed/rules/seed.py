"""The seed: who is a member is decided here, and nowhere else.

It changes the view only when all members have settled in it, so at most one move of homes is under way. A removal can't
wait: it leaves out the member that the others may be waiting for, and what all had settled in before stays what counts.

What it keeps in memory it hears again from everybody four times a second.
"""

from __future__ import annotations

from memstore.distributed.rules.members import EPOCH_BITS, MOST_EPOCHS, Member, Standing, View
from memstore.distributed.rules.messages import Answer, Ask, IsView, Refused, Remove
from memstore.distributed.rules.moving import adopt
from memstore.distributed.rules.tables import Tables


def found(tables: Tables, member: Member, cluster: bytes) -> None:
    """The first member makes the cluster. It is at home for all of its keys; new versions go on above theirs."""
    epoch = (tables.version >> EPOCH_BITS) + 1
    adopt(tables, member.id, View(cluster, epoch, (member,), (member.id,), member.id))


class Seed:
    """What the seed has heard since it was started."""

    def __init__(self) -> None:
        self._waiting: dict[bytes, Ask] = {}
        self._settled: tuple[int, set[bytes]] = (0, set())

    def answer(self, tables: Tables, standing: Standing, ask: Ask) -> Answer:
        view, asker = standing.view, ask.member
        known = view.member(asker.id)
        if ask.cluster is not None and ask.cluster != view.cluster:
            return Refused("the root belongs to another cluster")
        if known is None and ask.cluster is not None:
            return Refused("the root was removed from this cluster: serve an empty one", is_removed=True)
        if known is not None and known.address != asker.address:
            return Refused(f"a host at {known.address} has this root: serve it there, or remove that host")
        if asker.id == standing.member and not asker.is_home:
            return Refused("the seed is a home: there must be one")
        if ask.versions >> EPOCH_BITS >= MOST_EPOCHS:
            return Refused(f"its root has a version {ask.versions}, and none can be that large: serve an empty one")
        if ask.epoch != view.epoch:  # it says what once was, or the asker hasn't heard of this epoch: it asks again
            return IsView(view)
        lost = next((one for one in view.members if one.address == asker.address and one.id != asker.id), None)
        if lost is not None:  # that host has a new root, so the old one is gone
            return self.remove(tables, standing, Remove(lost.id))
        if ask.is_settled:
            self._note_settled(view, asker)
        if known != asker:
            self._waiting[asker.id] = ask
        if self._waiting and self._all_settled(view):
            view = self._admit(tables, standing)
        return IsView(view)

    def remove(self, tables: Tables, standing: Standing, request: Remove) -> Answer:
        view = standing.view
        if request.member == standing.member:
            return Refused("the seed can't be removed")
        self._waiting.pop(request.member, None)  # what it asked for while it lived
        if request.member in view.ids:
            before = view.homes if self._all_settled(view) else view.before
            members = tuple(member for member in view.members if member.id != request.member)
            view = View(view.cluster, view.epoch + 1, members, before, view.seed)
            adopt(tables, standing.member, view)
        return IsView(view)

    def _note_settled(self, view: View, member: Member) -> None:
        if self._settled[0] != view.epoch:
            self._settled = (view.epoch, set())
        self._settled[1].add(member.id)

    def _all_settled(self, view: View) -> bool:
        return self._settled[0] == view.epoch and self._settled[1] >= view.ids

    def _admit(self, tables: Tables, standing: Standing) -> View:
        """All who wait, and who wants to be a home or not any longer."""
        view = standing.view
        coming = {ask.member.id: ask.member for ask in self._waiting.values()}
        versions = max(ask.versions for ask in self._waiting.values())
        self._waiting.clear()
        members = (*(one for one in view.members if one.id not in coming), *coming.values())
        epoch = max(view.epoch, versions >> EPOCH_BITS) + 1
        view = View(view.cluster, epoch, members, view.homes, view.seed)
        adopt(tables, standing.member, view)
        return view
