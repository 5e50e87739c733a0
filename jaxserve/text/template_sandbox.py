"""The Jinja environment that chat templates run in: `BoundedEnvironment`. Called by
`text.chat_template` alone.

A template comes with a checkpoint, the messages from anyone. So beside Jinja's sandbox (no
underscore attributes, no changing of lists and dicts, range() up to 100000), every render has a
deadline and a size limit:

- time: looked at in each round of every `for` loop and at each call and filter, so nested loops,
  recursive macros and recursive loops all end;
- size: of the output, and of every string, list or whole number that an operator, `~`, a filter or
  a string method makes, before it is made where its size can be foreseen (padding, repetition,
  replace, join, powers, formatting).

Not covered: it is a guard in this process, not a second process. One operation on values within the
limits runs to its end, and memory is bounded by the number of values a template keeps, each of them
bounded.
"""

import functools
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

_MAX_WIDTH = 10_000  # characters of padding, indentation or a format field
_MAX_ITEMS = 1_000_000  # values in a list, nested ones counted
_MAX_INT_BITS = 65_536
_TICKED = "_ticked"
_JOINED = "_joined"
_SHAPE_ONLY_FILTERS = frozenset(
    [
        "attr",
        "count",
        "default",
        "d",
        "dictsort",
        "first",
        "groupby",
        "items",
        "last",
        "length",
        "list",
        "map",
        "reject",
        "rejectattr",
        "reverse",
        "select",
        "selectattr",
        "sort",
        "sum",
        "min",
        "max",
        "unique",
    ]
)
_PADDING_FILTERS = frozenset(
    ["batch", "center", "slice", "tojson", "truncate", "urlize", "wordwrap"]
)
_WIDE_PERCENT = re.compile(r"%[^a-zA-Z%]*(\*|\d{5})")
_WIDE_BRACES = re.compile(r"\d{5}|[:!][^{}]*\{")


class Budget:
    """What is left of one render's time and size; a template that passes it gets a SecurityError.

    Args:
        max_seconds: wall time from now.
        max_chars: most characters in the output and in any one string.
    """

    def __init__(self, *, max_seconds: float, max_chars: int) -> None:
        self.max_seconds = max_seconds
        self.max_chars = max_chars
        self._deadline = time.monotonic() + max_seconds

    def tick(self) -> None:
        """Raise if the time is over."""
        if time.monotonic() > self._deadline:
            raise SecurityError(f"the chat template took longer than {self.max_seconds:g} s")

    def check_chars(self, num_chars: int) -> None:
        """Raise if a text of this length is too long."""
        if num_chars > self.max_chars:
            raise SecurityError(
                f"the chat template made a text of more than {self.max_chars} characters"
            )

    def check_items(self, num_items: int) -> None:
        """Raise if a list of this length is too long."""
        if num_items > _MAX_ITEMS:
            raise SecurityError(f"the chat template made a list of more than {_MAX_ITEMS} values")

    def check_value(self, value: object) -> None:
        """Raise if the text of a value, with all it contains, would be too long."""
        num_chars = num_items = 0
        pending = [value]
        while pending:
            item = pending.pop()
            num_items += 1
            if isinstance(item, str):
                num_chars += len(item)
            elif isinstance(item, Mapping):
                pending.extend(item.keys())
                pending.extend(item.values())
            elif isinstance(item, list | tuple | set | frozenset):
                pending.extend(item)
            self.check_chars(num_chars)
            self.check_items(num_items)


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's text for training; for a prompt it is its body."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Callable[[], str]) -> str:
        return caller()


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Jinja's immutable sandbox, set up as Hugging Face sets it up for chat templates, with a
    `Budget` per render.
    """

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationTag, loopcontrols],
            finalize=self._check_output,
        )
        self._local = threading.local()
        for name, function in list(self.filters.items()):
            self.filters[name] = self.guarded(name, function)
        self.filters |= {_TICKED: self._ticked, _JOINED: self._joined}
        del self.globals["lipsum"]  # makes any amount of text; no chat needs it

    def render(self, template: jinja2.Template, budget: Budget, **variables: Any) -> str:
        """Render within a budget.

        Raises:
            jinja2.TemplateError, or any error that an expression of the template raises.
        """
        self._local.budget = budget
        try:
            parts: list[str] = []
            num_chars = 0
            for part in template.generate(**variables):
                num_chars += len(part)
                budget.check_chars(num_chars)
                budget.tick()
                parts.append(part)
            return "".join(parts)
        finally:
            del self._local.budget

    @property
    def _budget(self) -> Budget:
        # Outside a render, while compiling, Jinja folds constants; what is too large then waits.
        budget = getattr(self._local, "budget", None)
        return Budget(max_seconds=1.0, max_chars=_MAX_WIDTH) if budget is None else budget

    def _generate(
        self, source: nodes.Template, name: Any, filename: Any, defer_init: bool = False
    ) -> str:
        for loop in list(source.find_all(nodes.For)):
            loop.iter = _filter_node(_TICKED, loop.iter)
        for concat in list(source.find_all(nodes.Concat)):
            concat.nodes = [_filter_node(_JOINED, nodes.List(concat.nodes))]
        return super()._generate(source, name, filename, defer_init)

    @jinja2.pass_context  # so that constants are not folded
    def _ticked(self, context: Context, iterable: Iterable[Any]) -> Iterable[Any]:
        """The iterable of a loop, looking at the clock each round; a sized one stays sized."""
        return (
            _Ticked(iterable, self._budget)
            if hasattr(iterable, "__len__")
            else self._tick_each(iterable)
        )

    def _tick_each(self, iterable: Iterable[Any]) -> Iterator[Any]:
        budget = self._budget
        for item in iterable:
            budget.tick()
            yield item

    @jinja2.pass_context
    def _joined(self, context: Context, values: list[Any]) -> str:
        """`a ~ b`."""
        self._budget.check_value(values)
        return "".join(map(str, values))

    def _check_output(self, value: Any) -> Any:
        self._budget.check_value(value)
        return value

    def guarded(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """A filter with the budget's checks around it."""
        num_hidden = 1 if hasattr(function, "jinja_pass_arg") else 0

        @functools.wraps(function)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            budget = self._budget
            budget.tick()
            hidden, shown = args[:num_hidden], list(args[num_hidden:])
            if name in ("join", "string", "tojson", "pprint") and isinstance(shown[0], Iterator):
                shown[0] = list(shown[0])
            if name not in _SHAPE_ONLY_FILTERS:
                for value in (*shown, *kwargs.values()):
                    budget.check_value(value)
            _check_filter(budget, name, shown, kwargs)
            result = function(*hidden, *shown, **kwargs)
            if isinstance(result, str):
                budget.check_chars(len(result))
            return result

        return guarded

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """`+`, `*`, `**` and `%`, refused where the result would be too large."""
        _check_binop(self._budget, operator, left, right)
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Any call in a template, after a look at the clock; string methods only with foreseeable
        results.
        """
        budget = __self._budget
        budget.tick()
        method = getattr(__obj, "__wrapped__", __obj)  # the sandbox wraps str.format
        owner = getattr(method, "__self__", None)
        if isinstance(owner, str):
            args = tuple(list(a) if isinstance(a, Iterator) else a for a in args)
            _check_str_method(budget, owner, method.__name__, args, kwargs)
        result = super().call(__context, __obj, *args, **kwargs)
        if isinstance(result, str):
            budget.check_chars(len(result))
        return result


class _Ticked:
    """A sized iterable that looks at the clock in each round (`loop.length` needs the size)."""

    def __init__(self, iterable: Any, budget: Budget) -> None:
        self._iterable = iterable
        self._budget = budget

    def __len__(self) -> int:
        return len(self._iterable)

    def __iter__(self) -> Iterator[Any]:
        for item in self._iterable:
            self._budget.tick()
            yield item


def _filter_node(name: str, node: Any) -> nodes.Filter:
    filtered = nodes.Filter(node, name, [], [], None, None)
    filtered.set_lineno(node.lineno or 1)
    return filtered


def _num_chars_in(values: Iterable[Any]) -> int:
    return sum(len(value) if isinstance(value, str) else 0 for value in values)


def _check_width(values: Iterable[Any]) -> None:
    for value in values:
        width = len(value) if isinstance(value, str) else value
        if isinstance(width, int) and width > _MAX_WIDTH:
            raise SecurityError(f"the chat template asked for a width of more than {_MAX_WIDTH}")


def _check_binop(budget: Budget, operator: str, left: Any, right: Any) -> None:
    if operator == "%":
        if isinstance(left, str) and _WIDE_PERCENT.search(left):
            raise SecurityError(f"the chat template's format {left[:80]!r} may be too wide")
        if isinstance(left, str):
            budget.check_value((left, right))
    elif isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * max(right, 0) if operator == "**" else 0
        bits = left.bit_length() + right.bit_length() if operator == "*" else bits
        if bits > _MAX_INT_BITS:
            raise SecurityError(
                f"the chat template made a number of more than {_MAX_INT_BITS} bits"
            )
    else:
        sized = [value for value in (left, right) if isinstance(value, str | list | tuple)]
        length = sum(map(len, sized))
        if operator == "*":
            length *= max((v for v in (left, right) if isinstance(v, int)), default=1)
        if any(isinstance(value, str) for value in sized):
            budget.check_chars(length)
        else:
            budget.check_items(length)


def _check_filter(budget: Budget, name: str, args: list[Any], kwargs: Mapping[str, Any]) -> None:
    options = [*args[1:], *kwargs.values()]
    if name in _PADDING_FILTERS:
        _check_width(options)
    elif name == "indent":
        _check_width(options)
        width = max(
            (v if isinstance(v, int) else len(v) for v in options if isinstance(v, int | str)),
            default=4,
        )
        budget.check_chars((str(args[0]).count("\n") + 1) * width)
    elif name == "format":
        _check_binop(budget, "%", str(args[0]), None)
    elif name == "replace":
        _check_str_method(budget, str(args[0]), "replace", tuple(map(str, options[:2])), {})
    elif name == "join":
        separator = max((len(v) for v in options if isinstance(v, str)), default=0)
        items = args[0] if hasattr(args[0], "__len__") else ()
        budget.check_chars(_num_chars_in(items) + separator * len(items))


def _check_str_method(
    budget: Budget, text: str, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> None:
    values = [*args, *kwargs.values()]
    if name in ("ljust", "rjust", "center", "zfill"):
        _check_width(values)
    elif name == "expandtabs":
        width = max((value for value in values if isinstance(value, int)), default=8)
        budget.check_chars(len(text) + text.count("\t") * width)
    elif name == "replace" and len(args) >= 2 and all(isinstance(a, str) for a in args[:2]):
        budget.check_chars(len(text) + text.count(args[0]) * len(args[1]))
    elif name == "join" and args and hasattr(args[0], "__len__"):
        budget.check_chars(_num_chars_in(args[0]) + len(text) * len(args[0]))
    elif name in ("format", "format_map"):
        if _WIDE_BRACES.search(text):
            raise SecurityError(f"the chat template's format {text[:80]!r} may be too wide")
        budget.check_value(values)
        budget.check_chars(text.count("{") * max(_num_chars_in(values), 1))
    elif name == "translate":
        budget.check_chars(len(text) * max(map(len, filter(None, values)), default=1))
