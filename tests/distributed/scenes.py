"""What schedules are drawn from."""

from __future__ import annotations

from tests.distributed.schedule import Scene
from tests.distributed.world import Weather

STORM = Weather(loss=0.1, twice=0.2, late=0.2, delay=0.02)
STALLS = Weather(stalls=0.05)

SCENES = {
    "quiet": Scene(all_must_work=True, weather=Weather(0, 0, 0, 0)),
    "joins": Scene(hosts=4, first=1),
    "roots with keys": Scene(
        hosts=5, first=1, owned=4, kills=12, seconds=6, weather=Weather(0.2, 0.2, 0, 0, delay=0.1)
    ),
    "kills": Scene(kills=8),
    "cuts": Scene(cuts=6, kills=2),
    "stalls": Scene(kills=2, weather=STALLS),
    "storm": Scene(kills=6, cuts=3, expiries=2, weather=STORM),
    "homes": Scene(hosts=4, visitors=1, changing_homes=6, kills=3),
    "losses": Scene(losses=3, kills=2),
    "lost while homes move": Scene(hosts=5, first=2, losses=5, kills=2, cuts=2),
    "ambushes": Scene(hosts=6, first=2, seconds=4, ambushes=2, cuts=2),
    "stalled moves": Scene(hosts=4, first=2, keys=6, changing_homes=6, weather=Weather(stalls=0.2)),
    "moves under audits": Scene(
        hosts=4, keys=8, processes=8, calls=40, changing_homes=10, patience=0, weather=Weather(0, 0, 0, 0, delay=0.2)
    ),
    "long": Scene(seconds=60, calls=40, weather=STORM),
    "slow": Scene(patience=600, all_must_work=True, weather=Weather(0, 0, 0, 0, delay=0.3)),
    "all": Scene(hosts=4, first=2, keys=4, processes=6, losses=1, kills=6, cuts=3, changing_homes=2, expiries=3),
}
