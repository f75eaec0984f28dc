"""RateLimiter: how far samples and inserts of a replay buffer may run apart."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RateLimiter:
    """Lets writers and samplers of a buffer wait for each other, as the rate limiter of DeepMind's Reverb does.

    With the difference `inserted * samples_per_insert - sampled`, all counted in rows: rows may be inserted until there
    are `min_size`, or while the difference stays at most `samples_per_insert * min_size + tolerance`; they may be
    sampled from `min_size` on, while it stays at least `samples_per_insert * min_size - tolerance`. Those that wait go
    on in the order in which they came, writers and samplers each in a line of their own.

    Args:
        samples_per_insert: how often a row is sampled on average.
        min_size: how many rows must be inserted before the first sample.
        tolerance: how far the difference may deviate, in samples. It must be at least as large as the batches that are
            sampled, and as the batches that are inserted times `samples_per_insert`. A batch of more than twice that
            would wait for ever, and is refused with a ValueError.

    Raises:
        ValueError, TypeError: one of them isn't such a number.

    Example:
        >>> import memstore
        >>> memstore.RateLimiter(samples_per_insert=4.0, min_size=1000, tolerance=512.0)
        RateLimiter(samples_per_insert=4.0, min_size=1000, tolerance=512.0)
    """

    samples_per_insert: float
    min_size: int
    tolerance: float

    def __post_init__(self) -> None:
        for name in ("samples_per_insert", "tolerance"):
            if isinstance(getattr(self, name), (str, bytes)):
                raise TypeError(f"{name} is a number, and not {getattr(self, name)!r:.100}")
        ratio, tolerance = float(self.samples_per_insert), float(self.tolerance)
        if not (math.isfinite(ratio) and ratio > 0):
            raise ValueError(f"samples_per_insert is a number above 0, and not {self.samples_per_insert!r}")
        if type(self.min_size) is not int or self.min_size < 1:
            kind = ValueError if type(self.min_size) is int else TypeError
            raise kind(f"min_size is a number of rows, 1 at least, and not {self.min_size!r:.100}")
        if not (math.isfinite(tolerance) and tolerance >= max(1.0, ratio)):
            raise ValueError(
                f"tolerance is {self.tolerance!r}: with less than {max(1.0, ratio):g}, a sample or an insert of one "
                "row would wait for ever"
            )
        object.__setattr__(self, "samples_per_insert", ratio)
        object.__setattr__(self, "tolerance", tolerance)

    def may_ever_go(self, rows: int, *, is_insert: bool) -> bool:
        """Whether a batch of that many rows fits between the bounds at all (but for inserts up to `min_size`)."""
        return rows * (self.samples_per_insert if is_insert else 1.0) <= 2 * self.tolerance

    def most_at_once(self, *, is_insert: bool) -> int:
        """The largest batch of which `may_ever_go` is true."""
        return int(2 * self.tolerance / (self.samples_per_insert if is_insert else 1.0))

    def may_insert(self, inserted: int, sampled: int, rows: int) -> bool:
        """Whether `rows` more may be inserted."""
        if inserted + rows <= self.min_size:
            return True
        difference = (inserted + rows) * self.samples_per_insert - sampled
        return difference <= self.samples_per_insert * self.min_size + self.tolerance

    def may_sample(self, inserted: int, sampled: int, rows: int) -> bool:
        """Whether `rows` more may be sampled."""
        if inserted < self.min_size:
            return False
        difference = inserted * self.samples_per_insert - (sampled + rows)
        return difference >= self.samples_per_insert * self.min_size - self.tolerance
