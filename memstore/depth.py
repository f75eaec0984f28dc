"""Tells a document that nests too deeply for any parser from a call that had too little of its own stack left."""

from __future__ import annotations

import threading
from collections.abc import Callable


def nests_too_deeply(parse: Callable[[], object]) -> bool:
    """Whether `parse`, which has just raised RecursionError, raises it on the empty stack of a new thread too."""
    too_deep: list[bool] = []

    def try_again() -> None:
        try:
            parse()
        except RecursionError:
            too_deep.append(True)
        except Exception:  # other errors are the caller's to report
            pass

    thread = threading.Thread(target=try_again, name="memstore: a document again")
    thread.start()
    thread.join()
    return bool(too_deep)
