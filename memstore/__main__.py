"""`python -m memstore`, as the script `memstore`."""

from memstore.cli import main

main()
