"""The installed program as a process: Ctrl-C at any moment, and a reader of its output that goes away."""

import os
import pty
import select
import signal
import subprocess
import sys
import time

import pytest

PATIENCE = 120  # seconds, on a busy machine


@pytest.fixture
def start(tmp_path):
    """Starts the program with a terminal for stderr; gives the process and what reads that terminal."""
    started = []

    def start_program(*arguments, python=()):
        terminal, end = pty.openpty()
        environment = os.environ | {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "XDG_CACHE_HOME": str(tmp_path)}
        process = subprocess.Popen(
            [sys.executable, *python, "-m", "mamba_spec", *map(str, arguments)],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=end, env=environment,
        )  # fmt: skip
        os.close(end)
        started.append((process, terminal))
        return process, Terminal(terminal)

    yield start_program
    for process, terminal in started:
        process.kill()
        process.wait()
        process.stdout.close()
        os.close(terminal)


class Terminal:
    """What was written to a terminal so far."""

    def __init__(self, descriptor):
        self.descriptor = descriptor
        self.text = ""

    def read_until(self, found):
        """Reads until `found()`, or to the end if that is None."""
        give_up = time.monotonic() + PATIENCE
        while found is None or not found():
            assert time.monotonic() < give_up, self.text[-500:]
            if select.select([self.descriptor], [], [], 0.05)[0]:
                try:
                    piece = os.read(self.descriptor, 4096)
                except OSError:  # Linux: nobody has the other end open
                    piece = b""
                if not piece:
                    assert found is None, f"it ended, having said {self.text[-500:]!r}"
                    return self.text
                self.text += piece.decode()
        return self.text


def assert_ends_quietly(process, terminal):
    process.send_signal(signal.SIGINT)
    asked = time.monotonic()
    assert process.wait(PATIENCE) == 130
    assert time.monotonic() - asked < 5  # not once a program is compiled
    said = terminal.read_until(None)
    assert "Traceback" not in said
    assert "KeyboardInterrupt" not in said
    assert "Aborted" not in said


def test_interrupting_the_imports(start):
    process, terminal = start("doctor", python=("-X", "importtime"))
    terminal.read_until(lambda: " numpy.version" in terminal.text)  # the first of many
    assert_ends_quietly(process, terminal)
    assert "jax._src.api\n" not in terminal.text


def test_interrupting_the_text(start, folder):
    process, terminal = start("generate", "def f(x):", "--model", folder, "-n", 20_000, "--drafts", 0)
    terminal.read_until(lambda: select.select([process.stdout], [], [], 0)[0])
    assert_ends_quietly(process, terminal)
    assert terminal.text.endswith("\x1b[?25h\r\n")  # the cursor is shown again


def test_an_ignored_interrupt_stays_ignored(start):
    """As `nohup` and shells have it for what runs in the background."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        process, _ = start("--version")
    finally:
        signal.signal(signal.SIGINT, before)
    process.send_signal(signal.SIGINT)
    assert process.wait(PATIENCE) == 0


def test_a_reader_that_has_gone_ends_the_program(start):
    process, terminal = start("--help")
    process.stdout.close()
    assert process.wait(PATIENCE) == 141
    assert terminal.read_until(None) == ""
