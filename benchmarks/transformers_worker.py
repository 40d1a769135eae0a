"""The other side of transformers_baseline.py: needs torch and transformers, and nothing of this package."""

import json
import sys

import torch
import transformers


def main() -> None:
    folder, threads = sys.argv[1:]
    torch.set_num_threads(int(threads))
    transformers.logging.set_verbosity_error()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    answer({"torch": torch.__version__, "transformers": transformers.__version__})
    for line in sys.stdin:
        request = json.loads(line)
        answer(generate(model, **request))


def generate(model, prompt, max_new_tokens):
    tokens = torch.tensor([prompt])
    with torch.inference_mode():
        output = model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            do_sample=False,
            max_new_tokens=max_new_tokens,
            eos_token_id=None,
        )
    return output[0, len(prompt) :].tolist()


def answer(value):
    print(json.dumps(value), flush=True)


if __name__ == "__main__":
    main()
