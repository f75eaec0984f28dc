"""The dashboard asks for figures that there are, and for all kinds of them."""

from __future__ import annotations

import json
import re
from pathlib import Path

from memstore import metrics

DASHBOARD = Path(__file__).parents[2] / "docs" / "grafana" / "memstore.json"
GUIDE = Path(__file__).parents[2] / "docs" / "metrics.md"
NAME = re.compile(r"memstore_[a-z_]+")


def told() -> set[str]:
    """The names of all figures, as the code that makes them has them."""
    return set(re.findall(r'"(memstore_[a-z_]+)"', Path(metrics.__file__).read_text()))


def test_the_dashboard_asks_for_figures_that_there_are() -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    asked = {name for panel in dashboard["panels"] for one in panel["targets"] for name in NAME.findall(one["expr"])}
    assert len(asked) > 15 and asked <= told()
    assert all(one["datasource"]["uid"] == "${source}" for one in dashboard["panels"])
    assert len({one["id"] for one in dashboard["panels"]}) == len(dashboard["panels"])


def test_the_guide_has_each_figure() -> None:
    assert told() == {name for name in NAME.findall(GUIDE.read_text()) if name in told()}
    assert len(told()) > 30
