"""`python -m jaxserve.server`: the same as `jaxserve serve`."""

import sys

from jaxserve.cli.main import main

if __name__ == "__main__":
    sys.argv.insert(1, "serve")
    raise SystemExit(main())
