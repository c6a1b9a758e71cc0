"""The folder of the tests' helpers on the path, and the environments that some tests run in, made once a session."""

import asyncio
import inspect
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


def pytest_pyfunc_call(pyfuncitem):
    """Asynchronous tests run to their end in a loop of their own."""
    if inspect.iscoroutinefunction(pyfuncitem.obj):
        arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
        asyncio.run(pyfuncitem.obj(**arguments))
        return True
    return None


@pytest.fixture(scope="session")
def sandbox_programs():
    """The folder with `rocklet` and `rock`."""
    from environments import sandbox_bin

    return sandbox_bin()


@pytest.fixture(scope="session")
def control_environment():
    """(python of the control environment, variables that tests in it read)."""
    from environments import control_python, sandbox_bin

    from verl_tinker.models import resolve_model

    variables = {"HARBOR_TEST_MODEL": str(resolve_model("bundled:tiny")), "HARBOR_TEST_SERVER_PYTHON": sys.executable,
                 "HARBOR_TEST_SANDBOX_BIN": str(sandbox_bin())}
    return control_python(), variables
