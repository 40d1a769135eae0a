"""What the token mixers compute, one token and one row at a time, in float64 NumPy."""

import numpy as np


def silu(x):
    return x / (1 + np.exp(-x))


def causal_conv1d(window, inputs, weight, bias):
    """silu of the convolution of one row `[T, C]` after its window `[W-1, C]`, and the window it leaves."""
    outputs = []
    for token in inputs:
        window = np.concatenate([window, token[None]])
        total = (window * weight).sum(0) + (0 if bias is None else bias)
        outputs.append(silu(total))
        window = window[1:]
    return np.array(outputs).reshape(inputs.shape), window


def ssm(h, x, dt, B, C, A, D):
    """Outputs `[T, H, P]` and states `[T, H, P, N]` of one row: x `[T, H, P]`, dt `[T, H]`, B and C `[T, G, N]`."""
    heads, outputs, states = h.shape[0], [], []
    for x_t, dt_t, B_t, C_t in zip(x, dt, B, C, strict=True):
        y = np.empty_like(x_t)
        h = h.copy()
        for head in range(heads):
            group = head // (heads // len(B_t))
            h[head] = np.exp(dt_t[head] * A[head]) * h[head] + dt_t[head] * np.outer(x_t[head], B_t[group])
            y[head] = h[head] @ C_t[group] + D[head] * x_t[head]
        outputs.append(y)
        states.append(h)
    return np.array(outputs), np.array(states)


def mamba2(linear, weights, window, h, xBC, dt):
    """One row of a `Mamba2` layer: outputs and states `[T, ...]` as `ssm`'s, and the window left behind."""
    weight, dt_bias, A_log, D = (
        np.asarray(getattr(weights, name), np.float64) for name in ("conv_weight", "dt_bias", "A_log", "D")
    )
    bias = None if weights.conv_bias is None else np.asarray(weights.conv_bias, np.float64)
    mixed, window = causal_conv1d(window, xBC, weight, bias)
    inner, between = linear.heads * linear.head_dim, linear.groups * linear.state
    x, B, C = np.split(mixed, [inner, inner + between], axis=1)
    dt = np.clip(np.logaddexp(0, dt + dt_bias), *linear.dt_limits)
    grouped = (-1, linear.groups, linear.state)
    x = x.reshape(-1, linear.heads, linear.head_dim)
    outputs, states = ssm(h, x, dt, B.reshape(grouped), C.reshape(grouped), -np.exp(A_log), D)
    return outputs, states, window


def attention(query, keys, values, scale):
    """One row: query `[T, Hq, Dh]`, which is the last T of keys and values `[T', Hkv, Dh]`."""
    T, heads, _ = query.shape
    total, kv_heads, _ = keys.shape
    output = np.empty_like(query)
    for t in range(T):
        seen = total - T + t + 1
        for head in range(heads):
            kv = head // (heads // kv_heads)
            scores = scale * keys[:seen, kv] @ query[t, head]
            weights = np.exp(scores - scores.max())
            output[t, head] = weights @ values[:seen, kv] / weights.sum()
    return output
