"""One Jinja source of a chat template, compiled when it is first used: `CompiledTemplate`. Used by
`text.chat_template`.

Invariant: a source is compiled once, whether that works or not. One that fails fails again at once, with the
same error; one longer than MAX_SOURCE_CHARS is not compiled at all, so that compiling takes no longer than a
render may (a deadline cannot be put into Jinja's compiler, and the worst of its passes are quadratic).
"""

import datetime
import json
from functools import cached_property
from typing import Any, NoReturn

import jinja2
import jinja2.meta
from jinja2 import nodes

from jaxserve.errors import CheckpointError
from jaxserve.text.template_sandbox import BoundedEnvironment, Budget

MAX_SOURCE_CHARS = 64 * 1024  # about 2 s for the slowest; real ones have at most some 20,000


class CompiledTemplate:
    """See the module.

    Args:
        source: Jinja source.
    """

    def __init__(self, source: str) -> None:
        self.source = source

    def check_source(self) -> None:
        """Compiles the template now instead of with the first chat.

        Raises:
            CheckpointError: it is no template.
        """
        try:
            self._need_compiled()
        except jinja2.TemplateSyntaxError as error:
            raise CheckpointError(
                f"the chat template is not Jinja: line {error.lineno}: {error.message}"
            ) from error
        except Exception as error:
            raise CheckpointError(f"the chat template is not Jinja: {_words(error)}") from error

    def render(self, budget: Budget, names: dict[str, Any]) -> str:
        """The text for these variables.

        Raises:
            jinja2.TemplateError, or any error that compiling or an expression of the template raises.
        """
        environment, template, _ = self._need_compiled()
        return environment.render(template, budget, **names)

    @property
    def variables(self) -> set[str]:
        """What the template reads that it does not set itself. Raises as `render`."""
        return jinja2.meta.find_undeclared_variables(self._need_compiled()[2])

    @cached_property
    def texts(self) -> frozenset[str]:
        """The texts in its expressions, such as the roles that it tells apart. Raises as `render`."""
        constants = self._need_compiled()[2].find_all(nodes.Const)
        return frozenset(one.value for one in constants if isinstance(one.value, str))

    def _need_compiled(self) -> tuple[BoundedEnvironment, jinja2.Template, nodes.Template]:
        if isinstance(self._compiled, Exception):
            raise self._compiled.with_traceback(None)
        return self._compiled

    @cached_property
    def _compiled(
        self,
    ) -> tuple[BoundedEnvironment, jinja2.Template, nodes.Template] | Exception:
        try:
            if len(self.source) > MAX_SOURCE_CHARS:
                raise jinja2.TemplateError(
                    f"the chat template must have {MAX_SOURCE_CHARS} characters or fewer, got "
                    f"{len(self.source)}"
                )
            environment = BoundedEnvironment()
            environment.filters["tojson"] = environment.guarded("tojson", _to_json)
            environment.globals["raise_exception"] = _raise_exception
            environment.globals["strftime_now"] = _strftime_now
            template = environment.from_string(self.source)
            return environment, template, environment.parse(self.source)
        # Python's own compiler raises several kinds of errors for one that is nested too deep.
        except Exception as error:  # noqa: BLE001
            return error


def _words(error: Exception) -> str:
    return str(error) or type(error).__name__


def _raise_exception(message: object) -> NoReturn:
    raise jinja2.TemplateError(str(message))


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without the HTML escapes of Jinja's own filter."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
