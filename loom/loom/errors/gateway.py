"""Exceptions about a gateway: starting it and its pods, reaching it, authenticating."""

from __future__ import annotations

from loom.errors.base import Conflict, Denied, Invalid, LimitReached, LoomError, NotFound, Unavailable


class GatewayUnreachable(Unavailable, code="gateway_unreachable", exit_status=5):
    """Nothing answered at the gateway's address (refused, timed out, name not found)."""


class GatewayDraining(LoomError, code="gateway_draining", http_status=503):
    """The gateway is stopping and takes no new sessions; its existing ones go on until it ends."""


class NotAGateway(Unavailable, code="not_a_gateway", exit_status=5):
    """Something answered at the address, but it is not a Loom gateway."""


class UntrustedGateway(NotAGateway, code="untrusted_gateway"):
    """The server's TLS certificate is not trusted: its authority is unknown, its host wrong, or it has expired."""


class AuthenticationError(Denied, code="authentication", http_status=401):
    """The gateway refused the token, or none was given."""


class TokenRevoked(AuthenticationError, code="token_revoked"):
    """The token was revoked, or has expired. Its connections are closed and its sessions end."""


class ScopeError(Denied, code="scope"):
    """The token is valid, but lacks the scope for this; the text names its scope and the required one."""


class OriginRefused(Denied, code="origin", exit_status=1):
    """A web page of another origin asked for a WebSocket, and the gateway does not allow that origin."""


class RateLimited(LimitReached, code="rate_limited"):
    """Too many connections or wrong tokens came from this address; the text says which, and when to try again.

    ``retry_after`` is the number of seconds to wait, or 0.0 if it is unknown.
    """

    def __init__(self, message: str, retry_after: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class TokenFileError(LoomError, OSError, code="token_file"):
    """The file with the gateway's tokens cannot be used; the text names it and says why."""


class UnknownToken(NotFound, code="unknown_token", http_status=500, exit_status=1):
    """The file of tokens has no token with that id."""


class ProtocolMismatch(LoomError, code="protocol_mismatch", http_status=400):
    """The two sides speak different major versions of Loom's protocol, or the peer does not speak it at all."""


class PythonVersionMismatch(LoomError, code="python_version"):
    """Code has to travel by value, but the cluster runs another minor version of Python than this process."""


class TooLarge(LoomError, ValueError, code="too_large", http_status=413):
    """A message is larger than a limit of the other side; the text names both sizes in bytes."""


class PortInUse(LoomError, OSError, code="port_in_use", exit_status=3):
    """A server could not listen because its port is taken."""


class UnsafeStateFolder(LoomError, code="unsafe_state_folder"):
    """The folder for a gateway's state cannot be used, or not safely; the text says why."""


class MissingDependency(LoomError, ImportError, code="missing_dependency", exit_status=4):
    """A package that this part of Loom needs is not installed; the text names the extra that brings it."""


class InvalidAddress(Invalid, code="invalid_address", exit_status=2):
    """An address is not of the form ``tcp://HOST:PORT``."""


class WorkerUnreachable(Unavailable, code="worker_unreachable", exit_status=7):
    """Nothing answers at a worker's address; the text names each address that was tried."""


class WorkersSilent(WorkerUnreachable, code="workers_silent"):
    """The workers accept connections, but do not answer a new session. `connect` tries again automatically."""


class DeploymentFailed(LoomError, code="deployment_failed"):
    """A job's pods were not deployed, or do not become ready; the text says which and why."""


class PodUnreachable(Unavailable, code="pod_unreachable"):
    """A pod of a job does not answer, or is no pod of the job."""


PortForwardFailed = Unavailable
ServiceUnreachable = Unavailable
StateFolderInUse = Conflict
UnknownTransport = Invalid
