"""Where scripts that look inside find the runtime of a streamed model."""
from .runtime import runtime_of

__all__ = ["runtime_of"]
