"""The user function of the op: checks, then one implementation."""

from typing import Any, NamedTuple

import jax

from pallas_kernels import dispatch
from pallas_kernels.arguments import check_dtype, check_layer, check_parents, check_rows, check_shape
from pallas_kernels.causal_conv1d_update import reference, triton
from pallas_kernels.dispatch import Implementation
from pallas_kernels.tree import earlier_parents

_OP = "causal_conv1d_update"


class ConvUpdate(NamedTuple):
    """What a pass returns.

    Attributes:
        y: `[B, T, C]` outputs, in x's dtype.
        conv_state: `[L, S, W-1, C]`, with the windows advanced unless the inputs were recorded.
        conv_inputs: `[L, B, T, C]` with the pass's inputs in its layer; None if it was not given.
    """

    y: jax.Array
    conv_state: jax.Array
    conv_inputs: jax.Array | None = None


def causal_conv1d_update(
    x: jax.Array,
    conv_state: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None = None,
    *,
    layer: int,
    slots: jax.Array,
    num_tokens: jax.Array | None = None,
    conv_inputs: jax.Array | None = None,
    parents: jax.Array | None = None,
    activation: str | None = "silu",
    implementation: Implementation | None = None,
    interpret: bool = False,
) -> ConvUpdate:
    """silu of a depthwise causal convolution over T tokens of each row, continued from a window in a pool.

        y_t = silu(bias + sum_j weight[j] u_{t - (W-1) + j})

    where u is the slot's window, the W-1 inputs before the pass, followed by x; on a tree, by the inputs along the path
    from the root to the token. In the shapes below L is layers, S slots, B rows, T tokens, W conv width, C channels. By
    default the window advances in the pool: prompts and decoding. With `conv_inputs` the pool stays as it is, and the
    inputs are recorded, from which `state_commit` forms the window of any accepted prefix. Inputs are rounded to the
    pool's dtype first, so that a token sees the same neighbours inside a pass and across two; sums are float32. A row
    whose slot is out of range (-1 is the padding index) starts from zeros and advances nothing. Every other byte of a
    buffer stays as it is; when the caller's jit donates the buffers, they are updated in place.

    Args:
        x: `[B, T, C]`.
        conv_state: `[L, S, W-1, C]`, the pool; donate it.
        weight: `[W, C]`, the token's own tap last.
        bias: `[C]` or None.
        layer: which layer of every buffer (static).
        slots: `[B]` int32, the slot of each row.
        num_tokens: `[B]` int32, 0..T, the tokens of each row by which its window advances; T by default.
        conv_inputs: `[L, B, T, C]` in the pool's dtype; donate it. Excludes num_tokens: the commit counts.
        parents: `[B, T]` int32, each node's parent, which comes before it; -1 at a root. None for a chain. Only with
            conv_inputs, as a tree has no last window.
        activation: "silu", or None for the sum as it is (static).
        implementation: "xla", "triton", or None to choose by device.
        interpret: run the named GPU kernel in the interpreter, for tests.

    Returns:
        ConvUpdate(y, conv_state, conv_inputs).

    Raises:
        ValueError: shapes, dtypes or options that do not fit.
        NotImplementedError: a named implementation that the device cannot run.

    Source: `causal_conv1d_update` of causal-conv1d, extended to windows of several tokens and to trees.
    """
    if activation not in ("silu", None):
        raise ValueError(f"{_OP}: activation is {activation!r}, expected 'silu' or None")
    check_shape(_OP, "x", x, ("B", "T", "C"))
    batch, tokens, channels = x.shape
    check_shape(_OP, "weight", weight, ("W", channels))
    width = weight.shape[0]
    if width < 1:
        raise ValueError(f"{_OP}: weight has W = 0 taps, expected 1 or more")
    check_shape(_OP, "conv_state", conv_state, ("L", "S", width - 1, channels))
    if bias is not None:
        check_shape(_OP, "bias", bias, (channels,))
    check_layer(_OP, layer, conv_state.shape[0])
    check_rows(_OP, batch, slots=slots)
    if conv_inputs is not None:
        check_shape(_OP, "conv_inputs", conv_inputs, (conv_state.shape[0], batch, tokens, channels))
        check_dtype(_OP, "conv_inputs", conv_inputs, conv_state.dtype)
        if num_tokens is not None:
            raise ValueError(f"{_OP}: num_tokens advances windows, which conv_inputs leaves to the commit; drop one")
    if parents is not None:
        parents = earlier_parents(check_parents(_OP, parents, batch, tokens))
        if conv_inputs is None:
            raise ValueError(f"{_OP}: a tree has no last window to write; pass conv_inputs with parents")
    if num_tokens is not None:
        check_rows(_OP, batch, num_tokens=num_tokens)
    options: dict[str, Any] = {
        "layer": layer,
        "slots": slots,
        "num_tokens": num_tokens,
        "conv_inputs": conv_inputs,
        "parents": parents,
        "activation": activation,
    }
    choice = dispatch.resolve(_OP, implementation, interpret)
    if x.size == 0:
        return ConvUpdate(x, conv_state, conv_inputs)
    if choice.implementation == "triton":
        return ConvUpdate(*triton.update(x, conv_state, weight, bias, **options, interpret=interpret))
    return ConvUpdate(*reference.update(x, conv_state, weight, bias, **options))
