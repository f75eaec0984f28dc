"""Sources that lie or are damaged, conversions that are killed or fail: a typed error, and no half a target."""

from __future__ import annotations

import errno
import json
import os
import pickle
import resource
import struct
import tempfile
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import memstore
from memstore.convert import convert
from memstore.engine import syscalls
from memstore.errors import CorruptionError, MemstoreError, PermissionDeniedError, UnsupportedValueError
from memstore.formats import Frames
from tests.children import in_child
from tests.convert.values import FLAT, read, weights, write
from tests.small_tmpfs import free_bytes, on_small_tmpfs
from tests.support import faults
from tests.support.equality import assert_same


def fails(folder: str, kind: type[BaseException], match: str, source: str = "source", **options: Any) -> None:
    before = sorted(os.listdir(folder))
    with pytest.raises(kind, match=match):
        convert(f"{folder}/{source}", f"{folder}/target", **options)
    assert sorted(os.listdir(folder)) == before


# --- torch's checkpoints ----------------------------------------------------------------------------------------------


def with_metadata(folder: str, change: Any) -> None:
    """A checkpoint whose metadata was changed."""
    write(f"{folder}/source", "dcp", weights())
    path = f"{folder}/source/.metadata"
    with open(path, "rb") as file:
        metadata = pickle.load(file)
    change(metadata)
    with open(path, "wb") as file:
        pickle.dump(metadata, file)


def _place(metadata: Any, name: str = "w") -> Any:
    return next(said for index, said in metadata.storage_data.items() if index.fqn == name)


def _chunk(metadata: Any) -> Any:
    return metadata.state_dict_metadata["w"].chunks[0]


CHANGES: dict[str, tuple[Any, type[BaseException], str]] = {
    "out of the folder": (
        lambda m: setattr(_place(m), "relative_path", "../../etc/passwd"),
        CorruptionError,
        "no file",
    ),
    "absolute": (lambda m: setattr(_place(m), "relative_path", "/etc/passwd"), CorruptionError, "no file"),
    "missing": (lambda m: setattr(_place(m), "relative_path", "__9_9.distcp"), CorruptionError, "missing"),
    "before the start": (lambda m: setattr(_place(m), "offset", -5), CorruptionError, "no sense"),
    "beyond the end": (lambda m: setattr(_place(m), "offset", 1 << 40), CorruptionError, "truncated"),
    "another item's": (lambda m: setattr(_place(m), "offset", _place(m, "mask").offset), CorruptionError, "torch"),
    "no number": (lambda m: setattr(_place(m), "length", "many"), CorruptionError, "no sense"),
    "no place": (lambda m: m.storage_data.clear(), CorruptionError, "doesn't say where"),
    "another shape": (
        lambda m: setattr(_chunk(m), "sizes", torch.Size([60, 50])),
        CorruptionError,
        "the metadata says",
    ),
    "too few chunks": (
        lambda m: setattr(m.state_dict_metadata["w"], "size", torch.Size([100, 60])),
        CorruptionError,
        "lack the elements",
    ),
    "chunks twice": (lambda m: m.state_dict_metadata["w"].chunks.append(_chunk(m)), CorruptionError, "overlap"),
    "a huge shape": (
        lambda m: setattr(m.state_dict_metadata["w"], "size", torch.Size([1 << 62, 60])),
        CorruptionError,
        "lack the elements",
    ),
    "a path into an item": (lambda m: m.planner_data.update(b=("w", "x")), CorruptionError, "leads into"),
    "a long list": (lambda m: m.planner_data.update(b=("x", 1 << 40)), CorruptionError, "has the path"),
    "two of one path": (lambda m: m.planner_data.update(b=("w",)), CorruptionError, "two items"),
    "transformed": (lambda m: setattr(_place(m), "transform_descriptors", ["zstd"]), UnsupportedValueError, "zstd"),
    "no metadata": (lambda m: m.__dict__.clear(), CorruptionError, "says nothing"),
    "a gradient of integers": (
        lambda m: setattr(m.state_dict_metadata["step"].properties, "requires_grad", True),
        CorruptionError,
        "no sense.*gradients",
    ),
    "no properties": (lambda m: setattr(m.state_dict_metadata["w"], "properties", None), CorruptionError, "no sense"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_metadata_that_lies(folder: str, name: str) -> None:
    change, kind, match = CHANGES[name]
    with_metadata(folder, change)
    fails(folder, kind, match)


class Evil:
    """Runs code when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


def test_metadata_runs_no_code(folder: str) -> None:
    with_metadata(folder, lambda metadata: setattr(metadata, "planner_data", Evil(f"{folder}/ran")))
    fails(folder, UnsupportedValueError, r"posix\.mkdir")
    fails(folder, UnsupportedValueError, r"posix\.mkdir", allow_pickle=True)


def test_items_run_no_code(folder: str) -> None:
    dcp.save({"x": torch.ones(1), "y": Evil(f"{folder}/ran")}, checkpoint_id=f"{folder}/source", no_dist=True)
    fails(folder, UnsupportedValueError, "allow_pickle=True")


_GETATTR = b"\x80\x02cbuiltins\ngetattr\nctorch.distributed.checkpoint.metadata\n"


@pytest.mark.parametrize("data", [b"Metadata\nX\x08\0\0\0__init__", b"_MEM_FORMAT_ENCODING\nX\x03\0\0\0mro"])
def test_metadata_gets_no_attributes(folder: str, data: bytes) -> None:
    """Though some versions of Python pickle members of enumerations as calls of getattr."""
    write(f"{folder}/source", "dcp", weights())
    with open(f"{folder}/source/.metadata", "wb") as file:
        file.write(_GETATTR + data + b"\x86R.")
    fails(folder, CorruptionError, "getattr of '(__init__|mro)'")


@pytest.mark.parametrize("data", [b"", b"\x80", b"not a pickle", b"\x80\x04K\x01.", b"\x80\x04" + b"(" * 100 + b"."])
def test_metadata_that_is_no_metadata(folder: str, data: bytes) -> None:
    write(f"{folder}/source", "dcp", weights())
    with open(f"{folder}/source/.metadata", "wb") as file:
        file.write(data)
    fails(folder, CorruptionError, "metadata")


def _within_a_gibibyte(folder: str) -> None:
    with open("/proc/self/statm") as file:
        size = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + (1 << 30), resource.RLIM_INFINITY))
    fails(folder, CorruptionError, "metadata")


@pytest.mark.parametrize(
    "data",
    [
        b"\x80\x04K\x01r\xff\xff\xff\x1f.",  # a number, which is to be remembered as the 536,870,911th value
        b"\x80\x04K\x01p999999999\n.",
        b"\x80\x05\x96" + struct.pack("<Q", 1 << 40) + b"x.",  # a bytearray, bytes and a text of a tebibyte
        b"\x80\x04\x8e" + struct.pack("<Q", 1 << 40) + b"x.",
        b"\x80\x04\x8d" + struct.pack("<Q", 1 << 40) + b"x.",
    ],
)
def test_metadata_that_asks_for_memory_gets_none(folder: str, data: bytes) -> None:
    write(f"{folder}/source", "dcp", weights())
    with open(f"{folder}/source/.metadata", "wb") as file:
        file.write(data)
    in_child(_within_a_gibibyte, folder)


def test_a_file_that_is_cut_anywhere(folder: str) -> None:
    write(f"{folder}/source", "dcp", weights())
    path = f"{folder}/source/__0_0.distcp"
    size = os.path.getsize(path)
    for length in (size - 1, size // 2, 100, 0):
        os.truncate(path, length)
        fails(folder, MemstoreError, "distcp")


def test_a_link_out_of_the_folder(folder: str) -> None:
    write(f"{folder}/source", "dcp", weights())
    os.rename(f"{folder}/source/__0_0.distcp", f"{folder}/secret")
    os.symlink(f"{folder}/secret", f"{folder}/source/__0_0.distcp")
    fails(folder, PermissionDeniedError, "link out of its folder")


def test_a_part_of_which_a_pickle_says_more_than_it_has(folder: str) -> None:
    """The zip of one tensor, whose pickle names a shape that its storage lacks, or is no tensor."""
    for value, kind in ((torch.ones(3), None), ([1, 2], UnsupportedValueError), (Evil("x"), UnsupportedValueError)):
        torch.save(value, f"{folder}/one")
        with open(f"{folder}/one", "rb") as file:
            if kind is None:
                found = Frames().read(f"{folder}/one", file.fileno(), 0, os.path.getsize(f"{folder}/one"))
                assert (found.dtype, found.shape) == (torch.float32, (3,))
            else:
                with pytest.raises(kind):
                    Frames().read(f"{folder}/one", file.fileno(), 0, os.path.getsize(f"{folder}/one"))
    torch.save(torch.ones(3), f"{folder}/one")
    with open(f"{folder}/one", "r+b") as file:
        data = file.read()
        at = data.index(b"K\x03\x85")  # the shape (3,)
        file.seek(at)
        file.write(b"K\x04\x85")
        file.flush()
        with pytest.raises(CorruptionError, match="in a storage of 12 bytes"):
            Frames().read(f"{folder}/one", file.fileno(), 0, len(data))


# --- safetensors and Hugging Face's folders ---------------------------------------------------------------------------


def header(entries: dict[str, Any], data: bytes = b"") -> bytes:
    text = json.dumps(entries).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(start: int, stop: int, shape: list[int]) -> dict[str, Any]:
    return {"dtype": "U8", "shape": shape, "data_offsets": [start, stop]}


@pytest.mark.parametrize(
    "data",
    [
        header({"a": entry(0, 100, [100])}, bytes(10)),
        header({"a": entry(0, 8, [8]), "b": entry(4, 12, [8])}, bytes(12)),
        header({"a": entry(0, 8, [9])}, bytes(8)),
        header({"a": entry(0, 8, [8])}, bytes(9)),
        header({"a": entry(0, -8, [8])}, bytes(8)),
        struct.pack("<Q", 1 << 40) + b"{}",
        struct.pack("<Q", 101 << 20) + b"{",
        struct.pack("<Q", 8) + b'{"a": {{',
        b"",
    ],
)
def test_headers_that_lie(folder: str, data: bytes) -> None:
    with open(f"{folder}/source.safetensors", "wb") as file:
        file.write(data)
    fails(folder, MemstoreError, "source.safetensors", "source.safetensors")


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/passwd", "..", "", "a/../../x.safetensors", "x\0"])
def test_an_index_that_leads_out_of_its_folder(folder: str, name: str) -> None:
    write(f"{folder}/secret.safetensors", "safetensors", weights())
    os.mkdir(f"{folder}/source")
    with open(f"{folder}/source/model.safetensors.index.json", "w") as file:
        json.dump({"metadata": {}, "weight_map": {"w": name}}, file)
    fails(folder, CorruptionError, "names no file beside it")


def test_an_index_whose_file_is_a_link_out_of_its_folder(folder: str) -> None:
    write(f"{folder}/secret.safetensors", "safetensors", weights())
    os.mkdir(f"{folder}/source")
    os.symlink(f"{folder}/secret.safetensors", f"{folder}/source/one.safetensors")
    with open(f"{folder}/source/model.safetensors.index.json", "w") as file:
        json.dump({"metadata": {}, "weight_map": {"w": "one.safetensors"}}, file)
    fails(folder, PermissionDeniedError, "link out of its folder")


@pytest.mark.parametrize(
    ("index", "match"),
    [
        ({"metadata": {}, "weight_map": {"w": "gone.safetensors"}}, "gone.safetensors"),
        ({"metadata": {}, "weight_map": {"v": "one.safetensors"}}, "'v'"),
        ({"metadata": {}, "weight_map": {"w": 7}}, "index.json"),
        ({"metadata": {}, "weight_map": ["w"]}, "index.json"),
        ({"metadata": {}}, "index.json"),
    ],
)
def test_an_index_that_lies(folder: str, index: Any, match: str) -> None:
    os.mkdir(f"{folder}/source")
    write(f"{folder}/source/one.safetensors", "safetensors", weights())
    with open(f"{folder}/source/model.safetensors.index.json", "w") as file:
        json.dump(index, file)
    fails(folder, MemstoreError, match)


# --- all formats ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", ["dcp", "memstore-dcp", "snapshot"])
def test_metadata_with_any_byte_changed_never_gives_other_names_or_crashes(folder: str, format: str) -> None:
    write(f"{folder}/source", format, weights())
    name = ".metadata" if format == "dcp" else "memstore_snapshot.json"
    with open(f"{folder}/source/{name}", "rb") as file:
        whole = file.read()
    for i in range(0, len(whole), 97):
        with open(f"{folder}/source/{name}", "wb") as file:
            file.write(whole[:i] + bytes([whole[i] ^ 0x15]) + whole[i + 1 :])
        try:
            convert(f"{folder}/source", f"{folder}/{i}.pt", source_as=format)
        except MemstoreError:
            continue
        torch.load(f"{folder}/{i}.pt", weights_only=True)


def test_a_snapshot_whose_file_is_gone(folder: str) -> None:
    write(f"{folder}/source", "snapshot", weights())
    os.remove(f"{folder}/source/state.safetensors")
    fails(folder, memstore.CorruptionError, "state.safetensors")


# --- conversions that are killed, meet a full disk, a faulty one, or one another --------------------------------------


def steps(format: str) -> list[str]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        write(f"{folder}/source.pt", "torch", weights())
        return faults.record(lambda: convert(f"{folder}/source.pt", f"{folder}/target", target_as=format))


def _die_after(folder: str, format: str, step: int) -> None:
    with faults.at_step(step, faults.die, after=True):
        convert(f"{folder}/source.pt", f"{folder}/target", target_as=format)


def check_whats_left(folder: str, format: str) -> None:
    """The whole target, or none; then the next conversion works, and nothing else is left."""
    if os.path.lexists(f"{folder}/target"):
        with pytest.raises(memstore.errors.AlreadyExistsError):
            convert(f"{folder}/source.pt", f"{folder}/target", target_as=format)
    else:
        convert(f"{folder}/source.pt", f"{folder}/target", target_as=format)
        assert sorted(os.listdir(folder)) == ["source.pt", "target"]
    found = read(f"{folder}/target", format)
    assert_same(weights(), {name: found[name] for name in weights()}, ties=False)


def kill(parent: str, format: str, step: int) -> None:
    """Kills a conversion after one of its steps: that is before the next one."""
    folder = f"{parent}/{step}"
    os.mkdir(folder)
    write(f"{folder}/source.pt", "torch", weights())
    with pytest.raises(RuntimeError, match="-9"):
        in_child(_die_after, folder, format, step)
    check_whats_left(folder, format)


@pytest.mark.parametrize("format", ["safetensors", "dcp"])
def test_a_conversion_that_is_killed_at_a_step(folder: str, format: str) -> None:
    names = steps(format)
    published = max(i for i, name in enumerate(names) if name in ("link", "rename", "replace")) + 1
    for step in {2, len(names) // 2, published - 1, published}:
        kill(folder, format, step)


@pytest.mark.full
@pytest.mark.parametrize("format", FLAT)
def test_a_conversion_that_is_killed_at_every_step(folder: str, format: str) -> None:
    for step in range(1, len(steps(format)) + 1):
        kill(folder, format, step)


def test_what_was_written_is_synced_before_it_gets_its_name() -> None:
    names = steps("safetensors")
    published = max(i for i, name in enumerate(names) if name == "link")
    assert "sync" in names[:published] and "sync_folder" in names[published:]


def test_the_next_conversion_leaves_one_alone_that_still_runs(folder: str) -> None:
    """What another process fills is locked, and no leftover."""
    write(f"{folder}/source.pt", "torch", weights())
    seen: list[list[str]] = []

    def look_in_between(done: int, total: int) -> None:
        if not seen:
            seen.append(os.listdir(folder))
            in_child(convert, f"{folder}/source.pt", f"{folder}/target.safetensors")

    with pytest.raises(memstore.errors.AlreadyExistsError):
        convert(f"{folder}/source.pt", f"{folder}/target.safetensors", progress=look_in_between)
    assert len(seen[0]) == 2
    assert sorted(os.listdir(folder)) == ["source.pt", "target.safetensors"]
    assert len(read(f"{folder}/target.safetensors", "safetensors")) == len(weights())


def test_a_progress_that_raises_ends_the_conversion(folder: str) -> None:
    write(f"{folder}/source.pt", "torch", weights())

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    for format in FLAT:
        with pytest.raises(KeyboardInterrupt):
            convert(f"{folder}/source.pt", f"{folder}/target", target_as=format, progress=stop)
        assert os.listdir(folder) == ["source.pt"]


def test_progress_ends_with_all(folder: str) -> None:
    write(f"{folder}/source.pt", "torch", weights())
    for format in FLAT:
        told: list[tuple[int, int]] = []
        done = convert(
            f"{folder}/source.pt",
            f"{folder}/{format}",
            target_as=format,
            progress=lambda *said, told=told: told.append(said),
        )
        assert told[-1] == (2 * done.nbytes, 2 * done.nbytes), format
        assert sorted(told) == told


# -- full and faulty disks ---------------------------------------------------------------------------------------------


def test_a_full_disk_is_an_error_and_leaves_nothing() -> None:
    on_small_tmpfs(12, _on_a_full_disk)


def _on_a_full_disk(folder: str) -> None:
    torch.save({"x": torch.ones(2 << 20)}, f"{folder}/source.pt")
    free = free_bytes(folder)
    for format in FLAT:
        with pytest.raises(memstore.StoreFullError, match="no room for") as caught:
            convert(f"{folder}/source.pt", f"{folder}/target", target_as=format)
        assert caught.value.errno == errno.ENOSPC
        assert os.listdir(folder) == ["source.pt"] and free_bytes(folder) == free, format


def test_a_disk_that_gives_back_other_bytes_is_found(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    write(f"{folder}/source.pt", "torch", weights())
    write_parts = syscalls.write_parts_at
    inside = weights()["w"].numpy().tobytes()[4000:4100]

    def faulty(fd: int, parts: list[memoryview], offset: int) -> None:
        joined = bytearray(b"".join(parts))
        at = joined.find(inside)
        if at >= 0:
            joined[at] ^= 1
        write_parts(fd, [memoryview(joined)], offset)

    monkeypatch.setattr(syscalls, "write_parts_at", faulty)
    for format in FLAT:
        with pytest.raises(memstore.CorruptionError, match="checksum"):
            convert(f"{folder}/source.pt", f"{folder}/target", target_as=format)
        assert os.listdir(folder) == ["source.pt"]


@pytest.mark.parametrize("step", ["sync", "truncate", "link", "make_folder"])
def test_a_step_that_fails_leaves_nothing(folder: str, step: str) -> None:
    write(f"{folder}/source.pt", "torch", weights())
    names = steps("safetensors")
    with faults.at_step(names.index(step) + 1, faults.raising(OSError(errno.EIO, "injected"))), pytest.raises(OSError):
        convert(f"{folder}/source.pt", f"{folder}/target", target_as="safetensors")
    assert os.listdir(folder) == ["source.pt"]
