"""Text through the whole engine: characters in pieces, stop strings, end sets, chat; streamed and
whole.
"""

import pytest
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models, pre_tokenizers

from jaxserve.errors import InvalidRequestError
from jaxserve.llm import LLM
from jaxserve.request import SamplingParams, merge_outputs
from tests.checkpoints import make_script
from tests.llms import greedy, shared_llm, stream_all

SMALL = {"max_num_seqs": 2, "max_num_batched_tokens": 8, "max_model_len": 64, "num_pages": 16}
SMALL |= {"page_size": 4, "token_buckets": (8,), "row_buckets": (2,)}


def byte_level_tokenizer(words: list[str]) -> tuple[RawTokenizer, dict[str, int]]:
    """A byte-level tokenizer whose vocabulary is the 256 bytes and `words`; words are not merged
    by encode.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: i for i, char in enumerate(alphabet)}
    coder = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    for word in words:
        coded = "".join(piece for piece, _ in coder.pre_tokenize_str(word))
        vocab.setdefault(coded, len(vocab))
    tokenizer = RawTokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = coder
    tokenizer.decoder = decoders.ByteLevel()
    ids = {
        word: vocab["".join(piece for piece, _ in coder.pre_tokenize_str(word))] for word in words
    }
    return tokenizer, ids


def byte_ids(tokenizer: RawTokenizer, text: str) -> list[int]:
    return tokenizer.encode(text).ids


def script(directory, pieces: list[str], **options) -> tuple[LLM, RawTokenizer, list[int]]:
    """An engine that says `pieces`: each a word that is one token, or a text said byte by byte."""
    words = [p for p in pieces if p.isascii()]
    tokenizer, ids = byte_level_tokenizer(words)
    chain: list[int] = []
    for piece in pieces:
        chain += [ids[piece]] if piece in ids else byte_ids(tokenizer, piece)
    make_script(
        directory,
        chain,
        vocab_size=tokenizer.get_vocab_size(),
        tokenizer_json=tokenizer.to_str(),
        **options,
    )
    return LLM(str(directory), **SMALL), tokenizer, chain


@pytest.mark.parametrize(
    "pieces", [[" Ol", "á", " ", "ď", "bel", " ", "🙂", " end"], [" x ", "👩‍🚀", " end"]]
)
def test_c01_characters_made_of_several_tokens(tmp_path, pieces):
    text = "".join(pieces)
    pieces = [p for p in pieces if p != " "]  # a token may occur once in a script
    text = "".join(pieces)
    if len(set("".join(p for p in pieces if not p.isascii()).encode())) < len(
        "".join(p for p in pieces if not p.isascii()).encode()
    ):
        pieces, text = [" x ", "🙂", " end"], " x 🙂 end"  # the joiner repeats bytes of the picture
    llm, tokenizer, chain = script(tmp_path, pieces)
    params = SamplingParams(max_tokens=len(chain), temperature=0, ignore_eos=True)
    whole = llm.generate([[1]], params)[0].outputs[0]
    parts = stream_all(llm, [1], params)
    assert whole.token_ids == chain
    assert whole.text == text == tokenizer.decode(chain)
    assert whole.text[0] == " "
    assert "".join(p.outputs[0].text for p in parts) == text
    assert [t for p in parts for t in p.outputs[0].token_ids] == chain
    assert not any("�" in p.outputs[0].text for p in parts)


@pytest.fixture(scope="module")
def stop_llm(tmp_path_factory):
    return script(tmp_path_factory.mktemp("stop"), ["ab", "DEF", "G", "HI", "Jxx", "yy"])


@pytest.mark.parametrize(
    ("stop", "include", "text", "num_ids"),
    [
        (["DEFGHIJ"], False, "ab", 1),
        (["DEFGHIJ"], True, "abDEFGHIJ", 5),
        (["FGH", "DEFGHIJ"], False, "abDE", 2),
        (["FGHIJ", "GH"], False, "abDEF", 2),
        (["b"], False, "a", 1),
    ],
)
def test_c02_stop_strings_across_tokens(stop_llm, stop, include, text, num_ids):
    llm, _, chain = stop_llm
    params = greedy(6, stop=stop, include_stop_str_in_output=include)
    whole = llm.generate([[1]], params)[0].outputs[0]
    parts = stream_all(llm, [1], params)
    assert whole.text == "".join(p.outputs[0].text for p in parts) == text
    assert whole.token_ids == chain[:num_ids]
    assert len(whole.logprobs) == num_ids
    assert whole.finish_reason == "stop"
    assert whole.stop_reason in stop
    assert merge_outputs(parts).outputs[0] == whole


def test_c02_held_text_is_flushed_when_the_budget_ends(stop_llm):
    llm, _, chain = stop_llm
    whole = llm.generate([[1]], greedy(4, stop=["DEFGHIJ"]))[0].outputs[0]
    assert (whole.text, whole.token_ids, whole.finish_reason) == ("abDEFGHI", chain[:4], "length")


def test_held_text_is_handed_out_by_an_abort(stop_llm):
    llm, _, chain = stop_llm
    llm.add("r", [1], greedy(6, stop=["DEFGHIJ"]))
    seen = [o.outputs[0].text for _ in range(3) for o in llm.step()]
    last = llm.engine.abort("r").outputs[0]
    assert ("".join(seen), last.text, last.finish_reason) == ("ab", "DEFG", "abort")
    assert last.token_ids == chain[1:3]


@pytest.mark.parametrize("generation_config", [{"eos_token_id": [3, 9]}, None])
def test_c04_the_end_set_is_the_union_of_three_files(tmp_path, generation_config):
    tokenizer, _ = byte_level_tokenizer([])
    specials = {"eos_token": tokenizer.id_to_token(11)}
    ends = {3, 9, 11} if generation_config else {3, 11}
    for end in (3, 9, 11):
        path = tmp_path / str(end)
        make_script(
            path,
            [20, 21, end, 30, 31],
            vocab_size=256,
            tokenizer_json=tokenizer.to_str(),
            tokenizer_config=specials,
            generation_config=generation_config,
            config={"eos_token_id": 3},
        )
        llm = LLM(str(path), **SMALL)

        def ids(llm=llm, **fields):
            out = llm.generate([[1]], greedy(5, **fields))[0].outputs[0]
            return out.token_ids, out.finish_reason

        if end in ends:
            assert ids(ignore_eos=False) == ([20, 21, end], "stop")
        else:
            assert ids(ignore_eos=False) == ([20, 21, end, 30, 31], "length")
        assert ids(ignore_eos=True) == ([20, 21, end, 30, 31], "length")
        stopped = [20, 21, 9] if end == 9 else [20, 21, end, 30, 31]
        assert ids(ignore_eos=True, stop_token_ids=[9])[0] == stopped


def test_c36_chat_prompts_are_what_the_template_says():
    llm = shared_llm()
    messages = [{"role": "user", "content": "hi"}]
    ids = llm.encode_chat(messages)
    assert ids == llm.tokenizer.encode(
        llm.tokenizer.render_chat(messages), add_special_tokens=False
    )
    found = [
        llm.chat(messages, greedy(3))[0],
        llm.chat([messages], greedy(3))[0],
        llm.generate([ids], greedy(3))[0],
    ]
    assert [output.num_prompt_tokens for output in found] == [len(ids)] * 3
    assert len({tuple(output.outputs[0].token_ids) for output in found}) == 1
    assert len({output.outputs[0].text for output in found}) == 1


@pytest.mark.parametrize("prompts", ["", [""], [[]], [[1], []], ["ok", ""]])
def test_c06_empty_prompts_are_refused_and_nothing_stays_behind(prompts):
    llm = shared_llm()
    with pytest.raises(InvalidRequestError, match="at least one token"):
        llm.generate(prompts, greedy(2))
    assert not llm.engine.has_work()
    llm.engine.check_invariants()
    assert len(llm.generate([[1]], greedy(2))[0].outputs[0].token_ids) == 2


def test_c06_no_messages_are_refused():
    with pytest.raises(InvalidRequestError) as caught:
        shared_llm().chat([], greedy(2))
    assert caught.value.param == "messages"
    assert shared_llm().generate([], greedy(2)) == []


def test_leaving_a_stream_early_aborts_it():
    llm = shared_llm()
    for output in llm.stream([1, 2, 3], greedy(50)):
        assert output.outputs[0].token_ids
        break
    assert not llm.engine.has_work()
    llm.engine.check_invariants()


def test_callers_that_take_turns_do_not_lose_each_other_s_outputs():
    llm = shared_llm()
    alone = {n: llm.generate([[n]], greedy(9, logprobs=False))[0].outputs[0] for n in (1, 2, 3, 4)}
    llm.add("added", [4], greedy(9, logprobs=False))
    parts = []
    for i, part in enumerate(llm.stream([1], greedy(9, logprobs=False))):
        parts.append(part)
        if i == 2:  # a whole batch, run inside the loop of a stream
            inner = llm.generate([[2], [3]], greedy(9, logprobs=False))
            assert [o.outputs[0] for o in inner] == [alone[2], alone[3]]
    assert merge_outputs(parts).outputs[0] == alone[1]
    added = llm.step()
    assert not llm.engine.has_work()
    assert merge_outputs(added).outputs[0] == alone[4]


def test_a_stream_ends_when_its_request_is_aborted():
    llm = shared_llm()
    stream = llm.stream([1], greedy(50))
    next(stream)
    (running,) = [seq.request.id for seq in llm.engine.scheduler.running]
    llm.engine.abort(running)
    assert list(stream) == []
    assert not llm.engine.has_work()
