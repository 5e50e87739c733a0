"""The stop watcher: what is released, what is held, where ids and text are cut."""

from collections.abc import Sequence

import hypothesis.strategies as st
import pytest
from hypothesis import example, given, settings

from jaxserve.text.watcher import Observation, StopWatcher
from tests.text import tokenizers_for_tests as make

BYTE_LEVEL = make.wrap(make.byte_level())
SENTENCEPIECE = make.wrap(make.sentencepiece_like())


def watch(
    pieces: Sequence[str],
    stop: Sequence[str],
    *,
    together: bool = False,
    include: bool = False,
    min_tokens: int = 0,
) -> list[Observation]:
    """Observations over tokens whose texts are `pieces`, one by one or all together, and the flush."""
    watcher = StopWatcher(
        lambda ids: "".join(pieces[i] for i in ids),
        stop=stop,
        include_stop_str_in_output=include,
        min_tokens=min_tokens,
    )
    ids = list(range(len(pieces)))
    calls = [ids] if together else [[i] for i in ids]
    observations = []
    for call in calls:
        observations.append(watcher.observe(call))
        if observations[-1].stopped:
            return observations
    return [*observations, watcher.flush()]


def joined(observations: list[Observation]) -> tuple[str, int, str | None]:
    return (
        "".join(o.text for o in observations),
        sum(o.num_tokens for o in observations),
        observations[-1].stop_reason,
    )


C02 = ["ab", "DEF", "G", "HI", "Jxx", "yy"]


@pytest.mark.parametrize("together", [True, False])
def test_c02_no_piece_of_a_stop_string_leaks(together):
    observations = watch(C02, ["DEFGHIJ"], together=together)
    assert joined(observations) == ("ab", 1, "DEFGHIJ")
    assert observations[-1].stopped
    if not together:
        assert [o.text for o in observations] == ["ab", "", "", "", ""]
        assert [o.num_tokens for o in observations] == [1, 0, 0, 0, 0]


@pytest.mark.parametrize("together", [True, False])
def test_c02_included_stop_is_cut_inside_the_last_token(together):
    observations = watch(C02, ["DEFGHIJ"], together=together, include=True)
    assert joined(observations) == ("abDEFGHIJ", 5, "DEFGHIJ")


@pytest.mark.parametrize("stop", [["DEFGHIJ", "FGH"], ["FGH", "DEFGHIJ"]])
def test_c02_earliest_match_wins_whatever_the_order_of_the_list(stop):
    assert joined(watch(["ab", "DEFGHIJ"], stop)) == ("ab", 1, "DEFGHIJ")
    # Token by token the shorter one is complete first, and generation ends there.
    assert joined(watch(C02, stop)) == ("abDE", 2, "FGH")


@pytest.mark.parametrize("stop", [["DEF", "DEFG"], ["DEFG", "DEF"]])
@pytest.mark.parametrize("pieces", [["ab", "DEFGH"], ["ab", "D", "EF", "G"]])
def test_c02_of_two_that_begin_together_the_shorter_wins(stop, pieces):
    text, _, reason = joined(watch(pieces, stop, include=True))
    assert (text, reason) == ("abDEF", "DEF")


def test_text_that_may_become_a_stop_is_released_when_it_does_not():
    observations = watch(["ab", "DE", "FX", "D"], ["DEFG"])
    assert [o.text for o in observations] == ["ab", "", "DEFX", "", "D"]
    assert [o.num_tokens for o in observations] == [1, 0, 2, 0, 1]
    assert not observations[-1].stopped


def test_hold_falls_back_to_a_shorter_prefix():
    # "aab" may begin at the first or at the second "a".
    assert [o.text for o in watch(["a", "a", "a", "b"], ["aab"])] == ["", "", "a", ""]


def test_an_id_is_released_with_the_last_of_its_text():
    observations = watch(["xD", "y"], ["DE"])
    assert [(o.text, o.num_tokens) for o in observations[:2]] == [("x", 0), ("Dy", 2)]
    # Cut inside it, the id is kept: its text begins before the cut.
    assert joined(watch(["xD", "E"], ["DE"])) == ("x", 1, "DE")


def test_ids_without_text_are_released_at_once_or_with_what_they_follow():
    observations = watch(["a", "", "D", "", "b"], ["DE"])
    assert [o.num_tokens for o in observations[:5]] == [1, 1, 0, 0, 3]


def test_text_behind_the_stop_in_the_same_token_is_dropped():
    assert joined(watch(["one\n\nUser: two"], ["\n\nUser:"])) == ("one", 1, "\n\nUser:")


def test_later_ids_are_dropped_after_a_stop():
    watcher = StopWatcher(lambda ids: "".join("abS"[i] for i in ids), stop=["S"])
    assert watcher.observe([0, 2, 1, 1]) == Observation("a", 1, "S", True)
    assert watcher.observe([1]) == Observation("", 0, "S", True)
    assert watcher.flush() == Observation("", 0, "S", True)


def test_stop_at_the_very_beginning_keeps_nothing():
    assert joined(watch(["STOP", "x"], ["STOP"])) == ("", 0, "STOP")


def test_without_stop_strings_every_whole_token_is_released_at_once():
    ids = BYTE_LEVEL.encode("hello wor🙂")
    watcher = StopWatcher(BYTE_LEVEL)
    observations = [watcher.observe([i]) for i in ids]
    assert [o.num_tokens for o in observations] == [1] * (len(ids) - 4) + [0, 0, 0, 4]
    assert watcher.flush() == Observation("", 0, None, False)


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, SENTENCEPIECE])
def test_stop_string_made_of_character_pieces(tokenizer):
    ids = tokenizer.encode("ab🙂🙃a", add_special_tokens=False)
    before = tokenizer.encode("ab", add_special_tokens=False)
    for include, text, num_pieces in ((False, "ab🙂", 4), (True, "ab🙂🙃", 8)):
        watcher = StopWatcher(tokenizer, stop=["🙃"], include_stop_str_in_output=include)
        seen = joined([*(watcher.observe([i]) for i in ids), watcher.flush()])
        assert seen == (text, len(before) + num_pieces, "🙃")


def test_special_tokens_are_text_only_when_not_skipped():
    ids = BYTE_LEVEL.encode("hello<|im_end|>")
    skipping = StopWatcher(BYTE_LEVEL, stop=["<|im"])
    assert joined([skipping.observe(ids), skipping.flush()]) == ("hello", len(ids), None)
    showing = StopWatcher(BYTE_LEVEL, stop=["<|im"], skip_special_tokens=False)
    assert joined([showing.observe(ids)]) == ("hello", len(ids) - 1, "<|im")


def test_flush_may_complete_a_stop():
    before = SENTENCEPIECE.encode("ab", add_special_tokens=False)
    ids = SENTENCEPIECE.encode("ab🙂", add_special_tokens=False)  # the run may still go on
    watcher = StopWatcher(SENTENCEPIECE, stop=["🙂"])
    seen = [watcher.observe(ids), watcher.flush()]
    assert not seen[0].stopped
    assert joined(seen) == ("ab", len(before), "🙂")
    assert seen[1].stopped


PIECES = st.lists(st.text("abS", max_size=4), max_size=14)
STOPS = st.lists(st.text("abS", min_size=1, max_size=4), min_size=1, max_size=3)


@settings(max_examples=500, deadline=None)
@given(PIECES, STOPS, st.booleans())
@example(["aS", "ab", "Sa"], ["Sab", "bS"], False)
def test_any_pieces_and_stops(pieces, stops, include):
    """Against the plain meaning: look at the whole text after each token."""
    expected, reason = "".join(pieces), None
    for count in range(1, len(pieces) + 1):
        text = "".join(pieces[:count])
        found = [(text.find(s), len(s), s) for s in stops if s in text]
        if found:
            start, length, reason = min(found)
            expected = text[: start + length] if include else text[:start]
            break
    ends = [len("".join(pieces[: i + 1])) for i in range(len(pieces))]
    for together in (True, False):
        observations = watch(pieces, stops, together=together, include=include)
        text, num_tokens, seen_reason = joined(observations)
        assert (text, seen_reason) == (expected, reason)
        if reason is None:
            assert num_tokens == len(pieces)
        elif 0 < num_tokens < len(pieces):
            # The next token's text begins behind the cut, the kept ones cover the text.
            assert ends[num_tokens - 1] >= len(text)
            assert num_tokens < 2 or ends[num_tokens - 2] <= len(text)
        if not include:
            assert not any(stop in text for stop in stops)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, BYTE_LEVEL.vocab_size - 1), max_size=40), st.integers(1, 5))
def test_released_text_is_the_decode_of_the_released_ids(ids, batch):
    watcher = StopWatcher(BYTE_LEVEL, stop=["never in these texts \n"])
    text, num_tokens = "", 0
    for start in range(0, len(ids), batch):
        observation = watcher.observe(ids[start : start + batch])
        text += observation.text
        num_tokens += observation.num_tokens
        assert text.startswith(BYTE_LEVEL.decode(ids[:num_tokens]).rstrip("\ufffd"))
    last = watcher.flush()
    assert text + last.text == BYTE_LEVEL.decode(ids)
    assert num_tokens + last.num_tokens == len(ids)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=24), st.sampled_from(["é", "€", "🙂", "\ufffd", "a\ufffd"]))
@example("aa€€".encode(), "€")
def test_stops_among_broken_characters(data, stop):
    names = [f"<0x{byte:02X}>" for byte in data]
    ids = [SENTENCEPIECE._tokenizer.token_to_id(name) for name in names]
    full = SENTENCEPIECE.decode(ids)
    one = StopWatcher(SENTENCEPIECE, stop=[stop])
    text = joined([*(one.observe([i]) for i in ids), one.flush()])[0]
    assert text == full.split(stop)[0]


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize(
    ("min_tokens", "text", "num_ids", "reason"),
    [
        (0, "a", 1, "S"),
        (1, "a", 1, "S"),
        (2, "aSb", 3, "S"),
        (3, "aSb", 3, "S"),
        (4, "aSbSc", 5, None),
        (9, "aSbSc", 5, None),
    ],
)
def test_c05_a_stop_string_counts_behind_the_first_tokens(
    together, min_tokens, text, num_ids, reason
):
    seen = watch(["a", "S", "b", "S", "c"], ["S"], together=together, min_tokens=min_tokens)
    assert joined(seen) == (text, num_ids, reason)


def test_c05_a_stop_string_that_begins_in_the_first_tokens_does_not_count():
    pieces = ["a", "S", "T", "b", "ST", "c"]
    assert joined(watch(pieces, ["ST"], min_tokens=2)) == ("aSTb", 4, "ST")
    assert joined(watch(pieces, ["ST"], min_tokens=1)) == ("a", 1, "ST")
    # Nothing of what cannot count is held back.
    assert [o.text for o in watch(pieces, ["ST"], min_tokens=2)[:3]] == ["a", "S", "T"]


def test_c05_the_first_tokens_are_released_though_they_are_halves_of_a_character():
    ids = BYTE_LEVEL.encode("a🙂")  # a, and four pieces
    assert len(ids) == 5
    for min_tokens, num_ids in ((1, 1), (2, 2), (4, 4)):
        watcher = StopWatcher(BYTE_LEVEL, stop=["🙂"], min_tokens=min_tokens)
        assert joined([watcher.observe(ids), watcher.flush()]) == ("a", num_ids, "🙂")
    watcher = StopWatcher(BYTE_LEVEL, stop=["🙂"], min_tokens=5)
    assert joined([watcher.observe(ids), watcher.flush()]) == ("a🙂", 5, None)


@settings(max_examples=300, deadline=None)
@given(PIECES, STOPS, st.booleans(), st.integers(0, 6))
def test_c05_any_pieces_stops_and_min_tokens(pieces, stops, include, min_tokens):
    """Against the plain meaning: look, after each token, at the text behind the first ones."""
    first = len("".join(pieces[:min_tokens]))
    expected, reason = "".join(pieces), None
    for count in range(min_tokens, len(pieces) + 1):
        text = "".join(pieces[:count])
        found = [(text.find(s, first), len(s), s) for s in stops if text.find(s, first) >= 0]
        if found:
            start, length, reason = min(found)
            expected = text[: start + length] if include else text[:start]
            break
    for together in (True, False):
        seen = watch(pieces, stops, together=together, include=include, min_tokens=min_tokens)
        text, num_tokens, seen_reason = joined(seen)
        assert (text, seen_reason) == (expected, reason)
        assert num_tokens >= min(min_tokens, len(pieces))
