"""Ports for the rendezvous stores of child processes: no two processes of a machine are ever given the same one."""

import socket

_held: list[socket.socket] = []


def free_port() -> int:
    """A TCP port that the system gives to nobody else until this process ends.

    A socket stays bound to it without listening. The store's own server may bind beside it, since both allow reuse, but
    the kernel, asked for any free port or in need of one for a connection, passes over it.
    """
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("", 0))
    _held.append(holder)
    return int(holder.getsockname()[1])
