"""GrammarCompiler and GrammarConstraint: which tokens each kind of grammar allows, and where it ends."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.constraints import grammar, grammar_check
from jaxserve.constraints.constraint import ids_mask, num_words
from jaxserve.constraints.grammar import _LITERALS, GrammarCompiler, GrammarConstraint
from jaxserve.errors import ConstraintError, InvalidRequestError
from jaxserve.structured_outputs import StructuredOutputs
from tests.constraints.walks import allowed_ids, walk
from tests.text.tokenizers_for_tests import (
    byte_level,
    sentencepiece_like,
    unigram_metaspace,
    word_piece,
)

TOKENIZER = byte_level(["h e", "l l", "he ll", "hell o", ', "', '" :', '{ "', "Ġ Ġ", "Ċ Ċ", "Ġ Ã"])
V = TOKENIZER.get_vocab_size()
END, OTHER_END = TOKENIZER.token_to_id("<|im_end|>"), TOKENIZER.token_to_id("<|endoftext|>")
COMPILER = GrammarCompiler(TOKENIZER.to_str(), end_ids=[END, OTHER_END], vocab_size=V)


def constraint(**wanted: object) -> GrammarConstraint:
    return COMPILER.constraint(StructuredOutputs(**wanted))  # type: ignore[arg-type]


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text).ids


def texts(token_ids: list[int]) -> set[str]:
    return {TOKENIZER.decode([i], skip_special_tokens=False) for i in token_ids}


def accepts(one: GrammarConstraint, text: str) -> bool:
    """Whether every token of a text is allowed in turn, and then the end."""
    tokens = ids(text)
    return all(
        token in allowed_ids(one, tokens[:index], V) for index, token in enumerate([*tokens, END])
    )


def refused(match: str, param: str, **wanted: object) -> None:
    with pytest.raises(InvalidRequestError, match=match) as caught:
        constraint(**wanted)
    assert caught.value.param == param


def test_the_end_set_is_allowed_exactly_where_the_text_is_complete():
    one = constraint(choice=["he", "hello"])
    assert one.needs_mask(0)
    assert one.needs_mask(10**6)
    ends = {"<|im_end|>", "<|endoftext|>"}
    assert texts(allowed_ids(one, [], V)) == {"h", "he", "hell", "hello"}
    assert texts(allowed_ids(one, ids("h"), V)) == {"e"}
    assert texts(allowed_ids(one, ids("he"), V)) == {"l", "ll"} | ends
    assert texts(allowed_ids(one, ids("hello"), V)) == ends
    assert texts(allowed_ids(one, [*ids("hello"), END], V)) == ends


def test_the_numbers_of_a_schema_have_no_leading_zero_and_no_blank():
    one = constraint(json={"type": "integer"})
    digits = set("0123456789")
    assert texts(allowed_ids(one, [], V)) == {*digits, "-"}
    assert texts(allowed_ids(one, ids("1"), V)) == {*digits, "<|im_end|>", "<|endoftext|>"}
    assert texts(allowed_ids(one, ids("0"), V)) == {"<|im_end|>", "<|endoftext|>"}


AB = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("text", "ok"),
    [
        ('{"a":1,"b":"x"}', True),
        ('{"a": 1, "b": "x"}', True),
        ('{"a": -0,"b": "y"}', True),
        ('{"a":  1,"b":"x"}', False),
        ('{"a":\t1,"b":"x"}', False),
        ('{"a":\n1,"b":"x"}', False),
        ('{"a":1,  "b":"x"}', False),
        ('{"a":1 ,"b":"x"}', False),
        ('{"a" :1,"b":"x"}', False),
        ('{ "a":1,"b":"x"}', False),
        ('{"a":1,"b":"x" }', False),
        (' {"a":1,"b":"x"}', False),
        ('{"a":1,"b":"x"} ', False),
        ('{"a":1,"b":"z"}', False),
        ('{"b":"x","a":1}', False),
        ('{"a":1,"b":"x","c":1}', False),
        ('{"a":1}', False),
    ],
)
def test_json_has_at_most_one_blank_behind_a_separator(text, ok):
    assert accepts(constraint(json=AB), text) is ok
    assert accepts(constraint(grammar=f"start: %json {json.dumps(AB)}"), text) is ok


@pytest.mark.parametrize(("text", "ok"), [('%json {}"{}', True), ("%json {}x{}", False)])
def test_a_literal_that_looks_like_a_schema_is_a_literal(text, ok):
    grammar = 'start: "%json {}" /"/ %json {"type": "object", "maxProperties": 0}'
    assert accepts(constraint(grammar=grammar), text) is ok


@pytest.mark.parametrize(
    ("text", "ok"),
    [
        ("{}", True),
        ('{"a": [1, {"b": null}], "": "\\n é\\u0000"}', True),
        ("{ }", False),
        ("[]", False),
        ('{"a":1}\n', False),
        ('{"a\n":1}', False),
        ('{"a":"\t"}', False),
        ('{"a":tru e}', False),
    ],
)
def test_json_object(text, ok):
    assert accepts(constraint(json_object=True), text) is ok


@pytest.mark.parametrize(
    ("wanted", "yes", "no"),
    [
        ({"regex": "[ab]{2,3}"}, ["ab", "bbb"], ["a", "abab", " ab"]),
        ({"regex": "^a|b$"}, ["a", "b"], ["ab", ""]),
        ({"regex": "é+/?"}, ["é", "éé/"], ["e"]),
        ({"grammar": 'start: "(" start ")" | "x"'}, ["x", "((x))"], ["((x)", ")"]),
        ({"json": {"const": {"a": [1.5, None, "é"]}}}, ['{"a":[1.5, null,"é"]}'], ['{"a":[1.5]}']),
        ({"json": {"type": "string", "maxLength": 2}}, ['"éé"', '"\\n"', '""'], ['"abc"', '"\n"']),
        ({"json": {"items": {"uniqueItems": False}, "type": "array"}}, ["[[1,1]]"], ["[ ]"]),
    ],
)
def test_each_kind_accepts_its_texts_and_no_others(wanted, yes, no):
    one = constraint(**wanted)
    assert [text for text in yes if not accepts(one, text)] == []
    assert [text for text in no if accepts(one, text)] == []


AWKWARD = [
    '"q"',
    "\\b",
    "a\nb",
    "\t",
    "é😀",
    "\u2028",
    " x ",
    "\x00",
    "\x7f",
    "/",
    "\x1e",
    "%",
    "<|im_end|>",
]


def test_a_choice_is_any_text():
    one = constraint(choice=AWKWARD)
    byte_ids = [[TOKENIZER.token_to_id(c) for c in pieces(text)] for text in AWKWARD]
    for tokens in byte_ids:
        for index, token in enumerate([*tokens, END]):
            assert token in allowed_ids(one, tokens[:index], V)
    assert END not in allowed_ids(one, [], V)  # the text "<|im_end|>" is not the token of that name


def pieces(text: str) -> str:
    """The characters that a byte-level vocabulary writes for the bytes of a text."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in kept]
    return "".join(chr(b) if b in kept else chr(256 + others.index(b)) for b in text.encode())


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.text("ahelo ", min_size=1, max_size=6), min_size=1, max_size=4),
    st.integers(0, 2**32 - 1),
)
def test_a_mask_is_what_each_token_alone_would_be_found_to_be(choices, seed):
    """The truth without a grammar: some choice begins with the text and the token's own text. Where the
    text can go on in one way only, one of its tokens will do: the tokenizer's own.
    """
    tokens = walk(
        constraint(choice=choices),
        np.random.default_rng(seed),
        end_ids=(END, OTHER_END),
        vocab_size=V,
        max_tokens=8,
    )
    assert tokens[-1] in (END, OTHER_END)
    for length in range(len(tokens)):
        said = TOKENIZER.decode(tokens[:length])
        allowed = set(allowed_ids(constraint(choice=choices), tokens[:length], V))
        expected = {
            i
            for i in range(V)
            if (own := TOKENIZER.decode([i]))
            and "\ufffd" not in own
            and any(choice.startswith(said + own) for choice in choices)
        }
        if said in choices:
            expected |= {END, OTHER_END}
        if allowed != expected:
            ways = sorted((TOKENIZER.decode([i]) for i in expected), key=len)
            assert len(allowed) == 1
            assert allowed < expected
            assert all(ways[-1].startswith(way) for way in ways)


SCHEMA = {
    "type": "array",
    "items": {"anyOf": [{"type": "string", "maxLength": 6}, {"type": "number"}, AB]},
    "maxItems": 4,
}


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 2**32 - 1), st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30))))
def test_a_constraint_goes_back_where_the_tokens_do(seed, cuts):
    """Asked in any order, also about another continuation, it says what a new one says."""
    rng = np.random.default_rng(seed)
    one, other = constraint(json=SCHEMA), constraint(json=SCHEMA)
    tokens = walk(one, rng, end_ids=(END, OTHER_END), vocab_size=V, max_tokens=30)
    branch = walk(other, rng, end_ids=(END, OTHER_END), vocab_size=V, max_tokens=30)
    for mine, others in cuts:
        for said in (tokens[:mine], branch[:others]):
            fresh = constraint(json=SCHEMA)
            assert allowed_ids(one, said, V) == allowed_ids(fresh, said, V)


def test_a_token_outside_the_grammar_is_an_error_of_this_request_alone():
    one = constraint(choice=["he"])
    with pytest.raises(ConstraintError, match=r"token \d+ after 1 others leaves the grammar"):
        allowed_ids(one, ids("hh"), V)
    assert texts(allowed_ids(one, ids("h"), V)) == {"e"}


def test_a_mask_that_costs_too_much_is_an_error_that_says_so():
    """It compiles, and the first token is one that it allows."""
    one = constraint(regex="(a?){500}a{500}")
    (a,) = ids("a")
    assert a in allowed_ids(one, [], V)
    for _ in range(2):
        with pytest.raises(ConstraintError, match=r"going on costs too much: .*too many"):
            allowed_ids(one, [a], V)


def test_a_text_that_no_token_can_go_on_with_is_an_error():
    """The tokenizer has a byte-fallback token for every byte, but the head does not sample it."""
    few = GrammarCompiler(TOKENIZER.to_str(), end_ids=[0], vocab_size=40)
    one = few.constraint(StructuredOutputs(regex="hello"))
    assert TOKENIZER.token_to_id("h") > 40
    with pytest.raises(ConstraintError, match="no token of the vocabulary"):
        allowed_ids(one, [], 40)


def test_rows_of_the_head_without_a_token_are_never_allowed():
    one = constraint(regex="(?s:.)*")
    mask = ids_mask(num_words(V + 100), V + 100)
    one.fill([], mask)
    assert not np.unpackbits(mask.view(np.uint8), bitorder="little")[V:].any()
    assert mask.any()


def test_special_tokens_are_no_text():
    allowed = allowed_ids(constraint(regex="(?s:.)*"), [], V)
    assert TOKENIZER.token_to_id("<|im_start|>") not in allowed
    assert TOKENIZER.token_to_id("a") in allowed


@pytest.mark.parametrize(
    ("match", "wanted"),
    [
        ("unclosed group", {"regex": "("}),
        ("look-around", {"regex": "a(?=b)"}),
        ("backreferences", {"regex": r"(a)\1"}),
        ("unclosed group", {"json": {"type": "string", "pattern": "("}}),
        ("look-around", {"json": {"type": "string", "pattern": "(?!a)b"}}),
        ("keyword 'not' is not supported", {"json": {"not": {}}}),
        ("provably exclude each other", {"json": {"oneOf": [{"type": "number"}, {"minimum": 1}]}}),
        ("Unsatisfiable", {"json": {"type": "integer", "minimum": 5, "maximum": 3}}),
        ("matches no text", {"json": {"$ref": "#"}}),
        ("not disjoint", {"json": {"patternProperties": {"^a": {"type": "null"}, "b$": True}}}),
        ("unknown name", {"grammar": "start: x"}),
        ("cannot set a temperature", {"grammar": "start: a\na[lazy, temperature=0.5]: /x/"}),
        ("cannot set a temperature", {"grammar": 'start[capture="]", temperature=2.0]: "a"'}),
        ("cannot set a temperature", {"grammar": 'start: A a\nA: /"/\na[temperature=2]: "a"'}),
        ("%json: .*nullable", {"grammar": 'start: %json {"type":"string","nullable":true}'}),
        ("%json: .*uniqueItems", {"grammar": 'start: %json {"type":"array","uniqueItems":true}'}),
        ("%json: .*x-guidance", {"grammar": 'start: %json {"x-guidance":{"lenient":true}}'}),
        ("%json must be followed by an object", {"grammar": "start: %json true"}),
        ("%json must be followed by an object", {"grammar": 'start: %json ["null"]'}),
        ("no start rule", {"grammar": 'root: "x"'}),
        ("matches no text", {"grammar": 'start: start "a"'}),
        ("too deeply nested", {"grammar": "start: " + "(" * 9000 + '"a"' + ")" * 9000}),
    ],
)
def test_what_cannot_be_served_is_refused_by_its_field(match, wanted):
    refused(match, f"structured_outputs.{next(iter(wanted))}", **wanted)


def patterns(number: int) -> dict:
    return {
        "allOf": [{"type": "string", "pattern": f"a{{{i}}}b.*c{{{i}}}"} for i in range(1, number)]
    }


def test_a_grammar_that_takes_too_long_is_refused():
    quick = GrammarCompiler(TOKENIZER.to_str(), end_ids=[END], vocab_size=V, time_limit_s=1)
    assert quick.constraint(StructuredOutputs(json=patterns(3)))
    with pytest.raises(InvalidRequestError, match="longer than 1 s of CPU time") as caught:
        quick.constraint(StructuredOutputs(json=patterns(30)))
    assert caught.value.param == "structured_outputs.json"


@pytest.mark.parametrize("quote", ['"', "/"])
def test_a_literal_without_an_end_is_looked_at_once(quote):
    """From each quote in it anew, 64 KB would take many seconds, in which no step could run."""
    text = quote + ("\\" + quote) * 1000
    assert [found.span() for found in _LITERALS.finditer(text)] == [(0, len(text))]
    with pytest.raises(
        InvalidRequestError, match=r"structured_outputs\.grammar cannot be served"
    ) as caught:
        COMPILER.constraint(StructuredOutputs(grammar=f"start: {text}"))
    assert len(caught.value.message) < 1100  # the compiler quotes the grammar


def test_grammars_are_kept_by_last_use(monkeypatch):
    compiled = []
    small = GrammarCompiler(TOKENIZER.to_str(), end_ids=[END], vocab_size=V, max_compiled=2)
    compile_one = small._compile
    monkeypatch.setattr(small, "_compile", lambda *a: (compiled.append(a[2]), compile_one(*a))[1])
    for regex in ("a", "b", "a", "c", "a", "b"):
        one = small.constraint(StructuredOutputs(regex=regex))
        assert texts(allowed_ids(one, [], V)) == {regex}
    assert compiled == ["a", "b", "c", "b"]
    same = StructuredOutputs(json={"type": "null"})
    small.constraint(same)
    small.constraint(StructuredOutputs(json=json.dumps({"type": "null"})))
    assert compiled[4:] == ['{"type":"null"}']


def test_what_is_refused_once_is_refused_at_once(monkeypatch):
    compiler = GrammarCompiler(TOKENIZER.to_str(), end_ids=[END], vocab_size=V)
    asked = []
    check = grammar.check_grammar
    monkeypatch.setattr(grammar, "check_grammar", lambda *a: (asked.append(a[0]), check(*a))[1])
    monkeypatch.setattr(grammar, "MAX_REFUSED", 2)
    words = set()
    for regex in ("(", "[", "(", "*", "(", "["):  # "[" has made room for "*"
        wanted = StructuredOutputs(regex=regex)
        is_known = compiler.has(wanted)
        with pytest.raises(InvalidRequestError, match="cannot be served") as caught:
            compiler.constraint(wanted)
        assert compiler.has(wanted)
        assert is_known == (regex == "(" and len(asked) > 1)
        if regex == "(":
            words.add((caught.value.message, caught.value.param))
    assert len(asked) == 4
    assert len(words) == 1


def test_what_was_not_found_out_is_tried_again(monkeypatch):
    compiler = GrammarCompiler(TOKENIZER.to_str(), end_ids=[END], vocab_size=V)
    monkeypatch.setattr(grammar_check, "PATIENCE", 0)
    wanted = StructuredOutputs(regex="abc")
    with pytest.raises(InvalidRequestError, match="not done in 0 s: other work has the CPU"):
        compiler.constraint(wanted)
    assert not compiler.has(wanted)
    monkeypatch.undo()
    assert compiler.constraint(wanted)


def test_sequences_of_one_grammar_do_not_see_each_other():
    one, other = constraint(regex="ab*"), constraint(regex="ab*")
    assert texts(allowed_ids(one, ids("a"), V)) == {"b", "<|im_end|>", "<|endoftext|>"}
    assert texts(allowed_ids(other, [], V)) == {"a"}


def test_a_model_without_an_end_token_is_refused():
    for end_ids in ([], [V + 3]):
        endless = GrammarCompiler(TOKENIZER.to_str(), end_ids=end_ids, vocab_size=V)
        with pytest.raises(InvalidRequestError, match="needs an end token") as caught:
            endless.constraint(StructuredOutputs(regex="a"))
        assert caught.value.param == "structured_outputs"


def test_tokenizers_whose_tokens_are_no_fixed_bytes_are_refused():
    for make in (word_piece, unigram_metaspace):
        compiler = GrammarCompiler(make().to_str(), end_ids=[1], vocab_size=10)
        with pytest.raises(InvalidRequestError, match="checkpoint's tokenizer") as caught:
            compiler.constraint(StructuredOutputs(regex="a"))
        assert caught.value.param == "structured_outputs"


def test_a_tokenizer_with_byte_fallback():
    tokenizer = sentencepiece_like()
    size = tokenizer.get_vocab_size()
    compiler = GrammarCompiler(tokenizer.to_str(), end_ids=[2], vocab_size=size)
    one = compiler.constraint(StructuredOutputs(choice=["ab é", "ac"]))
    name = tokenizer.id_to_token
    assert {name(i) for i in allowed_ids(one, [], size)} == {"a", "ab", "<0x61>"}
    said = [tokenizer.token_to_id(token) for token in ("ab", "▁", "<0xC3>")]
    assert {name(i) for i in allowed_ids(one, said, size)} == {"<0xA9>"}
    assert {name(i) for i in allowed_ids(one, [*said[:2], tokenizer.token_to_id("é")], size)} == {
        "</s>"
    }
