"""What became of a seal whose sealer died, or had no answer: asked by the host that has the rows.

The seal was a call to the key's home, and may be on its way still. It expects the version that the entry had. So the
entry gets a new one, under the same name and with the same rows: once that is done, the seal is refused whenever it
comes. If the home is this host, its record says all: what other hosts would have made of a call is over when the record
has come here.
"""

from __future__ import annotations

from memstore.distributed.rules.changing import Client
from memstore.distributed.rules.looking import look_at
from memstore.distributed.rules.messages import Change, Place
from memstore.distributed.rules.reading import look_up
from memstore.distributed.rules.steps import Steps, view
from memstore.errors import MutableEntryError, VersionConflictError


def is_unsealed(client: Client, key: bytes, place: Place, until: int) -> Steps[bool]:
    """Whether the key still has the mutable entry whose rows lie there, and no seal can be made that was begun before.

    Args:
        place: on this host.
        until: as of `Client.commit`.

    Raises:
        HomeUnavailableError, UnknownOutcomeError: nobody knows.
        StaleMembershipError.
    """
    while True:
        look = yield from view(lambda tables: look_at(tables, [key]))
        standing, entries = look.standing, look.entries
        is_here = standing is None or standing.has_all_of(key)
        if not is_here:
            entries = yield from look_up([key])
        entry = entries[0]
        if entry is None or not entry.is_mutable or entry.places != (place,):
            return False
        if is_here:
            return True
        renewal = Change(key, b"", expect=entry.version, is_mutable=True, seals=place.put_id)
        try:
            yield from client.commit([renewal], until)
        except (VersionConflictError, MutableEntryError):
            continue  # it was changed meanwhile
        return True
