"""What all tests share: the repository and the support folder on the path, and a key of the form that the SDK demands."""

import os
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent / "support"), str(Path(__file__).parents[1])]
os.environ.setdefault("TINKER_API_KEY", "tml-test")


def pytest_unconfigure():
    """Ends the SDK's thread: clients that are still open beat in it, and native code in it aborts a dying interpreter."""
    holder = sys.modules.get("tinker.lib.internal_client_holder")
    running = holder and holder._internal_client_holder_thread_singleton
    if running and running._thread is not None:
        running._loop.call_soon_threadsafe(running._loop.stop)
        running._thread.join(10)
