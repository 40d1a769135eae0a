"""`mamba-spec check` with drafts that are certain to be accepted or rejected: every family, strategy and dtype.

Not collected by default: `pytest tests/sweeps`.
"""

import json

import pytest

from mamba_spec_jax.cli import main
from tests.mamba_spec_jax.cli.families import CASES, write_family

PROMPTS = ("a", "bcd", "hello", "zyxwv")  # 4 rows of 5 tokens: rows past the multiple of a vector's width
OPTIONS = [option for prompt in PROMPTS for option in ("--prompt", prompt)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["granitemoehybrid", *sorted(CASES)])
def test_check(family, dtype, tmp_path, capsys):
    checkpoint = write_family(family, tmp_path / "model")
    with pytest.raises(SystemExit) as end:
        main(["check", str(checkpoint), "-n", "24", "--dtype", dtype, *OPTIONS, "--json"])
    report = json.loads(capsys.readouterr().out)
    assert set(report["strategies"]) == {"snapshot", "replay"}
    lengths = {
        strategy: {name: found["mean_acceptance_length"] for name, found in run["drafts"].items()}
        for strategy, run in report["strategies"].items()
    }
    with capsys.disabled():
        print(family, dtype, lengths)
    assert end.value.code == 0
    assert report["passed"], json.dumps(report, indent=1)
    assert all(found["all wrong"] == 1 and found["all right"] == pytest.approx(4.8) for found in lengths.values())
