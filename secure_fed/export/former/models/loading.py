"""The former home of `secure_fed.locate`."""

import warnings

from secure_fed.learning.models.locate import locate

__all__ = ["locate"]

warnings.warn("secure_fed.models.loading.locate is secure_fed.locate now", DeprecationWarning, stacklevel=2)
