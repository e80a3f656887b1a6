"""``python -m lightning_seqpar``."""

from lightning_seqpar.cli.main import main

if __name__ == "__main__":
    main()
