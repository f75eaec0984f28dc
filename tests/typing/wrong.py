"""Mistakes that a type checker must find: without the comments, each of these lines is an error."""

import torch

import memstore

store = memstore.open("/dev/shm/typed")
number: int = store.get("policy", as_type=torch.Tensor)  # type: ignore[assignment]
store.put(3, 4)  # type: ignore[arg-type]
store.get("policy", as_type=torch.Tensor, outt=3)  # type: ignore[call-overload]
memstore.open("/dev/shm/typed", "rw")  # type: ignore[arg-type]
text: str = store.version("policy")  # type: ignore[assignment]
store.gett("policy")  # type: ignore[attr-defined]
