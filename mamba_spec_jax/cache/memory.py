"""Whether an allocation can fit, asked before it is made."""

import os
from collections.abc import Mapping

import jax
import jax.numpy as jnp


def device_bytes() -> int | None:
    """Bytes the default device could still give: free memory of a GPU, all memory of a CPU; None if it does not say.

    Under `jax.set_mesh` an array is on every device of the mesh: the one with least room decides.
    """
    with jax.ensure_compile_time_eval():
        devices = jnp.zeros(()).devices()
    known = [size for size in map(_free_bytes, devices) if size is not None]
    return min(known, default=None)


def _free_bytes(device: jax.Device) -> int | None:
    stats = device.memory_stats()
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"] - stats.get("bytes_in_use", 0)
    if device.platform != "cpu" or "SC_PHYS_PAGES" not in os.sysconf_names:
        return None
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def require_fits(what: str, parts: Mapping[str, int], remedy: str) -> None:
    """Raises MemoryError naming parts and remedy if they cannot fit; inside a trace, which allocates nothing, never."""
    if isinstance(jnp.zeros(()), jax.core.Tracer):
        return
    needed, available = sum(parts.values()), device_bytes()
    if available is not None and needed > available:
        listed = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts.items())
        raise MemoryError(
            f"{what} needs {format_bytes(needed)} ({listed}), but the device has {format_bytes(available)}: "
            f"use {remedy}"
        )


def format_bytes(size: int) -> str:
    """`1.5 GiB` for 1610612736."""
    value, units = float(size), ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]
    while value >= 1024 and len(units) > 1:
        value, units = value / 1024, units[1:]
    return f"{value:.0f} {units[0]}" if units[0] == "B" else f"{value:.1f} {units[0]}"
