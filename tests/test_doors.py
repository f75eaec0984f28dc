"""The rooms of the house: each is entered by its door, stands on its floor, and no imports go in a circle."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.source_tree import (
    Module,
    Modules,
    circles,
    imports_of,
    is_inside,
    modules_in,
    past_doors,
    private_uses,
    privates_of_others,
)

PACKAGE = Path(__file__).parent.parent / "memstore"
ENGINE = "memstore.engine"

# Folders whose files are nobody else's: others import from the folder, as its `__init__.py` offers it.
DOORS = {
    f"memstore.{name}"
    for name in (
        "checkpoints",
        "contents",
        "convert",
        "datasets",
        "deferred_init",
        "fake",
        "formats",
        "listing",
        "replay",
        "sharding",
        "snapshot",
        "structure",
        "view",
    )
}

# The engine's rooms and the files beside them, from below: each imports from lower floors, and from its own part.
FLOORS = (
    ("syscalls",),
    ("format",),
    ("files",),
    ("catalog",),
    ("sync",),
    ("root",),
    ("usage",),
    ("protocols",),
    ("index",),
    ("repair",),
    ("opening",),
    ("pin", "elsewhere"),
)
FLOOR_OF = {part: number for number, parts in enumerate(FLOORS) for part in parts}

# The engine's folders are layers, not doors: its files import from one another. `syscalls` is what tests replace.
ENGINE_DOORS = {ENGINE, f"{ENGINE}.syscalls"}
COMPAT = "memstore._compat"  # the module that uses private names of other libraries
# Names with an underscore that Python's documents tell to use: of named tuples, of enumerations, of os.
DOCUMENTED = {"_asdict", "_exit", "_fields", "_make", "_replace", "_name_", "_value_", "_member_map_"}
# Private names of other libraries that stand elsewhere, and why.
ELSEWHERE = {
    # names that stand in files, which others have written or will read
    "memstore.checkpoints.folders": {"_CHECKPOINT_METADATA"},
    "memstore.convert.dcp": {"_MEM_FORMAT_ENCODING", "_StorageInfo", "_get_layout"},
    "memstore.formats.memmap": {"_class", "_format_version"},
    "memstore.formats.torch_save": {"_utils"},
    # this one file may import pickle
    "memstore.structure.classes": {"_Unpickler"},
    # what subclasses of TorchRL's Storage, Writer and StorageCheckpointer inherit, and are to use
    "memstore.integrations.torchrl.storage": {
        "_last_cursor_index_value",
        "_load_hooks",
        "_mark_update_entities",
        "_mutation_revision_value",
        "_replicate_index",
        "_rng",
    },
    # what a WeightSyncScheme inherits, and is to use
    "memstore.integrations.torchrl.weights": {"_start_background_receiver", "_stop_event"},
    # what an Accelerator has prepared, and the models of an AutoModel, for which these have no public names
    "memstore.integrations.accelerate": {"_custom_objects", "_optimizers", "_schedulers"},
    "memstore.integrations.transformers": {"_model_mapping"},
    # Monarch's, whose classes have no public names
    "memstore.distributed.transfers.rdma": {"_RdmaBuffer", "_rust_bindings"},
}


@pytest.fixture(scope="module")
def ours() -> dict[str, Module]:
    return modules_in(PACKAGE)


def floors_broken(modules: Modules, floor_of: Mapping[str, int]) -> set[tuple[str, str]]:
    """Imports within the engine that don't lead downwards, and those of its door, which is on no floor."""
    found: set[tuple[str, str]] = set()
    for name in modules:
        if not name.startswith(f"{ENGINE}."):
            continue
        own = name.split(".")[2]
        for target in imports_of(modules[name], modules):
            if target == ENGINE:
                found.add((name, target))
            elif is_inside(target, ENGINE):
                part = target.split(".")[2]
                if part != own and floor_of[part] >= floor_of[own]:
                    found.add((name, target))
    return found


def test_rooms_are_entered_by_their_doors(ours: Modules) -> None:
    assert past_doors(ours, DOORS | ENGINE_DOORS) == set()
    assert all(ours[name].is_door for name in DOORS | {ENGINE}), "this tests nothing"


def test_names_are_offered_by_one_door(ours: Modules) -> None:
    """What the engine's door offers, a folder of the engine doesn't offer, too."""
    for name, module in ours.items():
        if module.is_door and is_inside(name, ENGINE) and name not in ENGINE_DOORS:
            assert imports_of(module, ours) == set(), name


def test_imports_of_the_engine_lead_downwards(ours: Modules) -> None:
    parts = {name.split(".")[2] for name in ours if name.startswith(f"{ENGINE}.")}
    assert parts <= set(FLOOR_OF), f"no floor for {sorted(parts - set(FLOOR_OF))}"
    assert floors_broken(ours, FLOOR_OF) == set()


def test_no_imports_go_in_a_circle(ours: Modules) -> None:
    assert circles(ours) == []


def test_private_names_stay_in_their_modules(ours: Modules) -> None:
    found = {(name, private) for name, private in private_uses(ours) if private not in DOCUMENTED and name != COMPAT}
    assert found == set()


def test_private_names_of_other_libraries_are_used_in_one_module(ours: Modules) -> None:
    """What these libraries may drop without a word is in `_compat`, where `test_compat.py` tests each."""
    found: dict[str, set[str]] = {}
    for name, private in privates_of_others(ours):
        if name != COMPAT and private not in DOCUMENTED:
            found.setdefault(name, set()).add(private)
    assert found == ELSEWHERE


def test_tests_reach_into_stores_in_one_file() -> None:
    ways = {"_env", "_handle", "_kept", "_opened", "_root", "_tables"}
    tests = modules_in(PACKAGE.parent / "tests")
    maybe = [one for one in tests.values() if any(f".{way}" in one.path.read_text() for way in ways)]
    found = {(one.name, way) for one in maybe for way in reached_for(one.tree, ways)}
    assert {name for name, _ in found} == {"tests.inside"}


def reached_for(tree: ast.AST, names: set[str]) -> set[str]:
    """Of these private names, those that code asks other objects for."""
    attributes = (node for node in ast.walk(tree) if isinstance(node, ast.Attribute))
    return {one.attr for one in attributes if one.attr in names and ast.unparse(one.value) not in ("self", "cls")}


# --- these tests can fail -------------------------------------------------------------------------------------------


def tree(folder: Path, **files: str) -> dict[str, Module]:
    """A package `memstore`; `engine__sync__pages="..."` is its file `engine/sync/pages.py`."""
    for name, text in files.items():
        path = folder / "memstore" / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        for above in (one for one in path.parents if one.is_relative_to(folder / "memstore")):
            (above / "__init__.py").touch()
    return modules_in(folder / "memstore")


def door(folder: Path, package: str, text: str) -> None:
    path = folder / "memstore" / package / "__init__.py"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.parametrize(
    "text",
    [
        "import memstore.engine.sync.pages",
        "from memstore.engine.sync.pages import Page",
        "from memstore.engine.sync import pages",
        "def later():\n    from memstore.engine.sync import Page",  # a room, where only the engine's door is
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from ..engine.sync.pages import Page",
    ],
)
def test_a_way_past_a_door_is_found(text: str, tmp_path: Path) -> None:
    modules = tree(tmp_path, engine__sync__pages="", engine__syscalls__files="", store__open=text)
    ((name, target),) = past_doors(modules, ENGINE_DOORS)
    assert name == "memstore.store.open" and target.startswith("memstore.engine.sync")


def test_ways_through_doors_are_free(tmp_path: Path) -> None:
    door(tmp_path, "engine", "from memstore.engine import syscalls\n__all__ = ['Root', 'syscalls']")
    modules = tree(
        tmp_path,
        engine__syscalls__files="",
        engine__sync__pages="from memstore.engine.sync.primitives import now",
        engine__sync__primitives="from memstore.engine import syscalls",
        engine__opening="from memstore.engine.sync import Page",
        store__open="from memstore.engine import Root, syscalls\nfrom memstore import engine",
    )
    assert past_doors(modules, ENGINE_DOORS) == set()


def test_a_way_upwards_is_found(tmp_path: Path) -> None:
    modules = tree(
        tmp_path,
        engine__files__segments="from memstore.engine.root import Root\nfrom memstore.engine.format import Record",
        engine__format__record="",
        engine__root__root="from memstore.engine.files import Segment",
        engine__index="from memstore.engine import pin",
        engine__pin="from memstore.engine import Root",
    )
    assert floors_broken(modules, FLOOR_OF) == {
        ("memstore.engine.files.segments", "memstore.engine.root"),
        ("memstore.engine.index", "memstore.engine.pin"),
        ("memstore.engine.pin", "memstore.engine"),
    }


def test_a_circle_is_found(tmp_path: Path) -> None:
    modules = tree(
        tmp_path,
        view__leaf="def use():\n    from memstore.view import lazy",
        view__lazy="from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from memstore.view.views import View",
        view__views="from memstore.view.leaf import Leaf\nimport memstore.view.source",
        view__source="",
    )
    assert circles(modules) == [{"memstore.view.leaf", "memstore.view.lazy", "memstore.view.views"}]


@pytest.mark.parametrize(
    ("text", "private"),
    [
        ("from memstore.store.store import _hidden", "_hidden"),
        ("from memstore.store import store\nstore._hidden()", "_hidden"),
        ("def use(store):\n    return store._root", "_root"),
        ("class Mine:\n    def use(self, other):\n        other._root = 1", "_root"),
    ],
)
def test_a_use_of_a_private_name_is_found(text: str, private: str, tmp_path: Path) -> None:
    store = "def _hidden(): ...\nclass Store:\n    def __init__(self):\n        self._root = self._own = 0"
    modules = tree(tmp_path, store__store=store, view__leaf=text)
    assert private_uses(modules) == {("memstore.view.leaf", private)}


@pytest.mark.parametrize(
    ("text", "private"),
    [
        ("import torch\ntorch._C.run()", "_C"),
        ("from torch._C import run", "_C"),
        ("from torch.library import _hidden", "_hidden"),
        ("import torch._dynamo", "_dynamo"),
        ("def use(tensor):\n    return getattr(tensor, '_hidden', None)", "_hidden"),
        ("import sys\nsys.modules['torch._dynamo.eval_frame']", "_dynamo"),
        ("class Mine(Theirs):\n    def use(self):\n        return self._hidden", "_hidden"),
    ],
)
def test_a_use_of_a_private_name_of_another_library_is_found(text: str, private: str, tmp_path: Path) -> None:
    own = "class Store:\n    def __init__(self):\n        self._root = 0\n    def use(self):\n        return self._root"
    modules = tree(tmp_path, view__leaf=text, store__store=own, view__views='"""With _words."""\nx = "memstore._info"')
    assert privates_of_others(modules) == {("memstore.view.leaf", private)}


def test_names_of_ones_own_and_of_bases_are_free(tmp_path: Path) -> None:
    modules = tree(
        tmp_path,
        store__store="class Store:\n    def __init__(self):\n        self._root = 0",
        view__leaf="class Sub:\n    def use(self, other):\n        return self._root, super()._root, other._theirs",
    )
    assert private_uses(modules) == set()
