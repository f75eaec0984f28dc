"""The version of memstore. Here, where every part may ask for it: hosts tell each other."""

__version__ = "0.2.0"
