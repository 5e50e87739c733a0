"""From chat messages to the text a model was trained on: `ChatTemplate`. Used by `text.tokenizer`.

The template is Jinja source out of the checkpoint, run as Hugging Face runs it (same block
trimming, `tojson`, `raise_exception`, `strftime_now`, `generation` tag, plain Undefined), but in a
sandbox with limits (`text.template_sandbox`), and compiled once (`text.compiled_template`).

Invariant: whatever messages and template do, `render` returns a text or raises `InvalidRequestError` with
param "messages" or "tools", within about `MAX_RENDER_S` seconds. A missing or broken template makes chat
fail, not text completion.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

from jaxserve.errors import InvalidRequestError, shown
from jaxserve.text.compiled_template import CompiledTemplate
from jaxserve.text.template_sandbox import Budget

TemplateSource = str | Mapping[str, str] | None
DEFAULT, TOOL_USE = "default", "tool_use"  # names of templates, as transformers has them
MAX_RENDER_S = 2.0
MAX_RENDER_CHARS = 8 * 2**20
MAX_TOOLS = 128  # as OpenAI has it
ROLES = ("system", "developer", "user", "assistant", "tool", "function")  # those of OpenAI
_MAX_DEPTH = 32
_MARK = "90731852"  # digits: no filter of letters, quotes or blanks changes them
# Fields of a tool's function: name, type, what it has to be. Only the name must be there.
_FUNCTION_FIELDS = (
    ("name", str, "a text of at least one character"),
    ("description", str, "a text, or absent"),
    ("parameters", dict, "an object, or absent"),
)


def _refuse(message: str, param: str = "messages") -> NoReturn:
    raise InvalidRequestError(message, param=param)


class ChatTemplate:
    """One checkpoint's chat template, or several by name: then conversations with tools are rendered by
    the one called "tool_use", where there is one, and all others by "default", as transformers does.

    Args:
        source: Jinja source, or name -> Jinja source, or None: then every chat is refused.
        special_tokens: name -> text of the tokens the template may write (`bos_token`, ...).
    """

    def __init__(self, source: TemplateSource, *, special_tokens: Mapping[str, str]) -> None:
        named = {DEFAULT: source} if isinstance(source, str) else source or {}
        self._templates = {name: CompiledTemplate(text) for name, text in named.items()}
        self._special_tokens = dict(special_tokens)

    @property
    def source(self) -> str | None:
        """Jinja source of the template for conversations without tools, if there is one."""
        return self._templates[DEFAULT].source if DEFAULT in self._templates else None

    @property
    def tool_source(self) -> str | None:
        """Jinja source of the template for conversations with tools, if there is one."""
        return self._templates[TOOL_USE].source if TOOL_USE in self._templates else self.source

    def check_source(self) -> None:
        """Compiles every template now instead of with the first chat.

        Raises:
            CheckpointError: one is no template.
        """
        for template in self._templates.values():
            template.check_source()

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text of a conversation.

        Args:
            messages: objects with a `role` (one of ROLES, or one that the template names) and a
                `content`: a string, or parts
                {"type": "text", "text": ...}, which are joined in order with nothing between them.
                An assistant message may have no content. Other fields reach the template as they
                are; null ones and an empty `tool_calls` count as absent, and the arguments of a call
                become an object where they are the text of one.
            add_generation_prompt: end with the header of an assistant message.
            tools: functions that the model may call, as OpenAI describes them: {"type": "function",
                "function": {"name": ..., "description": ..., "parameters": {...}}}, at most
                MAX_TOOLS; None or an empty list = none. They reach the template as they are.
            continue_final_message: end inside the last message, which is the assistant's, behind its
                content: the model goes on with it. Not with add_generation_prompt.
            variables: more names for the template to read, as JSON values. The names that it always
                has (messages, tools, the special tokens ...) cannot be given.

        Raises:
            InvalidRequestError: no template, malformed messages, or the template refused them (its
                own words are in the message), failed, or ran too long; param "messages". Malformed
                tools, or a template that has no place for any; param "tools".
        """
        if not self._templates:
            _refuse("messages cannot be used: this checkpoint has no chat template; use prompt")
        plain = check_messages(messages)
        plain_tools = check_tools(tools)
        template = self._templates.get(TOOL_USE) if plain_tools else None
        template = template or self._templates.get(DEFAULT)
        if template is None:
            found = ", ".join(self._templates)
            _refuse(f"messages cannot be used: this checkpoint's chat templates are {found} alone")
        if continue_final_message:
            _check_continued(plain, add_generation_prompt)
        names = {
            **(variables or {}),
            **self._special_tokens,
            "messages": plain,
            "tools": plain_tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            _check_roles(plain, template)
            if plain_tools and "tools" not in template.variables:
                _refuse("tools cannot be used: this checkpoint's chat template has none", "tools")
            text = template.render(_budget(), names)
            _check_nothing_lost(names, template, text)
            return _cut_behind(text, plain[-1]["content"]) if continue_final_message else text
        except InvalidRequestError:
            raise
        except Exception as error:  # whatever an expression of a template can raise on odd values
            what = str(error) or type(error).__name__
            raise InvalidRequestError(
                f"messages were refused by the chat template: {what}", param="messages"
            ) from error


def _check_roles(messages: Sequence[Mapping[str, Any]], template: CompiledTemplate) -> None:
    """Refuses a role that nobody knows: a misspelt one would be written, or passed over, without a word."""
    for i, message in enumerate(messages):
        role = message["role"]
        if role not in ROLES and not (role and role in template.texts):
            _refuse(
                f"messages[{i}].role must be one of {', '.join(ROLES)}, or a role that the chat template "
                f"names, got {shown(role)}"
            )


def _check_nothing_lost(names: Mapping[str, Any], template: CompiledTemplate, text: str) -> None:
    """Refuses a role that a template of several roles does not name and leaves out: what was said would
    be lost. Renders at most once and once a role more, and reads the text at most twice.
    """
    messages = names["messages"]
    if template.texts.isdisjoint(ROLES):
        return
    contents = {
        i: content
        for i, one in enumerate(messages)
        if one["role"] not in template.texts and (content := one["content"].strip())
    }
    if _stand_in_order(contents.values(), text):
        return
    # They may stand there in another form or order: then marks in their place do so too, as they are.
    marks = {i: f"{_MARK}{number:09d}{_MARK}" for number, i in enumerate(contents)}
    marked = template.render(_budget(), {**names, "messages": _with_contents(messages, marks)})
    found = set(re.findall(rf"{_MARK}\d{{9}}{_MARK}", marked))
    lost = sorted((i for i in contents if marks[i] not in found), key=lambda i: len(contents[i]))
    for role, i in {messages[i]["role"]: i for i in lost}.items():  # its longest
        if contents[i] in text:
            continue
        # Or something is made of them that holds no mark: then another content gives another text.
        other = {i: contents[i][::-1] + "?"}
        if (
            template.render(_budget(), {**names, "messages": _with_contents(messages, other)})
            == text
        ):
            _refuse(
                f"messages[{i}].role: this checkpoint's chat template leaves out messages of {role!r}"
            )


def _stand_in_order(contents: Iterable[str], text: str) -> bool:
    """Whether a text holds all of these, one behind the other."""
    position = 0
    for content in contents:
        position = text.find(content, position)
        if position < 0:
            return False
        position += len(content)
    return True


def _with_contents(
    messages: Sequence[Mapping[str, Any]], contents: Mapping[int, str]
) -> list[Mapping[str, Any]]:
    """The messages, some with other contents."""
    changed = list(messages)
    for i, content in contents.items():
        changed[i] = {**changed[i], "content": content}
    return changed


def _budget() -> Budget:
    return Budget(max_seconds=MAX_RENDER_S, max_chars=MAX_RENDER_CHARS)


def _check_continued(messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool) -> None:
    if add_generation_prompt:
        _refuse(
            "continue_final_message and add_generation_prompt exclude each other",
            "continue_final_message",
        )
    last = messages[-1]
    if last["role"] != "assistant" or not last["content"].strip():
        _refuse(
            "continue_final_message needs a last message of the assistant, with content",
            "continue_final_message",
        )


def _cut_behind(text: str, content: str) -> str:
    """A rendered conversation up to the end of its last message's content.

    Source: transformers, apply_chat_template.
    """
    for wanted in (content, content.strip()):  # many templates trim it
        start = text.rfind(wanted)
        if start >= 0:
            return text[: start + len(wanted)]
    _refuse(
        "continue_final_message cannot be used: this checkpoint's chat template changes the content "
        "of the last message",
        "continue_final_message",
    )


def check_messages(messages: object) -> list[dict[str, Any]]:
    """A conversation as plain data, with every content a string.

    Args:
        messages: what the user sent; see `ChatTemplate.render`.

    Returns:
        New dicts; the user's are not kept.

    Raises:
        InvalidRequestError: names the message and the field at fault; param "messages".
    """
    if not isinstance(messages, list | tuple):
        _refuse(f"messages must be a list of messages, got {type(messages).__name__}")
    if not messages:
        _refuse("messages must hold at least one message, got an empty list")
    return [_check_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _check_message(message: object, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        _refuse(f"{where} must be an object with role and content, got {shown(message)}")
    plain = {key: value for key, value in _plain(message, where).items() if value is not None}
    role = plain.get("role")
    if not isinstance(role, str):
        _refuse(f"{where}.role must be a string, got {shown(role)}")
    if plain.get("tool_calls") == []:
        del plain["tool_calls"]
    for i, call in enumerate(_list(plain.get("tool_calls"))):
        _read_arguments(call, f"{where}.tool_calls[{i}].function.arguments")
    content = plain.get("content", "" if role == "assistant" else None)
    if isinstance(content, list):
        content = "".join(_check_part(p, f"{where}.content[{i}]") for i, p in enumerate(content))
    if not isinstance(content, str):
        _refuse(f"{where}.content must be a string or a list of text parts, got {shown(content)}")
    return {**plain, "content": content}


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _read_arguments(call: object, where: str) -> None:
    """Makes an object of arguments that are a JSON text, as templates expect it. A text that is none (of a
    call that was cut off) stays what it is.
    """
    function = call.get("function") if isinstance(call, dict) else None
    text = function.get("arguments") if isinstance(function, dict) else None
    if not isinstance(text, str):
        return
    try:
        value = json.loads(text) if text.strip() else {}
    except (ValueError, RecursionError):
        return
    value = _plain(value, where)
    if isinstance(value, dict):
        function["arguments"] = value  # type: ignore[index]


def _check_part(part: object, where: str) -> str:
    if not isinstance(part, dict) or part.get("type") != "text":
        _refuse(f'{where} must be {{"type": "text", "text": ...}}, got {shown(part)}')
    if not isinstance(part.get("text"), str):
        _refuse(f"{where}.text must be a string, got {shown(part.get('text'))}")
    return part["text"]


def check_tools(tools: object) -> list[dict[str, Any]] | None:
    """Tools as plain data; None for an empty list.

    Args:
        tools: what the user sent; see `ChatTemplate.render`.

    Raises:
        InvalidRequestError: names the tool and the field at fault; param "tools".
    """
    if tools is None:
        return None
    if not isinstance(tools, list | tuple):
        _refuse(f"tools must be a list of tools, got {type(tools).__name__}", "tools")
    if len(tools) > MAX_TOOLS:
        _refuse(f"tools must be {MAX_TOOLS} or fewer, got {len(tools)}", "tools")
    return [_check_tool(tool, f"tools[{i}]") for i, tool in enumerate(tools)] or None


def _check_tool(tool: object, where: str) -> dict[str, Any]:
    if not isinstance(tool, Mapping) or tool.get("type") != "function":
        _refuse(
            f'{where} must be {{"type": "function", "function": ...}}, got {shown(tool)}', "tools"
        )
    plain = _plain(tool, where, param="tools")
    function = plain.get("function")
    if not isinstance(function, dict):
        _refuse(f"{where}.function must be an object, got {shown(function)}", "tools")
    for name, kind, what in _FUNCTION_FIELDS:
        value = function.get(name)
        if value is None and name != "name":
            function.pop(name, None)
        elif not isinstance(value, kind) or (name == "name" and not value):
            _refuse(f"{where}.function.{name} must be {what}, got {shown(value)}", "tools")
    return plain


def _plain(value: Any, where: str, depth: int = 0, param: str = "messages") -> Any:
    """A copy made of JSON types alone, so that a template meets no object with methods of its own."""
    if depth > _MAX_DEPTH:
        _refuse(f"{where} must be nested at most {_MAX_DEPTH} deep", param)
    if value is None or type(value) in (str, bool, int, float):
        return value
    if isinstance(value, Mapping):
        if not all(type(key) is str for key in value):
            _refuse(f"{where} must have strings as keys, got {shown(list(value))}", param)
        return {key: _plain(item, where, depth + 1, param) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, where, depth + 1, param) for item in value]
    _refuse(f"{where} must be made of JSON values, got {type(value).__name__}", param)
