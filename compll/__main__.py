"""`python -m compll`: the command line."""

from compll.tools import main

if __name__ == "__main__":
    main()
