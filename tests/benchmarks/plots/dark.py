"""Other colours where a page is dark.

A plot that a page shows by <img> takes the colour scheme of the page: browsers ask the page, not the system alone.
What knows no media queries (other viewers, converters) shows the light plot, which has a ground of its own.
"""

from __future__ import annotations

from tests.benchmarks.plots.style import DARK

HEAD_ENDS = "</metadata>"


def with_dark_colours(svg: str) -> str:
    rules = "".join(
        f'[style*="{what}: {light}"]{{{what}:{dark}!important}}'
        for light, dark in DARK.items()
        for what in ("fill", "stroke")
        if f"{what}: {light}" in svg
    )
    head, end, rest = svg.partition(HEAD_ENDS)
    if not end:
        raise ValueError("an SVG without metadata: matplotlib writes it in another way now, see dark.py")
    return f"{head}{end}\n <style>@media (prefers-color-scheme:dark){{{rules}}}</style>{rest}"
