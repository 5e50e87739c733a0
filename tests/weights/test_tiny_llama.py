"""The committed tiny checkpoint: what it is, and that its script makes it again byte for byte."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from jaxserve.weights.loader import load_params, open_checkpoint
from tests import numpy_llama

ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "checkpoints" / "tiny_llama"


def test_it_is_made_again_byte_for_byte(tmp_path):
    script = ROOT / "scripts" / "make_tiny_checkpoint"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run(
        [sys.executable, script, tmp_path], check=True, capture_output=True, env=environment
    )
    committed = {path.name: path.read_bytes() for path in TINY.iterdir()}
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == committed
    assert sum(map(len, committed.values())) < 2_000_000


def test_its_shape_is_the_awkward_one():
    _, config = load_params(open_checkpoint(TINY), np.float32)
    assert (config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim) == (
        96,
        9,
        3,
        64,
    )
    assert (config.num_layers, config.tie_word_embeddings) == (2, True)
    assert config.vocab_size <= 512


def test_its_tokenizer_covers_every_byte_and_splits_digits():
    checkpoint = open_checkpoint(TINY)
    assert checkpoint.tokenizer_json is not None
    tokenizer = Tokenizer.from_str(checkpoint.tokenizer_json)
    assert tokenizer.get_vocab_size() == checkpoint.config.vocab_size
    text = "Once upon a time, 1234 🙂 Olá\n\tdef f(x):"
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert len(tokenizer.encode("1234").ids) == 4
    assert tokenizer.encode("<|im_start|>a<|im_end|>").ids[::2] == [1, 2]


def test_an_early_token_changes_the_last_logits():
    checkpoint = open_checkpoint(TINY)
    a = numpy_llama.forward(checkpoint, [10, 20, 30, 40, 50, 60])[-1]
    b = numpy_llama.forward(checkpoint, [11, 20, 30, 40, 50, 60])[-1]
    assert np.abs(a - b).max() > 0.1
