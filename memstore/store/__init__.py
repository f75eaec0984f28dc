"""What a user calls. Its door is `memstore` itself, which imports these files when their names are needed.

opening       open: what may be asked for
store         Store, of the methods in puts, gets, by_files, by_ranks, by_rows and as_mapping; describe: info
ref           one version of a key, pinned
weights       one version as named tensors
rescue        repair
stores        the stores of this machine, and the end of one
"""
