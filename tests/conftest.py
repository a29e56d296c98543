"""Tests send interrupts, which a shell ignores for what it starts in the background: they mean something here."""

import signal

signal.signal(signal.SIGINT, signal.default_int_handler)
