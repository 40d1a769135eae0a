"""A checkpoint of a few thousand random weights whose tokens are bytes, for tests of text."""

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tests.mamba_spec_jax.models.checkpoints import CONFIG, random_weights, write

END = "<|end|>"  # token 256


def write_text_model(folder):
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: token for token, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END, special=True)])
    config = CONFIG | {"vocab_size": 257, "num_local_experts": 0, "num_experts_per_tok": 0, "eos_token_id": 256}
    folder = write(folder, config, random_weights(config, seed=3))
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder
