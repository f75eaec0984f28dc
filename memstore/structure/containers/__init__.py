"""The kinds of containers: for each, how it is flattened and the node that builds it again, side by side.

builtin      dict, OrderedDict, defaultdict, list, tuple, namedtuple
arrays       numpy arrays, and the rules for subclasses of torch.Tensor
nested       jagged, strided-nested and quantized tensors: one leaf for a user, several tensors inside
tensordicts  TensorDict, tensorclasses, TensorDictParams; imported only once a value or a description needs it
stacks       lazy stacks and non-tensor data; imported with them
"""
