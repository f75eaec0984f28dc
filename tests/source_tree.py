"""The source of a package as tests look at it: which file imports which, and whose private names it uses.

Imports that are made in functions, or for types alone, count as all others.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path


@dataclass(frozen=True)
class Module:
    """A file of the package. A door is a folder's `__init__.py`: it offers its `__all__`, or else what it imports."""

    name: str
    path: Path

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.path.read_text())

    @property
    def is_door(self) -> bool:
        return self.path.name == "__init__.py"

    @cached_property
    def offered(self) -> set[str]:
        for node in self.tree.body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                return set(ast.literal_eval(node.value))
        imports = [node for node in self.tree.body if isinstance(node, ast.ImportFrom) and node.module != "__future__"]
        return {name for node in imports for one in node.names if not is_private(name := one.asname or one.name)}

    @cached_property
    def imported(self) -> tuple[tuple[str, str], ...]:
        """`import a.b` is ("a.b", ""), and `from a.b import c` is ("a.b", "c")."""
        return tuple(_imported_names(self))

    @cached_property
    def private_names(self) -> set[str]:
        """What it defines with an underscore: functions, classes, variables, methods, and attributes of `self`."""
        found: set[str] = set()
        for node in ast.walk(self.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_own(node.value):
                found.add(node.attr)
        return {name for name in found if is_private(name)}

    @cached_property
    def own_names(self) -> set[str]:
        """Returns also the private names of its arguments, slots, and fields of ctypes."""
        found = set(self.private_names)
        for node in ast.walk(self.tree):
            if isinstance(node, ast.arg):
                found.add(node.arg)
            elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in ("__slots__", "_fields_"):
                found |= set(_texts(node.value))
        return found


Modules = Mapping[str, Module]


def modules_in(package: Path) -> dict[str, Module]:
    """By full names, which begin with that of the folder."""
    found: dict[str, Module] = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package.parent).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = Module(name, path)
    return found


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def imports_of(module: Module, modules: Modules) -> set[str]:
    """The modules of the package that it imports: of `from a.b import c` that is `a.b.c` if it is one, else `a.b`."""
    found: set[str] = set()
    for base, name in module.imported:
        full = f"{base}.{name}" if name else base
        found |= {full if full in modules else base} & set(modules)
    return found - {module.name}


def _imported_names(module: Module) -> Iterator[tuple[str, str]]:
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = _base(module, node)
            yield from ((base, alias.name) for alias in node.names)


def _base(module: Module, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    words = module.name.split(".")
    above = words[: len(words) - node.level + module.is_door]
    return ".".join([*above, *([node.module] if node.module else [])])


def past_doors(modules: Modules, doors: set[str]) -> set[tuple[str, str]]:
    """Who imports what lies behind a door from outside of it: neither the door, nor a module that it offers."""
    found: set[tuple[str, str]] = set()
    for name, module in modules.items():
        for target in imports_of(module, modules):
            parent, _, last = target.rpartition(".")
            if parent in doors and last in modules[parent].offered and not is_inside(name, parent):
                target = parent
            if any(is_inside(target, door) and target != door and not is_inside(name, door) for door in doors):
                found.add((name, target))
    return found


def is_inside(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def circles(modules: Modules) -> list[set[str]]:
    """The groups of modules each of which imports all others of its group, over some way."""
    edges = {name: imports_of(module, modules) for name, module in modules.items()}
    reached = {name: _reachable(name, edges) for name in modules}
    found: list[set[str]] = []
    for name in modules:
        group = {other for other in reached[name] if name in reached[other]}
        if group and group not in found:
            found.append(group)
    return found


def _reachable(start: str, edges: Mapping[str, set[str]]) -> set[str]:
    found: set[str] = set()
    todo = [start]
    while todo:
        new = edges[todo.pop()] - found
        found |= new
        todo.extend(new)
    return found


def private_uses(modules: Modules) -> set[tuple[str, str]]:
    """Which module uses which private name of another one: it imports it, or asks an object for it.

    Modules with an underscore are private to memstore, whose modules may import them.
    """
    all_names = set[str]().union(*(module.private_names for module in modules.values()))
    found: set[tuple[str, str]] = set()
    for name, module in modules.items():
        found |= {
            (name, one)
            for base, one in module.imported
            if base in modules and is_private(one) and f"{base}.{one}" not in modules
        }
        of_others = all_names - module.private_names
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Attribute) and node.attr in of_others and not _is_own(node.value):
                found.add((name, node.attr))
    return found


def privates_of_others(modules: Modules) -> set[tuple[str, str]]:
    """Returns which module uses which private name of another library.

    It imports it, asks an object for it, or has it as a text, for getattr say. Only names are looked at: one that some
    module of the package has for a name of its own counts if it is imported.
    """
    ours = set[str]().union(*(module.own_names for module in modules.values()))
    ours.update(name.rpartition(".")[2] for name in modules)
    package = next(iter(modules)).partition(".")[0]
    found: set[tuple[str, str]] = set()
    for name, module in modules.items():
        imported = [f"{base}.{one}" for base, one in module.imported if base.partition(".")[0] != package]
        found |= {(name, part) for path in imported for part in path.split(".") if is_private(part)}
        documents = {id(node.value) for node in ast.walk(module.tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Attribute):
                used = [node.attr]
            elif id(node) not in documents and isinstance(node, ast.Constant):
                used = [part for text in _texts(node) if not is_inside(text, package) for part in text.split(".")]
            else:
                continue
            found |= {(name, one) for one in used if is_private(one) and one.isidentifier() and one not in ours}
    return {(name, one) for name, one in found if not one.lower().startswith(f"_{package}")}


def _texts(node: ast.AST) -> list[str]:
    constants = [one.value for one in ast.walk(node) if isinstance(one, ast.Constant)]
    return [value for value in constants if isinstance(value, str)]


def _is_own(node: ast.expr) -> bool:
    """`self`, `cls` or `super()`: a class may use what its base has."""
    if isinstance(node, ast.Call):
        node = node.func
    return isinstance(node, ast.Name) and node.id in ("self", "cls", "super")
