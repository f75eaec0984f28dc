"""The kinds of containers: for each, how it is flattened and the node that builds it again, side by side.

builtin      dict, OrderedDict, defaultdict, list, tuple, namedtuple
arrays       numpy arrays, jagged, strided-nested and quantized tensors: one leaf for a user, several tensors inside
tensordicts  TensorDict and its relatives; imported only once a value or a description needs it
"""
