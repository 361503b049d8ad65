"""``python -m loom.alerting.send``: one attempt to deliver an alert, in a process of its own.

The process outlives the weaver, so that a weaver that is killed in the middle neither loses a delivery nor makes it
twice. Its standard output is the attempt's file, whose lock it holds until it ends (`loom.alerting.attempts`). It
writes a line before it sends the first byte, and the outcome as the second line. A hostile receiver reaches this
process only, which ends after `ENDS_AFTER` seconds whatever happens.

It imports nothing but the standard library, as it is started for each attempt.
"""

from __future__ import annotations

import base64
import ipaddress
import json
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, suppress
from typing import Any
from urllib.parse import urlsplit

WITHIN = 10.0
"""Seconds for the connection, the request and the first line of the answer, together."""

MAIL_WITHIN = 20.0
"""Seconds that the e-mail command may run."""

ENDS_AFTER = 30
"""Seconds after which the kernel ends the process: a name may take for ever to be looked up."""

MAX_HEAD = 16 << 10
"""Bytes of an answer that are read. Its body is not."""

BEGUN = "begun"
"""The first line of an attempt's file, once something may have been sent."""

_STATUS = re.compile(rb"HTTP/1\.[01] (\d{3})\b")
_NAT64 = ipaddress.ip_network("64:ff9b::/96")

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class Refused(Exception):
    """The attempt was not made, or has failed; the text says why, without the secret part of an address."""


def main() -> int:
    """Make the attempt that standard input describes, and write its outcome to standard output."""
    signal.alarm(ENDS_AFTER)
    try:
        job = json.loads(sys.stdin.buffer.read())
    except ValueError:
        return 1  # the weaver was killed before it had said everything: nothing is sent
    try:
        status = _mail(job) if "command" in job else _post(job)
        outcome: dict[str, Any] = {"status": status}
    except Refused as error:
        outcome = {"error": str(error)[:500]}
    _write(json.dumps(outcome))
    return 0


def _write(line: str) -> None:
    os.write(1, line.encode() + b"\n")
    with suppress(OSError):
        os.fsync(1)


def _mail(job: Mapping[str, Any]) -> int:
    """Run the operator's command, with the message on its standard input. Return 0."""
    _write(BEGUN)
    try:
        done = subprocess.run(
            job["command"],
            input=base64.b64decode(job["body"]),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            timeout=MAIL_WITHIN,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise Refused(f"the e-mail command took more than {MAIL_WITHIN:g} s") from None
    except OSError as error:
        raise Refused(f"the e-mail command cannot be started: {error.strerror}") from None
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip()
        raise Refused(f"the e-mail command ended with {done.returncode}: {said[:300]}")
    return 0


def _post(job: Mapping[str, Any]) -> int:
    """Post to a webhook; return the status of its answer."""
    to, within = urlsplit(job["url"]), float(job.get("within", WITHIN))
    until = time.monotonic() + within
    host, port = to.hostname or "", to.port or (443 if to.scheme == "https" else 80)
    try:
        with closing(_connect(host, port, to.scheme == "https", job["networks"], until)) as line:
            _write(BEGUN)
            return _ask(
                line, _request(to.netloc, f"{to.path or '/'}{'?' if to.query else ''}{to.query}", job), until
            )
    except TimeoutError:
        raise Refused(f"{host} did not answer within {within:g} s") from None
    except ssl.SSLError as error:
        raise Refused(f"{host}: {error.reason or 'TLS failed'}") from None
    except OSError as error:
        raise Refused(f"{host}: {error.strerror or type(error).__name__}") from None


def _connect(host: str, port: int, tls: bool, networks: Sequence[str], until: float) -> socket.socket:
    """Return a connection to an address that was checked: the name is looked up once, and not again."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        raise Refused(f"{host} has no address") from None
    for *_, place in found:
        check_address(host, str(place[0]), networks, tls)
    failure: OSError | None = None
    for family, kind, protocol, _, place in found[:4]:
        line = socket.socket(family, kind, protocol)
        try:
            line.settimeout(_left(until))
            line.connect(place)
            if not tls:
                return line
            line.settimeout(_left(until))
            return ssl.create_default_context().wrap_socket(line, server_hostname=host)
        except OSError as error:
            line.close()
            failure = error
    raise failure or Refused(f"{host} has no address")


def check_address(host: str, address: str, networks: Sequence[str], tls: bool) -> None:
    """Raise `Refused` for an address that is not public, and in none of the networks that the operator allows."""
    given = ipaddress.ip_address(address.partition("%")[0])
    for one in (given, *_inner(given)):
        if any(one in ipaddress.ip_network(network, strict=False) for network in networks):
            return
    if not all(one.is_global and not one.is_multicast for one in (given, *_inner(given))) or _is_here(given):
        raise Refused(f"{host} leads to {given}, which is not public: the operator may allow it by --alert-network")
    if not tls:
        raise Refused(
            f"{host}: write https: without TLS a webhook's address, which is a secret, goes over the network"
        )


def _inner(address: Address) -> Iterator[Address]:
    """Yield the IPv4 addresses to which an IPv6 address leads."""
    if isinstance(address, ipaddress.IPv6Address):
        yield from (one for one in (address.ipv4_mapped, address.sixtofour, *(address.teredo or ())) if one)
        if address in _NAT64:
            yield ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)


def _is_here(address: Address) -> bool:
    """Return whether an address is one of this host's own."""
    family = socket.AF_INET6 if address.version == 6 else socket.AF_INET
    with closing(socket.socket(family, socket.SOCK_DGRAM)) as probe, suppress(OSError):
        probe.connect((str(address), 9))  # sends nothing; what leads to an own address begins at it
        return ipaddress.ip_address(str(probe.getsockname()[0]).partition("%")[0]) == address
    return False


def _request(host: str, target: str, job: Mapping[str, Any]) -> bytes:
    body = base64.b64decode(job["body"])
    head = {
        "Host": host,
        "Content-Type": "application/json",
        "Content-Length": str(len(body)),
        "User-Agent": "Loom",
        "Idempotency-Key": job["id"],
        "Connection": "close",
    }
    lines = "".join(f"{name}: {value}\r\n" for name, value in head.items())
    return f"POST {target} HTTP/1.1\r\n{lines}\r\n".encode() + body


def _ask(line: socket.socket, request: bytes, until: float) -> int:
    """Send a request; return the status of the answer. Redirects are not followed: theirs is the status."""
    line.settimeout(_left(until))
    line.sendall(request)
    head = b""
    while True:
        line.settimeout(_left(until))
        more = line.recv(4096)
        head += more
        while (end := head.find(b"\r\n")) >= 0:
            found = _STATUS.match(head)
            if found is None:
                raise Refused("the answer is not HTTP/1.1")
            if not found[1].startswith(b"1"):
                status = int(found[1])
                if 200 <= status < 300:
                    return status
                raise Refused(f"HTTP {status}")
            if (end := head.find(b"\r\n\r\n")) < 0:
                break
            head = head[end + 4 :]  # only a note that the answer comes
        if not more or len(head) > MAX_HEAD:
            raise Refused("the answer has no status")


def _left(until: float) -> float:
    left = until - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


if __name__ == "__main__":
    sys.exit(main())
