"""``python -m schedules``: see `schedules.tools.main`."""

import sys

from schedules.tools.main import main

if __name__ == "__main__":
    sys.exit(main())
