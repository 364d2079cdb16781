"""``python -m schedules``: see `schedules.cli.main`."""

import sys

from schedules.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
