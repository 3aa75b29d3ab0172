"""`python -m jaxpruner` is the command `jaxpruner`."""

import sys

from jaxpruner.cli.main import main

if __name__ == '__main__':
    sys.exit(main())
