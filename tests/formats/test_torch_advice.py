"""Files that can't be attached as they are: the message says what they are, and its advice works."""

from __future__ import annotations

import functools
import io
import pickle
import resource
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import torch

import memstore
from memstore import structure
from tests.children import in_child
from tests.examples import examples
from tests.support.equality import assert_same

REFUSALS = (memstore.CorruptionError, memstore.UnsupportedValueError)
TENSOR = {"t": torch.arange(300.0)}
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    QUANTIZED = torch.quantize_per_tensor(torch.arange(4.0), 0.1, 0, torch.qint8)

pytestmark = [
    pytest.mark.filterwarnings("ignore:Detected pickle protocol"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated"),
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
]

Attach = Callable[[memstore.Store, Path], Any]


def copied(store: memstore.Store, path: Path) -> Any:
    store.attach("key", path, copy=True)
    return store.get("key")


def with_pickle(store: memstore.Store, path: Path, *, copy: bool = False) -> Any:
    with memstore.open(store.root, allow_pickle=True) as trusting:
        trusting.attach("key", path, copy=copy)
        return trusting.get("key")


def saved_anew(store: memstore.Store, path: Path) -> Any:
    torch.save(torch.load(path, weights_only=False), path)
    store.attach("key", path)
    return store.get("key")


def loaded_by(load: Callable[..., Any], store: memstore.Store, path: Path, **options: Any) -> Any:
    with memstore.open(store.root, **options) as opened:
        opened.put("key", load(path))
        return opened.get("key")


def by_torch(store: memstore.Store, path: Path) -> Any:
    return loaded_by(torch.load, store, path)


def by_numpy(store: memstore.Store, path: Path) -> Any:
    return loaded_by(np.load, store, path)


def unpickled(path: Path) -> Any:
    return pickle.loads(path.read_bytes())


def rezipped(path: Path, *, order: bytes = b"little", method: int = zipfile.ZIP_STORED) -> None:
    content = io.BytesIO()
    torch.save({"t": torch.ones(300)}, content)
    with zipfile.ZipFile(content) as source, zipfile.ZipFile(path, "w", method) as target:
        for member in source.infolist():
            target.writestr(
                member.filename, order if member.filename.endswith("byteorder") else source.read(member.filename)
            )


def write_pickle(path: Path, value: Any) -> None:
    path.write_bytes(pickle.dumps(value))


def write_script(path: Path) -> None:
    torch.jit.script(torch.nn.Linear(3, 3)).save(str(path))


def of_script(path: Path) -> Any:
    return dict(torch.jit.load(path).state_dict())


class Case(NamedTuple):
    write: Callable[[Path], Any]
    says: str  # of the first attach
    follow: Attach  # does what the message says
    expected: Any = None  # what it then gets; None: whatever


def saved(value: Any, says: str, follow: Attach, **options: Any) -> Case:
    return Case(lambda path: torch.save(value, path, **options), says, follow, value)


def array(value: Any, says: str, follow: Attach) -> Case:
    return Case(lambda path: np.save(path, value, allow_pickle=True), says, follow, value)


def resolved(value: Any) -> Any:
    """For comparing: tensors by what they show, arrays of objects by these."""
    if isinstance(value, dict):
        return {key: resolved(entry) for key, entry in value.items()}
    if isinstance(value, np.ndarray) and value.dtype.hasobject:
        return value.tolist()
    return value.resolve_conj().resolve_neg().contiguous() if isinstance(value, torch.Tensor) else value


both = functools.partial(with_pickle, copy=True)
CASES: dict[str, tuple[str, Case]] = {
    "quantized": (".pt", saved({"q": QUANTIZED, **TENSOR}, "copy=True", copied)),
    "conjugated": (".pt", saved({"c": torch.tensor([1 + 2j, 3j]).conj()}, "copy=True", copied)),
    "negated": (".pt", saved({"c": torch.tensor([1 + 2j, 3j]).conj().imag}, "copy=True", copied)),
    "array": (".pt", saved({"a": np.arange(5), **TENSOR}, r"_reconstruct\).*allow_pickle=True", both)),
    "number of numpy": (".pt", saved({"a": np.float64(3), **TENSOR}, "allow_pickle=True", with_pickle)),
    "object": (".pt", saved({"o": slice(1, 2), **TENSOR}, r"\(slice\).*allow_pickle=True", with_pickle)),
    "protocol 4": (".pt", saved(TENSOR, "pickle_protocol other than 2", saved_anew, pickle_protocol=4)),
    "protocol 5": (".pt", saved(TENSOR, "allow_pickle=True", with_pickle, pickle_protocol=5)),
    "large int": (".pt", saved({"n": 1 << 3000, **TENSOR}, "allow_pickle=True", with_pickle)),
    "legacy": (".pt", saved(TENSOR, "copy=True", copied, _use_new_zipfile_serialization=False)),
    "legacy array": (".pt", saved({"a": np.arange(5)}, "copy=True", both, _use_new_zipfile_serialization=False)),
    "byte order": (".pt", Case(functools.partial(rezipped, order=b"big"), "torch.load", by_torch)),
    "compressed": (".pt", Case(functools.partial(rezipped, method=zipfile.ZIP_DEFLATED), "torch.load", by_torch)),
    "script": (".pt", Case(write_script, "state_dict", functools.partial(loaded_by, of_script))),
    "npz": (".npz", Case(lambda path: np.savez(path, a=np.ones(3)), r"dict\(numpy.load", lambda store, path: None)),
    "pickle": (
        ".pkl",
        Case(lambda path: write_pickle(path, [1, "a"]), "pickle.load", functools.partial(loaded_by, unpickled)),
    ),
    "swapped array": (".npy", array(np.arange(3).astype(">f4"), "numpy.load", by_numpy)),
    "text array": (".npy", array(np.array(["a", "bc"]), "numpy.load", by_numpy)),
    "array of times": (".npy", array(np.zeros(3, "M8[s]"), "numpy.load", by_numpy)),
    "array of records": (
        ".npy",
        array(
            np.zeros(3, [("a", "f4")]),
            "numpy.load.*allow_pickle",
            functools.partial(loaded_by, np.load, allow_pickle=True),
        ),
    ),
    "array of objects": (
        ".npy",
        array(
            np.array([None, "x"]),
            "numpy.load.*allow_pickle=True.*allow_pickle=True",
            functools.partial(loaded_by, functools.partial(np.load, allow_pickle=True), allow_pickle=True),
        ),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_advice_works(store: memstore.Store, folder: Path, name: str) -> None:
    ending, case = CASES[name]
    path = folder / f"x{ending}"
    case.write(path)
    with pytest.raises(memstore.UnsupportedValueError, match=f"(?s)x\\{ending}.*{case.says}"):
        store.attach("key", path)
    got = case.follow(store, path)
    if case.expected is not None:
        assert_same(resolved(case.expected), resolved(got))


def test_an_array_in_a_trusted_file_says_copy(store: memstore.Store, folder: Path) -> None:
    torch.save({"a": np.arange(5)}, folder / "x.pt")
    with pytest.raises(memstore.UnsupportedValueError, match="NumPy array.*copy=True"):
        with_pickle(store, folder / "x.pt")


def test_arrays_of_an_npz_can_be_put(store: memstore.Store, folder: Path) -> None:
    np.savez(folder / "x.npz", a=np.arange(3), b=np.ones(2))
    store.put("key", dict(np.load(folder / "x.npz")))
    assert_same({"a": np.arange(3), "b": np.ones(2)}, store.get("key"))


def test_other_files_are_told_as_such(store: memstore.Store, folder: Path) -> None:
    """None of them is damaged."""
    others = {"x.h5": b"\x89HDF\r\n\x1a\n" + bytes(99), "x.gguf": b"GGUF" + bytes(99), "x": b"text", "y": b"\x80"}
    for name, content in others.items():
        (folder / name).write_bytes(content)
        with pytest.raises(memstore.UnsupportedValueError, match="is of no known format, or is truncated: say format="):
            store.attach("key", folder / name)
    with zipfile.ZipFile(folder / "x.zip", "w") as archive:
        archive.writestr("a/b", "text")
    with pytest.raises(memstore.UnsupportedValueError, match="a zip, and none of"):
        store.attach("key", folder / "x.zip")


class Gone:
    """Its class can't be found when it is loaded."""


def test_a_class_that_is_not_here_is_no_damage(
    store: memstore.Store, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.save({"o": Gone()}, folder / "x.pt")
    monkeypatch.delattr(f"{__name__}.Gone")
    with pytest.raises(memstore.UnsupportedValueError, match="this process hasn't.*Gone"):
        with_pickle(store, folder / "x.pt")


def test_a_damaged_pickle_is_not_said_to_need_permission(store: memstore.Store, folder: Path) -> None:
    torch.save({"t": torch.ones(3)}, folder / "x.pt")
    content = (folder / "x.pt").read_bytes()
    (folder / "x.pt").write_bytes(content.replace(b"ctorch._utils\n", b"ctorch._utilz\n"))
    for copy in (False, True):
        with pytest.raises(memstore.CorruptionError, match="checksum"):
            store.attach("key", folder / "x.pt", copy=copy)


def test_memory_that_a_damaged_pickle_asks_for_is_told_with_its_damage(folder: Path) -> None:
    torch.save({"t": torch.ones(3)}, folder / "x.pt")
    content = (folder / "x.pt").read_bytes()
    place = content.index(b"q\0")  # a memo's number of one byte, and then one of four
    (folder / "x.pt").write_bytes(content[:place] + b"r\xf0\xff\xff\x7f" + content[place + 5 :])
    text = in_child(_attached_with_little_memory, str(folder / "x.pt"), f"{folder}/store")
    assert "not enough memory" in text and "doesn't fit its checksum" in text


def _attached_with_little_memory(path: str, root: str) -> str:
    with memstore.open(root, allow_pickle=True) as store:
        limit = resource.getrlimit(resource.RLIMIT_AS)[1]
        resource.setrlimit(resource.RLIMIT_AS, (16 << 30, limit))
        with pytest.raises(memstore.ResourceLimitError) as raised:
            store.attach("key", path)
        return str(raised.value)


# --- the format before torch 1.6 --------------------------------------------------------------------------------------


def write_legacy(path: Path, value: Any, **options: Any) -> bytes:
    torch.save(value, path, _use_new_zipfile_serialization=False, **options)
    return path.read_bytes()


@pytest.mark.parametrize("protocol", [2, 3])
@pytest.mark.parametrize("name", ["x.pt", "without ending"])
def test_a_copy_of_a_legacy_file_is_what_torch_loads(
    store: memstore.Store, folder: Path, name: str, protocol: int
) -> None:
    base = torch.arange(30.0)
    value = {
        "base": base,
        "view": base[10:20],
        "turned": base.reshape(5, 6).t(),
        "half": torch.ones(3).bfloat16(),
        "p": torch.nn.Parameter(torch.ones(3)),
        "l": [1, "x", (None, 2.5)],
        "q": QUANTIZED,
        "e": torch.empty(0, 3),
    }
    write_legacy(folder / name, value, pickle_protocol=protocol)
    got = copied(store, folder / name)
    assert_same(torch.load(folder / name), got)
    got["base"].zero_()
    assert not got["view"].any()  # they share their memory


def test_what_a_legacy_file_leaves_out_is_zero(store: memstore.Store, folder: Path) -> None:
    """torch would show whatever lies in the memory that it takes."""
    content = write_legacy(folder / "x.pt", {"t": torch.ones(1000)})
    keys = content.rindex(b"\x80\x02]")
    (folder / "x.pt").write_bytes(content[:keys] + pickle.dumps([], 2) + bytes(4000))
    [torch.full((1000,), 7.0) for _ in range(100)]  # what is left in the memory that torch takes next
    assert not copied(store, folder / "x.pt")["t"].any()


def test_a_legacy_file_takes_no_more_memory_than_it_has_bytes(store: memstore.Store, folder: Path) -> None:
    content = write_legacy(folder / "x.pt", {"t": torch.ones(1000)})
    (folder / "x.pt").write_bytes(content.replace(b"M\xe8\x03", b"J\0\0\0\x70"))  # 7 GB
    with pytest.raises(memstore.CorruptionError, match="larger than it is"):
        copied(store, folder / "x.pt")


@hypothesis.settings(max_examples=examples(80), suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture])
@hypothesis.given(data=st.data())
def test_damaged_legacy_files_never_give_bytes_from_elsewhere(
    store: memstore.Store, folder: Path, data: st.DataObject
) -> None:
    path = folder / "x.pt"
    value = {"t": torch.full((40,), 7, dtype=torch.uint8), "u": torch.full((5, 4), 7, dtype=torch.uint8).t()}
    content = bytearray(write_legacy(path, value))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, 999)) * len(content) // 1000  # a storage's name is its address: lengths vary
        if data.draw(st.integers(0, 4)):
            content[at] = data.draw(st.integers(0, 255))
        else:
            del content[at : at + data.draw(st.integers(1, 64))]
    path.write_bytes(content)
    try:
        store.attach("key", path, format="torch", copy=True)
    except REFUSALS:
        return
    for _, tensor in structure.iter_tensors(store.get("key")):
        assert tensor.untyped_storage().nbytes() <= len(content)
        tensor.clone()
