"""The methods of a Store that put values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from memstore import contents, structure
from memstore.arguments import expected_version, expected_versions, flag
from memstore.engine import CatalogCrowded, Draft, Path, Root, at_each_home, check_version, index, put
from memstore.errors import InvalidKeyError, UnsupportedValueError
from memstore.keys import encode_key, refused_put
from memstore.listing import Keyspace
from memstore.store.mistakes import as_items, refuse_one_of_many

if TYPE_CHECKING:
    import torch


class Puts(Keyspace):
    """What `Store` inherits."""

    _allow_pickle: bool

    if TYPE_CHECKING:

        def put_sharded(
            self,
            key: str,
            value: Any,
            *,
            dtype: torch.dtype | None,
            expect_version: int | None,
            timeout: float | None,
        ) -> Any: ...

    def put(
        self,
        key: str,
        value: Any,
        *,
        dtype: torch.dtype | None = None,
        expect_version: int | None = None,
        timeout: float | None = None,
    ) -> int:
        """Stores a value as the new version of `key`; readers see all of it, or nothing.

        Args:
            key: 1 to 500 bytes of UTF-8.
            value: a tensor, TensorDict, tensorclass, or dicts, lists and tuples of them and of plain objects. If it has
                DTensors or other shards, this is `put_sharded`, and every rank has to call it.
            dtype: a real floating-point dtype. Real floating-point leaves are cast to it while they are copied,
                rounded as by `torch.Tensor.to`. Leaves that share memory still share it if all of them are cast from
                one dtype; otherwise each dtype is stored separately. None: no cast.
            expect_version: the version that the key must have; 0: it must not exist.
            timeout: seconds; None: the store's.

        Returns:
            The version. Versions of a key grow; they are not consecutive.

        Raises:
            UnsupportedValueError: a leaf can't be stored, or cast; the message names it. Nothing was written.
            TypeError: `dtype` isn't a real floating-point dtype.
            VersionConflictError: the key is at another version than `expect_version`.
            StoreFullError: no room. Nothing was changed.
            ReadOnlyError: the store was opened with mode "r".
            HomeUnavailableError: in a store on several hosts, the one that is the key's home didn't answer. Nothing was
                changed.
            UnknownOutcomeError: that host was asked to publish the value, and gave no answer.
        """
        root = self._writable(timeout)
        try:
            name = encode_key(key)
        except InvalidKeyError as error:
            raise refused_put(error, key, value) from None
        if expect_version is not None:
            expect_version = expected_version(expect_version)
        deadline = self._deadline(timeout)
        limit, pickles = contents.inline_limit(root), self._allow_pickle
        while True:
            try:
                flat = contents.flatten(key, value, root, limit=limit, allow_pickle=pickles, dtype=dtype)
            except UnsupportedValueError:
                if not structure.has_shards(value):
                    raise
                return self._put_sharded(key, value, dtype, expect_version, timeout)
            if expect_version is not None:
                self._check_early(root, {key: expect_version})
            try:
                (version,) = put(root, [contents.draft(root, name, flat, limit, expect_version)], deadline)
            except CatalogCrowded:
                limit = contents.inline_limit_when_crowded(root)
                continue
            self._puts += 1
            return version

    def _put_cast(self, key: str, value: Any, dtype: torch.dtype | None, below: Path, timeout: float | None) -> int:
        root, name = self._writable(timeout), encode_key(key)
        deadline = self._deadline(timeout)
        limit, pickles = contents.inline_limit(root), self._allow_pickle
        while True:
            flat = contents.flatten(key, value, root, limit=limit, allow_pickle=pickles, dtype=dtype, below=below)
            try:
                (version,) = put(root, [contents.draft(root, name, flat, limit, None)], deadline)
            except CatalogCrowded:
                limit = contents.inline_limit_when_crowded(root)
                continue
            self._puts += 1
            return version

    def _put_sharded(
        self, key: str, value: Any, dtype: torch.dtype | None, expect_version: int | None, timeout: float | None
    ) -> int:
        version = self.put_sharded(key, value, dtype=dtype, expect_version=expect_version, timeout=timeout)
        assert isinstance(version, int), "it has waited"
        return version

    def put_many(
        self,
        items: Mapping[str, Any],
        *,
        dtype: torch.dtype | None = None,
        expect_versions: Mapping[str, int] | None = None,
        atomic: bool = True,
        timeout: float | None = None,
    ) -> dict[str, int]:
        """Stores several values, which become visible at one moment, or not at all. Arguments and errors as `put`.

        `expect_versions` has the versions that keys of `items` must have, by key; 0: the key must not exist.

        In a store on several hosts, all keys of one call must have the same home, as keys with the same text before
        the first "/" have; otherwise CrossHostError is raised before anything is done. With `atomic` False there is one
        moment for each home, and after an error the values that were put at other homes stay.
        """
        root, items = self._writable(timeout), as_items(items)
        flag("atomic", atomic)
        expected = expected_versions(expect_versions)
        deadline = self._deadline(timeout)
        names = [encode_key(key) for key in items]
        if not names:
            return {}
        for key in expected:
            if key not in items:
                raise ValueError(
                    f"expect_versions names {key!r}, which is not among the items: put it too, or leave it out"
                )
        limit = contents.inline_limit(root)
        versions: dict[bytes, int] = {}

        def put_part(part: list[Draft]) -> None:
            versions.update(zip([draft.key for draft in part], put(root, part, deadline), strict=True))

        while True:
            flats: list[structure.Flat] = []
            for key, value in items.items():
                try:
                    flats.append(
                        contents.flatten(key, value, root, limit=limit, allow_pickle=self._allow_pickle, dtype=dtype)
                    )
                except UnsupportedValueError as error:
                    refuse_one_of_many(key, error)
            if expected:
                self._check_early(root, expected)
            drafts = [
                contents.draft(root, name, flat, limit, expected.get(key))
                for key, name, flat in zip(items, names, flats, strict=True)
                if name not in versions
            ]
            try:
                if atomic:
                    put_part(drafts)
                else:
                    at_each_home(root, drafts, lambda draft: draft.key, put_part)
                break
            except CatalogCrowded:
                limit = contents.inline_limit_when_crowded(root)
        self._puts += len(names)
        return {key: versions[name] for key, name in zip(items, names, strict=True)}

    def _check_early(self, root: Root, expected: Mapping[str, int]) -> None:
        """Before anything is copied; the commit checks again. No other host is asked for it."""
        for key, version in expected.items():
            found = index.known_version(root, encode_key(key))
            if found is not None:
                check_version(encode_key(key), version, found)
