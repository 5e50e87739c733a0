"""Build hook of the wheel and of editable installs: compiles the C++ kernels where that is possible.

Invariant: an install without a compiler succeeds and says what serves instead.
"""

import importlib.util
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class NativeKernels(BuildHookInterface):
    """Called by hatchling; see `pallas_kernels.native.build`."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compiles into the source tree, and puts the objects in the wheel with its platform's tag."""
        del version  # the same for "standard" and "editable"
        path = Path(self.root) / "pallas_kernels" / "native" / "build.py"
        spec = importlib.util.spec_from_file_location("native_build", path)
        assert spec is not None
        assert spec.loader is not None
        native = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(native)
        try:
            native.build()
        except native.BuildError as error:
            self.app.display_warning(
                f"the C++ kernels were not built, attention on the CPU will run in XLA: {error}"
            )
            return
        build_data["pure_python"] = False
        # No Python headers are involved: one object serves every version of Python.
        tag = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["tag"] = f"py3-none-{tag}"
