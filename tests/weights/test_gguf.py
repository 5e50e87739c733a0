"""GGUF: files written with the `gguf` package's writer must load as the Hugging Face weights they
were made from."""

import gguf
import numpy as np
import pytest

from jaxserve.errors import CheckpointError
from jaxserve.weights.checkpoint import Checkpoint
from jaxserve.weights.gguf import READABLE, GGUFSource
from jaxserve.weights.gguf_config import family_of
from jaxserve.weights.gguf_file import read_gguf
from jaxserve.weights.loader import load_params, open_checkpoint
from tests import checkpoints, numpy_llama
from tests.gguf_files import write_gguf


@pytest.fixture
def model(tmp_path) -> Checkpoint:
    return open_checkpoint(checkpoints.make_random_llama(tmp_path / "hf"))


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 2), (9, 3)])
@pytest.mark.parametrize("tied", [True, False])
def test_c33_rows_of_q_and_k_come_back_bit_for_bit(tmp_path, num_heads, num_kv_heads, tied):
    changes = {
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "tie_word_embeddings": tied,
        "attention_bias": True,
        "mlp_bias": True,
    }
    model = open_checkpoint(checkpoints.make_random_llama(tmp_path / "hf", changes))
    loaded = open_checkpoint(write_gguf(tmp_path / "m.gguf", model))
    expected = dict(model.tensors())
    found = dict(loaded.tensors())
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name, strict=True)
    assert loaded.config.tie_word_embeddings is tied
    params, _ = load_params(loaded, np.float32)
    assert ("lm_head" in params) is not tied
    logits = numpy_llama.forward(loaded, [3, 1, 4, 1, 5])
    np.testing.assert_allclose(logits, numpy_llama.forward(model, [3, 1, 4, 1, 5]), atol=1e-9)


def test_config_and_end_ids_come_from_the_metadata(tmp_path, model):
    ids = {
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.eot_token_id": 5,
        "tokenizer.ggml.bos_token_id": 1,
    }
    config = open_checkpoint(write_gguf(tmp_path / "m.gguf", model, metadata=ids)).config
    assert config.rms_norm_eps == 1e-5  # f32 in the file: 9.99999975e-06
    assert (config.vocab_size, config.hidden_size, config.head_dim) == (96, 48, 16)
    assert (config.eos_token_ids, config.bos_token_id) == ((2, 5), 1)


def test_linear_rope_scaling(tmp_path, model):
    scaling = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    rope = open_checkpoint(write_gguf(tmp_path / "m.gguf", model, metadata=scaling)).config.rope
    assert (rope.rope_type, rope.factor) == ("linear", 4.0)


def test_llama3_rope_scaling_is_recovered_from_the_divisors(tmp_path):
    scaling = {
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    changes = {
        "head_dim": 64,
        "rope_theta": 500000.0,
        "rope_scaling": {"rope_type": "llama3", **scaling},
    }
    model = open_checkpoint(checkpoints.make_random_llama(tmp_path / "hf", changes))
    plain = 500000.0 ** -(np.arange(0, 64, 2) / 64)
    divisors = (plain / numpy_llama.inverse_frequencies(model.config.rope, 64)).astype(np.float32)
    path = write_gguf(tmp_path / "m.gguf", model, extra={"rope_freqs.weight": divisors})
    loaded = open_checkpoint(path)
    assert loaded.config.rope == model.config.rope
    load_params(loaded, np.float32)
    # Others are served as they stand.
    divisors[20] *= 1.01
    path = write_gguf(tmp_path / "m.gguf", model, extra={"rope_freqs.weight": divisors})
    rope = open_checkpoint(path).config.rope
    assert (rope.rope_type, rope.attention_factor) == ("longrope", 1.0)
    for factors in (rope.short_factors, rope.long_factors):
        np.testing.assert_array_equal(np.array(factors, np.float32), divisors)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        (
            {"llama.rope.scaling.type": "ntk"},
            r"llama\.rope\.scaling\.type must be 'none', 'linear', 'yarn', .*got 'ntk'",
        ),
        (
            {"llama.rope.scaling.type": "longrope"},
            r"rope\.scaling\.type must be .*'longrope' beside rope_factors_long\.weight",
        ),
        (
            {
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.factor": 2.0,
                "llama.rope.scaling.yarn_ext_factor": 0.5,
            },
            r"yarn_ext_factor must be 1\.0 or absent, got 0\.5",
        ),
        ({"llama.rope.scaling.type": "yarn"}, r"rope\.scaling\.factor must be a float, got None"),
        ({"llama.expert_count": 8}, r"llama\.expert_count must be 0 .*got 8"),
        (
            {"llama.rope.dimension_count": 8},
            r"llama\.rope\.dimension_count must be the head size \(16\), got 8",
        ),
        (
            {"llama.attention.head_count_kv": [3, 3]},
            r"head_count_kv must be an integer, got \[3, 3\]",
        ),
        ({"split.count": 2}, r"split\.count must be 1"),
        (
            {"llama.block_count": 10**9},
            r"num_hidden_layers must be an integer in \[1, 1024\], got 1000000000",
        ),
    ],
)
def test_metadata_that_is_not_served_is_refused(tmp_path, model, metadata, message):
    path = write_gguf(tmp_path / "m.gguf", model, metadata=metadata)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(path)


@pytest.mark.parametrize("architecture", ["gemma3", "mistral3", "qwen3moe", "llama4"])
def test_c33_other_architectures_are_refused_by_name(tmp_path, model, architecture):
    path = write_gguf(tmp_path / "m.gguf", model, architecture=architecture)
    with pytest.raises(
        CheckpointError, match=f"general.architecture must be one of llama, .*got '{architecture}'"
    ):
        open_checkpoint(path)


def test_unknown_and_unreadable_tensors_are_named(tmp_path, model):
    path = write_gguf(
        tmp_path / "m.gguf", model, extra={"blk.0.attn_q_norm.weight": np.ones(16, np.float32)}
    )
    with pytest.raises(
        CheckpointError,
        match=r"tensor 'model\.layers\.0\.self_attn\.q_norm\.weight' .*no parameter",
    ):
        load_params(open_checkpoint(path), np.float32)
    path = write_gguf(tmp_path / "m.gguf", model)
    checkpoint = open_checkpoint(path)
    tensors = {**dict(model.tensors()), "model.norm.weight": np.ones(48, np.float64)}
    stand_in = Checkpoint(path=path, config=checkpoint.config, source=_Fixed(tensors))
    with pytest.raises(
        CheckpointError, match=r"'model\.norm\.weight': expected dtype .*F32.* found F64"
    ):
        load_params(open_checkpoint(write_gguf(path, stand_in)), np.float32)


class _Fixed:
    """A TensorSource over arrays in memory."""

    readable_dtypes = ""

    def __init__(self, tensors: dict[str, np.ndarray]):
        self.infos: dict = dict.fromkeys(tensors)
        self._tensors = tensors

    def read(self, name: str, begin: int = 0, end: int | None = None) -> np.ndarray:
        return self._tensors[name][begin:end]


@pytest.mark.parametrize("kind", sorted(READABLE))
def test_every_readable_type_can_be_dequantised(kind):
    kind = gguf.GGMLQuantizationType[kind]
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    rows = gguf.dequantize(np.zeros((2, block_bytes), np.uint8), kind)
    assert rows.shape == (2, block)
    assert rows.dtype == np.float32


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1", "BF16", "F16"])
def test_quantised_tensors_are_dequantised(tmp_path, kind):
    kind = gguf.GGMLQuantizationType[kind]
    changes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = open_checkpoint(checkpoints.make_random_llama(tmp_path / "hf", changes))
    array = model.source.read("model.layers.0.mlp.up_proj.weight")  # f32[80, 64]
    quantised = gguf.quantize(array, kind)
    writer = gguf.GGUFWriter(tmp_path / "one.gguf", "llama")
    writer.add_tensor("blk.0.ffn_up.weight", quantised, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = read_gguf(tmp_path / "one.gguf")
    source = GGUFSource(file, model.config, family_of(file))
    found = source.read("model.layers.0.mlp.up_proj.weight")
    assert found.shape == array.shape
    np.testing.assert_array_equal(found, gguf.dequantize(quantised, kind))
    assert 0 < np.abs(found - array).max() < 0.1


def test_every_cut_of_a_file_is_refused(tmp_path, model):
    path = write_gguf(
        tmp_path / "m.gguf", model, metadata={"general.tags": ["a", "b"], "x.numbers": [1, 2, 3]}
    )
    whole = path.read_bytes()
    # All of the head, then samples of the data.
    cuts = [*range(0, 1200, 7), *range(1200, len(whole), 9973), len(whole) - 1]
    for cut in cuts:
        path.write_bytes(whole[:cut])
        with pytest.raises(CheckpointError, match=r"m\.gguf"):
            open_checkpoint(path)


def test_hostile_lengths_do_not_hang(tmp_path, model):
    path = write_gguf(
        tmp_path / "m.gguf", model, metadata={"x.numbers": [1, 2, 3], "x.words": ["a"]}
    )
    whole = path.read_bytes()
    for key, old in ((b"x.numbers", 3), (b"x.words", 1)):
        at = whole.index(key) + len(key) + 4 + 4
        assert int.from_bytes(whole[at : at + 8], "little") == old
        path.write_bytes(whole[:at] + (2**60).to_bytes(8, "little") + whole[at + 8 :])
        with pytest.raises(CheckpointError, match="truncated"):
            open_checkpoint(path)
