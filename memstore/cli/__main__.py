"""`python -m memstore.cli`, as the script `memstore`."""

from memstore.cli import main

main()
