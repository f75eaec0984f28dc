"""The program of an `Owner`: takes functions of `actions` to call by stdin, and gives what they return by stdout."""

from __future__ import annotations

import importlib
import os
import pickle
import sys
import traceback

ACTIONS = "tests.distributed.meshes.actions"


def main() -> None:
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what is printed is nobody's answer
    while True:
        try:
            name, arguments, named = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            answer = (False, getattr(importlib.import_module(ACTIONS), name)(*arguments, **named))
        except Exception as error:
            traceback.print_exc()
            answer = (True, error)
        pickle.dump(answer, answers)
        answers.flush()


if __name__ == "__main__":
    main()
