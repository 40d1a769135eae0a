"""The notebook of drafters runs from top to bottom, and what it claims comes out true."""

from pathlib import Path

import nbclient
import nbformat

NOTEBOOK = Path(__file__).parents[2] / "notebooks" / "02_drafters.ipynb"


def test_drafters_run_top_to_bottom(monkeypatch):
    # Optimising sixteen programs takes most of the time, and no claim here hangs on it.
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    printed = "".join(output.get("text", "") for output in outputs)
    assert printed.count("identical to plain decoding: True") == 7
    assert "False" not in printed
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 2
