"""Chat templates: as transformers renders them, what is refused, and that no template runs away."""

import threading
import time

import pytest
import transformers

from jaxserve.errors import CheckpointError, InvalidRequestError
from jaxserve.text import chat_template
from jaxserve.text.chat_template import (
    ChatTemplate,
    TemplateSource,
    check_messages,
    check_tools,
)
from jaxserve.text.template_files import write_templates
from jaxserve.text.tokenizer import Tokenizer
from tests.text import tokenizers_for_tests as make

CHAT = [
    {"role": "system", "content": 'Be <brief> & "kind".'},
    {"role": "user", "content": "hello 🙂 'there'"},
    {"role": "assistant", "content": "hell"},
    {"role": "user", "content": "w or"},
]
TEMPLATES = {
    "chatml": make.CHATML,
    "whitespace": """
    {%- for message in messages %}
        {%- if loop.first and message.role == 'system' %}
            {{- bos_token + message.content | trim }}
        {%- elif loop.index0 % 2 %}
    [{{ loop.index }}/{{ loop.length }}] {{ message['content'] }}
        {% else %}
            {%- continue %}
        {%- endif %}
    {%- endfor %}
    {% if add_generation_prompt %}
    >>
    {% endif %}
""",
    "tojson": (
        "{{ messages | tojson }}|{{ messages[0] | tojson(indent=2) }}"
        "|{{ {'b': 1, 'a': 2}|tojson(sort_keys=True) }}"
    ),
    "undefined": (
        "[{{ nothing }}][{{ messages[0].nothing }}][{% if tools %}t{% endif %}][{{ tools }}]"
    ),
    "namespace": (
        "{% set ns = namespace(n=0) %}{% for m in messages if m.role != 'tool' %}"
        "{% set ns.n = ns.n + m.content|length %}{% endfor %}{{ ns.n ~ ' characters' }}"
        "{{ '%s-%s' % (1, 2) }}"
    ),
    "macro": (
        "{% macro show(m, depth) %}{{ m.content.upper() ~ depth }}{% if depth %}"
        "{{ show(m, depth - 1) }}{% endif %}{% endmacro %}{% for m in messages[1:] %}"
        "{{ show(m, 2) }}{% endfor %}"
    ),
    "filters": (
        "{{ messages | map(attribute='content') | join(' / ') }}"
        "{{ messages|selectattr('role', 'equalto', 'user')|list|length }}"
        "{{ messages[-1]['content'].split(' ')|reverse|list }}{{ messages|length }}"
        "{{ 'x'|center(9) }}{{ 'a\nb'|indent(4) }}{{ messages[0]|dictsort }}"
        "{{ 'a-b'.replace('-', '+') }}{{ messages[0].items()|list }}"
        "{{ '{:>5}'.format(messages|length) }}{{ ['a', 'b']|batch(2)|list }}"
    ),
    "generation": (
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %};{% endfor %}"
    ),
    "break": (
        "{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}"
        "{{ m.content }}{% endfor %}"
    ),
    "loop_else": (
        "{% for m in [] %}x{% else %}none{% endfor %}{% for k, v in messages[0].items() %}"
        "{{ k }}={{ v }},{% endfor %}"
    ),
    "recursive": (
        "{% for x in [[1, [2]], [3]] recursive %}{% if x is iterable %}({{ loop(x) }}"
        "){% else %}{{ x }}{% endif %}{% endfor %}"
    ),
    "loop_variables": (
        "{% for m in messages %}{{ loop.previtem.role if loop.previtem }}{{ loop.last }}"
        "{{ loop.cycle('a', 'b') }}{% endfor %}"
    ),
}


def with_template(source: TemplateSource, **config) -> Tokenizer:
    return make.wrap(make.byte_level(), source, **config)


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("prompt", [True, False])
def test_renders_as_transformers_does(name, prompt, tmp_path):
    make.write(tmp_path, make.byte_level(), bos_token="<|endoftext|>", eos_token="<|im_end|>")
    (tmp_path / "chat_template.jinja").write_text(TEMPLATES[name], encoding="utf-8")
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    ours = Tokenizer.from_directory(tmp_path)
    arguments = {"add_generation_prompt": prompt}
    expected = theirs.apply_chat_template(CHAT, tokenize=False, **arguments)
    assert ours.render_chat(CHAT, **arguments) == expected
    ids = theirs.apply_chat_template(CHAT, tokenize=True, return_dict=False, **arguments)
    assert ours.encode_chat(CHAT, **arguments) == ids


def test_c36_bos_is_written_once(tmp_path):
    config = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True}
    make.write(tmp_path, make.sentencepiece_like(), **config)
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}{{ messages[0]['content'] }}")
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    tokenizer = Tokenizer.from_directory(tmp_path)
    bos = tokenizer.bos_token_id
    messages = [{"role": "user", "content": "ab"}]

    ids = tokenizer.encode_chat(messages)
    assert ids[0] == bos
    assert ids.count(bos) == 1
    assert ids == theirs.apply_chat_template(messages, tokenize=True, return_dict=False)
    assert tokenizer.encode(tokenizer.render_chat(messages)).count(bos) == 2  # the reported fault

    (tmp_path / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    assert bos not in Tokenizer.from_directory(tmp_path).encode_chat(messages)
    assert tokenizer.encode("hi").count(bos) == 1
    assert tokenizer.encode("<s>hi") == theirs.encode("<s>hi")


@pytest.mark.parametrize("role", ["user", "assistant", "system"])
def test_text_parts_are_joined_in_order_with_nothing_between(role):
    tokenizer = with_template(make.CHATML)
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    rendered = tokenizer.render_chat([{"role": role, "content": parts}])
    assert rendered == tokenizer.render_chat([{"role": role, "content": "one two"}])


def test_null_and_empty_optional_fields_count_as_absent():
    message = {"role": "assistant", "content": None, "tool_calls": [], "name": None, "x": None}
    assert check_messages([message]) == [{"role": "assistant", "content": ""}]


def test_messages_of_the_caller_are_not_changed():
    message = {"role": "user", "content": [{"type": "text", "text": "a"}], "name": None}
    check_messages([message])
    assert message == {"role": "user", "content": [{"type": "text", "text": "a"}], "name": None}


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ("hello", "must be a list"),
        (None, "must be a list"),
        ({"role": "user", "content": "a"}, "must be a list"),
        ([], "at least one"),
        (["hello"], r"messages\[0\] must be an object"),
        ([{"role": "user", "content": "a"}, 3], r"messages\[1\] must be an object"),
        ([{"content": "a"}], r"messages\[0\]\.role must be a string"),
        ([{"role": 3, "content": "a"}], r"messages\[0\]\.role must be a string, got 3"),
        ([{"role": "user"}], r"messages\[0\]\.content must be a string or a list"),
        ([{"role": "user", "content": None}], r"messages\[0\]\.content"),
        ([{"role": "user", "content": 3}], r"messages\[0\]\.content .* got 3"),
        ([{"role": "user", "content": {"type": "text"}}], r"messages\[0\]\.content"),
        ([{"role": "user", "content": ["a"]}], r"messages\[0\]\.content\[0\]"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], r"content\[0\] .*image_url"),
        ([{"role": "user", "content": [{"type": "text", "text": 3}]}], r"content\[0\]\.text"),
        ([{"role": "user", "content": "a", "extra": object()}], "JSON values, got object"),
        ([{"role": "user", "content": "a", "extra": {1: 2}}], "strings as keys"),
        ([{"role": "user", "content": "\ud800"}], "surrogate"),
    ],
)
def test_bad_messages_are_refused_by_name(messages, words):
    with pytest.raises(InvalidRequestError, match=words) as caught:
        with_template(make.CHATML).encode_chat(messages)
    assert caught.value.param == "messages"


def test_deep_nesting_is_refused():
    value: list = []
    for _ in range(5000):
        value = [value]
    with pytest.raises(InvalidRequestError, match="nested"):
        check_messages([{"role": "user", "content": "a", "extra": value}])


REFUSED = {
    "raise": ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
    "syntax": ("{% for %}", "Expected"),
    "unknown_tag": ("{% nonsense %}", "nonsense"),
    "undefined_attribute": ("{{ nothing.more }}", "'nothing' is undefined"),
    "undefined_sum": ("{{ 'a' + nothing }}", "nothing"),
    "type_error": ("{{ 1 + 'a' }}", "unsupported operand"),
    "zero": ("{{ 1 // 0 }}", "zero"),
    "include": ("{% include 'x' %}", "no loader"),
    "class": ("{{ ''.__class__ }}{{ ''.__class__.__mro__ }}", "unsafe"),
    "globals": ("{{ raise_exception.__globals__['os'] }}", "unsafe"),
    "mutation": ("{{ messages.append(1) }}", "unsafe"),
    "range": ("{% for i in range(10**9) %}x{% endfor %}", "Range too big"),
    "nested_loops": (
        "{% set r = range(100000) %}{% for a in r %}{% for b in r %}{% endfor %}{% endfor %}",
        "longer than",
    ),
    "generator_loops": (
        "{% for a in range(100000) %}{% for b in range(100000)|map('upper') %}{% endfor %}"
        "{% endfor %}",
        "longer than",
    ),
    "macro_recursion": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
    "macro_tree": (
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}"
        "{{ f(60) }}",
        "longer than",
    ),
    "long_output": ("{% for i in range(100000) %}{{ 'x' * 1000 }}{% endfor %}", "more than"),
    "times": ("{{ 'x' * 10**10 }}", "more than"),
    "list_times": ("{{ [1] * 10**9 }}", "more than"),
    "power": ("{{ 10 ** (10 ** 8) }}", "bits"),
    "doubling": (
        "{% set ns = namespace(x='x') %}{% for i in range(60) %}"
        "{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
        "more than",
    ),
    "plus": (
        "{% set ns = namespace(x='x') %}{% for i in range(60) %}"
        "{% set ns.x = ns.x + ns.x %}{% endfor %}",
        "more than",
    ),
    "squaring": (
        "{% set ns = namespace(x=9) %}{% for i in range(60) %}{% set ns.x = ns.x * ns.x %}"
        "{% endfor %}",
        "bits",
    ),
    "replace": (
        "{% set ns = namespace(x='xx') %}{% for i in range(60) %}"
        "{% set ns.x = ns.x.replace('x', ns.x) %}{% endfor %}",
        "more than",
    ),
    "replace_filter": (
        "{% set ns = namespace(x='xx') %}{% for i in range(60) %}"
        "{% set ns.x = ns.x|replace('x', ns.x) %}{% endfor %}",
        "more than",
    ),
    "join": ("{{ ('x' * 100000).join(range(1000)|map('string')) }}", "more than"),
    "join_filter": ("{{ range(1000)|map('string')|join('x' * 100000) }}", "more than"),
    "nested_lists": (
        "{% set ns = namespace(x=[]) %}{% for i in range(60) %}"
        "{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}",
        "more than",
    ),
    "nested_json": (
        "{% set ns = namespace(x=[]) %}{% for i in range(60) %}"
        "{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x|tojson|length }}",
        "more than",
    ),
    "nested_percent": (
        "{% set ns = namespace(x=[]) %}{% for i in range(60) %}"
        "{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ('%s' % ns.x)|length }}",
        "more than",
    ),
    "center": ("{{ 'x'|center(1000000000) }}", "width"),
    "ljust": ("{{ 'x'.ljust(1000000000) }}", "width"),
    "indent": ("{{ ('\n' * 1000000)|indent(9999) }}", "more than"),
    "slice": ("{{ [1]|slice(1000000000)|list }}", "width"),
    "percent": ("{{ '%1000000000d' % 1 }}", "too wide"),
    "percent_star": ("{{ '%*d' % (1000000000, 1) }}", "too wide"),
    "format": ("{{ '{:1000000000}'.format(1) }}", "too wide"),
    "format_nested": ("{{ '{:{}}'.format(1, 1000000000) }}", "too wide"),
    "lipsum": ("{{ lipsum(n=1000000000) }}", "'lipsum' is undefined"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_failing_and_runaway_templates_are_refused_in_time(name, monkeypatch):
    monkeypatch.setattr(chat_template, "MAX_RENDER_S", 0.5)
    source, words = REFUSED[name]
    started = time.monotonic()
    with pytest.raises(InvalidRequestError, match=words) as caught:
        with_template(source).render_chat(CHAT)
    assert time.monotonic() - started < 4  # about 1 s on an idle machine
    assert caught.value.param == "messages"


def test_limits_hold_in_any_thread():
    template = ChatTemplate(REFUSED["nested_loops"][0], special_tokens={})
    errors = []

    def render() -> None:
        try:
            template.render(CHAT)
        except InvalidRequestError as error:
            errors.append(str(error))

    threads = [threading.Thread(target=render) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=20)
    assert len(errors) == 2
    assert all("longer than" in error for error in errors)


def test_a_long_chat_is_not_mistaken_for_a_runaway():
    messages = [{"role": "user", "content": "word " * 20}] * 2000
    assert len(with_template(make.CHATML).render_chat(messages)) > 200_000


def test_no_template_refuses_chat_and_nothing_else():
    tokenizer = with_template(None)
    assert not tokenizer.has_chat_template
    with pytest.raises(InvalidRequestError, match="no chat template") as caught:
        tokenizer.encode_chat(CHAT)
    assert caught.value.param == "messages"
    assert tokenizer.encode("hello")


def test_template_of_the_config_and_its_named_form():
    assert with_template(None, chat_template="{{ 1 }}").render_chat(CHAT) == "1"
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    assert with_template(None, chat_template=named).render_chat(CHAT) == "d"
    assert with_template("file", chat_template="config").render_chat(CHAT) == "file"


NAMED = {"tool_use": "tools: {{ tools | length }}", "default": "none", "rag": "documents"}


@pytest.mark.parametrize("form", ["list in the config", "files", "files that others wrote"])
def test_tools_take_the_template_called_tool_use_as_in_transformers(form, tmp_path):
    config = {"chat_template": [{"name": k, "template": v} for k, v in NAMED.items()]}
    make.write(tmp_path, make.byte_level(), **(config if form == "list in the config" else {}))
    if form == "files":
        write_templates(tmp_path, NAMED)
    elif form == "files that others wrote":
        theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
        theirs.chat_template = NAMED
        theirs.save_pretrained(tmp_path)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    ours = Tokenizer.from_directory(tmp_path)
    for tools in (None, [], TOOLS):
        expected = theirs.apply_chat_template(CHAT, tools=tools or None, tokenize=False)
        assert ours.render_chat(CHAT, tools=tools) == expected
    assert (ours.chat_template, ours.tool_chat_template) == ("none", NAMED["tool_use"])


def test_a_checkpoint_without_a_default_template_serves_tools_alone():
    only = with_template({"tool_use": "{{ tools | length }}"})
    assert only.has_chat_template
    assert only.render_chat(CHAT, tools=TOOLS) == "2"
    with pytest.raises(InvalidRequestError, match="chat templates are tool_use alone"):
        only.render_chat(CHAT)
    with pytest.raises(InvalidRequestError, match="chat template has none") as caught:
        with_template({"default": "x", "rag": "{{ tools }}"}).render_chat(CHAT, tools=TOOLS)
    assert caught.value.param == "tools"


@pytest.mark.parametrize(
    "stored", [7, ["x"], [{"name": "default", "template": 7}], [{"template": ""}]]
)
def test_templates_that_are_no_texts_are_refused(stored):
    with pytest.raises(CheckpointError, match="chat_template must be a string, or a list"):
        with_template(None, chat_template=stored)


def test_time_of_day():
    assert with_template("{{ strftime_now('%Y') }}").render_chat(CHAT) == time.strftime("%Y")


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "of a place",
            "parameters": {"type": "object", "properties": {"place": {"type": "string"}}},
        },
    },
    {"type": "function", "function": {"name": "now"}},
]
WITH_TOOLS = (
    "{% if tools %}{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}{% endif %}"
    "{{ messages[0]['content'] }}"
)


def test_tools_reach_the_template_as_in_transformers(tmp_path):
    make.write(tmp_path, make.byte_level(), eos_token="<|im_end|>")
    (tmp_path / "chat_template.jinja").write_text(WITH_TOOLS)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    ours = Tokenizer.from_directory(tmp_path)
    for tools in (TOOLS, TOOLS[:1], None):
        expected = theirs.apply_chat_template(CHAT, tools=tools, tokenize=False)
        assert ours.render_chat(CHAT, False, tools=tools) == expected
    assert ours.render_chat(CHAT, False, tools=[]) == ours.render_chat(CHAT, False)


def test_tools_of_the_caller_are_copied_and_their_nulls_left_out():
    tool = {"type": "function", "function": {"name": "f", "description": None, "parameters": None}}
    assert check_tools([tool]) == [{"type": "function", "function": {"name": "f"}}]
    assert tool["function"]["description"] is None
    assert check_tools(None) is None
    assert check_tools([]) is None


@pytest.mark.parametrize(
    ("tools", "words"),
    [
        ("weather", "tools must be a list of tools, got str"),
        ({"type": "function"}, "tools must be a list"),
        (TOOLS * 65, "tools must be 128 or fewer, got 130"),
        (["weather"], r"tools\[0\] must be"),
        ([TOOLS[1], {"type": "retrieval"}], r"tools\[1\] must be .*retrieval"),
        ([{"function": {"name": "f"}}], r"tools\[0\] must be"),
        ([{"type": "function"}], r"tools\[0\]\.function must be an object, got None"),
        ([{"type": "function", "function": "f"}], r"tools\[0\]\.function must be an object"),
        ([{"type": "function", "function": {}}], r"tools\[0\]\.function\.name must be"),
        ([{"type": "function", "function": {"name": ""}}], r"function\.name must be .*got ''"),
        ([{"type": "function", "function": {"name": 3}}], r"function\.name must be .*got 3"),
        (
            [{"type": "function", "function": {"name": "f", "parameters": "x"}}],
            r"function\.parameters must be an object, or absent, got 'x'",
        ),
        (
            [{"type": "function", "function": {"name": "f", "description": 3}}],
            r"function\.description must be a text",
        ),
        (
            [{"type": "function", "function": {"name": "f", "parameters": {"x": object()}}}],
            "JSON values, got object",
        ),
    ],
)
def test_bad_tools_are_refused_by_name(tools, words):
    with pytest.raises(InvalidRequestError, match=words) as caught:
        with_template(WITH_TOOLS).encode_chat(CHAT, tools=tools)
    assert caught.value.param == "tools"


def test_tools_are_refused_where_the_template_has_no_place_for_them():
    tokenizer = with_template(make.CHATML)
    with pytest.raises(InvalidRequestError, match="this checkpoint's chat template") as caught:
        tokenizer.encode_chat(CHAT, tools=TOOLS)
    assert caught.value.param == "tools"
    assert tokenizer.encode_chat(CHAT, tools=[]) == tokenizer.encode_chat(CHAT)


@pytest.mark.parametrize(
    "source",
    [
        "{{ cycler() }}",  # RuntimeError
        "{{ messages[0].content|truncate(1) }}",  # AssertionError
        '{{ "1e400"|float|int }}',  # NameError while it is compiled
        "{% for a in messages %}" * 21 + "{% endfor %}" * 21,  # SyntaxError
        "{% if true %}" * 200 + "{% endif %}" * 200,  # IndentationError
        "{% break %}",
        "{{ dict(a=1, a=2) }}",
    ],
)
def test_whatever_a_template_raises_is_the_error_of_the_messages(source):
    with pytest.raises(InvalidRequestError, match="refused by the chat template") as raised:
        ChatTemplate(source, special_tokens={}).render([{"role": "user", "content": "abcdef ghi"}])
    assert raised.value.param == "messages"


def called(arguments) -> list[dict]:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return [
        CHAT[1],
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "12 °"}]},
    ]


SHOWS_CALLS = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }}"
    "{% for c in m.tool_calls %}{{ c.function.arguments | tojson }}{% endfor %};{% endfor %}"
)


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ('{"place": "Z\u00fcrich", "n": [1]}', '{"place": "Zürich", "n": [1]}'),
        ({"place": "Zürich"}, '{"place": "Zürich"}'),
        ("", "{}"),
        ("{}", "{}"),
        ('{"place": "Zü', '"{\\"place\\": \\"Zü"'),  # the model was cut off: what it said
        ("[1]", '"[1]"'),
    ],
)
def test_arguments_of_earlier_calls_reach_the_template_as_objects(arguments, shown):
    text = with_template(SHOWS_CALLS).render_chat(called(arguments))
    assert text == f"user:{CHAT[1]['content']};assistant:{shown};tool:12 °;"


def test_arguments_are_as_deep_as_other_fields():
    with pytest.raises(InvalidRequestError, match=r"tool_calls\[0\]\.function\.arguments .* deep"):
        check_messages(called("[" * 40 + "]" * 40))
    check_messages(called('{"a": ' * 9000))
