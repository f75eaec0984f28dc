"""What shells complete: keys of the store that the line names, and leaves of a key.

Of many keys their starts are offered, as folders are of files. Keys with control characters can't be sent to a shell,
and are left out.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from functools import partial

import click

from memstore.errors import MemstoreError

_OFFERED = 100
_READ = 200_000  # keys that are looked at
_PATIENCE = 1.0  # seconds


def complete_key(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """Keys; where there are many, their starts up to the next "/"."""
    return keys_of(context.params.get("root", ""), incomplete)


complete_prefix = complete_key


def complete_pending(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """Keys that wait for parts of a sharded put."""
    return _pending(context.params.get("root", ""), None, incomplete)


def complete_attempt(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """The attempts of the key that stands before."""
    return _pending(context.params.get("root", ""), context.params.get("key"), incomplete)


def _pending(root: str, key: str | None, incomplete: str) -> list[str]:
    """The keys that wait, or the attempts of one."""
    from memstore.listing import open_keyspace

    try:
        with open_keyspace(_expanded(root), "r", timeout=_PATIENCE) as store:
            names = [one.key if key is None else one.attempt for one in store.pending() if key in (None, one.key)]
    except (MemstoreError, OSError, TypeError):
        return []
    return [name for name in sorted(set(names)) if name.startswith(incomplete) and name.isprintable()][:_OFFERED]


def complete_leaf(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """Names of leaves of the key that stands before."""
    from memstore.engine import index
    from memstore.keys import encode_key
    from memstore.listing import UnknownKindError, open_keyspace, opened, outline

    try:
        with open_keyspace(_expanded(context.params["root"]), "r", timeout=_PATIENCE) as store:
            record = index.find(opened(store), encode_key(context.params["key"]), _PATIENCE)
        leaves = [] if record is None else outline(record.description)[1]
    except (MemstoreError, OSError, KeyError, UnknownKindError):
        return []
    names = ("/".join(map(str, leaf.name)) for leaf in leaves if leaf.name)
    return [name for name in names if name.startswith(incomplete) and name.isprintable()][:_OFFERED]


def keys_of(root: str, incomplete: str) -> list[str]:
    """Nothing, if there is no store that can be read."""
    from memstore.engine import index
    from memstore.keys import encode_prefix
    from memstore.listing import open_keyspace, opened

    try:
        with open_keyspace(_expanded(root), "r", timeout=_PATIENCE) as store:
            keys = index.keys_from(partial(opened, store), encode_prefix(incomplete), _PATIENCE)
            names = map(bytes.decode, itertools.islice(keys, _READ))
            found = [key for key in names if key.isprintable()]
    except (MemstoreError, OSError, TypeError):
        return []
    return found if len(found) <= _OFFERED else starts_of(found, len(incomplete))


def _expanded(path: str) -> str:
    """As a shell would have it: what is completed is what was typed."""
    return os.path.expanduser(os.path.expandvars(path))


def starts_of(keys: Sequence[str], start: int) -> list[str]:
    """Starts that many keys have in common: up to the first "/" beyond `start` characters, or by their next characters.

    Every key has one of them, so that a shell completes no further than all that is meant.
    """
    found = dict.fromkeys(key[: key.find("/", start) + 1 or None] for key in keys)
    if len(found) <= _OFFERED:
        return list(found)
    common = len(os.path.commonprefix(list(found)))
    cut = dict.fromkeys(key[: common + 1] for key in found)
    while len(finer := dict.fromkeys(key[: common + 2] for key in found)) <= _OFFERED:
        cut, common = finer, common + 1
    return list(cut)
