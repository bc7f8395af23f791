"""What all tests need."""

import signal

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Ctrl-C works in the processes that tests start, also where the shell that started pytest ignores it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
