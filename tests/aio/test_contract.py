"""What holds for a Store holds for its awaited twin: the same tests, by a loop in a thread. (tests/store has them.)"""

# ruff: noqa: F403

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.aio.conftest import open_awaited
from tests.store.test_keys import *
from tests.store.test_many import *
from tests.store.test_options import *
from tests.store.test_put_get import *
from tests.store.test_versions import *
from tests.store.test_wait import *

del test_a_listing_goes_on_while_keys_come_and_go  # noqa: F821 - the blocking twin reads a listing whole
del test_none_is_the_stores_own_timeout  # noqa: F821 - leaves its store open, and the thread of waits lingers there

pytestmark = [pytest.mark.full, pytest.mark.usefixtures("awaited_backend")]


@pytest.fixture
def store(root: str) -> Iterator[Any]:
    with open_awaited(root, timeout=10.0) as opened:
        yield opened
