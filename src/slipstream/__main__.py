"""`python -m slipstream`, which torchrun needs."""

from slipstream.cli import main

main()
