"""How Sphinx builds these pages. Nothing here needs a network, and no notebook is executed."""

import enum
import inspect
import pathlib
import re
import shutil
import sys

DOCS = pathlib.Path(__file__).parent
ROOT = DOCS.parent
sys.path[:0] = [str(ROOT), str(DOCS)]

import api_pages  # noqa: E402

import mamba_spec_jax  # noqa: E402

project = "mamba-spec-jax"
author = "the authors of mamba-spec-jax"
copyright = author
release = mamba_spec_jax.__version__
version = release

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build", "README.md"]
nitpicky = False

# Pages and notebooks. The notebooks are shown with the outputs that `docs/run_notebooks.py` saved in them.
nb_execution_mode = "off"
myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3
myst_links_external_new_tab = False

# The API reference, from the docstrings. They are plain text with `code` in single backticks; see `_docstring`.
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
autodoc_class_signature = "mixed"
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_attr_annotations = False  # the signature has the types
napoleon_use_rtype = False
python_maximum_signature_line_length = 100
add_module_names = False

html_theme = "sphinx_book_theme"
html_title = "mamba-spec-jax"
html_static_path = ["_static"]
html_theme_options = {"show_toc_level": 2, "use_download_button": False, "use_fullscreen_button": False}
html_copy_source = False
html_show_copyright = False

_HEADERS = ("Args:", "Attributes:", "Returns:", "Raises:", "Yields:")
_CODE = re.compile(r"(?<!`)`([^`]+)`(?!`)")


def _outside_code(text):
    """Single backticks become code; outside of code, what reStructuredText would read as markup is escaped."""
    pieces = re.split(r"(``.+?``)", _CODE.sub(r"``\1``", text))
    return "".join(each if each.startswith("``") else re.sub(r"([*|]|_(?=\W|$))", r"\\\1", each) for each in pieces)


def _joined(lines):
    """Lines in which no code in backticks is broken: such a line takes the next one to its end."""
    joined = []
    for line in lines:
        if joined and joined[-1].count("`") % 2 and line.strip():
            joined[-1] += " " + line.strip()
        else:
            joined.append(line)
    return joined


def _docstring(app, what, name, obj, options, lines):
    """A docstring of this library as reStructuredText: code, formulas, and the summary that begins it."""
    out, header, formula = [], False, False
    for line in _joined(lines):
        indent = len(line) - len(line.lstrip())
        if line.strip() in _HEADERS and not indent:
            header = True
        elif line.strip() and not indent:
            header = False
        if indent >= 4 and not header and (formula or not out or not out[-1].strip()):
            if not formula and not line.lstrip().startswith("- "):
                out += ["::", ""]
                formula = True
        elif line.strip():
            formula = False
        out.append(line if formula else _outside_code(line))
    if what == "class" and issubclass(obj, enum.Enum):
        out += _members(obj)
    lines[:] = out


def _members(kind):
    """The members of an enumeration, with the comments that follow them in the source."""
    comments = dict(re.findall(r"^ +(\w+) = [^#\n]+  # (.+)$", inspect.getsource(kind), re.M))
    return [
        "",
        *(f"- ``{name}``: {_outside_code(comments.get(name, ''))}".rstrip(": ") for name in kind.__members__),
        "",
    ]


def _signature(app, what, name, obj, options, signature, returns):
    """Arrays by their short name; the aliases of shapes name the class that jax keeps private."""
    return tuple(text and text.replace("jaxlib._jax.Array", "Array") for text in (signature, returns))


def _copy_notebooks(app):
    """The notebooks are in their own folder at the root; Sphinx reads below `docs` only."""
    target = DOCS / "notebooks"
    target.mkdir(exist_ok=True)
    for copy in target.glob("*.ipynb"):
        if not (ROOT / "notebooks" / copy.name).exists():
            copy.unlink()  # of an earlier build
    for notebook in sorted((ROOT / "notebooks").glob("*.ipynb")):
        copy = target / notebook.name
        if not copy.exists() or copy.read_bytes() != notebook.read_bytes():
            shutil.copyfile(notebook, copy)


def setup(app):
    _copy_notebooks(app)
    api_pages.write(DOCS / "api")
    app.connect("autodoc-process-docstring", _docstring, priority=400)  # before napoleon
    app.connect("autodoc-process-signature", _signature)
