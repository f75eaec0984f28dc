"""Bytes and files only: no torch, no tensordict above this line of the map, and none below it either."""
