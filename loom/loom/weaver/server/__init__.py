"""The weaver's sockets: TCP for threadlets, a unix socket for the gateway and the drivers."""
