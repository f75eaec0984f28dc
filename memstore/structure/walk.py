"""The walk over a value: its tree, its tensors, its objects. Nothing is copied, nothing of the value is changed.

Containers register a function for their type (`flattens`), or a rule for types that can't be listed (`rule`). A
container in which no tensor lies becomes a single object: so the description, which plans are cached by, stays the
same when a list of losses grows or an optimizer's `lr` becomes an int.

`take_apart` walks, and takes the facts of all tensors (dtypes, shapes, strides, traits), each by one map over C
functions; or all by one call, if they are those of the last value of this tree. If any fact can't be taken so (sparse,
nested, quantized, meta tensors), the value is walked again, carefully: tensor by tensor, for special forms and for
errors that name the leaf.
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch

from memstore import _compat
from memstore import _modes as modes
from memstore._compat import BUFFER_MARK
from memstore.errors import UnsupportedValueError
from memstore.structure import traits
from memstore.structure.memory import PLAIN_TYPES
from memstore.structure.objects import NATIVE, join_tree, write_object
from memstore.structure.refusals import RefusedError, SharedTooOftenError, TooDeepError, alternative
from memstore.structure.traits import Traits
from memstore.structure.tree import MAX_DEPTH, OBJECT, TENSOR, Tree, load_late_containers, write_key

# --- The walk --------------------------------------------------------------------------------------------------------


Flattener = Callable[[Any, "Walk"], Tree]
_FlattenerT = TypeVar("_FlattenerT", bound=Flattener)

_FLATTENERS: dict[type, Flattener] = {}
_RULES: list[Callable[[type], Flattener | None]] = []

# The entries of a shared container are walked for each place in which it stands. So a few lists that refer to one
# another could make a walk almost without an end: beyond so many entries the repeated ones are counted, and limited.
_COUNTED_FROM = 1 << 16
_MOST_REPEATED = 1 << 20  # more only in proportion to the entries that are walked for the first time:
_REPEATED_FOR_EACH = 8


class Walk:
    __slots__ = ("_repeated", "_seen", "_walked", "allow_pickle", "careful", "depth", "in_place", "objects", "tensors")

    def __init__(self, allow_pickle: bool, careful: bool = False) -> None:
        self.allow_pickle = allow_pickle
        self.careful = careful  # every tensor is looked at by itself, to name the one that can't be stored
        self.tensors: list[torch.Tensor] = []
        self.objects: list[Any] = []  # as write_object made them
        self.depth = 0
        self.in_place = False  # for out=: what can't be written through its tensors is refused
        self._walked = 0  # entries of containers
        self._repeated = 0  # those of them that were walked before, since repeated ones are counted
        self._seen: dict[int, Any] = {}

    def visit(self, value: Any) -> Tree:
        """Returns the tree of `value`, whose tensors and objects are appended to the walk's."""
        kind = type(value)
        if kind in NATIVE:
            if (kind is int and not -(1 << 63) <= value < 1 << 63) or (kind is str and not value.isascii()):
                value = self.write_leaf(value)
            self.objects.append(value)
            return OBJECT
        if kind in PLAIN_TYPES and not self.careful:
            self.tensors.append(value)
            return TENSOR
        if self.depth >= MAX_DEPTH:
            raise TooDeepError(MAX_DEPTH)
        self.depth += 1
        tree = flattener(kind)(value, self)
        self.depth -= 1
        return tree

    def entries(self, container: Any, keys: Iterable[Any], values: Collection[Any]) -> tuple[Tree, ...]:
        """Returns the trees of a container's entries, in order."""
        self._walked += len(values)
        if self._walked > _COUNTED_FROM:
            self._count_repeated(container, len(values))
        kinds = set(map(type, values))
        if kinds <= PLAIN_TYPES and not self.careful:
            self.tensors.extend(values)
            return (TENSOR,) * len(values)
        key: Any = None
        trees: list[Tree] = []
        try:
            for key, value in zip(keys, values, strict=False):  # noqa: B007
                trees.append(self.visit(value))
        except RefusedError as error:
            error.path.append(key)
            if isinstance(error, TooDeepError):
                error.containers.append(container)
            raise
        return tuple(trees)

    def _count_repeated(self, container: Any, count: int) -> None:
        """Refuses a value that is small, but has a huge tree: its containers are shared on level after level."""
        if id(container) not in self._seen:
            self._seen[id(container)] = container  # which keeps it alive, so that no other gets its id
            return
        self._repeated += count
        if self._repeated > max(_MOST_REPEATED, _REPEATED_FOR_EACH * (self._walked - self._repeated)):
            raise SharedTooOftenError(self._repeated)

    def object(self, value: Any) -> Tree:
        """Takes a leaf that is no tensor."""
        self.objects.append(self.write_leaf(value))
        return OBJECT

    def pickled(self, value: Any, refused: RefusedError) -> Tree:
        """Takes an object that only pickle can store, where that is allowed. Else raises the error."""
        if self.allow_pickle:
            return self.object(value)
        raise refused

    def take_objects(self, count: int) -> list[Any]:
        """Removes and returns the last `count` objects, for the container that becomes one object of them."""
        start = len(self.objects) - count
        taken = self.objects[start:]
        del self.objects[start:]
        return taken

    def joined(self, tree: Tree, trees: tuple[Tree, ...], join: Callable[[list[Any]], Any] | None = None) -> Tree:
        """Returns the tree of a container with these entries, or, if all are objects, the one object that they become.

        The value itself is never joined: its structure stays visible in the description.

        Args:
            join: from the written entries to the written container; None: by its tree.
        """
        if self.depth == 1 or trees.count(OBJECT) != len(trees):
            return tree
        items = self.take_objects(len(trees))
        self.objects.append(join_tree(tree, items) if join is None else join(items))
        return OBJECT

    def keys(self, keys: Collection[Any]) -> tuple[Any, ...]:
        """Returns the keys of a dict in the form that they have in a tree."""
        if set(map(type, keys)) == {str} and "".join(keys).isascii():
            return tuple(keys)
        written = []
        for key in keys:
            try:
                written.append(write_key(key))
            except TypeError as error:
                reason = f"{error}; str, int, float, bool, bytes, None and tuples of them are stored"
                raise _refused_key(key, reason) from None
            except UnicodeEncodeError:
                raise _refused_key(key, "a key with a lone surrogate, which is no Unicode text") from None
        return tuple(written)

    def write_leaf(self, value: Any) -> Any:
        try:
            return write_object(value, self.allow_pickle)
        except (RefusedError, MemoryError):
            raise
        except Exception as error:  # pickle runs the object's own code
            reason = f"an object of type {type(value).__qualname__} that fails to pickle: {error}"
            instead = alternative(value)
            raise RefusedError(f"{reason}; {instead}" if instead else reason) from error


class _Extent(NamedTuple):
    """The extent of a container that was looked at.

    Attributes:
        levels: of containers, itself included.
        entries: all in it, counted for each place in which they stand.
    """

    levels: int
    entries: int


def check_nesting(value: Any) -> None:
    """Refuses dicts, lists and tuples that no recursion over a value gets to the end of.

    For calls that give a value to recursions of their own, or of other libraries, and need no tree of it.

    Raises:
        UnsupportedValueError: a container contains itself, there are more than MAX_DEPTH levels, or what is shared on
            level after level makes too many entries.
    """
    seen: dict[int, tuple[_Extent, Any]] = {}  # with the container, which keeps its id its own
    distinct = 0

    def look(container: Any, depth: int) -> _Extent:
        nonlocal distinct
        if depth >= MAX_DEPTH:
            raise TooDeepError(MAX_DEPTH)
        known = seen.get(id(container))
        if known is not None and depth + known[0].levels <= MAX_DEPTH:
            return known[0]
        levels, entries = 0, len(container)
        distinct += len(container)
        pairs: Any = container.items() if isinstance(container, Mapping) else enumerate(container)
        for key, entry in itertools.chain(pairs, getattr(container, "__dict__", {}).items()):
            if isinstance(entry, (Mapping, list, tuple)):
                try:
                    inner = look(entry, depth + 1)
                except TooDeepError as error:
                    error.path.append(key)
                    error.containers.append(container)
                    raise
                levels, entries = max(levels, inner.levels), entries + inner.entries
        seen[id(container)] = _Extent(levels + 1, entries), container
        return seen[id(container)][0]

    if isinstance(value, (Mapping, list, tuple)):
        try:
            repeated = look(value, 0).entries - distinct
            if repeated > max(_MOST_REPEATED, _REPEATED_FOR_EACH * distinct):
                raise SharedTooOftenError(repeated)
        except RefusedError as error:
            raise UnsupportedValueError(error.message()) from None


def _refused_key(key: Any, reason: str) -> RefusedError:
    refused = RefusedError(reason)
    refused.path.append(key)
    return refused


def flattens(*kinds: type) -> Callable[[_FlattenerT], _FlattenerT]:
    """Registers the decorated function, which flattens values of exactly these types."""

    def register(function: _FlattenerT) -> _FlattenerT:
        for kind in kinds:
            _FLATTENERS[kind] = function
        flattener.cache_clear()
        return function

    return register


def rule(function: Callable[[type], Flattener | None]) -> Callable[[type], Flattener | None]:
    """Registers the decorated function, which finds the flattener of types that aren't listed, or None.

    Rules are asked in the order in which they are defined.
    """
    _RULES.append(function)
    flattener.cache_clear()
    return function


@functools.lru_cache(maxsize=512)
def flattener(kind: type) -> Flattener:
    if "tensordict" in sys.modules:
        load_late_containers()
    found = _FLATTENERS.get(kind)
    if found is not None:
        return found
    for ask in _RULES:
        found = ask(kind)
        if found is not None:
            return found
    return lambda value, walk: walk.object(value)


def refuse(reason: str) -> Flattener:
    """Returns a flattener for what can't be stored."""

    def refused(value: Any, walk: Walk) -> Tree:
        raise RefusedError(reason)

    return refused


def refuse_unless_pickled(reason: str) -> Flattener:
    """Returns a flattener for what only pickle can store."""
    refused = f"{reason}, which only allow_pickle=True can store"
    return lambda value, walk: walk.pickled(value, RefusedError(refused))


# --- The facts of all tensors ----------------------------------------------------------------------------------------


_dtype = torch.Tensor.dtype.__get__  # type: ignore[attr-defined]
_shape = torch.Tensor.shape.__get__  # type: ignore[attr-defined]
_is_cpu = torch.Tensor.is_cpu.__get__  # type: ignore[attr-defined]
_requires_grad = torch.Tensor.requires_grad.__get__  # type: ignore[attr-defined]
_stride = torch.Tensor.stride
_data_ptr = torch.Tensor.data_ptr
_is_neg = torch.Tensor.is_neg
_WalkT = TypeVar("_WalkT", bound=Walk)
_dispatch_modes, _transform = modes.count_dispatch_modes, modes.current_transform
_COMPLEX = frozenset({torch.complex32, torch.complex64, torch.complex128})


class Facts(NamedTuple):
    """The facts of all tensors of a value, in order. Hashable."""

    dtypes: tuple[torch.dtype, ...]
    shapes: tuple[torch.Size, ...]
    strides: tuple[tuple[int, ...], ...]
    traits: tuple[Traits, ...] | None  # None: all are plain
    resolve: tuple[bool, ...] | None  # conj or neg bit set: the bytes in memory aren't the values. None: of none


# Tree, the walk that has tensors and objects, the facts of these tensors, and their addresses.
TakenApart = tuple[Tree, _WalkT, Facts, list[int]]


def take_apart(value: Any, walk_with: Callable[[bool], _WalkT]) -> TakenApart[_WalkT]:
    """Walks over a value: in the fast way, and only if that fails carefully. Raises RefusedError."""
    hindered = bool(_dispatch_modes()) or _transform() is not None
    found = None if hindered else _try(value, walk_with(False))
    if found is not None:
        return found
    with modes.put_aside():
        found = (_try(value, walk_with(False)) if hindered else None) or _try(value, walk_with(True))
    if found is None:
        raise RefusedError("a tensor that has no plain memory")
    return found


def _try(value: Any, walk: _WalkT) -> TakenApart[_WalkT] | None:
    """Walks once; None if the value has to be walked carefully."""
    try:
        tree = walk.visit(value)
        facts = _known_facts(tree, walk.tensors)
        addresses = list(map(_data_ptr, walk.tensors))
    except RecursionError:
        raise RefusedError("more levels than what is left of Python's stack here can take") from None
    except (RuntimeError, NotImplementedError, AssertionError) as error:
        if walk.careful:
            raise RefusedError(f"a tensor that has no plain memory ({error})") from error
        return None
    return None if facts is None else (tree, walk, facts, addresses)


class _KnownFacts:
    """The facts of the last value of a tree. Most values are put again and again, with other numbers.

    Attributes:
        times: how many values in a row have had these facts.
        alike: tells whether other tensors have them too; None: not yet, or torch can't say it.
    """

    __slots__ = ("alike", "facts", "times")

    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        self.times = 1
        self.alike: Callable[..., bool] | None = None


_known: dict[Tree, _KnownFacts] = {}
_CACHED_FACTS, _CACHED_LEAVES = 64, 1 << 18  # trees, and leaves of all of them
_USUAL = 4  # times; to make `alike` takes as long as to take the facts twice


def _known_facts(tree: Tree, tensors: Sequence[torch.Tensor]) -> Facts | None:
    """Returns the facts: those that are known of this tree, where torch says that the tensors are like the last ones.

    That takes 0.1 µs a tensor, and `_facts` 0.5.
    """
    known = _known.get(tree)
    if known is not None and known.alike is not None and known.alike(*tensors) and not _has_buffers(tensors):
        return known.facts
    facts = _facts(tensors)
    if facts is None:
        return None
    if known is None or known.facts != facts:
        leaves = sum(len(one.facts.dtypes) for one in _known.values())
        if len(_known) >= _CACHED_FACTS or leaves > _CACHED_LEAVES:
            _known.clear()
        _known[tree] = _KnownFacts(facts)
    else:
        known.times += 1
        if known.times == _USUAL and not _has_buffers(tensors):
            known.alike = _compat.alike(tensors)
    return facts


def _has_buffers(tensors: Sequence[torch.Tensor]) -> bool:
    return any([getattr(tensor, BUFFER_MARK, False) for tensor in tensors])  # noqa: C419 - a list is faster


def _facts(tensors: Sequence[torch.Tensor]) -> Facts | None:
    """Takes the facts of all tensors. None, or an error by torch, if one of them has to be looked at by itself."""
    dtypes = tuple(map(_dtype, tensors))
    kinds = set(dtypes)
    if not kinds.isdisjoint(traits.QUANTIZED):
        return None
    found: tuple[Traits, ...] | None = None
    if (
        not all(map(_is_cpu, tensors))
        or any(map(_requires_grad, tensors))
        or _has_buffers(tensors)
        or torch.nn.Parameter in set(map(type, tensors))
    ):
        found = tuple(map(traits.traits_of, tensors))
        if any(trait.device == "meta" for trait in found):
            return None
    resolve: tuple[bool, ...] | None = None
    if any(map(_is_neg, tensors)) or (not kinds.isdisjoint(_COMPLEX) and any(t.is_conj() for t in tensors)):
        resolve = tuple(tensor.is_neg() or tensor.is_conj() for tensor in tensors)
    return Facts(dtypes, tuple(map(_shape, tensors)), tuple(map(_stride, tensors)), found, resolve)
