"""The start of every Python child of Loom: ``python …/start.py MODULE ARGUMENTS…``.

It does what ``python -m`` does, but without the current folder, in which a user's file may have the name of a
module that Loom imports. It is a file of its own because it is run by its path, and has to clean `sys.path` before
anything is imported. Python 3.10 has no ``-P``, and what the child starts would inherit ``PYTHONSAFEPATH``.
"""

import sys

if __name__ == "__main__":
    if not getattr(sys.flags, "safe_path", False):
        del sys.path[0]  # this file's folder

    import runpy

    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
