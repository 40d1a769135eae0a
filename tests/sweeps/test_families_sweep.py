"""What every family owes, in the combinations that the default run leaves out.

Not collected by default: `pytest tests/sweeps`.
"""

import itertools

import pytest

from mamba_spec_jax.modes import CommitStrategy
from tests.mamba_spec_jax.models import test_families as families
from tests.mamba_spec_jax.models.goldens import write_checkpoint

EVERY_SWITCH = [name for name in families.CASES if name.endswith("/switches")]
BOTH = CommitStrategy.SNAPSHOT, CommitStrategy.REPLAY
NOT_COMMITTED = [pair for pair in itertools.product(EVERY_SWITCH, BOTH) if pair not in families.COMMITTED]


def made(name, tmp_path):
    return write_checkpoint(families.CASES[name], tmp_path / "model")


@pytest.mark.parametrize("name", [name for name in families.CASES if name not in families.READ])
def test_full_forward_and_chunks(name, tmp_path):
    golden = made(name, tmp_path)
    families.test_full_forward(golden)
    families.test_chunks_of_prompt_the_last_one_token_long(golden)


@pytest.mark.parametrize("name", [name for name in families.CASES if name not in families.DECODED])
def test_prefill_then_token_by_token(name, tmp_path):
    families.test_prefill_then_token_by_token(made(name, tmp_path))


@pytest.mark.parametrize(("name", "strategy"), NOT_COMMITTED)
def test_commit_at_every_accept_length_equals_decoding(name, strategy, tmp_path):
    families.test_commit_at_every_accept_length_equals_decoding(made(name, tmp_path), strategy)


@pytest.mark.parametrize("name", [name for name in EVERY_SWITCH if name not in families.SPECULATED])
def test_speculative_greedy_is_plain_greedy(name, tmp_path):
    families.test_speculative_greedy_is_plain_greedy(made(name, tmp_path))
