"""Values of the standard library, and objects of imported classes: each comes back as it was put, and no code runs."""

from __future__ import annotations

import argparse
import collections
import datetime
import signal
import types
import uuid
import zoneinfo
from decimal import Decimal
from fractions import Fraction
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import pytest
import torch
from tensordict import NonTensorData, TensorDict

import memstore
from memstore.errors import UnsupportedValueError
from memstore.structure import flatten, get_into, iter_tensors, rebuild, structure_text
from tests.structure import classes
from tests.structure.roundtrip import round_trip, serve, stored
from tests.support.equality import assert_same, is_same

UTC = datetime.timezone.utc
BERLIN = zoneinfo.ZoneInfo("Europe/Berlin") if zoneinfo.available_timezones() else datetime.timezone.max
NOW = datetime.datetime(2026, 3, 1, 2, 30, 5, 123456)

PLAIN = [
    *(NOW, NOW.replace(tzinfo=UTC), NOW.replace(tzinfo=BERLIN, fold=1), NOW.replace(fold=1), datetime.datetime.max),
    NOW.replace(tzinfo=datetime.timezone(datetime.timedelta(hours=-3, microseconds=1), "é")),
    *(NOW.date(), NOW.time(), NOW.time().replace(tzinfo=UTC, fold=1), datetime.time.min, datetime.date.min),
    *(datetime.timedelta(-1, 3, 5), datetime.timedelta.max, UTC, BERLIN, datetime.timezone(datetime.timedelta(0), "x")),
    *(Path("/a/b.pt"), Path(), PurePosixPath("a//é/../c"), PureWindowsPath(r"C:\x\y"), Path("\udcff")),
    *(Decimal("1.10"), Decimal("-0"), Decimal("NaN12"), Decimal("sNaN"), Decimal("-Infinity"), Decimal("1E+99999")),
    *(Fraction(-3, 7), Fraction(0), Fraction(2**100, 3), uuid.UUID(int=5), uuid.uuid1(), uuid.uuid4()),
    *(classes.Color.RED, classes.Color.GREEN, classes.Color.ALSO_RED, classes.Level.LOW, classes.Text.A),
    *(classes.Rights.READ, classes.Rights.ALL, classes.Rights(0), classes.Pair.ZERO, signal.Signals.SIGINT),
    *(classes.Bits.ONE | classes.Bits.TWO, classes.Bits(0)),
    *(collections.Counter("abca"), collections.Counter(), collections.deque([1, 2], maxlen=3), collections.deque()),
    *(collections.deque([], 0), collections.deque([[1], collections.deque([2])])),
    *(
        argparse.Namespace(lr=0.1, tags=["a"]),
        argparse.Namespace(),
        types.SimpleNamespace(a=1, b=types.SimpleNamespace()),
    ),
    *(classes.Config(0.1), classes.Child(0.1, extra={"a": [classes.Frozen(1)]}), classes.Undecorated(2.0)),
    *(classes.Frozen((1, 2)), classes.Slotted(1), classes.FrozenSlotted([2]), classes.Outer(classes.Outer.Inner(3))),
    *(
        classes.Careful(4),
        classes.AttributeDict(a=1),
        classes.BatchEncoding({"ids": [1, 2]}),
        collections.UserDict(a=1),
    ),
    *(classes.Output("x", (1, 2)), classes.Output(), classes.Step(1.5), classes.Sequence(2, "n")),
    *({NOW.date(), Decimal(1)}, frozenset({classes.Color.RED, Path("a")})),
]


@pytest.mark.parametrize("value", PLAIN, ids=[f"{i} {type(value).__name__}" for i, value in enumerate(PLAIN)])
def test_plain_values_come_back(value: Any) -> None:
    for whole in (value, {"a": value, "t": torch.zeros(1)}, [[value]], (torch.ones(1), {"x": (value, 1)})):
        assert_same(whole, round_trip(whole))
    whole = TensorDict({"t": torch.zeros(2), "n": NonTensorData(value)})
    assert_same(whole, round_trip(whole))


def test_members_and_constants_are_themselves() -> None:
    values = [classes.Color.GREEN, classes.Rights.READ, classes.Bits.ONE | classes.Bits.TWO, UTC, BERLIN]
    assert all(one is other for one, other in zip(values, round_trip({"v": values})["v"], strict=True))


def tensor(n: float = 1.0) -> torch.Tensor:
    return torch.full((2, 3), float(n))


HOLDERS = {
    "deque": lambda: collections.deque([tensor(), 1, {"x": tensor(2)}], maxlen=7),
    "Counter": lambda: collections.Counter(a=3, b=tensor()),
    "Namespace": lambda: argparse.Namespace(w=tensor(), n=argparse.Namespace(b=[tensor(2)], c="x")),
    "SimpleNamespace": lambda: types.SimpleNamespace(w=tensor(), s=1),
    "Child": lambda: classes.Child(0.1, extra={"a": tensor()}, weight=torch.nn.Parameter(tensor(2))),
    "Frozen": lambda: classes.Frozen(tensor()),
    "Slotted": lambda: classes.Slotted([tensor(), classes.FrozenSlotted(tensor(2))]),
    "Output": lambda: classes.Output(tensor(), (tensor(2), tensor(3))),
    "BatchEncoding": lambda: classes.BatchEncoding({"input_ids": tensor(), "mask": [tensor(2)]}),
    "AttributeDict": lambda: classes.AttributeDict({1: tensor(), "b": "x"}),
    "Sequence": lambda: classes.Sequence(tensor(), "n"),
    "PackedSequence": lambda: torch.nn.utils.rnn.pack_sequence([torch.ones(3, 2), torch.ones(2, 2)]),
    "max": lambda: torch.max(tensor(), dim=0),
    "qr": lambda: torch.linalg.qr(tensor()),
}


@pytest.mark.parametrize("name", HOLDERS)
def test_holders_of_tensors_come_back(name: str) -> None:
    value = HOLDERS[name]()
    for whole in (value, {"a": [value, 1], "t": value}):
        got = round_trip(whole)
        assert_same(whole, got)
        assert len(list(iter_tensors(got))) == len(list(iter_tensors(whole))) > 0
    assert structure_text(flatten(value).plan)


@pytest.mark.parametrize("inline", [True, False])
def test_a_store_serves_them_in_every_way(inline: bool, root: str, tmp_path: Any) -> None:
    with memstore.open(root, checksum=True, verify=True) as store:
        for name, make in HOLDERS.items():
            pad = torch.zeros(0 if inline else 1000)
            value = {"v": make(), "pad": pad}
            serve(store, name, value, {"v": make(), "pad": pad.clone()}, tmp_path / "k.pt")
            view, info = store.view(name), store.info(name)
            assert type(view["v"]) is type(value["v"]) and info.kind == ("inline" if inline else "segment")
            names = {path for path, _ in iter_tensors(value)}
            assert {path for path, _ in iter_tensors(view)} == names == {leaf.name for leaf in info.leaves}
            assert dict(memstore.iter_weights(store, name)).keys() == {".".join(map(str, one)) for one in names}
        assert store.verify().ok


@pytest.mark.parametrize("name", HOLDERS)
def test_they_are_filled_in_place(name: str) -> None:
    value, out = HOLDERS[name](), HOLDERS[name]()
    for _, leaf in iter_tensors(out):
        leaf.detach().zero_()
    leaves = dict(iter_tensors(out))
    assert get_into(*stored(value), out) is out
    assert_same(value, out)
    assert all(leaves[path] is leaf for path, leaf in iter_tensors(out))


def test_no_code_of_a_class_runs() -> None:
    values = [classes.Config(0.1), classes.Careful(tensor()), classes.BatchEncoding({"a": 1}), classes.Sequence(1)]
    values += [classes.Output(tensor()), classes.AttributeDict(a=tensor()), classes.Child(1, weight=tensor())]
    classes.ran.clear()
    assert_same(values, round_trip(values))
    assert classes.ran == []


def test_the_state_of_a_scheduler() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(tensor())], 0.1)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 5])
    got = round_trip({"scheduler": scheduler.state_dict()})["scheduler"]
    assert type(got["milestones"]) is collections.Counter
    assert_same(scheduler.state_dict(), got)
    scheduler.load_state_dict(got)


@pytest.mark.parametrize(
    "make", [collections.deque, lambda one: classes.Frozen(one[0]), lambda one: collections.Counter(a=one[0])]
)
@pytest.mark.parametrize("leaf", [1, torch.ones(1)], ids=["object", "tensor"])
def test_levels(make: Any, leaf: Any) -> None:
    value = leaf
    for _ in range(200):
        value = make([value])
    assert_same(value, round_trip(value))
    with pytest.raises(UnsupportedValueError, match="more than 200 levels"):
        flatten([value])


def test_pickles_inside_need_permission() -> None:
    value = {"a": classes.Config(1.0, extra=collections.deque([len])), "t": tensor()}
    assert_same(value, round_trip(value, allow_pickle=True))
    with pytest.raises(UnsupportedValueError, match="only allow_pickle=True"):
        flatten(value)
    with pytest.raises(UnsupportedValueError, match="open the store with allow_pickle=True"):
        rebuild(*stored(value, allow_pickle=True), None)


def test_what_a_model_shares_with_its_output_stays_shared() -> None:
    value = classes.Output(tensor())
    got = round_trip(value)
    assert got.last_hidden_state is got["last_hidden_state"] and got.attentions is None


# -- refusals --------------------------------------------------------------------------------------------------------


def with_attribute(value: Any, name: str = "other") -> Any:
    object.__setattr__(value, name, 3)
    return value


def local_dataclass() -> Any:
    import dataclasses

    return dataclasses.make_dataclass("Hidden", ["x"])(1)


def local_member() -> Any:
    import enum

    return enum.Enum("Hidden", "A").A


class Zone(datetime.tzinfo):
    pass


REFUSED = {
    "attributes beside its fields: other; make them fields": lambda: with_attribute(classes.Config(1)),
    "has more than its items: other; put dict": lambda: with_attribute(classes.AttributeDict(a=1)),
    "has more than its items: _n_sequences; put dict": lambda: classes.BatchEncoding({"a": 1}, n_sequences=2),
    "has attributes beside its fields; put tuple": lambda: with_attribute(classes.Sequence(1)),
    "Hidden can't be found by its name": local_dataclass,
    "Hidden can't be found": local_member,
    "a time zone of type .*Zone; put a datetime.timezone": lambda: NOW.replace(tzinfo=Zone()),
    "SlottedDict, a subclass of a builtin container": lambda: classes.SlottedDict(),
    "defaultdict whose factory": lambda: collections.defaultdict(lambda: 1),
    "type tests.structure.classes.WithFinalizer, which only allow_pickle": lambda: classes.WithFinalizer(1),
    r"Module: put its state_dict\(\)": lambda: classes.Module(),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_is_more_than_its_parts_is_refused(message: str) -> None:
    with pytest.raises(UnsupportedValueError, match=r"^value\['a'\]\[1\]: .*" + message):
        flatten({"a": [torch.zeros(1), REFUSED[message]()]})


@pytest.mark.parametrize("make", [lambda: with_attribute(classes.Config(1)), lambda: classes.SlottedDict(a=1)])
def test_pickle_stores_it_still(make: Any) -> None:
    value = {"x": make(), "t": tensor()}
    got = round_trip(value, allow_pickle=True)
    assert type(got["x"]) is type(value["x"]) and got["x"] == value["x"]
    assert getattr(got["x"], "__dict__", None) == getattr(value["x"], "__dict__", None)


def test_a_class_whose_fields_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    import dataclasses

    for value in (classes.Config(1.0), [classes.Config(1.0), tensor()]):
        parts = stored([value])
        changed = dataclasses.make_dataclass("Config", ["lr", "momentum"])
        changed.__module__, changed.__qualname__ = classes.__name__, "Config"
        with monkeypatch.context() as patch:
            patch.setattr(classes, "Config", changed)
            with pytest.raises(UnsupportedValueError, match=r"classes\.Config has other fields .*momentum"):
                rebuild(*parts, None)
            patch.setattr(classes, "Config", int)
            with pytest.raises(UnsupportedValueError, match=r"classes\.Config, but that is not a dataclass"):
                rebuild(*parts, None)
            patch.delattr(classes, "Config")
            with pytest.raises(UnsupportedValueError, match=r"import the module 'tests\.structure\.classes'"):
                rebuild(*parts, None)


def test_the_comparison_sees_differences() -> None:
    pairs = [
        (NOW.replace(tzinfo=UTC), NOW.replace(tzinfo=datetime.timezone(datetime.timedelta(0), "x"))),
        (NOW, NOW.replace(fold=1)),
        (Decimal("1.0"), Decimal("1.00")),
        (collections.deque([1]), collections.deque([1], 1)),
        (classes.Config(1), classes.Config(2)),
        (classes.Frozen(tensor()), classes.Frozen(tensor(2))),
        (argparse.Namespace(a=1), argparse.Namespace(a=1, b=1)),
        (classes.Output("x"), classes.Output("y")),
        (classes.BatchEncoding({"a": 1}), classes.BatchEncoding({"a": 1}, n_sequences=2)),
    ]
    for one, other in pairs:
        assert is_same(one, one) and not is_same(one, other)
