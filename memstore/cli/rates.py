"""How often keys are put. Each put changes its key's word of the doorbell by one, so none is missed between two looks.

Several keys may have one word. Who of them was put is then told by their versions, which are looked at more often.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence

from memstore.engine import Root, is_served

_WINDOW = 5.0  # seconds that a rate is an average of
_OFTEN = 0.02  # seconds between looks at words that several keys have
_WORD = 1 << 32


class Rates:
    """Puts of each key a second, over the last seconds.

    Of a store on several hosts the words stand where a key has its home. Of each key is told there how often it was
    seen to have another version, at most once a look.
    """

    def __init__(self, root: Root) -> None:
        self._root = root
        self._by_words = not is_served(root)
        self._versions: dict[str, int] = {}
        self._words: Sequence[int] = ()
        self._ahead: defaultdict[int, int] = defaultdict(int)  # puts by word that were counted before it was read
        self._sharing: dict[int, list[str]] = {}  # keys that were put, by their word
        self._puts: defaultdict[str, int] = defaultdict(int)  # since the last look
        self._looks: deque[tuple[float, Mapping[str, int]]] = deque()

    def look(self, read: Callable[[], Mapping[str, int]]) -> dict[str, float]:
        """Returns the rates of all keys that were put lately. `read` gives the versions that keys have now."""
        now, words = time.monotonic(), self._root.doorbell.words()
        versions = read()
        if self._looks:
            self._count(words, versions)
        self._words, self._versions = words, dict(versions)
        self._looks.append((now, dict(self._puts)))
        self._puts.clear()
        while len(self._looks) > 2 and now - self._looks[1][0] >= _WINDOW:
            self._looks.popleft()
        start, *later = self._looks
        totals: defaultdict[str, int] = defaultdict(int)
        for _, puts in later:
            for key, count in puts.items():
                totals[key] += count
        return {key: count / (now - start[0]) for key, count in totals.items() if key in versions}

    def sleep(self, seconds: float) -> None:
        """Sleeps. Meanwhile it tells apart who is put of keys that have one word."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            shared = {bell: keys for bell, keys in self._sharing.items() if len(keys) > 1}
            time.sleep(min(left, _OFTEN) if shared else left)
            changed = [bell for bell in shared if self._root.doorbell.load(bell) != self._words[bell]]
            if changed:
                words = list(self._words)
                for bell in changed:
                    words[bell] = self._root.doorbell.load(bell)
                versions = {key: self._version(key) for bell in changed for key in shared[bell]}
                self._count(words, versions)
                self._words = words
                self._versions.update(versions)

    def _version(self, key: str) -> int:
        record = self._root.catalog.read(key.encode())
        return 0 if record is None else record.version

    def _count(self, words: Sequence[int], versions: Mapping[str, int]) -> None:
        """Counts the puts since the last time. `words` were read before `versions`."""
        changed: defaultdict[int, list[str]] = defaultdict(list)
        for key, version in versions.items():
            if version and self._versions.get(key) != version:
                changed[self._root.doorbell.bell(key.encode())].append(key)
        for bell, keys in changed.items():
            rung = (words[bell] - self._words[bell]) % _WORD - self._ahead.pop(bell, 0) if self._by_words else 0
            count = max(rung, len(keys))
            if self._by_words and count > rung:
                self._ahead[bell] = count - rung
            for i, key in enumerate(keys):
                self._puts[key] += (count + i) // len(keys)
            there = self._sharing.setdefault(bell, [])
            there += [key for key in keys if key not in there]
