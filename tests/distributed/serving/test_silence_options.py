"""How long hosts may be silent: what `serve`, `join` and the command line take."""

from __future__ import annotations

import pytest

import memstore
from memstore.distributed.serving import check_silence, serve


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ((None, None), None),
        ((1.0, None), 1.0),
        ((None, 30.0), 10.0),
        ((None, 600.0), 10.0),
        ((2.0, 30.0), 2.0),
        ((20.0, 60.0), 20.0),
    ],
)
def test_a_seed_is_replaced_before_leases_are_over(
    given: tuple[float | None, float | None], found: float | None
) -> None:
    assert check_silence(*given) == found


@pytest.mark.parametrize(
    ("promote_after", "remove_after", "names"),
    [
        (0.5, None, "promote_after is 0.5 s.*expected 1 to 86400 s, or None"),
        (float("nan"), None, "promote_after"),
        (float("inf"), None, "promote_after"),
        (None, 29.0, "remove_after is 29.0 s.*expected 30 to 86400 s, or None"),
        (None, float("inf"), "remove_after"),
        (11.0, 30.0, "promote_after is 11.0 s, with remove_after 30.0 s.*expected 10 s or less"),
    ],
)
def test_times_that_are_too_short_or_do_not_fit_are_refused(
    promote_after: float | None, remove_after: float | None, names: str, scratch: str
) -> None:
    with pytest.raises(ValueError, match=names):
        serve(scratch, "tcp://127.0.0.1:1", promote_after=promote_after, remove_after=remove_after)
    with pytest.raises(ValueError, match=names):
        memstore.join(
            scratch, cluster="tcp://127.0.0.1:1", promote_after=promote_after, remove_after=remove_after, timeout=1
        )
