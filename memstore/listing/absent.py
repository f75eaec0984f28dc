"""Texts of errors for a key that isn't there: keys like it, or the leaf that was meant.

All of it is found out once the call has failed, in a millisecond or two, whatever the store holds: some hundred keys of
this host are looked at. Other hosts are asked for nothing.
"""

from __future__ import annotations

import contextlib
import difflib
import heapq
import re
from collections.abc import Iterable, Iterator, Sequence, Set
from itertools import islice
from os.path import commonprefix

from memstore._parsing import UNDECODABLE
from memstore._wording import count_of, no_key
from memstore.engine import Path, Root, index, is_served, no_version, to_explain
from memstore.errors import KeyNotFoundError, MemstoreError, PartialCommitError, StoreTimeoutError, VersionGoneError
from memstore.listing.outline import UnknownKindError, outline

_LOOKED_AT = 128  # keys from each place where one that was meant may stand
_COMPARED = 16  # of them, by difflib
_LONGEST = 100  # characters that it compares: it takes the square of them
_ALIKE = 0.75  # as SequenceMatcher.ratio counts
_AS_ALIKE = 0.05  # how much less alike than the likeliest one another one may be
_IN_A_GROUP = 0.5  # of what differs of keys in one group, which are alike already
_SHOWN = 3  # keys, or leaves
_NAMED = 10  # missing keys in one message
_SPLITS = 8  # places where a key may end, and the name of a leaf begin
_SEPARATOR = re.compile(r"[/.:]")
_JOINTS = str.maketrans("-. /:", "_____")  # which of them stands between two words, nobody remembers


def no_value(root: Root, name: bytes) -> KeyNotFoundError | PartialCommitError:
    """Makes the error of a call that needs the value of a key which has none."""
    found = no_version(root, name)
    return found if isinstance(found, PartialCommitError) else absent(root, name)


def no_values(root: Root, names: Sequence[bytes], asked: int, advice: str) -> KeyNotFoundError | PartialCommitError:
    """Makes the error of a call that needs the values of `asked` keys, if these have none.

    `advice`: as of `absent_many`.

    Keys that wait for ranks are there: they are the error only where no key is missing.
    """
    waiting: dict[bytes, PartialCommitError] = {}
    missing, deadline = 0, to_explain()
    for name in names:
        found = no_version(root, name, deadline)
        if isinstance(found, PartialCommitError):
            waiting[name] = found
        else:
            missing += 1
            if missing > _NAMED:  # each look may ask another host, and no more are named
                break
    if missing:
        return absent_many(root, [name for name in names if name not in waiting], asked, advice)
    return waiting[names[0]]


def absent(root: Root, name: bytes) -> KeyNotFoundError:
    """Makes the error of a call for a key that doesn't exist."""
    key = name.decode()
    text = no_key(key)
    with contextlib.suppress(MemstoreError, OSError):  # the message is short then
        text += f": {_advice(root, key)}"
    return KeyNotFoundError(text, key=key)


def version_gone(root: Root, name: bytes, version: int) -> VersionGoneError | KeyNotFoundError | PartialCommitError:
    """Makes the error of a call for a version of a key that can't be read."""
    found = index.versions_of(root, name, 0.0)
    if not found:
        return no_value(root, name)
    key = name.decode()
    if version > found[-1]:
        why = f"it is at version {found[-1]} yet: wait({key!r}, newer_than={version - 1}) waits for a newer one"
    elif len(found) == 1:
        why = f"version {found[0]} is all that it has: put(history=n) keeps the last n from then on, a ref keeps one"
    else:
        shown = ", ".join(map(str, found[-_SHOWN:]))
        why = f"it has {len(found):,}, of which the last are {shown}: put(history=n) says how many stay"
    return VersionGoneError(f"{key!r} has no version {version}: {why}", key=key)


def absent_many(root: Root, names: Sequence[bytes], asked: int, advice: str) -> KeyNotFoundError:
    """Makes the error of a call for `asked` keys, if these don't exist.

    `advice`: what to do where there are several.
    """
    if asked == 1:
        return absent(root, names[0])
    if len(names) == 1:
        error = absent(root, names[0])
        return KeyNotFoundError(f"{error.message} ({asked:,} keys were named; {advice})", key=error.key)
    keys = [name.decode() for name in names]
    shown = ", ".join(map(repr, keys[:_NAMED])) + (", ..." if len(keys) > _NAMED else "")
    return KeyNotFoundError(f"no keys {shown}, {len(keys):,} of the {asked:,} that were named: {advice}", key=keys[0])


def not_in_time(root: Root, name: bytes, error: StoreTimeoutError) -> StoreTimeoutError:
    """Makes the error of a wait for a key, which may have been waited for under a wrong name."""
    with contextlib.suppress(MemstoreError, OSError):
        if index.record_here(root, name) is None:
            waiting = no_version(root, name)
            if isinstance(waiting, PartialCommitError):
                what = waiting.message.removeprefix(f"{error.key!r} has no version yet: ")
                return StoreTimeoutError(f"{error.message}; {what}", key=error.key)
            found = _near(root, name.decode())
            if found:
                return StoreTimeoutError(f"{error.message}; {found}", key=error.key)
    return error


def _advice(root: Root, key: str) -> str:
    lost = index.lost_with(root, key.encode())
    if lost:
        return f"{lost} had it, or owned its group, and what lay there alone was lost when that host was removed"
    inside = list(_inside(root, key))
    for whole, rest, path, _ in inside:
        if path:
            brackets = "".join(f"[{part!r}]" for part in path)
            return f"{whole!r} is a key, and {rest!r} a part of its value: get({whole!r}){brackets}"
    starting = _starting(root, key)
    if starting and key.endswith("/"):
        return starting
    found = _near(root, key, {whole for whole, *_ in inside}) or starting
    if found:
        return found
    for whole, rest, _, has in inside:
        return f"{whole!r} is a key, and its value has no {rest!r}, but {has}"
    if is_served(root):
        return "keys() lists those of all hosts"
    count = index.count(root, 0.0)
    if not count:
        return f"the store has none yet; wait({key!r}) waits for its first put"
    if count > 1:
        return f"keys() lists the {count:,} that the store has"
    only = next(index.keys_from(lambda: root, b"", 0.0), b"")
    return f"the store's only key is {only.decode()!r}"


def _starting(root: Root, key: str) -> str:
    """Says that other keys start with this one, or nothing."""
    found = root.catalog.view(lambda transaction: transaction.keys(key.encode(), None, _LOOKED_AT))
    if not found:
        return ""
    are_all = len(found) < _LOOKED_AT and not is_served(root)
    if not are_all:
        return f"keys({key!r}) lists those that start so"
    return f"keys({key!r}) lists the {count_of(len(found), 'that starts', 'that start')} so"


# --- a leaf of another key's value ------------------------------------------------------------------------------------


def _inside(root: Root, key: str) -> Iterator[tuple[str, str, Path | None, str]]:
    """Returns the keys that `key` starts with; the rest, the path that it names in their values; what these have."""
    for joint in list(islice(_SEPARATOR.finditer(key), _SPLITS))[::-1]:
        whole, rest = key[: joint.start()], key[joint.end() :]
        record = index.record_here(root, whole.encode()) if whole and rest else None
        if record is None or record.is_mutable:
            continue
        with contextlib.suppress(UnknownKindError, *UNDECODABLE):  # only torch can say what is in it
            names = [leaf.name for leaf in outline(record.description)[1]]
            if names and names[0]:
                has = ", ".join(repr(_text(name)) for name in names[:_SHOWN])
                yield whole, rest, _path_of(rest, names), f"{has}{', ...' if len(names) > _SHOWN else ''}"


def _path_of(text: str, names: Iterable[Path]) -> Path | None:
    """Returns the leaf, or the container of leaves, that the text names in whatever way its parts are joined."""
    wanted = _SEPARATOR.sub(".", text)
    for name in names:
        for length in range(1, len(name) + 1):
            if _SEPARATOR.sub(".", _text(name[:length])) == wanted:
                return name[:length]
    return None


def _text(path: Path) -> str:
    return ".".join(map(str, path))


# --- keys like it -----------------------------------------------------------------------------------------------------


def _near(root: Root, key: str, without: Set[str] = frozenset()) -> str:
    """Asks whether another key was meant, or says nothing."""
    around = {name.decode() for name in index.keys_around(root, key.encode(), _LOOKED_AT)}
    found = near(key, around - without)
    return f"did you mean {' or '.join(map(repr, found))}?" if found else ""


def near(key: str, others: Iterable[str]) -> list[str]:
    """Returns the names among others that may have been meant, the likeliest first."""
    plain, group = _plain(key), key[: key.rfind("/") + 1]
    ends = heapq.nlargest(_COMPARED, ((_ends_alike(plain, _plain(one)), one) for one in others))
    scored = [(max(score, _alike(plain, _plain(one))), one) for score, one in ends if _may_be(key, one, len(group))]
    scored.sort(key=lambda two: (-two[0], two[1]))
    least = max(_ALIKE, scored[0][0] - _AS_ALIKE) if scored else 1.0
    return [one for score, one in scored if score >= least][:_SHOWN]


def _may_be(key: str, other: str, group: int) -> bool:
    """Returns whether a key may have been meant.

    Of keys in one group, whose name has this length, the rest has to be alike too.
    """
    if not group or key[:group] != other[:group] or key == other:
        return True
    one, two = _plain(key[group:]), _plain(other[group:])
    return max(_ends_alike(one, two), _alike(one, two)) >= _IN_A_GROUP


def _plain(key: str) -> str:
    return key.casefold().translate(_JOINTS)


def _ends_alike(one: str, other: str) -> float:
    """Returns which part of two texts is their common start and end. A wrong letter or two leave most of it."""
    short, long = sorted((one, other), key=len)
    if not short:
        return float(one == other)
    start = len(commonprefix((short, long)))
    if start == len(short) < len(long) and long[start] == "_":  # "policy", and there is "policy/step 3"
        return max(_ALIKE, start / len(long))
    end = len(commonprefix((short[::-1], long[::-1])))
    return (start + min(end, len(short) - start)) / len(long)


def _alike(one: str, other: str) -> float:
    if len(one) + len(other) > 2 * _LONGEST:
        return 0.0
    return difflib.SequenceMatcher(None, one, other, autojunk=False).ratio()
