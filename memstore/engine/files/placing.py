"""At which offset of a file an address is mapped, as /proc/self/maps tells."""

from __future__ import annotations

import bisect
import os
from collections.abc import Sequence


def file_offsets(addresses: Sequence[int], path: str, inode: int) -> list[int] | None:
    """Offsets in the file with this path or inode; None if any of the addresses is not in a mapping of it.

    Both are looked for: overlay tells the inode of a lower file, and a path with a line break is told in another form.
    """
    name = os.fsencode(path) + b"\n"
    starts: list[int] = []
    ranges: list[tuple[int, int]] = []  # end; offset in the file
    with open("/proc/self/maps", "rb") as file:
        for line in file:
            fields = line.split(maxsplit=5)
            if int(fields[4]) == inode or fields[5:] == [name]:
                start, end = (int(word, 16) for word in fields[0].split(b"-"))
                starts.append(start)
                ranges.append((end, int(fields[2], 16)))
    found: list[int] = []
    for address in addresses:
        i = bisect.bisect_right(starts, address) - 1
        if i < 0 or address >= ranges[i][0]:
            return None
        found.append(address - starts[i] + ranges[i][1])
    return found
