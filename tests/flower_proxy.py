"""A TCP proxy that records every byte in both directions."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field


@dataclass
class Recording:
    """The bytes that went through the proxy so far, a stream per connection and direction. up: from the connecting side."""

    port: int
    up: list[bytearray] = field(default_factory=list)
    down: list[bytearray] = field(default_factory=list)

    def holds(self, text: bytes) -> bool:
        """Whether these bytes went through, in either direction."""
        return any(text in stream for stream in [*self.up, *self.down])

    @property
    def total(self) -> int:
        return sum(map(len, [*self.up, *self.down]))


@contextmanager
def recording(target: int) -> Iterator[Recording]:
    """Forward a free port to the port `target` of this machine, and record the bytes."""
    listener = socket.create_server(("127.0.0.1", 0))
    kept = Recording(listener.getsockname()[1])
    threading.Thread(target=_serve, args=(listener, target, kept), daemon=True).start()
    try:
        yield kept
    finally:
        with suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        listener.close()


def _serve(listener: socket.socket, target: int, kept: Recording) -> None:
    with suppress(OSError):  # the listener is closed
        while True:
            caller = listener.accept()[0]
            try:
                server = socket.create_connection(("127.0.0.1", target))
            except OSError:  # nobody listens: the caller finds its connection closed
                caller.close()
                continue
            for source, sink, streams in ((caller, server, kept.up), (server, caller, kept.down)):
                streams.append(stream := bytearray())
                threading.Thread(target=_pump, args=(source, sink, stream), daemon=True).start()


def _pump(source: socket.socket, sink: socket.socket, stream: bytearray) -> None:
    with suppress(OSError):
        while part := source.recv(1 << 16):
            stream += part
            sink.sendall(part)
    for end in (source, sink):  # when one direction ends, end the other too: HTTP has nothing more to send
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
