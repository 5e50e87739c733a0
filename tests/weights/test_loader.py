"""From a directory to parameters: completeness, heads, dtypes, names; and the writer that makes
directories."""

import json
import logging
import pickle
import re
from pathlib import Path
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxserve.errors import CheckpointError
from jaxserve.weights import manifest
from jaxserve.weights.hf_directory import write_hf_directory
from jaxserve.weights.loader import load_params, open_checkpoint, resolve_model
from tests import checkpoints, numpy_llama
from tests.weights.trees import assert_trees_equal

GATE = "model.layers.1.mlp.gate_proj.weight"


def load(path: Path) -> dict:
    return load_params(open_checkpoint(path), np.float32)[0]


def stored(path: Path) -> tuple[dict, dict[str, np.ndarray]]:
    """config.json and all tensors of a directory with one file."""
    return json.loads((path / "config.json").read_text()), load_file(path / "model.safetensors")


@pytest.fixture
def random_llama(tmp_path) -> Path:
    return checkpoints.make_random_llama(tmp_path / "model")


@pytest.fixture
def three_shards(random_llama, tmp_path) -> Path:
    config, tensors = stored(random_llama)
    total = sum(array.nbytes for array in tensors.values())
    write_hf_directory(tmp_path / "shards", config, tensors, max_shard_bytes=int(total / 2.5))
    assert len(list((tmp_path / "shards").glob("model-*-of-00003.safetensors"))) == 3
    return tmp_path / "shards"


def file_of(directory: Path, tensor: str) -> Path:
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    return directory / index["weight_map"][tensor]


def rewrite(directory: Path, tensor: str, array: np.ndarray | None) -> Path:
    """Replaces a tensor in its shard; None removes it from shard and index."""
    path = file_of(directory, tensor)
    tensors = load_file(path)
    tensors.pop(tensor)
    if array is not None:
        tensors[tensor] = array
    else:
        index_path = directory / "model.safetensors.index.json"
        index = json.loads(index_path.read_text())
        del index["weight_map"][tensor]
        index_path.write_text(json.dumps(index))
    save_file(tensors, path)
    return path


def test_the_tree_holds_every_tensor_once_transposed_where_it_multiplies(tmp_path):
    checkpoints.make_random_llama(tmp_path, {"attention_bias": True, "mlp_bias": True})
    _, tensors = stored(tmp_path)
    params = load(tmp_path)
    layer = params["layers"][1]
    np.testing.assert_array_equal(
        layer["attn"]["q"]["kernel"], tensors["model.layers.1.self_attn.q_proj.weight"].T
    )
    np.testing.assert_array_equal(
        layer["attn"]["o"]["bias"], tensors["model.layers.1.self_attn.o_proj.bias"]
    )
    np.testing.assert_array_equal(
        layer["mlp"]["down"]["bias"], tensors["model.layers.1.mlp.down_proj.bias"]
    )
    np.testing.assert_array_equal(
        params["embed"]["embedding"], tensors["model.embed_tokens.weight"]
    )
    np.testing.assert_array_equal(params["lm_head"]["kernel"], tensors["lm_head.weight"].T)
    assert layer.keys() == {"input_norm", "attn", "post_attn_norm", "mlp"}
    assert params.keys() == {"embed", "layers", "norm", "lm_head"}
    assert params["layers"].keys() == {0, 1}
    count = sum(leaf.size for leaf in leaves(params))
    assert count == sum(array.size for array in tensors.values())


def leaves(tree: dict) -> list[np.ndarray]:
    found = []
    for value in tree.values():
        found += leaves(value) if isinstance(value, dict) else [value]
    return found


def owner(array: np.ndarray) -> object:
    """Whose memory an array is a view of."""
    return array if array.base is None else owner(array.base)


def test_parameters_are_ours_contiguous_aligned_and_of_the_asked_dtype(random_llama):
    params, _ = load_params(open_checkpoint(random_llama), ml_dtypes.bfloat16)
    for leaf in leaves(params):
        assert leaf.dtype == ml_dtypes.bfloat16
        assert type(leaf) is np.ndarray
        assert type(owner(leaf)) is np.ndarray  # and no mapped file
        assert leaf.flags.c_contiguous
        assert leaf.ctypes.data % 64 == 0  # so that XLA uses it in place


def test_a_fault_in_one_of_many_readers_is_raised(random_llama, monkeypatch):
    checkpoint = open_checkpoint(random_llama)
    read = checkpoint.source.read

    def fail(name: str, begin: int = 0, end: int | None = None) -> np.ndarray:
        if name == GATE:
            raise CheckpointError(f"tensor {name!r} went away")
        return read(name, begin, end)

    monkeypatch.setattr(checkpoint.source, "read", fail)
    with pytest.raises(CheckpointError, match="went away"):
        load_params(checkpoint, np.float32)


def test_c34_shards_with_and_without_index_give_the_same_parameters(random_llama, three_shards):
    expected = load(random_llama)
    assert_trees_equal(load(three_shards), expected)
    (three_shards / "model.safetensors.index.json").unlink()
    assert_trees_equal(load(three_shards), expected)


def test_c34_missing_shard(three_shards):
    path = sorted(three_shards.glob("*.safetensors"))[1]
    path.unlink()
    with pytest.raises(CheckpointError, match=rf"{re.escape(path.name)}: shard is missing"):
        open_checkpoint(three_shards)


def test_c34_missing_tensor(three_shards):
    rewrite(three_shards, GATE, None)
    with pytest.raises(
        CheckpointError, match=rf"tensor '{GATE}' is missing, expected shape \[80, 48\]"
    ):
        load(three_shards)


def test_c34_truncated_shard(three_shards):
    path = sorted(three_shards.glob("*.safetensors"))[2]
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(
        CheckpointError, match=rf"{re.escape(path.name)}: tensor '.+' ends at byte .*truncated"
    ):
        open_checkpoint(three_shards)


def test_c34_transposed_tensor(three_shards):
    array = load_file(file_of(three_shards, GATE))[GATE]
    path = rewrite(three_shards, GATE, np.ascontiguousarray(array.T))
    message = (
        rf"{re.escape(path.name)}: tensor '{GATE}': expected shape \[80, 48\], found \[48, 80\]"
    )
    with pytest.raises(CheckpointError, match=message):
        load(three_shards)


@pytest.mark.parametrize(
    ("dtype", "word"), [("float64", "F64"), ("int32", "I32"), ("float8_e4m3fn", "F8_E4M3")]
)
def test_c34_dtypes_that_are_no_weights(three_shards, dtype, word):
    array = load_file(file_of(three_shards, GATE))[GATE]
    path = rewrite(three_shards, GATE, array.astype(np.dtype(dtype)))
    message = (
        rf"{re.escape(path.name)}: tensor '{GATE}': expected dtype F32, F16, BF16, found {word}"
    )
    with pytest.raises(CheckpointError, match=message):
        load(three_shards)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_c34_half_precision_gives_nearly_the_same_logits(tmp_path, dtype):
    for name, stored_dtype in (("f32", np.float32), ("half", dtype)):
        checkpoints.make_random_llama(tmp_path / name, dtype=stored_dtype, initializer_range=0.05)
    expected = numpy_llama.forward(tmp_path / "f32", [1, 2, 3, 4])
    found = numpy_llama.forward(tmp_path / "half", [1, 2, 3, 4])
    assert 0 < np.abs(found - expected).max() < 1e-2


def test_c31_unknown_tensor_is_an_error_and_inv_freq_is_not(random_llama):
    config, tensors = stored(random_llama)
    expected = load(random_llama)
    harmless = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32),
        "model.rotary_emb.inv_freq": np.ones(8, np.int32),
    }
    write_hf_directory(random_llama, config, tensors | harmless)
    assert_trees_equal(load(random_llama), expected)
    for name in (
        "model.layers.0.foo",
        "model.layers.2.mlp.up_proj.weight",
        "model.layers.0.self_attn.q_proj.bias",
    ):
        write_hf_directory(random_llama, config, tensors | {name: np.ones(3, np.float32)})
        with pytest.raises(
            CheckpointError,
            match=rf"model\.safetensors: tensor '{name}' \(F32\[3\]\) belongs to no",
        ):
            load(random_llama)


def test_c31_biases_the_config_asks_for_must_be_stored(random_llama):
    config, tensors = stored(random_llama)
    write_hf_directory(random_llama, config | {"attention_bias": True}, tensors)
    with pytest.raises(
        CheckpointError, match=r"'model\.layers\.0\.self_attn\.q_proj\.bias' is missing"
    ):
        load(random_llama)


@pytest.mark.parametrize("head", ["absent", "equal", "different"])
def test_c30_tied_heads(tmp_path, caplog, head):
    checkpoints.make_random_llama(tmp_path, {"tie_word_embeddings": True})
    config, tensors = stored(tmp_path)
    embedding = tensors["model.embed_tokens.weight"]
    if head != "absent":
        tensors["lm_head.weight"] = embedding + (head == "different")
    write_hf_directory(tmp_path, config, tensors)
    with caplog.at_level(logging.WARNING):
        params, effective = load_params(open_checkpoint(tmp_path), np.float32)
    if head == "different":
        np.testing.assert_array_equal(params["lm_head"]["kernel"], tensors["lm_head.weight"].T)
        assert not effective.tie_word_embeddings
        assert "the stored head is used" in caplog.text
    else:
        assert "lm_head" not in params
        assert effective.tie_word_embeddings
        assert not caplog.records


def test_c30_untied_heads(tmp_path):
    checkpoints.make_random_llama(tmp_path)
    config, tensors = stored(tmp_path)
    np.testing.assert_array_equal(load(tmp_path)["lm_head"]["kernel"], tensors["lm_head.weight"].T)
    del config["tie_word_embeddings"]  # the class default is untied
    np.testing.assert_array_equal(load(tmp_path)["lm_head"]["kernel"], tensors["lm_head.weight"].T)
    del tensors["lm_head.weight"]
    write_hf_directory(tmp_path, config, tensors)
    with pytest.raises(CheckpointError, match=r"tensor 'lm_head\.weight' is missing"):
        load(tmp_path)


def test_c30_a_stored_head_of_the_wrong_shape_is_an_error_even_when_tied(tmp_path):
    checkpoints.make_random_llama(tmp_path, {"tie_word_embeddings": True})
    config, tensors = stored(tmp_path)
    write_hf_directory(
        tmp_path, config, tensors | {"lm_head.weight": np.zeros((95, 48), np.float32)}
    )
    with pytest.raises(
        CheckpointError, match=r"'lm_head\.weight': expected shape \[96, 48\], found \[95, 48\]"
    ):
        load(tmp_path)


def test_pickles_are_refused_by_name(random_llama):
    (random_llama / "pytorch_model.bin").write_bytes(b"x")
    load(random_llama)  # beside safetensors it is simply not read
    (random_llama / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin: \.bin files are pickles"):
        open_checkpoint(random_llama)
    for suffix in (".bin", ".pt", ".pth", ".pkl"):
        path = random_llama / f"weights{suffix}"
        path.write_bytes(b"x")
        with pytest.raises(CheckpointError, match=rf"{suffix} files are pickles"):
            open_checkpoint(path)


def test_a_renamed_pickle_is_refused_by_content(random_llama, tmp_path):
    (random_llama / "model.safetensors").write_bytes(pickle.dumps([1.0]))
    with pytest.raises(
        CheckpointError, match=r"model\.safetensors: expected a safetensors file, found a pickle"
    ):
        open_checkpoint(random_llama)
    gguf = tmp_path / "model.gguf"
    gguf.write_bytes(pickle.dumps([1.0]))
    with pytest.raises(CheckpointError, match="expected a GGUF file, found a pickle"):
        open_checkpoint(gguf)


def test_what_is_no_checkpoint_says_what_it_lacks(random_llama, tmp_path):
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        open_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="no such file"):
        open_checkpoint(tmp_path / "nothing")
    with pytest.raises(CheckpointError, match="give the directory"):
        open_checkpoint(random_llama / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"expected a checkpoint directory or a \.gguf"):
        open_checkpoint(random_llama / "config.json")
    (random_llama / "model.safetensors").rename(random_llama / "model.h5")
    with pytest.raises(CheckpointError, match=r"no \*\.safetensors file; found model\.h5"):
        open_checkpoint(random_llama)
    (random_llama / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json: not JSON"):
        open_checkpoint(random_llama)
    (random_llama / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"config\.json: must hold a JSON object"):
        open_checkpoint(random_llama)


def test_text_files_come_along_and_the_template_file_wins(tmp_path):
    checkpoints.make_random_llama(
        tmp_path,
        tokenizer_json='{"a": "é"}',
        tokenizer_config={"chat_template": "from config", "eos_token": "</s>"},
        generation_config={"eos_token_id": [3]},
    )
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.tokenizer_json == '{"a": "é"}'
    assert checkpoint.tokenizer_config["eos_token"] == "</s>"
    assert checkpoint.config.eos_token_ids == (3,)
    assert checkpoint.chat_template == "from config"
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert open_checkpoint(tmp_path).chat_template == {"tool_use": "t", "default": "d"}
    (tmp_path / "chat_template.jinja").write_text("from file")
    assert open_checkpoint(tmp_path).chat_template == "from file"


def test_a_checkpoint_without_a_tokenizer_has_none(random_llama):
    checkpoint = open_checkpoint(random_llama)
    assert (checkpoint.tokenizer_json, checkpoint.tokenizer_config, checkpoint.chat_template) == (
        None,
        {},
        None,
    )


@pytest.fixture
def places(tmp_path, monkeypatch) -> SimpleNamespace:
    """An empty current directory, a source checkout elsewhere, and an empty home."""
    here, checkout = tmp_path / "here", tmp_path / "checkout"
    here.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    monkeypatch.setattr(manifest, "checkout_folder", lambda: checkout)
    cache = tmp_path / ".cache/jaxserve/checkpoints"
    return SimpleNamespace(here=here, checkout=checkout, cache=cache)


def test_resolve_model_tries_path_then_checkpoints_then_checkout_then_cache(places):
    here = places.here
    in_cache = checkpoints.make_random_llama(places.cache / "tiny")
    assert resolve_model("tiny") == in_cache
    checkpoints.make_random_llama(places.checkout / "tiny")
    assert resolve_model("tiny") == places.checkout / "tiny"
    checkpoints.make_random_llama(here / "checkpoints" / "tiny")
    assert resolve_model("tiny") == Path("checkpoints/tiny")
    (
        here / "tiny"
    ).mkdir()  # a folder of that name that is no checkpoint does not hide the real one
    assert resolve_model("tiny") == Path("checkpoints/tiny")
    assert resolve_model(in_cache) == in_cache
    assert resolve_model(".") == Path(".")
    with pytest.raises(CheckpointError, match="got ''"):
        resolve_model("")
    by_organisation = checkpoints.make_random_llama(places.cache / "org" / "name")
    assert resolve_model("org/name") == by_organisation
    (here / "org").mkdir()  # a folder called like the organisation hides nothing
    assert resolve_model("org/name") == by_organisation


NOT_FOUND = [
    (
        "nope",
        "no such path, and no checkpoint of that name in checkpoints, {checkout}, {cache};"
        " known names: org/model, qwen2.5-coder-0.5b-instruct, smollm2-135m-instruct, tiny",
    ),
    ("tinny", "in checkpoints, {checkout}, {cache}; did you mean 'tiny'?; known names: "),
    ("Tiny", "; did you mean 'tiny'?; known names: "),
    ("smollm2-135m-instruct", "; run: jaxserve fetch smollm2-135m-instruct; known names: "),
    (
        "smolm2-135M-instruct",
        "; did you mean 'smollm2-135m-instruct'? (run: jaxserve fetch smollm2-135m-instruct); known",
    ),
    ("far/away", "{cache}; from the Hugging Face hub: jaxserve fetch far/away; known names: "),
    (
        "org/modle",
        "; did you mean 'org/model'?; from the Hugging Face hub: jaxserve fetch org/modle; known",
    ),
    ("checkpoints/nope", "no such file or directory; known names: "),
    ("checkpoints/tinny", "no such file or directory; did you mean 'checkpoints/tiny'?; known"),
    (
        "checkpoints/smollm2-135m-instruct",
        "no such file or directory; run: jaxserve fetch smollm2-135m-instruct; known names: ",
    ),
    ("folder/nope", "no such file or directory; known names: "),
    ("./nope", "no such file or directory; known names: "),
    ("../nope", "no such file or directory; known names: "),
    ("{cache}/tinny", "no such file or directory; did you mean '{cache}/tiny'?; known"),
    ("nope.gguf", "no such file or directory; known names: "),
    ("a b", "no such file or directory; known names: "),
]


@pytest.mark.parametrize(("text", "message"), NOT_FOUND)
def test_a_model_that_is_not_there_gets_a_hint(places, text, message):
    for folder in (places.cache / "tiny", places.checkout / "org/model", Path("checkpoints/tiny")):
        checkpoints.make_random_llama(folder)
    (places.cache / ".tiny.partial-1").mkdir()
    (places.cache / ".tiny.partial-1" / "config.json").write_text("{}")
    Path("folder").mkdir()
    text, message = (one.format(**vars(places)) for one in (text, message))
    with pytest.raises(CheckpointError) as caught:
        resolve_model(text)
    assert str(caught.value).startswith(f"model {text!r} not found: ")
    assert message in str(caught.value)
    assert "checkpoints/checkpoints" not in str(caught.value)
    has_hint = "did you mean" in message or "run:" in message
    assert has_hint or "did you mean" not in str(caught.value)
    assert "jaxserve fetch" in message or "jaxserve fetch" not in str(caught.value)


def test_a_long_list_of_names_is_cut(places):
    for number in range(30):
        (places.cache / f"m{number:02d}").mkdir(parents=True)
        (places.cache / f"m{number:02d}" / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"known names: m00, .*, m19, \.\.\.$"):
        resolve_model("something")


def test_the_model_can_say_which_tree_it_expects(random_llama):
    checkpoint = open_checkpoint(random_llama)
    shapes = _abstract(load(random_llama))
    load_params(checkpoint, np.float32, shapes)
    shapes["norm"]["scale"] = SimpleNamespace(shape=(47,))
    with pytest.raises(
        CheckpointError,
        match=r"norm/scale: the model expects \(47,\), the checkpoint gives \(48,\)",
    ):
        load_params(checkpoint, np.float32, shapes)
    del shapes["norm"]
    with pytest.raises(CheckpointError, match="norm/scale: the model expects None"):
        load_params(checkpoint, np.float32, shapes)


def _abstract(tree: dict) -> dict:
    return {
        key: _abstract(value) if isinstance(value, dict) else SimpleNamespace(shape=value.shape)
        for key, value in tree.items()
    }
