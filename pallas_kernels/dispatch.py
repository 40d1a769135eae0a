"""Which implementation runs where: the only place that asks what the device is.

| device                                  | implementation                                                     |
| --------------------------------------- | ------------------------------------------------------------------ |
| CPU, TPU, ROCm, NVIDIA before sm_80     | `xla`                                                              |
| NVIDIA sm_80, sm_86, sm_89, sm_120      | `triton`                                                           |
| NVIDIA sm_90, sm_100                    | `triton` until measured; `mosaic_gpu` where a jax has no Triton    |

Asked while tracing: the device is the one an abstract mesh names (ahead-of-time compilation), else jax's default.
"""

import re
from dataclasses import dataclass
from typing import Any, Literal

import jax

from pallas_kernels import compat

Implementation = Literal["xla", "triton", "mosaic_gpu"]

# What each op has been written for.
OPS: dict[str, tuple[Implementation, ...]] = {
    "state_scatter": ("xla", "triton", "mosaic_gpu"),
    "state_commit": ("xla", "triton", "mosaic_gpu"),
    "selective_state_update": ("xla", "triton"),
    "causal_conv1d_update": ("xla", "triton"),
    "gated_delta_update": ("xla", "triton"),
    "decode_attention": ("xla", "triton"),
}

# An abstract device has a name but no capability. Longer names are tried first.
_CAPABILITIES: dict[str, tuple[int, int]] = {
    "P100": (6, 0),
    "V100": (7, 0),
    "T4": (7, 5),
    "A100": (8, 0),
    "A30": (8, 0),
    "A10": (8, 6),
    "A10G": (8, 6),
    "A40": (8, 6),
    "RTX 3090": (8, 6),
    "L4": (8, 9),
    "L40": (8, 9),
    "L40S": (8, 9),
    "RTX 4090": (8, 9),
    "H20": (9, 0),
    "H100": (9, 0),
    "H200": (9, 0),
    "GH200": (9, 0),
    "B200": (10, 0),
    "GB200": (10, 0),
    "B300": (10, 3),
    "GB300": (10, 3),
    "RTX 5090": (12, 0),
    "RTX PRO 4500": (12, 0),
    "RTX PRO 5000": (12, 0),
    "RTX PRO 6000": (12, 0),
}
_KIND = re.compile(r"\b(" + "|".join(sorted(map(re.escape, _CAPABILITIES), key=len, reverse=True)) + r")\b")


@dataclass(frozen=True)
class Device:
    """platform: "cpu", "gpu", ...; kind: its name; capability: CUDA compute capability, None off NVIDIA."""

    platform: str
    kind: str
    capability: tuple[int, int] | None

    def __str__(self) -> str:
        if self.capability is None:
            return f"{self.kind} ({self.platform}, no CUDA compute capability)"
        return f"{self.kind} ({self.platform}, compute capability {self.capability[0]}.{self.capability[1]})"


@dataclass(frozen=True)
class Choice:
    """The implementation of one op on one device, and why."""

    op: str
    implementation: Implementation
    device: Device
    reason: str


def target() -> Device:
    """The device that a function traced now will run on."""
    abstract = compat.abstract_device()
    if abstract is not None:
        return _from_abstract(abstract)
    config: Any = jax.config
    default = config.jax_default_device
    if default is None:
        return of_device(jax.devices()[0])
    return of_device(jax.devices(default)[0] if isinstance(default, str) else default)


def of_device(device: Any) -> Device:
    """What dispatch knows a `jax.Device` by."""
    # ROCm devices report an architecture name ("gfx942") in the same attribute.
    capability = re.fullmatch(r"(\d+)\.(\d+)", str(getattr(device, "compute_capability", "")))
    numbers = (int(capability.group(1)), int(capability.group(2))) if capability else None
    return Device(device.platform, device.device_kind, numbers)


def resolve(op: str, implementation: Implementation | None, interpret: bool = False) -> Choice:
    """Checks a named implementation against the device, or chooses one.

    ValueError for a name that does not exist; NotImplementedError for one that the device, or this jax, cannot run.
    """
    if implementation is not None and implementation not in OPS[op]:
        raise ValueError(f"{op}: implementation is {implementation!r}; expected None or one of {', '.join(OPS[op])}")
    device = target()
    if interpret:
        return Choice(op, _interpretable(op, implementation), device, "interpreted, for tests")
    if implementation is None:
        return _choose(op, device)
    lacks = _lacks(implementation, device)
    if lacks is not None:
        raise NotImplementedError(
            f"{op}: implementation {implementation!r} cannot run on {device}: {lacks}; pass implementation=None to let "
            f"the device decide ({_choose(op, device).implementation!r} here), or interpret=True to test it slowly"
        )
    return Choice(op, implementation, device, "named by the caller")


def explain() -> tuple[Choice, ...]:
    """For every op, what implementation=None means on this device, and why."""
    device = target()
    return tuple(_choose(op, device) for op in OPS)


def _choose(op: str, device: Device) -> Choice:
    if "triton" in OPS[op] and _lacks("triton", device) is None:
        reason = "the Triton backend runs here"
        if _lacks("mosaic_gpu", device) is None:
            reason += "; Mosaic GPU would too, and has not been measured faster"
        return Choice(op, "triton", device, reason)
    if "mosaic_gpu" in OPS[op] and _lacks("mosaic_gpu", device) is None:
        return Choice(op, "mosaic_gpu", device, f"jax {compat.JAX_VERSION} has no Triton backend")
    return Choice(op, "xla", device, f"the GPU kernels cannot run here: {_lacks('triton', device)}")


def _lacks(implementation: Implementation, device: Device) -> str | None:
    """What keeps an implementation from running on a device; None if nothing does."""
    if implementation == "triton":
        if device.capability is None or device.capability < (8, 0):
            return "the Triton backend needs an NVIDIA GPU of compute capability 8.0 or newer"
        if compat.triton is None:
            return f"jax {compat.JAX_VERSION} has no Triton backend"
    if implementation == "mosaic_gpu":
        if device.capability is None or device.capability[0] not in (9, 10):
            return "the Mosaic GPU backend needs an NVIDIA GPU of compute capability 9.x or 10.x"
        if compat.mosaic_gpu is None:
            return f"jax {compat.JAX_VERSION} has no Mosaic GPU backend"
    return None


def _interpretable(op: str, implementation: Implementation | None) -> Implementation:
    if implementation is None or implementation == "xla":
        raise ValueError(
            f"{op}: interpret=True interprets a GPU kernel; implementation is {implementation!r}, expected 'triton' or "
            "'mosaic_gpu'"
        )
    missing = compat.triton is None if implementation == "triton" else compat.mosaic_interpreter() is None
    if missing:
        raise NotImplementedError(
            f"{op}: jax {compat.JAX_VERSION} cannot interpret {implementation!r} kernels; 'mosaic_gpu' needs jax 0.11 "
            "or newer, 'triton' a jax that still has the Triton backend"
        )
    return implementation


def _from_abstract(device: Any) -> Device:
    kind = _KIND.search(device.device_kind)
    if device.platform == "gpu" and kind is None:
        raise ValueError(
            f"the abstract device {device.device_kind!r} is not in pallas_kernels.dispatch, so its compute capability "
            f"is unknown; known are {', '.join(_CAPABILITIES)}"
        )
    return Device(device.platform, device.device_kind, _CAPABILITIES[kind.group(1)] if kind else None)
