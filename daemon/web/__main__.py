"""``python -m kvkeep.daemon.web --meta-path /dev/shm/kvkeep-NAME-meta``: the web process on its own."""

import sys

from kvkeep.daemon.web import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
