"""Interfaces of other libraries, one each, on memstore's stores. None of them is imported before it is asked for.

torchrl     a storage and a writer for TorchRL's replay buffers
torchstore  TorchStore's functions
"""
