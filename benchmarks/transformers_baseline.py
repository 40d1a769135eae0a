"""Plain decoding here against Hugging Face transformers, on the same weights: batch 1, greedy, float32.

Both generate the same number of tokens from the same prompts, prefill included, in turns. transformers runs in a
process of its own, under a Python that has torch and transformers (`--python`); the group `oracles` has both.

Run as `python -m benchmarks.transformers_baseline --python PATH`.
"""

import json
import subprocess
from pathlib import Path
from typing import Any

import mamba_spec_jax as ms
from benchmarks.timing import measure, parser, report, rounded
from mamba_spec_jax.cli.options import BUNDLED, title_of
from mamba_spec_jax.cli.prompts import PromptKind, demo_prompts

WORKER = Path(__file__).parent / "transformers_worker.py"


def main() -> None:
    arguments = parser(__doc__, rounds=7)
    arguments.add_argument("--python", required=True, help="a Python with torch and transformers")
    arguments.add_argument("--model", default=BUNDLED, help="folder (default: the bundled model)")
    arguments.add_argument("--max-new-tokens", type=int, default=128)
    arguments.add_argument("--prompts", type=int, default=3, help="of each kind")
    arguments.add_argument("--threads", type=int, default=2, help="of torch (default: %(default)s)")
    options = arguments.parse_args()
    loaded = ms.load(options.model)
    tokenizer: Any = loaded.tokenizer
    texts = [text for kind in PromptKind for text in demo_prompts(kind, options.prompts)]
    prompts = [tokenizer.encode(text).ids for text in texts]

    with Transformers(options.python, loaded.folder, options.threads) as transformers:
        outputs: dict[str, list[list[int]]] = {}

        def ours():
            outputs["ours"] = [
                ms.generate(loaded.model, loaded.params, [prompt], num_drafts=0, max_new=options.max_new_tokens).tokens[
                    0
                ]
                for prompt in prompts
            ]

        def theirs():
            outputs["theirs"] = [transformers.generate(prompt, options.max_new_tokens) for prompt in prompts]

        samples = measure({"ours": lambda: ours, "theirs": lambda: theirs}, options.rounds)
        versions = transformers.versions
    tokens = len(prompts) * options.max_new_tokens
    results = {
        "times_faster": rounded(samples.ratio("theirs", "ours")),
        "tokens_per_second": rounded(tokens / samples.median("ours")),
        "transformers_tokens_per_second": rounded(tokens / samples.median("theirs")),
        "identical_rows": sum(a == b for a, b in zip(outputs["ours"], outputs["theirs"], strict=True)),
        "rows": len(prompts),
    }
    chosen = {
        "model": title_of(options.model),
        "max_new_tokens": options.max_new_tokens,
        "torch_threads": options.threads,
        "rounds": options.rounds,
        **versions,
    }
    report(options.json, "transformers_baseline", chosen, results)


class Transformers:
    """A process that generates with transformers: one line of JSON in, one out."""

    def __init__(self, python: str, folder: Path, threads: int):
        self._process: Any = subprocess.Popen(
            [python, str(WORKER), str(folder), str(threads)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.versions: dict[str, str] = self._read()

    def __enter__(self) -> "Transformers":
        return self

    def __exit__(self, *error: object) -> None:
        self._process.stdin.close()
        self._process.wait()

    def generate(self, prompt: list[int], max_new_tokens: int) -> list[int]:
        """Greedily, and never fewer tokens for an end-of-sequence one."""
        request = json.dumps({"prompt": prompt, "max_new_tokens": max_new_tokens})
        print(request, file=self._process.stdin, flush=True)
        return self._read()

    def _read(self) -> Any:
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the transformers process ended with code {self._process.wait()}; its errors are above")
        return json.loads(line)


if __name__ == "__main__":
    main()
