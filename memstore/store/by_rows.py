"""The methods of a Store for entries whose rows are written in place. What they do stands in `memstore/datasets`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Literal

from memstore.engine import resource_errors
from memstore.errors import KeyNotFoundError, ReadOnlyError
from memstore.keys import check_key, encode_key
from memstore.late_imports import between_forks
from memstore.listing import Keyspace, absent

if TYPE_CHECKING:
    from memstore.datasets import Dataset, Spec
    from memstore.engine import MappedEntry, Root


class ByRows(Keyspace):
    """What `Store` inherits."""

    def create_dataset(
        self, key: str, spec: Spec, *, capacity: int, length: int = 0, timeout: float | None = None
    ) -> Dataset:
        """Makes a dataset: rows of tensors that every process of the host writes and reads in place.

        All of its space is reserved now.

        Args:
            key: a key that doesn't exist.
            spec: describes a row: `{"x": ((84, 84, 4), torch.uint8), "y": ((), torch.int64), "more": {...}}`; one
                `(shape, dtype)`; or an example of a row: a TensorDict, a tensorclass, a tensor, a dict of tensors.
            capacity: the most rows that it can ever have.
            length: how many rows of zeros it has from the start, to be written by `dataset[i:j] = batch`.
            timeout: seconds; None: the store's.

        Returns:
            The dataset, open to read and write.

        Raises:
            AlreadyExistsError: the key exists already.
            StoreFullError: no room for all of its rows. Nothing was changed.
            TypeError, ValueError: `spec`, `capacity` or `length` is invalid.
            UnsupportedValueError: a leaf that can't be written in place.
            ReadOnlyError: the store was opened with mode "r".
            HomeUnavailableError, UnknownOutcomeError: as in `put`.

        Example:
            >>> import memstore, tempfile, torch
            >>> with memstore.open(tempfile.mkdtemp()) as store:
            ...     data = store.create_dataset("frames", {"x": ((2,), torch.float32)}, capacity=1000)
            ...     data.extend({"x": torch.ones(3, 2)})
            ...     data[1:3]["x"].sum()
            range(0, 3)
            tensor(4.)
        """
        root, deadline = self._before_a_creation(timeout)
        with between_forks():
            from memstore.datasets import create_dataset

        check_key("create_dataset", key, spec, "the spec")
        return create_dataset(root, key, spec, capacity, length, self._seconds(timeout), deadline)

    def create_dataset_from(
        self, key: str, value: Any, *, capacity: int | None = None, timeout: float | None = None
    ) -> Dataset:
        """Makes a dataset from a batch; it has the rows of the batch from the start.

        Args:
            key: a key that doesn't exist.
            value: a batch of rows: a TensorDict, a tensorclass, a tensor or a dict of tensors whose first dimension
                counts the rows; a view too.
            capacity: the most rows that it can ever have; None: the number of rows of `value`.
            timeout: seconds; None: the store's.

        Returns:
            The dataset, open to read and write.

        Raises:
            MemstoreError, TypeError, ValueError: as `create_dataset`.
        """
        root, deadline = self._before_a_creation(timeout)
        with between_forks():
            from memstore.datasets import create_dataset_from

        check_key("create_dataset_from", key, value, "the rows")
        return create_dataset_from(root, key, value, capacity, self._seconds(timeout), deadline)

    def open_dataset(self, key: str, mode: Literal["r", "r+"] = "r+", *, wait: float | None = None) -> Dataset:
        """Opens a dataset that some process of the host has made.

        Args:
            key: its key.
            mode: "r+" reads and writes. "r" only reads: if you write to its tensors nevertheless, the change stays in
                this process, which no longer sees what others write to those pages.
            wait: seconds to wait until somebody has made it; None: it must exist.

        Returns:
            The dataset, open to read, and with "r+" to write.

        Raises:
            KeyNotFoundError: no such key, and no `wait`.
            StoreTimeoutError: nobody has made it within `wait` seconds.
            MutableEntryError: the key is that of another kind of entry.
            ReadOnlyError: mode "r+", and the store was opened with mode "r".
            CorruptionError: the file is damaged.
            CrossHostError: its rows are on another host.
            HomeUnavailableError: in a store on several hosts, the one that is the key's home didn't answer.
        """
        with between_forks():
            from memstore.datasets import open_dataset
            from memstore.engine import index

        if mode not in ("r", "r+"):
            raise ValueError(f"mode is 'r' or 'r+', and not {mode!r}")
        if mode == "r+" and self._mode == "r":
            raise ReadOnlyError(
                f"{self.root} was opened with mode 'r', and a dataset is opened with mode 'r+' unless you say "
                f"otherwise: open_dataset({key!r}, 'r') reads its rows",
                key=key,
            )
        root, name = self._opened(), encode_key(key)
        if wait is not None:
            index.wait_for(self._opened, name, 0, wait, mutable=True)
        try:
            return open_dataset(root, key, self._timeout, writable=mode != "r")
        except KeyNotFoundError:
            raise absent(root, name) from None

    def lend_root(self, key: str) -> tuple[Root, float, bool]:
        """For parts of memstore that stand above the store: its root, its timeout, and whether it may be written.

        Raises InvalidKeyError, StoreClosedError.
        """
        encode_key(key)
        return self._opened(), self._timeout, self._mode != "r"

    def _hold_rows(self, root: Root, key: str) -> MappedEntry:
        with between_forks():
            from memstore.datasets import hold_rows

        return hold_rows(root, key, self._timeout)

    def _before_a_creation(self, timeout: float | None) -> tuple[Root, float]:
        """The root, and the call's deadline.

        The first creation of a process imports tensordict, which takes a second: who can't have the store's mutex is to
        hear it in time, and not after that.
        """
        deadline = self._deadline(timeout)
        root = self._writable(timeout)
        if "tensordict" not in sys.modules:
            with resource_errors(self.root, None, root):
                root.mutex.run(lambda: None, deadline)
        return root, deadline

    def _seconds(self, timeout: float | None) -> float:
        return self._timeout if timeout is None else timeout
