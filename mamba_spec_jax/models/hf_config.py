"""Typed reading of a `config.json`: every refusal names the key, what it holds and what was expected."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

_REQUIRED = object()
# The largest integer under a key with this word in its name: above what published checkpoints have, and small enough
# that lists of so many layers, experts or rows of heads are no burden.
_MOST = {
    "position": 2**31 - 1,
    "window": 2**31 - 1,
    "length": 2**31 - 1,
    "vocab": 2**24,
    "layers": 2**10,
    "experts": 2**13,
    "heads": 2**12,
    "head_dim": 2**12,
    "state": 2**12,
}
_MOST_OF_OTHERS = 2**20
_TAGGED_FLOATS = {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}


class HFConfig:
    """The keys of one JSON file in Hugging Face's form.

    Attributes:
        values: the parsed file.
        source: what messages call it.
        names: what the file calls a key of `values`, where that is another name.
    """

    def __init__(self, values: Mapping[str, Any], source: str = "config.json", names: Mapping[str, str] | None = None):
        if not isinstance(values, Mapping):
            raise ValueError(f"{source} holds a {type(values).__name__}, expected an object")
        self.values = values
        self.source = source
        self.names = names or {}

    def renamed(self, aliases: Iterable[tuple[str, str]]) -> "HFConfig":
        """The same keys, where a key `other` of a pair `(other, name)` replaces what is under `name`."""
        found = {other: name for other, name in aliases if other in self.values}
        if not found:
            return self
        kept = {key: value for key, value in self.values.items() if key not in found}
        replaced = {name: self.values[other] for other, name in found.items()}
        return HFConfig(kept | replaced, self.source, {name: other for other, name in found.items()})

    def has(self, key: str) -> bool:
        """Whether the key is there and not null."""
        return self.values.get(key) is not None

    def nested(self, key: str) -> "HFConfig":
        """The object under `key`, empty if there is none."""
        return HFConfig(self.values.get(key) or {}, f"{self.source}: {key}")

    def integer(self, key: str, default: Any = _REQUIRED, *, minimum: int) -> int:
        value = self._get(key, default)
        if not _is_integer(value) or value < minimum:
            raise self.refusal(key, f"an integer of at least {minimum}")
        most = next((limit for part, limit in _MOST.items() if part in key), _MOST_OF_OTHERS)
        if value > most:
            raise self.refusal(key, f"an integer of at most {most}")
        return value

    def number(self, key: str, default: Any = _REQUIRED, *, positive: bool = False) -> float:
        value = self._get(key, default)
        if not _is_finite(value) or (positive and value <= 0):
            raise self.refusal(key, "a positive finite number" if positive else "a finite number")
        return float(value)

    def numbers(self, key: str, default: tuple[float, ...]) -> tuple[float, ...]:
        """As many finite numbers as `default` has, which null means too."""
        value = self._get(key, default) if self.has(key) else default
        if not isinstance(value, list | tuple) or len(value) != len(default) or not all(map(_is_finite, value)):
            raise self.refusal(key, f"{len(default)} finite numbers")
        return tuple(map(float, value))

    def flag(self, key: str, default: Any = _REQUIRED) -> bool:
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self.refusal(key, "true or false")
        return value

    def choice(self, key: str, default: Any, allowed: Iterable[Any]) -> Any:
        value, allowed = self._get(key, default), tuple(allowed)
        if value not in allowed:
            raise self.refusal(key, f"one of {', '.join('null' if item is None else str(item) for item in allowed)}")
        return value

    def choices(self, key: str, allowed: Iterable[str]) -> tuple[str, ...]:
        """A list of strings, each among `allowed`."""
        value, allowed = self._get(key, _REQUIRED), tuple(allowed)
        if not isinstance(value, list | tuple) or any(item not in allowed for item in value):
            raise self.refusal(key, f"a list of {', '.join(allowed)}")
        return tuple(value)

    def limits(self, key: str, default: tuple[float, float]) -> tuple[float, float]:
        """A lower and an upper limit; the upper one may be infinite."""
        value = self._get(key, default)
        pair = [_untag(item) for item in value] if isinstance(value, list | tuple) else []
        if len(pair) != 2 or not _is_finite(pair[0]) or not (_is_finite(pair[1]) or pair[1] == math.inf):
            raise self.refusal(key, "two numbers, of which the second may be infinite")
        low, high = float(pair[0]), float(pair[1])
        if low > high:
            raise self.refusal(key, "two numbers in ascending order")
        return low, high

    def token_ids(self, key: str, default: Any) -> tuple[int, ...]:
        """Token ids: one, a list of them, or none."""
        value = self._get(key, default)
        ids = () if value is None else tuple(value) if isinstance(value, list | tuple) else (value,)
        if not all(_is_integer(token) and token >= 0 for token in ids):
            raise self.refusal(key, "a token id or a list of them")
        return ids

    def refusal(self, key: str, expected: str) -> ValueError:
        """The error to raise for a key that holds something else."""
        return ValueError(f"{self.source}: {self.names.get(key, key)} is {self.values.get(key)!r}, expected {expected}")

    def _get(self, key: str, default: Any) -> Any:
        value = self.values.get(key, default)
        if value is _REQUIRED:
            raise ValueError(f"{self.source}: {key} is missing")
        return value


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_finite(value: Any) -> bool:
    return (_is_integer(value) or isinstance(value, float)) and math.isfinite(value)


def _untag(value: Any) -> Any:
    """transformers writes an infinite float as `{"__float__": "Infinity"}`, which plain JSON cannot say."""
    if isinstance(value, Mapping) and list(value) == ["__float__"]:
        return _TAGGED_FLOATS.get(value["__float__"], value)
    return value
