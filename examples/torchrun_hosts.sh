#!/bin/sh
# Two hosts on this machine, each with its own network and /dev/shm, and torchrun on both of them.
# On hosts of your own it is one line for each; this prints it:
#
#   torchrun --nnodes 2 --node-rank 0 --nproc-per-node 2 --master-addr 10.0.0.1 examples/torchrun_hosts/ranks.py ROOT
#
# Needs root, or user namespaces; says so where it has neither. PYTHON=... chooses the interpreter; --help says the rest.
cd "$(dirname "$0")/.." || exit
exec "${PYTHON:-python}" -m examples.torchrun_hosts "$@"
