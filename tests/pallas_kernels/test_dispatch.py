"""Which implementation runs where, and what is said where one cannot."""

import functools
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from pallas_kernels import compat, dispatch, state_scatter
from pallas_kernels.dispatch import Device

GPUS = {
    "Tesla T4": (7, 5),
    "Tesla V100-SXM2-16GB": (7, 0),
    "NVIDIA A100-SXM4-40GB": (8, 0),
    "NVIDIA A10G": (8, 6),
    "NVIDIA L4": (8, 9),
    "NVIDIA L40S": (8, 9),
    "NVIDIA H100 80GB HBM3": (9, 0),
    "NVIDIA H200": (9, 0),
    "NVIDIA B200": (10, 0),
    "NVIDIA RTX PRO 6000 Blackwell Server Edition": (12, 0),
}


def gpu(kind):
    return Device("gpu", kind, GPUS[kind])


def use_device(monkeypatch, device):
    monkeypatch.setattr(dispatch, "target", lambda: device)


@pytest.mark.parametrize(("kind", "capability"), GPUS.items())
def test_the_device_of_an_abstract_mesh_is_known_by_its_name(kind, capability):
    device = AbstractDevice(device_kind=kind, num_cores=100, platform="gpu")
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        assert dispatch.target() == Device("gpu", kind, capability)


def test_an_unknown_abstract_device_is_refused():
    device = AbstractDevice(device_kind="NVIDIA X9", num_cores=100, platform="gpu")
    mesh = AbstractMesh((), (), abstract_device=device)
    with use_abstract_mesh(mesh), pytest.raises(ValueError, match=r"'NVIDIA X9' is not in pallas_kernels\.dispatch"):
        dispatch.target()


@pytest.mark.parametrize(
    ("reported", "capability"),
    [({"compute_capability": "8.9"}, (8, 9)), ({"compute_capability": "gfx942"}, None), ({}, None)],
)
def test_the_default_device_is_asked_for_its_capability(monkeypatch, reported, capability):
    device = SimpleNamespace(platform="gpu", device_kind="some GPU", **reported)
    monkeypatch.setattr(jax, "devices", lambda: [device])
    assert dispatch.target() == Device("gpu", "some GPU", capability)


def test_default_device_is_honoured():
    with jax.default_device(jax.devices("cpu")[0]):
        assert dispatch.target().platform == "cpu"
    with jax.default_device("cpu"):
        assert dispatch.target().platform == "cpu"


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        (Device("cpu", "cpu", None), "xla"),
        (Device("tpu", "TPU v5e", None), "xla"),
        (Device("gpu", "AMD Instinct MI300X", None), "xla"),
        *((gpu(kind), "triton" if capability >= (8, 0) else "xla") for kind, capability in GPUS.items()),
    ],
)
def test_none_chooses_by_device(monkeypatch, device, expected):
    use_device(monkeypatch, device)
    for op in dispatch.OPS:
        assert dispatch.resolve(op, None).implementation == expected


@pytest.mark.parametrize(
    ("kind", "expected"), [("NVIDIA L4", "xla"), ("NVIDIA H200", "mosaic_gpu"), ("NVIDIA B200", "mosaic_gpu")]
)
def test_without_a_triton_backend_mosaic_takes_over_where_it_runs(monkeypatch, kind, expected):
    monkeypatch.setattr(compat, "triton", None)
    use_device(monkeypatch, gpu(kind))
    assert dispatch.resolve("state_commit", None).implementation == expected


@pytest.mark.parametrize(
    ("implementation", "device", "lacks", "instead"),
    [
        ("triton", Device("cpu", "cpu", None), "capability 8.0 or newer", "xla"),
        ("triton", gpu("Tesla T4"), "capability 8.0 or newer", "xla"),
        ("mosaic_gpu", gpu("NVIDIA A100-SXM4-40GB"), "capability 9.x or 10.x", "triton"),
        ("mosaic_gpu", gpu("NVIDIA RTX PRO 6000 Blackwell Server Edition"), "capability 9.x or 10.x", "triton"),
    ],
)
def test_a_named_implementation_never_falls_back(monkeypatch, implementation, device, lacks, instead):
    use_device(monkeypatch, device)
    with pytest.raises(NotImplementedError, match=re.escape(lacks)) as raised:
        dispatch.resolve("state_commit", implementation)
    assert f"implementation '{implementation}' cannot run on {device}" in str(raised.value)
    assert f"pass implementation=None to let the device decide ('{instead}' here)" in str(raised.value)


def test_the_op_refuses_a_kernel_on_a_cpu():
    index = jnp.zeros(1, jnp.int32)
    with pytest.raises(NotImplementedError, match="state_scatter: implementation 'triton' cannot run on cpu"):
        state_scatter(jnp.zeros((1, 1)), jnp.zeros((1, 1, 1)), index, index, implementation="triton")


@pytest.mark.parametrize(("slots", "refused"), [(2**21, False), (2**21 + 1, True), (2**22, True), (2**22 + 1, False)])
def test_triton_refuses_pools_whose_offsets_it_would_get_wrong(monkeypatch, slots, refused):
    """One-byte elements between 2**31 and 2**32: the backend counts them in 32 bits."""
    use_device(monkeypatch, gpu("NVIDIA H200"))
    index = jax.ShapeDtypeStruct((1,), jnp.int32)
    dst = jax.ShapeDtypeStruct((1, slots, 1024), jnp.int8)
    src = jax.ShapeDtypeStruct((1, 1, 1, 1024), jnp.int8)
    for implementation in (None, "triton"):
        scatter = functools.partial(state_scatter, implementation=implementation)
        if refused:
            with pytest.raises(
                NotImplementedError, match=r"wrong offsets in a int8 array .* pass implementation='xla'"
            ):
                jax.eval_shape(scatter, dst, src, index, index)
        else:
            assert jax.eval_shape(scatter, dst, src, index, index).shape == dst.shape


@pytest.mark.skipif(compat.mosaic_interpreter() is not None, reason="this jax interprets Mosaic GPU kernels")
def test_interpreting_mosaic_needs_a_newer_jax():
    with pytest.raises(NotImplementedError, match=re.escape("'mosaic_gpu' needs jax 0.11")):
        dispatch.resolve("state_commit", "mosaic_gpu", interpret=True)


@pytest.mark.parametrize("kind", GPUS)
def test_explain_says_why_for_every_op(monkeypatch, kind):
    use_device(monkeypatch, gpu(kind))
    choices = dispatch.explain()
    assert [choice.op for choice in choices] == list(dispatch.OPS)
    for choice in choices:
        assert choice.device == gpu(kind)
        assert ("Triton backend" in choice.reason) == (choice.implementation in ("triton", "xla"))
        assert (choice.implementation == "xla") == ("needs an NVIDIA GPU of compute capability 8.0" in choice.reason)
