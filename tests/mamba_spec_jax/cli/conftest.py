"""A checkpoint of a few thousand random weights with a byte tokenizer, and the program run on it in this process."""

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from mamba_spec_jax.cli import main

from ..models.checkpoints import CONFIG, random_weights, write

END = "<|end|>"


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: token for token, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END, special=True)])
    config = CONFIG | {"vocab_size": 257, "num_local_experts": 0, "num_experts_per_tok": 0, "eos_token_id": 256}
    folder = write(tmp_path_factory.mktemp("cli") / "model", config, random_weights(config, seed=3))
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


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
