"""What the tests inside the control environment share; the test that starts them gives the variables."""

import os
import sys
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2] / "support")]


@pytest.fixture(scope="session")
def tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(os.environ["HARBOR_TEST_MODEL"])


@pytest.fixture(scope="session")
def renderer(tokenizer):
    from tinker_cookbook.renderers import get_renderer

    return get_renderer("qwen3_instruct", tokenizer)
