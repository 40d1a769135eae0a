"""What each row asks for: the options that calls share, and the arrays that they become."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypedDict, TypeVar

import flax.struct
import numpy as np

from mamba_spec_jax.array_types import Array, Float, Rows, Seeds
from mamba_spec_jax.speculative.draft_policy import DraftPolicy
from mamba_spec_jax.speculative.rows import per_row, seed_rows
from mamba_spec_jax.speculative.sampling import Filters


class RowOptions(TypedDict, total=False):
    """Options with one value for all rows or one for each; none of them makes a call compile again.

    Attributes:
        max_new: tokens to emit, 128 by default.
        min_new: tokens before the one that may stop a row, 0 by default: see `StopConditions`.
        depth_limit: most drafts of a path, which is all of a chain's; as many as a step drafts by default.
        temperature: 0, the default, takes the likeliest token; above it tokens are drawn.
        top_k, top_p, min_p: which likely tokens are drawn from, see `Filters`; 0, 1 and 0, the defaults, are off.
        seeds: of each row's draws, 0..2**32 - 1; a single number, 0 by default, is counted up from row to row. A draw
            depends on seed and position alone.
    """

    max_new: int | Sequence[int]
    min_new: int | Sequence[int]
    depth_limit: int | Sequence[int] | None
    temperature: float | Sequence[float]
    top_k: int | Sequence[int]
    top_p: float | Sequence[float]
    min_p: float | Sequence[float]
    seeds: int | Sequence[int]


class GenerationOptions(RowOptions, total=False):
    """What `generate`, `stream` and the methods of `LoadedModel` take besides the prompts: `RowOptions`, and these.

    Attributes:
        num_drafts: drafts a step, of a tree its nodes; 0 decodes plainly, "auto" lets measured cost and acceptance
            decide; the drafter's `max_drafts` by default.
        logprobs: whether to return each emitted token's log-probability.
        chunk_steps: steps compiled into one program, 16 by default; the host looks at the rows only after each. An
            automatic number of drafts takes fewer at a time where it drafts.
    """

    num_drafts: int | str | DraftPolicy | None
    logprobs: bool
    chunk_steps: int


_Function = TypeVar("_Function", bound=Callable[..., Any])


def named_options(takes: Callable[..., Any]) -> Callable[[_Function], _Function]:
    """For a function that passes its `**options` on to `takes`: its signature names them, with their defaults.

    So `help`, completion and the documentation show every option, though they are written down once. A function whose
    `**options` may hold other names as well keeps them.
    """
    options = {
        name: parameter
        for name, parameter in inspect.signature(takes).parameters.items()
        if name in GenerationOptions.__annotations__ and parameter.kind is parameter.KEYWORD_ONLY
    }

    def decorate(function: _Function) -> _Function:
        signature = inspect.signature(function)
        *own, rest = signature.parameters.values()
        named = [parameter for name, parameter in options.items() if name not in signature.parameters]
        further = [rest] if rest.annotation is Any else []
        function.__signature__ = signature.replace(parameters=[*own, *named, *further])  # type: ignore[attr-defined]
        return function

    return decorate


@flax.struct.dataclass
class Requests:
    """What each row asks for.

    Attributes:
        slots: `[B]` cache slot, -1 for a padding row.
        max_new: `[B]` tokens it may emit.
        min_new: `[B]` tokens before the one that may stop it: see `StopConditions`.
        depth_limit: `[B]` most drafts of a path, which is all of a chain's; 0 decodes plainly inside the same compiled
            step.
        seeds: `[B]` noise of its draws.
        temperature: `[B]`; 0 is greedy.
        filters: which likely tokens are drawn from.
    """

    slots: Rows
    max_new: Rows
    min_new: Rows
    depth_limit: Rows
    seeds: Seeds
    temperature: Float[Array, "B"]
    filters: Filters

    @classmethod
    def create(
        cls,
        batch: int,
        num_drafts: int,
        *,
        max_new: int | Sequence[int] = 128,
        min_new: int | Sequence[int] = 0,
        depth_limit: int | Sequence[int] | None = None,
        temperature: float | Sequence[float] = 0.0,
        top_k: int | Sequence[int] = 0,
        top_p: float | Sequence[float] = 1.0,
        min_p: float | Sequence[float] = 0.0,
        seeds: int | Sequence[int] = 0,
    ) -> "Requests":
        """Checks the options of `batch` rows, row b in slot b: see `RowOptions`.

        Returns:
            The requests as NumPy arrays, `filters` excepted.

        Raises:
            ValueError: for an option that does not fit, and for an option of the draws where no row draws.
        """
        max_new_rows = per_row("max_new", max_new, batch, np.int32, least=0)
        min_new_rows = per_row("min_new", min_new, batch, np.int32, least=0)
        limit_rows = per_row(
            "depth_limit", num_drafts if depth_limit is None else depth_limit, batch, np.int32, least=0
        )
        temperature_rows = per_row("temperature", temperature, batch, np.float32, least=0)
        seeds_rows, filters = seed_rows(seeds, batch), Filters.create(batch, top_k, top_p, min_p)
        if not np.any(temperature_rows > 0):
            _refuse_draws(seeds, seeds_rows, top_k=top_k, top_p=top_p, min_p=min_p)
        if np.any(min_new_rows > max_new_rows):
            raise ValueError(f"min_new {min_new_rows.tolist()} exceeds max_new {max_new_rows.tolist()}")
        slots = np.arange(batch, dtype=np.int32)
        return cls(slots, max_new_rows, min_new_rows, limit_rows, seeds_rows, temperature_rows, filters)  # type: ignore[arg-type]  # of NumPy


def _refuse_draws(seeds: Any, seeds_rows: np.ndarray, **filters: Any) -> None:
    """Raises ValueError for the first option of the draws that is not at its default: greedy rows draw nothing."""
    off = {"top_k": 0, "top_p": 1, "min_p": 0}
    changed = {name: value for name, value in filters.items() if np.any(np.asarray(value) != off[name])}
    if np.any(seeds_rows != seed_rows(0, len(seeds_rows))):
        changed["seeds"] = seeds
    for name, value in changed.items():
        raise ValueError(
            f"{name} is {value}, but every temperature is 0, where the likeliest token is taken and nothing is drawn: "
            f"give a temperature above 0, or leave {name} out"
        )
