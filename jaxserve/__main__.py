"""`python -m jaxserve`: the same as the console script."""

from jaxserve.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
