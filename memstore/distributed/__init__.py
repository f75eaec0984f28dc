"""One store across hosts. The rules: docs/decisions/016-clusters.md.

rules/      what is said and done, as steps without I/O: what the simulation runs
catalog/    the rules' tables in a host's catalog
links/      connections between hosts: handshake, frames, and who listens
client/     what a process of a served root does for keys whose owner, or bytes, are elsewhere
transfers/  how bytes move: streams, copies, one fetch a host, RDMA
serving/    the agent of a host, and its index process
meshes/     agents on the hosts of a Monarch mesh
"""
