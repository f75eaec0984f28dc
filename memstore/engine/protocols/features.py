"""Features: what a store may hold that older versions of memstore don't know. These refuse it from then on."""

from __future__ import annotations

from memstore.engine.root import CLUSTER, MUTABLE, SHARDED, Feature, Root, folder
from memstore.errors import UnsupportedFilesystemError


def need_boxes(root: Root, deadline: float) -> None:
    """Lets the store have records with boxes."""
    _need(root, SHARDED, deadline)


def need_mutable(root: Root, deadline: float) -> None:
    """Lets the store have entries whose rows are written in place.

    Raises UnsupportedFilesystemError on storage that hosts share: rows are written through mappings, under a lock that
    the mapping keeps, and such a file system has neither to rely on.
    """
    if root.shared is not None:
        raise UnsupportedFilesystemError(
            f"{root.path} is on storage that hosts share, and a dataset's or buffer's rows are written in place, which "
            "takes mappings and locks of a local file system: create it in a store of this host alone, and put there "
            "what the other hosts are to have"
        )
    _need(root, MUTABLE, deadline)


def need_cluster(root: Root, deadline: float) -> None:
    """Lets the store be served to other hosts: it gets the tables for that. Raises NotAStoreError."""
    if CLUSTER in root.settings.features and root.catalog.is_served:
        return
    root.member_id()  # raises, before anything is changed
    _need(root, CLUSTER, deadline)
    root.mutex.run(root.catalog.create_served, deadline)


def _need(root: Root, feature: Feature, deadline: float) -> None:
    def add() -> None:
        root.check_in_place()
        root.settings = folder.add_feature(root.state, root.settings, feature)

    if feature not in root.settings.features:
        root.mutex.run(add, deadline)
