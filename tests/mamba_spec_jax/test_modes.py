"""The static choices."""

import jax.numpy as jnp
import pytest

from mamba_spec_jax.modes import DTypePolicy, ForwardMode


def test_passes_that_leave_the_state_to_a_commit():
    assert [mode for mode in ForwardMode if mode.defers_state] == [ForwardMode.DECODE, ForwardMode.TARGET_VERIFY]


@pytest.mark.parametrize(
    ("policy", "half"),
    [(DTypePolicy.float16(), jnp.float16), (DTypePolicy.bfloat16(), jnp.bfloat16), (DTypePolicy(), jnp.float32)],
)
def test_named_policies_keep_float32_states(policy, half):
    assert [policy.params, policy.activations, policy.conv, policy.kv] == [half] * 4
    assert policy.ssm == jnp.float32


def test_policies_are_hashable_whatever_names_the_dtype():
    assert DTypePolicy.float32() == DTypePolicy() == DTypePolicy(params="float32", ssm=jnp.float32)
    assert len({DTypePolicy(kv="bfloat16"), DTypePolicy(kv=jnp.bfloat16), DTypePolicy()}) == 2


@pytest.mark.parametrize("field", ["params", "activations", "conv", "ssm", "kv"])
def test_only_floating_dtypes(field):
    with pytest.raises(ValueError, match=f"DTypePolicy.{field} is int8, expected a floating dtype"):
        DTypePolicy(**{field: jnp.int8})
