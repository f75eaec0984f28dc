"""What schedules are drawn from."""

from __future__ import annotations

from dataclasses import dataclass, field

from tests.distributed.rules.world import HOUR, Weather


@dataclass
class Scene:
    """What may happen in a schedule.

    Attributes:
        hosts: how many in the end; `first` of them from the beginning.
        filled: keys that each of the others has when it is first served.
        kills, losses, cuts: of index processes and clients; of hosts; of links.
    """

    hosts: int = 3
    first: int = 3
    keys: int = 4  # two of each group
    processes: int = 4
    calls: int = 12  # of each process
    seconds: float = 15
    kills: int = 0
    losses: int = 0
    cuts: int = 0
    cut_offs: int = 0  # how often a host is cut off from all others, or all but one
    filled: int = 0
    cuts_last: tuple[float, ...] = (2, 2, 15)  # seconds
    visitors: int = 0  # of the hosts: members that are never owners
    spot: bool = False  # they alone are lost, and cut off
    changes: bool = False  # a host that is served again may be an owner, or a visitor, from then on
    hand_overs: int = 0  # of groups
    drains: int = 0  # of hosts
    returns: bool = False  # most hosts that are lost come back with what they had
    cancels: int = 0  # how often a person has a host stay, of which some are to leave
    promotions: int = 0  # how often a person tries to make a host the seed
    promote_after: float = 0  # seconds of a seed's silence after which a deputy takes over; no person does, then
    remove_after: float = 0  # seconds of a lease: the seed removes who is silent for longer, and nobody else does
    forced: int = 0  # of them: also without a majority, or without the directory
    splits: int = 0  # how often a host is cut off from all others, while one of those is promoted
    expiries: int = 0  # how often a home forgets a session
    interrupts: float = 0  # probability that a change is interrupted
    attempts: int = 0  # sharded puts
    stragglers: float = 1.5  # seconds within which the ranks of one begin
    lease: float = 0  # seconds that parts wait; 0: for longer than their ranks
    sessions_last: float = HOUR  # seconds without a connection
    patience: float = 3  # seconds that an audit leaves a call alone, at most
    audit_every: float = 2.0  # seconds
    shared: bool = False  # the files of hosts that are lost are there still, on storage that all read
    history: bool = False  # puts ask for histories, and versions that were replaced are read
    replicas: bool = False  # values lie on two hosts each: a host that is lost takes nothing that was acknowledged
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
        hosts=5, first=1, filled=4, kills=12, seconds=6, weather=Weather(0.2, 0.2, 0, 0, delay=0.1)
    ),
    "roots with many keys": Scene(
        hosts=5, first=2, filled=8, kills=16, promotions=3, seconds=8, weather=Weather(0.05, 0.6, 0.4, 0, 0.02)
    ),
    "kills": Scene(kills=8),
    "cuts": Scene(cuts=6, kills=2),
    "cuts of a minute": Scene(hosts=4, first=4, seconds=90, calls=40, cuts=6, cuts_last=(60,), kills=2, attempts=6),
    "stalls": Scene(kills=2, weather=STALLS),
    "storm": Scene(kills=6, cuts=3, expiries=2, weather=STORM),
    "late duplicates": Scene(calls=20, weather=Weather(0.05, 0.6, 0.4, 0, 0.02)),
    "interrupts": Scene(calls=30, interrupts=0.5, weather=Weather(0.05, 0.3, 0.3, 0, delay=0.02)),
    "visitors": Scene(hosts=4, visitors=2, kills=3, hand_overs=4),
    "owners no more": Scene(hosts=4, visitors=1, changes=True, kills=12),
    "owners no more while seeds change": Scene(
        hosts=5, first=3, filled=2, visitors=2, changes=True, kills=12, promotions=5, forced=1, hand_overs=8
    ),
    "generators that die": Scene(hosts=5, first=5, visitors=2, spot=True, losses=4, attempts=12, calls=20),
    "generators that come and die": Scene(
        hosts=6, first=3, visitors=3, spot=True, losses=3, kills=3, cuts=2, attempts=12, weather=Weather(delay=0.05)
    ),
    "visitors and splits": Scene(hosts=5, first=3, visitors=2, splits=2, kills=2, calls=20, hand_overs=4),
    "hand-overs": Scene(hosts=4, hand_overs=12, kills=4),
    "hand-overs in a storm": Scene(hosts=4, hand_overs=20, kills=6, cuts=3, weather=STORM),
    "hand-overs of stopped hosts": Scene(
        hosts=4, hand_overs=20, calls=20, patience=0, audit_every=0.2, weather=Weather(stalls=0.2)
    ),
    "hand-overs under audits": Scene(
        hosts=4, keys=8, processes=8, calls=40, hand_overs=20, patience=0, audit_every=0.1, weather=SLOW
    ),
    "hand-overs to lost hosts": Scene(hosts=5, first=5, hand_overs=20, losses=2, kills=2),
    "hand-overs twice": Scene(
        hosts=3, hand_overs=30, keys=2, calls=20, kills=2, weather=Weather(0.05, 0.6, 0.4, 0, 0.02)
    ),
    "drains": Scene(hosts=4, first=4, drains=3, seconds=20),
    "drains and kills": Scene(hosts=4, first=4, drains=3, kills=8, cuts=2, calls=20, seconds=20),
    "drains in a storm": Scene(hosts=4, first=4, drains=4, kills=6, cuts=3, hand_overs=6, seconds=25, weather=STORM),
    "drains and hand-overs": Scene(
        hosts=4, first=4, drains=4, hand_overs=30, kills=2, calls=20, seconds=20, weather=Weather(delay=0.05)
    ),
    "drains while seeds change": Scene(hosts=5, first=4, drains=4, promotions=5, kills=4, hand_overs=8, seconds=25),
    "drains and losses": Scene(hosts=5, first=5, drains=3, losses=2, kills=2, hand_overs=6, seconds=25),
    "drains that are cancelled": Scene(
        hosts=4, first=4, drains=5, cancels=8, kills=4, hand_overs=4, calls=20, seconds=20
    ),
    "drains that are cancelled twice": Scene(
        hosts=4, first=4, drains=4, cancels=8, promotions=2, calls=20, weather=Weather(0.05, 0.6, 0.4, 0, 0.02)
    ),
    "drains of many puts": Scene(
        hosts=3, drains=3, processes=8, calls=60, keys=6, seconds=20, audit_every=0.3, weather=SLOW
    ),
    "drains of stopped hosts": Scene(
        hosts=4, drains=4, calls=30, hand_overs=8, patience=0, audit_every=0.2, seconds=20, weather=Weather(stalls=0.2)
    ),
    "promotions twice": Scene(
        hosts=4, first=3, hand_overs=20, promotions=5, forced=1, calls=20, weather=Weather(0.05, 0.6, 0.4, 0, 0.02)
    ),
    "losses twice": Scene(
        hosts=5, first=4, filled=2, hand_overs=20, losses=2, calls=20, weather=Weather(0.05, 0.6, 0.4, 0, 0.02)
    ),
    "losses": Scene(hosts=4, first=4, losses=3, kills=2),
    "lost while hosts join": Scene(hosts=5, first=3, losses=3, kills=2, cuts=2),
    "deaths": Scene(hosts=4, first=4, processes=8, calls=40, losses=2, weather=CALM),
    "deaths and kills": Scene(hosts=5, first=5, processes=8, calls=40, losses=2, kills=8),
    "deaths and cuts": Scene(hosts=5, first=5, processes=8, calls=40, losses=2, cuts=3, kills=2),
    "deaths in a storm": Scene(hosts=5, first=5, processes=8, calls=30, losses=2, kills=4, weather=STORM),
    "deaths of stopped hosts": Scene(
        hosts=4, first=4, processes=8, calls=40, losses=2, patience=0, audit_every=0.3, weather=Weather(stalls=0.1)
    ),
    "deaths of slow hosts": Scene(hosts=4, first=4, processes=8, calls=60, losses=2, weather=SLOW),
    "deaths and hand-overs": Scene(hosts=4, first=4, processes=8, calls=40, losses=2, hand_overs=16, kills=2),
    "deaths while hosts come": Scene(hosts=6, first=4, filled=2, processes=8, calls=30, losses=3, kills=3),
    "deaths and shards": Scene(hosts=4, first=4, attempts=40, calls=6, losses=2, kills=2, weather=Weather(delay=0.02)),
    "deaths of many": Scene(hosts=7, first=7, processes=10, calls=40, losses=4, seconds=20),
    "deaths on shared storage": Scene(hosts=4, first=4, processes=8, calls=40, losses=1, shared=True, weather=CALM),
    "deaths and kills on shared storage": Scene(
        hosts=5, first=5, processes=8, calls=40, losses=1, kills=8, cuts=2, shared=True
    ),
    "deaths and drains on shared storage": Scene(
        hosts=5, first=5, processes=8, calls=30, losses=1, drains=3, kills=2, hand_overs=6, seconds=25, shared=True
    ),
    "replicas": Scene(hosts=4, first=4, replicas=True, kills=2, attempts=4, hand_overs=4, calls=20),
    "replicas while hosts come": Scene(hosts=5, first=2, filled=2, replicas=True, kills=3, drains=2, calls=20),
    "replicas and deaths": Scene(hosts=4, first=4, replicas=True, losses=1, processes=8, calls=40, weather=CALM),
    "replicas, deaths and kills": Scene(hosts=5, first=5, replicas=True, losses=1, kills=8, processes=8, calls=40),
    "replicas, deaths and cuts": Scene(
        hosts=5, first=5, replicas=True, losses=1, cuts=3, kills=2, processes=8, calls=40
    ),
    "replicas and deaths in a storm": Scene(
        hosts=5, first=5, replicas=True, losses=1, kills=4, processes=8, calls=30, weather=STORM
    ),
    "replicas and deaths of stopped hosts": Scene(
        hosts=4,
        first=4,
        replicas=True,
        losses=1,
        processes=8,
        calls=40,
        patience=0,
        audit_every=0.3,
        weather=Weather(stalls=0.1),
    ),
    "replicas and deaths of slow hosts": Scene(
        hosts=4, first=4, replicas=True, losses=1, processes=8, calls=60, weather=SLOW
    ),
    "histories": Scene(hosts=3, first=3, keys=3, history=True, hand_overs=4, kills=3, calls=30, audit_every=0.5),
    "histories and losses": Scene(hosts=5, first=5, history=True, losses=2, kills=2, cuts=1, processes=8, calls=30),
    "histories and drains": Scene(hosts=4, first=4, history=True, drains=3, kills=3, attempts=4, calls=30, seconds=25),
    "histories in a storm": Scene(
        hosts=5, first=4, filled=2, history=True, kills=4, cuts=3, losses=1, hand_overs=6, calls=30, weather=STORM
    ),
    "histories, replicas and deaths": Scene(
        hosts=4, first=4, history=True, replicas=True, losses=1, kills=2, processes=8, calls=30
    ),
    "promotions": Scene(hosts=4, first=3, promotions=6, kills=3, calls=20),
    "promotions in a storm": Scene(hosts=5, first=5, promotions=8, kills=4, cuts=4, calls=20, weather=STORM),
    "promotions and hand-overs": Scene(hosts=4, first=4, promotions=5, hand_overs=12, kills=3, cuts=3),
    "two hosts": Scene(hosts=2, first=2, kills=4, cuts=3, hand_overs=8, promotions=4, forced=1),
    "joins while seeds change": Scene(hosts=5, first=1, filled=2, kills=4, promotions=6, forced=1, hand_overs=8),
    "splits": Scene(hosts=5, first=5, splits=2, kills=2, calls=20, keys=5),
    "splits and hand-overs": Scene(hosts=4, first=4, splits=2, hand_overs=12, kills=2, weather=Weather(delay=0.02)),
    "forced promotions": Scene(hosts=4, first=4, forced=3, hand_overs=12, kills=3, cuts=3, calls=20),
    "forced promotions in a storm": Scene(
        hosts=5, first=4, forced=3, promotions=2, hand_overs=12, kills=4, cuts=4, calls=20, weather=STORM
    ),
    "promotions by themselves": Scene(hosts=4, first=4, promote_after=2, losses=3, kills=3, cuts=2, calls=20),
    "promotions by themselves and splits": Scene(
        hosts=5, first=5, promote_after=1, splits=3, kills=2, hand_overs=8, calls=20, weather=Weather(delay=0.02)
    ),
    "promotions by themselves in a storm": Scene(
        hosts=5, first=4, filled=2, promote_after=2, losses=2, kills=4, cuts=6, cuts_last=(2, 8), weather=STORM
    ),
    "promotions by themselves and by people": Scene(
        hosts=5, first=5, promote_after=1, promotions=4, forced=1, splits=1, kills=4, hand_overs=8, calls=20
    ),
    "promotions by themselves of stopped hosts": Scene(
        hosts=4, first=4, promote_after=1, losses=1, kills=2, calls=20, hand_overs=8, weather=Weather(stalls=0.02)
    ),
    "removals by themselves": Scene(
        hosts=5,
        first=5,
        promote_after=1,
        remove_after=3,
        cut_offs=4,
        cuts_last=(3, 6, 9),
        kills=2,
        calls=60,
        seconds=40,
    ),
    "removals by themselves of lost hosts": Scene(
        hosts=5, first=4, filled=2, promote_after=1, remove_after=3, losses=2, cuts=2, calls=30, seconds=30
    ),
    "removals by themselves of stopped hosts": Scene(
        hosts=4,
        first=4,
        promote_after=1,
        remove_after=2,
        cut_offs=2,
        cuts_last=(4, 8),
        calls=60,
        seconds=40,
        weather=Weather(stalls=0.03),
    ),
    "removals by themselves and splits": Scene(
        hosts=5, first=5, promote_after=1, remove_after=3, splits=4, kills=2, hand_overs=8, calls=40, seconds=40
    ),
    "removals by themselves in a storm": Scene(
        hosts=5,
        first=5,
        promote_after=2,
        remove_after=4,
        cut_offs=4,
        cuts_last=(4, 8),
        kills=4,
        calls=30,
        seconds=40,
        weather=STORM,
    ),
    "removals by themselves while hosts come and go": Scene(
        hosts=4,
        first=2,
        filled=2,
        promote_after=1,
        remove_after=3,
        cut_offs=4,
        cuts_last=(4, 8),
        losses=1,
        kills=3,
        calls=40,
        seconds=40,
    ),
    "removals by themselves and hand-overs": Scene(
        hosts=5,
        first=5,
        promote_after=1,
        remove_after=3,
        cut_offs=3,
        cuts_last=(5, 8),
        hand_overs=20,
        calls=40,
        seconds=30,
        weather=Weather(delay=0.02),
    ),
    "returns": Scene(hosts=4, first=4, losses=2, returns=True, keys=10, calls=30, seconds=30),
    "returns and kills": Scene(
        hosts=5, first=5, losses=3, kills=5, cuts=2, returns=True, keys=10, calls=30, seconds=30
    ),
    "returns in a storm": Scene(
        hosts=5, first=5, losses=3, kills=4, cuts=3, returns=True, keys=10, calls=30, seconds=40, weather=STORM
    ),
    "returns twice": Scene(
        hosts=4,
        first=4,
        losses=6,
        returns=True,
        keys=10,
        calls=60,
        seconds=60,
        weather=Weather(0.05, 0.6, 0.4, 0, 0.02),
    ),
    "returns and hand-overs": Scene(
        hosts=5, first=5, losses=4, hand_overs=20, drains=1, returns=True, keys=10, calls=40, seconds=40, attempts=8
    ),
    "returns while seeds change": Scene(
        hosts=5, first=5, losses=4, promotions=4, kills=3, returns=True, keys=10, calls=40, seconds=40
    ),
    "returns of stopped hosts": Scene(
        hosts=4, first=4, losses=4, returns=True, keys=10, calls=60, seconds=40, weather=Weather(stalls=0.05)
    ),
    "long": Scene(seconds=60, calls=40, weather=STORM),
    "slow": Scene(patience=600, all_must_work=True, weather=SLOW),
    "shards": Scene(attempts=10, all_must_work=True, weather=CALM),
    "shards slowly": Scene(attempts=10, patience=600, all_must_work=True, weather=SLOW),
    "shards in a storm": Scene(attempts=20, kills=6, cuts=3, expiries=2, weather=STORM),
    "shards twice": Scene(attempts=30, calls=2, weather=Weather(0.1, 0.6, 0.4, 0, 0.02)),
    "shards of stopped ranks": Scene(attempts=30, calls=4, patience=1, audit_every=0.3, weather=Weather(stalls=0.1)),
    "shards that are handed over": Scene(hosts=4, attempts=30, hand_overs=16, kills=3, weather=Weather(delay=0.1)),
    "shards and drains": Scene(hosts=4, first=4, attempts=30, drains=4, kills=2, weather=Weather(delay=0.1)),
    "shards of lost hosts": Scene(hosts=4, first=4, attempts=30, losses=3, kills=2, weather=Weather(delay=0.1)),
    "shards of stragglers": Scene(
        attempts=10, calls=2, stragglers=12, lease=4, patience=600, all_must_work=True, weather=CALM
    ),
    "shards put again": Scene(
        hosts=2, first=2, keys=6, processes=1, calls=2, attempts=40, weather=Weather(0, 0, 0, 0, delay=0.4)
    ),
    "sessions": Scene(kills=8, cuts=6, sessions_last=2, calls=20, weather=Weather(delay=0.02)),
    "sessions of the unlucky": Scene(
        calls=60, seconds=60, sessions_last=10, patience=600, all_must_work=True, weather=Weather(0.2, 0, 0, 0)
    ),
    "all": Scene(
        hosts=5, first=4, keys=4, processes=6, losses=1, kills=6, cuts=3, hand_overs=6, promotions=2, expiries=3
    ),
}
