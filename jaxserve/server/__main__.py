"""`python -m jaxserve.server`: the same as `jaxserve serve`."""

import sys

from jaxserve.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main(["serve", *sys.argv[1:]]))
