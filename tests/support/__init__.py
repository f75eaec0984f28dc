"""What memstore's tests share: nothing here is part of the package, and nothing of the package imports it.

explore        visits all states of a model, breadth first, and names the shortest way to a fault
fork_server    processes with torch imported, started in milliseconds, to be killed
hosts          several hosts on one machine, with cuts, delays and kills; holding and switching are its programs
history        what clients did and saw, and whether one store could have answered so
faults         what happens if the n-th system call of an operation fails, or is the process's last
equality       whether a value that was got is the one that was put, down to the bits
strategies     values for hypothesis
"""

from __future__ import annotations
