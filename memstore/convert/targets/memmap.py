"""Folders that TensorDict.load_memmap reads."""

from __future__ import annotations

import os
from collections import OrderedDict
from types import NoneType
from typing import Any

import torch

from memstore.convert.leaves import Found
from memstore.convert.naming import Refusals, Sharing, entries, has_tensors, plain, special
from memstore.convert.rules import Rules
from memstore.convert.targets.parts import NewFile
from memstore.engine import syscalls
from memstore.errors import UnsupportedValueError
from memstore.formats import Meter, make_memmap_folder
from memstore.wording import an_instance


def check(found: Found, rules: Rules, refusals: Refusals) -> None:
    """Adds what a TensorDict can't have. (Of TensorDicts, tensorclasses and stacks, tensordict itself knows.)"""
    sharing = Sharing(refusals, untie=rules.untie)
    shown: Any = plain(found.value, Refusals("memmap"))
    if type(shown) not in (dict, OrderedDict, NoneType):
        refusals.add((), f"{an_instance(shown)}, and a TensorDict is a dict")
        return
    entry: Any
    for path, entry in entries(shown, refusals, is_leaf=lambda _: True):
        if isinstance(entry, list | tuple) and has_tensors(entry):
            refusals.add(path, f"a {'list' if isinstance(entry, list) else 'tuple'} with tensors in it")
        elif isinstance(entry, torch.Tensor):
            reason = special(entry)
            if reason:
                refusals.add(path, reason)
            else:
                sharing.add(path, entry)
    sharing.check()


def write_memmap(found: Found, source: Any, rules: Rules, folder: str, name: str, meter: Meter) -> None:
    """Args: source: the TensorDict that the value is."""
    try:
        places = make_memmap_folder(folder, source, allow_pickle=rules.allow_pickle)
    except UnsupportedValueError as error:
        text = error.message.replace("open the store with allow_pickle=True", "convert it with allow_pickle=True")
        raise UnsupportedValueError(text) from error
    for tensor, path in places:
        syscalls.unlink(path)  # tensordict has made it, with holes
        file = NewFile()
        file.add_leaf(found.leaf(tensor))
        file.write(os.path.dirname(path), os.path.basename(path), meter)
