"""Interfaces of other libraries, on memstore's stores. Each is a package, which is imported only when it is used.

dcp         torch.distributed.checkpoint: storage, planners and a stager
torchrl     a storage and a writer for TorchRL's replay buffers
torchstore  TorchStore's functions
vllm        the engines of vLLM's weight transfer
"""
