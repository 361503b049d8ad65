"""Actors that several scripts use. Their names come from `loom`: where torchmonarch is installed, Monarch's own."""

from __future__ import annotations

import asyncio
import os
import threading
from typing import Any

from loom import (
    Actor,
    Channel,
    concurrent_endpoint,
    context,
    current_actor_name,
    current_rank,
    current_size,
    endpoint,
    get_or_spawn_controller,
    this_host,
    this_proc,
)


class Trouble(Exception):
    """The scripts' own exception, with data."""

    def __init__(self, text: str, number: int) -> None:
        super().__init__(text, number)
        self.number = number


class Counter(Actor):
    def __init__(self, start: int = 0, *, step: int = 1) -> None:
        self.n = start
        self.step = step

    @endpoint
    def add(self, k: int) -> int:
        self.n += k
        return self.n

    @endpoint
    def step_on(self, times: int = 1, *more: int, scale: int = 1) -> int:
        self.n += self.step * scale * (times + sum(more))
        return self.n

    @endpoint
    def value(self) -> int:
        return self.n

    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def nothing(self) -> None:
        return None

    @endpoint
    def echo(self, value: Any) -> Any:
        return value

    @endpoint
    def type_of(self, value: Any) -> tuple[str, str]:
        return type(value).__module__, type(value).__name__

    @endpoint
    def raise_this(self, error: BaseException) -> None:
        raise error

    @endpoint
    def fail_at(self, rank: int) -> int:
        if current_rank().rank == rank:
            raise Trouble("here", rank)
        return current_rank().rank

    @endpoint
    def fail_from(self) -> None:
        try:
            {}["missing"]
        except KeyError as cause:
            raise Trouble("because", 7) from cause

    @endpoint
    def die(self) -> None:
        os._exit(3)

    def not_an_endpoint(self) -> int:
        return self.n


class Note(Actor):
    """Writes down what it is told, in order."""

    def __init__(self) -> None:
        self.lines: list[Any] = []

    @endpoint
    def write(self, line: Any) -> None:
        self.lines.append(line)

    @endpoint
    def write_and_raise(self, line: Any) -> None:
        self.lines.append(line)
        raise Trouble(str(line), len(self.lines))

    @endpoint
    def read(self) -> list[Any]:
        return self.lines


class Where(Actor):
    """Knows where it is."""

    def __init__(self) -> None:
        self.at_birth = dict(current_rank())
        self.size_at_birth = current_size()

    @endpoint
    def rank(self) -> Any:
        return current_rank()

    @endpoint
    def mesh_size(self) -> dict[str, int]:
        return current_size()

    @endpoint
    def birth(self) -> tuple[dict[str, int], dict[str, int]]:
        return self.at_birth, self.size_at_birth

    @endpoint
    def own_rank(self) -> dict[str, int]:
        return dict(context().actor_instance.rank)

    @endpoint
    def mesh_extent(self) -> Any:
        return current_rank().extent

    @endpoint
    def points(self) -> list[Any]:
        return [{"here": current_rank()}, (current_rank(),)]

    @endpoint
    def rank_as(self, kind: type) -> bool:
        return isinstance(current_rank(), kind)

    @endpoint
    def coordinates_of(self, point: Any) -> tuple[str, dict[str, int], int]:
        return type(point).__module__, dict(point), point.rank

    @endpoint
    def names(self) -> tuple[str, str]:
        instance = context().actor_instance
        return instance.name, instance.class_name.rpartition(".")[2]

    @endpoint
    def actor_name(self) -> tuple[bool, bool]:
        name = current_actor_name()
        return isinstance(name, str), name == str(context().actor_instance.actor_id)

    @endpoint
    def creator(self) -> tuple[str, bool]:
        creator = context().actor_instance.creator
        return creator.name, creator.creator is None

    @endpoint
    def proc(self) -> tuple[dict[str, int], dict[str, int], int]:
        return this_proc().sizes, this_proc().host_mesh.sizes, len(this_host())

    @endpoint
    def proc_mesh(self) -> dict[str, int]:
        return context().actor_instance.proc_mesh.sizes


class AsyncCounter(Actor):
    """All of its endpoints are coroutines."""

    def __init__(self, start: int) -> None:
        self.n = start
        self.gate = asyncio.Event()

    @endpoint
    async def add(self, k: int) -> int:
        await asyncio.sleep(0)
        self.n += k
        return self.n

    @endpoint
    async def fail(self) -> None:
        await asyncio.sleep(0)
        raise Trouble("async", self.n)

    @endpoint
    async def sum_of(self, counters: Any, k: int) -> int:
        values = await counters.add.call(k)
        return sum(values.values())

    @endpoint
    async def both(self, one: Any, other: Any) -> list[int]:
        return list(await asyncio.gather(one.add.call_one(1).as_asyncio(), other.add.call_one(2).as_asyncio()))


class Relay(Actor):
    """Calls others."""

    def __init__(self, others: Any = None) -> None:
        self.others = others
        self.made: Any = None

    @endpoint
    def add_all(self, k: int) -> list[int]:
        return list(self.others.add.call(k).get().values())

    @endpoint
    def add_to(self, mesh: Any, k: int) -> list[int]:
        return list(mesh.add.call(k).get().values())

    @endpoint
    def values_of(self, mesh: Any, k: int) -> Any:
        return mesh.add.call(k).get()

    @endpoint
    def fail_through(self, mesh: Any) -> None:
        mesh.raise_this.call_one(KeyError("inner")).get()

    @endpoint
    def catch_through(self, mesh: Any) -> tuple[str, str, str]:
        try:
            mesh.raise_this.call_one(KeyError("inner")).get()
        except Exception as error:  # noqa: BLE001 - its class is the answer
            return type(error).__name__, type(error.exception).__name__, repr(error.exception.args)  # type: ignore[attr-defined]
        return "nothing", "", ""

    @endpoint
    def describe(self, mesh: Any) -> tuple[str, str, dict[str, int]]:
        return type(mesh).__module__, type(mesh).__name__, dict(mesh.sizes)

    @endpoint
    def describe_all(self, meshes: Any) -> list[dict[str, int]]:
        return [dict(mesh.sizes) for mesh in meshes["meshes"]]

    @endpoint
    def spawn_here(self, start: int) -> int:
        self.made = this_proc().spawn("made", Counter, start)
        return self.made.add.call_one(1).get()  # type: ignore[no-any-return]

    @endpoint
    def spawn_on(self, procs: Any, start: int) -> list[int]:
        self.made = procs.spawn("made", Counter, start)
        return list(self.made.add.call(1).get().values())

    @endpoint
    def give(self) -> Any:
        return self.made

    @endpoint
    def give_slice(self, **selection: Any) -> Any:
        return self.others.slice(**selection)

    @endpoint
    def spawn_procs_here(self, count: int) -> tuple[dict[str, int], list[int], bool]:
        procs = this_host().spawn_procs(per_host={"workers": count}, name="nested")
        counters = procs.spawn("nested", Counter, 5)
        values = list(counters.add.call(1).get().values())
        pids = set(counters.pid.call().get().values())
        procs.stop().get()
        return procs.sizes, values, len(pids | {os.getpid()}) == count + 1

    @endpoint
    def give_procs(self) -> Any:
        return context().actor_instance.proc_mesh

    @endpoint
    def controller(self, name: str, start: int) -> int:
        self.made = get_or_spawn_controller(name, Counter, start).get()
        return self.made.add.call_one(1).get()  # type: ignore[no-any-return]


class Parent(Actor):
    """Has a child that dies, and is asked about it."""

    def __init__(self, handles: bool) -> None:
        self.handles = handles
        self.failures: list[str] = []
        self.told = threading.Event()
        self.child: Any = None

    @endpoint
    def lose_child(self) -> None:
        self.child = this_proc().spawn("child", Counter)
        self.child.value.call_one().get()
        self.child.raise_this.broadcast(Trouble("child", 1))

    @endpoint
    def told_of(self) -> list[str]:
        return self.failures

    @endpoint
    def kind_of_failure(self) -> str:
        return self.failures[0] if self.failures else ""

    def __supervise__(self, failure: Any) -> bool:
        self.failures.append(type(failure).__name__)
        return self.handles


class Cleaner(Actor):
    """Says into a file how it was ended."""

    def __init__(self, path: str) -> None:
        self.path = path

    @endpoint
    def ready(self) -> bool:
        return True

    @endpoint
    def fail(self) -> None:
        raise Trouble("cleaner", 1)

    def __cleanup__(self, exc: Any) -> None:
        with open(f"{self.path}.{os.getpid()}", "w") as file:
            file.write("normal" if exc is None else "error")


class Broken(Actor):
    """Its constructor raises."""

    def __init__(self) -> None:
        raise ValueError("cannot be made")

    @endpoint
    def anything(self) -> None: ...


class Gate(Actor):
    """Answers once somebody has opened a named pipe for writing; the script decides when."""

    @endpoint
    def wait(self, pipes: list[str]) -> str:
        with open(pipes[current_rank().rank]) as pipe:
            pipe.read()
        return f"opened {current_rank().rank}"


class Porter(Actor):
    """Sends to ports."""

    limit = 3

    def __init__(self, port: Any = None) -> None:
        self.port = port

    @endpoint(explicit_response_port=True)
    def answer(self, port: Any, value: Any) -> None:
        port.send((current_rank().rank, value))

    @endpoint(explicit_response_port=True)
    def answer_later(self, port: Any) -> None:
        self.port = port

    @endpoint(explicit_response_port=True)
    def refuse(self, port: Any, text: str) -> None:
        port.exception(Trouble(text, 3))

    @endpoint
    def let_go(self, value: Any) -> None:
        self.port.send(value)

    @endpoint
    def send_to(self, port: Any, values: list[Any]) -> int:
        for value in values:
            port.send(value)
        return len(values)

    @endpoint
    def fail_to(self, port: Any, text: str) -> None:
        port.exception(Trouble(text, 5))

    @endpoint
    def rank(self) -> int:
        return int(current_rank().rank)

    @endpoint
    def fail_on(self, rank: int) -> int:
        if current_rank().rank == rank:
            raise Trouble("here", rank)
        return 1

    @endpoint
    def own_channel(self, count: int) -> list[int]:
        port, receiver = Channel.open()
        for number in range(count):
            port.send(number)
        return [receiver.recv().get(timeout=30) for _ in range(count)]

    def plain(self, a: int, b: int = 1) -> int:
        return a + b

    def plain_with_port(self, port: Any, value: Any) -> None:
        port.send(("through the port", value))


class Concurrent(Actor):
    """Handles messages while others wait."""

    def __init__(self) -> None:
        self.open = asyncio.Event()

    @concurrent_endpoint
    async def wait(self, value: int) -> int:
        await self.open.wait()
        return value

    @concurrent_endpoint
    async def fail(self) -> None:
        raise Trouble("concurrently", 6)

    @endpoint
    async def let_go(self) -> None:
        self.open.set()
