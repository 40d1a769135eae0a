"""The program `mamba-spec`, as it is installed: what has to be arranged before anything else is imported.

It is a module by itself, since importing any part of `mamba_spec_jax` imports jax first, which takes seconds.
"""

import io
import os
import signal
import socket
import sys
import threading
from typing import Any

_INTERRUPTED = 128 + 2  # what shells report of a program that SIGINT ended
_BROKEN_PIPE = 128 + 13  # and SIGPIPE


def main() -> None:
    """Runs the program; Ctrl-C, and a reader of its output that has gone, end it at once and without a word."""
    end_on_interrupt()
    sys.stdout, sys.stderr = (_reopened(stream) for stream in (sys.stdout, sys.stderr))
    from mamba_spec_jax.cli import main as run

    run()


def end_on_interrupt() -> None:
    """Ends the process with code 130 at Ctrl-C, whatever it is doing: importing, compiling, writing.

    Python's own KeyboardInterrupt comes once the main thread runs Python again, a minute later if a program is being
    compiled; inside an import it can come out as any other error; and jax crashes at exit if it was interrupted while
    it compiled. So a thread waits at a socket, to which the signal's number is written when it arrives.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # whoever started this wants it to go on
        return
    receiver, sender = socket.socketpair()
    sender.setblocking(False)
    signal.signal(signal.SIGINT, lambda *_: None)
    signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
    threading.Thread(target=_wait, args=(receiver, sender), daemon=True).start()


def _wait(receiver: socket.socket, sender: socket.socket) -> None:
    """Takes `sender` too, which would be closed if nothing held it."""
    while signal.SIGINT not in receiver.recv(64):
        pass
    if os.isatty(2):
        os.write(2, b"\x1b[?25h\n")  # a progress bar hides the cursor
    os._exit(_INTERRUPTED)


class _Output(io.FileIO):
    """A standard stream."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            os._exit(_BROKEN_PIPE)


def _reopened(stream: Any) -> io.TextIOWrapper:
    """The same stream through `_Output`; a character that the terminal cannot show becomes a question mark."""
    buffer = io.BufferedWriter(_Output(stream.fileno(), "w", closefd=False))
    return io.TextIOWrapper(
        buffer, stream.encoding, "replace", line_buffering=stream.line_buffering, write_through=stream.write_through
    )


if __name__ == "__main__":
    main()
