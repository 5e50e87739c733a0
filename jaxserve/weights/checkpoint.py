"""`Checkpoint`: an opened model on disk, whatever its format; and `TensorSource`, what a format has to offer.

Made by `loader.open_checkpoint`. Opening reads headers and metadata only; tensors are mapped or
dequantised one at a time.

Invariant: tensors carry Hugging Face names and orientation ([out, in] for a projection), whatever
the file holds; those of a `ParamSource` the paths and the orientation of the params tree.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from jaxserve.model_config import ModelConfig
from jaxserve.text.chat_template import TemplateSource
from jaxserve.weights import name_maps
from jaxserve.weights.name_maps import ParamSpec


@dataclass(frozen=True, kw_only=True)
class TensorInfo:
    """What a file's header says about one tensor.

    Args:
        name: Hugging Face name.
        file: the file that holds it.
        dtype: the format's own word for the element type ("BF16", "Q4_1").
        shape: Hugging Face orientation.
        readable: whether `TensorSource.read` can turn this dtype into floats.
        block_rows: `TensorSource.read` takes runs of rows that begin at a multiple of this; a format
            that stores blocks of rows says how many.
    """

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    readable: bool
    block_rows: int = 1


class TensorSource(Protocol):
    """The tensors of one checkpoint."""

    @property
    def infos(self) -> Mapping[str, TensorInfo]:
        """Every stored tensor by name, from the headers alone."""
        ...

    @property
    def readable_dtypes(self) -> str:
        """The dtypes that can be read, for messages."""
        ...

    def read(self, name: str, begin: int = 0, end: int | None = None) -> np.ndarray:
        """Rows [begin, end) of one tensor, all behind `begin` without an end: f32, f16 or bf16. May be a
        read-only view of the mapped file. Called by several threads at once.
        """
        ...


@runtime_checkable
class ParamSource(TensorSource, Protocol):
    """Tensors that are parameters already: "layers/0/attn/q/kernel" is [in, out], as in the params tree."""

    def read_into(self, name: str, begin: int, end: int, out: np.ndarray) -> None:
        """Rows [begin, end) straight into an array of any floating dtype."""
        ...

    def read_onto(self, name: str, sharding: Any, dtype: Any) -> Any:
        """A jax array of that dtype; each device's part is read on its own."""
        ...


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A model on disk.

    Args:
        path: the directory or file.
        config: shapes and constants, as the files state them (see `load_params` for a head that differs).
        source: the tensors.
        tokenizer_json: text of tokenizer.json, or None when there is none.
        tokenizer_config: tokenizer_config.json, or its equivalent from GGUF metadata; {} when there is none.
        generation_config: generation_config.json, or its equivalent from GGUF metadata; {} when
            there is none.
        chat_template: the template or templates of files of their own, else those of tokenizer_config,
            else None.
        hf_config: config.json, or its equivalent from GGUF metadata.
    """

    path: Path
    config: ModelConfig
    source: TensorSource
    tokenizer_json: str | None = None
    tokenizer_config: dict[str, Any] = field(default_factory=dict)
    generation_config: dict[str, Any] = field(default_factory=dict)
    chat_template: TemplateSource = None
    hf_config: dict[str, Any] = field(default_factory=dict)

    def param_specs(self, config: ModelConfig) -> list[ParamSpec]:
        """Every parameter of a model, as the tensors of this checkpoint hold them."""
        specs = name_maps.param_specs(config)
        return [spec.as_param() for spec in specs] if self.holds_params else specs

    @property
    def holds_params(self) -> bool:
        """Whether the source is a `ParamSource`."""
        return isinstance(self.source, ParamSource)

    def tensors(self) -> Iterator[tuple[str, np.ndarray]]:
        """Yields (name, array) one at a time; arrays may be read-only views of a mapped file."""
        for name in self.source.infos:
            yield name, self.source.read(name)
