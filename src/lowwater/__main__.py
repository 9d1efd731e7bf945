"""`python -m lowwater` is the `lowwater` command."""

from lowwater.cli import main

if __name__ == "__main__":
    main()
