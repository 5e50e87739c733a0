"""An Orbax checkpoint goes to several devices part by part, and is served there as anywhere."""

import json
import subprocess
import sys
from pathlib import Path

from jaxserve.weights.convert import convert
from tests import checkpoints
from tests.llms import FEW_BUCKETS, greedy, shared_llm

PROMPT = [5, 6, 7, 8, 9, 10, 11]
# Of the three KV heads none can be cut over two devices, so the model has two; over four, each is repeated.
MODEL = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64, "vocab_size": 97}
SERVE = """
import json, logging, sys
import jax
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 4)
from jaxserve.llm import LLM
from jaxserve.request import SamplingParams
from jaxserve.weights import orbax, param_stream

parts, whole = [], []
real_onto, real_param = orbax.OrbaxSource.read_onto, param_stream.read_param
def read_onto(self, name, sharding, dtype):
    parts.append(name)
    return real_onto(self, name, sharding, dtype)
def read_param(checkpoint, spec, dtype):
    whole.append(spec.name)
    return real_param(checkpoint, spec, dtype)
orbax.OrbaxSource.read_onto, param_stream.read_param = read_onto, read_param
options = json.loads(sys.argv[2])
llm = LLM(sys.argv[1], **options)
params = SamplingParams(max_tokens=10, temperature=0, ignore_eos=True)
tokens = llm.generate([json.loads(sys.argv[3])], params)[0].outputs[0].token_ids
print(json.dumps({"tokens": list(tokens), "parts": len(parts), "whole": sorted(set(whole))}))
"""
OPTIONS = {"max_num_seqs": 4, "max_num_batched_tokens": 32, "max_model_len": 128} | FEW_BUCKETS


def serve(model: Path, num_devices: int) -> dict:
    options = OPTIONS | {"tensor_parallel_size": num_devices, "num_pages": 16, "page_size": 16}
    done = subprocess.run(
        [sys.executable, "-c", SERVE, str(model), json.dumps(options), json.dumps(PROMPT)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_tokens_are_those_of_one_device_and_parts_are_read_on_their_own(tmp_path):
    source = checkpoints.make_random_llama(tmp_path / "source", MODEL)
    convert(source, tmp_path / "orbax", format="orbax")
    params = greedy(10)
    expected = shared_llm(source, **FEW_BUCKETS).generate([PROMPT], params)[0].outputs[0].token_ids
    found = serve(tmp_path / "orbax", 4)
    assert found["tokens"] == list(expected)
    assert found["parts"] == 2 * 7 + 1  # what is served as it is stored
    assert found["whole"] == [  # KV heads are repeated and the vocabulary is filled up
        "embed/embedding",
        *(f"layers/{i}/attn/{part}/kernel" for i in range(2) for part in "kv"),
        "lm_head/kernel",
    ]
