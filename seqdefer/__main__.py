"""`python -m seqdefer` is the command `seqdefer`."""

import sys

from seqdefer.cli import main

if __name__ == "__main__":
    sys.exit(main())
