"""The sockets of the weaver: threadlets over TCP, the gateway and the drivers over a unix socket."""
