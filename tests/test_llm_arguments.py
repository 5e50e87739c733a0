"""What `LLM` accepts, and what it says to everything else."""

import numpy as np
import pytest

from jaxserve.errors import CheckpointError, ConfigError, InvalidRequestError
from jaxserve.llm import LLM
from jaxserve.request import SamplingParams
from tests.llms import TINY, greedy, shared_llm


def ids_of(prompts, params=None):
    outputs = shared_llm().generate(prompts, params or greedy(3, logprobs=False))
    return [o.outputs[0].token_ids for o in outputs]


@pytest.mark.parametrize(
    "prompt",
    [
        [5, 6, 7],
        (5, 6, 7),
        np.array([5, 6, 7]),
        np.array([5, 6, 7], np.uint8),
        [np.int64(5), np.int32(6), 7],
        [[5, 6, 7]],
        [(5, 6, 7)],
        [np.array([5, 6, 7])],
        np.array([[5, 6, 7]]),
    ],
)
def test_one_prompt_of_ids_in_many_shapes(prompt):
    assert ids_of(prompt) == ids_of([[5, 6, 7]])


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        (None, "prompts must be a text, a list of token ids, or a list of these, got None"),
        (5, "got 5"),
        (b"abc", r"got b'abc'"),
        ({"prompt": "a"}, "got {'prompt': 'a'}"),
        (iter(["a"]), "got <list_iterator"),
        ([None], r"prompts\[0\] must be a text or a list of token ids, got None"),
        (["a", 5], r"prompts\[1\] must be a text or a list of token ids, got 5"),
        ([b"abc"], r"prompts\[0\]"),
        ([5, "a"], "token ids must be integers, got 'a'"),
        ([5, 1.5], "token ids must be integers, got 1.5"),
        ([[5, None]], "token ids must be integers, got None"),
        ([[[5]]], r"token ids must be integers, got \[5\]"),
    ],
)
def test_bad_prompts_are_named(prompts, message):
    with pytest.raises(InvalidRequestError, match=message) as caught:
        ids_of(prompts)
    assert caught.value.param == "prompt"
    assert not shared_llm().has_work()


@pytest.mark.parametrize("params", [{}, {"max_tokens": 3}, "x", 5, [None], [greedy(1), 5]])
def test_bad_sampling_params_are_named(params):
    with pytest.raises(
        InvalidRequestError, match="sampling_params must be SamplingParams"
    ) as caught:
        shared_llm().generate(["a", "b"], params)
    assert caught.value.param == "sampling_params"


def test_one_sampling_params_per_prompt():
    with pytest.raises(InvalidRequestError, match="got 1 for 2"):
        shared_llm().generate(["a", "b"], [greedy(1)])


@pytest.mark.parametrize("messages", [{"role": "user"}, "hi", None, 5, [5], ["hi"], [[5]], [[]]])
def test_bad_messages_are_named(messages):
    with pytest.raises(InvalidRequestError) as caught:
        shared_llm().chat(messages, greedy(1))
    assert caught.value.param == "messages"


def test_numpy_numbers_in_sampling_params():
    plain = SamplingParams(max_tokens=3, temperature=0.5, top_k=5, seed=3, stop_token_ids=[5])
    assert plain == SamplingParams(
        max_tokens=np.int64(3),
        temperature=np.float32(0.5),
        top_k=np.int32(5),
        seed=np.uint64(3),
        stop_token_ids=np.array([5]),
    )
    with pytest.raises(InvalidRequestError, match="temperature"):
        SamplingParams(temperature=np.float32("nan"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_cache_gib": 1e308}, r"kv_cache_gib must be a number in \(0, 1048576\]"),
        ({"kv_cache_gib": 10**400}, "kv_cache_gib must be .* got an integer of 1329 bits"),
        ({"compilation_cache_dir": 5}, "compilation_cache_dir must be a folder, got 5"),
        ({"max_model_len": 4096}, "max_model_len must be at most 2048"),
        ({"attention_backend": "tpu"}, "attention_backend='tpu' runs on tpu, and this is cpu"),
        ({"attention_backend": "gpu"}, "attention_backend='gpu' runs on gpu, and this is cpu"),
        (
            {"kv_cache_dtype": "fp8"},
            "kv_cache_dtype must be one of auto, float32, bfloat16, int8, fp8_e4m3, got 'fp8'",
        ),
        (
            {"attention_interpret": True},
            "attention_interpret=True: attention backend 'xla' has no kernel",
        ),
        ({"attention_interpret": "yes"}, "attention_interpret must be True or False, got 'yes'"),
        (
            {
                "attention_backend": "tpu",
                "attention_interpret": True,
                "page_size": 4,
                "max_num_seqs": 512,
                "max_num_batched_tokens": 512,
            },
            "page_size=4 with max_num_seqs=512 and max_model_len=2048: page_table: 512 rows of 512 pages",
        ),
        ({"attention_backend": "nope"}, "attention_backend='nope': no such backend"),
        ({"num_pages": 10**8}, "num_pages: 100000000 KV pages take"),
        (
            {"num_seqs": 4},
            r"unknown option 'num_seqs'; did you mean 'max_num_seqs'\? known: .*, seed",
        ),
        ({"zzz": 4}, "unknown option 'zzz'; known: "),
        (
            {"enable_prefix_cache": False},
            r"'enable_prefix_cache'; did you mean 'enable_prefix_caching'\?",
        ),
    ],
)
def test_bad_options_are_named_before_anything_is_compiled(options, message):
    with pytest.raises(ConfigError, match=message):
        LLM(str(TINY), **options)


def test_outputs_of_added_requests_wait_for_the_next_step():
    llm = shared_llm()
    llm.add("mine", [5, 6, 7], greedy(3, logprobs=False))
    assert ids_of([[5, 6, 7]]) == [ids_of([[5, 6, 7]])[0]]
    collected = []
    while llm.has_work():
        collected += [
            i for o in llm.step() if o.request_id == "mine" for i in o.outputs[0].token_ids
        ]
    assert [collected] == ids_of([[5, 6, 7]])


def test_nothing_stays_behind_when_one_of_several_is_bad():
    llm = shared_llm()
    for max_tokens in (0, 3):
        with pytest.raises(InvalidRequestError, match=r"\[0, 512\)"):
            llm.generate([[5], [600]], greedy(max_tokens))
        assert not llm.has_work()
        assert llm.step() == []


@pytest.mark.parametrize("prompt", [None, 5, b"ab", {"prompt": "a"}])
def test_a_stream_of_what_is_no_prompt_says_so(prompt):
    with pytest.raises(InvalidRequestError, match="prompt must be a text or a list of token ids"):
        next(shared_llm().stream(prompt, greedy(1)))
    assert not shared_llm().has_work()


@pytest.mark.parametrize("model", [None, 5, b"model", ["model"]])
def test_a_model_that_is_no_name_is_refused(model):
    with pytest.raises(
        CheckpointError, match=r"model must be a directory, a \.gguf file or a name"
    ):
        LLM(model)
