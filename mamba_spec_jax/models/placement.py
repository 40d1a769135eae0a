"""Where each weight goes: on one device, or spread over a mesh by rules about its name."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding

Rules = Sequence[tuple[str, PartitionSpec]]


def place_all(
    shapes: Mapping[str, tuple[int, ...]], device: Any = None, mesh: Mesh | None = None, rules: Rules | None = None
) -> dict[str, Any]:
    """What `jax.device_put` is to be told of each weight.

    Args:
        shapes: of the weights, by dotted path.
        device: for all of them; None is jax's default.
        mesh: whose devices share them, instead.
        rules: pairs of a regular expression and how the weights are split whose path it occurs in; the first that does
            counts, and a weight of which none does is on every device.

    Raises:
        ValueError: a rule concerns no weight, or splits one that it cannot; arguments that exclude each other.
    """
    if mesh is None:
        if rules is not None:
            raise ValueError("load got rules without a mesh: pass the jax.sharding.Mesh whose axes they name")
        return dict.fromkeys(shapes, device)
    if device is not None:
        raise ValueError("load got both a device and a mesh, expected one of them")
    if any(kind is not AxisType.Auto for kind in mesh.axis_types):
        raise ValueError(
            f"load got a mesh whose axes are {', '.join(kind.name for kind in mesh.axis_types)}, expected Auto ones, "
            "as jax.sharding.Mesh(devices, names) makes them: the compiler spreads the computation, not the model"
        )
    patterns = [(re.compile(pattern), spec) for pattern, spec in rules or ()]
    unused = {pattern.pattern for pattern, _ in patterns}
    placements = {}
    for path, shape in shapes.items():
        pattern, spec = next((rule for rule in patterns if rule[0].search(path)), (None, PartitionSpec()))
        if pattern is not None:
            unused.discard(pattern.pattern)
        placements[path] = _split(path, shape, mesh, spec, "" if pattern is None else pattern.pattern)
    if unused:
        example = ", ".join(list(shapes)[:3])
        raise ValueError(f"no weight is split by the rules {sorted(unused)}: paths are such as {example}")
    return placements


def first_device(device: Any = None, mesh: Mesh | None = None) -> Any:
    """One of the jax devices that the arguments of `place_all` name; None if they name none."""
    if mesh is not None:
        return mesh.devices.flat[0]
    return min(device.device_set, key=str) if isinstance(device, Sharding) else device


def share(shape: tuple[int, ...], place: Any) -> tuple[int, ...]:
    """The shape of what one device holds of a weight."""
    return place.shard_shape(shape) if isinstance(place, Sharding) else shape


def _split(path: str, shape: tuple[int, ...], mesh: Mesh, spec: PartitionSpec, pattern: str) -> NamedSharding:
    try:
        if len(spec) > len(shape):
            raise ValueError(f"it has {len(shape)} axes")
        placement = NamedSharding(mesh, spec)
        placement.shard_shape(shape)
    except ValueError as error:
        raise ValueError(
            f"the rule {pattern!r} cannot split {path} {list(shape)} by {spec} over a mesh of {dict(mesh.shape)}: "
            f"{error}"
        ) from error
    return placement
