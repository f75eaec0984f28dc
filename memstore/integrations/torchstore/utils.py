"""`spawn_actors`, under the name by which TorchStore's examples import it."""

# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import uuid
from typing import Any

from memstore._threads import between_forks
from memstore._wording import an_instance


async def spawn_actors(num_processes: int, actor_cls: type, name: str, mesh: Any = None, **init_args: Any) -> Any:
    """Spawns a Monarch actor in each of several new processes of this host, or in each process of a mesh.

    Args:
        num_processes: how many processes to start; ignored if `mesh` is given.
        actor_cls: the actors' class.
        name: the actors' name; a unique suffix is added.
        mesh: a ProcMesh; None: new processes on this host.
        init_args: the arguments of the actors' class.

    Returns:
        The mesh of the actors.
    """
    if mesh is None:
        with between_forks():
            from monarch.actor import this_host
        mesh = this_host().spawn_procs(per_host={"gpus": num_processes})
    elif not (hasattr(mesh, "spawn") and hasattr(type(mesh), "initialized")):
        raise TypeError(f"mesh is a ProcMesh of Monarch, or None, and not {an_instance(mesh)}")
    await mesh.initialized
    return mesh.spawn(f"{name}_{uuid.uuid4().hex[:8]}", actor_cls, **init_args)
