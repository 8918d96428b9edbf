"""`python -m fedbe` is `fedbe`."""

from fedbe.cli import main

if __name__ == "__main__":
    main()
