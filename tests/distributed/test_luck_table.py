"""What may go wrong in a cluster, and the tests of each: in the simulation of the rules, and on real hosts.

Hosts are namespaces of the kernel, with agents and clients as users have them. A story, scene or script is one of the
simulation (`rules/`).
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.rules.replicating import SCRIPTS
from tests.distributed.rules.scenes import SCENES
from tests.distributed.rules.test_each_step import STORIES

HERE = Path(__file__).parent
EACH_STEP = "rules/test_each_step.py::test_whatever_happens_at_any_step"
ONCE = "hosts/test_each_step.py::test_a_call_is_made_once_or_never"
FAULTS = "hosts/test_faults.py::test_operations_stay_linearizable"
NEXT = "hosts/test_faults.py::test_operations_stay_linearizable_whatever_comes_next"
GENERATOR = "hosts/test_bad_luck.py::test_a_generators_host_dies_in_the_middle_and_nobody_notices"
MANY = "hosts/test_many_keys.py::test_a_hundred_thousand_keys_on_each_host"
LAYOUT = "../integrations/torchstore/test_layout.py"

TABLE: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "the owner, the seed, a deputy, an agent, a client is killed at every step": (
        (EACH_STEP, *(f"story {name}" for name in STORIES), "scene kills"),
        (
            ONCE,
            FAULTS,
            NEXT,
            "hosts/test_three_hosts.py::test_what_is_owned_here_goes_on_while_every_index_process_is_dead",
        ),
    ),
    "a grant comes after the directory's restart": (
        ("script a grant that comes after the directory's restart", "script a grant of the old term"),
        ("hosts/test_bad_luck.py::test_a_grant_that_comes_after_the_directorys_restart_is_good",),
    ),
    "the claiming process is killed between grant and commit": (
        ("script a grant whose claimer is killed before it commits", "story a first put"),
        (
            "hosts/test_each_step.py::"
            "test_a_process_that_dies_between_grant_and_commit_leaves_a_group_that_its_host_owns",
        ),
    ),
    "the seed's host comes back with an empty folder, by a unit that names nobody": (
        (
            "rules/test_founding.py::test_the_seeds_host_that_comes_back_empty_joins_the_members_that_find_it",
            "rules/test_founding.py::test_the_old_seeds_host_that_comes_back_empty_after_a_promotion_joins_the_members",
        ),
        (
            "hosts/test_bad_luck.py::test_a_seed_that_comes_back_empty_and_names_nobody_makes_no_second_cluster",
            "hosts/test_bad_luck.py::test_an_old_seed_that_comes_back_empty_after_a_promotion_makes_no_second_cluster",
        ),
    ),
    "a quota is reached by several hosts at once": (
        (
            "rules/test_quotas.py::test_each_member_knows_them_also_after_a_promotion",
            "client/test_quotas.py::test_two_hosts_that_reach_it_at_once_never_exceed_it_together",
            "client/test_quotas.py::test_it_goes_with_its_group_which_is_never_refused",
        ),
        ("hosts/test_spilled.py::test_a_quota_that_is_reached_by_three_hosts_at_once_holds",),
    ),
    "a key with a history is deleted, or its versions lie on hosts that die, or are drained": (
        (
            "scene histories",
            "scene histories and losses",
            "scene histories and drains",
            "scene histories in a storm",
            "script a history goes on with puts of other hosts",
            "script a version is replaced while its host is looked for",
            "script replaced versions of a host that is drained",
            "script an heir goes on with a history",
        ),
        (
            "hosts/test_three_hosts.py::"
            "test_versions_that_were_replaced_are_read_on_each_host_until_their_key_is_deleted",
            "hosts/test_three_hosts.py::test_replaced_versions_while_their_owner_is_killed_again_and_again",
        ),
    ),
    "the disk to which values move is full, or gone": (
        (
            "client/test_spilled.py::test_a_full_disk_is_told_and_nothing_is_lost",
            "client/test_spilled.py::test_a_disk_that_is_gone_is_told_by_name_wherever_its_values_are_read",
        ),
        ("hosts/test_spilled.py::test_a_host_whose_disk_is_full_too_says_so_and_loses_nothing",),
    ),
    "a folder was copied": (
        ("script a folder that was copied",),
        ("hosts/test_bad_luck.py::test_a_copy_of_a_folder_is_refused_and_one_that_has_moved_is_let_in",),
    ),
    "a stranger is at a dead member's address": (
        ("rules/test_membership.py::test_a_stranger_at_a_dead_members_address_removes_nobody",),
        ("hosts/test_bad_luck.py::test_a_stranger_at_a_dead_members_address_removes_nobody",),
    ),
    "links are cut one way and both ways for a minute": (
        ("scene cuts of a minute", "scene cuts", "scene splits"),
        (
            FAULTS,
            "hosts/test_bad_luck.py::test_a_generators_host_is_cut_off_for_a_minute_and_the_trainers_do_not_notice",
            "hosts/test_bad_luck.py::test_the_seed_is_cut_off_for_a_minute_and_owners_go_on",
        ),
    ),
    "a generator's host dies during its first put, in a wait, in a sharded put": (
        (
            *(f"story {name}" for name in ("a generator's first put", "a wait for what is new", "a sharded put")),
            "scene generators that die",
            "scene generators that come and die",
        ),
        (GENERATOR,),
    ),
    "the seed dies, and nobody is there to promote another host": (
        (
            "scene promotions by themselves",
            "scene promotions by themselves and splits",
            "script a seed that is lost, and nobody is there to promote another one",
            "script a deputy whose way to the seed alone is cut",
            "script of two hosts that don't hear each other neither takes over",
        ),
        (
            "hosts/test_silences.py::test_a_deputy_takes_over_from_a_seed_that_is_killed_by_itself",
            "hosts/test_silences.py::test_a_seed_that_is_cut_off_obeys_the_one_that_took_over_when_it_hears",
            "hosts/test_silences.py::test_of_two_hosts_neither_takes_over_by_itself",
        ),
    ),
    "a host is cut off, or stopped, and the clock removes it": (
        (
            "scene removals by themselves",
            "scene removals by themselves of stopped hosts",
            "scene removals by themselves and splits",
            "scene removals by themselves and hand-overs",
            "script a host that is cut off is removed, and has stopped before",
            "script a put that is stopped between its look at the lease and its commit",
            "script a seed that was replaced, and gives leases on",
            "script a seed whose host was suspended",
        ),
        (
            "hosts/test_silences.py::"
            "test_a_host_that_is_cut_off_stops_before_it_is_removed_and_what_it_said_is_put_is_not_said_in_vain",
            "hosts/test_silences.py::test_a_put_of_a_process_that_is_stopped_beyond_the_lease_is_not_acknowledged",
            "hosts/test_silences.py::test_a_host_whose_lease_was_over_and_that_was_not_removed_goes_on",
            "hosts/test_silences.py::test_of_two_hosts_the_clock_removes_neither_and_both_go_on",
        ),
    ),
    "there are 100,000 keys in 10,000 groups at each host": (
        ("rules/test_many_groups.py::test_changes_of_members_take_as_many_messages_as_the_directory_has_pages",),
        (MANY,),
    ),
    "two meshes are served at once": (
        ("rules/test_founding.py::test_hosts_of_a_first_boot_are_one_cluster", "scene roots with keys"),
        (
            "meshes/test_hosts.py::test_two_jobs_that_serve_one_root_at_once_make_one_store_or_are_told",
            "meshes/test_hosts.py::test_two_jobs_join_a_cluster_at_once",
            "meshes/test_hosts.py::test_meshes_are_served_at_once_and_another_job_joins_by_a_cluster_that_was_sent",
        ),
    ),
    "a mesh is stopped in the middle of a put": (
        (EACH_STEP, "story a put elsewhere"),  # all agents are killed
        ("meshes/test_hosts.py::test_a_mesh_that_is_stopped_in_the_middle_of_puts_leaves_whole_values",),
    ),
    "generators are cut off, and trainers don't notice": (
        ("script members that own nothing are cut off", "scene generators that come and die"),
        (
            f"{LAYOUT}::test_trainers_do_not_notice_that_a_generators_host_is_cut_off",
            f"{LAYOUT}::test_trainers_go_on_while_generators_come_and_die",
            "hosts/test_bad_luck.py::test_trainers_go_on_while_all_generators_are_cut_off",
        ),
    ),
}
KINDS = {"scene": SCENES, "script": SCRIPTS, "story": STORIES}


@pytest.mark.parametrize("what", TABLE)
def test_all_bad_luck_has_tests_in_the_simulation_and_on_hosts(what: str) -> None:
    for tests in TABLE[what]:
        assert tests
        for one in tests:
            kind, _, name = one.partition(" ")
            if kind in KINDS:
                assert name in KINDS[kind], one
                continue
            path, _, name = one.partition("::")
            assert f"def {name}(" in (HERE / path).read_text(), one
