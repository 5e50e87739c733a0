"""`LLM.chat`: what a template refuses is the request's error, and the engine never hears of it."""

import shutil
import time

import pytest

from jaxserve.errors import InvalidRequestError
from jaxserve.llm import LLM
from tests.llms import TINY, greedy, shared_llm

SMALL = {"max_num_seqs": 2, "max_num_batched_tokens": 32, "max_model_len": 256, "num_pages": 20}
SMALL |= {"token_buckets": (32,), "row_buckets": (2,)}
STRICT = """\
{%- if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif -%}
{%- for m in messages %}
{%- if loop.index0 and messages[loop.index0 - 1].role == m.role %}
{{- raise_exception('roles must alternate') }}{% endif -%}
{{ bos_token if loop.first }}{{ m.role }}:{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif -%}
{{ m.content }};
{%- endfor %}
{%- for tool in tools or [] %}{{ tool.function.name }},{% endfor %}"""
USER = {"role": "user", "content": "hi"}


@pytest.fixture(scope="module")
def strict(tmp_path_factory):
    path = tmp_path_factory.mktemp("strict") / "model"
    shutil.copytree(TINY, path)
    (path / "chat_template.jinja").write_text(STRICT)
    return LLM(str(path), **SMALL)


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([{"role": "system", "content": "x"}, USER], "System role not supported"),
        ([USER, USER], "roles must alternate"),
        ([[USER], [USER, USER]], "roles must alternate"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "image_url"),
    ],
)
def test_c37_what_the_template_refuses_is_the_request_s_error(strict, messages, words):
    with pytest.raises(InvalidRequestError, match=words) as caught:
        strict.chat(messages, greedy(2))
    assert caught.value.param == "messages"
    assert caught.value.to_dict()["type"] == "invalid_request_error"
    assert not strict.engine.has_work()
    strict.engine.check_invariants()
    assert len(strict.chat([USER], greedy(2))[0].outputs[0].token_ids) == 2


def test_c37_empty_and_null_fields_are_left_out(strict):
    plain = [USER, {"role": "assistant", "content": ""}, USER]
    odd = {"role": "assistant", "content": None, "tool_calls": [], "name": None, "refusal": None}
    assert strict.encode_chat([USER, odd, USER]) == strict.encode_chat(plain)
    first = strict.chat([USER, odd, USER], greedy(3))[0]
    assert first.outputs == strict.chat(plain, greedy(3))[0].outputs


@pytest.mark.parametrize(
    "source",
    [
        "{{ nothing.more }}",
        "{% for i in range(10**9) %}x{% endfor %}",
        "{{ ''.__class__.__mro__ }}",
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    ],
)
def test_c37_a_template_that_fails_or_runs_away_is_refused_in_time(strict, source, monkeypatch):
    from jaxserve.text.chat_template import ChatTemplate

    monkeypatch.setattr(strict.tokenizer, "_template", ChatTemplate(source, special_tokens={}))
    begin = time.monotonic()
    with pytest.raises(InvalidRequestError, match="refused by the chat template") as caught:
        strict.chat([USER], greedy(2))
    assert time.monotonic() - begin < 20  # the limit is 2 s; the machine may be busy
    assert caught.value.param == "messages"
    assert not strict.engine.has_work()


def test_c37_without_a_template_chat_is_refused_and_prompts_are_served(tmp_path):
    path = tmp_path / "model"
    shutil.copytree(TINY, path)
    (path / "chat_template.jinja").unlink(missing_ok=True)
    config = (path / "tokenizer_config.json").read_text()
    (path / "tokenizer_config.json").write_text(config.replace('"chat_template"', '"unused"'))
    llm = LLM(str(path), **SMALL)
    with pytest.raises(InvalidRequestError, match="no chat template") as caught:
        llm.chat([USER], greedy(2))
    assert caught.value.param == "messages"
    assert len(llm.generate(["hi"], greedy(2))[0].outputs[0].token_ids) == 2


def test_tools_reach_the_template_and_bos_is_there_once(strict):
    tools = [{"type": "function", "function": {"name": name}} for name in ("now", "later")]
    ids = strict.encode_chat([USER], tools)
    assert strict.tokenizer.decode(ids) == "user:hi;now,later,"
    assert ids.count(strict.tokenizer.bos_token_id) == 1
    found = strict.chat([[USER], [USER]], greedy(3), tools=tools)
    assert [out.num_prompt_tokens for out in found] == [len(ids)] * 2
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    assert strict.encode_chat([USER | {"content": parts}], tools) == ids


def test_bad_tools_are_refused_before_anything_runs(strict):
    with pytest.raises(InvalidRequestError, match=r"tools\[0\]") as caught:
        strict.chat([USER], greedy(2), tools=[{"type": "function"}])
    assert caught.value.param == "tools"
    assert not strict.engine.has_work()
    with pytest.raises(InvalidRequestError, match="tools cannot be used"):
        shared_llm().chat(
            [USER], greedy(2), tools=[{"type": "function", "function": {"name": "f"}}]
        )
