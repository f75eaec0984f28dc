"""What memstore's tests share, and yours may reuse: nothing here is imported by the library.

fork_server    processes with torch imported, started in milliseconds, to be killed
faults         what happens if the n-th system call of an operation fails, or is the process's last
"""
