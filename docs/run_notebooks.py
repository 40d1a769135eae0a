"""Runs the notebooks and saves their outputs in them: python docs/run_notebooks.py [NAME ...]

What is saved has no execution times, no counts, no warnings of the machine and no paths. A notebook says in its first
cell how long it takes; this script prints how long it took.
"""

import argparse
import pathlib
import time

import nbclient
import nbformat

ROOT = pathlib.Path(__file__).resolve().parents[1]
FOLDER = ROOT / "notebooks"


def strip(notebook: nbformat.NotebookNode) -> None:
    """Leaves of each cell its source, and of its outputs what a reader should see."""
    for cell in notebook.cells:
        cell.metadata = nbformat.NotebookNode()
        if cell.cell_type != "code":
            continue
        cell.execution_count = None
        kept = [each for each in cell.outputs if each.get("name") != "stderr"]
        for output in kept:
            output.pop("execution_count", None)
            if "metadata" in output:
                output.metadata = nbformat.NotebookNode()
            if "text" in output:
                output.text = output.text.replace(str(ROOT), ".").replace(str(pathlib.Path.home()), "~")
        cell.outputs = _joined(kept)


def _joined(outputs: list[nbformat.NotebookNode]) -> list[nbformat.NotebookNode]:
    """What was printed piece by piece is one output."""
    joined: list[nbformat.NotebookNode] = []
    for output in outputs:
        if joined and output.output_type == "stream" and joined[-1].output_type == "stream":
            joined[-1].text += output.text
        else:
            joined.append(output)
    return joined


def run(path: pathlib.Path) -> float:
    """Executes one notebook, and writes it with its outputs; returns the seconds it took."""
    notebook = nbformat.read(path, as_version=4)
    began = time.perf_counter()
    where = {"metadata": {"path": str(path.parent)}}
    nbclient.NotebookClient(notebook, timeout=900, kernel_name="python3", resources=where).execute()
    seconds = time.perf_counter() - began
    notebook.metadata["kernelspec"] = {"display_name": "Python 3", "language": "python", "name": "python3"}
    notebook.metadata["language_info"] = {"name": "python"}
    strip(notebook)
    nbformat.write(notebook, path)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description="Runs the notebooks, and saves their outputs in them.")
    parser.add_argument("names", nargs="*", help="such as 01_quickstart; all of them by default")
    names = parser.parse_args().names or sorted(path.stem for path in FOLDER.glob("*.ipynb"))
    for name in names:
        print(f"{name}: {run(FOLDER / f'{name}.ipynb'):.0f} s", flush=True)


if __name__ == "__main__":
    main()
