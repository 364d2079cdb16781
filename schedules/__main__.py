"""``python -m schedules``: see `schedules.cli`."""

import sys

from schedules.cli import main

if __name__ == "__main__":
    sys.exit(main())
