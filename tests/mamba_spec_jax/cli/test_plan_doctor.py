"""`mamba-spec plan` and `doctor`, and the one rule that chooses dtypes."""

import json

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from mamba_spec_jax import CommitStrategy, DTypePolicy, load, modes, plan_memory
from mamba_spec_jax.assets import TINY
from mamba_spec_jax.cli.options import Precision
from mamba_spec_jax.cli.runtime import choose_policy, describe
from mamba_spec_jax.models.families import config_from_hf
from pallas_kernels.dispatch import Device, explain


@pytest.mark.parametrize("strategy", [CommitStrategy.SNAPSHOT, CommitStrategy.REPLAY])
def test_plan_is_plan_memory(run, folder, strategy):
    config = config_from_hf(json.loads((folder / "config.json").read_text()))
    expected = plan_memory(config, 3, 100, 5, strategy, DTypePolicy.bfloat16())
    arguments = ("--batch", 3, "--max-len", 100, "--drafts", 4, "--strategy", strategy.value, "--dtype", "bfloat16")
    for model in (folder, folder / "config.json"):
        report = json.loads(run("plan", "--model", model, *arguments, "--json")[0])
        assert report["parts"] == dict(expected.parts)
        assert report["total"] == expected.total
    out, _ = run("plan", "--model", folder, *arguments)
    for name in expected.parts:
        assert name in out
    assert "3 x 100 tokens, 4 drafts, bfloat16" in out
    assert "fits" in out


def test_the_bundled_model_is_the_default(run):
    title, options, *_ = run("plan")[0].splitlines()
    assert (title.strip(), options.strip()) == ("bundled model", "1 x 4096 tokens, 8 drafts, float32")


def test_plan_needs_no_weights(run, fails, folder, tmp_path):
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    assert "total" in json.loads(run("plan", "--model", tmp_path, "--json")[0])
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    assert fails("plan", "--model", tmp_path).startswith("config.json: model_type is 'gpt2', expected one of ")


def test_plan_asks_the_hub_for_the_configuration_alone(run, fails, folder, monkeypatch):
    asked = []

    def download(name, *, allow_patterns, **options):
        asked.append((name, allow_patterns))
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    run("plan", "--model", "someone/model")
    assert asked == [("someone/model", ["config.json"])]

    def unreachable(name, **options):
        raise LocalEntryNotFoundError("no connection\nand more")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    line = fails("plan", "--model", "someone/model")
    assert line == "someone/model is not a folder, and the hub did not give it: no connection"


def test_doctor_says_what_dispatch_chooses(run):
    out, err = run("doctor")
    assert err == ""
    for choice in explain():
        (line,) = [line for line in out.splitlines() if line.split()[:1] == [choice.op]]
        assert line.split()[1] == choice.implementation
        assert choice.reason.split()[0] in line
    for word in ("device", "CPU", "NVIDIA driver", "default dtypes", "float32", "jaxlib", "compiled programs"):
        assert word in out


@pytest.mark.parametrize(
    ("device", "policy"),
    [
        (Device("cpu", "cpu", None), DTypePolicy.float32()),
        (Device("gpu", "Tesla T4", (7, 5)), DTypePolicy.float16()),
        (Device("gpu", "Tesla V100-SXM2-16GB", (7, 0)), DTypePolicy.float16()),
        (Device("gpu", "NVIDIA A100-SXM4-40GB", (8, 0)), DTypePolicy.bfloat16()),
        (Device("gpu", "NVIDIA B200", (10, 0)), DTypePolicy.bfloat16()),
        (Device("gpu", "AMD Instinct MI300X", None), DTypePolicy.bfloat16()),
    ],
)
def test_dtypes_follow_the_device(monkeypatch, device, policy):
    """One rule: what the command line takes by default, and `load` without a policy."""
    monkeypatch.setattr(modes, "target", lambda: device)
    assert choose_policy(Precision.AUTO) == DTypePolicy.for_device() == policy
    assert load(TINY).model.policy == policy
    assert choose_policy(Precision.FLOAT32) == DTypePolicy.float32()
    assert choose_policy(Precision.FLOAT16) == DTypePolicy.float16()
    assert choose_policy(Precision.BFLOAT16) == DTypePolicy.bfloat16()


def test_devices_are_described_in_words():
    assert describe(Device("cpu", "cpu", None)) == "CPU"
    assert describe(Device("gpu", "NVIDIA H200", (9, 0))) == "NVIDIA H200 (compute capability 9.0)"
    assert describe(Device("tpu", "TPU v5e", None)) == "TPU v5e (tpu)"
