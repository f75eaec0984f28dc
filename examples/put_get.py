"""The smallest use: put a nested value, get it in another process.

python examples/put_get.py [ROOT]
"""

import subprocess
import sys

import torch
from tensordict import TensorDict

import memstore

READER = """
import sys, memstore
store = memstore.open(sys.argv[1], "r")
policy = store.get("policy")                    # mapped, not copied
print("got version", store.version("policy"), policy["layer", "weight"].sum().item())
"""

root = sys.argv[1] if len(sys.argv) > 1 else "/dev/shm/memstore-put-get"
with memstore.open(root, "w") as store:  # "w" begins anew: what a run that was killed has left is gone
    version = store.put("policy", TensorDict({"layer": {"weight": torch.ones(3, 4), "bias": torch.zeros(3)}}))
    print("put version", version)
    subprocess.run([sys.executable, "-c", READER, root], check=True)
memstore.destroy(root)
