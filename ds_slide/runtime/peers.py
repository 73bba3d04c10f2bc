"""Notices at once when the process of another rank has ended without a word: killed, out of memory, crashed.

Each rank holds a socket to each of the others; the kernel closes those of a process that ends, however it ends.
"""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Callable, Mapping


class PeerWatch:
    """A thread that sleeps until one of the `connections` (by rank) is closed at its other end; then it calls
    `ended(rank)`, once for each."""

    def __init__(self, connections: Mapping[int, socket.socket], ended: Callable[[int], None]) -> None:
        self._ranks = {connection.fileno(): rank for rank, connection in connections.items()}
        self._ended = ended
        self._stop, self._stopped = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="ds_slide-peers", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread. The connections are the caller's to close, after this."""
        self._stop.close()
        if threading.current_thread() is not self._thread:
            self._thread.join()
            self._stopped.close()

    def _run(self) -> None:
        poll = select.poll()
        for descriptor in (*self._ranks, self._stopped.fileno()):
            poll.register(descriptor, select.POLLIN)
        while True:
            for descriptor, _ in poll.poll():
                if descriptor not in self._ranks:
                    return
                poll.unregister(descriptor)  # nobody sends anything: it is the end
                self._ended(self._ranks[descriptor])
