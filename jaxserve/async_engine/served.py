"""What a loop runs: an `LLM`'s engine with its preparer, and what clients may know of it.

Called in the thread or the process that will drive the engine.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from jaxserve.async_engine.engine_loop import Served
from jaxserve.async_engine.protocol import ServedModel
from jaxserve.engine import Engine
from jaxserve.prepare import Preparer
from jaxserve.replicas.engine import ReplicatedEngine
from jaxserve.sampling_params import SamplingParams

if TYPE_CHECKING:
    from jaxserve.llm import LLM


def load_served(model: str, generation_config: str, options: Mapping[str, object]) -> Served:
    """Loads a model and compiles; arguments and errors are those of `LLM`."""
    from jaxserve.llm import LLM  # imports jax

    llm = LLM(model, generation_config=generation_config, **options)
    return served_llm(llm, path=model)._replace(close=llm.close)


def served_llm(llm: "LLM", *, path: str = "") -> Served:
    """The engine of an `LLM`.

    Args:
        llm: nobody else drives it.
        path: the model as it was given.
    """
    return _served(llm.engine, llm.preparer, llm.default_sampling_params, path)


def served_engine(engine: Engine | ReplicatedEngine) -> Served:
    """An engine alone: token ids in, token ids out.

    Args:
        engine: nobody else drives it.
    """
    preparer = Preparer(None, eos_token_ids=engine.eos_token_ids, vocab_size=engine.vocab_size)
    return _served(engine, preparer, SamplingParams(), "")


def _served(
    engine: Engine | ReplicatedEngine, preparer: Preparer, params: SamplingParams, path: str
) -> Served:
    stats = engine.stats()
    model = ServedModel(
        path=path,
        max_model_len=engine.max_model_len,
        vocab_size=engine.vocab_size,
        num_slots=stats.num_slots,
        max_num_seqs=stats.max_num_seqs,
        eos_token_ids=tuple(sorted(engine.eos_token_ids)),
        default_sampling_params=params,
        tokenizer=preparer.tokenizer,
    )
    return Served(engine, preparer, model)
