"""The command line of `run`, checked: what is to be done, before anything is loaded or written."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from absl import flags

from jaxserve.cli.arguments import UsageError
from jaxserve.cli.flags import check_engine_options, engine_options
from jaxserve.cli.openai_lines import looks_like_openai
from jaxserve.cli.output_files import (
    all_files,
    appends_to_itself,
    check_output_file,
    is_stream,
)
from jaxserve.cli.records import RecordFlags, fingerprint
from jaxserve.cli.sampling_flags import SamplingSources, given_sampling
from jaxserve.cli.standard_streams import is_stdout_closed


@dataclass(frozen=True, kw_only=True)
class RunJob:
    """The checked command line."""

    model: str
    engine_options: Mapping[str, object]
    given: Mapping[str, Any]  # fields of requests that the command line sets
    generation_config: str
    explain: bool
    prompts: Sequence[str]
    input: str | None
    output: str | None
    input_format: str
    is_text: bool
    is_chat: bool
    resume: bool
    overwrite: bool
    records: RecordFlags

    @classmethod
    def from_flags(cls, values: flags.FlagValues, prompts: Sequence[str]) -> "RunJob":
        given = values.flag_values_dict()
        if not given["model"]:
            raise UsageError("--model is needed: a checkpoint directory, a .gguf file, or a name")
        for name in ("input", "output"):
            if given[name] == "":
                raise UsageError(f"--{name}=: must name a file, or be -")
        nothing_to_run = not prompts and given["input"] is None
        if bool(prompts) == (given["input"] is not None) and not (
            nothing_to_run and given["explain_sampling"]
        ):
            what = (
                "give prompts or --input, not both" if prompts else "give a prompt, or --input=FILE"
            )
            raise UsageError(what)
        options = engine_options(values)
        check_engine_options(options)
        output = given["output"]
        if output is None and given["input"] is not None:
            output = "-"
        job = cls(
            model=given["model"],
            engine_options=options,
            given=given_sampling(values),
            generation_config=given["generation_config"],
            explain=given["explain_sampling"],
            prompts=prompts,
            input=given["input"],
            output=output,
            input_format=given["input_format"],
            is_text=bool(prompts) or given["input_format"] == "text",
            is_chat=given["chat"],
            resume=given["resume"],
            overwrite=given["overwrite"],
            records=RecordFlags.from_flags(given, _files_of(given["input"], output)),
        )
        job._check()
        return job

    def _check(self) -> None:
        if self.is_chat and not self.is_text:
            raise UsageError(
                "--chat is for prompts and --input_format=text; JSON lines have messages"
            )
        if self.prompts and self.input_format in ("jsonl", "openai"):
            raise UsageError(f"--input_format={self.input_format} is for --input, not for prompts")
        if self.given.get("tools") and self.is_text and not self.is_chat:
            raise UsageError("--tools is for chats: give --chat, or lines with messages")
        if self.resume and self.overwrite:
            raise UsageError("--resume and --overwrite exclude each other")
        if self.resume and self.output_file is None:
            raise UsageError("--resume needs an --output that is a file")
        if self.output_file is not None:
            check_output_file(self.output_file, self.input)
        elif self.input and self.output == "-" and appends_to_itself(self.input):
            raise UsageError("stdout is the input itself")
        if is_stdout_closed() and self.output in (None, "-"):
            raise UsageError("cannot write stdout: it is closed; give --output=FILE")

    @property
    def output_file(self) -> Path | None:
        """The output, if it is a file that can be kept and continued."""
        return None if self.output is None or is_stream(self.output) else Path(self.output)

    @property
    def has_work(self) -> bool:
        """Whether there is anything to run, and not only to explain."""
        return bool(self.prompts) or self.input is not None

    def sampling_sources(self) -> SamplingSources:
        """What its lines start from.

        Raises:
            CheckpointError: there is no such model, or what it recommends is at fault.
            InvalidRequestError: that and the flags exclude each other.
        """
        return SamplingSources.of_model(self.given, self.model, self.generation_config)

    @property
    def num_choices(self) -> int:
        """Outputs of each prompt of the command line."""
        return self.given.get("n", 1)

    @property
    def prints_text(self) -> bool:
        return bool(self.prompts) and self.output != "-"

    def is_openai(self, first: bytes | None) -> bool:
        """Whether the input is an OpenAI batch file.

        Args:
            first: its first line that is not blank, as far as that is known.
        """
        if self.input_format != "auto":
            return self.input_format == "openai"
        return not self.prompts and first is not None and looks_like_openai(first)

    def identity(
        self, sha256: str | None, sampling: Mapping[str, Any], *, is_openai: bool
    ) -> dict[str, Any]:
        """All that decides what the output holds; two runs may share an output only if these are equal.

        Args:
            sha256: of the input.
            is_openai: whether its lines are those of an OpenAI batch file.
            sampling: every field that lines start from.

        Raises:
            CheckpointError: there is no such model.
        """
        engine = {key: self.engine_options[key] for key in ("seed", "dtype", "max_model_len")}
        kind = {"is_text": self.is_text, "is_chat": self.is_chat, "is_openai": is_openai}
        return {
            "input": {"sha256": sha256, **kind},
            "model": {"sha256": fingerprint(self.model)},
            "sampling": {**sampling, **engine},
        }


def _files_of(source: str | None, output: str | None) -> dict[str, str | None]:
    """The files of a run by the flag that they belong to."""
    files = {"input": source}
    if output is not None and not is_stream(output):
        files |= {f"output={output} ({path.name})": str(path) for path in all_files(Path(output))}
    return files
