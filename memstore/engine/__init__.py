"""Bytes and files only. Imports neither torch nor tensordict."""
