"""What the weaver and the threadlets say to each other, in one package that both import and that imports neither.

`loom.control.address` is where a threadlet finds the weaver, `loom.control.framing` how frames share a connection.
Each kind of frame is a frozen dataclass with ``to_body`` and ``from_body``, whose docstring says what it means and
how it is laid out:

- from a threadlet: `ThreadletHello`, `Handlers` and `Bye` in `loom.control.introduction`; `StatusReports`,
  `Heartbeat`, `DeviceReport` and `Stack` in `loom.control.reports`; `TimeAccount` in `loom.control.time_account`;
  `Acknowledged` and `FaultRemoved` in `loom.control.commands`;
- to a threadlet: `ThreadletWelcome` and `Refusal` in `loom.control.introduction`; `Stored` and `StackRequest` in
  `loom.control.reports`; `Command` in `loom.control.commands`.

Why not Monarch's messages, which carry everything else in a mesh: Monarch (0.7) numbers the messages of each sender
to each address. A weaver that is killed and started again begins at one, so that processes which knew the one
before never hear it again, nor it them; but training goes on until the weaver is back. A script that ``torchrun``
started has no Monarch at all.

Status reports are sent again after a reconnect until they are stored, and commands until they are acknowledged;
each side drops what it has had before. A frame is checked once, by ``from_body`` when it comes; the code behind
that trusts it.
"""
