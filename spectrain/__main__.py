"""`python -m spectrain` and the `spectrain` command."""

from spectrain.cli import main

if __name__ == "__main__":
    main()
