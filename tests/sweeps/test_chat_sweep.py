"""A chat with a tiny model of every family, from the command line; by default the suite has one with one family.

Not collected by default: `pytest tests/sweeps`.
"""

import json

import pytest

from mamba_spec_jax import generate, load
from tests.conftest import quick_compilation  # noqa: F401, a fixture
from tests.mamba_spec_jax.cli.conftest import run  # noqa: F401, a fixture
from tests.mamba_spec_jax.cli.families import CASES, write_family

pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("family", ["granitemoehybrid", *CASES])
def test_every_family_chats(run, tmp_path, family, drafts):  # noqa: F811
    folder = write_family(family, tmp_path / "model")
    options = ("--model", folder, "-n", 24, "--drafts", drafts, "--json")
    report = json.loads(run("generate", "--chat", "hello", *options)[0])
    loaded = load(folder)
    prompt = loaded.chat_prompt([{"role": "user", "content": "hello"}])
    expected = generate(loaded.model, loaded.params, [prompt], num_drafts=0, max_new=24).tokens[0]
    assert report["tokens"] == expected[: report["new_tokens"]]
    assert report["stop_reason"] == ("max_new" if report["new_tokens"] == 24 else "eos")
