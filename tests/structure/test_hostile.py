"""Descriptions and objects from a file that somebody tampered with: typed errors, nothing else."""

from __future__ import annotations

import random
import sys
from argparse import Namespace
from collections import Counter, deque
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tensordict import MetaData, NonTensorStack, TensorDict, TensorDictParams, UnbatchedTensor, lazy_stack

from memstore.errors import CorruptionError, UnsupportedValueError
from memstore.structure import flatten, leaf_table, plan_of, plans, rebuild, structure_text, tree
from memstore.structure.objects import decode_objects
from tests.examples import examples
from tests.structure import classes
from tests.structure.roundtrip import stored
from tests.structure.test_matrix import OBJECTS, Pair, Point, jagged
from tests.structure.test_objects import PLAIN

pytestmark = pytest.mark.filterwarnings("ignore")
many = settings(max_examples=examples(150), deadline=None, suppress_health_check=list(HealthCheck))

pack = msgspec.msgpack.encode
Ext = msgspec.msgpack.Ext


def try_to_read(description: bytes, objects: bytes, memory: Any) -> None:
    """Reads; the errors that may come are typed. What comes instead is a value."""
    try:
        plan = plan_of(description)
        structure_text(plan), leaf_table(plan), plan.header
        if plan.nbytes <= 1 << 16:
            memory = np.zeros(max(plan.nbytes, len(memory)), np.uint8)
        rebuild(plan, objects, memory, None)
    except (CorruptionError, UnsupportedValueError):
        pass


def valid() -> list[tuple[bytes, bytes, Any]]:
    base = torch.arange(12.0).reshape(3, 4)
    values = [
        torch.zeros(2, 3),
        {"a": base, "b": base.t(), "c": base[1:], 3: [base, 1, (None, {"x": 2.5})], (1, "k"): torch.nn.Parameter(base)},
        TensorDict({"a": base, "n": {"s": "x", "l": NonTensorStack("a", "b", "c")}}, [3], names=["x"]).lock_(),
        [Pair(base, None, batch_size=[3]), Point(base, np.arange(3)), UnbatchedTensor(base)],
        lazy_stack([TensorDict(a=base), TensorDict(a=base[1:])]),
        TensorDictParams(TensorDict(a=base)),
        [jagged(), torch.nested.nested_tensor([base, base[1:]]), torch.quantize_per_tensor(base, 0.1, 0, torch.qint8)],
        {"objects": OBJECTS[:40], "t": torch.zeros(0)},
        {"plain": PLAIN, "t": torch.zeros(0)},
        [classes.Config(1, extra=base), classes.Slotted(base), classes.Output(base, (base,)), deque([base, 1], 5)],
        [Namespace(a=base, b="x"), classes.BatchEncoding({"a": base}), Counter(a=1, b=base), torch.max(base, 0)],
        [base.to_sparse(), torch.nn.Parameter(base.to_sparse_csr()), base.to_sparse_bsc((1, 2))],
        [classes.Int8Weight.of(base), torch.nn.Parameter(classes.Int4Weight.of(base, {"a": classes.Color.RED}))],
        TensorDict({"s": classes.State(x=base, y=base, batch_size=[3]), "m": MetaData[str]("x", batch_size=[3])}, [3]),
    ]
    return [(plan.description, objects, memory) for plan, objects, memory in map(stored, values)]


@many
@given(st.binary(max_size=60), st.binary(max_size=60))
def test_random_bytes(description: bytes, objects: bytes) -> None:
    try_to_read(description, objects, np.zeros(64, np.uint8))
    with pytest.raises((CorruptionError, UnsupportedValueError)):  # the latter names a pickle, which is not read
        decode_objects(objects, 1000, False)


NAMES = [f"tests.structure.classes:{name}" for name in ("Config", "Output", "Int8Weight", "State", "Step", "Color")]
JSON = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-2, 2**63),
        st.floats(),
        st.sampled_from(["td", "dict", "float32", "jagged", "argparse", "sparse_coo", *NAMES]),
    ),
    lambda inner: st.lists(inner, max_size=6),
    max_leaves=20,
)
KINDS = ["dict", "ordered", "list", "tuple", "td", "lazy", "lazy0", "values", "nontensor", "metadata", "tensorclass"]
KINDS += ["namespace", "dataclass", "mapping", "structseq", "deque", "sparse", "wrapper", "typed", "metadata_of"]
KINDS += ["params", "unbatched", "ndarray", "jagged", "nested", "quantized", "quantized_channels", "namedtuple"]
NODE = st.tuples(
    st.sampled_from(KINDS), st.lists(st.one_of(JSON, st.sampled_from([0, 1, [0], [1, 0], []])), max_size=7)
)
LEAF = st.tuples(
    st.sampled_from(["float32", "uint8"]), st.lists(st.integers(0, 3), max_size=2), st.integers(0, 40)
).map(list)


@many
@given(NODE, st.lists(st.one_of(LEAF, JSON), max_size=3), st.booleans())
def test_random_trees(node: Any, leaves: Any, inline: bool) -> None:
    try_to_read(pack([[node[0], *node[1]], leaves, inline]), pack([1, [2]][: len(leaves)]), np.zeros(64, np.uint8))


@pytest.mark.parametrize("numbers", [[0, 2, 1 << 40], [0, -2, 4], [-1, 2, 4], [3, 2, 4]])
def test_offsets_of_jagged_tensors_lie_in_their_values(numbers: list[int]) -> None:
    rows = [torch.ones(2, 3), torch.ones(2, 3)]
    plan, objects, memory = stored(torch.nested.nested_tensor(rows, layout=torch.jagged))
    rebuild(plan, objects, memory, None)
    start = plan.leaves[1].offset
    assert plan.leaves[1].shape == (3,) and plan.leaves[1].dtype == "int64"
    changed = np.array(memory)
    changed[start : start + 24] = np.array(numbers).view(np.uint8)
    with pytest.raises(CorruptionError, match="jagged"):
        rebuild(plan, objects, changed, None)


def mutated(data: bytes, generator: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(generator.randint(1, 3)):
        if not changed:
            break
        place = generator.randrange(len(changed))
        kind = generator.randrange(4)
        if kind == 0:
            changed[place] ^= 1 << generator.randrange(8)
        elif kind == 1:
            changed[place] = generator.choice(b"\x00\x01\x7f\x80\x90\xa0\xc0\xc3\xcf\xd3\xdc\xdd\xdf\xff")
        elif kind == 2:
            del changed[place]
        else:
            changed[place:place] = changed[generator.randrange(len(changed)) :][:8]
    return bytes(changed)


@pytest.mark.parametrize("number", range(14))
def test_mutated_valid_ones(number: int) -> None:
    description, objects, memory = valid()[number]
    generator = random.Random(number)
    for _ in range(400):
        try_to_read(mutated(description, generator), objects, memory)
        try_to_read(description, mutated(objects, generator) if objects else b"\x90", memory)


LEAVES = [["float32", [2], 0]]
CLASS = "tests.structure.classes:"
TREES = {
    "deep": [["list", [["list"]]], LEAVES, True],
    "no such kind": [["os.system", []], [], True],
    "fewer tensors": [["list", [0]], [], True],
    "more tensors": [["list", []], LEAVES, True],
    "no such dtype": [0, [["float and more", [2], 0]], True],
    "quantized": [0, [["qint8", [2], 0]], True],
    "attribute of torch": [0, [["float32.__class__", [2], 0]], True],
    "negative size": [0, [["float32", [-1], 0]], True],
    "huge size": [0, [["float32", [2**62], 0]], True],
    "product beyond 63 bits": [0, [["float32", [2**40, 2**40], 0]], True],
    "product with a zero": [0, [["float32", [2**62, 0, 2**62], 0]], True],
    "negative offset": [0, [["float32", [2], -4]], True],
    "huge offset": [0, [["float32", [2], 2**63 - 1]], True],
    "beyond the memory": [0, [["float32", [2], 64]], True],
    "negative stride": [0, [["float32", [2], 0, [-1]]], True],
    "huge stride": [0, [["float32", [2], 0, [2**62]]], True],
    "strides beyond the memory": [0, [["float32", [2, 2], 0, [1000, 1]]], True],
    "more strides than sizes": [0, [["float32", [2], 0, [1, 1]]], True],
    "gradient of integers": [0, [["int32", [2], 0, None, 1]], True],
    "flags": [0, [["int32", [2], 0, None, 99]], True],
    "device": [0, [["float32", [2], 0, None, 0, "floppy disk"]], True],
    "meta device": [0, [["float32", [2], 0, None, 0, "meta"]], True],
    "same as itself": [0, [0], True],
    "same as a later one": [["list", [0, 0]], [1, LEAVES[0]], True],
    "tied between elements": [["list", [0, 0]], [["float32", [4], 0], ["float32", [2], 2]], True],
    "bool for a size": [0, [["float32", [True], 0]], True],
    "a key twice": [["dict", ["a", "a"], [0, 0]], LEAVES * 2, True],
    "other keys than entries": [["dict", ["a"], [0, 0]], LEAVES * 2, True],
    "a jagged tensor of one": [["jagged", 1, None, None, False, [0]], LEAVES, True],
    "a jagged index": [["jagged", 9, None, None, False, [0, 0]], [["float32", [2], 0], ["int64", [2], 8]], True],
    "a tensorclass around a list": [["tensorclass", "os:path", ["list", []], [], []], [], True],
    "no inline": [0, LEAVES],
    "a namespace of nobody": [["namespace", "os", [], []], [], True],
    "a namespace of other names": [["namespace", "argparse", ["a", "b"], [0]], LEAVES, True],
    "a name that is a number": [["namespace", "argparse", [1], [0]], LEAVES, True],
    "a name twice": [["namespace", "types", ["a", "a"], [0, 0]], LEAVES * 2, True],
    "a dataclass without a name": [["dataclass", "Config", ["lr"], [], [0]], LEAVES, True],
    "a field that is set and isn't": [["dataclass", CLASS + "Frozen", ["x", "n"], ["n"], [0, 0]], LEAVES * 2, True],
    "fewer entries than fields": [["dataclass", CLASS + "Frozen", ["x", "n"], [], [0]], LEAVES, True],
    "keys of a mapping": [["mapping", CLASS + "Output", [], ["a", "a"], [0, 0]], LEAVES * 2, True],
    "attributes of a mapping": [["mapping", CLASS + "Output", [3], ["a"], [0]], LEAVES, True],
    "a deque that is too long": [["deque", 1, [0, 0]], LEAVES * 2, True],
    "a deque of a negative length": [["deque", -1, []], [], True],
    "a deque of a huge length": [["deque", 2**63, []], [], True],
    "a sparse layout": [["sparse", "strided", 0, [0, 0], 1], LEAVES * 2, True],
    "sparse parts": [["sparse", "sparse_coo", 0, [0], 1], LEAVES, True],
    "sparse flags": [["sparse", "sparse_coo", 99, [0, 0], 1], LEAVES * 2, True],
    "a sparse tensor of lists": [["sparse", "sparse_coo", 0, [["list", []], 0], 1], LEAVES, True],
    "a wrapper of nothing": [["wrapper", CLASS + "Int8Weight", 0, [], [], 1], [], True],
    "a wrapper of a list": [["wrapper", CLASS + "Int8Weight", 0, ["scale"], [["list", []]], ["list", []]], [], True],
    "a wrapper's names": [["wrapper", CLASS + "Int8Weight", 0, ["a", "a"], [0, 0], 1], LEAVES * 2, True],
    "typed around a tensor": [["typed", CLASS + "State", 0], LEAVES, True],
    "typed around a list": [["typed", CLASS + "State", ["list", []]], [], True],
    "MetaData of nothing": [["metadata_of"], [], True],
}


@pytest.mark.parametrize("name", TREES)
def test_crafted_descriptions(name: str) -> None:
    memory = np.zeros(64, np.uint8)
    with pytest.raises(CorruptionError):
        rebuild(plan_of(pack(TREES[name])), b"", memory, None)


INT64 = ["int64", [1, 2], 0]
ABOUT = [  # what goes with a sparse tensor, or one that is wrapped, and is no part of the description
    ("no list", ["sparse", "sparse_coo", 0, [0, 0], 1], [INT64, ["float32", [2], 16]], 3),
    ("sizes", ["sparse", "sparse_coo", 0, [0, 0], 1], [INT64, ["float32", [2], 16]], [[-1], False]),
    ("huge sizes", ["sparse", "sparse_coo", 0, [0, 0], 1], [INT64, ["float32", [2], 16]], [[2**62, 2**62], False]),
    ("more sizes", ["sparse", "sparse_coo", 0, [0, 0], 1], [INT64, ["float32", [2], 16]], [[1, 1, 1, 1], False]),
    ("a flag", ["sparse", "sparse_coo", 0, [0, 0], 1], [INT64, ["float32", [2], 16]], [[4], 1]),
    ("coalesced", ["sparse", "sparse_coo", 0, [0, 0], 1], [INT64, ["float32", [2], 16]], [[4], True]),
    ("integers with grad", ["sparse", "sparse_coo", 1, [0, 0], 1], [INT64, ["int32", [2], 16]], [[4], False]),
    ("indices of floats", ["sparse", "sparse_coo", 0, [0, 0], 1], [["float64", [1, 2], 0]] * 2, [[4], False]),
    (
        "indices of no end",
        ["sparse", "sparse_coo", 0, [0, 0], 1],
        [["int64", [1, 2**20], 0, [0, 0]], ["float32", [2**20], 16, [0]]],
        [[4], False],
    ),
    ("a wrapper's context", ["wrapper", CLASS + "Int8Weight", 0, ["values_int8", "scale"], [0, 0], 1], LEAVES * 2, 3),
    (
        "a wrapper's sizes",
        ["wrapper", CLASS + "Int8Weight", 0, ["values_int8", "scale"], [0, 0], 1],
        LEAVES * 2,
        [None, [-1], [1]],
    ),
    ("integers of no end", ["quantized", 0, 1], [["int8", [2**20], 0, [0]]], [0.5, 1]),
]


@pytest.mark.parametrize(("tree", "leaves", "about"), [one[1:] for one in ABOUT], ids=[one[0] for one in ABOUT])
def test_crafted_parts(tree: Any, leaves: Any, about: Any) -> None:
    with pytest.raises(CorruptionError):
        rebuild(plan_of(pack([tree, leaves, True])), pack([about]), np.zeros(64, np.uint8), None)


def test_sizes_of_nested_tensors_are_not_read_if_they_have_no_memory_of_their_own() -> None:
    tree, leaves = ["nested", False, 0, 0], [["float32", [0], 0], ["int64", [2**40, 1], 8, [0, 0]]]
    with pytest.raises(CorruptionError, match="a malformed nested tensor"):
        rebuild(plan_of(pack([tree, leaves, True])), b"", np.zeros(64, np.uint8), None)


def test_names_without_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name repeats the keys of the levels above: 20 MB of description could take 16 GB of memory."""
    value: Any = [torch.zeros(1)] * 100
    for _ in range(150):
        value = [value]
    description = stored(value)[0].description
    plans._plans.clear()
    monkeypatch.setattr(tree, "MAX_NAME_PARTS", 10_000)
    with pytest.raises(CorruptionError, match="too many leaves on too many levels"):
        plan_of(description)
    with pytest.raises(UnsupportedValueError, match="too many leaves on too many levels"):
        flatten([value, 1])


def test_depth_of_descriptions() -> None:
    for levels in (201, 5000, 200_000):
        with pytest.raises(CorruptionError):
            plan_of(b"\x93" + b"\x92\xa4list\x91" * levels + b"\x00" + b"\x90\xc3")
        with pytest.raises(CorruptionError):
            decode_objects(b"\x91" * levels + b"\xc0", 2, False)
    data: Any = b"\x90"
    for _ in range(3000):
        data = pack(Ext(1, data))
    with pytest.raises(CorruptionError):
        decode_objects(b"\x91" + data, 1, False)
    data = 1
    for _ in range(3000):
        data = Ext(6, pack([["deque", None, [1]], [data]]))
    with pytest.raises(CorruptionError):
        decode_objects(pack([data]), 1, False)


def test_strides_that_read_beyond_a_leaf_stay_in_the_memory() -> None:
    plan = plan_of(pack([0, [["float32", [3], 0, [5]]], True]))
    assert plan.nbytes == 44
    with pytest.raises(CorruptionError):
        rebuild(plan, b"", np.zeros(43, np.uint8), None)


def test_sizes_of_nested_tensors_are_checked_against_their_buffer() -> None:
    plan, objects, memory = stored(torch.nested.nested_tensor([torch.zeros(2, 3), torch.zeros(4, 3)]))
    sizes = next(leaf for leaf in plan.leaves if leaf.name == ("sizes",))
    for hostile in ([[2, 3], [4, 3 << 40]], [[-2, 3], [8, 3]], [[1 << 62, 4], [1 << 62, 4]]):
        changed = memory.copy()
        changed[sizes.offset : sizes.offset + sizes.nbytes] = np.array(hostile, np.int64).view(np.uint8).reshape(-1)
        with pytest.raises(CorruptionError):
            rebuild(plan, objects, changed, None)


class Bomb:
    exploded = False

    def __reduce__(self) -> Any:
        return (setattr, (Bomb, "exploded", True))


def test_pickles_never_run_unasked() -> None:
    flat = flatten({"t": torch.zeros(1), "bomb": Bomb(), "deep": [1, (2, {"x": Bomb()})]}, allow_pickle=True)
    memory = np.zeros(flat.plan.nbytes, np.uint8)
    with pytest.raises(UnsupportedValueError, match="allow_pickle"):
        rebuild(plan_of(flat.plan.description), flat.objects, memory, None)
    nested = pack([Ext(4, pack([pack(Ext(100, b"x"))])), Ext(2, pack([["k"], [Ext(100, b"x")]]))])
    with pytest.raises((UnsupportedValueError, CorruptionError)):
        decode_objects(nested, 2, False)
    assert not Bomb.exploded
    rebuild(plan_of(flat.plan.description), flat.objects, memory, None, allow_pickle=True)
    assert Bomb.exploded


@pytest.mark.parametrize(
    "extension",
    [
        Ext(99, b""),
        Ext(1, b""),
        Ext(1, b"\x01"),
        Ext(2, pack([["a"], [1, 2]])),
        Ext(2, pack([[["tuple", {}]], [1]])),
        Ext(2, pack([[["int", "9" * 100_000]], [1]])),
        Ext(2, pack([[["int", "x"]], [1]])),
        Ext(4, pack([pack([1])])),
        Ext(11, b"123"),
        Ext(13, pack([1, 2, 0])),
        Ext(13, pack(["a", 2, 1])),
        Ext(20, pack(["<f4", [2], b"x" * 8])),
        Ext(21, pack(["O", [1], b"x" * 8])),
        Ext(21, pack(["<f4", [3], b"x" * 8])),
        Ext(21, pack(["<f4", [2**62], b"x" * 8])),
        Ext(21, pack(["<f4", [-1], b"x" * 8])),
        Ext(21, pack(["<U0", [2**40], b""])),
        Ext(21, pack(["|V0", [2**62, 2**62], b""])),
        Ext(21, pack(["f4,O", [1], b"x" * 16])),
        Ext(21, pack(["(2,2)f4", [1], b"x" * 16])),
        Ext(30, pack(["a"])),
        Ext(31, b"load"),
        Ext(31, b"\xff"),
        Ext(32, b"floppy disk"),
        Ext(6, b""),
        Ext(6, pack([["deque", None, [1]], []])),
        Ext(6, pack([["deque", None, [0]], []])),
        Ext(6, pack([["deque", None, [["deque", None, [1]]]], [1]])),
        Ext(6, pack([["list", [1]], [1]])),
        Ext(6, pack([["td", [], None, None, False, [], []], []])),
        Ext(6, pack([["os.system"], []])),
        Ext(6, pack([[1], [1]])),
        Ext(6, pack([["deque", 1, [1, 1]], [1, 2]])),
        Ext(6, pack([["namespace", "os", [], []], []])),
        Ext(6, pack([["mapping", "collections:Counter", [], ["a"], []], []])),
        Ext(40, pack([2020, 13, 1, 0, 0, 0, 0, 0, None])),
        Ext(40, pack([2020, 12, 1, 0, 0, 0, 0, 7, None])),
        Ext(40, pack([2020, 12, 1, 0, 0, 0, 0, 0, "../../etc/passwd"])),
        Ext(40, pack([2020, 12, 1, 0, 0, 0, 0, 0, "/etc/passwd"])),
        Ext(40, pack([2020, 12, 1, 0, 0, 0, 0, 0, [10, 0, 0]])),
        Ext(40, pack([2020, 12, 1, 0, 0, 0, 0, True, None])),
        Ext(40, pack([])),
        Ext(41, pack([2020, 1, 99])),
        Ext(42, pack([25, 0, 0, 0, 0, None])),
        Ext(43, pack([2**62, 0, 0])),
        Ext(44, pack(None)),
        Ext(44, pack([0, 0, 0, 5])),
        Ext(45, pack(["Path", b"a"])),
        Ext(45, pack(["PosixPath", b"\xff"])),
        Ext(46, b"1e"),
        Ext(46, b"1E+99999999999999999999"),
        Ext(47, pack([b"\1", b"\0"])),
        Ext(47, pack([b"\1" * 10_000, b"\1"])),
        Ext(48, pack([b"x", None])),
        Ext(48, pack([b"x" * 16, 5])),
        Ext(49, pack(["x", []])),
        Ext(49, pack([CLASS + "Color", []])),
        Ext(49, pack([CLASS + "Color", ["RED", "GREEN"]])),
        Ext(49, pack([CLASS + "Color", [3]])),
    ],
    ids=lambda extension: f"{extension.code} {extension.data!r:.40}",
)
def test_crafted_objects(extension: Any) -> None:
    with pytest.raises(CorruptionError):
        decode_objects(pack([extension]), 1, False)


def test_classes_are_found_only_among_what_is_imported() -> None:
    plan, objects, memory = stored([Pair(torch.zeros(3), None, batch_size=[3]), Point(1, torch.zeros(2))])

    def renamed(old: str, new: str) -> bytes:
        tree, leaves, inline = msgspec.msgpack.decode(plan.description)
        text = repr(tree).replace(old, new)
        return pack([eval(text), leaves, inline])  # a repr of lists and numbers

    for name in ("test_matrix:Nothing", "this.module.is:Missing", "json.tool:main", "json.tool:x.y", "os:system"):
        with pytest.raises(UnsupportedValueError):
            rebuild(plan_of(renamed("tests.structure.test_matrix:Pair", name)), objects, memory, None)
    for name in ("os:system", "torch:Tensor", "collections:OrderedDict"):
        with pytest.raises(UnsupportedValueError):
            rebuild(plan_of(renamed("tests.structure.test_matrix:Point", name)), objects, memory, None)
    assert "json.tool" not in sys.modules


OTHERS = {
    "a module that isn't imported": "json.tool:main",
    "a function": "os:system",
    "a class without fields": "tests.structure.test_refusals:Thing",
    "a builtin": "builtins:list",
    "a tensorclass": "tests.structure.test_matrix:Pair",
    "a class that goes with a bang": "tests.structure.classes:WithFinalizer",
    "torch.Tensor": "torch:Tensor",
    "half of the protocol": "tests.structure.classes:Half",
    "a module of torch": "tests.structure.classes:Module",
    "an attribute that runs code": "tests.structure.classes:Color.RED.value",
    "nothing": "tests.structure.classes:Nothing",
}
NAMED = {
    "dataclass": ["dataclass", "?", ["x"], [], [1]],
    "mapping": ["mapping", "?", ["x"], ["x"], [1]],
    "structseq": ["structseq", "?", [1, 1]],
    "namedtuple": ["namedtuple", "?", [1, 1]],
    "wrapper": ["wrapper", "?", 0, ["x"], [0], 1],
    "typed": ["typed", "?", ["td", [], None, None, False, [], []]],
}


@pytest.mark.parametrize("name", OTHERS.values(), ids=OTHERS)
@pytest.mark.parametrize("kind", NAMED)
def test_no_kind_takes_a_class_that_is_none_of_its_own(kind: str, name: str) -> None:
    classes.ran.clear()
    imported = set(sys.modules)
    tree = [name if part == "?" else part for part in NAMED[kind]]
    objects = {"dataclass": [1], "mapping": [1], "structseq": [1, 2], "namedtuple": [1, 2], "typed": []}
    written = objects.get(kind, [[None, [2], [1]]])
    plan = plan_of(pack([["list", [tree]], LEAVES if kind == "wrapper" else [], True]))
    with pytest.raises(UnsupportedValueError):
        rebuild(plan, pack(written) if written else b"", np.zeros(64, np.uint8), None)
    if kind in ("dataclass", "mapping"):  # the same as one object
        with pytest.raises(UnsupportedValueError):
            decode_objects(pack([Ext(6, pack([tree, written]))]), 1, False)
    with pytest.raises(UnsupportedValueError):
        decode_objects(pack([Ext(49, pack([name, ["A"]]))]), 1, False)
    assert classes.ran == [] and not [name for name in set(sys.modules) - imported if not name.startswith("memstore.")]


def test_a_zone_or_member_that_is_not_known_here_is_named() -> None:
    for extension, message in (
        (Ext(40, pack([2020, 12, 1, 0, 0, 0, 0, 0, "Mars/Olympus"])), "zone 'Mars/Olympus', which this system"),
        (Ext(49, pack([CLASS + "Color", ["BLUE"]])), "Color.BLUE, but .* has none here"),
    ):
        with pytest.raises(UnsupportedValueError, match=message):
            decode_objects(pack([extension]), 1, False)


def test_caches_are_bounded() -> None:
    for i in range(1000):
        plan_of(pack([["dict", [f"k{i}"], [0]], LEAVES, True]))
    assert len(plans._plans) <= 256


def test_the_plans_of_one_structure_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each way to be tied is a plan of its own."""
    cache = sys.modules["memstore.structure.flattening"]  # the room's attribute of this name is the function

    def cached() -> list[Any]:
        return [plan for structure in cache._structures.values() for plan, _ in structure.plans.values()]

    base = torch.zeros(2000, dtype=torch.uint8)
    for i in range(600):
        flatten([base[:1000], base[i : i + 1000]])
        if i > 200:
            assert len(cached()) <= 256
    assert cache._CACHED_LEAVES == 1 << 18
    monkeypatch.setattr(cache, "_CACHED_LEAVES", 1 << 12)
    for i in range(8):
        flatten({str(i): [torch.zeros(1)] * 1000})
        assert sum(len(plan.leaves) for plan in cached()) <= (1 << 12) + 1000
