"""Bytes and files only. Imports neither torch nor tensordict.

opening, root, registry       a store folder, opened; what a fork does to it
folder, filesystem            what may be a store, its settings and its files
claim, publish                put and delete: their protocols; lookup: that of get
reuse, sweep                  retired segments: used again, or given back; leases: kept meanwhile
recovery, age                 what the living do for the dead; is the catalog as new as its files?
segment, spares               the file of one put, and how it is filled; layout: where its tensors lie
header, header_reader         what that file says of itself
mapping, placing, adopted     files in memory, those of others too
catalog, tables, record       the index; readers: which of its pages are kept, and by whom
pages, lockfile               what processes share beside it: the mutex, the doorbell, locks of files
inspection, survey, verify    is it whole? salvage, triage, repair: what is left of it
reference                     versions on their way to other processes
usage, holders, room, limits  what a store takes, and who holds it; no room; the kernel's refusals
syscalls/                     every call into the kernel: the seam where tests inject faults
"""
