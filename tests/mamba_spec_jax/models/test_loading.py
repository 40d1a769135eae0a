"""Loading: the ways a checkpoint may lie on disk give the same model, and what is wrong with one is named."""

import hashlib
import json
import re
from pathlib import Path

import huggingface_hub
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models, pre_tokenizers

from mamba_spec_jax.cache import memory
from mamba_spec_jax.loaded import load
from mamba_spec_jax.models import checkpoint
from mamba_spec_jax.modes import CommitStrategy, DTypePolicy, SpeculativeMode
from tests.mamba_spec_jax.models.checkpoints import CONFIG, random_weights, write
from tests.mamba_spec_jax.models.loading_memory import can_measure, measure, write_large

WEIGHTS = random_weights(CONFIG)
TIED = CONFIG | {"tie_word_embeddings": True}
NUMBERS = [key for key, value in CONFIG.items() if isinstance(value, int)] + [
    "attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling", "rms_norm_eps",
]  # fmt: skip
EXPERTS = "model.layers.0.block_sparse_moe.experts.gate_up_proj"


def refused(folder: Path, message: str):
    with pytest.raises(ValueError, match=message):
        load(folder)


def assert_same_params(ours, theirs):
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)


@pytest.fixture
def folder(tmp_path) -> Path:
    return write(tmp_path / "model", CONFIG, WEIGHTS)


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    return load(write(tmp_path_factory.mktemp("reference"), CONFIG, WEIGHTS))


# What is loaded


def test_params_are_those_of_the_model(reference):
    expected = jax.eval_shape(lambda: reference.model.init_params(0))
    assert jax.tree.structure(reference.params) == jax.tree.structure(expected)
    jax.tree.map(lambda ours, theirs: np.testing.assert_equal(ours.shape, theirs.shape), reference.params, expected)
    layer = reference.params["layers"][0]
    np.testing.assert_array_equal(
        layer["mixer"]["in_proj"]["kernel"][...], WEIGHTS["model.layers.0.mamba.in_proj.weight"].T
    )
    conv = WEIGHTS["model.layers.0.mamba.conv1d.weight"]
    for tap in range(conv.shape[2]):
        np.testing.assert_array_equal(layer["mixer"]["conv_weight"][tap], conv[:, 0, tap])
    np.testing.assert_array_equal(layer["moe"]["gate_up_proj"][1], WEIGHTS[EXPERTS][1].T)


def test_choices_reach_the_model(folder):
    loaded = load(
        folder,
        policy=DTypePolicy.bfloat16(),
        speculative_mode=SpeculativeMode.PREFILL,
        strategy=CommitStrategy.REPLAY,
        hidden_layers=(1,),
        implementation="xla",
        device=jax.devices()[0],
    )
    assert loaded.model.policy == DTypePolicy.bfloat16()
    assert loaded.model.backend.speculative_mode is SpeculativeMode.PREFILL
    assert loaded.model.hidden_layers == (1,)
    assert loaded.model.backend.decode.linear.strategy is CommitStrategy.REPLAY
    assert loaded.model.backend.decode.linear.implementation == "xla"
    assert loaded.folder == folder
    assert {leaf.dtype for leaf in jax.tree.leaves(loaded.params)} == {jnp.dtype(jnp.bfloat16)}


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float64])
def test_weights_are_cast_to_the_policy(tmp_path, dtype):
    stored = {name: value.astype(dtype) for name, value in WEIGHTS.items()}
    loaded = load(write(tmp_path / "model", CONFIG, stored))
    kernel = loaded.params["lm_head"]["kernel"][...]
    assert kernel.dtype == jnp.float32
    np.testing.assert_array_equal(kernel, stored["lm_head.weight"].astype(np.float32).T)


def test_shards_give_the_same_model(tmp_path, reference):
    assert_same_params(load(write(tmp_path / "model", CONFIG, WEIGHTS, shards=3)).params, reference.params)


def test_older_names_give_the_same_model(tmp_path, reference):
    older = {
        "experts.gate_up_proj": "input_linear.weight",
        "experts.down_proj": "output_linear.weight",
        "block_sparse_moe.router.weight": "block_sparse_moe.router.layer.weight",
    }
    renamed = {}
    for name, value in WEIGHTS.items():
        for new, old in older.items():
            name = name.replace(new, old)
        renamed[name] = value
    assert len(set(renamed) - set(WEIGHTS)) == 2 * len(older)
    assert_same_params(load(write(tmp_path / "model", CONFIG, renamed)).params, reference.params)


def test_a_tied_head_may_be_stored_if_it_is_the_embedding(tmp_path):
    weights = random_weights(TIED)
    assert "lm_head.weight" not in weights
    plain = load(write(tmp_path / "plain", TIED, weights))
    head = {"lm_head.weight": weights["model.embed_tokens.weight"]}
    assert_same_params(load(write(tmp_path / "copy", TIED, weights | head)).params, plain.params)
    other = {"lm_head.weight": weights["model.embed_tokens.weight"] + 1}
    folder = write(tmp_path / "other", TIED, weights | other)
    refused(folder, r"config\.json says that lm_head\.weight is model\.embed_tokens\.weight, but they differ")


def test_generation_config_says_where_a_text_ends(folder, reference):
    assert reference.model.config.eos_token_ids == (3, 5)
    generation = folder / "generation_config.json"
    generation.write_text("{}")
    assert load(folder).model.config.eos_token_ids == (3, 5)
    generation.write_text('{"eos_token_id": 7}')
    assert load(folder).model.config.eos_token_ids == (7,)
    generation.write_text('{"eos_token_id": "x"}')
    refused(folder, r"generation_config\.json: eos_token_id is 'x', expected a token id or a list of them")


def test_tokenizer(folder, reference):
    assert reference.tokenizer is None
    Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a")).save(str(folder / "tokenizer.json"))
    assert load(folder).tokenizer.encode("b").ids == [1]
    (folder / "tokenizer.json").write_text("{}")
    refused(folder, r"tokenizer\.json is not a tokenizer: ")


def test_a_long_prompt_is_read_whole(folder):
    """The limits that a tokenizer was saved with are those of training; transformers leaves them aside too."""
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=4)
    tokenizer.save(str(folder / "tokenizer.json"))
    assert load(folder).tokenizer.encode("b b b").ids == [1, 1, 1]
    assert load(folder).tokenizer.encode("b").ids == [1]


@pytest.mark.parametrize("name", [None, "", " ", 3, ["a"]])
def test_no_name(name):
    with pytest.raises(ValueError, match=r"a checkpoint's name came as .*, expected a folder or a hub id"):
        load(name)


def test_progress_bar(folder, capsys, monkeypatch):
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    load(folder)
    assert capsys.readouterr() == ("", "")  # no terminal
    load(folder, progress=True)
    out, err = capsys.readouterr()
    assert out == ""
    assert "Loading weights" in err
    assert "10.1/10.1 kB" in err


def test_progress_bar_of_a_terminal(folder, capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes it for a terminal
    load(folder)
    assert "Loading weights" in capsys.readouterr().err
    load(folder, progress=False)
    assert capsys.readouterr() == ("", "")


@pytest.mark.skipif(not can_measure(), reason="no way to measure a process's peak memory here")
def test_memory_stays_near_that_of_the_weights(folder, tmp_path):
    """tests/sweeps has the same for two gigabytes."""
    large = write_large(tmp_path / "large", 512, layers=8, vocab_size=16_000, shards=3, dtype=ml_dtypes.bfloat16)
    measured = measure(folder, large, "bfloat16")
    assert measured["weights"] > 140e6
    assert 0.9 < measured["peak"] / measured["weights"] < 1.2


# Where it is found


def test_a_hub_id_downloads_json_and_safetensors_only(folder, reference, monkeypatch):
    asked = []

    def snapshot_download(name, **options):
        asked.append(options | {"name": name})
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    loaded = load("somebody/model", revision="v1", local_files_only=True)
    assert_same_params(loaded.params, reference.params)
    before, everything = (options.pop("allow_patterns") for options in asked)
    assert asked == [{"name": "somebody/model", "revision": "v1", "local_files_only": True}] * 2
    assert all(pattern.endswith((".json", ".safetensors", ".jinja")) for pattern in everything)
    assert set(before) < set(everything)
    assert not [pattern for pattern in before if not pattern.endswith(".json")]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (CONFIG | {"quantization_config": {"quant_method": "fp8"}}, r"is quantized \(fp8\)"),
        (CONFIG | {"model_type": "gpt2"}, "model_type is 'gpt2'"),
        (CONFIG | {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    ],
)
def test_what_is_refused_is_not_downloaded(tmp_path, monkeypatch, config, message):
    def snapshot_download(name, *, allow_patterns, **_):
        assert not any("safetensors" in pattern for pattern in allow_patterns)
        (tmp_path / "config.json").write_text(json.dumps(config))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    refused("somebody/model", message)


@pytest.mark.parametrize("offline", [False, True])
def test_the_hubs_cache_is_enough(tmp_path, folder, reference, monkeypatch, offline):
    """As an earlier download leaves it: files by their hash, a folder of links for a commit, and what main was."""
    stored, commit = tmp_path / "hub" / "models--somebody--model", "0123456789abcdef0123456789abcdef01234567"
    snapshot = stored / "snapshots" / commit
    for made in (snapshot, stored / "blobs", stored / "refs"):
        made.mkdir(parents=True)
    (stored / "refs" / "main").write_text(commit)
    for file in folder.iterdir():
        blob = stored / "blobs" / hashlib.sha256(file.read_bytes()).hexdigest()
        blob.write_bytes(file.read_bytes())
        (snapshot / file.name).symlink_to(blob)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(stored.parent))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", offline)
    loaded = load("somebody/model", local_files_only=not offline)
    assert loaded.folder == snapshot
    assert_same_params(loaded.params, reference.params)
    with pytest.raises(ValueError, match=r"^somebody/other is not a folder, and the hub did not give it: "):
        load("somebody/other", local_files_only=not offline)


def test_code_beside_a_checkpoint_never_runs(folder, reference, tmp_path):
    """Neither of the ways in which a checkpoint may bring its own is followed."""
    ran = tmp_path / "ran"
    code = f"open({str(ran)!r}, 'w')"
    (folder / "modeling_tiny.py").write_text(code)
    (folder / "conftest.py").write_text(code)
    config = CONFIG | {"auto_map": {"AutoConfig": "modeling_tiny.C", "AutoModelForCausalLM": "modeling_tiny.M"}}
    (folder / "config.json").write_text(json.dumps(config))
    assert_same_params(load(folder).params, reference.params)
    assert not ran.exists()


def test_what_cannot_be_found(tmp_path, monkeypatch):
    refused(tmp_path / "absent", "absent is not a folder")
    with pytest.raises(ValueError, match=r"^\./absent is not a folder$"):
        load("./absent")
    with pytest.raises(ValueError, match="not an id!! is neither a folder nor a hub id"):
        load("not an id!!")

    def snapshot_download(name, **options):
        raise LocalEntryNotFoundError("no such thing here\nand a long explanation")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with pytest.raises(ValueError, match=r"^somebody/model is not a folder, .* did not give it: no such thing here$"):
        load("somebody/model")


# What is wrong with it


def test_weights_that_do_not_fit_are_named_together(tmp_path):
    weights = dict(WEIGHTS)
    del weights["model.norm.weight"], weights["model.layers.1.self_attn.q_proj.weight"]
    weights["model.layers.2.extra"] = np.zeros(3, np.float32)
    weights["model.layers.0.mamba.conv1d.weight"] = np.zeros((26, 1, 4), np.float32)
    refused(
        write(tmp_path / "model", CONFIG, weights),
        re.escape(
            "do not fit its config.json: "
            "2 missing: model.layers.1.self_attn.q_proj.weight, model.norm.weight; "
            "1 surplus: model.layers.2.extra; "
            "1 misshapen: model.layers.0.mamba.conv1d.weight is [26, 1, 4], expected [26, 1, 3]"
        )
        + "$",
    )


def test_long_lists_are_counted(tmp_path):
    weights = {name: value for name, value in WEIGHTS.items() if "layers.1." not in name}
    assert len(WEIGHTS) - len(weights) == 11
    refused(write(tmp_path / "model", CONFIG, weights), r"11 missing: (model\.layers\.1\.\S+, ){3}\S+ and 7 more$")


def test_one_weight_under_two_names(tmp_path):
    older = {"model.layers.0.block_sparse_moe.input_linear.weight": WEIGHTS[EXPERTS]}
    message = "has one weight under two names: .*(experts.gate_up_proj and .*input_linear|input_linear.* and .*experts)"
    refused(write(tmp_path / "model", CONFIG, WEIGHTS | older), message)


def test_one_weight_in_two_files(tmp_path):
    folder = write(tmp_path / "model", CONFIG, WEIGHTS, shards=2)
    save_file(WEIGHTS, folder / "model-00002-of-00002.safetensors")
    refused(folder, r"model-00002-of-00002\.safetensors: \S+ is in another file too")


def test_shapes_are_checked_before_any_weight_is_read(tmp_path, monkeypatch):
    folder = write(tmp_path / "model", CONFIG, WEIGHTS | {"extra": np.zeros(1, np.float32)})
    monkeypatch.setattr(checkpoint.WeightFiles, "read", None)
    refused(folder, "1 surplus: extra")


@pytest.mark.parametrize(
    ("dtype", "message"),
    [
        (np.int8, r"I8 \(quantized weights are not read\)"),
        (ml_dtypes.float8_e4m3fn, r"F8_E4M3 \(quantized weights are not read\)"),
        (ml_dtypes.float8_e5m2, r"F8_E5M2 \(quantized weights are not read\)"),
        (np.int64, "I64"),
    ],
)
def test_weights_that_are_not_plain_numbers(tmp_path, dtype, message):
    weights = WEIGHTS | {"lm_head.weight": np.zeros((13, 8), dtype)}
    folder = write(tmp_path / "model", CONFIG, weights)
    refused(folder, rf"lm_head\.weight is {message}, expected one of F64, F32, F16, BF16$")


def test_values_that_float16_cannot_hold(tmp_path):
    weights = WEIGHTS | {"model.norm.weight": np.full(8, 1e5, np.float32)}
    folder = write(tmp_path / "model", CONFIG, weights)
    with pytest.raises(ValueError, match=r"model\.norm\.weight has values that float16 cannot hold"):
        load(folder, policy=DTypePolicy.float16())
    load(folder)


@pytest.mark.parametrize(
    ("stated", "named"),
    [
        ({"quant_method": "fp8", "fmt": "e4m3"}, "fp8, e4m3"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "modelopt, NVFP4"),
        ({"load_in_4bit": True}, "unknown format"),
    ],
)
def test_quantized_checkpoints(tmp_path, stated, named):
    folder = write(tmp_path / "model", CONFIG | {"quantization_config": stated}, WEIGHTS)
    refused(folder, rf"is quantized \({named}\), expected a checkpoint of plain floating-point weights")
    folder = write(tmp_path / "model", CONFIG | {"quantization_config": None}, WEIGHTS)
    load(folder)
    (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": stated}))
    refused(folder, rf"is quantized \({named}\)")


def test_config_file(folder):
    path = folder / "config.json"
    path.write_text(json.dumps(CONFIG | {"attention_multiplier": float("nan")}))
    refused(folder, r"model/config\.json: attention_multiplier is nan, expected a finite number")
    path.write_text(json.dumps(CONFIG | {"model_type": "gpt2"}))
    refused(folder, r"model/config\.json: model_type is 'gpt2', expected one of .*granitemoehybrid")
    path.write_text("{")
    refused(folder, r"config\.json is not JSON: ")
    path.unlink()
    refused(folder, r"model has no config\.json")


@pytest.mark.parametrize("key", [*NUMBERS, "eos_token_id"])
def test_numbers_that_are_none(tmp_path, key):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {key: float("nan")}))
    refused(tmp_path, rf"config\.json: {key} is nan, expected ")


def test_more_experts_a_token_than_there_are(tmp_path):
    folder = write(tmp_path / "model", CONFIG | {"num_experts_per_tok": 4}, WEIGHTS)
    refused(folder, r"routes to top_k=4 of 3 experts, expected 1\.\.3")


@pytest.mark.parametrize("size", [0, 20, -1])
def test_truncated_weights(folder, size):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    refused(folder, r"model\.safetensors is not a complete safetensors file: ")


def test_a_truncated_shard_is_named(tmp_path):
    folder = write(tmp_path / "model", CONFIG, WEIGHTS, shards=3)
    path = folder / "model-00002-of-00003.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    refused(folder, r"model-00002-of-00003\.safetensors is not a complete safetensors file: ")


def test_a_pointer_instead_of_weights(folder):
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")
    refused(folder, r"model\.safetensors has a header of [0-9]+ bytes, expected [0-9]+ at most: it is damaged")


def test_index(tmp_path):
    folder = write(tmp_path / "model", CONFIG, WEIGHTS, shards=2)
    index = folder / "model.safetensors.index.json"
    (folder / "model-00002-of-00002.safetensors").unlink()
    refused(folder, r"index\.json names model-00002-of-00002\.safetensors, which does not exist")
    index.write_text(json.dumps({"weight_map": {"a": "../elsewhere.safetensors"}}))
    refused(folder, r"index\.json names \.\./elsewhere\.safetensors, expected a file beside it")
    for text in ("{}", "[]", '{"weight_map": {"a": 1}}'):
        index.write_text(text)
        refused(folder, r"index\.json has no weight_map")


def test_folders_without_safetensors(folder):
    (folder / "model.safetensors").unlink()
    refused(folder, r"model has neither model\.safetensors nor model\.safetensors\.index\.json$")
    (folder / "pytorch_model.bin").write_bytes(b"")
    refused(folder, r"only pytorch_model\.bin: pickled weights can run code and are not read\. Save them as")


def test_weights_that_cannot_fit_are_not_read(folder, monkeypatch):
    monkeypatch.setattr(memory, "device_bytes", lambda: 1000)
    monkeypatch.setattr(checkpoint.WeightFiles, "read", None)
    with pytest.raises(MemoryError, match=r"model needs .* KiB \(weights .* KiB\), but the device has 1000 B"):
        load(folder)
