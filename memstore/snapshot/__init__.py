"""State dicts, saved and restored: a snapshot is a folder of safetensors files with a manifest, which is linked last.

storage/   where the files of a snapshot lie: file systems, behind an interface that an object store can have too
writer/    a process of its own, which writes what was staged
staging/   tensors, copied into warm shared memory, from which the writer writes them

This door imports nothing: the writer's process comes through it too, and needs no torch.
"""
