"""The protocol between the weaver and the threadlets. Both import this package; it imports neither.

`loom.control.address` is where a threadlet finds the weaver, `loom.control.frame` how frames share a connection.
Each kind of frame is a frozen dataclass with ``to_body`` and ``from_body``; its docstring explains its meaning and
its layout:

- from a threadlet: `ThreadletHello`, `Handlers` and `Bye` in `loom.control.handshake`; `StatusReports`,
  `Heartbeat`, `DeviceReport` and `Stack` in `loom.control.reports`; `TimeAccount` in `loom.control.reports`;
  `Acknowledged` and `FaultRemoved` in `loom.control.commands`;
- to a threadlet: `ThreadletWelcome` and `Refusal` in `loom.control.handshake`; `Stored` and `StackRequest` in
  `loom.control.reports`; `Command` in `loom.control.commands`.

Monarch's messages, which carry everything else in a mesh, do not fit here: Monarch (0.7) numbers the messages of
each sender to each address. A weaver that is killed and restarted begins at one, so that it and the processes that
knew the weaver before never hear each other again, but training has to go on until the weaver is back. A script
that ``torchrun`` started has no Monarch at all.

A threadlet sends status reports again after a reconnect until they are stored, and the weaver sends commands again
until they are acknowledged; each side drops repetitions. ``from_body`` checks a frame once, when it arrives; the
code behind it trusts the frame.
"""
