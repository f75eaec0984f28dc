"""Makes a process take itself for one of other versions. It is run by Python before all else, where PYTHONPATH has it.

FAKED_VERSIONS is `name=version,...`: of distributions (empty: not installed), of `memstore`, and of the `protocol`.
"""

from __future__ import annotations

import importlib.metadata
import os

_faked = dict(pair.split("=") for pair in os.environ.get("FAKED_VERSIONS", "").split(",") if pair)
_version = importlib.metadata.version


def version(distribution_name: str) -> str:
    if distribution_name not in _faked:
        return _version(distribution_name)
    if not _faked[distribution_name]:
        raise importlib.metadata.PackageNotFoundError(distribution_name)
    return _faked[distribution_name]


importlib.metadata.version = version
if "memstore" in _faked:
    import memstore._version

    memstore._version.__version__ = _faked["memstore"]
if "protocol" in _faked:
    from memstore.distributed.links import handshake

    oldest, _, newest = _faked["protocol"].rpartition("-")  # "7", or "1-7"
    handshake.PROTOCOL, handshake.OLDEST = int(newest), int(oldest or newest)
