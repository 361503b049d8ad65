"""The options of ``loom serve gateway`` that are about its doors."""

from __future__ import annotations

import argparse
import ssl
from dataclasses import fields
from pathlib import Path

from loom.errors import WrongArguments
from loom.token_file import TokenFile, default_path
from loom.wire.mux import MAX_MESSAGE
from loom_gateway.access.audit import Audit
from loom_gateway.access.control import Doors
from loom_gateway.access.rate_limits import Limits
from loom_gateway.access.tokens import TokenAuthority

__all__ = ["add_door_options", "check_tls", "driver_limits", "make_doors"]


def add_door_options(parser: argparse.ArgumentParser) -> None:
    """Add the options to a parser."""
    add = parser.add_argument
    add("--tokens", type=Path, default=default_path(), metavar="FILE", help="file of `loom token create`")
    add("--tls-cert", type=Path, metavar="FILE", help="certificate and its chain, PEM; serves wss://")
    add("--tls-key", type=Path, metavar="FILE", help="its key, PEM, if it is in another file")
    add("--allow-origin", action="append", default=[], metavar="https://HOST", help="pages that may connect")
    add("--trusted-proxy", action="append", default=[], metavar="ADDRESS", help="its X-Forwarded-For is believed")
    add("--audit", type=Path, metavar="FILE", help="write who did what, as lines of JSON")
    add("--audit-size", type=int, default=64 << 20, metavar="BYTES", help="size of one audit file")
    for field in fields(Limits):
        name = f"--{field.name.replace('_', '-')}"
        add(name, type=type(field.default), default=field.default, help=f"default {field.default}; 0: no limit")


def check_tls(certificate: Path | None, key: Path | None) -> None:
    """Check that a gateway can speak TLS with these.

    Raises:
        WrongArguments: a file is missing or cannot be read, or they do not belong together.
    """
    if certificate is None:
        if key is not None:
            raise WrongArguments("--tls-key needs --tls-cert, the certificate that it belongs to")
        return
    for option, path in (("--tls-cert", certificate), ("--tls-key", key)):
        try:
            if path is not None:
                path.open("rb").close()
        except OSError as error:
            raise WrongArguments(f"cannot read {option} {path}: {error.strerror or error}") from error
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key)
    except ssl.SSLError as error:
        both = f"the certificate {certificate} and " + ("its key" if key is None else f"the key {key}")
        raise WrongArguments(
            f"cannot serve TLS with {both}: {error.reason or error}. Both are PEM, and the key is the certificate's"
        ) from error


def make_doors(options: argparse.Namespace, token: str) -> Doors:
    """The doors that parsed options describe.

    Args:
        token: the gateway's own.

    Raises:
        WrongArguments: a limit makes no sense, or the audit file cannot be written.
        TokenFileError: the token file cannot be used.
    """
    limits = Limits(**{field.name: getattr(options, field.name) for field in fields(Limits)})
    for field in fields(Limits):
        if not 0 <= getattr(limits, field.name) < float("inf"):
            raise WrongArguments(f"--{field.name.replace('_', '-')} is a number from 0 on")
    if not limits.login_window or options.audit_size <= 0:
        raise WrongArguments("--login-window and --audit-size are larger than 0")
    file = TokenFile(options.tokens)
    file.read()
    return Doors(
        TokenAuthority(token, file), limits, Audit(options.audit, options.audit_size), options.allow_origin
    )


def driver_limits(limits: Limits) -> list[str]:
    """The limits that drivers keep, as their command line has them."""
    return ["--max-message", str(limits.max_message or MAX_MESSAGE), "--max-in-flight", str(limits.max_in_flight)]
