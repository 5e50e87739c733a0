"""What a start may find of an earlier one: jax's compiled programs, and the lowered ones beside them.

Called by `from_loaded`. Invariant: jax's process-wide settings change only where the caller named a
folder (`compilation_cache_dir`).
"""

import logging
import tempfile
from collections.abc import Sequence
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

from jaxserve.config import EngineConfig
from jaxserve.device.compiled_entries import remove_damaged
from jaxserve.device.program_identity import identity
from jaxserve.device.program_store import ProgramStore
from jaxserve.device.programs import Program
from jaxserve.device.step_shapes import StepShapes
from pallas_kernels.native import load as native

_LOG = logging.getLogger(__name__)
_LOWERED = "programs"  # the folder of lowered ones


def use_compilation_cache(folder: str | Path) -> bool:
    """Asked for by name, so jax's process-wide settings may change.

    Returns:
        Whether something can be kept there; else that was said in a warning.
    """
    folder = Path(folder).expanduser()
    for one in (folder, folder / _LOWERED):
        try:
            one.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=one):
                pass
        except OSError as error:
            _LOG.warning("compilation_cache_dir %s cannot be used: %s", one, error.strerror)
            return False
    remove_damaged(folder)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    compilation_cache.reset_cache()  # jax looks at the folder once, when it first compiles anything
    return True


def program_store(
    config: EngineConfig, shapes: StepShapes, *, can_keep: bool
) -> ProgramStore | None:
    """Where lowered programs are kept; None where no folder was given.

    Args:
        config, shapes: of the engine.
        can_keep: what `use_compilation_cache` said; else programs are only looked for.
    """
    if config.compilation_cache_dir is None or shapes.model.kernel.interpret:
        return None  # an interpreter calls back into this process, which no file can hold
    if native.missing() is None:
        native.register()  # tracing does it too, but kept programs are not traced
    folder = Path(config.compilation_cache_dir).expanduser() / _LOWERED
    return ProgramStore(folder, identity(shapes), native.TARGETS, can_write=can_keep)


def count_programs(programs: Sequence[Program], store: ProgramStore | None) -> str:
    """How many there are, and how many of them an earlier start left behind."""
    if store is not None:
        return f"{len(programs)} programs, {store.count(programs)} of them from an earlier start"
    kept = jax.config.jax_compilation_cache_dir
    return (
        f"{len(programs)} programs{'' if kept else ' (no compilation_cache_dir: at every start)'}"
    )
