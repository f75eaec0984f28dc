"""`spawn_actors`, under the name by which TorchStore's examples import it."""

# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import uuid
from typing import Any

from memstore.late_imports import between_forks


async def spawn_actors(num_processes: int, actor_cls: type, name: str, mesh: Any = None, **init_args: Any) -> Any:
    """Spawns an actor of Monarch in each of some processes of this host, or of the mesh that is given.

    Args:
        num_processes: how many processes to start; not looked at with `mesh`.
        actor_cls, init_args: the class, and what its instances are made with.
        name: of the actors; a unique suffix is added.
        mesh: a ProcMesh; None: new processes on this host.

    Returns: the mesh of the actors.
    """
    if mesh is None:
        with between_forks():
            from monarch.actor import this_host
        mesh = this_host().spawn_procs(per_host={"gpus": num_processes})
    await mesh.initialized
    return mesh.spawn(f"{name}_{uuid.uuid4().hex[:8]}", actor_cls, **init_args)
