"""Who is who in a mesh, from what its launchers have seen."""

from __future__ import annotations

import re
from typing import Any

import pytest

from memstore.distributed.meshes.messages import Folder, HostSeen, Reached
from memstore.distributed.meshes.serve import _ServeCall, plan_of, reached_by_all  # pyright: ignore[reportPrivateUsage]
from memstore.distributed.rules import Member, Roster
from memstore.errors import NotServedError


def id_of(number: int) -> bytes:
    return bytes([number]) * 16


def roster_of(*numbers: int, epoch: int = 1, cluster: bytes = b"c" * 16) -> Roster:
    members = tuple(Member(id_of(one), address_of(one), f"host{one}") for one in numbers)
    return Roster(cluster, 1, epoch, members, id_of(numbers[0]))


def address_of(number: int) -> str:
    return f"tcp://10.0.0.{number}:7411"


def seen(number: int, roster: Roster | None = None, **more: object) -> HostSeen:
    """A host with its own folder."""
    fields = {
        "name": f"host{number}",
        "memstore": "1",
        "folder": Folder(b"b" * 16, 1, number),
        "ips": (f"10.0.0.{number}",),
        "port": 0,
        "is_named": False,
        "is_networked": True,
        "is_served": roster is not None,
        "member": id_of(number),
        "roster": roster,
        "is_removed": False,
        "secret": b"" if roster is None else b"s" * 32,
    }
    return HostSeen(**{**fields, **more})  # pyright: ignore[reportArgumentType]


def test_new_hosts_are_led_by_the_first_that_sees_a_folder() -> None:
    same = {"folder": Folder(b"b" * 16, 1, 1)}
    plan = plan_of({0: seen(1), 1: seen(2), 2: seen(3, **same), 3: seen(2), 4: seen(5)})
    assert plan.leaders == (0, 1, 4) and plan.new == (0, 1, 4) and plan.seed == 0
    assert plan.roster is None and plan.addresses == {} and plan.secret == b""


def test_new_hosts_of_a_cluster_without_a_secret_get_none_of_their_own() -> None:
    serving: Any = _ServeCall.__new__(_ServeCall)
    serving.given = None
    roster = roster_of(1)
    assert len(serving._secret(plan_of({0: seen(1)}))) == 32
    assert serving._secret(plan_of({0: seen(1, roster, secret=b"")})) == b""
    with pytest.raises(NotServedError, match=r"has no secret.*--insecure --join"):
        serving._secret(plan_of({0: seen(2)}, roster, None))


def test_hosts_of_one_cluster_keep_their_addresses_and_their_seed() -> None:
    roster = roster_of(2, 1)
    plan = plan_of({0: seen(1, roster), 1: seen(2, roster)})
    assert plan.seed == 1 and plan.new == () and plan.secret == b"s" * 32
    assert plan.addresses == {0: address_of(1), 1: address_of(2)}


def test_the_newest_view_counts() -> None:
    plan = plan_of({0: seen(1, roster_of(1, epoch=1)), 1: seen(2, roster_of(1, 2, epoch=2))})
    assert plan.new == () and plan.roster is not None and plan.roster.epoch == 2


def test_more_hosts_are_new_and_one_with_an_empty_folder_takes_its_place() -> None:
    roster = roster_of(1, 2)
    plan = plan_of({0: seen(1, roster), 1: seen(2, member=id_of(9)), 2: seen(3)})
    assert plan.addresses == {0: address_of(1), 1: address_of(2)} and plan.new == (2,)
    assert plan.replaced == (id_of(2),)


REFUSED = {
    "several clusters": (
        {0: seen(1, roster_of(1)), 1: seen(2, roster_of(2, cluster=b"d" * 16))},
        "host1 to that of tcp://10.0.0.1:7411, host2 to that of tcp://10.0.0.2:7411",
    ),
    "other members": ({0: seen(1, roster_of(1, 2))}, "has other hosts than the mesh: tcp://10.0.0.2:7411 too"),
    "removed": ({0: seen(1, roster_of(1), is_removed=True)}, "host1: its root was removed"),
    "no member any more": ({0: seen(1, roster_of(1)), 1: seen(2, roster_of(1))}, "host2: its root was removed"),
    "the seed is lost": ({0: seen(1), 1: seen(2, roster_of(1, 2))}, "whose own root is not on these hosts"),
    "several secrets": (
        {0: seen(1, roster_of(1, 2)), 1: seen(2, roster_of(1, 2), secret=b"t" * 32)},
        "have several secrets",
    ),
}


@pytest.mark.parametrize(("hosts", "why"), REFUSED.values(), ids=REFUSED.keys())
def test_what_does_not_fit_is_refused_and_named(hosts: dict[int, HostSeen], why: str) -> None:
    with pytest.raises(NotServedError, match=re.escape(why)):
        plan_of(hosts)


def test_nobody_joins_a_host_that_was_served_for_itself_alone() -> None:
    alone = Roster(b"c" * 16, 1, 1, (Member(id_of(1), "tcp://127.0.0.1:7411"),), id_of(1))
    assert plan_of({0: seen(1, alone)}).new == ()
    with pytest.raises(NotServedError, match=r"host2 can't join the host.*tcp://127\.0\.0\.1:7411"):
        plan_of({0: seen(1, alone), 1: seen(2)})


def test_the_first_address_that_all_have_reached_is_taken() -> None:
    addresses = ("tcp://172.17.0.1:1", "tcp://10.0.0.1:1", "tcp://10.1.0.1:1")
    tried = {
        "b": Reached(("", "10.0.0.2", "10.1.0.2"), ("somebody else listens there", "", "")),
        "c": Reached(("172.17.0.3", "10.0.0.3", ""), ("", "", "no answer")),
    }
    assert reached_by_all("a", addresses, tried) == 1
    assert reached_by_all("a", addresses, {}) == 0
    some = {**tried, "d": Reached(("", "", ""), ("no answer",) * 3)}
    with pytest.raises(NotServedError, match="a, has no address at which all others reach it .*d: tcp://172"):
        reached_by_all("a", addresses, some)
