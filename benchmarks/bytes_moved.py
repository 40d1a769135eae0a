"""Bytes that every op moves in a verify step, by formula and by counting its kernels' accesses, against the floor.

    python -m benchmarks.bytes_moved                    a table of the formulas, in a second
    python -m benchmarks.bytes_moved --write docs       counts the kernels too (minutes), and remakes docs/bytes_moved.*

Nothing is timed and no GPU is needed. `byte_model.py` has the formulas, `byte_counts.py` the counting.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

from benchmarks import byte_counts, byte_model, bytes_plot
from benchmarks.byte_model import Bytes, ring_length, steady_state
from benchmarks.published import MODELS, Model

TOKENS = (1, 4, 8, 16)
BATCHES = (1, 32, 256)
CONTEXT, MAX_LEN = 4096, 8192
LIMITS = {4: 1.35, 16: 1.6}
COUNTED = ((4, 4), (4, 16), (2, 4))  # bytes of a state's element, T
_MIB = 2**20
_HEADINGS = (
    "model", "state", "S, MiB", "T", "Q", "snapshot", "counted", "replay", "counted", "on trees", "all, of floor",
    "resident",
)  # fmt: skip

Row = tuple[str, ...]


def recurrences(count: bool) -> Iterator[Row]:
    """Verify and commit of a recurrent layer: bytes over S, by strategy."""
    yield _HEADINGS
    for model in MODELS:
        for name, itemsize in (("fp32", 4), ("bf16", 2)):
            S = model.recurrence.state_size * itemsize
            for tokens in TOKENS:
                snapshot, replay, tree = (
                    byte_model.recurrence(model, *which, tokens, itemsize, tree=is_tree)
                    for which, is_tree in ((("snapshot",), False), (("replay",), False), (("replay",), True))
                )
                counted: list[float | None] = [None, None]
                if count and (itemsize, tokens) in COUNTED:
                    counted = [
                        (byte_counts.recurrence(model, strategy, tokens, itemsize).distinct - moved.window) / S
                        for strategy, moved in (("snapshot", snapshot), ("replay", replay))
                    ]
                resident = [byte_model.resident(model, which, tokens, itemsize) for which in ("replay", "snapshot")]
                yield (
                    model.name, name, f"{S / _MIB:.3g}", str(tokens), str(ring_length(tokens)),
                    _ratio(snapshot.state / S), _ratio(counted[0]), _ratio(replay.state / S), _ratio(counted[1]),
                    _ratio(tree.state / S) if tokens > 1 else "-", _ratio(replay.moved / replay.floor),
                    _ratio(resident[0] / resident[1]),
                )  # fmt: skip


def others(count: bool) -> Iterator[Row]:
    """The ops that no strategy changes: KiB of a row and layer."""
    yield "model", "op", "T", "batch", "formula, KiB", "counted", "floor", "of floor"
    for model in MODELS:
        for tokens in TOKENS[1::2]:
            commit = byte_model.commit(model, tokens, 4)
            yield _other(model, "state_commit", tokens, "any", commit,
                         byte_counts.commit(model, tokens, 4).distinct if count else None)  # fmt: skip
            for batch in BATCHES:
                conv = byte_model.convolution(model, tokens, batch)
                counted = None
                if count and batch == BATCHES[-1]:
                    counted = byte_counts.convolution(model, tokens).distinct
                yield _other(model, "causal_conv1d_update", tokens, str(batch), conv, counted)
                attention = byte_model.attention(model, tokens, batch, CONTEXT, MAX_LEN)
                counted = None
                if count and batch == 1:
                    counted = byte_counts.attention(model, tokens, CONTEXT, MAX_LEN).distinct
                yield _other(model, "decode_attention", tokens, str(batch), attention, counted)


def over_limits() -> Iterator[str]:
    """Where replay with an fp32 state moves more than it should."""
    for model in MODELS:
        S = model.recurrence.state_size * 4
        for tokens, limit in LIMITS.items():
            for kind, tree in (("chain", False), ("tree", True)):
                moved = byte_model.recurrence(model, "replay", tokens, 4, tree=tree).state / S
                if moved > limit:
                    yield f"{model.name}, T = {tokens}, {kind}: {moved:.3f} S, more than {limit} S"


def _other(model: Model, op: str, tokens: int, batch: str, moved: Bytes, counted: float | None) -> Row:
    in_kib = [None if value is None else value / 1024 for value in (moved.moved, counted, moved.floor)]
    cells = ["-" if value is None else f"{value:.1f}" for value in in_kib]
    return model.name, op, str(tokens), batch, *cells, _ratio(moved.moved / moved.floor)


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def markdown(rows: Iterator[Row]) -> str:
    """A table, its first row being the headings."""
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], "| " + " | ".join("---" for _ in lines[0].split(" | ")) + " |", *lines[1:]])


def page(count: bool) -> str:
    """docs/bytes_moved.md."""
    missed = list(over_limits())
    cursors = "\n".join(
        f"| {tokens} | {ring_length(tokens)} | {steady.accepted:.2f} | {steady.history:.2f} | {steady.folds:.3f} |"
        for tokens, steady in ((tokens, steady_state(tokens, ring_length(tokens))) for tokens in TOKENS)
    )
    return _PAGE.format(
        cursors=cursors,
        recurrences=markdown(recurrences(count)),
        others=markdown(others(count)),
        missed="\n".join(f"- {line}" for line in missed) if missed else "None.",
        context=CONTEXT,
        max_len=MAX_LEN,
    )


_PAGE = """# Bytes moved

Made by `python -m benchmarks.bytes_moved --write docs`; nothing in it is timed. Bytes of device memory that one row
moves in one layer and one verify step of T tokens. S is the state's size; inputs are 16-bit, gates fp32.

![bytes of a verify step over the state's size](bytes_moved.svg)

## Cursors in steady state

70 % of T tokens are accepted on average, the bonus token included (all of one); a pass folds its history into the state
when `history + 2 T > Q`.

| T | Q | accepted | history read | passes that fold |
| --- | --- | --- | --- | --- |
{cursors}

## Recurrent layers

`snapshot` and `replay` are bytes over S of states, snapshots and ring entries, and of the order that says where each
input lies: the verify pass and the recurrent half of the commit. `on trees` adds putting the accepted path first in
that order, once for all layers; no input moves. `counted` is the same from the addresses of the kernels' loads and
stores (chain, step form), each address once a kernel. `all, of floor` includes what any strategy reads and writes of
the pass's own tokens, over reading the state once and those tokens. `resident` is the memory of replay over that of
snapshots.

{recurrences}

Bounds for an fp32 state (1.35 S at T = 4, 1.6 S at T = 16) that are missed:

{missed}

## The other ops

KiB of one row and layer. Attention is over {context} committed positions in buffers of {max_len}; its floor reads keys
and values once. The convolution's weights are shared by the batch, and left out of what is counted.

{others}
"""


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, metavar="FOLDER", help="count, and write the page and its plot there")
    options = parser.parse_args()
    if options.write is None:
        print(page(count=False))
        return
    options.write.mkdir(exist_ok=True)
    (options.write / "bytes_moved.md").write_text(page(count=True), encoding="utf-8")
    bytes_plot.save(options.write / "bytes_moved.svg")


if __name__ == "__main__":
    main()
