"""The rules with thousands of hosts: what travels, and what takes time. `python -m tests.simulation` has the tables.

costs     what a message, a transaction and a row cost, measured on this machine by the real code
large     the world of tests/distributed/rules with a processor and a network for each host
figures   a cluster at rest, joins, deaths, a broadcast, a directory: what comes of them at a number of hosts
page      tables and plots of docs/scale.md
"""
