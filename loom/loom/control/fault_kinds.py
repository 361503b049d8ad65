"""The kinds of faults, with the parameters of each. The module imports no code that injects one."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import Any

from loom.errors import WrongArguments

MAX_DURATION = 3600.0
"""Seconds that a fault may last. Each ends without help: the process that should remove it may be gone by then."""

MAX_DELAY = 60_000.0  # milliseconds by which packets may be delayed


class Place(str, Enum):
    """The place where a fault is carried out."""

    TRAINING = "training"
    """In the training process, at a step boundary."""
    HOST = "host"
    """On the host of a training process, at once."""
    GATEWAY = "gateway"
    """Next to the gateway: the gateway itself, its weaver or a driver."""


@dataclass(frozen=True)
class Param:
    """A parameter of a fault. Numbers lie between ``least`` and ``most``; a list holds texts."""

    type: type
    default: Any
    what: str
    least: float = -math.inf
    most: float = math.inf
    choices: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.choices:
            return f"one of {', '.join(self.choices)}"
        what = {int: "a whole number", float: "a number", str: "a text", list: "a list of texts"}[self.type]
        return what if self.least == -math.inf else f"{what} from {self.least:g} to {self.most:g}"

    def check(self, fault: str, name: str, value: Any) -> Any:
        """Return a value converted to the parameter's type, if it fits."""
        read: Any = value
        if self.type is list:
            read = [value] if isinstance(value, str) else list(value) if isinstance(value, tuple) else value
        elif type(value) in (int, float) and self.type in (int, float) and value % 1 == 0:
            read = self.type(value)
        fits = type(read) is self.type and (not self.choices or read in self.choices)
        if fits and self.type is list:
            fits = all(isinstance(one, str) for one in read)
        elif fits and self.type in (int, float):
            fits = self.least <= read <= self.most
        if not fits:
            raise WrongArguments(f"{fault}: {name} is {self}, not {value!r:.80}")
        return read


@dataclass(frozen=True)
class FaultKind:
    """A kind of fault."""

    name: str
    place: Place
    what: str
    """The effect, in a sentence."""
    params: Mapping[str, Param] = field(default_factory=dict)
    lasts: float | None = None
    """The default duration in seconds. None: the fault is over at once, and there is nothing to remove."""
    ends: bool = False
    """True if the struck process does not survive the fault."""
    silences: bool = False
    """True if the process cannot send anything during the fault, and has to acknowledge it in advance."""
    of: str = "replica"
    """The target: a ``replica``, the ``host`` of one, or the ``gateway``, ``weaver`` or ``session``."""


_PEERS = Param(list, [], "addresses of the hosts on the other side; empty: all but this host itself")
_DEVICE = Param(str, "", "the network device; empty: the one of the route to other hosts")


_EXCEPTION = {"text": Param(str, "", "the text of the exception")}
_SLOW = {"seconds": Param(float, 0.5, "seconds by which each step is longer", 0.0, 600.0)}
_CLOCK = {"seconds": Param(float, 3600.0, "seconds to jump; backwards if negative", -1e8, 1e8)}
_NAN = {"steps": Param(int, 1, "number of steps", 1, 1_000_000)}
_LOSS = {"percent": Param(int, 10, "percentage of lost packets", 1, 100), "peers": _PEERS}
_DELAY = {"milliseconds": Param(float, 100.0, "milliseconds of delay", 0.1, MAX_DELAY), "device": _DEVICE}
_BANDWIDTH = {"megabits": Param(float, 10.0, "megabits a second", 0.01, 1e6), "device": _DEVICE}
_MEMORY = {
    "megabytes": Param(int, 256, "megabytes that the process may allocate in addition", 1, 65536),
    "bound": Param(str, "rlimit", "the mechanism of the bound", choices=("rlimit", "cgroup")),
}
_DISK = {
    "folder": Param(str, "", "a folder on the file system, such as that of the checkpoints"),
    "most": Param(int, 1024, "megabytes to write at most; a file system with more room is refused", 1, 1 << 20),
}
_CHECKPOINTS = {
    "folder": Param(str, "", "the folder of the checkpoints"),
    "bytes": Param(int, 64, "bytes to change in each file of the checkpoint", 1, 1 << 20),
    "seed": Param(int, 0, "seed of the choice of bytes", 0, 1 << 53),
}

_TRAINING, _HOST, _GATEWAY = Place

_KINDS = (
    FaultKind("sigkill", _HOST, "The process is killed, as the kernel does when memory is short.", ends=True),
    FaultKind(
        "sigstop", _HOST, "The process hangs: it is stopped, and continues afterwards.", {}, 5.0, silences=True
    ),
    FaultKind("segfault", _TRAINING, "The process reads an invalid address, and crashes.", ends=True),
    FaultKind("exception", _TRAINING, "A step raises InjectedFault.", _EXCEPTION, ends=True),
    FaultKind(
        "out_of_memory",
        _TRAINING,
        "A step allocates all the memory that it may have, bounded by an rlimit (it raises MemoryError) or by a "
        "cgroup (the kernel kills the process).",
        _MEMORY,
        ends=True,
    ),
    FaultKind(
        "gil_deadlock",
        _TRAINING,
        "A C function waits and holds the interpreter's lock: no thread of the process runs, heartbeats end.",
        lasts=10.0,
    ),
    FaultKind(
        "pg_abort",
        _TRAINING,
        "The process groups of torch.distributed are aborted, as after the loss of a peer.",
    ),
    FaultKind("slow_rank", _TRAINING, "Each step takes longer.", _SLOW, 10.0),
    FaultKind(
        "clock_jump", _TRAINING, "time.time() of the process jumps; the monotonic clock goes on.", _CLOCK, 10.0
    ),
    FaultKind(
        "nan_loss", _TRAINING, "The outputs of the model, and so the loss, are NaN for some steps.", _NAN, 60.0
    ),
    FaultKind(
        "lost_host",
        _HOST,
        "The worker is killed with all its processes; then it is restarted. In Kubernetes its pod is deleted.",
        lasts=5.0,
        ends=True,
        silences=True,
        of="host",
    ),
    FaultKind(
        "partition",
        _HOST,
        "No packets pass between the host and others.",
        {"peers": _PEERS},
        5.0,
        silences=True,
        of="host",
    ),
    FaultKind(
        "link_down",
        _HOST,
        "A network device of the host is down.",
        {"device": _DEVICE},
        5.0,
        silences=True,
        of="host",
    ),
    FaultKind("loss", _HOST, "Packets to the host are lost.", _LOSS, 10.0, of="host"),
    FaultKind("delay", _HOST, "Packets of the host are delayed.", _DELAY, 10.0, of="host"),
    FaultKind(
        "bandwidth", _HOST, "The bandwidth of a network device of the host is limited.", _BANDWIDTH, 10.0, of="host"
    ),
    FaultKind("full_disk", _HOST, "The file system of a folder is full.", _DISK, 10.0, of="host"),
    FaultKind(
        "corrupt_checkpoint",
        _HOST,
        "Bytes of the newest checkpoint in a folder are changed, and restored afterwards.",
        _CHECKPOINTS,
        30.0,
        of="host",
    ),
    FaultKind("dead_driver", _GATEWAY, "The driver of a session is killed.", of="session"),
    FaultKind("dead_gateway", _GATEWAY, "The gateway is killed.", of="gateway"),
    FaultKind("dead_weaver", _GATEWAY, "The weaver is killed; the gateway starts another one.", of="weaver"),
)

FAULTS: Mapping[str, FaultKind] = MappingProxyType({kind.name: kind for kind in _KINDS})  # the kinds by name


def fault_kind(name: Any) -> FaultKind:
    """Return the kind of fault with a name."""
    if isinstance(name, str) and name in FAULTS:
        return FAULTS[name]
    near = difflib.get_close_matches(str(name), FAULTS, 1)
    advice = f"did you mean {near[0]}?" if near else f"there are {', '.join(FAULTS)}"
    raise WrongArguments(f"there is no fault {name!r:.80}; {advice}")


def check_duration(kind: FaultKind, duration: Any) -> float | None:
    """Return the seconds that a fault lasts: the given ones, or the default of its kind."""
    if duration is None:
        return kind.lasts
    if type(duration) not in (int, float) or not 0 < duration <= MAX_DURATION:
        raise WrongArguments(
            f"{kind.name} lasts more than 0 and at most {MAX_DURATION:g} seconds, not {duration!r:.80}"
        )
    if kind.lasts is None:
        raise WrongArguments(
            f"{kind.name} is over at once: it lasts no time, and {duration:g} s cannot be asked for"
        )
    return float(duration)


def check_params(kind: FaultKind, params: Any) -> Mapping[str, Any]:
    """Return all parameters of a fault: the given ones, and defaults for the others."""
    if not isinstance(params, Mapping):
        raise WrongArguments(f"the parameters of {kind.name} are names and values, not {params!r:.80}")
    for given in params:
        if given not in kind.params:
            known = ", ".join(kind.params) or "none"
            raise WrongArguments(f"{kind.name} has no parameter {given!r:.80}; it has {known}")
    checked = {
        name: param.check(kind.name, name, params.get(name, param.default)) for name, param in kind.params.items()
    }
    if checked.get("folder") == "":
        raise WrongArguments(f"{kind.name} needs a folder: {kind.params['folder'].what}")
    return checked


def check_fault(name: Any, params: Any, duration: Any = None) -> tuple[FaultKind, Mapping[str, Any], float | None]:
    """Return a fault's kind, all of its parameters and the seconds that it lasts, or raise `WrongArguments`."""
    kind = fault_kind(name)
    return kind, check_params(kind, params), check_duration(kind, duration)
