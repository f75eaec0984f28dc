"""Conversion of checkpoints between formats: `memstore convert`. Guide: docs/convert.md. Decision 024.

    convert("model.pt", "model.safetensors")  # the suffix names the format; without one it is a snapshot

For who works on it, the files:

converting   convert, and its steps             formats      what they are called, and which one a path has
sources/     each format, opened as a value     targets/     what each can't express, and how it is written
leaves       tensors whose bytes lie in files   comparing    what was written, compared with the source
naming       leaves by name, and refusals       nesting      state dicts by flat names, as DCP has them
beside       where a target is made             tensordicts  TensorDicts as dicts
rules        what a caller allows

Between the two sides is an ordinary value, of tensors over mapped files; what lies in several boxes has a stand-in.
"""

from __future__ import annotations

from memstore.convert.converting import Converted, convert
from memstore.convert.formats import FORMATS, WRITTEN

__all__ = ["FORMATS", "WRITTEN", "Converted", "convert"]


def __dir__() -> list[str]:
    return sorted({*__all__, "__doc__", "__file__", "__name__", "__path__"})  # completion offers what users call
