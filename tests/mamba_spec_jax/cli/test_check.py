"""`mamba-spec check` on every family, and that what a draft changes is found."""

import dataclasses
import json
import shutil
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

import mamba_spec_jax.cli.check as command
from mamba_spec_jax import CommitStrategy, HybridModel, generate, load, plan_memory
from mamba_spec_jax.cli.checking import Verdict, check
from mamba_spec_jax.models.families import FAMILIES
from tests.golden.family_cases import FAMILY_CASES
from tests.golden.weights import draw_all

from ..models.goldens import GOLDEN
from ..tiny import DENSE, random_params

pytestmark = pytest.mark.usefixtures("quick_compilation")

DRAFTS = ["prompt lookup", "all wrong", "all right"]
# Trained-like time steps: states that remember.
CASES = {case.family: case for case in FAMILY_CASES if case.name == "trained_dt"}
END, TEMPLATE = "<|end|>", "{% for m in messages %}{{ m.role[0] + m.content + eos_token }}{% endfor %}"


@pytest.fixture
def checkpoint(request, tmp_path):
    """A family's tiny model, with a tokenizer of a few letters and a chat template."""
    if request.param == "granitemoehybrid":
        folder = shutil.copytree(GOLDEN / "trained_dt", tmp_path / "model")
    else:
        case, folder = CASES[request.param], tmp_path / "model"
        source = GOLDEN / case.family / case.name
        shutil.copytree(source, folder)
        with np.load(source / "golden.npz") as arrays:
            shapes = json.loads(str(arrays["shapes"]))
        save_file(draw_all(shapes, case.seed, case.trained_dt), folder / "model.safetensors")
    letters = {letter: token for token, letter in enumerate("abcdefghijklmnopqrstuvwxyz")}
    tokenizer = Tokenizer(models.BPE(vocab=letters, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END, special=True)])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": END, "chat_template": TEMPLATE}))
    return folder


def test_every_family_has_its_case():
    assert set(CASES) | {"granitemoehybrid"} == set(FAMILIES)


@pytest.mark.parametrize("checkpoint", FAMILIES, indirect=True)
def test_every_family_in_bfloat16(run, checkpoint):
    """256 tokens with every draft rejected, or accepted, are those of plain decoding: nothing drifts apart."""
    prompts = ("--prompt", "abcabcab", "--prompt", "z")
    out, _ = run("check", checkpoint, "--dtype", "bfloat16", "-n", 256, "--drafts", 3, *prompts, "--json")
    report = json.loads(out)
    assert report["passed"]
    assert report["dtype"] == "bfloat16"
    assert list(report["strategies"]) == [strategy.value for strategy in CommitStrategy]
    for strategy in report["strategies"].values():
        assert list(strategy["drafts"]) == DRAFTS
        for drafts in strategy["drafts"].values():
            assert drafts.pop("mean_acceptance_length") >= 1
            assert drafts == {
                "passed": True,
                "first_differences": [None, None],
                "state_differences": {},
                "logprob_difference": 0.0,
            }


@pytest.mark.parametrize("checkpoint", FAMILIES, indirect=True)
def test_every_family_chats(run, checkpoint):
    report = json.loads(run("generate", "--chat", "hello", "--model", checkpoint, "-n", 4, "--drafts", 0, "--json")[0])
    loaded = load(checkpoint)
    prompt = loaded.chat_prompt([{"role": "user", "content": "hello"}])
    assert prompt == [20, 7, 4, 11, 11, 14, 26]
    expected = generate(loaded.model, loaded.params, [prompt], depth=0, max_new=4).tokens[0]
    assert report["tokens"] == expected[: report["new_tokens"]]
    assert report["stop_reason"] == ("max_new" if report["new_tokens"] == 4 else "eos")


def test_without_a_tokenizer_prompts_are_random(run, fails, folder, tmp_path):
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    out, err = run("check", tmp_path, "-n", 8, "--drafts", 2)
    assert err == ""
    rows = [line.split() for line in out.splitlines() if line.rstrip().endswith(" yes")]
    assert [(row[0], " ".join(row[1:3]), row[4:]) for row in rows] == [
        (strategy.value, drafts, ["yes"] * 3) for strategy in CommitStrategy for drafts in DRAFTS
    ]
    assert [float(row[3]) for row in rows if row[1:3] == ["all", "wrong"]] == [1, 1]
    assert [float(row[3]) for row in rows if row[1:3] == ["all", "right"]] == [2.67, 2.67]  # 3, 3 and 2
    assert "granitemoehybrid, 0.01 M parameters: 1 Mamba-2 and 1 attention layers\n" in out
    assert "float32 on CPU; 4 rows of up to 18 tokens, 8 of them new; 2 drafts a step\n" in out
    for part in plan_memory(load(tmp_path).model.config, 4, 18, 3, CommitStrategy.REPLAY).parts:
        assert part in out
    assert out.rstrip().endswith("Nothing differs.")
    line = fails("check", tmp_path, "--prompt", "x")
    assert line == f"--prompt was given, but {tmp_path} has no tokenizer.json to read it with: leave it out"


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
    model = HybridModel.create(DENSE)
    params, prompts = random_params(model), [[1, 2, 3, 1, 2], [7]]
    assert all(verdict.passed for verdict in check(model, params, prompts, 12, 2))
    lookup, wrong, right = check(Mistaken(model), params, prompts, 12, 2)
    assert not wrong.passed
    assert {"mamba.ssm", "mamba.conv"} <= set(wrong.state_differences)
    assert not wrong.same_tokens
    assert [verdict.drafts for verdict in (lookup, wrong, right)] == DRAFTS


def test_weights_that_are_no_numbers_are_found():
    model = HybridModel.create(DENSE)
    params = random_params(model)
    params = {**params, "norm": {"weight": params["norm"]["weight"].replace(jnp.full(12, jnp.nan))}}
    with pytest.raises(ValueError, match="log-probabilities that are not finite: its weights are damaged"):
        next(check(model, params, [[1, 2]], 4, 2))
