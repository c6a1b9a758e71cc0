"""verl-tinker: the Tinker API served by verl workers, vLLM sampling and Ray placement."""

__version__ = "0.1.0"
