"""A store's folder, opened: its settings, its files, who uses it, and what a fork does to it."""
