"""The Python on the pages of the documentation runs, and what all code there names is public."""

import pathlib
import re

import jax
import pytest

import mamba_spec_jax as ms

PAGES = {
    path.stem: path.read_text(encoding="utf-8") for path in (pathlib.Path(__file__).parents[2] / "docs").glob("*.md")
}
RUN = re.compile(r"^```python\n(.*?)^```", re.M | re.S)
SHOWN = re.compile(r"^```(?:python|\{code-block\} python)\n(.*?)^```", re.M | re.S)


@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize("name", sorted(name for name, text in PAGES.items() if RUN.search(text)))
def test_code_runs_from_top_to_bottom(name):
    names = {}
    with jax.numpy_dtype_promotion("standard"):  # as a reader has it
        for code in RUN.findall(PAGES[name]):
            exec(compile(code, f"{name}.md", "exec"), names)


@pytest.mark.parametrize("name", sorted(PAGES))
def test_code_names_what_is_public(name):
    for code in SHOWN.findall(PAGES[name]):
        compile(code, f"{name}.md", "exec")
        assert set(re.findall(r"\bms\.(\w+)", code)) <= set(ms.__all__)


def test_files_that_pages_show_exist():
    for name, text in PAGES.items():
        for path in re.findall(r"literalinclude\} (\S+)", text):
            assert (pathlib.Path(__file__).parents[2] / "docs" / path).is_file(), f"{name}.md shows {path}"
