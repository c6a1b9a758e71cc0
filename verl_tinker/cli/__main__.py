"""`python -m verl_tinker.cli`, the same as `verl-tinker`."""

from verl_tinker.cli import main

main()
