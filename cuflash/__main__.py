"""``python -m cuflash``: a demo, what there is here, what would run, filling the cache, a self-test."""

import sys

from cuflash.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
