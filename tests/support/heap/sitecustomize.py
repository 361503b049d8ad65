"""Python imports this module first in a process that has `tests.support.heap.heap_environment`; see there."""

from __future__ import annotations

import ctypes
import os
import socket
import threading

NAMES = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"


class _Figures(ctypes.Structure):
    """The ``struct mallinfo2`` of glibc: https://man7.org/linux/man-pages/man3/mallinfo.3.html."""

    _fields_ = [(name, ctypes.c_size_t) for name in NAMES.split()]


def _answer(listener: socket.socket) -> None:
    glibc = ctypes.CDLL(None)
    glibc.mallinfo2.restype = _Figures
    while True:
        asked, _ = listener.accept()
        with asked:
            found = glibc.mallinfo2()
            asked.sendall(str(found.uordblks + found.hblkhd).encode())


_parent, _, _folder = os.environ.get("LOOM_TEST_HEAP", "").partition(":")
if _folder and os.getppid() == int(_parent):  # not in the processes of sessions
    _listener = socket.socket(socket.AF_UNIX)
    _listener.bind(os.path.join(_folder, str(os.getpid())))
    _listener.listen()
    threading.Thread(target=_answer, args=(_listener,), daemon=True).start()
