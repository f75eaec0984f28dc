"""How a value that lives in its record is put, whatever version its key has: the protocol of `commit.py`, cut short.

There is nothing to claim or fill, no note and no header; what is left of its steps 4 and 5, in one hold of the mutex:
write the record over the one that is there, and commit; if that one had a segment, it is retired in the same
transaction, and its header marked afterwards; change the doorbell and the ring sequence. After the mutex: wake the
waiters, look whether the path still names this store, sweep if there is something to do. A kill leaves what it leaves
there.
"""

from __future__ import annotations

from memstore.engine.catalog import Counters, Transaction
from memstore.engine.protocols.commit import Content, record_of, replace_segment, sweep_after
from memstore.engine.protocols.recovery import mark_retired
from memstore.engine.root import Root


def commit_inline(root: Root, key: bytes, content: Content, deadline: float) -> int:
    """Publishes one inline value in half the time of `commit`. Returns the new version."""
    bell, page, guard = root.doorbell.bell(key), root.mutex, root.guard

    def apply(transaction: Transaction) -> tuple[int, Counters]:
        counters = transaction.counters()
        counters.version += 1
        counters.number += 1
        counters.publications += 1
        record = record_of(content, counters.version, counters.number)
        replaced = transaction.replace_record(key, record)
        if replaced:
            replace_segment(transaction, counters, replaced)
        transaction.put_counters(counters)
        return replaced, counters

    def publish() -> tuple[int, Counters]:
        root.glance()  # it may have waited long for the mutex
        with guard:
            replaced, counters = root.catalog.update(apply)
        if replaced:
            mark_retired(root, [replaced])
        root.doorbell.change(bell)
        page.publications_rung = counters.publications
        return replaced, counters

    replaced, counters = page.run(publish, deadline)
    root.doorbell.wake(bell)
    root.check_in_place()
    if replaced or counters.retired or counters.held or counters.filling:
        sweep_after(root, counters, 1)
    return counters.version
