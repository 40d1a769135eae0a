"""The examples run, and what they compare is identical."""

import importlib.util
from pathlib import Path

import jax
import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"

pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_examples_decode_as_plainly(path, capsys):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    with jax.numpy_dtype_promotion("standard"):  # as a user has it
        spec.loader.exec_module(module)
        module.main()
    printed = capsys.readouterr().out
    assert "identical to plain decoding: True" in printed
    assert "False" not in printed
