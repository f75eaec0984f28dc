"""Whether a stored group of parameters is that of an optimizer of the present kind."""

from __future__ import annotations

from collections.abc import Container

import torch


def loads_as_torch(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it takes a state dict as torch's own optimizers do, and nothing makes another one of it before."""
    hooks = getattr(optimizer, "_optimizer_load_state_dict_pre_hooks", None)
    return getattr(type(optimizer), "load_state_dict", None) is torch.optim.Optimizer.load_state_dict and not hooks


def steps_as_torch(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its options and states mean what those of torch's own optimizers do."""
    return type(optimizer).step.__module__.startswith("torch.optim.")


def why_of_another(optimizer: torch.optim.Optimizer, group: Container[str]) -> str | None:
    """What a stored group lacks that this optimizer needs, for an error. None: nothing.

    Later versions of torch add flags, which optimizers set themselves where a group lacks them; schedulers add keys.
    """
    if not type(optimizer).__setstate__.__module__.startswith("torch.optim."):
        return None
    needed = [name for name, value in optimizer.defaults.items() if value is not None and not isinstance(value, bool)]
    missing = [name for name in needed if name not in group]
    if not missing:
        return None
    return f"stored without {', '.join(missing)}, which {type(optimizer).__name__} needs: it is another optimizer's"
