"""Store: what a user calls. Its methods glue values (contents, structure) to the engine, which has the protocols."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterable
from typing import Any

from memstore import contents, listing
from memstore.engine import Creation, RootUse, deadline_after, index, open_root, resource_errors, verify_store
from memstore.errors import MemstoreError
from memstore.info import EntryInfo, Progress, VerifyReport
from memstore.keys import encode_key, encode_prefix, several
from memstore.listing import Mode
from memstore.store.as_mapping import AsMapping
from memstore.store.by_files import ByFiles
from memstore.store.by_ranks import ByRanks
from memstore.store.by_rows import ByRows
from memstore.store.describe import describe
from memstore.structure import modes
from memstore.wording import ROWS, check_progress, names_its_methods, shown, table_html

_CLEARED_AT_ONCE = 4096  # keys; it takes 40 ms, and others wait for the mutex meanwhile
_SHOWN_WITHIN = 3.0  # seconds: a cell of a notebook doesn't wait longer for hosts that don't answer


@modes.uncompiled_methods
@names_its_methods
class Store(ByRanks, ByRows, ByFiles, AsMapping):
    """A folder of nested tensors under keys, shared by every process that opens it. Made by `memstore.open`.

    Thread-safe; usable in forked children; pickled by its root, so that spawned children and queues may carry it.
    Every method raises StoreClosedError after `close`, InvalidKeyError for an invalid key, and StoreTimeoutError if it
    could not get a lock within `timeout` seconds (None: as given to `open`).

    Attributes:
        root: the folder, as an absolute path.
    """

    def __init__(
        self,
        use: RootUse,
        mode: Mode = "r",
        *,
        verify: bool = False,
        allow_pickle: bool = False,
        timeout: float = 30.0,
        asked: Mode | None = None,
    ) -> None:
        super().__init__(use, mode, timeout=timeout, asked=asked)
        self._verify, self._allow_pickle = verify, allow_pickle

    def clear(self, prefix: str = "", *, timeout: float | None = None) -> int:
        """Deletes all keys that start with `prefix`, also those of datasets and replay buffers.

        Values that were got stay valid. Up to 4,096 keys go at one moment, more of them in such steps, sorted; in a
        store on several hosts, those of one home after the other. Keys that are put meanwhile may stay. Sharded puts
        under such keys that wait for other ranks are given up. `open(root, "w")` begins a store anew as a whole.

        Args:
            prefix: as for `keys`; "" stands for all keys.
            timeout: seconds for each step; None: the store's.

        Returns:
            How many keys were deleted.

        Raises:
            ReadOnlyError: the store was opened with mode "r".
            HomeUnavailableError, UnknownOutcomeError: as in `delete`. What was deleted before stays so.

        Example:
            >>> import memstore, tempfile
            >>> with memstore.open(tempfile.mkdtemp()) as store:
            ...     versions = store.put_many({"runs/1": 1.0, "runs/2": 2.0, "seed": 7})
            ...     store.clear("runs/"), list(store)
            (2, ['seed'])
        """
        self._writable(timeout)
        start = encode_prefix(prefix)
        seconds = self._timeout if timeout is None else timeout
        deadline_after(seconds)  # raises for what is no number of seconds
        for one in self.pending(timeout=timeout):
            if one.key.startswith(prefix):
                self.abort(one.key, one.attempt, timeout=timeout)
        names, deleted = index.keys_from(self._writable, start, seconds), 0
        while step := [name.decode() for name in itertools.islice(names, _CLEARED_AT_ONCE)]:
            deleted += self.delete_many(step, missing_ok=True, atomic=False, timeout=timeout)
        if not deleted and listing.GLOB.intersection(prefix):
            warnings.warn(listing.no_match(prefix, "clear"), UserWarning, stacklevel=2)
        return deleted

    def info(self, key: str) -> EntryInfo:
        """Describes the current version of `key`, without reading its tensors.

        Raises:
            KeyNotFoundError: no such key.
            CorruptionError: its description is damaged.
            HomeUnavailableError: in a store on several hosts, the one that is the key's home didn't answer.
        """
        return describe(self._opened(), key, self._timeout)

    def verify(self, keys: Iterable[str] | None = None, *, progress: Progress | None = None) -> VerifyReport:
        """Looks for damage: in the catalog, and in the records, files and bytes of `keys`, or of all.

        Others may go on reading and writing; if they replace a key meanwhile, its new version is checked.

        Args:
            keys: the keys to check; one that doesn't exist is reported among the damaged ones. None: all.
            progress: called with the bytes done, and the bytes in all.

        Returns:
            A report. Damage is listed in it, and raises nothing.

        Raises:
            ResourceLimitError: this process lacks files, memory or processes to look.

        Example:
            >>> import memstore, tempfile, torch
            >>> with memstore.open(tempfile.mkdtemp(), checksum=True) as store:
            ...     version = store.put("policy", torch.ones(1000))
            ...     store.verify()
            memstore.VerifyReport: nothing is damaged; 1 checked, 0 without checksums
        """
        root = self._opened()
        check_progress(progress)
        names = None if keys is None else [encode_key(key) for key in several(keys)]
        with resource_errors(self.root, None, root):
            return verify_store(root, names, contents.verify, progress, self._timeout, may_lock=self._mode != "r")

    def __reduce__(self) -> tuple[Any, ...]:
        self._opened()
        return reopen, (self.root, self._mode, self._verify, self._allow_pickle, self._timeout)

    def __dir__(self) -> list[str]:
        return [name for name in super().__dir__() if name != "lend_root"]  # which is for other parts of memstore

    def _repr_html_(self) -> str:
        if self._root is None:
            return table_html((), (), repr(self))
        try:
            seconds = min(self._timeout, _SHOWN_WITHIN)
            rows = list(itertools.islice(map(listing.cells, listing.entries(self, timeout=seconds)), ROWS))
            keys = shown(self._count(seconds), "key", "keys")
        except MemstoreError as error:  # other hosts don't answer, or the catalog is damaged
            return table_html((), (), f"{self._title()}: {error}")
        return table_html(listing.COLUMNS, rows, f"{self._title()}: {keys}")


def reopen(path: str, mode: Mode, verify: bool, allow_pickle: bool, timeout: float) -> Store:
    """Unpickles a Store: opens the one that is there by now. Errors as `memstore.open`."""
    with resource_errors(path):
        use = open_root(path, mode, Creation(), timeout)
    return Store(use, mode, verify=verify, allow_pickle=allow_pickle, timeout=timeout)
