"""`memstore checkpoints`: the steps of a CheckpointManager, listed and pruned. It loads no torch."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

import click

from memstore import _wording as wording
from memstore.checkpoints.buckets import steps_at
from memstore.checkpoints.folders import RankingRule, Retention, SavedStep, SharedSizes, StepStorage, current, newest
from memstore.cli import render
from memstore.cli.group import REFUSED, as_json, cli, root
from memstore.cli.stores import ask, yes
from memstore.snapshot import is_snapshot
from memstore.snapshot.buckets import is_url

_STEP_TITLES = ("step", "size", "age", "state", "metrics")
_NAMED = 10  # steps


@cli.command(short_help="List the checkpoints of a run; --prune what isn't needed.")
@root
@click.option("--prune", is_flag=True, help="Remove unfinished ones, and those that no --keep option keeps.")
@click.option("--keep-last", type=click.IntRange(1), metavar="N", help="With --prune: keep the N newest.")
@click.option("--keep-every", type=click.IntRange(1), metavar="N", help="With --prune: keep multiples of N, too.")
@click.option("--keep-best", type=click.IntRange(1), metavar="N", help="With --prune: keep the N best, too.")
@click.option("--metric", help="The metric that says which is the best. Default: as the manager ranks them.")
@click.option("--best", type=click.Choice(["max", "min"]), help="Whether the largest or the smallest is the best.")
@yes
@as_json
def checkpoints(
    root: str,
    prune: bool,
    keep_last: int | None,
    keep_every: int | None,
    keep_best: int | None,
    metric: str | None,
    best: Any,
    yes: bool,
    as_json: bool,
) -> None:
    """List the checkpoints in the folder ROOT of a CheckpointManager: the newest, the best, unfinished ones.

    --prune alone removes unfinished ones. With a --keep option it also removes whole ones that none of these keeps, but
    never the newest, one that is being read, or one that no manager saved.
    """
    rules = (keep_last, keep_every, keep_best)
    if not prune and (yes or any(rules)):
        option = "--yes" if yes else "--keep-last, --keep-every and --keep-best"
        raise click.UsageError(f"{option} {'is' if yes else 'are'} for --prune: say that too, or leave it out")
    storage = steps_at(root)
    found = storage.steps()
    rule = _ranking_rule(found, metric, best)
    if keep_best is not None and rule is None:
        raise click.UsageError("which are the best? Say --best max or --best min, and --metric if there are several")
    if prune:
        retention = Retention(*(rules if any(rules) else (None, None, None)), rule or RankingRule(None, "max"))
        if keep_last is None and any(rules):
            retention = retention._replace(keep_last=1)
        _prune(storage, retention.removable(found), yes=yes, as_json=as_json)
        return
    ranked = [] if rule is None else rule.ranked(current(found))
    last = newest(found)
    sizes = {saved.name: storage.size_of(saved) for saved in found}
    told = [(saved, _states(storage, saved, last, ranked[:1])) for saved in found]
    if as_json:
        render.print_json([_described(storage, saved, sizes[saved.name], states) for saved, states in told])
        return
    rows = [
        (
            f"{saved.step:,}",
            wording.size(sizes[saved.name]),
            "-" if saved.created is None else wording.age(saved.created),
            ", ".join(states),
            ", ".join(f"{name} {value:.6g}" for name, value in saved.metrics.items()),
        )
        for saved, states in sorted(told, key=lambda one: (one[0].step, one[0].order))
    ]
    if not render.write_rows(_STEP_TITLES, rows, right=("step", "size", "age")):
        why = "" if is_url(storage.root) or os.path.isdir(storage.root) else ": there is no such folder"
        if is_snapshot(storage.root):
            why = ": it is one itself; say the folder that it is in"
        render.console.print(f"no checkpoint in {render.printable(storage.root)}{why}")


def _ranking_rule(found: Sequence[SavedStep], metric: str | None, best: Any) -> RankingRule | None:
    """Returns the rule that was asked for, else that of the newest step which has one."""
    rules = [saved.rule for saved in sorted(found, key=lambda saved: saved.order) if saved.rule is not None]
    own = rules[-1] if rules else None
    if metric is None and best is None:
        return own
    if best is None and own is None:
        raise click.UsageError(f"is the largest {metric!r} the best, or the smallest? Say --best max or --best min")
    return RankingRule(metric or (own.metric if own else None), best or (own.best if own else "max"))


def _states(storage: StepStorage, saved: SavedStep, last: SavedStep | None, best: Sequence[SavedStep]) -> list[str]:
    if saved.format is None:
        return ["being written" if storage.is_held(saved) else "unfinished"]
    if not saved.is_whole:
        return [f"unreadable: {saved.format}"]
    found = ["latest"] if saved is last else []
    return [*found, *(["best"] if saved in best else []), *([] if saved.is_managed else ["of another writer"])]


def _described(storage: StepStorage, saved: SavedStep, nbytes: int, states: Sequence[str]) -> dict[str, Any]:
    return {
        "step": saved.step,
        "path": storage.path(saved.name),
        "whole": saved.is_whole,
        "latest": "latest" in states,
        "best": "best" in states,
        "being_written": "being written" in states,
        "managed": saved.is_managed,
        "format": saved.format,
        "created": saved.created,
        "nbytes": nbytes,
        "metrics": dict(saved.metrics),
    }


def _prune(storage: StepStorage, gone: Sequence[SavedStep], *, yes: bool, as_json: bool) -> None:
    """Removes steps, after a question if there are whole ones among them."""
    whole = [saved for saved in gone if saved.is_whole]
    sizes = SharedSizes({storage.path(saved.name): storage.size_of(saved) for saved in gone})
    if whole:
        many = wording.count_of(len(whole), "checkpoint", "checkpoints")
        steps = wording.first_of([f"{saved.step:,}" for saved in whole], _NAMED)
        freed = sizes.freed([storage.path(saved.name) for saved in whole])
        ask(f"Remove {many}, {wording.size(freed)}: {steps}?", yes=yes)
    removed = [saved for saved in gone if storage.remove(saved)]
    stay = [saved for saved in whole if saved not in removed]
    nbytes = sizes.freed([storage.path(saved.name) for saved in removed])
    render.tell(
        {"removed": [storage.path(saved.name) for saved in removed], "nbytes": nbytes},
        f"{wording.count_of(len(removed), 'checkpoint', 'checkpoints')} removed, {wording.size(nbytes)}",
        as_json=as_json,
    )
    for saved in stay:
        render.complain(f"{storage.path(saved.name)} stays: it is being read, or can't be removed")
    if stay:
        sys.exit(REFUSED)
