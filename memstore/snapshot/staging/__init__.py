"""Asynchronous snapshots: tensors are copied into warm shared memory, and a process of its own makes files of that.

    staged = stage(tensors)                    # blocks; when it returns, the tensors may change
    pending = staged.write(folder, files, finish="part", argument=..., durable=True, checksum=True)
    pending.wait()                             # what the finishing step returned

CONTRACT (what is called from above):

`stage(tensors, *, timeout=None) -> Staged`: plain, dense tensors (local ones, of any device, strides, conj); the elements
of each, in C order. `Staged.places[i]` is (offset, nbytes) of tensors[i] in the memory, `Staged.memory` all of it as a memoryview.
Raises StoreTimeoutError if too many bytes are in flight, ResourceLimitError if they never fit. `Staged.release()`, if it is not written.

`Staged.write(folder, files, *, finish, argument, durable, checksum) -> PendingWrite`: hands the memory to the writer. It can be called once.
`StagedFile(name, header, pieces)`: a file of `header`, then `pieces`, each (offset, nbytes) of the memory, one behind the other.

`PendingWrite.wait(timeout=None) -> bytes`, `.done() -> bool`: raises what failed, with its type; StoreTimeoutError; UnknownOutcomeError if the
writer was killed. Files of a job that failed are removed.

`finish` is the name of a step, or None. The steps are a fixed table in writer/steps.py, {"part": "memstore.snapshot.parts:finish_part"}: a function

    def finish_part(storage: Storage, argument: bytes, sums: Mapping[str, bytes], durable: bool) -> bytes

called in the writer once all files of the job are written: `argument` is what `write` was given, `sums` those of each file of the job, by name (b"" without checksum).
What it returns is what `wait()` returns; what it raises, `wait()` raises. Its module must import no torch, and neither may memstore/snapshot/__init__.py
(PEP 562, as in memstore/__init__.py).
"""
