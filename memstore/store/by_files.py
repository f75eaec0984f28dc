"""The methods of a Store for files of other programs: attached in place, and exported."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Literal

from memstore import contents
from memstore.arguments import expected_version, flag
from memstore.engine import Draft, need_boxes, put, resource_errors
from memstore.errors import lacks_told
from memstore.keys import encode_key
from memstore.late_imports import between_forks
from memstore.store.gets import Gets
from memstore.store.puts import Puts
from memstore.wording import check_progress


class ByFiles(Puts, Gets):
    """What `Store` inherits."""

    def attach(
        self,
        key: str,
        path: str | os.PathLike[str],
        *,
        format: Literal["safetensors", "memmap", "torch", "npy"] | None = None,
        copy: bool = False,
        expect_version: int | None = None,
        timeout: float | None = None,
    ) -> int:
        """Makes existing files the new version of `key`, without a copy: gets map them in place.

        The files keep their place and their owner. If one is replaced or deleted, the next get raises an error. But if
        it is changed in place, values that were got before change too, which never happens to values that were put.

        Args:
            key: the key.
            path: a safetensors file, the index of a checkpoint of several, a folder that has either, a folder that
                `TensorDict.memmap` wrote, a file of `torch.save`, or a `.npy`; or the folder of a `Snapshot`, whose
                value is a dict of rank 0's state dicts.
            format: which of these it must be; None: memstore recognizes it.
            copy: put a copy of the value instead; the entry then no longer depends on the files. This also takes
                values that can't be served in place.
            expect_version: as in `put`.
            timeout: as in `put`.

        Returns:
            The version.

        Raises:
            CorruptionError: a file is truncated, or is not what its format says.
            UnsupportedValueError: it has values that can't be served in place, or that only pickle can read; or
                `format` is another one than the files have.
            PermissionDeniedError: the folder has a link that leads out of it.
            FileNotFoundError: there is nothing at `path`.
            VersionConflictError, StoreFullError, ReadOnlyError: as in `put`.
            HomeUnavailableError, UnknownOutcomeError: as in `put`.
        """
        with between_forks():
            from memstore.formats import describe_files, load_files
            from memstore.snapshot import is_snapshot

        root, name = self._writable(timeout), encode_key(key)
        deadline = self._deadline(timeout)
        if expect_version is not None:
            expect_version = expected_version(expect_version)
            self._check_early(root, {key: expect_version})
        given: Any = path  # anything: what reads files says what is wrong with it
        if format is None and isinstance(given, (str, os.PathLike)) and is_snapshot(path):
            with between_forks():
                from memstore.snapshot import describe_snapshot as describe_files
                from memstore.snapshot import load_snapshot as load_files
        if flag("copy", copy):
            with resource_errors(self.root, key, root):
                value = load_files(key, path, format, allow_pickle=self._allow_pickle)
            return self.put(key, value, expect_version=expect_version, timeout=timeout)
        with resource_errors(self.root, key, root):
            content = describe_files(key, path, format, allow_pickle=self._allow_pickle)
            if content.boxes is not None:
                need_boxes(root, deadline)
        (version,) = put(root, [Draft(name, content, expect_version)], deadline)
        self._puts += 1
        return version

    def export(
        self,
        key: str,
        path: str | os.PathLike[str],
        *,
        format: Literal["safetensors", "memmap", "torch"] = "safetensors",
        max_shard_size: int | str | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """Writes the value of `key` to files for other programs. They appear at `path` completely, or not at all.

        Args:
            key: the key.
            path: a file, which is replaced if it exists; or a folder, which must be missing or empty. It is a folder
                for memmap, and for safetensors with `max_shard_size` or if `path` is a folder or ends with "/".
            format: "safetensors": the tensors by their names joined with ".", in C order, tied ones stored separately.
                "memmap": for `TensorDict.load_memmap`; dicts become TensorDicts. "torch": for `torch.load`, which needs
                `weights_only=False` if the value has numpy arrays or instances of classes.
            max_shard_size: bytes, or text ("5GB"): safetensors are written as a Hugging Face checkpoint, in several
                files with an index if need be.
            progress: called with the bytes done and those in all.

        Raises:
            KeyNotFoundError: no such key.
            UnsupportedValueError: the format can't represent a leaf, which is named. Nothing was written.
            AlreadyExistsError: the folder isn't empty.
            StoreFullError, ResourceLimitError: there is no room, or a file may be no larger. Nothing is left.
            HomeUnavailableError: in a store on several hosts, the one that has the key, or its bytes, didn't answer.
            ValueError: `path` ends in the suffix of another format (.pt, .pth, .ckpt, .bin, .npy, .npz, .safetensors).
        """
        with between_forks():
            from memstore.formats import check_export, export_value, has_devices

        check_progress(progress)
        target, limit = check_export(path, format, max_shard_size)
        root = self._opened()
        held = self._held(root, key)
        description = held.record.description
        options = contents.Options(device="cpu" if has_devices(description) else None)
        value = self._load(root, key, held, options)
        with lacks_told(target):
            export_value(
                key,
                description,
                value,
                target,
                format,
                limit=limit,
                progress=progress,
                durable=root.settings.durable,
                allow_pickle=self._allow_pickle,
            )
