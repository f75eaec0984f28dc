"""One mistake: what somebody writes, and what comes of it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mistake:
    """A line of a table.

    Attributes:
        code: what is run, with the names of `world.make`.
        error: the class of what is raised; of a Warning, what is warned of.
        says: its text, whole; PATH stands for the folder of all. What comes after a "..." at the end is another
            library's, or differs from machine to machine.
    """

    code: str
    error: type[BaseException]
    says: str
