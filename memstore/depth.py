"""Documents that nest too deeply for any parser, told from calls that come at the end of their own stack."""

from __future__ import annotations

import threading
from collections.abc import Callable


def nests_too_deeply(parse: Callable[[], object]) -> bool:
    """Whether `parse`, which has just ended in a RecursionError, does so with a whole stack before it too."""
    too_deep: list[bool] = []

    def try_again() -> None:
        try:
            parse()
        except RecursionError:
            too_deep.append(True)
        except Exception:  # what else is wrong with it, its reader says
            pass

    thread = threading.Thread(target=try_again, name="memstore: a document again")
    thread.start()
    thread.join()
    return bool(too_deep)
