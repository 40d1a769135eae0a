"""How the program is called and how it fails: one clear line, never a traceback."""

import jax
import pytest

from mamba_spec_jax import __version__
from mamba_spec_jax.cli import main, runtime


def test_version(run):
    assert run("--version") == (f"mamba-spec-jax {__version__}\n", "")


def test_help_lists_the_commands(run):
    out, _ = run("--help")
    for command in ("demo", "generate", "check", "bench", "plan", "doctor"):
        assert f"│ {command} " in out


def test_a_missing_model_is_one_line(fails, tmp_path):
    assert fails("generate", "x", "--model", tmp_path / "absent") == f"{tmp_path / 'absent'} is not a folder"


def test_debug_shows_the_traceback(tmp_path):
    with pytest.raises(ValueError, match="is not a folder"):
        main(["--no-cache", "--debug", "generate", "x", "--model", str(tmp_path / "absent")])


def test_a_prompt_that_says_debug_is_only_a_prompt(fails, tmp_path):
    assert "is not a folder" in fails("generate", "--model", tmp_path / "absent", "--", "--debug")


def test_the_parsers_own_errors(run):
    _, err = run("generate", "x", "--no-such-option", code=2)
    assert "No such option: --no-such-option" in err
    _, err = run("generate", "x", "--drafts", "many", code=2)
    assert "'many' is neither a number of drafts nor 'auto'" in err
    _, err = run("demo", "--batch", "9", code=2)
    assert "Invalid value for '--batch'" in err


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("two\nlines"), "two lines"),
        (MemoryError("a cache of 1 slots needs 2.0 GiB"), "a cache of 1 slots needs 2.0 GiB"),
        (NotImplementedError("not on this device"), "not on this device"),
        (KeyError("lost"), "KeyError: 'lost' (mamba-spec --debug ... shows where)"),
        (RuntimeError("RESOURCE_EXHAUSTED"), "RuntimeError: RESOURCE_EXHAUSTED (mamba-spec --debug ... shows where)"),
        (ValueError(), "ValueError (mamba-spec --debug ... shows where)"),
    ],
)
def test_every_error_is_one_line(fails, monkeypatch, error, line):
    def failing(*_, **__):
        raise error

    monkeypatch.setattr(runtime, "load", failing)
    assert fails("generate", "x") == line


@pytest.fixture
def jax_cache_settings():
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in names}
    jax.config.update("jax_compilation_cache_dir", None)
    yield
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.mark.usefixtures("jax_cache_settings")
def test_compiled_programs_are_kept_in_the_users_cache(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for arguments, expected in ((["--no-cache"], None), ([], str(tmp_path / "mamba-spec-jax" / "compiled"))):
        with pytest.raises(SystemExit, match="0"):
            main([*arguments, "doctor"])
        assert jax.config.jax_compilation_cache_dir == expected
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "mine"))
    with pytest.raises(SystemExit, match="0"):
        main(["doctor"])
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "mine")
    assert str(tmp_path / "mine") in "".join(capsys.readouterr().out.split())
