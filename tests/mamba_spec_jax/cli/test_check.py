"""`mamba-spec check` on every family, and that what a draft changes is found."""

import dataclasses
import json
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import mamba_spec_jax.cli.check as command
from mamba_spec_jax import CommitStrategy, HybridModel, load, plan_memory
from mamba_spec_jax.cli.checking import Verdict, check
from mamba_spec_jax.models.families import FAMILIES

from ..tiny import PURE, random_params
from .families import CASES, write_family

pytestmark = pytest.mark.usefixtures("quick_compilation")

SMALL = ("-n", 8, "--drafts", 2, "--strategy", "replay")
# `qwen3_5_text` is what Qwen3.5's text part is called where it is stored alone.
TEXT_FAMILIES = {family.removesuffix("_text") for family in FAMILIES}
DRAFTS = ["prompt lookup", "all wrong", "all right"]


@pytest.fixture
def nameless(folder, tmp_path):
    """The model without a tokenizer."""
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    return tmp_path


def test_every_family_has_its_case():
    assert set(CASES) | {"granitemoehybrid"} == TEXT_FAMILIES


@pytest.mark.parametrize("family", sorted(TEXT_FAMILIES))
def test_every_family_in_bfloat16(run, family, tmp_path):
    """256 tokens with every draft rejected, or accepted, are those of plain decoding: nothing drifts apart."""
    checkpoint = write_family(family, tmp_path / "model")
    assert load(checkpoint).chat_prompt([{"role": "user", "content": "hello"}]) == [20, 7, 4, 11, 11, 14, 26]
    # A prompt of one token, so that the prefill, which `test_families` covers, is not compiled again.
    few = ("--prompt", "z", "--strategy", "snapshot")
    out, _ = run("check", checkpoint, "--dtype", "bfloat16", "-n", 256, "--drafts", 3, *few, "--json")
    report = json.loads(out)
    assert report["passed"]
    assert report["dtype"] == "bfloat16"
    (snapshot,) = report["strategies"].values()
    lengths = {name: drafts.pop("mean_acceptance_length") for name, drafts in snapshot["drafts"].items()}
    assert lengths == {"prompt lookup": lengths["prompt lookup"], "all wrong": 1, "all right": 4}
    same = {"passed": True, "first_differences": [None], "state_differences": {}, "logprob_difference": 0.0}
    assert list(snapshot["drafts"].values()) == [same] * 3


def test_without_a_tokenizer_prompts_are_random(run, fails, nameless):
    out, err = run("check", nameless, *SMALL)
    assert err == ""
    rows = [line.split() for line in out.splitlines() if line.rstrip().endswith(" yes")]
    assert [(row[0], " ".join(row[1:3]), row[4:]) for row in rows] == [
        ("replay", drafts, ["yes"] * 3) for drafts in DRAFTS
    ]
    assert [row[3] for row in rows[1:]] == ["1.00", "2.67"]  # 3, 3 and 2 tokens
    assert "granitemoehybrid, 0.01 M parameters: 1 Mamba-2 and 1 attention layers\n" in out
    assert "float32 on CPU; 4 rows of up to 18 tokens, 8 of them new; 2 drafts a step\n" in out
    for part in plan_memory(load(nameless).model.config, 4, 18, 3, CommitStrategy.REPLAY).parts:
        assert part in out
    assert out.rstrip().endswith("Nothing differs.")
    line = fails("check", nameless, "--prompt", "x")
    assert line == f"--prompt was given, but {nameless} has no tokenizer.json to read it with: leave it out"


def test_weights_that_are_no_numbers_are_found(fails, nameless):
    weights = load_file(nameless / "model.safetensors")
    save_file(weights | {"model.norm.weight": np.full(8, np.nan, np.float32)}, nameless / "model.safetensors")
    assert fails("check", nameless, *SMALL) == (
        "the model's logits are not numbers, or all of them are -inf: its weights are damaged"
    )


def test_what_differs_is_named_and_fails(run, folder, monkeypatch):
    good = Verdict("prompt lookup", 2.0, [None, None], {}, 0.0)
    bad = Verdict("all wrong", 1.0, [None, 3], {"mamba.ssm": 0.25}, 1e-3)
    monkeypatch.setattr(command, "check_drafts", lambda *_: iter([good, bad]))
    out, _ = run("check", folder, code=1)
    rows = [line.split() for line in out.splitlines() if line.lstrip().startswith("snapshot ")]
    assert rows == [
        ["snapshot", "prompt", "lookup", "2.00", "yes", "yes", "yes"],
        ["snapshot", "all", "wrong", "1.00", "1/2", "2.5e-01", "1.0e-03"],
    ]
    assert "snapshot, all wrong: row 1 differs from token 3 on\n" in out
    assert "replay, all wrong: mamba.ssm differs by up to 2.5e-01\n" in out
    assert out.rstrip().endswith("Speculative decoding differs.")
    report = json.loads(run("check", folder, "--json", code=1)[0])
    assert not report["passed"]
    assert report["strategies"]["replay"]["drafts"]["all wrong"]["state_differences"] == {"mamba.ssm": 0.25}


# That a mistake shows


@dataclasses.dataclass(frozen=True)
class TakesTheLastNode:
    """The mistake that a recurrent state invites: it is left behind all drafts, whether accepted or not."""

    backend: Any

    def update_mamba_state_after_mtp_verify(self, cache, record, last_correct_step_indices):
        T = record.num_tokens
        committed = self.backend.update_mamba_state_after_mtp_verify(cache, record, last_correct_step_indices)
        everything = jnp.where(last_correct_step_indices >= 0, T - 1, -1)
        mistaken = self.backend.update_mamba_state_after_mtp_verify(cache, record, everything)
        return dataclasses.replace(committed, mamba=mistaken.mamba)


@dataclasses.dataclass(frozen=True)
class Mistaken:
    """A model whose commit is `TakesTheLastNode`."""

    model: HybridModel

    @property
    def backend(self):
        return TakesTheLastNode(self.model.backend)

    def __getattr__(self, name):
        return getattr(self.model, name)


def test_a_mistaken_commit_is_found():
    model = HybridModel.create(PURE)
    lookup, wrong, right = check(Mistaken(model), random_params(model), [[5], [7]], 12, 2)
    assert [verdict.drafts for verdict in (lookup, wrong, right)] == DRAFTS
    assert not wrong.passed
    assert not wrong.same_tokens
    assert set(wrong.state_differences) == {"mamba.ssm", "mamba.conv"}
    assert right.same_tokens
