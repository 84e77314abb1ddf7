"""`python -m cute_flash`: the command `cute-flash`."""

import sys

from cute_flash.tools.cli import main

if __name__ == "__main__":
    sys.exit(main())
