"""How a store changes and is read: the steps of put, get and delete; reuse of files; recovery after a process dies."""
