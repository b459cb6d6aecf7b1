"""archsearch: hardware-aware draft-model architecture search for speculative decoding."""

__version__ = "0.1.0"
