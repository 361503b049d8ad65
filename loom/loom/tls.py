"""TLS for clients: the authorities that they trust, and the errors for servers that they do not trust."""

from __future__ import annotations

import os
import ssl

from loom.errors import InvalidAddress, LoomError, NotAGateway, UntrustedGateway

# OpenSSL's reasons for an answer that is not TLS, such as HTTP's.
_NOT_TLS = frozenset({"WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "HTTP_REQUEST", "PACKET_LENGTH_TOO_LONG"})


def client_context(ca: str | os.PathLike[str] | None) -> ssl.SSLContext:
    """Return a context that verifies certificate and host name.

    ``ca`` is the PEM file of the authority's certificate; None: ``LOOM_CA``, else the authorities of this machine.
    """
    path = ca or os.environ.get("LOOM_CA") or None
    try:
        return ssl.create_default_context(cafile=path)
    except ssl.SSLError as error:
        raise InvalidAddress(f"ca={os.fspath(path or '')!r} has no certificate in PEM: {error.reason}") from error
    except OSError as error:
        raise InvalidAddress(f"cannot read ca={os.fspath(path or '')!r}: {error.strerror or error}") from error


def tls_error(url: str, error: OSError) -> LoomError:
    """Return the error for a failure of TLS with a gateway."""
    if isinstance(error, ssl.SSLCertVerificationError):
        why = error.verify_message or str(error)
        if "mismatch" in why.lower() or "not valid for" in why.lower():
            advice = "The certificate is another host's: connect by a name that it has"
        else:
            advice = "If its authority is your own, pass ca=FILE to loom.connect, or --ca FILE, or set LOOM_CA"
        return UntrustedGateway(f"no trust in what answers at {url}: {why}. {advice}.")
    if isinstance(error, TimeoutError):
        return NotAGateway(f"{url} accepts connections but did not answer with TLS in time")
    if isinstance(error, ssl.SSLError) and error.reason in _NOT_TLS:
        return NotAGateway(f"what answers at {url} speaks no TLS: use ws:// for a gateway without --tls-cert")
    return NotAGateway(f"no TLS connection to {url}: {error or type(error).__name__}")
