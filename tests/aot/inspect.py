"""What a function compiles to on a target: the program XLA runs, and the machine code of each kernel."""

import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import jax
from jax.sharding import SingleDeviceSharding

from tests.aot.targets import Target

_MOSAIC_PTX = Path(os.environ["MOSAIC_GPU_DUMP_TO"])
_NO_LAUNCH = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast"}


@dataclass(frozen=True)
class Kernel:
    """One kernel's machine code, and what a block of it takes: widths count accesses to global memory by bits each."""

    name: str
    ptx: str
    threads: int
    registers: int
    spill_bytes: int
    shared_bytes: int
    loads: Counter
    stores: Counter


@dataclass(frozen=True)
class Program:
    """One compiled function."""

    launches: list[str]
    copies: int
    temp_bytes: int
    alias_bytes: int
    output_bytes: int
    kernels: list[Kernel] = field(default_factory=list)


def compile_for(target: Target, function, arguments, donate: tuple[str, ...]) -> Program:
    """Compiles `function(**arguments)`, the arguments abstract, for a GPU that is not there."""
    place = SingleDeviceSharding(target.device())
    arguments = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=place), arguments)
    with target.lowering():
        lowered = jax.jit(function, donate_argnames=donate).lower(**arguments)
    for old in _MOSAIC_PTX.iterdir():
        old.unlink()
    with tempfile.TemporaryDirectory(prefix="aot_") as folder:
        compiled = lowered.compile(compiler_options={"xla_dump_to": folder, "xla_dump_emitter_re": "ptx"})
        files = [*sorted(Path(folder).glob("*.ptx")), *sorted(_MOSAIC_PTX.glob("*.ptx"))]
        shared = _shared_at_launch(Path(folder))
        kernels = [_assemble(path, Path(folder), shared) for path in files if ".entry" in path.read_text()]
    memory, hlo = compiled.memory_analysis(), compiled.as_text()
    entry = hlo[hlo.index("\nENTRY ") :]
    operations = re.findall(r"^\s+(?:ROOT )?%\S+ = .*? ([a-z][\w-]*)\(", entry, re.M)
    return Program(
        launches=[name for name in operations if name not in _NO_LAUNCH],
        copies=len(re.findall(r" copy(?:-start)?\(", hlo)),
        temp_bytes=memory.temp_size_in_bytes,
        alias_bytes=memory.alias_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        kernels=kernels,
    )


def occupancy(kernel: Kernel, target: Target) -> float:
    """The warps of a kernel that a multiprocessor holds at once, over those that it could hold.

    A warp takes registers by 256, from one of four parts of 16,384; a block takes 1 KiB of shared memory besides its
    own (CUDA C++ programming guide, compute capabilities).
    """
    warps, most_warps = -(-kernel.threads // 32), target.threads_per_core // 32
    by_registers = 16384 // (256 * -(-kernel.registers // 8)) * 4 // warps
    by_shared = target.shared_per_core // (kernel.shared_bytes + 1024)
    return min(by_registers, by_shared, most_warps // warps, target.blocks_per_core) * warps / most_warps


def _shared_at_launch(folder: Path) -> dict[str, int]:
    """Bytes of shared memory at launch, which a kernel's code does not say; those of Mosaic GPU are nowhere."""
    said = "".join(path.read_text() for path in folder.glob("*.thunk_sequence.txt"))
    return {name: int(size) for name, size in re.findall(r"(\S+) grid: .* shared_memory: (\d+) bytes", said)}


def _assemble(path: Path, folder: Path, shared_at_launch: dict[str, int]) -> Kernel:
    ptx = path.read_text()
    architecture = re.search(r"^\s*\.target\s+(sm_\w+)", ptx, re.M).group(1)
    cubin = folder / (path.name + ".cubin")
    log = _run("ptxas", "-v", f"-arch={architecture}", path, "-o", cubin)
    sass = _run("nvdisasm", "-c", cubin)

    def total(pattern):
        return sum(map(int, re.findall(pattern, log)))

    name, block = (re.search(p, ptx).group(1) for p in (r"\.entry\s+([\w$]+)", r"\.(?:req|max)ntid\s+([\d, ]+)"))
    return Kernel(
        name=name,
        ptx=ptx,
        threads=math.prod(map(int, block.split(","))),
        registers=max(map(int, re.findall(r"Used (\d+) registers", log))),
        spill_bytes=total(r"(\d+) bytes spill stores") + total(r"(\d+) bytes spill loads"),
        shared_bytes=total(r"(\d+) bytes smem") + shared_at_launch.get(name, 0),
        loads=_widths("LDG", sass),
        stores=_widths("STG", sass),
    )


def _widths(operation: str, sass: str) -> Counter:
    """Accesses by width in bits; an instruction without a width moves 32."""
    modifiers = re.findall(rf"\b{operation}((?:\.\w+)*)\s", sass)
    return Counter(int(w.group(1)) if (w := re.search(r"\.[SU]?(8|16|64|128|256)\b", m)) else 32 for m in modifiers)


def _run(tool: str, *arguments) -> str:
    """A CUDA tool's output; from the installed wheels before a toolkit, which may be too old for what jax emits."""
    wheels = [Path(p) / "nvidia" / d / tool for p in sys.path for d in ("cu13/bin", "cuda_nvcc/bin")]
    found = next((str(p) for p in wheels if p.exists()), shutil.which(tool))
    if found is None:
        raise FileNotFoundError(f"{tool} is not installed; install the dependency group aot of pyproject.toml")
    done = subprocess.run([found, *map(str, arguments)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{tool} failed: {done.stderr.strip()[:500]}")
    return done.stdout + done.stderr
