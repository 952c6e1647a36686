"""`python -m secure_fed` is `secure-fed`."""

import sys

from secure_fed.commands.cli import main

sys.exit(main())
