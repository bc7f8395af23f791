"""What all tests need."""

import signal

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Ctrl-C and a closed terminal work in the processes that tests start, also where whoever started pytest ignores
    them: a shell in the background, or nohup."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    hangup = getattr(signal, "SIGHUP", None)
    if hangup is not None and signal.getsignal(hangup) is signal.SIG_IGN:
        signal.signal(hangup, signal.SIG_DFL)
