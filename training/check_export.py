"""Compares a model folder's logits with transformers: `python training/check_export.py FOLDER LOGITS.npz`.

Needs torch and transformers, not JAX. LOGITS.npz holds tokens `[B, T]` and this repository's logits `[B, T, V]`, as
`python -m training.evaluate FOLDER --write-logits LOGITS.npz` writes them.
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

TOLERANCE = 1e-4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("logits", type=Path)
    options = parser.parse_args()

    expected = np.load(options.logits)
    model, loading = AutoModelForCausalLM.from_pretrained(options.folder, dtype=torch.float32, output_loading_info=True)
    troubles = {kind: names for kind, names in loading.items() if names}
    if troubles:
        raise SystemExit(f"transformers did not load every tensor as stored: {troubles}")
    tokens = torch.from_numpy(expected["tokens"].astype(np.int64))
    with torch.no_grad():
        logits = model(tokens, use_cache=False).logits.numpy()
    difference = float(np.abs(logits - expected["logits"]).max())
    text = "class Mapping(dict):\n    def get(self, key):\n        return self[key]\n"
    tokenizer = AutoTokenizer.from_pretrained(options.folder)
    if tokenizer.decode(tokenizer(text)["input_ids"]) != text:
        raise SystemExit("the tokenizer does not give back the text it was given")
    print(
        f"{model.num_parameters():,} parameters, largest logit difference {difference:.2e} over {tokens.numel()} tokens"
    )
    if not difference < TOLERANCE:
        raise SystemExit(f"logits differ by {difference:.2e}, expected less than {TOLERANCE:.0e}")


if __name__ == "__main__":
    main()
