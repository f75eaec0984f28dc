"""Step 4 of a put or delete, wherever the home of its keys is: on this host by `commit.py`, elsewhere by a message.

Which host is the home is remembered, under the number `membership` of the catalog's counters: `root.homes_here` has
it of groups of keys (their text before the first `/`) whose home was found to be here. The transaction of a commit
compares that number, which it reads anyway, and gives up before it has changed anything where it differs. So a store
that nobody serves, whose number is 0, pays a comparison of two integers, and a served one a look into a dict.
"""

from __future__ import annotations

from collections.abc import Sequence

from memstore.engine.protocols.change import Change, MembershipChanged
from memstore.engine.protocols.commit import commit
from memstore.engine.protocols.commit_inline import commit_inline
from memstore.engine.protocols.elsewhere import elsewhere_of
from memstore.engine.root import Root


def publish(root: Root, changes: Sequence[Change], deadline: float) -> list[int]:
    """As `commit`. Raises CrossHostError, HomeUnavailableError, UnknownOutcomeError and StaleMembershipError too."""
    while True:
        membership = 0
        if root.membership:
            if len(changes) == 1:
                membership = root.homes_here.get(changes[0].key.partition(b"/")[0], 0)
            membership = membership or elsewhere_of(root).home_here([change.key for change in changes], deadline)
            if not membership:
                return elsewhere_of(root).commit(changes, deadline)
        try:
            return commit(root, changes, deadline, membership=membership)
        except MembershipChanged:
            elsewhere_of(root).take_in(deadline)


def publish_inline(root: Root, change: Change, deadline: float) -> int:
    """As `commit_inline`. Raises as `publish`."""
    while True:
        membership = 0
        if root.membership:
            membership = root.homes_here.get(change.key.partition(b"/")[0], 0)
            membership = membership or elsewhere_of(root).home_here((change.key,), deadline)
            if not membership:
                return elsewhere_of(root).commit([change], deadline)[0]
        try:
            return commit_inline(root, change, deadline, membership=membership)
        except MembershipChanged:
            elsewhere_of(root).take_in(deadline)


def check_one_home(root: Root, keys: Sequence[bytes]) -> None:
    """Before anything is done for a change of several keys. Raises CrossHostError."""
    if root.membership:
        elsewhere_of(root).home_here(keys)
