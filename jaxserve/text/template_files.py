"""Where a checkpoint keeps its chat templates. Called by `text.tokenizer` and `weights`.

    chat_template.jinja, additional_chat_templates/NAME.jinja      files; they beat the config
    tokenizer_config.json: "chat_template"                         one text, or a list of named ones

Source: transformers, PreTrainedTokenizerBase.save_chat_templates.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxserve.errors import CheckpointError, shown
from jaxserve.text.chat_template import DEFAULT, TemplateSource

DEFAULT_FILE = "chat_template.jinja"
NAMED_FOLDER = "additional_chat_templates"
_SUFFIX = ".jinja"


def directory_templates(directory: Path) -> TemplateSource:
    """The templates that stand in files of their own.

    Raises:
        CheckpointError: a file cannot be read; the message names it.
    """
    templates = {
        path.name.removesuffix(_SUFFIX): _read(path)
        for path in sorted((directory / NAMED_FOLDER).glob(f"*{_SUFFIX}"))
    }
    default = directory / DEFAULT_FILE
    if default.exists() or default.is_symlink():  # what is there and cannot be read is an error
        templates[DEFAULT] = _read(default)
    return _simplest(templates)


def write_templates(directory: Path, templates: TemplateSource) -> None:
    """Writes templates as files, as `directory_templates` reads them."""
    named = {DEFAULT: templates} if isinstance(templates, str) else templates or {}
    for name, text in named.items():
        path = directory / DEFAULT_FILE
        if name != DEFAULT:
            path = directory / NAMED_FOLDER / f"{Path(name).name}{_SUFFIX}"
            path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")


def config_templates(config: Mapping[str, Any]) -> TemplateSource:
    """The templates of a tokenizer_config.json.

    Raises:
        CheckpointError: they are no texts.
    """
    stored = config.get("chat_template")
    named = stored if isinstance(stored, list) else [{"name": DEFAULT, "template": stored}]
    templates: dict[str, str] = {}
    for one in named:
        name, text = (one.get("name"), one.get("template")) if isinstance(one, Mapping) else (0, 0)
        if text is None:
            continue
        if not isinstance(name, str) or not isinstance(text, str):
            raise CheckpointError(
                "tokenizer_config.json: chat_template must be a string, or a list of objects with a name "
                f"and a template, found {shown(one if isinstance(stored, list) else stored)}"
            )
        templates[name] = text
    return _simplest(templates)


def _simplest(templates: Mapping[str, str]) -> TemplateSource:
    if set(templates) == {DEFAULT}:
        return templates[DEFAULT]
    return templates or None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error
