"""gpu_check finds what is wrong, leaves a useful report behind, and says truly from which batch on REPLAY pays."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import gpu_draws, gpu_kernels, gpu_strategies
from benchmarks.gpu_compile import compile_all
from benchmarks.gpu_passes import DELTA, SSM
from benchmarks.gpu_report import Report, attempt
from benchmarks.gpu_strategies import FULL, Cell, crossover
from mamba_spec_jax.models import strategy
from mamba_spec_jax.models.strategy import choose_strategy, measurements_of
from mamba_spec_jax.modes import CommitStrategy
from pallas_kernels.dispatch import Device

GPU = Device("gpu", "NVIDIA Imagined-1 80GB", (9, 0))


@pytest.mark.parametrize(
    ("ratios", "least"),
    [
        ({1: [0.9, 1.0], 8: [0.8, 0.9], 256: [0.5, 0.6]}, 1),
        ({1: [0.9, 1.01], 8: [0.8, 0.9], 256: [0.5, 0.6]}, 8),
        ({256: [0.5, 0.6], 1: [0.7, 0.7], 8: [0.8, 1.2]}, 256),
        ({1: [0.9, 0.9], 8: [0.8, 0.9], 256: [0.5, 1.001]}, None),
        ({32: [2.0]}, None),
        ({}, None),
    ],
)
def test_a_crossover_is_never_followed_by_a_loss(ratios, least):
    assert crossover(ratios) == least


def test_a_sweep_notes_a_crossover_only_if_no_cell_failed(monkeypatch):
    """Two kinds of layer, T = 2 and 3; at T = 3 one cell raises, and the others still get their turn."""

    def measured(cell, programs):
        if cell.tokens == 3 and cell.batch == 1:
            raise RuntimeError("out of registers")
        return {"replay_over_snapshot": 1.5 if cell.batch == 1 else 0.5}

    monkeypatch.setattr(gpu_strategies, "_measured", measured)
    monkeypatch.setattr(gpu_strategies, "compile_all", lambda programs: dict.fromkeys(programs))
    sizes = dataclasses.replace(gpu_strategies.QUICK, tokens=(2, 3), batches=(8, 1, 2))
    found = list(gpu_strategies.sweep(sizes))
    assert [result for result in found if "crossover" in result] == [{"T": 2, "crossover": 2}]
    assert sum("error" in result for result in found) == len(sizes.models)
    assert len(found) == 2 * 3 * len(sizes.models) + 1


def report(tmp_path, **options):
    return Report(tmp_path / "report.json", **{"budget": 100.0, "on_gpu": True, "quick": False} | options)


def content(path):
    return json.loads(path.read_text(encoding="utf-8"))


def test_the_installed_report_is_what_auto_reads(tmp_path, monkeypatch):
    monkeypatch.setattr(strategy, "MEASUREMENTS", tmp_path)
    made = report(tmp_path)
    made.run("strategies", lambda: iter([{"T": 4, "crossover": 32}, {"T": 8, "crossover": None}]))
    made.finish()
    made.install(measurements_of(GPU))
    assert content(measurements_of(GPU))["crossovers"] == {"4": 32, "8": None}
    chosen = {(B, T): choose_strategy(B, T, GPU).strategy for B in (31, 32) for T in (4, 8)}
    assert [case for case, which in chosen.items() if which is CommitStrategy.REPLAY] == [(32, 4)]


@pytest.mark.parametrize(
    ("options", "result", "reason"),
    [
        ({"on_gpu": False}, {"T": 4, "crossover": 1}, "no GPU was seen"),
        ({"quick": True}, {"T": 4, "crossover": 1}, "--quick measures nothing"),
        ({}, {"ok": False, "T": 4, "crossover": 1}, "a check failed"),
        ({}, {"T": 4}, "no T was measured to the end"),
    ],
)
def test_what_proves_nothing_is_not_installed(tmp_path, options, result, reason):
    made, path = report(tmp_path, **options), tmp_path / "installed.json"
    made.run("strategies", lambda: iter([result]))
    with pytest.raises(ValueError, match=reason):
        made.install(path)
    assert not path.exists()


def test_a_report_keeps_what_came_before_an_exception_and_the_end_of_the_budget(tmp_path):
    def section():
        yield {"ok": True, "first": 1}
        raise RuntimeError("no such kernel")

    made = report(tmp_path)
    made.run("breaks", section)
    made.run("too late", section, until=0.0)
    sections = content(tmp_path / "report.json")["sections"]
    assert sections["breaks"] == [{"ok": True, "first": 1}, {"ok": False, "error": "RuntimeError: no such kernel"}]
    assert [list(result) for result in sections["too late"]] == [["left_out"]]
    assert not made.passed


def test_programs_that_do_not_compile_fail_alone():
    def broken():
        raise NotImplementedError("not on this device")

    compiled = compile_all({"good": lambda: jax.jit(lambda x: x + 1).lower(jnp.float32(0)), "broken": broken})
    assert compiled["good"]()(jnp.float32(1)) == 2
    found = attempt({"case": "broken"}, lambda: {"made": compiled["broken"]()})
    assert found == {"case": "broken", "ok": False, "error": "NotImplementedError: not on this device"}


EACH_OP = pytest.mark.parametrize(
    ("op", "shape"), gpu_kernels.QUICK.recurrences, ids=lambda value: type(value).__name__
)


@EACH_OP
def test_everything_that_no_row_may_read_is_nan(op, shape):
    shapes = op.shapes(shape, 7, 6, 3, keep="ring", length=8) | op.shapes(shape, 7, 6, 3, keep="snapshots", tree=True)
    given = jax.device_get(gpu_draws.draw(shapes, 1, padding=True))
    live = {int(slot) for slot in given["slots"] if 0 <= slot < 7}
    assert len(live) == 4
    assert np.isnan(given["state"][0]).all()
    assert np.isnan(given["snapshots"]).all()
    for slot in range(7):
        assert np.isnan(given["state"][1, slot]).all() == (slot not in live)
        count = given["ring"].counts[slot]
        assert count + 3 <= 8
        assert (count == 0) or slot in live
        held = given["ring"].order[slot, (given["ring"].starts[slot] + np.arange(count)) % 8]
        for leaf in given["ring"].inputs.values():
            finite = np.isfinite(leaf[:, slot].astype(np.float32)).reshape(2, 8, -1).all(axis=-1)
            assert not finite[0].any()
            assert set(np.flatnonzero(finite[1])) == set(held)
    assert given["ring"].counts.any()


@pytest.mark.parametrize("broken", ["nothing", "outputs", "state", "another layer"])
@EACH_OP
def test_a_kernel_that_is_wrong_anywhere_fails(op, shape, broken):
    right = gpu_kernels._recurrence(op, shape, "step", "ring", False, 2, 7, 6)

    def call(given, implementation, **how):
        found = right.call(given, implementation="xla")
        if implementation == "xla" or broken == "nothing":
            return found
        if broken == "outputs":
            return found | {"outputs": found["outputs"].at[0, 1, 0, 0].add(1)}
        return found | {"state": found["state"].at[right.layer if broken == "state" else 0, 3].set(0.5)}

    case = dataclasses.replace(right, call=call)
    (result,) = gpu_kernels._check([case], gpu_kernels.QUICK, {}, reference=jax.devices()[0])
    assert result["ok"] == (broken == "nothing")
    if broken == "nothing":
        assert result["worst"] == 0
    else:
        assert list(result["wrong"]) == ["['outputs']" if broken == "outputs" else "['state']"]


@pytest.mark.parametrize("batch", FULL.batches)
@pytest.mark.parametrize("model", FULL.models, ids=lambda model: model.name)
def test_cells_are_cold_and_steps_take_turns(model, batch):
    for tokens in FULL.tokens:
        cell = Cell(model, tokens, batch, FULL)
        assert cell.slots % batch == 0
        assert cell.layers * cell.slots * model.recurrence.state_size * 4 >= FULL.cold
        assert 8 <= cell.steps <= 64
        shapes = cell.shapes("replay")
        assert shapes["ring"].length >= 2 * tokens
        assert shapes["state"].shape[:2] == (cell.layers, cell.slots)


def test_both_ops_are_there():
    assert {op.name for op in (SSM, DELTA)} == {model.recurrence.op for model in FULL.models}
