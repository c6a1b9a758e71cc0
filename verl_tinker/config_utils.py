"""`python -m verl_tinker.config_utils --config FILE` prints the processed preset, as the original's command did.

Owns nothing but the name; `verl_tinker.config` does the work.
"""

from verl_tinker.config import main

if __name__ == "__main__":
    main()
