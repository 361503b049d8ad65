"""The exit code of this process, told over a connection when the interpreter has ended.

Python tells it to nobody: `sys.exit` leaves nothing behind that an `atexit` function could see. glibc gives it to
the functions of its ``on_exit``, when no Python can run any more. So a C stream on the connection holds the
beginning of a frame, and ``putw`` of libc, as such a function, completes it with the code. libc writes streams out
last of all: a process that dies before that tells nothing, and its connection ends.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys

from loom.control.frame import pack
from loom.control.handshake import ExitCode


def tell_at_exit(sock: socket.socket) -> None:
    """Send an `ExitCode` over a connection when this process exits, if its libc can; the socket may be closed."""
    # Python ignores SIGPIPE. A program that does not would be killed by it if the weaver is gone.
    if sys.byteorder != "little" or signal.getsignal(signal.SIGPIPE) is not signal.SIG_IGN:
        return
    with contextlib.suppress(ImportError, AttributeError, OSError):  # another libc than glibc
        _tell_at_exit(os.dup(sock.fileno()))


def _tell_at_exit(descriptor: int) -> None:
    import ctypes

    libc = ctypes.CDLL(None)
    on_exit, putw, fdopen, fwrite = libc.on_exit, libc.putw, libc.fdopen, libc.fwrite
    on_exit.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    fdopen.argtypes, fdopen.restype = [ctypes.c_int, ctypes.c_char_p], ctypes.c_void_p
    fwrite.argtypes = [ctypes.c_char_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_void_p]
    os.register_at_fork(after_in_child=lambda: os.close(descriptor))  # the code of a child is another one
    stream = fdopen(descriptor, b"w")
    begun = pack(ExitCode(bytes(4)).to_body())[:-4]
    if stream and fwrite(begun, 1, len(begun), stream) == len(begun):
        on_exit(ctypes.cast(putw, ctypes.c_void_p), stream)
