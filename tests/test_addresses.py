"""No text of this library sends its reader to a repository or a package that this library does not own.

An address that nobody has registered belongs to whoever registers it first, and an install cell runs what it finds
there. So this library is installed from a clone, or from an address that the reader gives.
"""

import json
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
FOLDERS = (".ci", "docs", "notebooks", "benchmarks", "training", "mamba_spec_jax", "pallas_kernels")
ENDINGS = {".md", ".toml", ".ipynb", ".py", ".json", ""}
FILES = [*ROOT.glob("*"), *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*"))]
TEXTS = sorted(path for path in FILES if path.is_file() and path.suffix in ENDINGS)

HOSTS = r"(?:github|githubusercontent|gitlab|bitbucket|codeberg|colab\.research\.google)\.(?:com|org)"
REPOSITORY = re.compile(rf"{HOSTS}[:/][\w./-]+|git\+\w+://[\w./-]+|git clone[^\n]*?://[\w./-]+")
INSTALLED = re.compile(r"pip install((?: +[\"']?[\w.\[\],<>=~-]+[\"']?)+)")
# Third parties that texts may name.
REPOSITORIES: set[str] = set()
PACKAGES = {"uv", "matplotlib"}


def repositories(text):
    return [found.group() for found in REPOSITORY.finditer(text)]


def packages(text):
    """What pip is told to fetch by name: neither options nor folders."""
    words = [word.strip("\"'") for found in INSTALLED.finditer(text) for word in found.group(1).split()]
    return [re.match(r"[\w.-]+", word).group() for word in words if word[0].isalnum()]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('pip install "a-name[extra] @ git+https://github.com/some/name"', ["git+https://github.com/some/name"]),
        ("![](https://colab.research.google.com/github/some/name)", ["colab.research.google.com/github/some/name"]),
        ("git clone -q https://example.org/some/name", ["git clone -q https://example.org/some/name"]),
        ('set SOURCE to "git+" and your address', []),
    ],
)
def test_addresses_are_found(text, expected):
    assert repositories(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("python -m pip install -q uv && uv run pytest", ["uv"]),
        ('pip install ".[cuda13]"  # driver 580 or newer', []),
        ("install it: pip install 'a-name[notebooks]'", ["a-name"]),
        ('pip install "a-name[extra] @ git+https://github.com/some/name"', ["a-name"]),
    ],
)
def test_packages_are_found(text, expected):
    assert packages(text) == expected


@pytest.mark.parametrize("path", TEXTS, ids=[path.relative_to(ROOT).as_posix() for path in TEXTS])
def test_no_text_sends_to_what_nobody_owns(path):
    text = path.read_text(encoding="utf-8")
    assert set(repositories(text)) <= REPOSITORIES
    assert set(packages(text)) <= PACKAGES


@pytest.fixture(params=sorted((ROOT / "notebooks").glob("*.ipynb")), ids=lambda path: path.stem)
def install(request, monkeypatch):
    """The first cell of code of a notebook, run as on Colab; gives what pip is told to install."""
    cells = json.loads(request.param.read_text(encoding="utf-8"))["cells"]
    code = next("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    asked = []

    def run(command, **_):
        if command[0] == "nvidia-smi":
            raise FileNotFoundError
        asked.append(command[-1])

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setitem(sys.modules, "google.colab", None)

    def run_cell(source='".."'):
        exec(code.replace('SOURCE = ".."', f"SOURCE = {source}"), {})
        return asked.pop()

    return run_cell


def test_notebooks_install_the_clone_they_are_in_or_what_the_reader_names(install, monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT / "notebooks")
    assert install() == f"{ROOT}[notebooks]"
    (tmp_path / "notebooks").mkdir()
    monkeypatch.chdir(tmp_path / "notebooks")
    with pytest.raises(ValueError, match=r"SOURCE is '..', where there is no clone of this library: set it above"):
        install()
    assert install('"git+file:///somewhere"') == "mamba-spec-jax[notebooks] @ git+file:///somewhere"
