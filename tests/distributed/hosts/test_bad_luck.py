"""What befalls clusters: seeds that die or come back empty, dead hosts, copies, strangers, cuts, and idle hours."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.distributed.hosts import actions, dying
from tests.distributed.hosts.clusters import LONG, ROOT, ServedHosts, empty, wait_until
from tests.support.fork_server import Worker
from tests.support.hosts import Hosts, need_hosts

HOSTS = 4


@pytest.fixture(scope="module")
def machines() -> Iterator[Hosts]:
    need_hosts()
    with Hosts(HOSTS, shm_bytes=64 << 20) as hosts:
        yield hosts


@pytest.fixture
def hosts(machines: Hosts, tmp_path: Path) -> Iterator[ServedHosts]:
    """Hosts that nobody serves yet."""
    with empty(machines, tmp_path) as served:
        yield served


def serve_three(hosts: ServedHosts) -> None:
    """Hosts 0, 1 and 2 are one cluster, and 0 is its seed, with two deputies."""
    for number in range(3):
        hosts.serve(number)
    hosts.wait_at(range(3), 3)
    wait_until(lambda: len(hosts.view(0)["deputies"]) == 2, "there are deputies")


def promote(hosts: ServedHosts, by: int, *options: str) -> None:
    done = hosts.command(by, "promote", ROOT, *options)
    assert done.returncode == 0, done.stderr


def lose_memory(hosts: ServedHosts, number: int) -> None:
    hosts.kill_host(number)
    hosts.hosts[number].run(["sh", "-c", f"rm -rf {ROOT}"], timeout=LONG)


def test_hosts_of_a_first_boot_that_name_each_other_become_one_cluster(hosts: ServedHosts) -> None:
    for number in range(3):
        hosts.serve(number, named=[one for one in range(3) if one != number])
    hosts.wait_at(range(3), 3)
    assert len({hosts.view(number)["cluster"] for number in range(3)}) == 1


@pytest.mark.full
def test_a_host_that_was_told_of_nobody_makes_a_cluster_after_a_while(hosts: ServedHosts) -> None:
    hosts.serve(0, named=[])
    hosts.wait_at([0], 1)
    hosts.call(0, actions.put_own, "own", 1)


def test_a_seed_that_comes_back_empty_and_names_nobody_makes_no_second_cluster(hosts: ServedHosts) -> None:
    serve_three(hosts)
    group = hosts.group_of(1)
    hosts.call(1, actions.put_again, [f"{group}/k"])
    before = hosts.view(1)["cluster"]
    lose_memory(hosts, 0)
    hosts.serve(0, named=[])
    time.sleep(5.0)  # longer than a root waits that nobody finds
    assert hosts.view(0) == {}, hosts.log(0)
    promote(hosts, 1)
    hosts.remove(0, by=1)
    hosts.wait_at(range(3), 3)
    assert {hosts.view(number)["cluster"] for number in range(3)} == {before}
    assert hosts.call(0, actions.found, [f"{group}/k"]) == [f"{group}/k"]


@pytest.mark.full
def test_an_old_seed_that_comes_back_empty_after_a_promotion_makes_no_second_cluster(hosts: ServedHosts) -> None:
    serve_three(hosts)
    before = hosts.view(1)["cluster"]
    lose_memory(hosts, 0)
    promote(hosts, 1)
    time.sleep(3.0)  # nobody asks at the old seed's address any more
    hosts.serve(0, named=[])
    hosts.wait_at(range(3), 4)
    assert {hosts.view(number)["cluster"] for number in range(3)} == {before}
    assert "3 of 4 hosts answer" in hosts.command(1, "status", ROOT).stdout
    hosts.remove(0, by=1)  # of the two at that address the one that is lost
    hosts.wait_at(range(3), 3)
    hosts.call(0, actions.put_own, "again", 1)
    assert hosts.call(2, actions.found, ["again0/k"]) == ["again0/k"]


def test_a_dead_host_blocks_nobodys_join(hosts: ServedHosts) -> None:
    serve_three(hosts)
    hosts.kill_host(2)
    hosts.serve(3)
    hosts.wait_at([0, 1, 3], 4)
    hosts.call(3, actions.put_own, "late", 1)
    assert hosts.call(0, actions.found, ["late0/k"]) == ["late0/k"]


@pytest.mark.full
def test_a_stranger_at_a_dead_members_address_removes_nobody(hosts: ServedHosts) -> None:
    serve_three(hosts)
    hosts.call(2, actions.put_own, "dead", 1)
    dead = next(one["id"] for one in hosts.view(0)["members"] if one["address"] == hosts.address(2))
    lose_memory(hosts, 2)
    hosts.serve(2)
    hosts.wait_at(range(3), 4)
    assert dead in {one["id"] for one in hosts.view(0)["members"]}
    error, text = hosts.call(0, actions.trouble_with, "dead0/k", 1.0, timeout=LONG)
    assert error in ("HomeUnavailableError", "LinkRefusedError"), text
    done = hosts.command(0, "remove", ROOT, dead)
    assert done.returncode == 0, done.stderr
    hosts.wait_at(range(3), 3)
    assert hosts.call(0, actions.trouble_with, "dead0/k", 5.0, timeout=LONG)[0] == "KeyNotFoundError"


def test_a_new_seed_goes_on_with_all_that_the_old_one_has_said(hosts: ServedHosts) -> None:
    serve_three(hosts)
    groups = {number: hosts.group_of(number) for number in range(3)}
    hosts.kill_host(0)
    promote(hosts, 2)
    hosts.remove(0, by=1)
    hosts.wait_at([1, 2], 2)
    keys = [f"{groups[number]}/k" for number in (1, 2)] + ["new-of-1/k", f"{groups[0]}/k"]
    assert hosts.call(1, actions.put_and_get, keys, 5.0) == keys
    assert hosts.call(2, actions.found, keys) == keys
    hosts.serve(0)  # with its folder, which was removed
    wait_until(lambda: "has come back" in hosts.log(0), "it is another host")
    hosts.wait_at(range(3), 3)
    assert hosts.view(0)["seed"] == hosts.view(1)["seed"] != hosts.address(0)
    assert hosts.call(0, actions.found, keys) == keys


@pytest.mark.full
def test_a_seed_that_was_cut_off_while_another_was_promoted_follows_it(hosts: ServedHosts) -> None:
    serve_three(hosts)
    for other in (1, 2, 3):
        hosts.hosts.cut(0, other)
    promote(hosts, 1)
    hosts.call(1, actions.put_own, "meanwhile", 1)
    for other in (1, 2, 3):
        hosts.hosts.heal(0, other)
    wait_until(lambda: hosts.view(0)["seed"] == hosts.view(1)["seed"] != hosts.address(0), "it follows")
    assert hosts.call(0, actions.found, ["meanwhile0/k"]) == ["meanwhile0/k"]


@pytest.mark.full
def test_a_lost_majority_needs_force_and_members_say_what_they_own(hosts: ServedHosts) -> None:
    serve_three(hosts)
    group = hosts.group_of(2)
    hosts.call(2, actions.put_again, [f"{group}/k"])
    for number in (0, 1):
        hosts.kill_host(number)
    done = hosts.command(2, "promote", ROOT, hosts.address(2))
    assert done.returncode == 3 and "more than half" in done.stderr
    promote(hosts, 2, hosts.address(2), "--force")
    for number in (0, 1):
        hosts.remove(number, by=2)
    hosts.wait_at([2], 1)
    hosts.call(2, actions.put_own, "forced", 1)
    assert hosts.call(2, actions.found, [f"{group}/k", "forced0/k"]) == [f"{group}/k", "forced0/k"]


def test_a_removed_host_ends_and_takes_what_it_has_put_and_no_more(hosts: ServedHosts) -> None:
    serve_three(hosts)
    for number in range(3):
        hosts.call(number, actions.put_own, f"of{number}-", 2)
    done = hosts.command(0, "remove", ROOT, hosts.hosts[2].address)
    assert done.returncode == 3 and "lives" in done.stderr
    done = hosts.command(0, "remove", f"{hosts.hosts[1].address}:7411", hosts.hosts[2].address, "--force")
    assert done.returncode == 0, done.stderr
    assert hosts.agent(2).wait(LONG) == 3 and "removed" in hosts.log(2)
    everything = [f"of{number}-{one}/k" for number in range(3) for one in range(2)]
    for number in range(2):
        assert hosts.call(number, actions.found, everything) == everything[:4]


@pytest.mark.full
def test_a_copy_of_a_folder_is_refused_and_one_that_has_moved_is_let_in(hosts: ServedHosts, tmp_path: Path) -> None:
    serve_three(hosts)
    hosts.call(2, actions.put_own, "moved", 2)
    hosts.agent(2).terminate()
    hosts.agent(2).wait(LONG)
    copy = tmp_path / "copy.tar"
    hosts.hosts[2].run(["tar", "cf", str(copy), "-C", "/dev/shm", "store"], timeout=LONG, check=True)
    hosts.hosts[3].run(["tar", "xf", str(copy), "-C", "/dev/shm"], timeout=LONG, check=True)
    hosts.serve(3)
    assert hosts.agent(3).wait(LONG) == 3 and "--moved" in hosts.log(3)
    hosts.serve(3, "--moved")
    hosts.wait_at([0, 1, 3], 3)
    assert hosts.call(0, actions.found, ["moved0/k", "moved1/k"]) == ["moved0/k", "moved1/k"]


def test_a_host_that_is_never_an_owner_puts_for_others(hosts: ServedHosts) -> None:
    for number in range(2):
        hosts.serve(number)
    hosts.serve(2, "--no-owner")
    hosts.wait_at(range(3), 3)
    hosts.call(2, actions.put_own, "spot", 2)
    hosts.kill_host(2)
    hosts.remove(2, by=0)
    hosts.call(0, actions.put_again, ["spot0/k"])
    assert hosts.call(1, actions.found, ["spot0/k"]) == ["spot0/k"]


# --- a generator's host dies, or is cut off ---------------------------------------------------------------------------

GENERATOR = 3
LONG_FOR_KNOWN = 1.0  # seconds; a put of a known group needs nobody
LONG_FOR_NEW = 12.0  # seconds; a deputy that is silent is left out after 3, and then the roster must count


def serve_with_generator(hosts: ServedHosts, *options: str) -> None:
    """As `serve_three`, and host 3 is one that may go at any moment."""
    serve_three(hosts)
    hosts.serve(GENERATOR, *options)
    hosts.wait_at(range(4), 4)


def check_times(trainer: Worker) -> None:
    """None of a trainer's puts has failed, or taken long."""
    trainer.send("end")
    longest, errors = trainer.recv()
    assert not errors and longest["known"] < LONG_FOR_KNOWN and longest["new"] < LONG_FOR_NEW, (longest, errors)


@pytest.mark.full
@pytest.mark.timeout(400)
@pytest.mark.parametrize("options", [("--no-owner",), ()], ids=["no owner", "an owner"])
@pytest.mark.parametrize("when", ["a first put", "a put", "a wait", "a sharded put"])
def test_a_generators_host_dies_in_the_middle_and_nobody_notices(
    hosts: ServedHosts, when: str, options: tuple[str, ...]
) -> None:
    serve_with_generator(hosts, *options)
    hosts.call(1, actions.put_whole, "policy/w", 1)
    dead = next(one["id"] for one in hosts.view(0)["members"] if one["address"] == hosts.address(GENERATOR))
    key = "its/k" if when == "a first put" else "policy/k"
    if when == "a put":
        action, arguments, step = actions.put_whole, (key, 1), 3  # it has a session, and lends its bytes
    elif when == "a first put":
        action, arguments, step = actions.put_whole, (key, 1), 1  # it has the grant
    elif when == "a wait":
        action, arguments, step = actions.wait_newer, (key, 0), 2  # its question is on its way
    else:
        hosts.call(1, actions.leave_part, key, "one", 2)
        action, arguments, step = actions.put_last_part, (key, "one", 2), 5  # its part is there
    with (
        hosts.start(GENERATOR, dying.stop_at_step, ROOT, action, arguments, step, when == "a wait") as generator,
        hosts.start(1, dying.put_again_and_again, ROOT, "policy/w", "of-trainer") as trainer,
    ):
        assert trainer.recv() == "ready" and generator.recv() == "there"
        hosts.kill_host(GENERATOR)
        time.sleep(8.0)
        check_times(trainer)
    done = hosts.command(0, "remove", ROOT, dead)
    assert done.returncode == 0, done.stderr
    hosts.wait_at(range(3), 3)
    for number in range(3):  # whatever it has begun, others may put now
        assert isinstance(hosts.call(number, actions.put_whole, key, 3 + number), int)
        assert hosts.call((number + 1) % 3, actions.get_whole, key) == 3 + number
    wait_until(lambda: not hosts.call(1, actions.bytes_left)[0], "no bytes are being filled")
    hosts.hosts[GENERATOR].run(["sh", "-c", f"rm -rf {ROOT}"], timeout=LONG)
    hosts.serve(GENERATOR, *options)  # a new one at its address
    hosts.wait_at(range(4), 4)
    assert hosts.call(GENERATOR, actions.get_whole, key) == 5


@pytest.mark.full
@pytest.mark.timeout(400)
@pytest.mark.parametrize("ways", ["both ways", "one way to it", "one way from it"])
def test_a_generators_host_is_cut_off_for_a_minute_and_the_trainers_do_not_notice(
    hosts: ServedHosts, ways: str
) -> None:
    serve_with_generator(hosts, "--no-owner")
    with (
        hosts.start(1, dying.put_again_and_again, ROOT, "policy/w", "of-trainer") as trainer,
        hosts.start(GENERATOR, actions.read_on, ROOT, "policy/w") as generator,
    ):
        assert trainer.recv() == "ready" and generator.recv() == "ready"
        for other in range(3):
            if ways != "one way from it":
                hosts.hosts.cut(other, GENERATOR, one_way=True)
            if ways != "one way to it":
                hosts.hosts.cut(GENERATOR, other, one_way=True)
        time.sleep(60.0)
        check_times(trainer)
        for other in range(3):
            hosts.hosts.heal(other, GENERATOR)
        last = hosts.call(1, actions.get_number, "policy/w")
        wait_until(lambda: ask(generator) == last, "the generator goes on by itself")


@pytest.mark.full
@pytest.mark.timeout(400)
@pytest.mark.parametrize("ways", ["both ways", "one way to it", "one way from it"])
def test_the_seed_is_cut_off_for_a_minute_and_owners_go_on(hosts: ServedHosts, ways: str) -> None:
    """Only groups that a process has not met need the seed. Nobody takes over: nobody has asked for that."""
    serve_three(hosts)
    group = hosts.group_of(1)
    key, new = f"{group}/k", f"new-{group}/k"
    hosts.call(1, actions.put_number, key, 1)
    with hosts.start(2, actions.read_on, ROOT, key) as reader:
        assert reader.recv() == "ready"
        wait_until(lambda: ask(reader) == 1, "it has met the owner")
        for other in (1, 2):
            if ways != "one way from it":
                hosts.hosts.cut(other, 0, one_way=True)
            if ways != "one way to it":
                hosts.hosts.cut(0, other, one_way=True)
        began, number = time.monotonic(), 1
        while time.monotonic() - began < 60.0:
            number += 1
            hosts.call(1, actions.put_number, key, number)
            wait_until(lambda: ask(reader) == number, "the other host gets it", 5.0)  # noqa: B023
            if number % 5 == 1:
                error, text = hosts.call(2, actions.trouble_with, new, 1.0)
                assert error == "HomeUnavailableError" and hosts.address(0) in text, (error, text)
        assert number > 20
        for other in (1, 2):
            hosts.hosts.heal(other, 0)
        wait_until(lambda: hosts.call(2, actions.trouble_with, new, 5.0)[0] == "KeyNotFoundError", "the seed is back")
    hosts.wait_at(range(3), 3)
    assert hosts.call(0, actions.get_number, key) == number
    assert hosts.call(2, actions.put_and_get, [new], 5.0) == [new]


@pytest.mark.full
def test_trainers_go_on_while_all_generators_are_cut_off(hosts: ServedHosts) -> None:
    """As where a switch fails: those that are left are no majority."""
    hosts.serve(0)
    hosts.serve(1)
    hosts.wait_at(range(2), 2)
    for number in (2, 3):
        hosts.serve(number, "--no-owner")
    hosts.wait_at(range(4), 4)
    wait_until(lambda: hosts.view(0)["deputies"], "there are deputies")
    time.sleep(3.0)  # more of them would be there by now
    with hosts.start(1, dying.put_again_and_again, ROOT, "policy/w", "of-trainer") as trainer:
        assert trainer.recv() == "ready"
        for trainers in (0, 1):
            for generators in (2, 3):
                hosts.hosts.cut(trainers, generators)
        time.sleep(30.0)
        check_times(trainer)
    for trainers in (0, 1):
        for generators in (2, 3):
            hosts.hosts.heal(trainers, generators)
    hosts.wait_at(range(4), 4)
    assert hosts.call(3, actions.put_and_get, ["healed/k"], 5.0) == ["healed/k"]


def ask(worker: Worker) -> int:
    worker.send("?")
    return worker.recv()


# --- what comes late --------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_a_grant_that_comes_after_the_directorys_restart_is_good(hosts: ServedHosts) -> None:
    """The seed's answer takes 1.5 s; meanwhile its index process is killed, and another one is there."""
    for number in range(4):
        hosts.serve(number)
    hosts.wait_at(range(4), 4)
    wait_until(lambda: len(hosts.view(0)["deputies"]) == 2, "there are deputies")
    addresses = [hosts.address(number) for number in range(4)]
    deputies = {addresses.index(one) for one in hosts.view(0)["deputies"]}
    late = min({1, 2, 3} - deputies)
    with hosts.start(late, dying.put_when_told, ROOT, "before/k", "late/k") as worker:
        assert worker.recv() == "ready"
        hosts.hosts.delay(0, late, 1.5, one_way=True)
        worker.send("go")
        time.sleep(0.5)
        before = hosts.index_process(0)
        os.kill(before, signal.SIGKILL)
        assert worker.recv() < 10.0
    hosts.hosts.delay(0, late, 0)
    hosts.wait_at(range(4), 4)
    assert hosts.index_process(0) != before
    for number in range(4):
        assert hosts.call(number, actions.owner_of, "late/k") == hosts.address(late)
    keys = [f"next-{number}/k" for number in range(3)]
    assert hosts.call(min(deputies), actions.put_and_get, keys, 5.0) == keys  # numbers go on


@pytest.mark.full
def test_idle_hosts_say_little(hosts: ServedHosts) -> None:
    for number in range(HOSTS):
        hosts.serve(number)
    hosts.wait_for_members(HOSTS)
    time.sleep(1.0)
    before = sum(map(hosts.sent, range(HOSTS)))
    time.sleep(10.0)
    assert sum(map(hosts.sent, range(HOSTS))) - before < 20_000


@pytest.mark.full
def test_a_host_that_is_drained_is_cut_off_and_killed_in_the_middle_and_nothing_is_lost(hosts: ServedHosts) -> None:
    """It goes on where it was; its folder is gone at the end, and it comes back as another member."""
    for number in range(4):
        hosts.serve(number)
    hosts.wait_for_members(4)
    keys = [f"drained-{number}/k" for number in range(40)]
    for number, key in enumerate(keys[:6]):
        hosts.call(3, actions.put_whole, key, number)
    hosts.call(3, actions.put_again, keys[6:])
    before = next(one["id"] for one in hosts.view(0)["members"] if one["address"] == hosts.address(3))

    def drain(*options: str) -> int:
        return hosts.command(0, "drain", ROOT, hosts.address(3), *options).returncode

    hosts.hosts.cut(3, 1)
    assert drain("--timeout", "1") == 3
    hosts.hosts.cut(3, 0)
    hosts.hosts.heal(3, 1)
    assert drain("--timeout", "1") == 3
    hosts.kill_agent(3)
    hosts.hosts.heal(3, 0)
    assert drain("--timeout", "1") == 3
    hosts.serve(3)
    assert drain() == 0 and hosts.agent(3).wait(LONG) == 0, hosts.log(3)
    assert hosts.hosts[3].run(["ls", ROOT], timeout=LONG, capture_output=True).returncode != 0
    hosts.serve(3)
    hosts.wait_for_members(4)
    after = {one["id"] for one in hosts.view(0)["members"]}
    assert before not in after
    for reader in (1, 3):
        assert [hosts.call(reader, actions.get_whole, key) for key in keys[:6]] == list(range(6))
        assert hosts.call(reader, actions.found, keys[6:]) == keys[6:]
