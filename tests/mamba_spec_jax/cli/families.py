"""A tiny model of every family, as a folder to chat with."""

import json
import shutil
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tests.golden.family_cases import FAMILY_CASES
from tests.golden.weights import draw_all

GOLDEN = Path(__file__).parents[2] / "golden"
# The last one of each, which has trained-like time steps: states that remember.
CASES = {case.family.removesuffix("_text"): case for case in FAMILY_CASES}
END = "<|end|>"
TEMPLATE = "{% for m in messages %}{{ m.role[0] + m.content + eos_token }}{% endfor %}"


def write_family(family: str, folder: Path) -> Path:
    """The family's tiny model, with a tokenizer of 26 letters and an end of text, and a chat template."""
    if family == "granitemoehybrid":
        shutil.copytree(GOLDEN / "trained_dt", folder)
    else:
        case = CASES[family]
        shutil.copytree(GOLDEN / case.family / case.name, folder)
        with np.load(folder / "golden.npz") as arrays:
            shapes = json.loads(str(arrays["shapes"]))
        save_file(draw_all(shapes, case.seed, case.trained_dt), folder / "model.safetensors")
    letters = {letter: token for token, letter in enumerate("abcdefghijklmnopqrstuvwxyz")}
    tokenizer = Tokenizer(models.BPE(vocab=letters, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END, special=True)])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": END, "chat_template": TEMPLATE}))
    return folder
