"""The quickstart notebook runs from top to bottom, and what it claims comes out true."""

from pathlib import Path

import nbclient
import nbformat

NOTEBOOK = Path(__file__).parents[2] / "notebooks" / "01_quickstart.ipynb"


def test_quickstart_runs_top_to_bottom():
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbclient.NotebookClient(notebook, timeout=180, kernel_name="python3").execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    printed = "".join(output.get("text", "") for output in outputs)
    assert printed.count("identical True") == 2
    assert "tokens identical: True" in printed
    assert "states identical: True" in printed
    assert any("image/png" in output.get("data", {}) for output in outputs)
