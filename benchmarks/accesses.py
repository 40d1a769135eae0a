"""Bytes that a function's kernels move, counted by running their addresses and none of their arithmetic.

Every `pallas_call` of the traced function is walked program by program: what is integer and follows from the arguments
(slots, lengths, cursors, loop bounds, masks, indices) is computed, whatever is floating-point is not, and each load and
store adds the bytes its mask lets through. Two numbers a direction: `issued`, all of them, and `distinct`, each address
once a kernel, which is what must come from memory if a cache keeps what programs share. What XLA does around kernels is
not counted.
"""

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from benchmarks.integers import evaluate


@dataclasses.dataclass
class Direction:
    """Bytes one way: every access, and every address once."""

    issued: int = 0
    distinct: int = 0


@dataclasses.dataclass
class Traffic:
    """Bytes of one array in one kernel."""

    read: Direction = dataclasses.field(default_factory=Direction)
    written: Direction = dataclasses.field(default_factory=Direction)


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One launch: its grid, and the traffic of each array by the name of the argument it came from."""

    name: str
    grid: tuple[int, ...]
    arrays: dict[str, Traffic]

    def total(self, which: str = "distinct") -> int:
        """All bytes, both ways; which: "issued" or "distinct"."""
        return sum(getattr(way, which) for array in self.arrays.values() for way in (array.read, array.written))


def count_accesses(function: Callable, arguments: dict[str, Any], device: str = "NVIDIA H200") -> list[Kernel]:
    """The kernels that `function(**arguments)` launches on a device, in order.

    Args:
        function: traceable; it names a kernel implementation, or lets the device choose one.
        arguments: pytrees of numpy integer arrays, whose values decide what is read, and of `ShapeDtypeStruct`.
        device: kind of GPU, as `pallas_kernels.dispatch` knows it.
    """
    paths, structure = jax.tree_util.tree_flatten_with_path(arguments)
    leaves = [leaf for _, leaf in paths]

    def flat(*leaves):
        return function(**jax.tree.unflatten(structure, leaves))

    abstract = AbstractDevice(device_kind=device, num_cores=132, platform="gpu")
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=abstract)):
        closed = jax.make_jaxpr(flat)(*(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves))
    names = [_name(path) for path, _ in paths]
    values = [
        leaf if isinstance(leaf, np.ndarray) else _Unknown(name) for name, leaf in zip(names, leaves, strict=True)
    ]
    walk = _Walk({id(value): name for name, value in zip(names, values, strict=True)})
    walk.run(closed.jaxpr, closed.consts, values)
    return walk.kernels


@dataclasses.dataclass(frozen=True)
class _Unknown:
    """A value that is not computed, with the name of the array it is, if it is one."""

    name: str | None = None


_NOTHING = _Unknown()


class _Buffer:
    """What a kernel's ref points to."""

    def __init__(self, name: str, shape: tuple[int, ...], dtype: Any, value: Any):
        self.name, self.shape, self.itemsize = name, shape, dtype.itemsize
        self.value = value if isinstance(value, np.ndarray) else None
        self.traffic = Traffic()
        self._touched: dict[str, np.ndarray] = {}

    def access(self, way: str, indices: tuple[np.ndarray, ...], mask: np.ndarray | None) -> None:
        """Counts one load ("read") or store ("written")."""
        place = np.zeros((), np.int64)
        for index, size in zip(indices, self.shape, strict=True):
            place = place * size + index
        place = place[np.broadcast_to(mask, place.shape)] if mask is not None else place.reshape(-1)
        if place.size and not 0 <= place.min() <= place.max() < np.prod(self.shape, dtype=np.int64):
            raise IndexError(f"{self.name} {list(self.shape)} is accessed at {place.min()}..{place.max()}")
        direction = getattr(self.traffic, way)
        direction.issued += place.size * self.itemsize
        touched = self._touched.setdefault(way, np.zeros(np.prod(self.shape, dtype=np.int64), bool))
        touched[place] = True

    def finish(self) -> Traffic:
        for way, touched in self._touched.items():
            getattr(self.traffic, way).distinct = int(np.count_nonzero(touched)) * self.itemsize
        return self.traffic


class _Walk:
    """Evaluates jaxprs as far as integers go."""

    def __init__(self, names: dict[int, str]):
        self.kernels: list[Kernel] = []
        self._names = names  # of the arguments, by id
        self._program: tuple[int, ...] = ()
        self._grid: tuple[int, ...] = ()
        self._steps: dict[int, list] = {}
        self._inside = False  # a kernel

    def run(self, jaxpr: Any, consts: Any, arguments: Any) -> list:
        environment = dict(zip(jaxpr.constvars, map(_constant, consts), strict=True))
        environment |= dict(zip(jaxpr.invars, arguments, strict=True))

        def read(atom):
            return np.asarray(atom.val) if hasattr(atom, "val") else environment.get(atom, _NOTHING)

        for equation, rule in self._relevant(jaxpr):
            results = rule(equation, *map(read, equation.invars))
            environment |= dict(zip(equation.outvars, results, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def _relevant(self, jaxpr: Any) -> list:
        """The equations that may hold an access or an integer, with what evaluates them."""
        if id(jaxpr) not in self._steps:
            named = {
                "jit": self._call, "pjit": self._call, "closed_call": self._call, "custom_jvp_call": self._call,
                "cond": self._cond, "while": self._while, "scan": self._scan, "pallas_call": self._pallas_call,
                "program_id": self._program_id, "num_programs": self._num_programs, "get": self._get,
                "swap": self._swap, "masked_load": self._masked_load, "masked_swap": self._masked_swap,
            }  # fmt: skip
            steps = []
            for equation in jaxpr.eqns:
                name = equation.primitive.name
                if name in named:
                    steps.append((equation, named[name]))
                elif equation.effects:
                    raise NotImplementedError(f"count_accesses does not know the primitive {name}, which has effects")
                elif not all(jnp.issubdtype(out.aval.dtype, jnp.floating) for out in equation.outvars):
                    steps.append((equation, _integers))
                elif not self._inside:
                    steps.append((equation, _named))
            # The jaxpr is kept, so that its id stays its own.
            self._steps[id(jaxpr)] = [jaxpr, steps]
        return self._steps[id(jaxpr)][1]

    def _call(self, equation, *arguments):
        inner = equation.params.get("jaxpr", equation.params.get("call_jaxpr"))
        return self.run(inner.jaxpr, inner.consts, arguments)

    def _cond(self, equation, index, *arguments):
        branches = equation.params["branches"]
        branch = branches[min(max(int(_known(index, "a branch")), 0), len(branches) - 1)]
        return self.run(branch.jaxpr, branch.consts, arguments)

    def _while(self, equation, *arguments):
        condition, body = equation.params["cond_jaxpr"], equation.params["body_jaxpr"]
        first, second = equation.params["cond_nconsts"], equation.params["body_nconsts"]
        ahead, around, carry = arguments[:first], arguments[first : first + second], list(arguments[first + second :])
        while _known(self.run(condition.jaxpr, condition.consts, (*ahead, *carry))[0], "a loop's end"):
            carry = self.run(body.jaxpr, body.consts, (*around, *carry))
        return carry

    def _scan(self, equation, *arguments):
        body, (fixed, carried) = equation.params["jaxpr"], _constants_and_carry(equation.params)
        consts, carry, rows = arguments[:fixed], list(arguments[fixed : fixed + carried]), arguments[fixed + carried :]
        steps = range(equation.params["length"])
        for i in reversed(steps) if equation.params["reverse"] else steps:
            row = (leaf[i] if isinstance(leaf, np.ndarray) else _NOTHING for leaf in rows)
            carry = self.run(body.jaxpr, body.consts, (*consts, *carry, *row))[:carried]
        return carry + [_NOTHING] * (len(equation.outvars) - carried)

    def _program_id(self, equation):
        return [np.int32(self._program[equation.params["axis"]])]

    def _num_programs(self, equation):
        return [np.int32(self._grid[equation.params["axis"]])]

    def _pallas_call(self, equation, *arguments):
        kernel, aliases = equation.params["jaxpr"], dict(equation.params["input_output_aliases"])
        name, grid = _kernel_name(equation), tuple(equation.params["grid_mapping"].grid)
        buffers = [
            _Buffer(self._operand_name(i, value), atom.aval.shape, atom.aval.dtype, value)
            for i, (atom, value) in enumerate(zip(equation.invars, arguments, strict=True))
        ]
        updated = {output: operand for operand, output in aliases.items()}
        for i, out in enumerate(equation.outvars):
            fresh = _Buffer(f"{name} output {i}", out.aval.shape, out.aval.dtype, None)
            buffers.append(buffers[updated[i]] if i in updated else fresh)
        for variable, buffer in zip(kernel.invars, buffers, strict=True):
            if variable.aval.shape != buffer.shape:
                raise NotImplementedError(f"{name}: {buffer.name} is cut by a BlockSpec; only whole arrays are counted")
        self._grid, self._inside = grid, True
        for program in itertools.product(*map(range, grid)):
            self._program = program
            self.run(kernel, (), buffers)
        self._inside = False
        arrays: dict[str, Traffic] = {}
        for buffer in dict.fromkeys(buffers):
            _add(arrays.setdefault(buffer.name, Traffic()), buffer.finish())
        self.kernels.append(Kernel(name, grid, arrays))
        return [_Unknown(buffer.name) for buffer in buffers[len(arguments) :]]

    def _operand_name(self, place: int, value: Any) -> str:
        if isinstance(value, _Unknown):
            return value.name or f"operand {place}"
        return self._names.get(id(value), "indices")  # one that was computed

    def _get(self, equation, buffer, *indices):
        return _load(buffer, *_place(jax.tree.unflatten(equation.params["tree"], indices)), None)

    def _swap(self, equation, buffer, _, *indices):
        return _store(buffer, *_place(jax.tree.unflatten(equation.params["tree"], indices)), None)

    def _masked_load(self, equation, *arguments):
        buffer, transforms, mask, _ = jax.tree.unflatten(equation.params["args_tree"], arguments)
        return _load(buffer, *_place(transforms), mask)

    def _masked_swap(self, equation, *arguments):
        buffer, transforms, _, mask = jax.tree.unflatten(equation.params["args_tree"], arguments)
        return _store(buffer, *_place(transforms), mask)


def _load(buffer, indices, mask):
    mask = None if mask is None else _known(mask, f"the mask of a load from {buffer.name}")
    buffer.access("read", indices, mask)
    if buffer.value is None:
        return [_NOTHING]
    inside = tuple(np.clip(index, 0, size - 1) for index, size in zip(indices, buffer.shape, strict=True))
    return [buffer.value[inside]]


def _store(buffer, indices, mask):
    mask = None if mask is None else _known(mask, f"the mask of a store to {buffer.name}")
    buffer.access("written", indices, mask)
    buffer.value = None
    return [_NOTHING]


def _place(transforms) -> tuple[tuple[np.ndarray, ...]]:
    """One index array a dimension, broadcast against each other."""
    (indexer,) = transforms
    slices = [index for index in indexer.indices if hasattr(index, "start")]
    indices, seen = [], 0
    for index in indexer.indices:
        if not hasattr(index, "start"):
            index = np.asarray(_known(index, "an index"))
            if slices and index.ndim:
                raise NotImplementedError("count_accesses does not mix slices with arrays of indices")
        else:
            seen += 1
            index = _known(index.start, "an index") + np.arange(index.size) * index.stride
            index = index.reshape(-1, *(1,) * (len(slices) - seen))
        indices.append(index.astype(np.int64))
    return (tuple(np.broadcast_arrays(*indices)) if indices else (),)


def _known(value, what: str):
    if isinstance(value, _Unknown):
        raise ValueError(f"count_accesses: {what} depends on a value that is no integer argument")
    return value


def _constant(value):
    return _NOTHING if jnp.issubdtype(value.dtype, jnp.floating) else np.asarray(value)


def _named(equation, *values):
    """Floating-point arrays outside of kernels: what is made from one argument keeps its name."""
    names = {value.name for value in values if isinstance(value, _Unknown)} - {None}
    return [_Unknown(names.pop()) if len(names) == 1 else _NOTHING] * len(equation.outvars)


def _integers(equation, *values):
    if any(isinstance(value, _Unknown) for value in values):
        return [_NOTHING] * len(equation.outvars)
    return evaluate(equation, values)


def _add(total: Traffic, more: Traffic) -> None:
    for way in ("read", "written"):
        for which in ("issued", "distinct"):
            value = getattr(getattr(total, way), which) + getattr(getattr(more, way), which)
            setattr(getattr(total, way), which, value)


def _kernel_name(equation) -> str:
    return str(equation.params.get("name") or equation.params["jaxpr"].debug_info.func_name)


def _name(path) -> str:
    return ".".join(str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key)))) for key in path)


def _constants_and_carry(scan: dict[str, Any]) -> tuple[int, int]:
    """How many of a scan's arguments are constants, and how many its carry; jax 0.12 has them as a tree of three."""
    if "ft_in" in scan:
        constants, carry, _ = scan["ft_in"].unpack()
        return len(constants), len(carry)
    return scan["num_consts"], scan["num_carry"]
