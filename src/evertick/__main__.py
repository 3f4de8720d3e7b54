"""`python -m evertick`: the same as `evertick`."""

import sys

from evertick.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
