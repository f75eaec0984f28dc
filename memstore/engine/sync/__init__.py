"""Mutexes and doorbells, in pages that all processes of a store map; and clocks."""
