"""The signals that ask a process to save and end."""

import signal

ALL = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


def heard() -> tuple[signal.Signals, ...]:
  """The signals to handle: all, but for a SIGHUP that nohup lets the process ignore."""
  ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
  return tuple(number for number in ALL if number != signal.SIGHUP or not ignored)
