"""Other users, for tests that root runs."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest

from tests.children import in_child

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of other users")
USER, OTHER, GROUP = 54321, 54322, 54323


def as_user(user: int, groups: list[int], function: Callable[..., Any], *arguments: Any) -> Any:
    """Calls a function in a child process that belongs to `user`."""

    def call() -> Any:
        os.setgroups(groups)
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
        return function(*arguments)

    return in_child(call)
