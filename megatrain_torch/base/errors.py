"""The one exception of this package."""
from .._core import MegatrainError

__all__ = ["MegatrainError"]
