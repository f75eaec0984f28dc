"""What memstore's tests share, and yours may reuse: nothing here is imported by the library.

explore        visits all states of a model, breadth first, and names the shortest way to a fault
fork_server    processes with torch imported, started in milliseconds, to be killed; fork_serving is its other end
hosts          several hosts on one machine, with cuts, delays and kills
history        what clients did and saw, and whether one store could have answered so
faults         what happens if the n-th system call of an operation fails, or is the process's last
"""
