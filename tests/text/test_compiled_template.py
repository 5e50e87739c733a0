"""Templates are compiled once, whether that works or not, and roles that nobody knows are refused."""

import re

import jinja2
import pytest

from jaxserve.errors import CheckpointError, InvalidRequestError
from jaxserve.text.chat_template import ROLES, ChatTemplate
from jaxserve.text.compiled_template import MAX_SOURCE_CHARS, CompiledTemplate
from jaxserve.text.template_sandbox import BoundedEnvironment

GENERIC = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
# Of some roles; others are passed over without a word, as many real templates do.
TELLS_APART = (
    "{% for m in messages %}{% if m.role == 'system' %}S:{{ m.content | tojson }}"
    "{% elif m['role'] in ['user', 'observation'] %}U:{{ m.content | trim }}{% endif %}{% endfor %}"
)
FAILING = ["{% if %}", "{{ " + "(" * 5000, "{{ x" + "|upper" * 3000 + " }}", "x" * 70_000]


def render(source: str, *messages: tuple[str, str]) -> str:
    template = ChatTemplate(source, special_tokens={})
    return template.render([{"role": role, "content": text} for role, text in messages])


@pytest.mark.parametrize("source", FAILING, ids=range(len(FAILING)))
def test_a_template_that_fails_is_compiled_once(source, monkeypatch):
    compiled = []
    whole = BoundedEnvironment.from_string

    def counted(self, text):
        compiled.append(text)
        return whole(self, text)

    monkeypatch.setattr(BoundedEnvironment, "from_string", counted)
    template = ChatTemplate(source, special_tokens={})
    words = set()
    for _ in range(3):
        with pytest.raises(InvalidRequestError, match=r"refused by the chat template: .") as caught:
            template.render([{"role": "user", "content": "hello"}])
        words.add(str(caught.value))
    assert len(words) == 1
    assert len(compiled) == (len(source) <= MAX_SOURCE_CHARS)
    with pytest.raises(CheckpointError, match=r"the chat template is not Jinja: ."):
        template.check_source()


def test_the_longest_source_is_compiled_and_one_more_character_is_not():
    assert render("x" * MAX_SOURCE_CHARS, ("user", "")) == "x" * MAX_SOURCE_CHARS
    with pytest.raises(InvalidRequestError, match="must have 65536 characters or fewer, got 65537"):
        render("x" * (MAX_SOURCE_CHARS + 1), ("user", ""))


def test_what_a_template_reads_and_names():
    template = CompiledTemplate("{% set a = 1 %}{{ a ~ b['c'] }}{{ 'd' if tools }}raw")
    assert template.variables == {"b", "tools"}
    assert template.texts == {"c", "d"}
    with pytest.raises(jinja2.TemplateSyntaxError):
        CompiledTemplate("{{").texts  # noqa: B018


@pytest.mark.parametrize("role", ROLES)
def test_the_roles_of_openai_are_known_to_every_template(role):
    assert render(GENERIC, (role, "hi")) == f"[{role}]hi"


@pytest.mark.parametrize("role", ["usr", "", "User", "m", "[", "human"])
@pytest.mark.parametrize("source", [GENERIC, TELLS_APART])
def test_a_role_that_nobody_knows_is_refused(source, role):
    words = re.escape(f"messages[1].role must be one of {', '.join(ROLES)}, or a role")
    with pytest.raises(InvalidRequestError, match=words) as caught:
        render(source, ("user", "hi"), (role, "x"))
    assert caught.value.param == "messages"


def test_a_role_that_the_template_names_is_known():
    assert render(TELLS_APART, ("observation", "12")) == "U:12"
    with pytest.raises(InvalidRequestError, match="must be one of"):
        render(GENERIC, ("observation", "12"))


def test_a_role_whose_messages_are_left_out_is_refused():
    lost = r"messages\[1\].role: this checkpoint's chat template leaves out messages of 'developer'"
    with pytest.raises(InvalidRequestError, match=lost):
        render(TELLS_APART, ("user", "hi"), ("developer", "be brief"))
    # Named, escaped, trimmed, or there is nothing to lose.
    assert render(TELLS_APART, ("system", '"a"'), ("developer", " ")) == r'S:"\"a\""'
    escaped = TELLS_APART.replace("{% endif %}", "{% else %}{{ m.content|tojson }}{% endif %}")
    assert render(escaped, ("tool", 'a"b')) == r'"a\"b"'


def test_to_look_for_what_is_left_out_takes_few_renders(monkeypatch):
    """However many messages there are: each render may take seconds."""
    num_renders = 0
    real = CompiledTemplate.render

    def counted(self, budget, names):
        nonlocal num_renders
        num_renders += 1
        return real(self, budget, names)

    monkeypatch.setattr(CompiledTemplate, "render", counted)
    escaped = TELLS_APART.replace("{% endif %}", "{% else %}{{ m.content|tojson }}{% endif %}")
    many = [(role, f'"{i}"') for i in range(500) for role in ("tool", "function", "developer")]
    assert len(render(escaped, *many)) > 1500
    assert num_renders == 2
    backwards = TELLS_APART.replace("messages %}", "messages|reverse %}").replace(
        "{% endif %}", "{% else %}{{ m.content }}{% endif %}"
    )
    assert render(backwards, ("tool", "one"), ("tool", "two")) == "twoone"
    counts = TELLS_APART.replace("{% endif %}", "{% else %}{{ m.content|length }}{% endif %}")
    assert render(counts, *many)
    one_is_lost = escaped.replace("{% else %}", "{% elif m.content != '\"499\"' %}")
    num_renders = 0
    assert render(one_is_lost, *many), "its role is not left out"
    lost = r"messages\[\d+\].role: .* leaves out messages of 'developer'"
    no_developer = escaped.replace("{% else %}", "{% elif 'dev' not in m.role %}")
    with pytest.raises(InvalidRequestError, match=lost):
        render(no_developer, *many)
    assert num_renders <= 8
