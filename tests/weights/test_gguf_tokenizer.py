"""Tokenizers rebuilt from GGUF metadata: they encode as the libraries do that the files' models came with."""

import inspect
import json
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import Qwen2Tokenizer
from transformers.convert_slow_tokenizer import TikTokenConverter

from jaxserve.errors import CheckpointError
from jaxserve.text.tokenizer import Tokenizer as ServedTokenizer
from jaxserve.weights.checkpoint import Checkpoint
from jaxserve.weights.gguf_tokenizer import _PRE_TOKENIZERS, tokenizer_json
from jaxserve.weights.loader import open_checkpoint
from tests import checkpoints
from tests.gguf_files import write_gguf

ORACLES = Path(__file__).parent.parent / "oracles"


@pytest.fixture
def model(tmp_path) -> Checkpoint:
    return open_checkpoint(checkpoints.make_random_llama(tmp_path / "hf"))


TOKENS = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<tool>",
    "a",
    "b",
    "ab",
    "1",
    "2",
    "Ġ",
    "Ġa",
    "12",
]
TOKENIZER = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": [3, 3, 3, 4] + [1] * 8,
    "tokenizer.ggml.merges": ["a b", "Ġ a", "1 2"],
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.unknown_token_id": 0,
    "tokenizer.ggml.padding_token_id": 2,
    "tokenizer.chat_template": "{{ messages }}",
}


HARD_TEXTS = [
    "it's THEY'LL we\u2019re I'Ve",
    "1234567 3.14 \u0663\u0664 x2y",
    "  two  spaces \n\n\n and\ttabs\r\nends \n",
    "e\u0301 \u1100\u1161 (caf\u00e9)...!!",
    "def f(x):\n    return {'a': x**2}  # comment\n\n",
    "\u6f22\u5b57\u3068\u4eee\u540d \U0001f600\U0001f3fd",
    "CamelCaseWords ABCdef \u00c9T\u00c9 a/b/c//",
]


def _trained_uncut() -> dict[str, Any]:
    """A byte-level BPE whose merges know no bounds of words, digits or lines: how text is cut before it
    shows in what is merged."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=["<|endoftext|>", "<|im_start|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([text for text in HARD_TEXTS for _ in range(3)], trainer)
    return json.loads(tokenizer.to_str())["model"]


TINY = _trained_uncut()


def tiny_metadata(pre: str) -> dict[str, Any]:
    """That BPE, with a way to cut text before it."""
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": sorted(TINY["vocab"], key=TINY["vocab"].__getitem__),
        "tokenizer.ggml.merges": [" ".join(pair) for pair in TINY["merges"]],
        "tokenizer.ggml.bos_token_id": 1,
    }


def rebuilt(metadata: dict[str, Any]) -> Tokenizer:
    text = tokenizer_json(Path("m.gguf"), metadata)
    assert text is not None
    return Tokenizer.from_str(text)


@pytest.mark.parametrize("text", HARD_TEXTS)
def test_qwen2_is_cut_as_transformers_cuts_it(text):
    theirs = Qwen2Tokenizer(vocab=TINY["vocab"], merges=[tuple(pair) for pair in TINY["merges"]])
    ours = rebuilt(tiny_metadata("qwen2"))
    assert ours.encode(text).ids == theirs.encode(text)
    assert ours.decode(ours.encode(text).ids) == unicodedata.normalize("NFC", text)


def test_each_way_to_cut_is_another():
    """The control of the test above: with these merges a wrong way to cut is seen."""
    found = {
        pre: [
            rebuilt(tiny_metadata(pre)).encode(text, add_special_tokens=False).ids
            for text in HARD_TEXTS
        ]
        for pre in ("qwen2", "gpt-2", "smollm", "llama-bpe", "tekken")
    }
    names = [*found]
    for i, one in enumerate(names):
        for other in names[i + 1 :]:
            assert found[one] != found[other], (one, other)


def test_llama3_is_cut_as_transformers_cuts_it():
    pattern = inspect.signature(TikTokenConverter.__init__).parameters["pattern"].default
    assert _PRE_TOKENIZERS["llama-bpe"].pattern == pattern
    cutter = rebuilt(tiny_metadata("llama-bpe")).pre_tokenizer
    pieces = [piece for piece, _ in cutter.pre_tokenize_str("it's 12345 a\n\nb")]
    assert pieces == ["it", "'s", "\u0120", "123", "45", "\u0120a", "\u010a\u010a", "b"]


def test_llama3_takes_whole_pieces_before_it_merges():
    """ "ab" + "c" is no merge, and neither is "a" + "bc": only as a whole is "abc" ever found."""
    metadata = tiny_metadata("llama-bpe")
    tokens = [*metadata["tokenizer.ggml.tokens"], "Zqv"]
    metadata["tokenizer.ggml.tokens"] = tokens
    assert rebuilt(metadata).encode("Zqv", add_special_tokens=False).tokens == ["Zqv"]
    metadata["tokenizer.ggml.pre"] = "qwen2"
    assert rebuilt(metadata).encode("Zqv", add_special_tokens=False).tokens == ["Z", "q", "v"]


def test_texts_of_llama3_begin_with_bos_where_the_file_does_not_say():
    metadata = tiny_metadata("llama-bpe")
    assert rebuilt(metadata).encode("a").ids[0] == 1
    assert rebuilt(metadata | {"tokenizer.ggml.add_bos_token": False}).encode("a").ids[0] != 1
    assert rebuilt(tiny_metadata("qwen2")).encode("a").ids[0] != 1
    del metadata["tokenizer.ggml.bos_token_id"]
    with pytest.raises(CheckpointError, match=r"begin with the bos token .*no bos_token_id"):
        rebuilt(metadata)


def test_tekken_cuts_where_case_changes():
    cutter = rebuilt(tiny_metadata("tekken")).pre_tokenizer
    pieces = [piece for piece, _ in cutter.pre_tokenize_str("CamelCase ABCdef 12 a//\n")]
    assert pieces == ["Camel", "Case", "\u0120ABCdef", "\u0120", "1", "2", "\u0120a", "//\u010a"]


SENTENCEPIECE = json.loads((ORACLES / "sentencepiece.json").read_text("utf-8"))
PIECES = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.pre": "default",
    "tokenizer.ggml.tokens": SENTENCEPIECE["tokens"],
    "tokenizer.ggml.scores": SENTENCEPIECE["scores"],
    "tokenizer.ggml.token_type": SENTENCEPIECE["kinds"],
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.unknown_token_id": 0,
}


@pytest.mark.parametrize("case", SENTENCEPIECE["texts"], ids=lambda case: repr(case["text"]))
def test_sentencepiece_encodes_as_the_library_does(case):
    tokenizer = rebuilt(PIECES)
    assert tokenizer.encode(case["text"], add_special_tokens=False).ids == case["ids"]
    assert tokenizer.encode(case["text"]).ids == [1, *case["ids"]]
    assert tokenizer.decode(case["ids"]) == case["text"]


def test_sentencepiece_is_served(tmp_path, model):
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", model, metadata=PIECES))
    assert checkpoint.tokenizer_json is not None
    served = ServedTokenizer(checkpoint.tokenizer_json, checkpoint.tokenizer_config, None)
    case = SENTENCEPIECE["texts"][4]
    assert served.encode(case["text"]) == [1, *case["ids"]]
    assert served.eos_token_ids == (2,)


def test_special_tokens_of_phi3_take_the_spaces_behind_them():
    tokens = [*SENTENCEPIECE["tokens"], "<|user|>", "<|tool|>"]
    more = {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [*SENTENCEPIECE["scores"], -1000.0, -1000.0],
        "tokenizer.ggml.token_type": [*SENTENCEPIECE["kinds"], 3, 4],
    }
    user = len(tokens) - 2
    text = "<|user|>\n a"
    phi3 = rebuilt(PIECES | more | {"general.architecture": "phi3"})
    llama = rebuilt(PIECES | more | {"general.architecture": "llama"})
    assert phi3.encode(text).ids == [1, user, *phi3.encode("a", add_special_tokens=False).ids]
    assert llama.encode(text).ids[:3] == [1, user, tokens.index("\u2581")]
    assert phi3.encode("<s> a").ids[1:] == llama.encode("<s> a").ids[1:]


def encode(checkpoint: Checkpoint, text: str, **options: Any) -> list[str]:
    assert checkpoint.tokenizer_json is not None
    return Tokenizer.from_str(checkpoint.tokenizer_json).encode(text, **options).tokens


def test_several_chat_templates_are_found_by_their_names(tmp_path, model):
    more = {
        "tokenizer.chat_templates": ["tool_use"],
        "tokenizer.chat_template.tool_use": "{{ tools }}",
    }
    found = open_checkpoint(write_gguf(tmp_path / "n.gguf", model, metadata=TOKENIZER | more))
    assert found.chat_template == {"default": "{{ messages }}", "tool_use": "{{ tools }}"}


def test_tokenizer_is_rebuilt_and_digits_are_split_where_the_file_says_so(tmp_path, model):
    smollm = open_checkpoint(write_gguf(tmp_path / "s.gguf", model, metadata=TOKENIZER))
    gpt2 = open_checkpoint(
        write_gguf(tmp_path / "g.gguf", model, metadata=TOKENIZER | {"tokenizer.ggml.pre": "gpt-2"})
    )
    assert encode(smollm, "ab a12<tool>") == ["ab", "Ġa", "1", "2", "<tool>"]
    assert encode(gpt2, "ab a12<tool>") == ["ab", "Ġa", "12", "<tool>"]
    tokenizer = Tokenizer.from_str(smollm.tokenizer_json)
    ids = tokenizer.encode("<|im_start|>ab<tool><|im_end|>").ids
    assert ids == [1, 6, 3, 2]
    assert (
        tokenizer.decode(ids) == "ab<tool>"
    )  # control tokens are special, user-defined ones are text
    assert smollm.chat_template == "{{ messages }}"
    expected = {
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "unk_token": "<|endoftext|>",
        "pad_token": "<|im_end|>",
        "add_bos_token": False,
    }
    assert {key: smollm.tokenizer_config[key] for key in expected} == expected


def test_add_bos_token_puts_it_in_front(tmp_path, model):
    metadata = TOKENIZER | {"tokenizer.ggml.add_bos_token": True}
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", model, metadata=metadata))
    assert checkpoint.tokenizer_config["add_bos_token"] is True
    assert encode(checkpoint, "ab") == ["<|im_start|>", "ab"]
    assert encode(checkpoint, "ab", add_special_tokens=False) == ["ab"]


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        (
            {"tokenizer.ggml.model": "t5"},
            r"tokenizer\.ggml\.model must be 'gpt2' .* or 'llama' .*got 't5'",
        ),
        ({"tokenizer.ggml.model": "llama"}, "scores must hold 12 floats"),
        (
            {"tokenizer.ggml.model": "llama", "tokenizer.ggml.scores": [1] * 12},
            "scores must hold 12 floats",
        ),
        (
            {
                "tokenizer.ggml.model": "llama",
                "tokenizer.ggml.tokens": [*TOKENS[:-1], "a" * 600],
                "tokenizer.ggml.scores": [-1.0] * 12,
            },
            "a piece must have at most 512 characters, one has 600",
        ),
        ({"tokenizer.ggml.pre": "jais"}, r"pre must be one of gpt-2, .*got 'jais'"),
        ({"tokenizer.ggml.pre": 7}, r"pre must be one of gpt-2, .*got 7"),
        ({"tokenizer.ggml.merges": ["a zz"]}, "merges: 'a zz' is no merge of two tokens"),
        ({"tokenizer.ggml.merges": ["ab"]}, "merges: 'ab' is no merge"),
        ({"tokenizer.ggml.tokens": ["a"] * 12}, "holds 11 duplicates"),
        ({"tokenizer.ggml.token_type": [1]}, "token_type must hold 12 entries"),
        ({"tokenizer.ggml.bos_token_id": 12}, r"bos_token_id must be in \[0, 12\), got 12"),
    ],
)
def test_tokenizer_tables_that_do_not_fit_are_refused(tmp_path, model, metadata, message):
    path = write_gguf(tmp_path / "m.gguf", model, metadata=TOKENIZER | metadata)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(path)
