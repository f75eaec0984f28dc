"""copy.deepcopy of tensors inside of a session, also of one that lasts for this copy alone.

torch copies a storage by tensors of its own that show it. Inside of the modes these would be fake, and the copy of a
real storage would stay what its memory was before. So what is real is copied with the modes put aside.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import copy
from typing import Any

import torch

from memstore import modes
from memstore.fake.marks import Mark, Ref, is_leaf, over_storage, ref_of, requires_grad, storage_bytes
from memstore.fake.session import Session
from memstore.fake.storages import lend
from memstore.fake.tensors import original_class

_NO_DISPATCH: Any = torch._C._disabled_torch_dispatch_impl
_OURS = "_memstore_"  # what deferred_init has noted of a tensor: of its copy it isn't true


def deepcopied(session: Session, function: Any, mark: Mark, args: Any, options: dict[str, Any]) -> Any:
    """A copy of the storage, which is of the past too; tensors that share one share the copy."""
    fake, memo = args
    if id(fake) in memo:
        return memo[id(fake)]
    with torch._C.DisableTorchFunction():
        made = memo[id(fake)] = _deepcopy(fake, mark, memo)
        session.note(made)
    with session.functions(session):  # attributes may be tensors too
        for name, one in fake.__dict__.items():
            if not name.startswith(_OURS):
                setattr(made, name, copy.deepcopy(one, memo))
    return made


def _deepcopy(fake: torch.Tensor, mark: Mark, memo: dict[int, Any]) -> torch.Tensor:
    """The copy without attributes."""
    if not is_leaf(fake):
        raise RuntimeError("a tensor that was computed from others (no leaf) can't be copied with deepcopy")
    ref, cls = ref_of(fake, mark), original_class(type(fake))
    if id(mark) not in memo:
        whole = Ref(mark, torch.uint8, (storage_bytes(fake),), (1,), 0, False, False)
        memo[id(mark)] = over_storage(fake, whole).clone()
    made = over_storage(memo[id(mark)], ref)
    lend(made)
    if cls is not torch.Tensor:
        return torch.Tensor._make_subclass(cls, made, requires_grad(fake))
    return made.requires_grad_() if requires_grad(fake) else made


def deepcopy_real(session: Session, function: Any, args: Any) -> Any:
    """A copy of a tensor that isn't fake. What wraps others is copied by operators, which the modes are to see."""
    real, memo = args
    if type(real).__torch_dispatch__ is not _NO_DISPATCH:
        return function(real, memo)
    with session.functions(session):
        copy.deepcopy(real.__dict__, memo)  # among its attributes may be fakes: torch finds their copies in the memo
    with modes.put_aside(entirely=True):
        return function(real, memo)
