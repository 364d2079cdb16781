"""``python -m pipeline``: see `pipeline.cli.main`."""

import sys

from pipeline.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
