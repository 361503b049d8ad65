"""The start of every Python process under ``loom run``, also of Pythons that have no Loom.

It leaves no trace but the hooks: its folder leaves `sys.path`, and the user's own `sitecustomize` runs after it.
"""

import os
import sys


class _Missing:
    """Waits for an import of torch where there is no Loom, and says once that the training is not seen."""

    def find_spec(self, name, path=None, target=None):  # type: ignore[no-untyped-def]
        if name == "torch.optim":
            sys.meta_path.remove(self)
            if sys.stderr:
                sys.stderr.write("loom run: no Loom in " + repr(sys.prefix) + ": its trainings are not reported\n")


class _Brought:
    """Finds Loom, and what it needs, in the Python that ``loom run --on`` has started this one from."""

    def find_spec(self, name, path=None, target=None):  # type: ignore[no-untyped-def]
        if path is None and name in ("loom", "loom_auto", "msgpack"):
            from importlib.machinery import PathFinder

            return PathFinder.find_spec(name, os.environ["LOOM_PACKAGES"].split(os.pathsep))


if os.environ.get("LOOM_PACKAGES"):
    sys.meta_path.append(_Brought())
try:
    from loom_auto import start
except Exception:  # noqa: BLE001 - a Python of another environment, or another version
    if sys.version_info > (3, 4):  # noqa: UP036 - other tools may run by an old Python
        sys.meta_path.insert(0, _Missing())
else:
    start()

_here = os.path.dirname(os.path.abspath(__file__))
sys.path[:] = [_path for _path in sys.path if os.path.abspath(_path or ".") != _here]
_own = sys.modules.pop("sitecustomize", None)
try:
    import sitecustomize  # type: ignore[import-not-found] # noqa: F401
except ImportError as error:
    if getattr(error, "name", "sitecustomize") != "sitecustomize":  # Python 2 has no name
        raise
finally:
    if _own is not None:
        sys.modules.setdefault("sitecustomize", _own)
