"""The former home of `secure_fed.load_run`."""

import warnings

from secure_fed.export.trained import Trained, load_run

__all__ = ["Trained", "load"]

load = load_run

warnings.warn("secure_fed.trained.load is secure_fed.load_run now", DeprecationWarning, stacklevel=2)
