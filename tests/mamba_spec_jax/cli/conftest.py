"""A checkpoint of a few thousand random weights with a byte tokenizer, and the program run on it in this process."""

import pytest

from mamba_spec_jax.cli import main
from tests.mamba_spec_jax.text_model import write_text_model


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return write_text_model(tmp_path_factory.mktemp("cli") / "model")


@pytest.fixture
def run(capsys, monkeypatch):
    """Runs the program; gives what it wrote to stdout and stderr."""
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.delenv("FORCE_COLOR", raising=False)  # which would make a terminal of stderr

    def run_main(*arguments, code=0):
        with pytest.raises(SystemExit) as exit:
            main(["--no-cache", *map(str, arguments)])
        out, err = capsys.readouterr()
        assert exit.value.code == code, err
        assert "Traceback" not in out + err
        return out, err

    return run_main


@pytest.fixture
def fails(run):
    """Runs the program, which must fail with one line on stderr and nothing on stdout; gives that line."""

    def run_failing(*arguments):
        out, err = run(*arguments, code=2)
        assert out == ""
        assert err.startswith("mamba-spec: ")
        assert err.count("\n") == 1
        return err.removeprefix("mamba-spec: ").rstrip("\n")

    return run_failing
