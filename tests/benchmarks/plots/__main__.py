"""`python -m tests.benchmarks.plots FILE.svg`: colours for a dark page, for a plot that is drawn elsewhere in ours.

That is docs/images/replay-cartpole.svg, which `examples/replay_cartpole.py --plot` draws.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.benchmarks.plots.dark import with_dark_colours

for path in map(Path, sys.argv[1:]):
    path.write_text(with_dark_colours(path.read_text(encoding="utf-8")), encoding="utf-8")
