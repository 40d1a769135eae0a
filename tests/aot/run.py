"""Compiles every case for every target and prints a table; exits non-zero when a promise is broken.

    python -m tests.aot.run [sm_80 sm_90 ...]

Needs the dependency group `aot` and no GPU. Each target has its own process: Mosaic GPU keeps the first architecture it
sees, and a crash in the compiler must not take the others along.
"""

import itertools
import operator
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

from tests.aot import attention, cases, delta_cases, recurrent_cases
from tests.aot.inspect import compile_for, occupancy
from tests.aot.targets import TARGETS
from tests.aot.whole_step import broken_steps

SUITES = (
    cases,
    attention,
    delta_cases,
    recurrent_cases,
)  # each with cases(target), broken_promises(case, program), expected(target)
_HEADINGS = (
    "target", "implementation", "case", "launches", "copies", "temp", "registers", "spills", "occupancy", "loads",
    "stores",
)  # fmt: skip
_WIDTHS = (7, 15, 42, 9, 7, 10, 13, 7, 16, 20, 12)
_ONE = "--one"
_BROKEN = "BROKEN"
_AT_ONCE = 2  # targets
_WHOLE_STEPS = ("sm_90",)


def main(arguments: list[str]) -> int:
    """Runs the targets named, or all; returns the exit status."""
    if arguments[:1] == [_ONE]:
        return _check(arguments[1])
    unknown = [name for name in arguments if name not in TARGETS]
    if unknown:
        print(f"unknown targets {unknown}; known are {', '.join(TARGETS)}", file=sys.stderr)
        return 2
    print(_line(_HEADINGS), flush=True)
    names = arguments or list(TARGETS)
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        runs = dict(zip(names, pool.map(_in_own_process, names), strict=True))
    failed = {name: broken for name, (code, broken) in runs.items() if code}
    for name, broken in failed.items():  # again, since a long log is read from its end
        print(f"{name}:", *broken or ("the process ended early",), sep="\n")
    print(f"broken promises on {', '.join(failed)}" if failed else "every promise kept")
    return 1 if failed else 0


def _in_own_process(name: str) -> tuple[int, list[str]]:
    """The exit status, and each row with a broken promise followed by what was broken."""
    command = [sys.executable, "-m", "tests.aot.run", _ONE, name]
    done = subprocess.run(command, check=False, stdout=subprocess.PIPE, text=True)
    print(done.stdout, end="", flush=True)
    lines = done.stdout.splitlines()
    marked = [_BROKEN in line for line in lines]
    before_marked = [*marked[1:], False]
    return done.returncode, list(itertools.compress(lines, map(operator.or_, marked, before_marked)))


def _check(name: str) -> int:
    broken = 0
    for suite in SUITES:
        todo = list(suite.cases(name))
        for case in todo:
            program = compile_for(TARGETS[name], case.function, case.arguments, case.donate)
            print(_row(name, case, program), flush=True)
            promises = suite.broken_promises(case, program)
            for message in promises:
                print(f"        {_BROKEN}: {message}", flush=True)
            broken += bool(promises)
        if len(todo) != suite.expected(name):
            print(f"        {_BROKEN}: {len(todo)} cases of {suite.__name__} compiled for {name}", flush=True)
            broken += 1
    for step, found in broken_steps(TARGETS[name]) if name in _WHOLE_STEPS else ():
        print(f"{name:7} {step}: {'' if found else 'nothing is copied'}", flush=True)
        for message in found:
            print(f"        {_BROKEN}: {message}", flush=True)
        broken += bool(found)
    return 1 if broken else 0


def _row(target: str, case, program) -> str:
    kernels = program.kernels
    cells = (
        target,
        case.implementation,
        case.name,
        len(program.launches),
        program.copies,
        program.temp_bytes,
        "/".join(str(kernel.registers) for kernel in kernels[:4]),
        sum(kernel.spill_bytes for kernel in kernels),
        "/".join(f"{occupancy(kernel, TARGETS[target]):.0%}" for kernel in kernels[:4]),
        _counts([kernel.loads for kernel in kernels]),
        _counts([kernel.stores for kernel in kernels]),
    )
    return _line(cells)


def _counts(accesses) -> str:
    total = sum(accesses[1:], start=accesses[0]) if accesses else {}
    return " ".join(f"{count}x{width}" for width, count in sorted(total.items(), reverse=True))


def _line(cells) -> str:
    return " ".join(str(cell).ljust(width) for cell, width in zip(cells, _WIDTHS, strict=True)).rstrip()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
