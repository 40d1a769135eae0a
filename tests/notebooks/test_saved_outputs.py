"""Notebooks are stored with the outputs of one run, without traces of the machine that ran them."""

import json
import pathlib
import re

import nbformat
import pytest

NOTEBOOKS = sorted((pathlib.Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))
MACHINE = re.compile(r"(?<![\w.])/(?:home|root|tmp|work|Users|usr)/|~/|\bWARNING\b|Traceback")

pytestmark = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def test_every_code_cell_that_shows_something_has_its_output(path):
    cells = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    shows = [cell for cell in cells[1:] if re.search(r"^\s*(?:print|plt\.show)\(", cell.source, re.M)]
    assert shows
    assert all(cell.outputs for cell in shows), "run docs/run_notebooks.py"


def test_outputs_say_nothing_of_the_machine(path):
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    outputs = [output for cell in cells for output in cell.get("outputs", [])]
    assert not any(MACHINE.search("".join(output.get("text", ""))) for output in outputs)
    assert {output.get("name", "stdout") for output in outputs} == {"stdout"}
    assert not any(cell.get("execution_count") or cell["metadata"] for cell in cells)


def test_the_first_cell_says_how_long_it_takes(path):
    assert re.search(r"It runs in .*\bminutes?\b", "".join(nbformat.read(path, as_version=4).cells[0].source))
