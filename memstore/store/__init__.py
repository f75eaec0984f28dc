"""Stores, as a user calls them. Their door is `memstore` itself, which imports these files when their names are needed.

opening       open: what may be asked for; waiting for a store that another process makes
values        the methods of Store for values, and Ref: one version of a key, pinned
store         Store, with the methods for values of several ranks and for rows, and those of a mapping
sharded       puts of several ranks, and how the ranks meet
models        saves and loads of models on several ranks; model_fit: a model's state by name, and what fits it
weights       one version as named tensors
maintenance   the stores of this machine, the end of one, and repair
"""
