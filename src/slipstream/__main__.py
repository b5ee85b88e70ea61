"""`python -m slipstream`, which torchrun needs."""

from slipstream.cli import main

if __name__ == "__main__":
    main()
