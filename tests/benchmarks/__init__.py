"""Benchmarks of memstore beside its peers and the machine's own limits. `python -m tests.benchmarks --help`.

    report.py       the nouns: Figure, Series, Goal, Workload, Report, and their JSON
    measure.py      interleaved timing: contestants take turns, each round gives a ratio
    session.py      one run: its folder, its rounds, which peers are here
    machine.py      what the run ran on
    peers/          one small module for each thing to compare with; limits.py is the machine itself
    workloads/      what is measured, with its goals
    table.py, plots.py, document.py    the report as text, SVG and Markdown (docs/performance.md, docs/project/)

Imports go from the bottom of this list to its top, `__main__` and `workloads` being the only ones that see everything.
"""
