"""`mamba-spec demo` and `bench`: what they measure, write and draw; and that a difference would show."""

import importlib.util
import io
import json

import numpy as np
import pytest
from rich.console import Console

from mamba_spec_jax import StopReason
from mamba_spec_jax.cli.measure import Comparison, Scenario, Timing
from mamba_spec_jax.cli.prompts import NUM_PROMPTS, PromptKind, demo_prompts
from mamba_spec_jax.cli.tables import differences, histogram_table, speed_table
from mamba_spec_jax.speculative.generate import Generation
from mamba_spec_jax.speculative.state import Statistics

pytestmark = pytest.mark.usefixtures("quick_compilation")

SMALL = ("-n", 8, "--repeats", 1, "--batch", 2, "--drafts", 3)


def timing(rows, histogram, seconds):
    statistics = Statistics(
        passes=np.asarray(histogram).sum(axis=1), drafted=np.zeros(len(rows)), histogram=np.asarray(histogram)
    )
    return Timing(Generation(rows, [StopReason.MAX_NEW] * len(rows), statistics), seconds)


PLAIN = timing([[1, 2, 3], [4, 5, 6]], [[3], [3]], seconds=3.0)
SAME = timing([[1, 2, 3], [4, 5, 6]], [[0, 0, 1], [1, 1, 0]], seconds=2.0)
OTHER = timing([[1, 2, 3], [4, 7, 6]], [[0, 0, 1], [0, 0, 1]], seconds=2.0)
SCENARIO = Scenario(PromptKind.EDIT, 2, 0.7)


def printed(renderable):
    console = Console(width=80, file=io.StringIO())
    console.print(renderable)
    return console.file.getvalue()


def test_ratios():
    comparison = Comparison(SCENARIO, 2, PLAIN, SAME)
    assert comparison.plain.tokens_per_second == 2
    assert comparison.speedup == 1.5
    assert comparison.cost_ratio == 1
    assert comparison.speculative.mean_acceptance_length == 2
    assert comparison.speculative.histogram == [1, 1, 1]
    assert comparison.identical
    assert comparison.first_differences == [None, None]
    assert Comparison(SCENARIO, 2, PLAIN, OTHER).cost_ratio == 2


def test_tables_fit_into_80_columns():
    comparisons = [Comparison(SCENARIO, 2, PLAIN, SAME), Comparison(SCENARIO, 2, PLAIN, OTHER)]
    speeds = printed(speed_table(comparisons)).splitlines()
    rows = [line.split() for line in speeds if line.lstrip().startswith("edit")]
    assert rows == [
        ["edit", "2", "temp", "0.7", "2.00", "1.00", "2", "3", "1.50x", "yes"],
        ["edit", "2", "temp", "0.7", "3.00", "2.00", "2", "3", "1.50x", "1/2"],
    ]
    shares = printed(histogram_table(comparisons)).splitlines()
    assert [line.split()[4:] for line in shares if line.lstrip().startswith("edit")] == [
        ["33", "33", "33"],
        ["·", "·", "100"],
    ]
    assert "…" not in "".join(speeds + shares)


def test_a_difference_is_named():
    same, other = (Comparison(SCENARIO, 2, PLAIN, speculative) for speculative in (SAME, OTHER))
    assert printed(differences([same])).strip() == ""
    named = printed(differences([same, other])).strip()
    assert named == "edit, batch 2, temperature 0.7: row 1 differs from token 1 on"


def test_prompts_differ_and_ask_for_what_they_say():
    for kind in PromptKind:
        assert len(set(demo_prompts(kind, NUM_PROMPTS))) == NUM_PROMPTS
    for free, edit, repeat in zip(*(demo_prompts(kind, NUM_PROMPTS) for kind in PromptKind), strict=True):
        assert repeat == free + "\n# again"
        mark, _, old, _, new = edit.removeprefix(free).split()
        assert mark == "#"
        assert old in free
        assert new not in free
        compile(f"if 1:\n{free}" if free.startswith(" ") else free, "prompt", "exec")
    with pytest.raises(ValueError, match=r"batch is 9, expected 1\.\.8"):
        demo_prompts(PromptKind.FREE, 9)


def test_demo(run, folder, tmp_path):
    picture = tmp_path / "demo.png"
    out, err = run("demo", "--model", folder, "--plot", picture, *SMALL)
    assert err == ""
    assert "granitemoehybrid, 0.01 M parameters: 1 Mamba-2 and 1 attention layers\n" in out
    assert "float32 on CPU; 8 tokens a row; prompt lookup drafts 3 a step\n" in out
    rows = [line.split() for line in out.splitlines() if line.rstrip().endswith(" yes")]
    assert [(row[0], row[1], row[2]) for row in rows] == [
        (kind.value, "2", how) for how in ("greedy", "temp") for kind in PromptKind
    ]
    assert "differs from token" not in out
    assert out.count("plain and speculative, the same tokens") == len(PromptKind)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_bench(run, folder, tmp_path):
    arguments = ("bench", "--model", folder, "-t", 0.7, "--prompts", "repeat", *SMALL)
    out, err = run(*arguments, "--drafts", "auto")
    report = json.loads(out)
    assert err == ""
    assert {key: report[key] for key in ("model", "device", "dtype", "mode", "strategy", "max_new_tokens")} == {
        "model": str(folder),
        "device": "CPU",
        "dtype": "float32",
        "mode": "decode",
        "strategy": "snapshot",
        "max_new_tokens": 8,
    }
    assert [result["drafts"] for result in report["results"]] == [3, "auto"]
    for result in report["results"]:
        assert result["identical"]
        assert result["first_differences"] == [None, None]
        plain, speculative = result["plain"], result["speculative"]
        assert result["speedup"] == speculative["tokens_per_second"] / plain["tokens_per_second"]
        histogram = result["acceptance_histogram"]
        assert sum(n * count for n, count in enumerate(histogram, 1)) == 16
        assert result["mean_acceptance_length"] == pytest.approx(16 / sum(histogram))
    file = tmp_path / "bench.json"
    assert run(*arguments, "--output", file) == ("", "")
    assert [result["drafts"] for result in json.loads(file.read_text())["results"]] == [3]


def test_plot_without_matplotlib(fails, folder, tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    line = fails("demo", "--model", folder, "--plot", tmp_path / "x.png")
    assert line == "--plot needs matplotlib, which is not installed: pip install matplotlib"


def test_plot_where_none_can_be_written(fails, folder, tmp_path):
    line = fails("demo", "--model", folder, "--plot", tmp_path / "x.xyz")
    assert line.startswith(f"--plot {tmp_path / 'x.xyz'} does not name a picture, expected a file ending in one of ")
    line = fails("demo", "--model", folder, "--plot", tmp_path / "absent" / "x.png")
    assert line.endswith(f"{tmp_path / 'absent'} is not a folder")
