"""A snapshot that is there: its manifest, what each rank had, and its leaves by path."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from memstore import structure
from memstore.engine import Leaf
from memstore.errors import CorruptionError, MemstoreError, NotAStoreError, ShardMismatchError, VersionGoneError
from memstore.sharding import Box
from memstore.snapshot.cover import check_cover
from memstore.snapshot.format import MANIFEST, Manifest, StoredFile, StoredTensor, StoredValue, load_manifest, path_of
from memstore.snapshot.storage import FileStorage


class Value(NamedTuple):
    """A state dict as it is stored. `tensors` has one for each leaf of the plan."""

    key: str
    plan: structure.Plan
    objects: bytes
    tensors: tuple[StoredTensor, ...]

    def paths(self) -> Iterator[tuple[str, StoredTensor]]:
        """The leaves that are tensors, by path; of the keys 1 and "1" in a dict, the second has a "~" behind it."""
        seen: set[str] = set()
        for leaf, tensor in zip(self.plan.leaves, self.tensors, strict=True):
            path = path_of((self.key, *leaf.name))
            while path in seen:
                path += "~"
            seen.add(path)
            yield path, tensor


class Stored:
    """A snapshot, opened for reading. Raises NotAStoreError if there is none.

    Attributes:
        path: of its folder.
        storage, manifest: what is read.
    """

    def __init__(self, path: str, manifest: Manifest | None = None) -> None:
        self.path = path
        self.manifest = load_manifest(path) if manifest is None else manifest
        self.storage = FileStorage(path)
        self._values: dict[int, Value] = {}
        self._tensors: dict[int, dict[str, StoredTensor]] = {}
        self._by_path: dict[str, StoredTensor] | None = None

    def rank_with(self, rank: int, key: str) -> int | None:
        """The rank whose value of this name a rank gets: its own; else that of the first rank that has one."""
        ranks = self.manifest.ranks
        if rank < len(ranks) and key in ranks[rank]:
            return rank
        return next((other for other, values in enumerate(ranks) if key in values), None)

    def value(self, rank: int, key: str) -> Value | None:
        """What this rank gets under a name of the app state; None if no rank has it."""
        found = self.rank_with(rank, key)
        return None if found is None else self._value(self.manifest.ranks[found][key])

    def tensors(self, rank: int, key: str) -> dict[str, StoredTensor]:
        """Those of `value`, by path."""
        found = self.rank_with(rank, key)
        if found is None:
            return {}
        index = self.manifest.ranks[found][key]
        if index not in self._tensors:
            self._tensors[index] = dict(self._value(index).paths())
        return self._tensors[index]

    def keys(self, rank: int) -> list[str]:
        """The names that a rank has in its app state, one that is new: all."""
        ranks = self.manifest.ranks
        if rank < len(ranks):
            return list(ranks[rank])
        return list(dict.fromkeys(key for values in ranks for key in values))

    def by_path(self) -> dict[str, StoredTensor]:
        """The tensors of all ranks; of one path, the first rank's."""
        if self._by_path is None:
            self._by_path = {}
            for rank, values in enumerate(self.manifest.ranks):
                for key in values:
                    value = self.value(rank, key)
                    for path, tensor in value.paths() if value is not None else ():
                        self._by_path.setdefault(path, tensor)
        return self._by_path

    def _value(self, index: int) -> Value:
        if index not in self._values:
            self._values[index] = self._checked(self.manifest.values[index])
        return self._values[index]

    def _checked(self, stored: StoredValue) -> Value:
        """The value, once its leaves are known to be the tensors that it names. Raises CorruptionError."""
        tensors = tuple(self.manifest.tensors[i] for i in stored.tensors)
        try:
            plan = structure.plan_of(stored.structure)
        except CorruptionError as error:
            raise self.damaged(f"the value {stored.key!r:.100}: {error.detail}") from error
        if len(plan.leaves) != len(tensors):
            raise self.damaged(
                f"the value {stored.key!r:.100} has {len(plan.leaves):,} leaves, {len(tensors):,} tensors"
            )
        for leaf, tensor in zip(plan.leaves, tensors, strict=True):
            boxes = tensor.boxes
            is_whole = not boxes or (len(boxes) == 1 and boxes[0].nbytes == leaf.nbytes)  # which covers it, as is known
            if not is_whole or leaf.dtype != tensor.dtype or leaf.shape != tensor.shape or leaf.stride is not None:
                self._check_leaf(leaf, tensor)
        return Value(stored.key, plan, stored.objects, tensors)

    def _check_leaf(self, leaf: Leaf, tensor: StoredTensor) -> None:
        if (leaf.dtype, leaf.shape) != (tensor.dtype, tensor.shape) or leaf.stride is not None:
            raise self.damaged(f"the leaf {leaf.name} is no {tensor.dtype}{list(tensor.shape)}")
        boxes = [Box(box.offsets, box.shape) for box in tensor.boxes]
        itemsize = structure.DTYPES[leaf.dtype].itemsize
        fits = all(box.nbytes == structure.count(box.shape) * itemsize for box in tensor.boxes)
        try:
            check_cover(tensor.path, tensor.shape, boxes)
        except ShardMismatchError as error:
            raise self.damaged(str(error)) from None
        if not fits:
            raise self.damaged(f"the boxes of {tensor.path!r:.100} have other bytes than {leaf.dtype} takes")

    def objects_of(self, value: Value, *, allow_pickle: bool) -> list[Any]:
        """The leaves of a value that are no tensors, in the order of the plan's names."""
        try:
            return structure.decode_objects(value.objects, value.plan.object_count, allow_pickle)
        except CorruptionError as error:
            raise self.damaged(f"the value {value.key!r:.100}: {error.detail}") from error

    def check_size(self, file: StoredFile) -> None:
        """Raises CorruptionError for a file that is missing, or of another size than the manifest says."""
        size = self.storage.size(file.name)
        if size is None:
            raise self.damaged_file(file.name, "the file is missing")
        if size != file.size:
            raise self.damaged_file(file.name, f"it has {size:,} bytes, and the manifest says {file.size:,}")

    def check_files(self, tensors: Iterable[StoredTensor]) -> None:
        """`check_size` of the files that have these tensors: before memory is taken that only a manifest asks for."""
        with self.reading():
            for index in {box.file for tensor in tensors for box in tensor.boxes}:
                self.check_size(self.manifest.files[index])

    @contextmanager
    def reading(self) -> Generator[None]:
        """Files that are missing or others are no damage if another snapshot has taken the place of this one.

        Raises:
            VersionGoneError: instead of a CorruptionError, if the manifest that was read isn't there any more.
        """
        try:
            yield
        except CorruptionError as error:
            change = self._change()
            if change is None:
                raise
            raise VersionGoneError(
                f"{self.path} was {change} while it was read ({error.detail}): open it again", key=self.path
            ) from None

    def _change(self) -> str | None:
        """What has become of the manifest since it was read; None if it is there, or what is there can't be read."""
        try:
            return None if load_manifest(self.path).id == self.manifest.id else "overwritten"
        except NotAStoreError:
            return "removed"
        except MemstoreError:
            return None

    def damaged(self, detail: str) -> CorruptionError:
        return CorruptionError(path=f"{self.path}/{MANIFEST}", detail=detail)

    def damaged_file(self, name: str, detail: str) -> CorruptionError:
        return CorruptionError(path=f"{self.path}/{name}", detail=detail)

    def build(self, value: Value, tensors: list[Any], *, allow_pickle: bool) -> Any:
        """The state dict of these tensors."""
        try:
            return structure.build(value.plan, value.objects, tensors, allow_pickle=allow_pickle)
        except CorruptionError as error:
            raise self.damaged(f"the value {value.key!r:.100}: {error.detail}") from error
