"""Files of others as entries: what holds for every format."""

from __future__ import annotations

import inspect
import os
import pickle
import time
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from tensordict import is_tensor_collection

import memstore
from memstore import structure
from memstore.cli import files as commands
from memstore.engine.files.mapping import ExternalFiles
from memstore.engine.format import headers
from memstore.engine.format.records import Leaf
from memstore.formats import attach, safetensors
from tests.children import Child, Wire, in_child
from tests.formats.files import WRITERS, contents, data_files, write_checkpoint, write_npy, write_safetensors
from tests.leaks import mapped_files, open_files
from tests.support.equality import assert_same
from tests.support.faults import watching
from tests.users import GROUP, OTHER, as_user, needs_root


@pytest.fixture(params=WRITERS)
def format(request: pytest.FixtureRequest) -> str:
    return request.param


def leaves(value: Any) -> dict[Any, torch.Tensor]:
    return dict(structure.iter_tensors(value))


def plain(store: memstore.Store, value: Any) -> Any:
    """The value with plain tensors instead of memory-mapped ones, as any put gives it back."""
    store.put("plain", value)
    return store.get("plain")


def test_a_get_gives_what_the_library_loads(store: memstore.Store, folder: Path, format: str) -> None:
    path, value = WRITERS[format](folder)
    version = store.attach("key", path)
    assert store.version("key") == version
    got = store.get("key")
    assert_same(plain(store, value), got)
    assert_same(got, store.get_many(["key"])["key"])
    assert_same(got, store.ref("key").get())


def test_tensors_are_the_files_themselves(store: memstore.Store, folder: Path, format: str) -> None:
    path, _ = WRITERS[format](folder)
    store.attach("key", path)
    value = store.get("key")
    assert set(mapped_files(str(folder))) == {str(file) for file in data_files(path)}
    pages = _addresses(folder)
    for tensor in leaves(value).values():
        assert not tensor.numel() or any(start <= tensor.data_ptr() < end for start, end in pages)
    assert open_files(str(folder)) == []


def _addresses(folder: Path) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        if str(folder) in line:
            start, end = line.split()[0].split("-")
            found.append((int(start, 16), int(end, 16)))
    return found


def test_writes_to_a_value_stay_private(store: memstore.Store, folder: Path, format: str) -> None:
    path, _ = WRITERS[format](folder)
    before = contents(path)
    store.attach("key", path)
    value, other = store.get("key"), store.get("key")
    for tensor in leaves(value).values():
        with torch.no_grad():
            tensor.zero_()
    assert contents(path) == before
    assert any(tensor.any() for tensor in leaves(other).values())


def test_get_takes_its_options(store: memstore.Store, folder: Path, format: str) -> None:
    path, value = WRITERS[format](folder)
    value = plain(store, value)
    store.attach("key", path)
    out, like = store.get("key"), store.get("key")
    for tensor in leaves(out).values():
        tensor.data.zero_()
    assert store.get("key", out=out) is out
    assert all(torch.equal(tensor, leaves(value)[name]) for name, tensor in leaves(out).items())
    assert_same(value, store.get("key", like=like))
    halves = leaves(store.get("key", dtype=torch.float16, device="cpu"))
    assert all(tensor.dtype == torch.float16 for tensor in halves.values() if tensor.is_floating_point())
    with pytest.raises(memstore.StructureMismatchError):
        store.get("key", out={"other": torch.ones(3)})


def test_info_tells_files_and_bytes(store: memstore.Store, folder: Path, format: str) -> None:
    path, value = WRITERS[format](folder)
    store.attach("key", path)
    info = store.info("key")
    assert info.kind == "adopted"
    assert set(info.files) == {str(file) for file in data_files(path)}
    assert info.nbytes == sum({tensor.data_ptr(): tensor.nbytes for tensor in leaves(value).values()}.values())
    assert len(info.leaves) == len(leaves(value))
    assert store.stats().live_bytes == 0


def test_with_copy_it_is_a_put(store: memstore.Store, folder: Path, format: str) -> None:
    path, value = WRITERS[format](folder)
    store.attach("key", path, copy=True)
    value = plain(store, value)
    for file in data_files(path):
        file.unlink()
    assert store.info("key").kind == "segment"
    assert_same(value, store.get("key"))


def test_a_changed_file_is_refused(store: memstore.Store, folder: Path, format: str) -> None:
    path, _ = WRITERS[format](folder)
    file = data_files(path)[-1]
    before, times = file.read_bytes(), (file.stat().st_atime_ns, file.stat().st_mtime_ns)
    for change in (_touch, _grow, _truncate, _replace, _make_link, _make_fifo, _make_folder, _delete):
        file.write_bytes(before)
        os.utime(file, ns=times)
        store.attach("key", path)
        ref = store.ref("key")
        change(file)
        for get in (lambda: store.get("key"), lambda: store.get_many(["key"]), ref.get):
            with pytest.raises(memstore.CorruptionError) as caught:
                get()
            assert (caught.value.key, caught.value.path) == ("key", str(file)), change
            assert "attached" in caught.value.detail
        _clear(file)


def _touch(file: Path) -> None:
    os.utime(file, ns=(0, file.stat().st_mtime_ns + 1))


def _grow(file: Path) -> None:
    times = (0, file.stat().st_mtime_ns)
    with open(file, "ab") as opened:
        opened.write(b"x")
    os.utime(file, ns=times)


def _truncate(file: Path) -> None:
    times = (0, file.stat().st_mtime_ns)
    os.truncate(file, file.stat().st_size - 1)
    os.utime(file, ns=times)


def _replace(file: Path) -> None:
    other = file.with_name("other")
    other.write_bytes(file.read_bytes())
    os.utime(other, ns=(0, file.stat().st_mtime_ns))
    other.rename(file)


def _make_link(file: Path) -> None:
    file.rename(file.with_name("moved"))
    file.symlink_to(file.with_name("moved"))


def _make_fifo(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def _make_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def _delete(file: Path) -> None:
    file.unlink()


def _clear(file: Path) -> None:
    file.with_name("moved").unlink(missing_ok=True)
    if file.is_dir():
        file.rmdir()
    file.unlink(missing_ok=True)


def test_a_value_outlives_its_files_names(store: memstore.Store, folder: Path, format: str) -> None:
    path, _ = WRITERS[format](folder)
    store.attach("key", path)
    value = store.get("key")
    copied = pickle.loads(pickle.dumps(value))
    for file in data_files(path):
        file.unlink()
    assert_same(copied, value)


def test_attached_again_it_is_there_again(store: memstore.Store, folder: Path) -> None:
    path, value = write_safetensors(folder)
    first = store.attach("key", path)
    _replace(path)
    assert store.attach("key", path) > first
    assert_same(value, store.get("key"))


def test_its_key_is_like_any_other(store: memstore.Store, folder: Path) -> None:
    path, value = write_safetensors(folder)
    old = store.put("key", torch.arange(5000.0))
    held = store.get("key")
    version = store.attach("key", path, expect_version=old)
    assert torch.equal(held, torch.arange(5000.0))
    assert store.wait("key", newer_than=old) == version
    with pytest.raises(memstore.VersionConflictError):
        store.attach("key", path, expect_version=old)
    assert list(store) == ["key"]
    held = store.get("key")
    store.put("key", torch.zeros(5000))
    assert_same(value, held)
    store.attach("key", path)
    assert store.delete("key")
    assert "key" not in store
    assert path.exists()


def test_an_attach_wakes_who_waits(store: memstore.Store, folder: Path) -> None:
    path, _ = write_safetensors(folder)
    with Child(_wait, store) as child:
        child.wait_until_it_sleeps_on_a_futex()
        version = store.attach("key", path)
        assert child.receive() == version


def _wait(wire: Wire, store: memstore.Store) -> int:
    return store.wait("key", timeout=60.0)


def test_other_processes_get_it(store: memstore.Store, folder: Path, format: str) -> None:
    path, value = WRITERS[format](folder)
    store.attach("key", path)
    value = plain(store, value)
    assert_same(value, in_child(lambda: pickle.loads(pickle.dumps(store.get("key")))))
    sent = pickle.dumps(store.ref("key"))
    assert len(sent) < 3000
    assert_same(value, in_child(lambda: pickle.loads(pickle.dumps(pickle.loads(sent).get()))))


def test_a_ref_keeps_to_its_version(store: memstore.Store, folder: Path) -> None:
    path, value = write_safetensors(folder)
    store.attach("key", path)
    ref = store.ref("key")
    store.put("key", torch.zeros(3))
    assert_same(value, ref.get())
    path.unlink()
    with pytest.raises(memstore.CorruptionError, match="gone"):
        ref.get()


def test_a_read_only_store_reads_it_and_sends_refs(store: memstore.Store, folder: Path) -> None:
    path, value = write_safetensors(folder)
    store.attach("key", path)
    with memstore.open(store.root, "r") as reader:
        assert_same(value, reader.get("key"))
        assert_same(value, pickle.loads(pickle.dumps(reader.ref("key"))).get())
        with pytest.raises(memstore.ReadOnlyError):
            reader.attach("other", path)
        path.unlink()
        with pytest.raises(memstore.CorruptionError, match="gone"):
            reader.get("key")


def test_a_file_that_is_replaced_and_attached_anew_meanwhile_is_no_damage(store: memstore.Store, folder: Path) -> None:
    """The get has read the old record, and finds the old file gone."""
    path, value = write_safetensors(folder)
    store.attach("key", path)
    swapped: list[Path] = []

    def swap(_: int, step: str) -> None:
        if step == "open_into" and not swapped:
            swapped.append(folder / "new.safetensors")
            path.rename(swapped[0])
            store.attach("key", swapped[0])

    for get in (lambda: store.get("key"), lambda: store.get_many(["key"])["key"]):
        with watching(swap, lambda _number, _step: None):
            assert_same(value, get())
        assert swapped.pop().exists()
        (folder / "new.safetensors").rename(path)
        store.attach("key", path)


def test_verified_stores_read_it_too(opener: Any, folder: Path) -> None:
    path, value = write_safetensors(folder)
    store = opener(checksum=True, verify=True)
    store.attach("key", path)
    assert_same(value, store.get("key"))


def test_a_relative_path_is_kept_whole(store: memstore.Store, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, value = write_safetensors(folder)
    monkeypatch.chdir(folder)
    store.attach("key", path.name)
    monkeypatch.chdir("/")
    assert_same(value, store.get("key"))


def test_a_file_may_be_named_by_a_link(store: memstore.Store, folder: Path) -> None:
    path, value = write_safetensors(folder)
    (folder / "link").symlink_to(path)
    store.attach("key", folder / "link")
    assert store.info("key").files == (str(path),)
    assert_same(value, store.get("key"))


def test_hundreds_of_files_take_few_descriptors(store: memstore.Store, folder: Path) -> None:
    from safetensors.torch import save_file

    index = folder / "model.safetensors.index.json"
    listed = {f"w{i}": f"{i}.safetensors" for i in range(300)}
    for name, file in listed.items():
        save_file({name: torch.full((700,), float(name[1:]))}, folder / file)
    index.write_text('{"weight_map": ' + str(listed).replace("'", '"') + "}")
    store.attach("key", folder)
    assert in_child(_get_with_few_files, store) == sum(range(300)) * 700


def _get_with_few_files(store: memstore.Store) -> float:
    import resource

    open_now = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (open_now + 3, open_now + 3))
    value = store.get("key")
    return float(sum(tensor.sum() for tensor in value.values()))


def test_an_empty_value_is_one(store: memstore.Store, folder: Path) -> None:
    from safetensors.torch import save_file
    from tensordict import TensorDict

    save_file({}, folder / "none.safetensors")
    store.attach("key", folder / "none.safetensors")
    assert store.get("key") == {}
    TensorDict(batch_size=[2]).memmap(folder / "none")
    store.attach("key", folder / "none")
    assert store.get("key").batch_size == (2,)
    assert store.info("key").files == ()


def test_collections_come_unlocked(store: memstore.Store, folder: Path) -> None:
    path, value = WRITERS["memmap"](folder)
    store.attach("key", path)
    got = store.get("key")
    assert is_tensor_collection(got)
    assert got.is_locked == value.is_locked is False


def test_what_is_no_path_or_format_is_refused(store: memstore.Store, folder: Path) -> None:
    path, _ = write_npy(folder)
    for wrong in ("", b"/tmp/x", 3, None):
        with pytest.raises(TypeError):
            store.attach("key", wrong)
    with pytest.raises(FileNotFoundError):
        store.attach("key", folder / "missing")
    (folder / "void").mkdir()
    for format in (None, "safetensors", "memmap", "torch", "npy"):
        with pytest.raises((memstore.UnsupportedValueError, memstore.CorruptionError, FileNotFoundError)):
            store.attach("key", folder / "void", format=format)
    os.mkfifo(folder / "fifo")
    for format in (None, "safetensors", "torch", "npy", "memmap"):
        with pytest.raises((memstore.UnsupportedValueError, memstore.CorruptionError)):
            store.attach("key", folder / "fifo", format=format)
    for format in ("safetensors", "torch", "memmap"):
        with pytest.raises((memstore.UnsupportedValueError, memstore.CorruptionError)):
            store.attach("key", path, format=format)
    with pytest.raises(memstore.InvalidKeyError):
        store.attach("", path)
    assert list(store) == []


def test_the_format_is_told_by_the_contents(store: memstore.Store, folder: Path, format: str) -> None:
    if format in ("memmap", "checkpoint"):
        pytest.skip("a folder")
    path, value = WRITERS[format](folder)
    path.rename(folder / "without ending")
    store.attach("key", folder / "without ending")
    assert_same(plain(store, value), store.get("key"))


def test_each_format_has_a_reader_and_is_offered() -> None:
    formats = get_args(attach.Format)
    assert set(attach._READERS) == set(formats)
    (option,) = [one for one in commands.attach.params if one.name == "format"]
    assert set(option.type.choices) == set(formats)
    annotation = inspect.signature(memstore.Store.attach).parameters["format"].annotation
    assert annotation == f"Literal{list(formats)} | None"


def test_a_failed_attach_leaves_the_key_alone(store: memstore.Store, folder: Path) -> None:
    path, _ = write_safetensors(folder)
    version = store.put("key", torch.ones(3))
    os.truncate(path, 300)
    with pytest.raises(memstore.CorruptionError) as caught:
        store.attach("key", path)
    assert (caught.value.key, caught.value.path) == ("key", str(path))
    assert store.version("key") == version


@needs_root
def test_a_file_that_a_reader_may_not_read(scratch: str) -> None:
    parent = Path(scratch).parent
    parent.chmod(0o755)
    with memstore.open(scratch, unix_group=GROUP, file_mode=0o660) as store:
        path, _ = write_safetensors(parent)
        store.attach("key", path)
        path.chmod(0o600)
        with pytest.raises(memstore.PermissionDeniedError) as caught:
            as_user(OTHER, [GROUP], _open_and_get, scratch)
        assert str(path) in str(caught.value)


def _open_and_get(root: str) -> None:
    with memstore.open(root, "r") as store:
        store.get("key")


def test_attaching_reads_headers_only(store: memstore.Store, folder: Path) -> None:
    """A gigabyte with holes for its data: neither attach nor get may touch it."""
    path = folder / "large.safetensors"
    header = b'{"w":{"dtype":"F32","shape":[268435456],"data_offsets":[0,1073741824]}}'
    header += b" " * (-len(header) % 8)
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    os.truncate(path, 8 + len(header) + (1 << 30))
    times: list[float] = []
    for _ in range(20):
        start = time.perf_counter()
        store.attach("key", path)
        times.append(time.perf_counter() - start)
    assert min(times) < 0.005
    value = store.get("key")
    assert value["w"].shape == (1 << 28,)
    assert path.stat().st_blocks * 512 <= 65536
    del value


def test_a_checkpoint_is_found_in_its_folder(store: memstore.Store, folder: Path) -> None:
    index, value = write_checkpoint(folder)
    store.attach("key", index.parent)
    assert_same(value, store.get("key"))
    one, value = write_safetensors(folder)
    store.attach("key", folder)
    assert store.info("key").files == (str(one),)
    one.rename(folder / "other.safetensors")
    store.attach("key", folder)
    write_safetensors(folder)
    (folder / "model.safetensors").rename(folder / "more.safetensors")
    with pytest.raises(memstore.UnsupportedValueError, match="several"):
        store.attach("key", folder)


def test_no_reader_of_a_format_can_place_a_leaf_outside_its_file(tmp_path: Path) -> None:
    """A net below the formats' own checks."""
    (tmp_path / "file").write_bytes(b"x" * 100)
    for offset, nbytes in ((0, 101), (100, 1), (1 << 20, 4)):
        sources = ExternalFiles()
        sources.add(str(tmp_path / "file"), (tmp_path / "file").stat())
        adopted = structure.describe_external_tree(0, [Leaf((), "uint8", (nbytes,), None, offset, nbytes)])
        with pytest.raises(memstore.CorruptionError, match="beyond the end"):
            attach._check_places(adopted.plan, sources)
    attach._check_places(structure.describe_external_tree(0, [Leaf((), "uint8", (100,), None, 0, 100)]).plan, sources)


def test_a_record_has_a_limit(store: memstore.Store, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, _ = write_safetensors(folder)
    size = 8 + int.from_bytes(Path(path).read_bytes()[:8], "little")
    monkeypatch.setattr(safetensors, "header_size", lambda *_: size)  # the file's own header has the same limit
    monkeypatch.setattr(headers, "HEADER_LIMIT", 50)
    with pytest.raises(memstore.UnsupportedValueError, match="may take 50"):
        store.attach("key", path)


def test_a_conflict_is_seen_before_anything_is_read(store: memstore.Store, folder: Path) -> None:
    store.put("key", torch.ones(3))
    with pytest.raises(memstore.VersionConflictError):
        store.attach("key", folder / "missing.npy", expect_version=0)
