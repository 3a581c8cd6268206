"""The command ``torchtether``, as ``python -m torchtether``."""

from torchtether_cli import main

if __name__ == "__main__":
    raise SystemExit(main())
