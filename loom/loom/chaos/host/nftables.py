"""nftables by its library, as a program ``nft`` ends too soon for a table that belongs to who made it."""

from __future__ import annotations

import ctypes

from loom.errors import FaultRefused

__all__ = ["Nftables"]

_LIBRARY = "libnftables.so.1"


class Nftables:
    """A line to the kernel's nftables, in the network namespace of the thread that opens it.

    The kernel removes the tables that are made on it with ``flags owner`` when it is closed, and when the process
    ends, however it does. Nobody else can change them.

    Raises:
        FaultRefused: the library is not installed.
    """

    def __init__(self) -> None:
        try:
            self._library = ctypes.CDLL(_LIBRARY)
        except OSError as error:
            raise FaultRefused(f"{_LIBRARY} is not installed here: install nftables ({error})") from error
        context, text = ctypes.c_void_p, ctypes.c_char_p
        for name, result, *arguments in (
            ("nft_ctx_new", context, ctypes.c_uint32),
            ("nft_ctx_free", None, context),
            ("nft_ctx_buffer_output", ctypes.c_int, context),
            ("nft_ctx_get_output_buffer", text, context),
            ("nft_ctx_buffer_error", ctypes.c_int, context),
            ("nft_ctx_get_error_buffer", text, context),
            ("nft_run_cmd_from_buffer", ctypes.c_int, context, text),
        ):
            function = getattr(self._library, name)
            function.restype, function.argtypes = result, arguments
        self._context = self._library.nft_ctx_new(0)
        self._library.nft_ctx_buffer_output(self._context)
        self._library.nft_ctx_buffer_error(self._context)

    def run(self, *commands: str) -> str:
        """Carry out commands, all or none; what they print.

        Raises:
            FaultRefused: the kernel or the library takes one for wrong.
        """
        failed = self._library.nft_run_cmd_from_buffer(self._context, "\n".join(commands).encode())
        said = self._library.nft_ctx_get_error_buffer(self._context).decode(errors="replace")
        printed: str = self._library.nft_ctx_get_output_buffer(self._context).decode(errors="replace")
        if failed:
            raise FaultRefused(f"nftables refuses `{commands[0]}` and what follows: {said.partition(chr(10))[0]}")
        return printed

    def close(self) -> None:
        """Close it, and with it have its own tables removed; return when they are."""
        self._library.nft_ctx_free(self._context)
