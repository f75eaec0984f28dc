"""Modes of files as arguments: numbers that are read and written in octal, in `help` too."""

from __future__ import annotations


class Octal(int):
    def __repr__(self) -> str:
        return oct(self)


OWNER_ONLY = Octal(0o600)
