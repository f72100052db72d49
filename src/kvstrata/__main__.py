"""`python -m kvstrata` is the `kvstrata` command."""

from __future__ import annotations

import sys

from kvstrata.cli import main

sys.exit(main())
