"""The command `fedbe`, also as `python -m fedbe`."""

import os
import signal


def main() -> None:
    """Run the command line. While modules are imported, Ctrl-C ends the process at once.

    Imports take two seconds. A KeyboardInterrupt during an import can be lost, or show a traceback of another package.
    """
    previous = signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    if previous is not signal.default_int_handler:  # the parent process ignores SIGINT, so we do too
        signal.signal(signal.SIGINT, previous)
    from fedbe.cli import app

    app.main(previous)


if __name__ == "__main__":
    main()
