"""A module that imports another one, which imports it; and holds what cannot travel."""

from __future__ import annotations

import contextvars
import logging
import re
import socket
import threading

from tests.support.by_value import trees

LIMIT = 3
LOCK = threading.Lock()
LOG = logging.getLogger("baskets")
PATTERN = re.compile("a+")
WHICH = contextvars.ContextVar("WHICH", default="none")
SOCKET = socket.socket()
SOCKET.close()
GENERATOR = (n for n in range(3))
THREAD = threading.Thread()
LOCAL = threading.local()


class Basket:
    """Holds the apples of a tree of the other module."""

    def __init__(self, apples: int) -> None:
        self.apples = apples

    def tree(self) -> trees.Tree:
        return trees.Tree(self.apples + LIMIT)


def fits(count: int) -> bool:
    return count <= LIMIT and PATTERN.match("aa") is not None


def fits_alone(count: int) -> bool:
    with LOCK:
        return fits(count)


def which() -> str:
    return WHICH.get()
