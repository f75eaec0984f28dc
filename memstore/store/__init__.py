"""What a user calls. Its door is `memstore` itself, which imports these files when their names are needed.

opening       open: what may be asked for
store         Store: put, get, view, attach, ...; as_mapping: the methods of a dict; describe: info
ref           one version of a key, pinned
weights       one version as named tensors
rescue        repair
"""
