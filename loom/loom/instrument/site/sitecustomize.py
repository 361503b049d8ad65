"""The start of every Python process under ``loom run``, also of Pythons that have no Loom.

It leaves no trace but the hooks: its folder leaves `sys.path`, and the user's own `sitecustomize` runs after it.
"""

import os
import sys

try:
    from loom.instrument.bootstrap import begin
except Exception:  # noqa: BLE001 - a Python of another environment, or another version
    pass
else:
    begin()

_here = os.path.dirname(os.path.abspath(__file__))
sys.path[:] = [_path for _path in sys.path if os.path.abspath(_path or ".") != _here]
_own = sys.modules.pop("sitecustomize", None)
try:
    import sitecustomize  # type: ignore[import-not-found] # noqa: F401
except ImportError as error:
    if error.name != "sitecustomize":
        raise
finally:
    if _own is not None:
        sys.modules.setdefault("sitecustomize", _own)
