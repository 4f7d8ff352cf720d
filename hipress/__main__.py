"""`python -m hipress`: the command line."""

from hipress.tools import main

if __name__ == "__main__":
    main()
