"""Verifies a store, and repairs a damaged one: nothing of it is believed before it was checked."""
