"""The command `fedbe`, also as `python -m fedbe`."""

import os
import signal


def main() -> None:
    """The entry point. Until the command has something to lose, Ctrl-C ends the process at once.

    A KeyboardInterrupt in the middle of an import, of which there are two seconds, shows somebody else's traceback, is
    lost, or ends in another error.
    """
    usual = signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    if usual is not signal.default_int_handler:  # who started us wants us to be deaf
        signal.signal(signal.SIGINT, usual)
    from fedbe.cli import app

    app.main(usual)


if __name__ == "__main__":
    main()
