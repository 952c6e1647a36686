"""`python -m secure_fed` is `secure-fed`."""

import sys

from secure_fed.cli import main

sys.exit(main())
