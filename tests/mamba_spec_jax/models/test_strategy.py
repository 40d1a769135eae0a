"""AUTO is SNAPSHOT until somebody has measured, and then what the measurements say."""

import json

import pytest

from mamba_spec_jax.attention.gated_delta import GatedDelta
from mamba_spec_jax.attention.mamba2 import Mamba2
from mamba_spec_jax.models import strategy
from mamba_spec_jax.models.hybrid_lm import HybridModel
from mamba_spec_jax.models.memory import plan_memory
from mamba_spec_jax.models.strategy import choose_strategy, measurements_of
from mamba_spec_jax.modes import CommitStrategy
from pallas_kernels.dispatch import Device

from ..tiny import DENSE, PURE

SNAPSHOT, REPLAY, AUTO = CommitStrategy.SNAPSHOT, CommitStrategy.REPLAY, CommitStrategy.AUTO
GPU = Device("gpu", "NVIDIA Imagined-1 80GB", (9, 0))


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """REPLAY paid from 32 rows on at T = 4, from 8 on at T = 8, and never at T = 16."""
    monkeypatch.setattr(strategy, "MEASUREMENTS", tmp_path)
    path = measurements_of(GPU)
    assert path.name == "nvidia_imagined_1_80gb.json"
    path.write_text(json.dumps({"crossovers": {"4": 32, "8": 8, "16": None}}))


@pytest.mark.parametrize(
    ("batch", "num_tokens", "expected", "reason"),
    [
        (31, 4, SNAPSHOT, "pays from batch 32 on at T = 4"),
        (32, 4, REPLAY, "pays from batch 32 on at T = 4"),
        (31, 7, SNAPSHOT, "pays from batch 32 on at T = 4"),
        (8, 8, REPLAY, "pays from batch 8 on at T = 8"),
        (512, 17, SNAPSHOT, "REPLAY never paid on NVIDIA Imagined-1 80GB at T = 16"),
        (512, 3, SNAPSHOT, "was measured at T = 4, 8, 16, not at 3"),
    ],
)
def test_measurements_decide(measured, batch, num_tokens, expected, reason):
    choice = choose_strategy(batch, num_tokens, GPU)
    assert choice.strategy is expected
    assert reason in choice.reason


def test_without_measurements_it_is_snapshot():
    choice = choose_strategy(512, 4, GPU)
    assert choice.strategy is SNAPSHOT
    assert choice.reason == "nobody has measured REPLAY on NVIDIA Imagined-1 80GB yet"
    assert HybridModel.create(DENSE, strategy=AUTO, batch=512).strategy is SNAPSHOT
    assert plan_memory(PURE, 2, 16, 3, AUTO) == plan_memory(PURE, 2, 16, 3, SNAPSHOT)


def test_bad_arguments():
    with pytest.raises(ValueError, match="choose_strategy got batch=0, expected at least 1"):
        choose_strategy(0, 4)
    with pytest.raises(ValueError, match="AUTO chooses by the batch: pass batch"):
        HybridModel.create(DENSE, strategy=AUTO)
    with pytest.raises(ValueError, match=r"Mamba2 got CommitStrategy\.AUTO: let choose_strategy say which"):
        Mamba2(heads=2, head_dim=2, state=2, groups=1, conv_width=2, strategy=AUTO)
    with pytest.raises(ValueError, match=r"GatedDelta got CommitStrategy\.AUTO"):
        GatedDelta(heads=2, head_dim=2, state=2, key_heads=1, conv_width=2, strategy=AUTO)
