"""The command ``torchtether``, as ``python -m torchtether``."""

import sys

from torchtether_cli import main

if __name__ == "__main__":
    sys.exit(main())
