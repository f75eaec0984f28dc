"""What schedules are drawn from."""

from __future__ import annotations

from dataclasses import dataclass, field

from tests.distributed.world import Weather


@dataclass
class Scene:
    """What may happen in a schedule.

    Attributes:
        hosts: how many in the end; `first` of them from the beginning.
        owned: keys that each of the others has when it is first served.
        kills, losses, cuts: of index processes and clients; of hosts; of links.
    """

    hosts: int = 3
    first: int = 3
    keys: int = 3
    processes: int = 4
    calls: int = 12  # of each process
    seconds: float = 15
    kills: int = 0
    losses: int = 0
    cuts: int = 0
    owned: int = 0
    visitors: int = 0  # of the hosts: members that are no homes
    changing_homes: int = 0  # how often one begins or ends to be a home
    expiries: int = 0  # how often a home forgets a session
    ambushes: int = 0  # how often one of several new homes is lost while the others get their share
    patience: float = 3  # seconds that an audit leaves a call alone, at most
    audit_every: float = 2.0  # seconds
    all_must_work: bool = False  # nothing is so bad that a call may fail for it
    weather: Weather = field(default_factory=Weather)


CALM = Weather(0, 0, 0, 0)
STORM = Weather(loss=0.1, twice=0.2, late=0.2, delay=0.02)
SLOW = Weather(0, 0, 0, 0, delay=0.3)
STALLS = Weather(stalls=0.05)

SCENES = {
    "quiet": Scene(all_must_work=True, weather=CALM),
    "joins": Scene(hosts=4, first=1),
    "roots with keys": Scene(
        hosts=5, first=1, owned=4, kills=12, seconds=6, weather=Weather(0.2, 0.2, 0, 0, delay=0.1)
    ),
    "kills": Scene(kills=8),
    "cuts": Scene(cuts=6, kills=2),
    "stalls": Scene(kills=2, weather=STALLS),
    "storm": Scene(kills=6, cuts=3, expiries=2, weather=STORM),
    "late duplicates": Scene(calls=20, weather=Weather(0.05, 0.6, 0.4, 0, 0.02)),
    "homes": Scene(hosts=4, visitors=1, changing_homes=6, kills=3),
    "losses": Scene(losses=3, kills=2),
    "lost while homes move": Scene(hosts=5, first=2, losses=5, kills=2, cuts=2),
    "ambushes": Scene(hosts=6, first=2, seconds=4, ambushes=2, cuts=2),
    "stalled moves": Scene(
        hosts=4, first=2, keys=6, calls=20, changing_homes=6, audit_every=0.2, weather=Weather(stalls=0.2)
    ),
    "moves under audits": Scene(
        hosts=4, keys=8, processes=8, calls=40, changing_homes=10, patience=0, audit_every=0.1, weather=SLOW
    ),
    "long": Scene(seconds=60, calls=40, weather=STORM),
    "slow": Scene(patience=600, all_must_work=True, weather=SLOW),
    "all": Scene(hosts=4, first=2, keys=4, processes=6, losses=1, kills=6, cuts=3, changing_homes=2, expiries=3),
}
