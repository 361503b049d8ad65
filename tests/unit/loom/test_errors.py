"""Each public exception: its code on the wire, HTTP status, exit status and the classes that catch it."""

from __future__ import annotations

import ast
import builtins
import inspect
import pickle
from collections.abc import Iterator

import pytest

import loom
from loom import errors
from loom.process.error_exit import error_for_exit_code, report
from tests.support.paths import ROOT

CASES = """
ActorError              actor_error             500 1
AuditUnavailable        audit_unavailable       503 1 ConnectionError OSError
AuthenticationError     authentication          401 6 PermissionError OSError
BadPlan                 bad_plan                422 2 ValueError
BranchRefused           branch_refused          409 1
CheckpointBroken        checkpoint_broken       500 1
CheckpointError         checkpoint              500 1
CheckpointNotWritten    checkpoint_not_written  500 1 OSError
CommandIdTaken          command_id_taken        409 1
ConnectionLost          connection_lost         404 1 ConnectionError OSError
ContextFileError        context_file            500 1 OSError
DeploymentFailed        deployment_failed       500 1
DriverUnavailable       driver_unavailable      503 1 ConnectionError OSError
EndpointNameTaken       endpoint_name_taken     500 1 ValueError
EndpointNotFound        endpoint_not_found      500 1 AttributeError
FaultRefused            fault_refused           409 1 RuntimeError
FileChanged             file_changed            500 1
GatewayDraining         gateway_draining        503 1
GatewayUnreachable      gateway_unreachable     500 5 ConnectionError OSError
HostRefused             host_refused            403 6 PermissionError OSError
HostsNotOwned           hosts_not_owned         500 1 RuntimeError
InvalidAddress          invalid_address         500 2 ValueError
InvalidLogOption        invalid_log_option      500 1 ValueError RuntimeError
KeyringUnavailable      keyring_unavailable     500 1
LimitReached            limit_reached           429 1
LoomError               error                   500 1
MeshStopped             mesh_stopped            500 1 RuntimeError
MissingDependency       missing_dependency      500 4 ImportError
NatsUnreachable         nats_unreachable        500 5 ConnectionError OSError
NoOpenJob               no_open_job             500 1 RuntimeError
NoSuchDimension         no_such_dimension       500 1 TypeError KeyError LookupError ValueError
NoSuchMesh              no_such_mesh            404 1
NoSuchMethod            no_such_method          500 1 AttributeError
NoSuchRank              no_such_rank            404 1 IndexError LookupError
ResultDropped           result_dropped          500 1
NoSuchRun               no_such_run             500 1 KeyError LookupError
NotAFolder              not_a_folder            500 1 NotADirectoryError OSError
NotAGateway             not_a_gateway           500 5 ConnectionError OSError
NotAMethod              not_a_method            422 2 TypeError ValueError
NotAnActor              not_an_actor            500 1 ValueError
NotAnEndpoint           not_an_endpoint         500 1 AttributeError RuntimeError
NotInjectable           not_injectable          403 6 PermissionError OSError
NotOneActor             not_one_actor           500 1 ValueError
NotOneProcess           not_one_process         500 1 NotImplementedError RuntimeError
NotSupported            not_supported           500 1 TypeError
ObjectNameTaken         object_name_taken       500 1 ValueError
OncePortUsed            once_port_used          500 1 RuntimeError ValueError
OperationCancelled      cancelled               500 1 CancelledError
OperationFailed         operation_failed        500 1
OriginRefused           origin                  403 1 PermissionError OSError
PodUnreachable          pod_unreachable         500 1 ConnectionError OSError
PortClosed              port_closed             500 1
PortForwardFailed       port_forward_failed     500 1 ConnectionError OSError
PortInUse               port_in_use             500 3 OSError
ProtocolMismatch        protocol_mismatch       400 1
PythonVersionMismatch   python_version          500 1
RateLimited             rate_limited            429 1
ReadOnlySession         read_only_session       500 1 PermissionError OSError
RemoteException         remote_exception        500 1
ReplicaTaken            replica_taken           500 1
RunLives                run_lives               409 1
RunNameTaken            run_name_taken          500 1 ValueError
ScopeError              scope                   403 6 PermissionError OSError
ServiceUnreachable      service_unreachable     500 1 ConnectionError OSError
SessionClosed           session_closed          500 1
InForkedChild           in_forked_child         500 1
SessionInUse            session_in_use          500 1
SessionLost             session_lost            410 1
SessionTakenOver        session_taken_over      500 1
SliceOutOfRange         slice_out_of_range      500 1 IndexError ValueError OverflowError ArithmeticError
StateFolderInUse        state_folder_in_use     500 1
SupervisionError        supervision             500 1 RuntimeError
SyncFailed              sync_failed             500 1
SyncNameTaken           sync_name_taken         500 1 ValueError
TokenFileError          token_file              500 1 OSError
TokenRevoked            token_revoked           401 6 PermissionError OSError
TooLarge                too_large               413 1 ValueError
TooManyRuns             too_many_runs           500 1
TrainingFailed          training_failed         500 1
UnknownAlert            unknown_alert           404 9 KeyError LookupError
UnknownCommand          unknown_command         404 9 KeyError LookupError
UnknownContext          unknown_context         500 9 KeyError LookupError
UnknownDevice           unknown_device          404 9 KeyError LookupError
UnknownInjection        unknown_injection       404 9 KeyError LookupError
UnknownReplica          unknown_replica         404 9 KeyError LookupError
UnknownRun              unknown_run             404 9 KeyError LookupError
UnknownSelection        unknown_selection       500 1 ValueError
UnknownSession          unknown_session         404 8 KeyError LookupError
UnknownToken            unknown_token           500 1 KeyError LookupError
UnknownTransport        unknown_transport       500 1 ValueError
UnpicklableError        unpicklable             500 1 TypeError
UnreadableFile          unreadable_file         500 1 PermissionError OSError
UnsafeLink              unsafe_link             500 1 ValueError
UnsafeStateFolder       unsafe_state_folder     500 1
UnstorableState         unstorable_state        500 1 TypeError
UntrustedGateway        untrusted_gateway       500 5 ConnectionError OSError
WaitTimeout             timeout                 500 1 TimeoutError OSError
WatcherTooSlow          watcher_too_slow        500 1
WeaverUnavailable       weaver_unavailable      503 5 ConnectionError OSError
WorkerUnreachable       worker_unreachable      500 7 ConnectionError OSError
WorkersSilent           workers_silent          500 7 ConnectionError OSError
WrongArguments          wrong_arguments         422 2 TypeError
WrongConnectionMode     wrong_connection_mode   500 1 ValueError
"""
"""Name, code, HTTP status, exit status, built-in classes: programs, scripts and browsers depend on every word."""

ROWS = [line.split() for line in CASES.strip().splitlines()]

names = pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])


@names
def test_an_exception_that_came_over_the_wire_is_what_it_has_always_been(row: list[str]) -> None:
    name, code, http_status, exit_status, *built_in = row

    error = errors.error_for_code(code, "the text")

    assert (error.code, error.http_status, error.exit_status) == (code, int(http_status), int(exit_status))
    assert isinstance(error, getattr(loom, name))
    assert isinstance(error, errors.LoomError)
    assert {base.__name__ for base in type(error).__mro__} >= set(built_in)
    assert "the text" in str(error)
    assert report(error) == int(exit_status)
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), again.code) == (type(error), str(error), code)


def test_the_text_of_an_exception_is_not_quoted() -> None:
    assert str(errors.UnknownReplica("no replica named 'a'")) == "no replica named 'a'"
    assert "no such dimension" in str(errors.NoSuchDimension("no such dimension"))


def test_a_code_that_nobody_knows_is_in_the_text_of_a_plain_error() -> None:
    error = errors.error_for_code("of_tomorrow", "the text")
    assert (type(error), str(error)) == (errors.LoomError, "the text [of_tomorrow]")


def test_a_process_that_ended_with_an_exit_status_is_told_by_its_error() -> None:
    assert error_for_exit_code(3) is errors.PortInUse
    assert error_for_exit_code(1) is errors.LoomError
    for status in range(2, 10):
        assert error_for_exit_code(status)("text").exit_status == status


def codes_given() -> Iterator[tuple[str, str]]:
    """Name of the class and code of every exception in the product that is made with ``code=``."""
    for folder in ("loom", "gateway", "proxy"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and hasattr(errors, node.func.id):
                    for keyword in node.keywords:
                        if keyword.arg == "code" and isinstance(keyword.value, ast.Constant):
                            yield node.func.id, keyword.value.value


def test_a_code_is_given_to_its_own_category_and_every_case_is_raised_somewhere() -> None:
    given = set(codes_given())

    assert all(type(errors.error_for_code(code, "")) is getattr(errors, name) for name, code in given)
    of_classes = {
        value.code for value in vars(errors).values() if inspect.isclass(value) and hasattr(value, "code")
    }
    assert {code for _, code, *_ in ROWS} - of_classes == {code for _, code in given}


@pytest.mark.parametrize(
    ("reason", "text"),
    [
        (None, "it failed"),
        ("", "it failed"),
        (" \n", "it failed"),
        ("no data", "it failed: no data"),
        (3, "it failed: 3"),
    ],
)
def test_a_reason_is_never_empty_behind_its_colon(reason: object, text: str) -> None:
    assert errors.because("it failed", reason) == text


class Mute(Exception):
    """An exception whose text cannot be had."""

    def __str__(self) -> str:
        raise ValueError


BUILT_IN = [one for one in vars(builtins).values() if isinstance(one, type) and issubclass(one, BaseException)]


@pytest.mark.parametrize("cls", BUILT_IN, ids=lambda cls: cls.__name__)
def test_an_exception_is_described_with_and_without_a_text(cls: type[BaseException]) -> None:
    for arguments in [(), ("no data",), ("",)]:
        try:
            error = cls(*arguments)
        except TypeError:  # a class that needs more, such as UnicodeDecodeError
            continue

        text = errors.describe_error(error)

        assert text.startswith(cls.__name__)
        assert not text.rstrip().endswith(":")


def test_an_exception_without_a_usable_text_is_described_all_the_same() -> None:
    assert errors.describe_error(Mute()) == "Mute: <its __str__ raised ValueError>"
