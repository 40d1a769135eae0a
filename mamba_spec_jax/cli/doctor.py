"""`mamba-spec doctor`: what this machine is, and what the library will do on it."""

import importlib.metadata
import platform
import re
from pathlib import Path

import jax
from rich import box
from rich.console import Console
from rich.table import Table

from mamba_spec_jax.cache.memory import device_bytes, format_bytes
from mamba_spec_jax.cli.options import Precision
from mamba_spec_jax.cli.runtime import cache_directory, choose_policy, describe
from mamba_spec_jax.models.strategy import choose_strategy
from pallas_kernels.dispatch import explain, target

_PACKAGES = ("mamba-spec-jax", "jax", "jaxlib", "flax", "tokenizers", "safetensors")
_PLUGINS = ("jax-cuda13-plugin", "jax-cuda12-plugin")
_WINDOW = 5  # tokens of a verify pass
_NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")


def doctor() -> None:
    """Show the device, the versions, and which implementation each operation will use and why."""
    console = Console()
    console.print(_machine())
    console.print(_operations())
    console.print(_strategies())


def _machine() -> Table:
    device, memory, policy = target(), device_bytes(), choose_policy(Precision.AUTO)
    table = Table(title="This machine", title_justify="left", title_style="bold", box=box.SIMPLE, show_header=False)
    table.add_column()
    table.add_column(overflow="fold")
    count = jax.device_count()
    table.add_row("device", describe(device) + (f", {count} of them" if count > 1 else ""))
    table.add_row("memory", "not reported" if memory is None else format_bytes(memory))
    table.add_row("NVIDIA driver", _nvidia_driver())
    table.add_row("default dtypes", f"{policy.activations}, SSM states {policy.ssm}")
    table.add_row("compiled programs", str(cache_directory()))
    table.add_row("Python", platform.python_version())
    for package in (*_PACKAGES, *_PLUGINS):
        version = _version(package)
        if version is not None or package not in _PLUGINS:
            table.add_row(package, version or "not installed as a package")
    return table


def _operations() -> Table:
    table = Table(title="Operations", title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    for name in ("operation", "implementation", "why"):
        table.add_column(name)
    for choice in explain():
        table.add_row(choice.op, choice.implementation, choice.reason)
    return table


def _strategies() -> Table:
    table = Table(title="Commit strategy auto", title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    for name in ("batch", "strategy", "why"):
        table.add_column(name)
    for batch in (1, 32, 256):
        choice = choose_strategy(batch, _WINDOW)
        table.add_row(str(batch), choice.strategy.value, choice.reason)
    return table


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _nvidia_driver() -> str:
    """The version that the kernel module reports; that of the CUDA runtime comes with jax's own packages."""
    try:
        text = _NVIDIA_DRIVER.read_text(encoding="utf-8")
    except OSError:
        return "none found"
    found = re.search(r"Kernel Module\D*([\d.]+)", text)
    return found.group(1) if found else text.splitlines()[0]
