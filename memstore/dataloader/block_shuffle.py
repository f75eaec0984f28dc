"""BlockShuffle: a random order of rows that a cold disk can follow.

The order of an epoch follows from length, block, seed and epoch, and from nothing else:

1. The rows are cut into blocks of `block` rows; the last block may be shorter.
2. The blocks get a random order, and so do the rows in each block. Every row comes once.
3. Of this order a rank takes each `num_replicas`th row, from its own number on. So the ranks of a host read the same
   block at about the same time, and what all of them have used is always the beginning of the order.

The random numbers are raw words of Philox, whose stream numpy doesn't change between versions (NEP 19). Its key is seed
and epoch, and its counter begins with the number of the block. So any place is found without drawing what comes before
it, and an order that was interrupted goes on with later versions of everything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.utils.data import Sampler

from memstore import _modes as modes

_WORD = 1 << 64
_ORDER_OF_BLOCKS = 0  # where the counter begins for the order of the blocks; for rows: 1 + the number of their block
_SAME = ("length", "block", "seed")  # what has to be as it was for an order to go on


@modes.uncompiled_methods
class BlockShuffle(Sampler[int]):
    """Shuffles the rows of a data set by blocks, each row once an epoch; for the `sampler` of a DataLoader.

    It shuffles the blocks, and the rows within each block. So rows that come one after the other are near each other in
    the file, and a data set that is larger than the memory is read from the disk in large pieces. As with torch's
    DistributedSampler, each epoch has its own order only if `set_epoch` is called before it.

    Args:
        length: rows of the data set.
        block: rows of a block. Larger blocks mix better, and take more memory of the page cache. 1, or `length` and
            more: single rows are shuffled.
        seed: from 0 to 2**64 - 1; the same for all ranks.
        rank: which process this is, from 0, as for DistributedSampler.
        num_replicas: how many processes there are. Each gets
            `length // num_replicas` rows. The remaining rows are left out of the epoch: different ones in each.
        prefetch: called with the rows of a block, as a range, one block before they are drawn: `data.prefetch` of a
            `StoreDataset` lets the disk read them meanwhile.

    Raises:
        ValueError, TypeError: a number out of its range, or none.

    Example:
        >>> import memstore
        >>> order = memstore.BlockShuffle(10, block=4, seed=1)
        >>> sorted(order)
        [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
        >>> rows = iter(order)
        >>> used = [next(rows), next(rows), next(rows)]
        >>> resumed = memstore.BlockShuffle(10, block=4, seed=1)
        >>> resumed.load_state_dict(order.state_dict())
        >>> used + list(resumed) == list(order)
        True
    """

    def __init__(
        self,
        length: int,
        *,
        block: int = 1024,
        seed: int = 0,
        rank: int = 0,
        num_replicas: int = 1,
        prefetch: Callable[[range], None] | None = None,
    ) -> None:
        super().__init__()
        self.length = _number("length", length, 0)
        self.block = _number("block", block, 1)
        self.seed = _number("seed", seed, 0, _WORD)
        self.num_replicas = _number("num_replicas", num_replicas, 1)
        self.rank = _number("rank", rank, 0, num_replicas)
        self.epoch: int = 0
        self._prefetch = prefetch
        self._drawn = 0  # of this epoch, by this rank
        self._resumes = False  # the next iteration begins at _drawn

    def __len__(self) -> int:
        """Returns the rows of an epoch for this rank, also if it was resumed in the middle."""
        return self.length // self.num_replicas

    def __iter__(self) -> Iterator[int]:
        """Iterates over this epoch from its beginning.

        After `load_state_dict` it begins once where the state was taken.
        """
        if not self._resumes:
            self._drawn = 0
        self._resumes = False
        return self._draw()

    def _draw(self) -> Iterator[int]:
        for rows in self._by_block(self._drawn * self.num_replicas):
            for row in rows:
                self._drawn += 1
                yield row

    def set_epoch(self, epoch: int) -> None:
        """Chooses the order of the iterations that follow. The epoch of a loaded state continues at its position."""
        epoch = _number("epoch", epoch, 0, _WORD)
        if epoch != self.epoch:
            self.epoch, self._drawn, self._resumes = epoch, 0, False

    def state_dict(self, rows: int | None = None) -> dict[str, int]:
        """Returns the position in this epoch, for `load_state_dict` on any rank, of any number of ranks.

        Args:
            rows: how many rows of this epoch this rank has used, those before a resumption included. None: all that
                were drawn. That is right without workers, and for torchdata's StatefulDataLoader, which asks at each
                batch; but workers of torch's DataLoader read ahead: there, count what you have used.

        Raises:
            ValueError: more rows than were drawn.
        """
        used = self._drawn if rows is None else _number("rows", rows, 0, self._drawn + 1)
        same = {name: getattr(self, name) for name in _SAME}
        return {**same, "epoch": self.epoch, "rows": used * self.num_replicas}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Lets the next iteration continue where the state was taken.

        With another number of ranks, up to `num_replicas - 1` rows come again.

        Raises:
            ValueError: not a state, or that of another order. Nothing has changed then.
        """
        missing = [name for name in (*_SAME, "epoch", "rows") if name not in state_dict]
        if missing:
            raise ValueError(f"no state of a BlockShuffle: it lacks {', '.join(missing)}")
        here = {name: getattr(self, name) for name in _SAME}
        there = {name: state_dict[name] for name in _SAME}
        if here != there:
            raise ValueError(
                f"the state is of another order: {_render(there)}, and this is {_render(here)}. Make the BlockShuffle "
                "as it was, or begin the epoch anew"
            )
        try:
            epoch = _number("epoch of the state", state_dict["epoch"], 0, _WORD)
            rows = _number("rows of the state", state_dict["rows"], 0, self.length + 1)
        except TypeError as error:
            raise ValueError(str(error)) from None
        self.epoch, self._drawn, self._resumes = epoch, rows // self.num_replicas, True

    def _by_block(self, start: int) -> Iterator[list[int]]:
        """Yields this rank's rows from a place of the whole order on, block by block."""
        count = -(-self.length // self.block)
        end = len(self) * self.num_replicas
        order = self._permutation(_ORDER_OF_BLOCKS, count)
        stops = np.where(order == count - 1, self.length - (count - 1) * self.block, self.block).cumsum()
        first = int(stops.searchsorted(start, side="right"))
        self._announce(order[first : first + 1])
        for place in range(first, count):
            block, stop = int(order[place]), int(stops[place])
            self._announce(order[place + 1 : place + 2])
            rows = self._rows(block)
            shuffled = rows.start + self._permutation(1 + block, len(rows))
            begin = stop - len(rows)
            low, high = max(start, begin), max(begin, min(stop, end))
            low += (self.rank - low) % self.num_replicas
            yield shuffled[low - begin : high - begin : self.num_replicas].tolist()

    def _rows(self, block: int) -> range:
        return range(block * self.block, min((block + 1) * self.block, self.length))

    def _announce(self, blocks: npt.NDArray[np.int64]) -> None:
        if self._prefetch is not None:
            for block in blocks.tolist():
                self._prefetch(self._rows(block))

    def _permutation(self, stream: int, count: int) -> npt.NDArray[np.int64]:
        if count < 2:
            return np.arange(count)
        key = np.array([self.seed, self.epoch], np.uint64)
        counter = np.array([0, 0, 0, stream], np.uint64)
        return np.random.Philox(key=key, counter=counter).random_raw(count).argsort(kind="stable")

    def __repr__(self) -> str:
        numbers = {**{name: getattr(self, name) for name in _SAME}, "epoch": self.epoch}
        if self.num_replicas > 1:
            numbers |= {"rank": self.rank, "num_replicas": self.num_replicas}
        return f"BlockShuffle({_render(numbers)})"


def _number(name: str, value: Any, least: int, end: int | None = None) -> int:
    allowed = f"{least} or more" if end is None else f"from {least} to {end - 1}"
    said = f"{name} is an integer, {allowed}, and not {value!r:.100}"
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(said + (": BlockShuffle(len(dataset))" if hasattr(value, "__getitems__") else ""))
    if not (least <= value and (end is None or value < end)):
        raise ValueError(said)
    return value


def _render(numbers: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in numbers.items())
